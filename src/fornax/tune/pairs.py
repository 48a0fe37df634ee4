"""Streams of pairs of completions, with the reference's log-probs beside them.

Legend: N examples of a split, P rows of a batch, T tokens of a row, K kept positions.
"""

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from fornax.mesh import make_mesh
from fornax.train.task import Batches, Hosts
from fornax.tune.completions import completion_logprobs, keep_positions, kept_room
from fornax.tune.config import TuneConfig
from fornax.tune.configs.preference import KTOConfig, PreferenceConfig
from fornax.tune.data import Feed, Loaded, PairTokens, preference_batches
from fornax.tune.policy import Origin, Policy, read_origin
from fornax.tune.policy import policy as policy_of
from fornax.tune.reference import (
    Key,
    data_fingerprint,
    for_each_example,
    stored,
    weights_fingerprint,
)
from fornax.tune.splits import feed_of
from fornax.tune.tokens import check_same_tokens

__all__ = ["Kept", "PairRows", "Reference", "reference_of"]


class Kept:
    """A stream whose rows name the positions that the vocabulary projection needs.

    How many it names depends on the length of the rows alone, so that there is one program for
    each length.
    """

    def __init__(self, inner: Any, longest: int):
        """Read from `inner`, whose completions have `longest` tokens at most."""
        self._inner = inner
        self._longest = longest

    def __iter__(self) -> Iterator[dict[str, np.ndarray]]:
        """The stream itself."""
        return self

    def __next__(self) -> dict[str, np.ndarray]:
        """The next rows, with keep int32 [..., K] where that leaves positions out."""
        rows = dict(next(self._inner))
        length = rows["tokens"].shape[-1]
        room = kept_room(self._longest, length)
        if room < length:
            rows["keep"] = keep_positions(rows["loss_weights"], room)
        return rows

    def state(self) -> dict[int, dict]:
        """The position."""
        return self._inner.state()

    def restore(self, state: dict[int, dict], *, allow_changes: bool = False) -> None:
        """Go to a position."""
        self._inner.restore(state, allow_changes=allow_changes)

    def close(self) -> None:
        """Stop reading ahead."""
        self._inner.close()

    def batches_per_epoch(self) -> float:
        """Batches of one pass."""
        return self._inner.batches_per_epoch()


@dataclass(frozen=True, kw_only=True)
class Reference:
    """Whose log-probs are stored, and where."""

    policy: Policy
    """The reference's weights, as they are loaded."""
    path: str
    """Where they are from."""
    out: Path
    """The run directory."""


def reference_of(
    config: PreferenceConfig | KTOConfig, origin: Origin, policy: Policy, out: Path
) -> Reference:
    """The reference whose log-probs are stored: the policy as it starts, or `reference_model`.

    Raises:
      ConfigError: when that model's tokens are not the policy's.
    """
    if config.reference_model is None:
        return Reference(policy=policy, path=config.model, out=out)
    model = config.reference_model
    other = dataclasses.replace(config, model=model, lora=None, reference_model=None)
    theirs = read_origin(other)
    check_same_tokens(
        theirs.tokenizer,
        origin.tokenizer,
        names=("reference_model", model),
        others=("model", config.model),
    )
    return Reference(policy=policy_of(other, theirs), path=model, out=out)


@dataclass(kw_only=True)
class PairRows:
    """`Task.batches` of pairs."""

    config: TuneConfig
    splits: Mapping[str, Loaded[PairTokens]]
    """`train`, and `eval` where there is one."""
    columns: Mapping[str, Mapping[str, np.ndarray]] = field(default_factory=dict)
    """For each split, further numbers of its examples, by name, [N, ...]."""
    reference: Reference | None = None
    """Whose log-probs each row brings as `ref_logps` [P, 2]; None: none."""
    _logps: dict[str, np.ndarray] = field(default_factory=dict)

    def __call__(self, split: str, hosts: Hosts) -> Batches:
        """A stream of a split."""
        if self.reference is not None and not self._logps:
            self._logps = self._compute(self.reference, hosts)
        columns = dict(self.columns.get(split, {}))
        if self._logps:
            columns["ref_logps"] = self._logps[split]
        return self._open(split, feed_of(self.config, hosts, train=split == "train"), columns)

    def _open(self, split: str, feed: Feed, columns: Mapping[str, np.ndarray]) -> Any:
        loaded = self.splits[split]
        stream = preference_batches(loaded, feed, self.config.max_length, columns=columns)
        return Kept(stream, max(_trained(pair) for pair in loaded.items))

    def _compute(self, reference: Reference, hosts: Hosts) -> dict[str, np.ndarray]:
        """Log-probs of every example of every split: from disk, or by one pass of the model."""
        config = self.config
        mesh, rules = make_mesh(config.mesh), config.mesh.resolved_rules()
        weights = weights_fingerprint(reference.path)
        models: list[Any] = []

        def compute(split: str) -> np.ndarray:
            if not models:
                models.append(reference.policy.pretrained(mesh, rules))
            return for_each_example(
                models[0],
                lambda model, batch: completion_logprobs(model, batch).logps,
                self._open(split, feed_of(config, hosts, train=False), {}),
                len(self.splits[split].items),
                hosts=hosts,
                mesh=mesh,
                rules=rules,
            )

        found = {}
        for split, loaded in self.splits.items():
            key = Key(weights=weights, data=_fingerprint(loaded), compute=_how(config))
            found[split] = stored(reference.out, split, key, lambda split=split: compute(split))
        return found


def _trained(pair: PairTokens) -> int:
    return max(pair.chosen.trained, pair.rejected.trained)


def _fingerprint(loaded: Loaded[PairTokens]) -> str:
    sides = (side for pair in loaded.items for side in (pair.chosen, pair.rejected))
    return data_fingerprint(array for side in sides for array in (side.tokens, side.mask))


def _how(config: TuneConfig) -> str:
    quantized = None if config.lora is None else config.lora.quantize
    return f"params {config.dtypes.params}, compute {config.dtypes.compute}, base {quantized}"
