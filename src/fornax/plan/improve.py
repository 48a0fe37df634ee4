"""A search for a better configuration, and the plan of the best that it found."""

import dataclasses

from fornax.config import ConfigError
from fornax.config.text import write_flow
from fornax.plan.report.data import Option, Plan
from fornax.plan.report.words import nbytes, seconds
from fornax.plan.search import Candidate, Measured, SearchResult, search
from fornax.plan.topology import Topology
from fornax.plan.train import plan_train
from fornax.train import TrainConfig, with_model

__all__ = ["search_train"]


def search_train(
    config: TrainConfig,
    topology: Topology,
    *,
    name: str = "config",
    predicted: bool = False,
    programs: tuple[str, ...] | None = None,
    budget: int = 3,
) -> tuple[Plan, TrainConfig]:
    """Search mesh, remat policy and accumulation; plan the best.

    Args:
      config: the run; its model, optimizer, dtypes, length and batch size stay.
      topology: the chips.
      name: what the plan is called.
      predicted: compile nothing.
      programs: as in `plan_train`.
      budget: most compilations of the search.

    Returns:
      The plan of the best configuration, with all that were found, and that configuration.

    Raises:
      ConfigError: when nothing that was looked at fits.
    """
    config = with_model(config)
    compiles = topology.chip.platform == "tpu" and not predicted and budget > 0
    result = search(
        config,
        topology,
        budget=budget if compiles else 0,
        compile=_measure if compiles else None,
    )
    if not result.best:
        raise ConfigError(_nothing(name, topology, result))
    best = result.best[0].config
    plan = plan_train(best, topology, name=name, predicted=predicted, programs=programs)
    return dataclasses.replace(
        plan,
        options=tuple(_option(candidate) for candidate in result.best),
        searched=_words(result),
        notes=(*plan.notes, *result.notes),
    ), best


def _measure(config: TrainConfig, topology: Topology) -> Measured:
    """What compiling the training step of one candidate shows."""
    from fornax.plan.compile import CompileError
    from fornax.plan.compiled import compiled_programs

    try:
        (program,) = compiled_programs(config, topology, ("train_step",))
    except CompileError as error:
        return Measured(total_bytes=None, step_seconds=None, problem=str(error))
    memory = program.memory
    problem = None if memory.fits else f"needs {nbytes(memory.over)} too much memory"
    return Measured(
        total_bytes=memory.total,
        step_seconds=program.step_seconds if memory.fits else None,
        problem=problem,
        artifact=program,
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


def _words(result: SearchResult) -> str:
    left = ", ".join(f"{count:,} for {reason}" for reason, count in result.pruned.items())
    text = f"{result.considered:,} plans considered"
    text += f"; left out: {left}" if left else ""
    text += f"; {result.compiled} compiled"
    if result.failed:
        failed = "; ".join(f"{plan}: {problem}" for plan, problem in result.failed)
        text += f", of which {len(result.failed)} did not fit or compile ({failed})"
    if result.given is not None:
        given = result.given
        text += (
            f". As given: {seconds(given.step_seconds)} a step, "
            f"{given.tokens_per_second_per_chip:,.0f} tokens/s/chip, {nbytes(given.total_bytes)}"
        )
    if result.given_problem:
        text += f"; as given, {result.given_problem}"
    return f"{text}."


def _nothing(name: str, topology: Topology, result: SearchResult) -> str:
    text = f"no plan of {name} that was looked at fits {topology.name}"
    if result.closest is not None:
        memory = result.closest.memory
        text += (
            f": the one that needs least takes {nbytes(memory.total)} of a chip's "
            f"{nbytes(memory.usable)}"
        )
    return f"{text}; use more chips, a shorter seq_len or a smaller batch_size"
