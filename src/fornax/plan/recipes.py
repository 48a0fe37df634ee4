"""The recipes that come with Fornax, and the chips that each is made for.

Of those that were compiled for their chips, `recipes/compiled.json` keeps what the compiler said.
"""

import contextlib
import dataclasses
import datetime
import hashlib
import json
import re
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import fornax
from fornax.config import ConfigError, from_mapping, load, to_mapping
from fornax.config.files import write_whole
from fornax.diffusion.config import DiffusionConfig
from fornax.models import config_to_hf
from fornax.plan.facts import Plan, ProgramReport
from fornax.plan.serving import plan_serve
from fornax.plan.serving.engine import ServingConfig
from fornax.plan.serving_facts import ServePlan
from fornax.plan.topology import Topology
from fornax.plan.train import fitted
from fornax.plan.tune import plan_tune
from fornax.train import TrainConfig
from fornax.tune.config import TuneConfig
from fornax.tune.methods import METHODS

_KEPT = "compiled.json"
_PLANNED = re.compile(r"^# Planned for: (.+)$", re.MULTILINE)
_TITLE = re.compile(r"# (.+)$", re.MULTILINE)
_COMMAND = re.compile(
    r"^#   fornax (train|diffusion train|tune \w+|serve \S+) --config ", re.MULTILINE
)
_SHAPES = re.compile(r"^# Shapes of the model: recipes/(.+)\.yaml", re.MULTILINE)


@dataclass(frozen=True, kw_only=True)
class _Planned:
    path: Path
    title: str
    topologies: tuple[str, ...]

    @property
    def name(self) -> str:
        """As in `recipes/NAME.yaml`."""
        return self.path.stem


@dataclass(frozen=True, kw_only=True)
class Recipe(_Planned):
    """A configuration of pretraining and the chips that it is made for."""

    def config(self) -> TrainConfig:
        """The configuration."""
        return load(TrainConfig, file=self.path)


@dataclass(frozen=True, kw_only=True)
class DenoiserRecipe(_Planned):
    """A configuration of `fornax diffusion train` and the chips that it is made for."""

    def config(self) -> DiffusionConfig:
        """The configuration."""
        return load(DiffusionConfig, file=self.path)


@dataclass(frozen=True, kw_only=True)
class _OfModel(_Planned):
    """A recipe for a published model, whose shapes another recipe has."""

    shapes: str
    """The recipe of pretraining with the model's shapes, by name."""

    @contextlib.contextmanager
    def model(self) -> Iterator[Path]:
        """A folder with the model's config.json, which is all that a plan reads of it."""
        base = load(TrainConfig, file=self.path.with_name(f"{self.shapes}.yaml")).model
        assert base is not None
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / "config.json").write_text(json.dumps(config_to_hf(base)))
            yield Path(folder)


@dataclass(frozen=True, kw_only=True)
class TuneRecipe(_OfModel):
    """A configuration of `fornax tune METHOD` and the chips that it is made for."""

    method: str

    def config(self) -> TuneConfig:
        """The configuration."""
        return load(METHODS[self.method].config_class(), file=self.path)

    def plan(self, topology: Topology) -> Plan:
        """As `fornax plan tune METHOD` plans it, its model's files not needed."""
        with self.model() as folder:
            return plan_tune(dataclasses.replace(self.config(), model=str(folder)), topology)


@dataclass(frozen=True, kw_only=True)
class ServeRecipe(_OfModel):
    """A configuration of `fornax serve` and the chips that it is made for."""

    def config(self) -> ServingConfig:
        """The configuration, of the engine alone."""
        return load(ServingConfig, file=self.path)

    def plan(self, topology: Topology) -> ServePlan:
        """As `fornax plan serve --predicted` plans it, the model's files not needed."""
        with self.model() as folder:
            return plan_serve(folder, topology, self.config(), predicted=True)


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
    """Every recipe of pretraining that says what it is planned for, by name."""
    return [one for one in _read(folder) if isinstance(one, Recipe)]


def find_denoiser_recipes(folder: Path | None = None) -> list[DenoiserRecipe]:
    """Every recipe of a denoiser that says what it is planned for, by name."""
    return [one for one in _read(folder) if isinstance(one, DenoiserRecipe)]


def find_tune_recipes(folder: Path | None = None) -> list[TuneRecipe]:
    """Every recipe of post-training that says what it is planned for, by name."""
    return [one for one in _read(folder) if isinstance(one, TuneRecipe)]


def find_serve_recipes(folder: Path | None = None) -> list[ServeRecipe]:
    """Every recipe of serving that says what it is planned for, by name."""
    return [one for one in _read(folder) if isinstance(one, ServeRecipe)]


def _read(folder: Path | None) -> Iterator[_Planned]:
    for path in sorted((folder or recipes_folder()).glob("*.yaml")):
        text = path.read_text(encoding="utf-8")
        planned, title, command = (p.search(text) for p in (_PLANNED, _TITLE, _COMMAND))
        if not planned or not title or not command:
            continue
        topologies = tuple(name.strip() for name in planned[1].split(","))
        common = {"path": path, "title": title[1], "topologies": topologies}
        shapes, words = _SHAPES.search(text), command[1].split()
        match words[0]:
            case "train":
                yield Recipe(**common)
            case "diffusion":
                yield DenoiserRecipe(**common)
            case "tune" if shapes:
                yield TuneRecipe(**common, shapes=shapes[1], method=words[1])
            case "serve" if shapes:
                yield ServeRecipe(**common, shapes=shapes[1])


def program_key(recipe: Recipe | DenoiserRecipe, topology: Topology) -> str:
    """Names the training step of a recipe on chips: another config or topology, another key."""
    from fornax.plan.compile.diffusion import diffusion_request
    from fornax.plan.compile.train import train_request

    if isinstance(recipe, DenoiserRecipe):
        request = diffusion_request(recipe.config())
    else:
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


def keep_compiled(
    recipe: Recipe | DenoiserRecipe, topology: Topology, program: ProgramReport, mfu: float
) -> Compiled:
    """Keep what the compiler made of a recipe's training step, in `compiled.json` beside it."""
    compilation = program.compilation
    assert compilation is not None
    found = Compiled(
        recipe=recipe.name,
        topology=topology.name,
        key=program_key(recipe, topology),
        date=datetime.datetime.now(tz=datetime.UTC).date().isoformat(),
        versions=compilation.versions,
        compile_seconds=round(compilation.compile_seconds, 1),
        memory_bytes=program.memory.total,
        fits=program.memory.fits,
        step_seconds=program.step_seconds,
        mfu=mfu,
    )
    kept = {**compiled_recipes(recipe.path.parent), (recipe.name, topology.name): found}
    rows = [to_mapping(kept[pair]) for pair in sorted(kept)]
    write_whole(recipe.path.parent / _KEPT, json.dumps(rows, indent=1).encode() + b"\n")
    return found
