"""The programs that the TPU compiler made, or refused for their memory, with their times."""

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import jax
from flax import nnx

from fornax.hlo import ProgramFacts, analyse, parse
from fornax.mesh import Rules, path_name
from fornax.models import DecoderConfig, abstract_decoder
from fornax.plan.artifact import Artifact
from fornax.plan.closed_form import EVEN, expert_text, routed
from fornax.plan.compile import OutOfMemoryError, compile_train
from fornax.plan.compile.memory import largest_buffers, memory_parts
from fornax.plan.cost.estimate import estimate
from fornax.plan.cost.findings import LogicalAxes, unasked, whole_arrays
from fornax.plan.cost.schedule import predict
from fornax.plan.facts import (
    Buffer,
    ClassOfWork,
    Compilation,
    Memory,
    MemoryPart,
    Prediction,
    ProgramReport,
)
from fornax.plan.format import format_bytes, short_operation
from fornax.plan.topology import Topology
from fornax.train import Hosts, TrainConfig
from fornax.train.hosts import data_shards

if TYPE_CHECKING:
    from fornax.diffusion.config import DiffusionConfig

_STATE = ("parameters", "optimizer", "batch")
_LARGEST = 12


def compiled_programs(
    config: TrainConfig,
    topology: Topology,
    programs: Sequence[str],
    expert_load: float = EVEN,
) -> list[ProgramReport]:
    """The programs of a training run as the compiler made them.

    A program that does not fit is reported too; those after it are not compiled. Buffers of experts
    that devices divide have room for the worst routing; their products are counted for
    `expert_load`, as `estimate` takes it.

    Raises:
      MissingCompilerError: when libtpu is not installed.
      CompileError: when the compiler refuses a program for another reason than memory.
      ShardingError, ConfigError: when the run could not be laid out over the chips.
    """
    refused = []
    try:
        artifacts = compile_train(config, topology, programs=programs)
    except OutOfMemoryError as error:
        refused = [_refused(config, topology, error, expert_load)]
        before = tuple(programs)[: tuple(programs).index(error.program)]
        artifacts = compile_train(config, topology, programs=before) if before else []
    return [*(_report(config, topology, one, expert_load) for one in artifacts), *refused]


def compiled_denoiser(config: "DiffusionConfig", topology: Topology) -> ProgramReport:
    """The training step of a denoiser as the compiler made it.

    Raises:
      OutOfMemoryError: it does not fit.
      MissingCompilerError, CompileError, ShardingError, ConfigError: see `compiled_programs`.
    """
    from fornax.plan.compile.diffusion import compile_diffusion
    from fornax.plan.denoiser import planned_task

    artifact = compile_diffusion(config, topology)
    network = nnx.eval_shape(lambda: planned_task(config).build(nnx.Rngs(0)))
    return _program(artifact, topology, config.mesh.resolved_rules(), _axes(network))


def _report(
    config: TrainConfig, topology: Topology, artifact: Artifact, expert_load: float
) -> ProgramReport:
    """One compiled program of a decoder."""
    assert config.model is not None
    model = config.model
    if model.experts is not None and artifact.program != "train_step":  # the others drop no token
        experts = dataclasses.replace(model.experts, capacity_factor=None)
        model = dataclasses.replace(model, experts=experts)
    rules = config.mesh.resolved_rules()
    rows = routed(model, artifact.mesh, rules, expert_load, config.seq_len)
    return _program(
        artifact,
        topology,
        rules,
        logical_axes(config.model),
        share=rows.busiest / rows.room if rows.room else 1.0,
        residual=_residual(config, artifact),
        notes=(expert_text(rows, expert_load),) if rows.devices > 1 else (),
    )


def _program(
    artifact: Artifact,
    topology: Topology,
    rules: Rules,
    logical: LogicalAxes,
    *,
    share: float = 1.0,
    residual: int = 0,
    notes: tuple[str, ...] = (),
) -> ProgramReport:
    """One compiled program, its figures per chip.

    Args:
      artifact: the program.
      topology: the chips.
      rules: of its mesh.
      logical: of its parameters.
      share: of the rows of grouped products, those that are full.
      residual: elements of the residual stream on a device; 0 where that is not known.
      notes: to add.
    """
    facts = analyse(parse(artifact.hlo), dict(artifact.mesh), grouped_rows=share)
    time = predict(facts.schedule, artifact.devices, topology)
    devices = topology.chip.devices
    return ProgramReport(
        name=artifact.program,
        memory=Memory(
            parts=memory_parts(artifact, facts.peak, devices),
            usable=int(topology.chip.usable_bytes),
            host=artifact.memory.host * devices,
            buffers=largest_buffers(artifact, facts.peak),
        ),
        flops=facts.flops * devices,
        bytes=facts.bytes * devices,
        step_seconds=time.step_seconds,
        compute_seconds=time.compute_seconds,
        exposed_seconds=time.exposed_seconds,
        optimistic_seconds=time.optimistic_seconds,
        pessimistic_seconds=time.pessimistic_seconds,
        bound=time.bound,
        work=_work(time, facts, devices),
        collectives=time.collectives,
        findings=(
            *whole_arrays(artifact, logical, rules),
            *unasked(time.collectives, rules, time.step_seconds, residual),
        ),
        compilation=Compilation(
            lower_seconds=artifact.lower_seconds,
            compile_seconds=artifact.compile_seconds,
            code_bytes=artifact.memory.code,
            hlo_bytes=len(artifact.hlo),
            cached=artifact.cached,
            versions={name: version for name, version in artifact.versions.items() if version},
        ),
        notes=tuple(dict.fromkeys((*artifact.notes, *facts.notes, *time.notes, *notes))),
    )


