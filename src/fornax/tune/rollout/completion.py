"""A completion as training needs it: tokens, by whom, how likely, under which weights.

Legend: T tokens of a completion.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

__all__ = ["Completion", "Status", "rollouts_from_arrays", "rollouts_to_arrays"]

Status = Literal["ok", "failed", "truncated"]
"""Whether a rollout ended by itself, could not be finished, or ran out of tokens or turns."""

_STATUS: Mapping[str, Status] = {
    "length": "truncated",
    "turns": "truncated",
    "error": "failed",
    "abort": "failed",
}

_DTYPES = {"tokens": np.int32, "logprobs": np.float32, "versions": np.int32, "mask": np.int8}


@dataclass(frozen=True, eq=False, slots=True)
class Completion:
    """What follows a prompt."""

    tokens: np.ndarray
    """int32 [T], the end token included."""
    logprobs: np.ndarray
    """float32 [T]: of the distribution that the token was drawn from; 0 where `mask` is 0."""
    versions: np.ndarray
    """int32 [T]: version of the weights that made the token; -1 where `mask` is 0."""
    mask: np.ndarray
    """int8 [T]: 1 for the model's own tokens, 0 for those of tools and environments."""
    finish_reason: str
    """`stop` (end token or stop text), `length` (no room for more), and with environments `done`,
    `turns` (no more of them) or `error` (the environment failed)."""
    text: str
    """Without special tokens; of several turns, the model's own text alone."""
    seed: int
    """That it was drawn with."""

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def status(self) -> Status:
        """What `finish_reason` means for training; nothing is learned from what failed."""
        return _STATUS.get(self.finish_reason, "ok")

    @property
    def truncated(self) -> bool:
        """Whether it ended for want of room, in tokens or turns, rather than by itself."""
        return self.status == "truncated"


def rollouts_to_arrays(rollouts: Sequence[Sequence[Completion]]) -> dict[str, np.ndarray]:
    """Completions of several prompts as a few arrays, for a checkpoint.

    Returns:
      Concatenated `tokens`, `logprobs`, `versions`, `mask`; `lengths` int32 of each completion;
      `counts` int32, completions of each prompt; `notes` uint8, JSON of the rest.
    """
    flat = [completion for group in rollouts for completion in group]
    notes = [(each.finish_reason, each.text, each.seed) for each in flat]
    return {
        name: np.concatenate([getattr(each, name) for each in flat] or [np.empty(0)]).astype(dtype)
        for name, dtype in _DTYPES.items()
    } | {
        "lengths": np.array([len(each) for each in flat], np.int32),
        "counts": np.array([len(group) for group in rollouts], np.int32),
        "notes": np.frombuffer(json.dumps(notes).encode(), np.uint8).copy(),
    }


def rollouts_from_arrays(arrays: Mapping[str, np.ndarray]) -> list[list[Completion]]:
    """What `rollouts_to_arrays` took apart."""
    stops = np.cumsum(arrays["lengths"])
    notes = json.loads(np.asarray(arrays["notes"], np.uint8).tobytes())
    flat = []
    for length, stop, note in zip(arrays["lengths"], stops, notes, strict=True):
        parts = {
            name: np.asarray(arrays[name], dtype)[stop - length : stop].copy()
            for name, dtype in _DTYPES.items()
        }
        flat.append(Completion(**parts, finish_reason=note[0], text=note[1], seed=note[2]))
    ends = np.cumsum(arrays["counts"])
    return [flat[stop - n : stop] for n, stop in zip(arrays["counts"], ends, strict=True)]
