"""The JSON Schema of a config takes what `load` takes, and refuses what it refuses of one key."""

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import jsonschema
import pytest

from fornax.config import ConfigError, dump_yaml, from_mapping, json_schema, to_mapping


@dataclass(frozen=True, kw_only=True)
class Adam:
    """Moments."""

    type: Literal["adam", "adamw"] = "adam"
    b2: float = 0.999


@dataclass(frozen=True, kw_only=True)
class Own:
    """Code of the user's."""

    type: str
    options: dict[str, object] = dataclasses.field(default_factory=dict, metadata={"rest": True})


@dataclass(frozen=True, kw_only=True)
class SGD:
    """Plain."""

    type: Literal["sgd"] = "sgd"
    momentum: float


@dataclass(frozen=True, kw_only=True)
class Tree:
    """A config that holds its own kind."""

    width: int
    below: tuple["Tree", ...] = ()


@dataclass(frozen=True, kw_only=True)
class Config:
    """All kinds of keys."""

    optimizer: Adam | SGD | Own = Adam()
    """How steps are made."""
    other: Adam | SGD | None = None
    tree: Tree = Tree(width=3)
    path: Path = Path("runs")
    size: tuple[int, int] = (1, 2)
    names: tuple[str, ...] = ()
    shares: dict[str, float | None] = dataclasses.field(default_factory=dict)
    when: Literal["always", 3] | bool = False
    steps: int | None


GOOD = [
    {"steps": 3},
    {"steps": None, "path": "x", "size": [3, 4], "names": ["a"], "shares": {"a": 1, "b": None}},
    {"steps": 1, "optimizer": {"b2": 0.9}},  # the default's kind
    {"steps": 1, "optimizer": {"type": "adamw"}, "other": {"type": "sgd", "momentum": 0}},
    {"steps": 1, "optimizer": {"type": "own.py:Lion", "anything": [1, {"a": "b"}]}},
    {"steps": 1, "tree": {"below": [{"width": 1}]}},  # the width is the default's
    {"steps": 1, "when": 3},
    {"steps": 1, "when": True},
]
BAD = [
    {},
    {"steps": "3"},
    {"steps": 1, "stesp": 1},
    {"steps": 1, "size": [1]},
    {"steps": 1, "size": [1, 2, 3]},
    {"steps": 1, "optimizer": {"momentum": 0.9}},  # of sgd, which was not chosen
    {"steps": 1, "optimizer": {"type": "sgd"}},
    {"steps": 1, "optimizer": {"type": "lion"}},
    {"steps": 1, "other": {"b2": 0.9}},
    {"steps": 1, "other": {"type": "own.py:Lion"}},
    {"steps": 1, "tree": {"below": [{}]}},
    {"steps": 1, "shares": {"a": "1"}},
    {"steps": 1, "when": "never"},
    {"steps": 1, "names": "a"},
]


@pytest.fixture(scope="module")
def validator():
    schema = json_schema(Config)
    jsonschema.Draft7Validator.check_schema(schema)
    return jsonschema.Draft7Validator(schema)


@pytest.mark.parametrize("mapping", GOOD)
def test_what_loads_is_valid(mapping, validator):
    config = from_mapping(Config, mapping)
    validator.validate(mapping)
    validator.validate(to_mapping(config))  # the whole, as a run keeps it
    assert dump_yaml(config)


@pytest.mark.parametrize("mapping", BAD)
def test_what_does_not_load_is_invalid(mapping, validator):
    with pytest.raises(ConfigError):
        from_mapping(Config, mapping)
    assert not validator.is_valid(mapping)


def test_it_documents_keys():
    keys = json_schema(Config)["definitions"]["Config"]["properties"]
    assert keys["optimizer"]["description"] == "How steps are made."
    assert keys["optimizer"]["default"] == {"type": "adam", "b2": 0.999}
    assert "default" not in keys["steps"]
