"""The recipes that come with Fornax, for which chips each is made, and what is predicted there."""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import fornax
from fornax.config import ConfigError, load
from fornax.plan.format import format_bound, format_bytes, format_count, format_seconds
from fornax.plan.topology import Topology, parse_topology
from fornax.plan.train import plan_train
from fornax.train import TrainConfig

_PLANNED = re.compile(r"^# Planned for: (.+)$", re.MULTILINE)
_TITLE = re.compile(r"^# (Pretrain .+)$", re.MULTILINE)


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """A configuration and the chips that it is made for."""

    path: Path
    title: str
    topologies: tuple[str, ...]

    @property
    def name(self) -> str:
        """As in `recipes/NAME.yaml`."""
        return self.path.stem

    def config(self) -> TrainConfig:
        """The configuration."""
        return load(TrainConfig, file=self.path)


def recipes_folder() -> Path:
    """Where the recipes are: beside the source, or in the installed package."""
    package = Path(fornax.__file__).parent
    for folder in (package / "recipes", package.parents[1] / "recipes"):
        if folder.is_dir():
            return folder
    raise ConfigError(f"no recipes beside {package}; install Fornax again")


def find_recipes(folder: Path | None = None) -> list[Recipe]:
    """Every recipe that says what it is planned for, by name."""
    return list(_read(sorted((folder or recipes_folder()).glob("*.yaml"))))


def _read(paths: Iterable[Path]) -> Iterator[Recipe]:
    for path in paths:
        text = path.read_text(encoding="utf-8")
        planned, title = _PLANNED.search(text), _TITLE.search(text)
        if planned and title:
            topologies = tuple(name.strip() for name in planned[1].split(","))
            yield Recipe(path=path, title=title[1], topologies=topologies)


_HEAD = (
    *("recipe", "chips", "tokens a step", "remat", "memory of a chip", "step", "MFU"),
    *("tokens/s/chip", "tokens/day", "bound by"),
)


def recipes_page() -> str:
    """The table of all recipes with predicted figures, as Markdown."""
    lines = [
        "# Recipes",
        "",
        "Complete configurations to start from, in `recipes/`. Each fits the chips it names, by",
        "estimate; the figures are predicted from closed forms and the hardware table, and",
        "`fornax plan` with the compiler says more. The guide is",
        "[Size a run before you rent](../guides/plan.md). No recipe is for 405B on v5e: with 16 GB",
        "a chip its state alone would take more slices than make sense; none is for DeepSeek V3 on",
        "v5e and v6e, whose chips do not hold a layer's experts and their gradients.",
        "",
        f"| {' | '.join(_HEAD)} |",
        f"| {' | '.join(['---'] * len(_HEAD))} |",
    ]
    for recipe in find_recipes():
        for name in recipe.topologies:
            lines.append(f"| {' | '.join(_cells(recipe, parse_topology(name)))} |")
    return "\n".join([*lines, ""])


def _cells(recipe: Recipe, topology: Topology) -> tuple[str, ...]:
    config = recipe.config()
    plan = plan_train(config, topology, predicted=True)
    memory, speed = plan.main.memory, plan.speed
    assert speed is not None
    return (
        f"`{recipe.name}`",
        f"`{topology.name}`",
        format_count(config.batch_size * config.seq_len),
        config.remat,
        f"{format_bytes(memory.total)} of {format_bytes(memory.usable)}",
        format_seconds(speed.step_seconds),
        f"{speed.mfu:.1%}",
        f"{speed.tokens_per_second_per_chip:,.0f}",
        format_count(speed.tokens_per_day),
        format_bound(speed.bound, topology.chip.platform),
    )
