"""The list of keys that help and reference pages are made from."""

import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import pytest

from fornax.config import Field, describe, load


@dataclass(frozen=True, kw_only=True)
class Base:
    seed: int = 0
    """Where randomness starts,
    on every host."""


@dataclass(frozen=True, kw_only=True)
class Leaf(Base):
    type: Literal["leaf"] = "leaf"
    rate: float = 0.5
    "Plain string."


@dataclass(frozen=True, kw_only=True)
class Branch:
    type: Literal["branch"] = "branch"
    parts: "tuple[Branch | Leaf, ...]" = ()
    """What depends on it."""


@dataclass(frozen=True, kw_only=True)
class Tree:
    root: Branch | Leaf = field(default_factory=lambda: Leaf(rate=0.25))
    """Where it starts."""
    base: Base = Base(seed=7)
    where: Path
    named: dict[str, Base] = field(default_factory=dict)
    undocumented: int | None = None


def test_every_key_has_path_type_default_and_documentation():
    assert describe(Tree, "tree") == [
        Field(
            path="tree.root.type", type="branch | leaf", default="leaf", doc="Where it starts."
        ),
        Field(
            path="tree.root.parts",
            type="tuple[Branch | Leaf, ...]",
            default="[]",
            doc="What depends on it.",
            variant="branch",
        ),
        Field(path="tree.root.parts.N.type", type="branch | leaf", default="required", doc="What "
              "depends on it.", variant="branch"),
        Field(path="tree.root.parts.N.seed", type="int", default="0", doc="Where randomness "
              "starts, on every host.", variant="leaf"),
        Field(path="tree.root.parts.N.rate", type="float", default="0.5", doc="Plain string.",
              variant="leaf"),
        Field(path="tree.root.seed", type="int", default="0", doc="Where randomness starts, on "
              "every host.", variant="leaf"),
        Field(path="tree.root.rate", type="float", default="0.25", doc="Plain string.",
              variant="leaf"),
        Field(path="tree.base.seed", type="int", default="7", doc="Where randomness starts, on "
              "every host."),
        Field(path="tree.where", type="path", default="required", doc=""),
        Field(path="tree.named", type="dict[str, Base]", default="{}", doc=""),
        Field(path="tree.named.KEY.seed", type="int", default="0", doc="Where randomness starts, "
              "on every host."),
        Field(path="tree.undocumented", type="int | null", default="null", doc=""),
    ]  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class AnyField:
    value: Any = 0


@dataclass(frozen=True, kw_only=True)
class SetField:
    value: set[str] = field(default_factory=set)


@dataclass(frozen=True, kw_only=True)
class IntKeys:
    value: dict[int, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Untold:
    value: Leaf | Base = field(default_factory=Base)


@dataclass(frozen=True, kw_only=True)
class Leaf2:
    type: Literal["leaf"] = "leaf"


@dataclass(frozen=True, kw_only=True)
class Twice:
    value: Leaf | Leaf2 = field(default_factory=Leaf)


@dataclass(frozen=True, kw_only=True)
class DictOrConfig:
    value: dict[str, int] | Leaf = field(default_factory=Leaf)


@pytest.mark.parametrize(
    ("cls", "message"),
    [
        (AnyField, r"AnyField\.value: typing\.Any cannot annotate a config field"),
        (SetField, r"SetField\.value: set\[str\] cannot annotate"),
        (IntKeys, r"IntKeys\.value: the keys of a dict are str"),
        (Untold, r"Untold\.value: Base needs a field type"),
        (DictOrConfig, r"DictOrConfig\.value: a union of a dataclass and a dict"),
    ],
)
def test_an_annotation_outside_the_rules_is_a_programming_error(cls, message):
    with pytest.raises(TypeError, match=message):
        load(cls)


def test_two_variants_of_one_type_are_a_programming_error():
    with pytest.raises(TypeError, match=r"Twice\.value: two variants have type 'leaf'"):
        load(Twice)


def test_importing_config_imports_nothing_heavy():
    code = (
        "import sys, fornax.config; heavy = {'jax', 'numpy', 'flax', 'tyro', 'rich'};"
        "print(sorted(heavy & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
