"""What to change when a plan does not fit: each change tried by estimate, the cheapest first."""

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from fornax.config import FornaxError
from fornax.optim import AdamW
from fornax.plan.closed_form import EVEN
from fornax.plan.cost.estimate import Estimate, estimate
from fornax.plan.facts import Advice
from fornax.plan.format import format_count
from fornax.plan.topology import Topology, topology_shapes
from fornax.train import TrainConfig

__all__ = ["advise"]

_REMAT = ("none", "dots", "dots_no_batch", "save_attention", "full")
"""From the most that is kept to the least."""
_OFFLOADED = ("layer_input",)
_PARALLEL = (2, 4, 8, 16)
_SPLITS = (2, 4, 8, 16, 32, 64)


@dataclass(frozen=True)
class _Change:
    """A change of one part of the config."""

    part: str
    """Two changes of one part exclude each other."""
    text: str
    flags: str
    config: TrainConfig


def advise(
    config: TrainConfig,
    topology: Topology,
    *,
    scale: float = 1.0,
    most: int = 3,
    expert_load: float = EVEN,
) -> tuple[Advice, ...]:
    """The changes with which `config` would fit and lose the least time, by estimate.

    Single changes, of different parts of the config first; where fewer than `most` fit, pairs of
    them; then the smallest slice of the same chip on which the config fits as it is.

    Args:
      config: what does not fit.
      topology: where.
      scale: how many times larger the compiler's figure was than the estimate's.
      most: how many to name.
      expert_load: as `estimate` takes it.
    """
    guess = functools.partial(_try, expert_load)
    singles = list(_changes(config, topology))
    found = [(change, seen) for change in singles if (seen := guess(change.config, topology))]
    fitting = [one for one in found if _fits(one[1], scale)]
    if len(fitting) < most:
        fitting += _pairs(config, topology, found, scale, guess)
    fitting.sort(key=lambda one: _rate(one[1]))
    chosen = _one_a_part(_worthwhile(fitting))[:most]
    advice = [_advice(change, seen, scale) for change, seen in chosen]
    if len(advice) < most:
        advice += _larger(config, topology, scale, guess)
    return tuple(advice[:most])


def _worthwhile(found: Sequence[tuple[_Change, Estimate]]) -> list[tuple[_Change, Estimate]]:
    """Without changes that, beside a faster one of the same part, save no memory."""
    least: dict[str, int] = {}
    kept = []
    for change, seen in found:
        if seen.memory.total < least.get(change.part, seen.memory.total + 1):
            least[change.part] = seen.memory.total
            kept.append((change, seen))
    return kept


def _one_a_part(found: Sequence[tuple[_Change, Estimate]]) -> list[tuple[_Change, Estimate]]:
    """The first change of every part, then the others."""
    first: dict[str, tuple[_Change, Estimate]] = {}
    for one in found:
        first.setdefault(one[0].part, one)
    return [*first.values(), *(one for one in found if one not in first.values())]


def _fits(seen: Estimate, scale: float) -> bool:
    return seen.memory.total * scale <= seen.memory.usable


def _rate(seen: Estimate) -> float:
    """Seconds per token: a change of the batch must not look cheap."""
    return seen.step_seconds / seen.tokens


_Guess = Callable[[TrainConfig, Topology], Estimate | None]


def _try(expert_load: float, config: TrainConfig, topology: Topology) -> Estimate | None:
    try:
        return estimate(config, topology, expert_load=expert_load)
    except FornaxError:
        return None  # this change cannot run here, so it is not suggested


def _advice(change: _Change, seen: Estimate, scale: float) -> Advice:
    return Advice(
        change=change.text,
        flags=change.flags,
        total_bytes=round(seen.memory.total * scale),
        step_seconds=seen.step_seconds,
    )


def _changes(config: TrainConfig, topology: Topology) -> Iterator[_Change]:
    yield from _more_remat(config, topology)
    yield from _smaller_batches(config)
    yield from _other_meshes(config, topology)
    yield from _smaller_types(config)


def _change(part: str, text: str, flags: str, config: TrainConfig, **fields: Any) -> _Change:
    return _Change(part, text, flags, dataclasses.replace(config, **fields))


def _more_remat(config: TrainConfig, topology: Topology) -> Iterator[_Change]:
    clean = dataclasses.replace(config, remat="full", remat_save=(), remat_offload=())
    known = _REMAT.index(config.remat) if config.remat in _REMAT else 0
    for policy in _REMAT[known + 1 :]:
        text = f"recompute more ({policy})"
        yield _change("remat", text, f"--remat {policy}", clean, remat=policy)
    if topology.chip.platform != "cpu":
        text = "keep only each layer's input, in the host's memory"
        flags = f"--remat names --remat-offload {' '.join(_OFFLOADED)}"
        yield _change("remat", text, flags, clean, remat="names", remat_offload=_OFFLOADED)


def _smaller_batches(config: TrainConfig) -> Iterator[_Change]:
    stages = config.mesh.num_stages()
    together = config.pipeline.count(stages) if stages > 1 else 1
    for factor in _SPLITS:
        micro = config.accumulate * factor
        if config.batch_size % (micro * together) == 0:
            text = f"accumulate over {micro} micro-batches"
            yield _change("batch", text, f"--accumulate {micro}", config, accumulate=micro)


