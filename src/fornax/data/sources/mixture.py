"""The union of sources, and weighted mixtures of them."""

from dataclasses import dataclass
from typing import Literal

from fornax.config.errors import ConfigError
from fornax.data.sources.array_record import ArrayRecord
from fornax.data.sources.bagz import Bagz
from fornax.data.sources.custom import PythonSource
from fornax.data.sources.dataset import Dataset
from fornax.data.sources.hugging_face import HuggingFace
from fornax.data.sources.jsonl import Jsonl
from fornax.data.sources.parquet import Parquet
from fornax.data.sources.stdlib import Stdlib
from fornax.data.sources.text import Text
from fornax.data.sources.tfds import Tfds
from fornax.data.transforms import Transform

Source = (
    Dataset
    | Text
    | Jsonl
    | Parquet
    | ArrayRecord
    | Bagz
    | Tfds
    | HuggingFace
    | Stdlib
    | PythonSource
)


@dataclass(frozen=True, kw_only=True)
class Part:
    """One source of a mixture."""

    name: str
    """Name of the part, in errors and pictures; it also seeds the part's order."""
    source: Source
    """Where its records come from."""
    weight: float = 1.0
    """Share of the records drawn, relative to the other parts' weights."""
    transforms: tuple[Transform, ...] = ()
    """What happens to its records before the transforms of all."""

    def __post_init__(self) -> None:
        if not 0.0 < self.weight < float("inf"):
            raise ConfigError(f"part {self.name!r}: weight={self.weight} must be positive")


@dataclass(frozen=True, kw_only=True)
class Mixture:
    """Several sources, records drawn in proportion to their weights."""

    type: Literal["mixture"] = "mixture"
    parts: tuple[Part, ...]
    """The sources with their weights."""

    def __post_init__(self) -> None:
        names = [part.name for part in self.parts]
        if not names:
            raise ConfigError("mixture: parts is empty; name at least one source")
        if len(set(names)) < len(names):
            raise ConfigError(f"mixture: two parts share a name in {', '.join(sorted(names))}")
