"""The plan of a training run: compiled where its compiler is, from closed forms elsewhere."""

import dataclasses
from collections.abc import Sequence
from typing import Literal

from fornax.config import ConfigError
from fornax.plan.advice import advise
from fornax.plan.analytic import estimate, kernel_choices
from fornax.plan.report.data import Plan
from fornax.plan.report.hardware import hardware_of, run_of, speed_of
from fornax.plan.report.predicted import program_of_estimate
from fornax.plan.report.program import ProgramReport
from fornax.plan.topology import Topology
from fornax.train import TrainConfig, with_model

__all__ = ["plan_train"]


def plan_train(
    config: TrainConfig,
    topology: Topology,
    *,
    name: str = "config",
    predicted: bool = False,
    programs: Sequence[str] | None = None,
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

    Raises:
      ShardingError: when the mesh, the model or the batch does not divide over the topology.
      ConfigError: when the compiler is missing, or refuses the program for another reason than
        memory.
    """
    config = with_model(config)
    if predicted or topology.chip.platform != "tpu":
        plan = _predicted(config, topology, name, programs)
    else:
        plan = _compiled(config, topology, name, programs or programs_of(config))
    if plan.main.memory.fits:
        return plan
    guess = estimate(config, topology).memory.total
    scale = plan.main.memory.total / guess if plan.origin == "compiled" and guess else 1.0
    return dataclasses.replace(plan, advice=advise(config, topology, scale=max(1.0, scale)))


def programs_of(config: TrainConfig) -> tuple[str, ...]:
    """The programs that the run would need."""
    return ("train_step",) if config.eval.every is None else ("train_step", "eval_step")


def _predicted(
    config: TrainConfig, topology: Topology, name: str, programs: Sequence[str] | None
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
        [program_of_estimate(estimate(config, topology))],
        origin="predicted",
        how=f"Predicted from the hardware table of {platform}{measured}; nothing was compiled.",
        notes=tuple(f"closed forms know no {name}" for name in left),
    )


def _compiled(config: TrainConfig, topology: Topology, name: str, programs: Sequence[str]) -> Plan:
    from fornax.plan.compile import MissingCompilerError
    from fornax.plan.compiled import compiled_programs

    try:
        found = compiled_programs(config, topology, programs)
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
    hardware = hardware_of(topology, config.dtypes.compute)
    run = run_of(config, topology)
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
        speed=speed_of(programs[0], run, hardware) if trains else None,
    )