def _work(time: Prediction, facts: ProgramFacts, devices: int) -> tuple[ClassOfWork, ...]:
    """The arithmetic of a category without products is that of its elements."""
    elements: dict[str, float] = {}
    for one in facts.operations:
        elements[one.category] = elements.get(one.category, 0.0) + one.vector_flops * one.count
    return tuple(
        row if row.flops else dataclasses.replace(row, flops=elements.get(row.name, 0.0) * devices)
        for row in time.work
    )


def _residual(config: TrainConfig, artifact: Artifact) -> int:
    """Elements of a micro-batch's residual stream that one shard of the batch holds."""
    if config.model is None:
        return 0
    rules = config.mesh.resolved_rules()
    shards = math.prod(artifact.mesh[axis] for axis in (*rules["batch"], *rules["length"]))
    micro = config.accumulate if artifact.program == "train_step" else 1
    batch = data_shards(artifact.mesh, rules)
    rows = Hosts(multiple=batch * config.accumulate).padded(config.batch_size)
    tokens = rows * config.seq_len // micro // shards
    return tokens * config.model.hidden_size


@functools.cache
def logical_axes(model: DecoderConfig) -> LogicalAxes:
    """Each parameter's path to the logical axes of its dimensions."""
    return _axes(abstract_decoder(model))


def _axes(model: nnx.Module) -> LogicalAxes:
    leaves = jax.tree_util.tree_flatten_with_path(
        nnx.state(model, nnx.Param), is_leaf=lambda leaf: isinstance(leaf, nnx.Variable)
    )[0]
    return {path_name(path): leaf.get_metadata()["axes"] for path, leaf in leaves}


def _refused(
    config: TrainConfig, topology: Topology, error: OutOfMemoryError, expert_load: float
) -> ProgramReport:
    """What is known of a program that does not fit: the program itself, or what the compiler
    says."""
    if error.artifact is not None:
        return _report(config, topology, error.artifact, expert_load)
    return refused_program(
        estimate(config, topology, expert_load=expert_load).step, error, topology
    )


def refused_program(
    guessed: ProgramReport, error: OutOfMemoryError, topology: Topology
) -> ProgramReport:
    """A report with the memory that the compiler note the program needs.

    The state is known exactly. What a training step needs beyond it is divided among the other
    owners as the estimate divides it, and its times are the estimate's; of another program both
    are unknown.

    Args:
      guessed: the estimate of the training step.
      error: what the compiler note.
      topology: the chips.
    """
    devices = topology.chip.devices
    trains = error.program == guessed.name
    memory = Memory(
        parts=_refused_parts(guessed, error.used * devices, trains),
        usable=error.limit * devices,
        host=guessed.memory.host if trains else 0,
        buffers=_refused_buffers(error) or (guessed.memory.buffers if trains else ()),
    )
    note = (
        f"the compiler refuses {error.program}: it needs {format_bytes(error.used)} of a device's "
        f"{format_bytes(error.limit)}. The total is the compiler's; "
    )
    if trains:
        note += "how it divides among owners, and all times, are estimates"
        return dataclasses.replace(guessed, memory=memory, notes=(note, *guessed.notes))
    return ProgramReport(
        name=error.program,
        memory=memory,
        flops=0.0,
        bytes=0.0,
        step_seconds=0.0,
        compute_seconds=0.0,
        exposed_seconds=0.0,
        optimistic_seconds=0.0,
        pessimistic_seconds=0.0,
        bound="memory",
        notes=(f"{note}its time is not known",),
    )


def _refused_parts(guessed: ProgramReport, used: int, trains: bool) -> tuple[MemoryPart, ...]:
    sizes = {part.owner: part.bytes for part in guessed.memory.parts}
    state = sum(sizes[owner] for owner in _STATE if owner in sizes)
    room = max(0, used - state)
    if trains:
        rest = sum(sizes.values()) - state
        factor = room / rest if rest else 0.0
        found = {o: size if o in _STATE else round(size * factor) for o, size in sizes.items()}
    else:
        found = {owner: size if owner in _STATE else 0 for owner, size in sizes.items()}
        found["temporaries"] = room
    return tuple(MemoryPart(owner=owner, bytes=size) for owner, size in found.items())


def _refused_buffers(error: OutOfMemoryError) -> tuple[Buffer, ...]:
    return tuple(
        Buffer(
            name=short_operation(one.op_name) or one.kind,
            owner="",
            shape=one.shape.partition("{")[0],
            bytes=one.bytes,
            unpadded_bytes=one.unpadded_bytes,
            source=one.source,
        )
        for one in error.allocations[:_LARGEST]
    )
