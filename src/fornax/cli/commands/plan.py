"""`fornax plan`: does a run compile and fit, how fast would it be, what bounds it, its price."""

import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from tyro.conf import arg

from fornax.cli.arguments import NO_DEFAULT
from fornax.cli.configured import ConfigArguments, read_config
from fornax.config import ConfigError

if TYPE_CHECKING:
    from fornax.plan.facts import Plan
    from fornax.plan.topology import Topology
    from fornax.train import TrainConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class Arguments(ConfigArguments):
    """Say whether a training run compiles and fits, how fast it would be, and what bounds it.

    For TPUs the real compiler makes the very steps that would run, without a TPU (extra tpu); for
    GPUs and CPUs closed forms do. Every key of the config is a flag too. A plan that does not fit
    is printed with the cheapest changes that would mend it; the exit code is then 2.

    examples:
      fornax plan --config recipes/llama3-8b.yaml --topology v5p:4x4x4
      fornax plan --config recipes/llama3-8b.yaml --topology v6e:16x16 --search --write best.yaml
      fornax plan --config run.yaml --topology h100:2x8 --batch-size 64 --html plan.html
      fornax plan serve --model DIR --topology v6e:2x2
    """

    topology: Annotated[str | None, arg(metavar="T", help_behavior_hint="")] = None
    """v5p:4x4x4, 2*v6e:16x16 (slices), h100:4x8 (nodes x GPUs), cpu:8 (default: this machine)."""
    search: Annotated[bool, NO_DEFAULT] = False
    """Look for a better mesh, remat policy and accumulation, and plan the best."""
    budget: int = 3
    """Most compilations of a search."""
    write: Annotated[Path | None, arg(metavar="FILE", help_behavior_hint="")] = None
    """Write the config that was planned, the best of a search, as YAML."""
    predicted: Annotated[bool, NO_DEFAULT] = False
    """Compile nothing: closed forms for TPUs too."""
    expert_load: float = 1.0
    """With mesh.expert: load of the busiest device over the mean."""
    programs: Annotated[
        tuple[Literal["train", "eval"], ...], arg(metavar="NAME ...", help_behavior_hint="")
    ] = ()
    """train, eval (default: train, and eval where the config evaluates)."""
    price: Annotated[Path | None, arg(metavar="FILE", help_behavior_hint="")] = None
    """YAML of your prices a chip-hour: {currency: EUR, chips: {v5p: 3.5}}."""
    json: Annotated[Path | None, arg(metavar="FILE", help_behavior_hint="")] = None
    """Write every figure."""
    html: Annotated[Path | None, arg(metavar="FILE", help_behavior_hint="")] = None
    """Write a page with the memory and roofline pictures."""


def run(arguments: Arguments, overrides: Sequence[str]) -> int:
    """Plan, print, write; raises ConfigError for a plan that does not fit, after showing it."""
    from fornax.train import TrainConfig

    if not (arguments.config or overrides or arguments.help_config):
        raise ConfigError(
            "fornax plan needs a config; name one with --config FILE, such as "
            "--config recipes/llama3-8b.yaml, or give keys as flags"
        )
    config = read_config(TrainConfig, arguments, overrides)
    if config is None:
        return 0
    config.data.check_batch_size(config.batch_size)  # training would find it when it opens the data
    from fornax.plan.price import priced, read_prices
    from fornax.plan.report import print_plan, too_large, write_json, write_page
    from fornax.plan.topology import named_or_local

    topology = named_or_local(arguments.topology)
    prices = read_prices(arguments.price, topology.chip.name) if arguments.price else None
    plan, config = _plan(arguments, config, topology)
    plan = priced(plan, prices) if prices else plan
    print_plan(plan)
    if arguments.write:
        _write_config(config, arguments.write)
    if arguments.json:
        print(write_json(plan, arguments.json))  # noqa: T201
    if arguments.html:
        print(write_page(plan, arguments.html))  # noqa: T201
    problem = too_large(plan)
    if problem:
        sys.stdout.flush()
        raise ConfigError(problem)
    return 0


def _plan(
    arguments: Arguments, config: "TrainConfig", topology: "Topology"
) -> "tuple[Plan, TrainConfig]":
    from fornax.plan.train import plan_train, search_train

    name = arguments.config.stem if arguments.config else "config"
    chosen = tuple(f"{program}_step" for program in arguments.programs) or None
    if not arguments.search:
        plan = plan_train(
            config,
            topology,
            name=name,
            predicted=arguments.predicted,
            programs=chosen,
            expert_load=arguments.expert_load,
        )
        return plan, config
    return search_train(
        config,
        topology,
        name=name,
        predicted=arguments.predicted,
        programs=chosen,
        budget=arguments.budget,
        expert_load=arguments.expert_load,
    )


def _write_config(config: "TrainConfig", path: Path) -> None:
    from fornax.config import dump_yaml

    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(dump_yaml(config), encoding="utf-8")
    except OSError as error:
        raise ConfigError(
            f"cannot write the config to {path}: {error.strerror or error}; name another file"
        ) from error
    print(path)  # noqa: T201