def _other_meshes(config: TrainConfig, topology: Topology) -> Iterator[_Change]:
    try:
        sizes = config.mesh.resolved_sizes(topology.num_devices)
    except FornaxError:
        return
    if sizes["data"] > 1:
        whole = sizes["fsdp"] * sizes["data"]
        text = f"shard the state over {whole} instead of {sizes['fsdp']} devices"
        yield _mesh(config, text, data=1, fsdp=whole)
    parallel = (
        "tensor",
        "context",
        *(("expert",) if config.model and config.model.experts else ()),
    )
    for axis, factor in itertools.product(parallel, _PARALLEL):
        if sizes["fsdp"] % factor == 0 and sizes["fsdp"] > factor:
            wider = sizes[axis] * factor
            text = f"{axis} parallelism over {wider} devices"
            yield _mesh(config, text, **{axis: wider, "fsdp": sizes["fsdp"] // factor})


def _mesh(config: TrainConfig, text: str, **sizes: Any) -> _Change:
    flags = " ".join(f"--mesh.{axis} {size}" for axis, size in sizes.items())
    mesh = dataclasses.replace(config.mesh, **sizes)
    return _change("mesh", text, flags, config, mesh=mesh)


def _smaller_types(config: TrainConfig) -> Iterator[_Change]:
    optimizer, dtypes = config.optim.optimizer, config.dtypes
    if dtypes.params == "float32" and isinstance(optimizer, AdamW) and optimizer.mu_dtype is None:
        halved = dataclasses.replace(optimizer, mu_dtype="bfloat16")
        optim = dataclasses.replace(config.optim, optimizer=halved)
        text = "keep Adam's first moment in bfloat16"
        yield _change("moments", text, "--optim.optimizer.mu-dtype bfloat16", config, optim=optim)
    if dtypes.compute == "float32":
        smaller = dataclasses.replace(dtypes, compute="bfloat16")
        flags = "--dtypes.compute bfloat16"
        yield _change("compute", "compute in bfloat16", flags, config, dtypes=smaller)
    if dtypes.params == "float32":
        smaller = dataclasses.replace(dtypes, params="bfloat16")
        flags = "--dtypes.params bfloat16"
        yield _change("params", "keep parameters in bfloat16", flags, config, dtypes=smaller)


def _pairs(
    config: TrainConfig,
    topology: Topology,
    found: Sequence[tuple[_Change, Estimate]],
    scale: float,
    guess: _Guess,
) -> list[tuple[_Change, Estimate]]:
    """Two changes at once, of those that help by themselves but not enough."""
    helping = [one for one in found if not _fits(one[1], scale)]
    helping.sort(key=lambda one: one[1].memory.total)
    fitting = []
    for (first, _), (second, _) in itertools.combinations(helping[:10], 2):
        if first.part == second.part:
            continue
        both = _Change(
            f"{first.part}+{second.part}",
            f"{first.text} and {second.text}",
            f"{first.flags} {second.flags}",
            _merge(config, first.config, second.config),
        )
        seen = guess(both.config, topology)
        if seen and _fits(seen, scale):
            fitting.append((both, seen))
    return fitting


def _merge(base: TrainConfig, first: TrainConfig, second: TrainConfig) -> TrainConfig:
    """The changes of both; they touch different fields, except that dtypes are taken apart."""
    changed = {
        field.name: getattr(second, field.name)
        for field in dataclasses.fields(TrainConfig)
        if getattr(second, field.name) != getattr(base, field.name)
    }
    if "dtypes" in changed:
        one, other = first.dtypes, second.dtypes
        changed["dtypes"] = dataclasses.replace(
            base.dtypes,
            params=one.params if one.params != base.dtypes.params else other.params,
            compute=one.compute if one.compute != base.dtypes.compute else other.compute,
        )
    return dataclasses.replace(first, **changed)


def _larger(
    config: TrainConfig, topology: Topology, scale: float, guess: _Guess
) -> Iterator[Advice]:
    """The smallest larger slice, or number of nodes, on which the config fits as it is."""
    for larger in _grow(topology):
        seen = guess(config, larger)
        if seen and _fits(seen, scale):
            yield Advice(
                change=f"{format_count(larger.num_chips)} chips, {larger.name}",
                flags=f"--topology {larger.name}",
                total_bytes=round(seen.memory.total * scale),
                step_seconds=seen.step_seconds,
            )
            return


def _grow(topology: Topology) -> Iterator[Topology]:
    chip = topology.chip
    if chip.platform == "tpu":
        chips = topology.num_chips // topology.slices
        shapes: list[tuple[int, ...]] = []
        for shape in topology_shapes(chip):
            size = math.prod(shape)
            if size > chips and (not shapes or size >= 2 * math.prod(shapes[-1])):
                shapes.append(shape)
        yield from (dataclasses.replace(topology, shape=shape) for shape in shapes)
        widest = shapes[-1] if shapes else topology.shape
        for slices in (2, 4, 8):
            yield dataclasses.replace(topology, shape=widest, slices=topology.slices * slices)
    elif chip.platform == "gpu":
        nodes, gpus = topology.shape
        for factor in (2, 4, 8, 16, 32, 64):
            grown = min(chip.node_chips, gpus * factor)
            yield dataclasses.replace(topology, shape=(nodes * gpus * factor // grown, grown))
