"""Every plan that could run, estimated: mesh shapes, micro-batches, remat policies.

Only whole divisions are made: heads, widths, vocabulary and length by their axes, rows by the axes
of the batch. Tensor and context parallelism stay inside a slice (a TPU's torus, a server's GPUs);
slices are data parallel; stages over slices are estimated where the config has them. Of each mesh
the plans stay that no other one beats.
"""

import dataclasses
import functools
import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from fornax.config.errors import ConfigError, FornaxError
from fornax.mesh import MeshConfig
from fornax.models import DecoderConfig, PipelineConfig, takes
from fornax.plan.closed_form import EVEN
from fornax.plan.cost.estimate import Estimate, estimate
from fornax.plan.topology import Topology
from fornax.train import TrainConfig

_MOST_TENSOR = 64
_MOST_CONTEXT = 64
_TOKENS_FOR_CONTEXT = 1024
"""Below this many tokens per device of a row, dividing the length gains nothing."""
_LONG = 32768
"""Tokens of a row from which dividing it is tried though there are rows for every device."""
_MOST_MICRO_BATCHES = 64
_STAGES = (2, 4, 8)
"""Stages of a pipeline that are tried."""
_MICROBATCHES = 4
"""Microbatches of a pipeline that are tried, for each stage: a bubble of a fifth at most."""
_DIVIDES = "does not divide over the mesh"
_MORE = "more micro-batches than memory asks for"
_ROOMY = 0.85
"""A plan that takes no more than this share of the usable memory fits though estimates miss."""
_HOPELESS = 1.15
"""A plan that is estimated at more than this share of the usable memory is given up."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Keep:
    """One choice of what stays for the backward pass."""

    remat: str
    save: tuple[str, ...] = ()
    offload: tuple[str, ...] = ()


_QKV = ("query", "key", "value")
KEEPS: tuple[Keep, ...] = (
    Keep(remat="none"),
    Keep(remat="dots"),
    Keep(remat="dots_no_batch"),
    Keep(remat="names", save=("layer_input", "attention", "attention_out", "mlp_gate", "mlp_up")),
    Keep(remat="names", save=("layer_input", *_QKV, "attention", "attention_out", "mlp_gate")),
    Keep(remat="names", save=("layer_input", *_QKV, "attention", "attention_out")),
    Keep(remat="save_attention"),
    Keep(remat="names", save=("layer_input", "attention")),
    Keep(remat="full"),
    Keep(
        remat="names",
        offload=("layer_input", *_QKV, "attention", "attention_out", "mlp_gate", "mlp_up"),
    ),
    Keep(remat="names", offload=("layer_input", *_QKV, "attention", "attention_out")),
    Keep(remat="names", offload=("layer_input", "attention")),
    Keep(remat="names", save=("attention",), offload=("layer_input",)),
    Keep(remat="names", offload=("layer_input",)),
)
"""From the least recomputation to the most, then those that use the host's memory."""


def rematted(config: TrainConfig, topology: Topology) -> Iterator[TrainConfig]:
    """`config` with each choice of what is kept; the host's memory only where there is another."""
    for keep in KEEPS:
        if keep.offload and topology.chip.platform == "cpu":
            continue
        yield dataclasses.replace(
            config,
            remat=keep.remat,  # pyrefly: ignore[bad-argument-type]
            remat_save=keep.save,
            remat_offload=keep.offload,
        )


def meshes(config: TrainConfig, model: DecoderConfig, topology: Topology) -> Iterator[MeshConfig]:
    """Mesh shapes that use every device, the least divided first.

    A row's length is divided only where it is long, or rows are fewer than devices.
    """
    slices = topology.slices if topology.chip.platform == "tpu" else 1
    inside = topology.num_devices // slices
    close = topology.shape[-1] if topology.chip.platform == "gpu" else inside
    rules = config.mesh.resolved_rules()
    tensors = [
        size
        for size in _divisors(min(close, inside))
        if size <= _MOST_TENSOR and (size == 1 or _splits(model, size)) and inside % size == 0
    ]
    divided = config.seq_len >= _LONG or config.batch_size < topology.num_devices
    contexts = [
        size
        for size in _divisors(inside)
        if size == 1
        or (
            divided
            and takes(model, "context axis")
            and size <= _MOST_CONTEXT
            and config.seq_len % size == 0
            and config.seq_len // size >= _TOKENS_FOR_CONTEXT
            and rules["length"] == ("context",)
        )
    ]
    count = model.experts.num_experts if model.experts else 1
    experts = [size for size in _divisors(inside) if count % size == 0]
    stages = [1]
    if takes(model, "stage axis"):
        stages += [size for size in _STAGES if inside % size == 0 and model.num_layers >= size]
    for tensor, context, expert, stage in itertools.product(tensors, contexts, experts, stages):
        rest, remainder = divmod(inside, tensor * context * expert * stage)
        if remainder or tensor * context > close:
            continue
        # A stage gathers what fsdp divides at each tick: beside stages it takes all or nothing.
        for data in _divisors(rest) if stage == 1 else sorted({1, rest}):
            yield MeshConfig(
                slice=slices,
                data=data,
                stage=stage,
                fsdp=rest // data,
                expert=expert,
                context=context,
                tensor=tensor,
                rules=config.mesh.rules,
            )


