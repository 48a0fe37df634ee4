"""Shards of a round, and what trainer and samplers send each other of them, in frames.

A round of rollouts is drawn in parts of fixed composition. Log-probs of a completion depend, in
their last bits, on what else is in an engine's steps; with shards they depend on the shard alone,
whichever engine draws it, and however many there are.

On a connection of the role `work` go PROMPTS and COMPLETIONS; on one of the role `weights` a frame
for each ARRAY of a version, then WEIGHTS, which says how many there were. Nothing is unpickled.
"""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

from fornax.config.errors import EngineError
from fornax.config.frames import Frame, Kind
from fornax.tune.rollout.sampler import SamplerStats, SampleSettings
from fornax.tune.rollout.storage import rollouts_from_arrays, rollouts_to_arrays
from fornax.tune.rollout.types import Completion

__all__ = [
    "HostWeights",
    "Shard",
    "array_frames",
    "arrays_frame",
    "completions_frame",
    "frame_arrays",
    "frame_completions",
    "frame_shard",
    "frame_weight",
    "nested",
    "shard_frame",
]

HostWeights = Mapping[tuple[str | int, ...], np.ndarray]
"""Path to array of all parameters of a version."""


@dataclass(frozen=True, kw_only=True)
class Shard:
    """Prompts that one engine completes together."""

    number: int
    """Which request of the trainer's it is."""
    version: int
    """Of the weights to draw with."""
    prompts: Sequence[Sequence[int]]
    seeds: Sequence[int]
    settings: SampleSettings


def shard_frame(shard: Shard) -> Frame:
    """PROMPTS: token ids as int32, one prompt after the other."""
    tokens = [np.asarray(prompt, np.int32) for prompt in shard.prompts]
    facts = {
        "number": shard.number,
        "lengths": [len(each) for each in tokens],
        "seeds": list(shard.seeds),
        "settings": dataclasses.asdict(shard.settings),
    }
    body = np.concatenate([np.zeros(0, np.int32), *tokens]).tobytes()
    return Frame(kind=Kind.PROMPTS, round=shard.version, facts=facts, body=body)


def frame_shard(frame: Frame) -> Shard:
    """What `shard_frame` wrote.

    Raises:
      KeyError, TypeError, ValueError: when it did not.
    """
    facts = frame.facts
    ends = np.cumsum(facts["lengths"])
    tokens = np.split(np.frombuffer(frame.body, np.int32), ends[:-1])
    known = dict(facts["settings"])
    known |= {name: tuple(known[name]) for name in ("stop", "stop_token_ids")}
    if len(facts["seeds"]) != len(tokens) or ends[-1] * 4 != len(frame.body):
        raise ValueError("prompts, lengths and seeds do not fit")
    return Shard(
        number=int(facts["number"]),
        version=frame.round,
        prompts=[each.tolist() for each in tokens],
        seeds=[int(seed) for seed in facts["seeds"]],
        settings=SampleSettings(**known),
    )


def arrays_frame(kind: Kind, arrays: Mapping[str, np.ndarray], **facts: object) -> Frame:
    """A few arrays in one frame: names, types and shapes in its facts, then all their bytes."""
    given = {name: np.ascontiguousarray(array) for name, array in arrays.items()}
    table = {name: [array.dtype.str, list(array.shape)] for name, array in given.items()}
    body = b"".join(array.tobytes() for array in given.values())
    return Frame(kind=kind, facts={**facts, "arrays": table}, body=body)


def frame_arrays(frame: Frame) -> dict[str, np.ndarray]:
    """What `arrays_frame` wrote; the arrays lie in the frame's body."""
    found, offset = {}, 0
    for name, (dtype, shape) in frame.facts["arrays"].items():
        count = int(np.prod(shape, dtype=np.int64))
        array = np.frombuffer(frame.body, np.dtype(dtype), count, offset)
        found[name] = array.reshape(shape)
        offset += array.nbytes
    return found


def completions_frame(
    number: int, drawn: Sequence[Sequence[Completion]], stats: SamplerStats
) -> Frame:
    """COMPLETIONS: what answers shard `number`, and what drawing it took."""
    facts = {"number": number, "stats": dataclasses.asdict(stats)}
    return arrays_frame(Kind.COMPLETIONS, rollouts_to_arrays(drawn), **facts)


def frame_completions(frame: Frame) -> tuple[list[list[Completion]], SamplerStats]:
    """What `completions_frame` wrote."""
    return rollouts_from_arrays(frame_arrays(frame)), SamplerStats(**frame.facts["stats"])


def array_frames(version: int, weights: HostWeights) -> Iterator[Frame]:
    """All frames of a version: one an array, then the one that closes it."""
    size = 0
    for path, array in weights.items():
        facts = {"path": list(path), "dtype": array.dtype.name, "shape": list(array.shape)}
        body = np.ascontiguousarray(array).reshape(-1).view(np.uint8).data
        size += len(body)
        yield Frame(kind=Kind.ARRAY, round=version, facts=facts, body=body)
    closing = {"arrays": len(weights), "bytes": size}
    yield Frame(kind=Kind.WEIGHTS, round=version, facts=closing)


def frame_weight(frame: Frame) -> tuple[tuple[str | int, ...], np.ndarray]:
    """Path and array of an ARRAY frame; the array lies in the frame's body.

    Raises:
      EngineError: when bytes and shape do not fit, or the type is none of a parameter.
    """
    facts = frame.facts
    path, shape = tuple(facts["path"]), tuple(map(int, facts["shape"]))
    try:
        dtype = np.dtype(getattr(ml_dtypes, facts["dtype"], facts["dtype"]))
        array = np.frombuffer(frame.body, dtype).reshape(shape)
    except (TypeError, ValueError, AttributeError) as error:
        raise EngineError(
            f"the array {path} came as {facts['dtype']} {shape} in {len(frame.body)} bytes, which "
            f"do not fit ({error}); give trainer and samplers the same Fornax"
        ) from error
    return path, array


def nested(weights: HostWeights) -> dict[str | int, Any]:
    """As nested mappings, which `Sampler.update` takes."""
    found: dict[str | int, Any] = {}
    for path, array in weights.items():
        inner = found
        for part in path[:-1]:
            inner = inner.setdefault(part, {})
        inner[path[-1]] = array
    return found
