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
    from fornax.config.price import Price
    from fornax.plan.facts import Plan
    from fornax.plan.measured import Beside
    from fornax.plan.topology import Topology
    from fornax.train import TrainConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlanArguments(ConfigArguments):
    """What plans of all runs share."""

    topology: Annotated[str | None, arg(metavar="T", help_behavior_hint="")] = None
    """v5p:4x4x4, 2*v6e:16x16 (slices), h100:4x8 (nodes x GPUs), cpu:8 (default: this machine)."""
    price: Annotated[str | None, arg(metavar="PRICE", help_behavior_hint="")] = None
    """US$ of one chip and hour, or YAML of yours: {currency: EUR, chips: {v5p: 3.5}}."""
    calibration: Annotated[Path | None, arg(metavar="FILE", help_behavior_hint="")] = None
    """Plan with the shares that --fit wrote."""
    json: Annotated[Path | None, arg(metavar="FILE", help_behavior_hint="")] = None
    """Write every figure."""
    html: Annotated[Path | None, arg(metavar="FILE", help_behavior_hint="")] = None
    """Write a page with the memory and roofline pictures."""

    def chips(self) -> "Topology":
        """The topology, with the calibration that was given.

        Raises:
          ConfigError: for one that there is not, or a file that holds no shares.
        """
        from fornax.plan.measured import calibrated
        from fornax.plan.topology import named_or_local

        topology = named_or_local(self.topology)
        if self.calibration is None:
            return topology
        return dataclasses.replace(topology, chip=calibrated(topology.chip, self.calibration))

    def price_of(self, topology: "Topology") -> "Price | None":
        """What a chip costs, where that was given.

        Raises:
          ConfigError: when it is neither a number nor a table of prices.
        """
        from fornax.config.price import read_prices

        return read_prices(self.price).of(topology.chip.name) if self.price else None

    def show(self, plan: "Plan", measured: "Beside | None" = None) -> int:
        """Print and write a plan.

        Raises:
          ConfigError: when it does not fit.
        """
        from fornax.plan.report import print_plan, too_large, write_json, write_page

        print_plan(plan, measured)
        if self.json:
            print(write_json(plan, self.json, measured))  # noqa: T201
        if self.html:
            print(write_page(plan, self.html, measured))  # noqa: T201
        problem = too_large(plan)
        if problem:
            sys.stdout.flush()
            raise ConfigError(problem)
        return 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Arguments(PlanArguments):
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
    profile: Annotated[Path | None, arg(metavar="DIR", help_behavior_hint="")] = None
    """A capture of the run: planned beside measured."""
    fit: Annotated[Path | None, arg(metavar="FILE", help_behavior_hint="")] = None
    """With --profile: write the chip's shares that it reached."""


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
    if arguments.fit and not arguments.profile:
        raise ConfigError(
            "--fit needs a capture of the run to fit on; name it with --profile DIR, such as one "
            "that fornax profile train made"
        )
    from fornax.plan.price import priced

    topology = arguments.chips()
    price = arguments.price_of(topology)
    plan, config = _plan(arguments, config, topology)
    plan = priced(plan, price) if price else plan
    measured = _measured(arguments, plan, topology) if arguments.profile else None
    if arguments.write:
        _write_config(config, arguments.write)
    return arguments.show(plan, measured)


def _run_diffusion(arguments: Arguments, overrides: Sequence[str]) -> int:
    """The plan of a diffusion run: training and sampling, from their traces."""
    from fornax.diffusion.config import DiffusionConfig
    from fornax.plan.diffusion import plan_diffusion
    from fornax.plan.price import priced

    config = read_config(DiffusionConfig, arguments, overrides)
    if config is None:
        return 0
    for name in ("search", "write", "profile", "fit", "programs"):
        if getattr(arguments, name):
            raise ConfigError(
                f"--{name} is for the plans of language models; the plan of a diffusion run is "
                "predicted from its trace: leave it out"
            )
    topology = arguments.chips()
    price = arguments.price_of(topology)
    name = arguments.config.stem if arguments.config else "config"
    plan = plan_diffusion(config, topology, name=name)
    return arguments.show(priced(plan, price) if price else plan)


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
