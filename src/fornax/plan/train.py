"""The plan of a training run: compiled where its compiler is, from closed forms elsewhere."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Literal

from flax import nnx

from fornax.config import ConfigError
from fornax.config.text import write_flow
from fornax.mesh import MeshConfig, check_use, fit_mesh
from fornax.models import abstract_decoder, check_model, flops_per_token, num_parameters
from fornax.plan.advice import advise
from fornax.plan.closed_form import EVEN, kernel_choices
from fornax.plan.cost.estimate import estimate
from fornax.plan.cost.summary import describe_hardware, describe_speed
from fornax.plan.facts import Option, Plan, ProgramReport, Run
from fornax.plan.format import format_bytes
from fornax.plan.search.search import (
    Candidate,
    Measured,
    nothing_fits,
    search,
    search_text,
)
from fornax.plan.topology import Topology
from fornax.train import TrainConfig, with_model

__all__ = ["plan_train", "search_train"]


def plan_train(
    config: TrainConfig,
    topology: Topology,
    *,
    name: str = "config",
    predicted: bool = False,
    programs: Sequence[str] | None = None,
    expert_load: float = EVEN,
) -> Plan:
    """Plan a training run on a topology.

    TPU programs are compiled by the TPU compiler; the plan of a GPU or CPU, and of anything with
    `predicted`, comes from closed forms.

    Args:
      config: the run; a model that `init_from` names is read from there.
      topology: the chips.
      name: what the plan is called.
      predicted: compile nothing.
      programs: `train_step` and `eval_step`, or one of them; None for the first, and the second
        where the config evaluates. Closed forms know the training step only.
      expert_load: rows of the busiest device over the mean, where `mesh.expert` divides experts.

    Raises:
      ShardingError: when the mesh, the model or the batch does not divide over the topology.
      ConfigError: when the compiler is missing, or refuses the program for another reason than
        memory; for a DiLoCo run, of which only one slice can be planned.
    """
    if config.diloco is not None:
        raise ConfigError(
            "diloco is set, and a plan is of one group without exchanges between slices; plan one "
            "slice: leave diloco out, and set batch_size to the rows of one slice"
        )
    config = fitted(with_model(config), topology)
    if predicted or topology.chip.platform != "tpu":
        plan = _predicted(config, topology, name, programs, expert_load)
    else:
        plan = _compiled(config, topology, name, programs or programs_of(config), expert_load)
    if plan.main.memory.fits:
        return plan
    guess = estimate(config, topology, expert_load=expert_load).memory.total
    scale = plan.main.memory.total / guess if plan.origin == "compiled" and guess else 1.0
    return dataclasses.replace(
        plan, advice=advise(config, topology, scale=max(1.0, scale), expert_load=expert_load)
    )


def fitted(config: TrainConfig, topology: Topology) -> TrainConfig:
    """The config with the mesh that the trainer would make of it."""
    check_use(config.mesh, "plan")
    if config.model is None:
        return config
    check_model(config.model, "plan")
    shapes = nnx.state(abstract_decoder(config.model))
    mesh = fit_mesh(config.mesh, shapes, topology.num_devices)
    return dataclasses.replace(config, mesh=mesh)


def search_train(
    config: TrainConfig,
    topology: Topology,
    *,
    name: str = "config",
    predicted: bool = False,
    programs: tuple[str, ...] | None = None,
    budget: int = 3,
    expert_load: float = EVEN,
) -> tuple[Plan, TrainConfig]:
    """Search mesh, remat policy and accumulation; plan the best.

    Args:
      config: the run; its model, optimizer, dtypes, length and batch size stay.
      topology: the chips.
      name: what the plan is called.
      predicted: compile nothing.
      programs: as in `plan_train`.
      budget: most compilations of the search.
      expert_load: as in `plan_train`.

    Returns:
      The plan of the best configuration, with all that were found, and that configuration.

    Raises:
      ConfigError: when nothing that was looked at fits.
    """
    config = fitted(with_model(config), topology)
    compiles = topology.chip.platform == "tpu" and not predicted and budget > 0
    result = search(
        config,
        topology,
        budget=budget if compiles else 0,
        compile=functools.partial(_measure, expert_load) if compiles else None,
        expert_load=expert_load,
    )
    if not result.best:
        raise ConfigError(nothing_fits(name, topology, result))
    best = result.best[0].config
    plan = plan_train(
        best,
        topology,
        name=name,
        predicted=predicted,
        programs=programs,
        expert_load=expert_load,
    )
    return dataclasses.replace(
        plan,
        options=tuple(_option(candidate) for candidate in result.best),
        searched=search_text(result),
        notes=(*plan.notes, *result.notes),
    ), best


def _measure(expert_load: float, config: TrainConfig, topology: Topology) -> Measured:
    """What compiling the training step of one candidate shows."""
    from fornax.plan.compile import CompileError
    from fornax.plan.cost.compiled import compiled_programs

    try:
        (program,) = compiled_programs(config, topology, ("train_step",), expert_load)
    except CompileError as error:
        return Measured(total_bytes=None, step_seconds=None, problem=str(error))
    memory = program.memory
    problem = None if memory.fits else f"needs {format_bytes(memory.over)} too much memory"
    return Measured(
        total_bytes=memory.total,
        step_seconds=program.step_seconds if memory.fits else None,
        problem=problem,
    )


def _option(candidate: Candidate) -> Option:
    return Option(
        changes=write_flow(dict(candidate.changes)).strip().removeprefix("{").removesuffix("}"),
        reason=candidate.reason,
        total_bytes=candidate.total_bytes,
        step_seconds=candidate.step_seconds,
        tokens_per_second_per_chip=candidate.tokens_per_second_per_chip,
        compiled=candidate.measured is not None,
    )


def programs_of(config: TrainConfig) -> tuple[str, ...]:
    """The programs that the run would need."""
    return ("train_step",) if config.eval.every is None else ("train_step", "eval_step")


def _predicted(
    config: TrainConfig,
    topology: Topology,
    name: str,
    programs: Sequence[str] | None,
    expert_load: float,
) -> Plan:
    if programs and "train_step" not in programs:
        raise ConfigError(
            f"closed forms know the training step, not {', '.join(programs)}; ask for train, or "
            "plan for a TPU without --predicted"
        )
    left = [name for name in programs or () if name != "train_step"]
    platform = {"tpu": "TPUs", "gpu": "GPUs", "cpu": "CPUs"}[topology.chip.platform]
    measured = ", measured on this machine" if topology.chip.platform == "cpu" else ""
    return _plan(
        config,
        topology,
        name,
        [estimate(config, topology, expert_load=expert_load).step],
        origin="predicted",
        how=f"Predicted from the hardware table of {platform}{measured}; nothing was compiled.",
        notes=tuple(f"closed forms do not cover {name}" for name in left),
    )


def _compiled(
    config: TrainConfig,
    topology: Topology,
    name: str,
    programs: Sequence[str],
    expert_load: float,
) -> Plan:
    from fornax.plan.compile import MissingCompilerError
    from fornax.plan.cost.compiled import compiled_programs

    try:
        found = compiled_programs(config, topology, programs, expert_load)
    except MissingCompilerError as error:
        raise MissingCompilerError(
            f"{error}; or plan without it, by closed forms, with --predicted"
        ) from error
    return _plan(
        config,
        topology,
        name,
        found,
        origin="compiled",
        how="Compiled by the TPU compiler; times are predicted from the program and the hardware "
        "table.",
    )


def _plan(
    config: TrainConfig,
    topology: Topology,
    name: str,
    programs: Sequence[ProgramReport],
    *,
    origin: Literal["compiled", "predicted"],
    how: str,
    notes: tuple[str, ...] = (),
) -> Plan:
    hardware = describe_hardware(topology, config.dtypes.compute)
    run = _run(config, topology)
    trains = programs[0].name == "train_step"
    return Plan(
        name=name,
        origin=origin,
        how=how,
        hardware=hardware,
        programs=tuple(programs),
        run=run,
        kernels=tuple(str(choice) for choice in kernel_choices(config, topology)),
        notes=notes,
        speed=describe_speed(programs[0], run, hardware) if trains else None,
    )


def _run(config: TrainConfig, topology: Topology) -> Run:
    """What would run.

    Raises:
      ShardingError: when the mesh does not cover the devices.
    """
    model = config.model
    if model is None:
        raise ValueError("resolve config.model from init_from before planning")
    tokens = config.batch_size * config.seq_len
    return Run(
        parameters=num_parameters(model),
        batch_size=config.batch_size,
        seq_len=config.seq_len,
        accumulate=config.accumulate,
        steps=config.steps,
        remat=_remat(config),
        params_dtype=config.dtypes.params,
        compute_dtype=config.dtypes.compute,
        mesh=_large_axes(config.mesh, topology),
        model_flops=float(flops_per_token(model, config.seq_len)) * tokens,
    )


def _large_axes(mesh: MeshConfig, topology: Topology) -> dict[str, int]:
    sizes = mesh.resolved_sizes(topology.num_devices)
    return {axis: size for axis, size in sizes.items() if size > 1}


def _remat(config: TrainConfig) -> str:
    kept = [f"{', '.join(config.remat_save)} kept"] if config.remat_save else []
    kept += [f"{', '.join(config.remat_offload)} offloaded"] if config.remat_offload else []
    return f"{config.remat} ({'; '.join(kept)})" if kept else config.remat
