"""`fornax kernels tune` and `bench`: the kernels of a run, timed; what tune finds is kept."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from tyro.conf import arg

from fornax.cli.arguments import Control
from fornax.cli.configured import ConfigArguments, read_config
from fornax.config import ConfigError, environment

if TYPE_CHECKING:
    from fornax.plan.kernels import KernelCall
    from fornax.plan.topology import Topology


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Arguments(ConfigArguments):
    model: Annotated[Path | None, arg(metavar="DIR", help_behavior_hint="")] = None
    """Serve this model instead: a directory with a config.json, or a run; with the flags of
    fornax serve, such as --max-num-seqs."""
    topology: Annotated[str | None, arg(metavar="T", help_behavior_hint="")] = None
    """Where the run will be: v5p:4x4x4, cpu:8 (default: this machine)."""
    imports: Annotated[tuple[str, ...], arg(metavar="MODULE ...", help_behavior_hint="")] = ()
    """Modules that add operations or implementations of your own."""
    limit: Annotated[float, arg(metavar="SECONDS")] = 120.0
    """Most for one turn of one implementation, its compilation included."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class TuneArguments(_Arguments):
    """Time every implementation of the kernels of a run, and keep which is fastest.

    The run's own programs are traced; each kind of call in them is measured on one device of this
    machine, in a process of its own, so that an implementation that crashes loses and no more.
    Later runs of one process here choose by it. For chips that are not here the calls are listed
    with the choice that they get: untuned. Every key of the config is a flag too.

    examples:
      fornax kernels tune --config run.yaml
      fornax kernels tune --model DIR --max-num-seqs 32
      fornax kernels tune --config recipes/llama3-8b.yaml --topology v5p:4x4x4
    """


@dataclasses.dataclass(frozen=True, kw_only=True)
class BenchArguments(_Arguments):
    """Time every implementation of the kernels of a run, and keep nothing.

    A share of the limit is the least time that this machine's measured FLOP/s and bytes/s allow,
    over the time taken. Every key of the config is a flag too.

    examples:
      fornax kernels bench --config run.yaml
      fornax kernels bench --model DIR
    """


def _run(arguments: _Arguments, overrides: Sequence[str], *, keep: bool) -> int:
    environment.leave_gpu_memory()  # to the process that measures
    from fornax.plan.topology import local_topology, named_or_local

    if not (arguments.config or arguments.model or overrides or arguments.help_config):
        raise ConfigError(
            "fornax kernels needs a run; name a config with --config FILE, or a model to serve "
            "with --model DIR"
        )
    if arguments.limit <= 0:
        raise ConfigError(f"limit={arguments.limit:g} is not a time; give seconds above 0")
    topology = named_or_local(arguments.topology)
    calls = _calls(arguments, overrides, topology)
    if calls is None:
        return 0
    from fornax.plan.kernels import measure, measured_text

    platform = topology.chip.platform
    here = platform == "cpu" or (platform == "gpu" and topology.chip == local_topology().chip)
    if not here:
        _untuned(calls, topology)
        return 0
    chip = local_topology().chip
    found = measure(calls, keep=keep, modules=arguments.imports, limit_seconds=arguments.limit)
    for each in found:
        print(measured_text(each, chip), flush=True)  # noqa: T201
    if not calls:
        print("no call of this run has a choice of implementations")  # noqa: T201
    elif keep:
        print("kept: later runs of one process on this machine choose by it")  # noqa: T201
    return 0


def _calls(
    arguments: _Arguments, overrides: Sequence[str], topology: "Topology"
) -> "list[KernelCall] | None":
    from fornax.plan.kernels import calls_of_serving, calls_of_training

    if arguments.model is not None:
        from fornax.plan.serving.engine import ServingConfig

        serving = read_config(ServingConfig, arguments, overrides)
        return None if serving is None else calls_of_serving(arguments.model, serving, topology)
    from fornax.train import TrainConfig

    config = read_config(TrainConfig, arguments, overrides)
    return None if config is None else calls_of_training(config, topology)


def _untuned(calls: "Sequence[KernelCall]", topology: "Topology") -> None:
    from fornax.plan.kernels.report import described

    for call in calls:
        print(f"{call.operation}  {described(call.fields)}\n  {call.chosen}")  # noqa: T201
    print(  # noqa: T201
        f"untuned: no {topology.chip.name} is here to measure on, so each call gets the first "
        "implementation that does not decline; run this there"
    )


def command(name: str) -> Control:
    """The command of this name."""
    keep = name == "tune"
    return Control(
        TuneArguments if keep else BenchArguments,
        lambda arguments, overrides: _run(arguments, overrides, keep=keep),
    )
