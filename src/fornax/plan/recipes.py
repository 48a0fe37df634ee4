"""The recipes that come with Fornax, for which chips each is made, and what is predicted there.

Of those that were compiled for their chips, `recipes/compiled.json` keeps what the compiler said.
"""

import datetime
import hashlib
import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import fornax
from fornax.config import ConfigError, from_mapping, load, to_mapping
from fornax.config.files import write_whole
from fornax.plan.facts import Plan
from fornax.plan.format import format_bound, format_bytes, format_count, format_seconds
from fornax.plan.topology import Topology, parse_topology
from fornax.plan.train import fitted, plan_train
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


@dataclass(frozen=True, kw_only=True)
class Compiled:
    """What the TPU's compiler made of a recipe's training step; no chip ran it."""

    recipe: str
    topology: str
    key: str
    """`program_key` of what was compiled."""
    date: str
    """When, as YYYY-MM-DD."""
    versions: dict[str, str]
    """Of jax, libtpu and what else makes the program."""
    compile_seconds: float
    """Of the compiler, on the machine where it ran."""
    memory_bytes: int
    """Of a chip."""
    fits: bool
    step_seconds: float
    """Predicted from the program and the hardware table of that day."""
    mfu: float
    """Of the predicted step."""


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


def program_key(recipe: Recipe, topology: Topology) -> str:
    """Names the training step of a recipe on chips: another config or topology, another key."""
    from fornax.plan.compile.train import train_request

    request = train_request(fitted(recipe.config(), topology), ("train_step",))
    asked = json.dumps([dict(request.arguments), topology.name], sort_keys=True)
    return hashlib.sha256(asked.encode()).hexdigest()[:16]


def compiled_recipes(folder: Path | None = None) -> dict[tuple[str, str], Compiled]:
    """What `recipes/compiled.json` keeps, by recipe and topology."""
    path = (folder or recipes_folder()) / _KEPT
    if not path.exists():
        return {}
    rows = json.loads(path.read_text(encoding="utf-8"))
    found = [from_mapping(Compiled, row) for row in rows]
    return {(one.recipe, one.topology): one for one in found}


def keep_compiled(recipe: Recipe, topology: Topology, plan: Plan) -> Compiled:
    """Keep what a compiled plan of a recipe says, in `compiled.json` beside it."""
    compilation, speed = plan.main.compilation, plan.speed
    assert compilation is not None
    assert speed is not None
    found = Compiled(
        recipe=recipe.name,
        topology=topology.name,
        key=program_key(recipe, topology),
        date=datetime.datetime.now(tz=datetime.UTC).date().isoformat(),
        versions=compilation.versions,
        compile_seconds=round(compilation.compile_seconds, 1),
        memory_bytes=plan.main.memory.total,
        fits=plan.main.memory.fits,
        step_seconds=speed.step_seconds,
        mfu=speed.mfu,
    )
    kept = {**compiled_recipes(recipe.path.parent), (recipe.name, topology.name): found}
    rows = [to_mapping(kept[pair]) for pair in sorted(kept)]
    write_whole(recipe.path.parent / _KEPT, json.dumps(rows, indent=1).encode() + b"\n")
    return found


_KEPT = "compiled.json"
_HEAD = (
    *("recipe", "chips", "tokens a step", "remat", "memory of a chip", "step", "MFU"),
    *("tokens/s/chip", "tokens/day", "bound by", "compiled: memory", "compiled: step", "MFU"),
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
        "The last three columns are of training steps that the TPU's compiler made for these chips",
        "on a machine without one (`benchmarks/recipes_compiled.py`); their times are predicted",
        "from the program. None ran. Where they are empty, the step was not compiled.",
        "",
        f"| {' | '.join(_HEAD)} |",
        f"| {' | '.join(['---'] * len(_HEAD))} |",
    ]
    kept = compiled_recipes()
    for recipe in find_recipes():
        for name in recipe.topologies:
            cells = _cells(recipe, parse_topology(name), kept.get((recipe.name, name)))
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join([*lines, ""])


def _cells(recipe: Recipe, topology: Topology, compiled: Compiled | None) -> tuple[str, ...]:
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
        *(_compiled_cells(compiled) if compiled else ("", "", "")),
    )


def _compiled_cells(compiled: Compiled) -> tuple[str, str, str]:
    memory = format_bytes(compiled.memory_bytes)
    if not compiled.fits:
        return f"{memory}: does not fit", "", ""
    return memory, format_seconds(compiled.step_seconds), f"{compiled.mfu:.1%}"
