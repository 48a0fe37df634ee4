"""`fornax plan`: does a run compile and fit, how fast would it be, what bounds it, its price."""

import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from tyro.conf import arg

from fornax.cli.arguments import NO_DEFAULT
from fornax.cli.configured import ConfigArguments, is_diffusion_config, read_config
from fornax.config import ConfigError

if TYPE_CHECKING:
    from fornax.plan.facts import Plan
    from fornax.plan.measured import Beside
    from fornax.plan.topology import Topology
    from fornax.train import TrainConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class Arguments(ConfigArguments):
    """Predict whether a training run compiles and fits, how fast it is, and what bounds it.

    For TPUs the real compiler compiles the run's own steps, without a TPU (extra tpu); for GPUs and
    CPUs closed-form models are used. Every key of the config is a flag too. A plan that does not
    fit is printed with the cheapest changes that fix it; the exit code is then 2.

    examples:
      fornax plan --config recipes/llama3-8b.yaml --topology v5p:4x4x4
      fornax plan --config recipes/llama3-8b.yaml --topology v6e:16x16 --search --write best.yaml
      fornax plan --config run.yaml --profile prof/ --fit shares.json
      fornax plan serve --model DIR --topology v6e:2x2
    """

    topology: Annotated[str | None, arg(metavar="T", help_behavior_hint="")] = None
    """v5p:4x4x4, 2*v6e:16x16 (slices), h100:4x8 (nodes x GPUs), cpu:8 (default: this machine)."""
    search: Annotated[bool, NO_DEFAULT] = False
    """Look for a better mesh, remat, accumulation; plan it."""
    budget: int = 3
    """Most compilations of a search."""
    write: Annotated[Path | None, arg(metavar="FILE", help_behavior_hint="")] = None
    """Write the planned config, a search's best, as YAML."""
    predicted: Annotated[bool, NO_DEFAULT] = False
    """Compile nothing: closed forms for TPUs too."""
    expert_load: float = 1.0
    """With mesh.expert: load of the busiest device over the mean."""
    programs: Annotated[
        tuple[Literal["train", "eval"], ...], arg(metavar="NAME ...", help_behavior_hint="")
    ] = ()
    """train, eval (default: train, eval if the config does)."""
    price: Annotated[str | None, arg(metavar="PRICE", help_behavior_hint="")] = None
    """US$ of one chip and hour, or YAML of yours: {currency: EUR, chips: {v5p: 3.5}}."""
    json: Annotated[Path | None, arg(metavar="FILE", help_behavior_hint="")] = None
    """Write every figure."""
    profile: Annotated[Path | None, arg(metavar="DIR", help_behavior_hint="")] = None
    """A capture of the run: planned beside measured."""
    fit: Annotated[Path | None, arg(metavar="FILE", help_behavior_hint="")] = None
    """With --profile: write the chip's shares that it reached."""
    calibration: Annotated[Path | None, arg(metavar="FILE", help_behavior_hint="")] = None
    """Plan with the shares that --fit wrote."""
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
    if is_diffusion_config(arguments.config):
        return _run_diffusion(arguments, overrides)
    config = read_config(TrainConfig, arguments, overrides)
    if config is None:
        return 0
    config.data.check_batch_size(config.batch_size)  # training would find it when it opens the data
    from fornax.config.price import read_prices
    from fornax.plan.price import priced
    from fornax.plan.topology import named_or_local

    if arguments.fit and not arguments.profile:
        raise ConfigError(
            "--fit needs a capture of the run to fit on; name it with --profile DIR, such as one "
            "that fornax profile train made"
        )
    topology = _calibrated(named_or_local(arguments.topology), arguments.calibration)
    price = read_prices(arguments.price).of(topology.chip.name) if arguments.price else None
    plan, config = _plan(arguments, config, topology)
    plan = priced(plan, price) if price else plan
    measured = _measured(arguments, plan, topology) if arguments.profile else None
    if arguments.write:
        _write_config(config, arguments.write)
    return _show(arguments, plan, measured)


def _show(arguments: Arguments, plan: "Plan", measured: "Beside | None") -> int:
    """Print and write a plan."""
    from fornax.plan.report import print_plan, too_large, write_json, write_page

    print_plan(plan, measured)
    if arguments.json:
        print(write_json(plan, arguments.json, measured))  # noqa: T201
    if arguments.html:
        print(write_page(plan, arguments.html, measured))  # noqa: T201
    problem = too_large(plan)
    if problem:
        sys.stdout.flush()
        raise ConfigError(problem)
    return 0


def _run_diffusion(arguments: Arguments, overrides: Sequence[str]) -> int:
    """The plan of a diffusion run: training and sampling, from their traces."""
    from fornax.config.price import read_prices
    from fornax.diffusion.config import DiffusionConfig
    from fornax.plan.diffusion import plan_diffusion
    from fornax.plan.price import priced
    from fornax.plan.topology import named_or_local

    config = read_config(DiffusionConfig, arguments, overrides)
    if config is None:
        return 0
    for name in ("search", "write", "profile", "fit", "programs"):
        if getattr(arguments, name):
            raise ConfigError(
                f"--{name} is for the plans of language models; the plan of a diffusion run is "
                "predicted from its trace: leave it out"
            )
    topology = _calibrated(named_or_local(arguments.topology), arguments.calibration)
    price = read_prices(arguments.price).of(topology.chip.name) if arguments.price else None
    name = arguments.config.stem if arguments.config else "config"
    plan = plan_diffusion(config, topology, name=name)
    return _show(arguments, priced(plan, price) if price else plan, None)


def _calibrated(topology: "Topology", path: Path | None) -> "Topology":
    from fornax.plan.measured import calibrated

    if path is None:
        return topology
    return dataclasses.replace(topology, chip=calibrated(topology.chip, path))


def _measured(arguments: Arguments, plan: "Plan", topology: "Topology") -> "Beside":
    """The capture beside the plan; the shares are fitted and written where that is asked for."""
    from fornax import profile
    from fornax.plan.measured import beside, fit, write_calibration

    assert arguments.profile is not None
    capture = profile.read(arguments.profile)
    if arguments.fit:
        shares = fit(plan, capture, topology.chip)
        print(write_calibration(shares, topology.chip, arguments.fit))  # noqa: T201
    return beside(plan, capture, topology.chip)


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
