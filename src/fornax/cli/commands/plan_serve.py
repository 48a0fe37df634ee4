"""`fornax plan serve`: does a served model fit, how many sequences, how fast, what binds."""

import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

from tyro.conf import arg

from fornax.cli.arguments import NO_DEFAULT
from fornax.cli.configured import ConfigArguments, read_config
from fornax.config import ConfigError

_FILE = arg(metavar="FILE", help_behavior_hint="")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Arguments(ConfigArguments):
    """Predict whether a model can be served on chips, for how many sequences, and how fast.

    No weights are needed: a directory with a config.json is enough, and so is a run directory. For
    TPUs the engine's own steps are compiled, without a TPU (extra tpu); GPUs and CPUs are
    predicted. The keys of the engine are flags, as for fornax serve: --max-model-len,
    --max-num-seqs, --max-num-batched-tokens, --dtype, --tensor-parallel-size (default: as many
    chips as the model divides over) and more: --help-config lists them.

    examples:
      fornax plan serve --model models/llama --topology v6e:2x2 --max-model-len 8192
      fornax plan serve --model models/llama --topology h100:8 --itl-ms 20 --html serve.html
    """

    model: Annotated[Path | None, arg(metavar="DIR", help_behavior_hint="")] = None
    """Hugging Face directory or name on the Hub (of either config.json is enough), or run."""
    topology: Annotated[str | None, arg(metavar="T", help_behavior_hint="")] = None
    """v6e:2x2, v5p:2x2x2, h100:8, cpu (default: this machine)."""
    itl_ms: Annotated[float | None, arg(metavar="MS", help_behavior_hint="")] = None
    """Find the largest batch whose tokens come within this time of each other."""
    contexts: Annotated[tuple[int, ...], arg(metavar="N ...", help_behavior_hint="")] = ()
    """Tokens of each sequence while decoding (default: 1/8, 1/2 and all of max-model-len)."""
    prompts: Annotated[tuple[int, ...], arg(metavar="N ...", help_behavior_hint="")] = ()
    """Tokens of the prompts (default: the same)."""
    predicted: Annotated[bool, NO_DEFAULT] = False
    """Compile nothing: closed forms for TPUs too."""
    price: Annotated[str | None, arg(metavar="PRICE", help_behavior_hint="")] = None
    """US$ of one chip and hour, or YAML of yours: {currency: EUR, chips: {v5p: 3.5}}."""
    json: Annotated[Path | None, _FILE] = None
    """Write every figure."""
    html: Annotated[Path | None, _FILE] = None
    """Write a page with latency over batch and the memory bar."""


def run(arguments: Arguments, overrides: Sequence[str]) -> int:
    """Plan, print, write; raises ConfigError for a plan that does not fit, after showing it."""
    from fornax.plan.serving.engine import ServingConfig

    config = read_config(ServingConfig, arguments, overrides)
    if config is None:
        return 0
    if arguments.model is None:
        raise ConfigError(
            "fornax plan serve needs a model; name a directory with a config.json, or a run, with "
            "--model DIR"
        )
    if arguments.itl_ms is not None and not arguments.itl_ms > 0:
        raise ConfigError(f"itl_ms={arguments.itl_ms:g} is not a time; give milliseconds above 0")
    from fornax.config.price import read_prices
    from fornax.plan.price import priced_serving
    from fornax.plan.report import print_plan, too_large, write_json, write_page
    from fornax.plan.serving import plan_serve
    from fornax.plan.topology import named_or_local

    topology = named_or_local(arguments.topology)
    price = read_prices(arguments.price).of(topology.chip.name) if arguments.price else None
    plan = plan_serve(
        arguments.model,
        topology,
        config,
        itl_seconds=None if arguments.itl_ms is None else arguments.itl_ms / 1e3,
        contexts=arguments.contexts,
        prompts=arguments.prompts,
        predicted=arguments.predicted,
    )
    plan = priced_serving(plan, price) if price else plan
    print_plan(plan)
    if arguments.json:
        print(write_json(plan, arguments.json))  # noqa: T201
    if arguments.html:
        print(write_page(plan, arguments.html))  # noqa: T201
    problem = too_large(plan)
    if problem:
        sys.stdout.flush()
        raise ConfigError(problem)
    return 0
