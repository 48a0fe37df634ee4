"""The programs of a training run, its step and its evaluation, traced as the run does it."""

from collections.abc import Callable, Mapping

import jax

from fornax.config import from_mapping
from fornax.plan.artifact import ArrayFact, Owner
from fornax.plan.compile.arguments import array_facts
from fornax.plan.compile.request import Job, Lowering
from fornax.train import Ledger, TrainConfig, pretrain_task
from fornax.train.session import Programs, prepare
from fornax.train.tasks.pretrain import row_shapes

__all__ = ["build"]

_OWNERS: Mapping[str, Owner] = {"params": "parameters", "optimizer": "optimizer", "batch": "batch"}


def build(job: Job) -> Mapping[str, Callable[[], Lowering]]:
    """`train_step` and `eval_step` of the run in `job.arguments["config"]`."""
    config = from_mapping(TrainConfig, dict(job.arguments["config"]))
    programs = prepare(config, pretrain_task(config, read_data=False), Ledger(), job.devices)
    rows = row_shapes(config, programs.hosts)
    batch = programs.shapes_of(rows)
    notes = _notes(config, programs)
    lower = {"train_step": programs.lower_step, "eval_step": programs.lower_evaluation}

    def lowering(trace: Callable[[object], jax.stages.Lowered]) -> Lowering:
        return Lowering(
            lowered=trace(batch),
            mesh=programs.parts.mesh,
            arguments=_arguments(programs, batch),
            notes=notes,
            facts={"hosts": programs.hosts.count},
        )

    return {name: lambda trace=trace: lowering(trace) for name, trace in lower.items()}


def _arguments(programs: Programs, batch: object) -> tuple[ArrayFact, ...]:
    state = array_facts(programs.abstract, lambda name: _OWNERS.get(name.split("/")[0], "other"))
    return (*state, *array_facts({"batch": batch}, lambda _: "batch"))


def _notes(config: TrainConfig, programs: Programs) -> tuple[str, ...]:
    """What would stop the run although the program compiles."""
    found = []
    count, shards = programs.hosts.count, config.data.virtual_shards
    if shards % count:
        found.append(
            f"{count} hosts read data and data.virtual_shards={shards} does not divide over them; "
            f"set it to a multiple of {count} before the data position is first saved"
        )
    return tuple(found)
