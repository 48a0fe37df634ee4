"""The programs of a training run, its step and its evaluation, traced as the run does it."""

from collections.abc import Callable, Mapping, Sequence

import jax

from fornax.config import from_mapping, to_mapping
from fornax.plan.artifact import ArrayFact, Artifact, Owner
from fornax.plan.compile.parent import compile_programs
from fornax.plan.compile.request import Job, Lowering, Request, array_facts
from fornax.plan.topology import Topology
from fornax.quant import QuantConfig
from fornax.train import Ledger, TrainConfig, pretrain_task, with_model
from fornax.train.hosts import data_shards, padding_text
from fornax.train.session import Programs, prepare
from fornax.train.tasks.pretrain import row_shapes

_BUILDER = "fornax.plan.compile.train:build"
_IRRELEVANT = (
    *("checkpoint", "eval", "init_from", "log", "processes", "profile"),
    *("save_every", "seed"),
)
"""Parts of a run's config that do not change its programs."""


def compile_train(
    config: TrainConfig,
    topology: Topology,
    *,
    programs: Sequence[str] = ("train_step", "eval_step"),
    options: Mapping[str, object] | None = None,
    cache: bool = True,
) -> list[Artifact]:
    """Compile what a training run would run: its step, and its evaluation.

    Args:
      config: the run.
      topology: for which chips; TPUs, or a CPU with virtual devices.
      programs: `train_step`, `eval_step` or both.
      options: compiler options of the run.
      cache: whether to look for an earlier compilation, and to keep this one.

    Returns:
      An artifact for each of `programs`, in that order.

    Raises:
      OutOfMemoryError: for the first that does not fit.
      ShardingError, ConfigError: when the run could not be laid out over the chips.
      MissingCompilerError: when libtpu is not installed.
      CompileError: when the compiler refuses a program, dies or takes too long.
    """
    return compile_programs(train_request(config, programs, options), topology, cache=cache)


def train_request(
    config: TrainConfig, programs: Sequence[str], options: Mapping[str, object] | None = None
) -> Request:
    """What the child is asked for; arguments as `compile_train`."""
    return Request(
        builder=_BUILDER,
        arguments={"config": _relevant(with_model(config))},
        programs=tuple(programs),
        options=options or {},
    )


def _relevant(config: TrainConfig) -> dict[str, object]:
    """The config without what does not change its programs."""
    mapping = to_mapping(config)
    mapping["data"] = {"virtual_shards": config.data.virtual_shards}
    if config.quant == QuantConfig():
        del mapping["quant"]
    else:
        mapping["quant"] = {**mapping["quant"], "allow_slow": False}
    return {name: value for name, value in mapping.items() if name not in _IRRELEVANT}


_OWNERS: Mapping[str, Owner] = {"params": "parameters", "optimizer": "optimizer", "batch": "batch"}


def build(job: Job) -> Mapping[str, Callable[[], Lowering]]:
    """`train_step` and `eval_step` of the run in `job.arguments["config"]`."""
    config = from_mapping(TrainConfig, dict(job.arguments["config"]))
    programs = prepare(config, pretrain_task(config, read_data=False), Ledger(), job.devices)
    rows = row_shapes(config, programs.hosts)
    batch = programs.shapes_of(rows)
    shards = data_shards(programs.parts.mesh.shape, programs.parts.rules)
    padding = padding_text(config.batch_size, shards, config.accumulate)
    lower = {"train_step": programs.lower_step, "eval_step": programs.lower_evaluation}

    def lowering(trace: Callable[[object], jax.stages.Lowered]) -> Lowering:
        return Lowering(
            lowered=trace(batch),
            mesh=programs.parts.mesh,
            arguments=program_arguments(programs, batch),
            notes=(padding,) if padding else (),
        )

    return {name: lambda trace=trace: lowering(trace) for name, trace in lower.items()}


def program_arguments(programs: Programs, batch: object) -> tuple[ArrayFact, ...]:
    """Facts of the arguments of a step: the state, then the batch."""
    state = array_facts(programs.abstract, lambda name: _OWNERS.get(name.split("/")[0], "other"))
    return (*state, *array_facts({"batch": batch}, lambda _: "batch"))
