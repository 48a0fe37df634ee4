"""Shards of a round, and what trainer and samplers send each other of them, in frames.

A round of rollouts is drawn in parts of fixed composition. Log-probs of a completion depend, in
their last bits, on what else is in an engine's steps; with shards they depend on the shard alone,
whichever engine draws it, and however many there are.

On a connection of the role `work` go PROMPTS and COMPLETIONS; on one of the role `weights` versions
of the weights: to another machine a frame for each ARRAY, then WEIGHTS, which says how many there
were; within one the descriptor of memory that has them all, with MAPPED. Nothing is unpickled.
"""

import dataclasses
import mmap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from fornax.config.errors import EngineError
from fornax.config.frames import Frame, Kind
from fornax.tune.rollout.sampler import SamplerStats, SampleSettings
from fornax.tune.rollout.segments import HostWeights, Segment, as_array, map_segment
from fornax.tune.rollout.storage import rollouts_from_arrays, rollouts_to_arrays
from fornax.tune.rollout.types import Completion

__all__ = [
    "Shard",
    "array_frames",
    "arrays_frame",
    "completions_frame",
    "frame_arrays",
    "frame_completions",
    "frame_mapped",
    "frame_shard",
    "frame_weight",
    "mapped_frame",
    "nested",
    "shard_frame",
]

_TUPLES = ("stop", "stop_token_ids")
"""Settings that JSON makes lists of."""


@dataclass(frozen=True, kw_only=True)
class Shard:
    """Prompts that one engine completes together."""

    number: int
    """Which request of the trainer's it is."""
    version: int
    """Of the weights to draw with."""
    prompts: Sequence[Sequence[int]]
    settings: Sequence[SampleSettings]
    """One for each prompt."""
    seeds: Sequence[int]


def shard_frame(shard: Shard) -> Frame:
    """PROMPTS: token ids as int32, one prompt after the other."""
    tokens = [np.asarray(prompt, np.int32) for prompt in shard.prompts]
    kinds = {settings: place for place, settings in enumerate(dict.fromkeys(shard.settings))}
    facts = {
        "number": shard.number,
        "lengths": [len(each) for each in tokens],
        "seeds": list(shard.seeds),
        "settings": [dataclasses.asdict(each) for each in kinds],
        "kinds": [kinds[each] for each in shard.settings],
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
    settings = [
        SampleSettings(**(known | {name: tuple(known[name]) for name in _TUPLES}))
        for known in facts["settings"]
    ]
    counts = {len(tokens), len(facts["seeds"]), len(facts["kinds"])}
    if len(counts) > 1 or ends[-1] * 4 != len(frame.body):
        raise ValueError("prompts, lengths, settings and seeds do not fit")
    return Shard(
        number=int(facts["number"]),
        version=frame.round,
        prompts=[each.tolist() for each in tokens],
        settings=[settings[kind] for kind in facts["kinds"]],
        seeds=[int(seed) for seed in facts["seeds"]],
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


def array_frames(version: int, weights: HostWeights, keep: int) -> Iterator[Frame]:
    """All frames of a version: one an array, then the one that closes it.

    Args:
      version: of the weights.
      weights: them.
      keep: the oldest version that may still be asked for.
    """
    size = 0
    for path, array in weights.items():
        facts = {"path": list(path), "dtype": array.dtype.name, "shape": list(array.shape)}
        body = np.ascontiguousarray(array).reshape(-1).view(np.uint8).data
        size += len(body)
        yield Frame(kind=Kind.ARRAY, round=version, facts=facts, body=body)
    closing = {"arrays": len(weights), "bytes": size, "keep": keep}
    yield Frame(kind=Kind.WEIGHTS, round=version, facts=closing)


def mapped_frame(version: int, segment: Segment, keep: int) -> Frame:
    """MAPPED: what `frame_mapped` makes arrays of, with the segment's descriptor."""
    facts = {
        "layout": list(segment.layout),
        "bytes": len(segment.memory),
        "keep": keep,
    }
    return Frame(kind=Kind.MAPPED, round=version, facts=facts)


def frame_mapped(
    frame: Frame, descriptor: int, known: dict[int, mmap.mmap]
) -> dict[tuple[str | int, ...], np.ndarray]:
    """The arrays of a MAPPED frame; see `map_segment`."""
    return map_segment(descriptor, frame.facts["bytes"], frame.facts["layout"], known)


def frame_weight(frame: Frame) -> tuple[tuple[str | int, ...], np.ndarray]:
    """Path and array of an ARRAY frame; the array lies in the frame's body.

    Raises:
      EngineError: when bytes and shape do not fit, or the type is none of a parameter.
    """
    array = as_array(frame.body, frame.facts)
    if array.nbytes != len(frame.body):
        raise EngineError(f"the array {frame.facts['path']} came in {len(frame.body)} bytes")
    return tuple(frame.facts["path"]), array


def nested(weights: HostWeights) -> dict[str | int, Any]:
    """As nested mappings, which `Sampler.update` takes."""
    found: dict[str | int, Any] = {}
    for path, array in weights.items():
        inner = found
        for part in path[:-1]:
            inner = inner.setdefault(part, {})
        inner[path[-1]] = array
    return found
