"""`fornax plan tune METHOD`: memory, FLOPs and time of a post-training run, before it runs."""

from collections.abc import Sequence

from fornax.cli.arguments import Control
from fornax.cli.commands.plan import PlanArguments
from fornax.cli.commands.tune import renamed
from fornax.cli.configured import read_config
from fornax.config import ConfigError
from fornax.tune.methods import METHODS

_HELP = """Predict memory, FLOPs and time of `fornax tune {name}` on chips, without running it.

The flags are those of `fornax tune {name}`. No data and no weights are read: of the model a
config.json is enough, and rows are taken to be as long as --max-length.{more} A plan that does not
fit is printed with changes that would; the exit code is then 2.

example:
  fornax plan tune {example} --topology h100:8
"""
_ROUNDS = """ A round is planned whole:
drawing completions at their longest, scoring, the steps, and what stays in memory meanwhile."""


def command(name: str) -> Control:
    """The command of the method called `name`."""
    method = METHODS[name]

    def run(arguments: PlanArguments, overrides: Sequence[str]) -> int:
        """Plan, print, write; raises ConfigError for a plan that does not fit, after showing it."""
        if not (arguments.config or overrides or arguments.help_config):
            raise ConfigError("no run is described; begin with --model DIR --data FILE")
        words = renamed(overrides, method.aliases)
        config = read_config(method.config_class(), arguments, words)
        if config is None:
            return 0
        from fornax.plan.price import priced
        from fornax.plan.tune import plan_tune

        topology = arguments.chips()
        price = arguments.price_of(topology)
        plan = plan_tune(config, topology, name=f"tune {name}")
        return arguments.show(priced(plan, price) if price else plan)

    example = method.example.rpartition(" --out")[0]
    more = _ROUNDS if name in ("grpo", "ppo") else ""
    text = _HELP.format(name=name, example=example, more=more)
    return Control(type("Arguments", (PlanArguments,), {"__doc__": text}), run)