def _splits(model: DecoderConfig, tensor: int) -> bool:
    """Whether heads (of keys too), widths and vocabulary divide over tensor shards."""
    sizes = [model.num_heads, model.kv_heads, *model.mlp_widths, model.vocab_size]
    sizes += [] if model.linear is None else [model.linear.sharded_heads]
    sizes += [] if model.global_heads is None else [model.global_heads.num_kv_heads]
    return all(size % tensor == 0 for size in sizes)


def micro_batches(batch_size: int, mesh: MeshConfig) -> Sequence[int]:
    """Numbers of micro-batches that pad a batch no more than one does."""
    rows = -(-batch_size // _data_shards(mesh))
    counts = [count for count in _divisors(rows) if batch_size % count == 0]
    return [count for count in counts if count <= _MOST_MICRO_BATCHES]


def _data_shards(mesh: MeshConfig) -> int:
    return mesh.slice * mesh.data * mesh.stage * mesh.fsdp * mesh.expert


def unpadded(meshes: Iterable[MeshConfig], batch_size: int) -> list[MeshConfig]:
    """The meshes whose devices share a batch evenly; all of them where there is none."""
    found = list(meshes)
    return [mesh for mesh in found if batch_size % _data_shards(mesh) == 0] or found


def _divisors(number: int) -> list[int]:
    return [size for size in range(1, number + 1) if number % size == 0]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Candidates:
    """What is left of the space."""

    fronts: tuple[Estimate, ...]
    """Of each mesh the plans that no other of it beats in both memory and time; fastest first."""
    given: Estimate | None
    given_problem: str | None
    considered: int
    pruned: Mapping[str, int]
    closest: Estimate | None
    """The plan that needs the least memory, fitting or not."""


def find_candidates(
    config: TrainConfig, topology: Topology, *, expert_load: float = EVEN
) -> Candidates:
    """Estimate every combination; `expert_load` as `estimate` takes it.

    Raises:
      ConfigError: for a model that is not given.
    """
    model = config.model
    if model is None:
        raise ConfigError("model is null; describe it, or let init_from be read first")
    guess = functools.partial(estimate, topology=topology, expert_load=expert_load)
    given, problem = _given(config, guess)
    counts: Counter[str] = Counter()
    fronts: list[Estimate] = [] if given is None or not given.memory.fits else [given]
    closest = given
    considered = 0
    for mesh in unpadded(meshes(config, model, topology), config.batch_size):
        fitting: list[Estimate] = []
        for one in _walk(config, mesh, topology, counts, guess):
            considered += 1
            if closest is None or one.memory.total < closest.memory.total:
                closest = one
            if one.memory.total > _HOPELESS * one.memory.usable:
                counts["does not fit in memory"] += 1
            else:
                fitting.append(one)
        front = _undominated(fitting)
        counts["another plan on the same mesh is faster and smaller"] += len(fitting) - len(front)
        fronts += [one for one in front if given is None or one.config != given.config]
    considered += sum(counts[reason] for reason in (_DIVIDES, _MORE))
    fronts.sort(key=lambda one: (one.step_seconds / one.tokens, one.memory.total))
    return Candidates(
        fronts=tuple(fronts),
        given=given,
        given_problem=problem,
        considered=considered,
        pruned={reason: count for reason, count in counts.items() if count},
        closest=closest,
    )


def _given(
    config: TrainConfig, guess: Callable[[TrainConfig], Estimate]
) -> tuple[Estimate | None, str | None]:
    try:
        return guess(config), None
    except FornaxError as error:
        return None, str(error)


def _walk(
    config: TrainConfig,
    mesh: MeshConfig,
    topology: Topology,
    counts: Counter[str],
    guess: Callable[[TrainConfig], Estimate],
) -> Iterator[Estimate]:
    """For each remat policy the fewest micro-batches that fit, and those before.

    More of them save memory and never time.
    """
    numbers = micro_batches(config.batch_size, mesh)
    try:
        there = dataclasses.replace(
            config, mesh=mesh, pipeline=_pipeline(config, mesh), accumulate=1
        )
    except FornaxError:
        counts[_DIVIDES] += len(numbers)
        return
    for kept in rematted(there, topology):
        for place, number in enumerate(numbers):
            try:
                found = guess(dataclasses.replace(kept, accumulate=number))
            except FornaxError:
                counts[_DIVIDES] += 1
                continue
            yield found
            if found.memory.total <= _ROOMY * found.memory.usable:
                counts[_MORE] += len(numbers) - place - 1
                break


def _pipeline(config: TrainConfig, mesh: MeshConfig) -> PipelineConfig:
    """The config's own for its own stages, else one of enough microbatches."""
    if mesh.num_stages() == config.mesh.num_stages():
        return config.pipeline
    if mesh.stage == 1:
        return PipelineConfig()
    return PipelineConfig(microbatches=_MICROBATCHES * mesh.stage)


def _undominated(found: list[Estimate]) -> list[Estimate]:
    """Those that no other beats in memory and time both."""
    front: list[Estimate] = []
    for one in sorted(found, key=lambda e: (e.step_seconds, e.memory.total)):
        if not front or one.memory.total < front[-1].memory.total:
            front.append(one)
    return front
