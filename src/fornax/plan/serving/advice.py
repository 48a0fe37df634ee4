"""When an engine does not fit: by how much, and the cheapest changes with which it would."""

import dataclasses
import math
from collections.abc import Iterator

from fornax.config.errors import FornaxError, PlanError
from fornax.llm.config import EngineConfig
from fornax.llm.limits import limits_without_cache
from fornax.plan.format import format_gib
from fornax.plan.serving.engine import (
    Engine,
    describe_engine,
    described_weights,
    divides,
    target_of,
)
from fornax.plan.serving.memory import memory_of
from fornax.plan.serving.model import ServedModel
from fornax.plan.serving_facts import Advice
from fornax.plan.topology import Topology, topology_shapes

_SHOWN = 3
_SHARES = (0.85, 0.8, 0.7, 0.6, 0.5)


def too_large(
    model: ServedModel, config: EngineConfig, topology: Topology, total: int | None = None
) -> PlanError:
    """Say by how much an engine does not fit, with what would make it fit.

    Args:
      model: what is served.
      config: the engine's.
      topology: where.
      total: bytes of a chip that it takes with the cache the engine would make; None when even
        one sequence of full length finds no room.
    """
    chip = topology.chip
    usable = int(chip.usable_bytes)
    target = target_of(topology)
    described = described_weights(model, config, target)
    weights = described.nbytes * chip.devices
    if total is None:
        limits = limits_without_cache(config, model.config, described.dtype, target)
        length, parts = limits.max_model_len, config.tensor_parallel_size
        sequence = limits.sequence_bytes(model.config) // parts * chip.devices
        share = 1.0 if config.kv_cache_memory_bytes else config.gpu_memory_utilization
        given = int(usable * share)
        need = weights + sequence
        what = (
            f"{format_gib(weights)} of weights and {format_gib(sequence)} of cache for one "
            f"sequence of {length:,} tokens are {format_gib(need)}, and the engine gives them "
            f"{share:.0%} of a chip's {format_gib(usable)}: {format_gib(need - given)} too little"
        )
    else:
        what = (
            f"weights, the cache the engine would make, its sampler and its largest step take "
            f"{format_gib(total)} of a chip's {format_gib(usable)}: {format_gib(total - usable)} "
            "too much"
        )
    ways = "; ".join(
        f"{one.flags or one.change} ({one.change})" for one in advise(model, config, topology)
    )
    fixes = (
        f"the cheapest changes that would fit: {ways}"
        if ways
        else ("nothing tried here would fit: quantize the model, or choose a smaller one")
    )
    where = f"{topology.name} with tensor_parallel_size={config.tensor_parallel_size}"
    return PlanError(f"{model.name} does not fit on {where}: {what}; {fixes}")


def advise(model: ServedModel, config: EngineConfig, topology: Topology) -> list[Advice]:
    """The first three changes, from what costs nothing to what costs most, that would fit."""
    found: list[Advice] = []
    kinds: set[str] = set()
    for kind, change, flags, other, place in _changes(model, config, topology):
        if kind in kinds - {"slice"} or len(found) == _SHOWN:
            continue
        total = _total(model, other, place)
        if total is not None:
            kinds.add(kind)
            found.append(Advice(change=change, flags=flags, bytes=total))
    return found


Change = tuple[str, str, str, EngineConfig, Topology]


def _changes(model: ServedModel, config: EngineConfig, topology: Topology) -> Iterator[Change]:
    """(kind, text, flags, config, topology), the cheapest first."""
    replace = dataclasses.replace
    size, most = config.tensor_parallel_size, topology.num_devices // topology.slices
    for more in range(size + 1, most + 1):
        if divides(model.config, more):
            other = replace(config, tensor_parallel_size=more)
            text = f"divided over {more} of the devices that are there"
            yield "tensor", text, f"--tensor-parallel-size {more}", other, topology
    if "float32" in (config.dtype, model.dtype) and config.dtype != "bfloat16":
        other = replace(config, dtype="bfloat16")
        yield "dtype", "half the weights and cache", "--dtype bfloat16", other, topology
    if topology.chip.platform == "cpu" and config.quantization is None and size == 1:
        for quantization, bits in (("int8", 8), ("int4", 4)):
            other = replace(config, quantization=quantization)
            text, flags = f"weights in {bits} bits", f"--quantization {quantization}"
            yield "quantization", text, flags, other, topology
    if config.kv_cache_memory_bytes is None:
        for share in _SHARES:
            if share < config.gpu_memory_utilization:
                other = replace(config, gpu_memory_utilization=share)
                text = "a smaller cache, fewer sequences at once"
                yield "share", text, f"--gpu-memory-utilization {share}", other, topology
    tokens = config.max_num_batched_tokens or 2048
    seqs = config.max_num_seqs or 256
    for fewer in (seqs // 2, seqs // 4, seqs // 8):
        if fewer >= 1:
            batched = max(fewer, tokens // 4)
            other = replace(config, max_num_seqs=fewer, max_num_batched_tokens=batched)
            flags = f"--max-num-seqs {fewer} --max-num-batched-tokens {batched}"
            yield "seqs", "fewer sequences and smaller steps", flags, other, topology
    length = config.max_model_len or model.config.max_position_embeddings
    for power in range(1, 11):
        shorter = length >> power
        if shorter >= 128:
            other = replace(config, max_model_len=shorter)
            text = f"sequences of at most {shorter:,} tokens"
            yield "length", text, f"--max-model-len {shorter}", other, topology
    for place in _larger(topology):
        count = place.num_devices // place.slices
        best = max(n for n in range(1, count + 1) if divides(model.config, n))
        other = replace(config, tensor_parallel_size=best)
        flags = f"--topology {place.name} --tensor-parallel-size {best}"
        yield "slice", f"a larger slice, {place.num_chips} chips", flags, other, place


def _larger(topology: Topology) -> Iterator[Topology]:
    """Larger slices, or more GPUs of a server, the smallest first."""
    chip, count = topology.chip, math.prod(topology.shape)
    if chip.platform == "gpu":
        shapes = [(1, n) for n in (2, 4, 8) if n <= chip.node_chips]
    elif chip.platform == "tpu":
        shapes = [s for s in topology_shapes(chip) if math.prod(s) <= 256]
    else:
        shapes = []
    for shape in shapes:
        if math.prod(shape) > count:
            yield Topology(chip=chip, shape=shape)


def _total(model: ServedModel, config: EngineConfig, topology: Topology) -> int | None:
    """Bytes of a chip, with temporaries in closed form; None when it does not fit."""
    try:
        engine: Engine = describe_engine(model, config, topology)
    except FornaxError:
        return None
    report = memory_of(engine, engine.account.temporaries, 0)
    return report.total if report.fits else None
