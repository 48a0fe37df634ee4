"""`samples.jsonl`: every completion a run trained on, with its rewards, in the run directory."""

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from fornax.train.jsonl import JsonLines, keep_json_lines
from fornax.tune.rl.credit import Credit
from fornax.tune.rl.rollouts import Collected

__all__ = ["SamplesFile"]


class SamplesFile:
    """Appends the samples of each round; a resumed run first drops those it will make again."""

    def __init__(self, path: Path, decode: Callable[[Sequence[int]], str]) -> None:
        """Write to `path`, prompts as the text that `decode` makes of tokens."""
        self._path = path
        self._decode = decode
        self._file: JsonLines | None = None

    def keep(self, rounds: int) -> None:
        """Keep the samples of the first `rounds` rounds only."""
        self.close()
        keep_json_lines(self._path, lambda record: record.get("round", rounds) < rounds)

    def write(self, step: int, collected: Collected, credit: Credit) -> None:
        """Append a round.

        Args:
          step: the first optimizer step that trains on it, from 1.
          collected: the completions.
          credit: their advantages.
        """
        if self._file is None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._file = JsonLines(self._path)
        for number, rollout in enumerate(collected.rollouts):
            drawn = rollout.mask.astype(bool)
            advantages = credit.advantages[number][drawn]
            versions = rollout.versions[drawn]
            record: dict[str, Any] = {
                "step": step,
                "round": collected.number,
                "group": rollout.group,
                "where": rollout.where,
                "prompt": self._decode(rollout.prompt.tolist()),
                "completion": rollout.text
                if drawn.all()
                else self._decode(rollout.tokens.tolist()),
                "status": rollout.status,
                **({"error": rollout.error} if rollout.failed else {}),
                "reward": rollout.reward,
                "rewards": {k: v if math.isfinite(v) else None for k, v in rollout.parts.items()},
                "trained_reward": credit.rewards[number],
                "advantage": float(advantages.mean()) if drawn.any() else 0.0,
                "tokens": rollout.drawn,
                "finish_reason": rollout.finish_reason,
                "versions": [int(versions.min()), int(versions.max())] if drawn.any() else [],
            }
            self._file.write(record)

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()
            self._file = None
