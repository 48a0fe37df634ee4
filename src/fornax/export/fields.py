"""Strict reading of a manifest's JSON: each field has its type, none is unknown or missing."""

import itertools
import math
import re
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from fornax.config.errors import BundleError
from fornax.export import expressions
from fornax.export.dtypes import TENSORS, numpy_dtype
from fornax.export.spec import Spec, TensorSpec

__all__ = ["NAME", "Fields", "safe_path"]

NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_.\-]{0,127}")
_PART = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.\-]{0,254}")
_LARGEST = 2**53


def safe_path(name: object) -> bool:
    """Whether a name in a manifest is a plain relative path below the bundle."""
    return (
        isinstance(name, str)
        and len(name) <= 1000
        and all(_PART.fullmatch(part) for part in name.split("/"))
    )


class Fields:
    """One JSON object of a manifest; its methods return checked fields or raise BundleError."""

    def __init__(self, data: dict[str, Any], where: str):
        self.data = data
        self.where = where

    def wrong(self, key: str, why: str) -> BundleError:
        """The error that a field deserves."""
        shown = repr(self.data.get(key, "missing"))
        shown = shown if len(shown) < 80 else shown[:77] + "…"
        return BundleError(f"{self.where}: {key} is {shown}, which is {why}; export again")

    def only(self, keys: str) -> None:
        """Exactly these keys."""
        expected = set(keys.split())
        for key in self.data.keys() - expected:
            raise self.wrong(key, "unknown to this format version")
        for key in expected - self.data.keys():
            raise self.wrong(key, "needed")

    def inner(self, key: str, keys: str) -> "Fields":
        """An object in this one."""
        found = Fields(self.mapping(key), f"{self.where}: {key}")
        found.only(keys)
        return found

    def mapping(self, key: str) -> dict[str, Any]:
        """An object, unchecked inside."""
        if not isinstance(self.data[key], dict):
            raise self.wrong(key, "no object")
        return self.data[key]

    def mapping_of(self, key: str, keys: str) -> Iterator[tuple[str, "Fields"]]:
        """The objects in an object, by name."""
        for name in self.mapping(key):
            yield name, Fields(self.mapping(key), f"{self.where}: {key}").inner(name, keys)

    def records(self, key: str, keys: str | None) -> Iterator["Fields"]:
        """The objects of a list."""
        for number, item in enumerate(self.items(key)):
            if not isinstance(item, dict):
                raise self.wrong(key, "no list of objects")
            name = item.get("name", number)
            found = Fields(item, f"{self.where}: {key}[{str(name)[:60]}]")
            if keys is not None:
                found.only(keys)
            yield found

    def items(self, key: str) -> list[Any]:
        """A list, unchecked inside."""
        if not isinstance(self.data[key], list):
            raise self.wrong(key, "no list")
        return self.data[key]

    def text(self, key: str) -> str:
        """A text that is not empty."""
        if not isinstance(self.data[key], str) or not self.data[key]:
            raise self.wrong(key, "no text")
        return self.data[key]

    def name(self, key: str) -> str:
        """A name of a function."""
        if not NAME.fullmatch(self.text(key)):
            raise self.wrong(key, "no name")
        return self.data[key]

    def optional_text(self, key: str) -> str | None:
        """A text or null."""
        return None if self.data[key] is None else self.text(key)

    def texts(self, key: str) -> dict[str, str]:
        """An object of texts."""
        if not all(isinstance(v, str) for v in self.mapping(key).values()):
            raise self.wrong(key, "no object of texts")
        return self.mapping(key)

    def strings(self, key: str) -> list[str]:
        """A list of texts."""
        if not all(isinstance(v, str) for v in self.items(key)):
            raise self.wrong(key, "no list of texts")
        return self.items(key)

    def names(self, key: str, *, among: Collection[str]) -> tuple[str, ...]:
        """Different texts, each of them one of `among`."""
        found = self.strings(key)
        known = set(among)
        if len(set(found)) != len(found) or not known.issuperset(found):
            raise self.wrong(key, "no list of different known names")
        return tuple(found)

    def flag(self, key: str) -> bool:
        """True or false."""
        if not isinstance(self.data[key], bool):
            raise self.wrong(key, "neither true nor false")
        return self.data[key]

    def number(self, key: str) -> float:
        """A finite number, not negative."""
        value = self.data[key]
        if type(value) not in (int, float) or not math.isfinite(value) or value < 0:
            raise self.wrong(key, "no number >= 0")
        return float(value)

    def size(self, key: str, least: int = 0) -> int:
        """A whole number."""
        value = self.data[key]
        if type(value) is not int or not least <= value <= _LARGEST:
            raise self.wrong(key, f"no whole number >= {least}")
        return value

    def ascending(self, key: str, below: int) -> tuple[int, ...]:
        """Ascending whole numbers under a limit."""
        found = self.items(key)
        whole = all(type(v) is int and 0 <= v < below for v in found)
        if not whole or any(b <= a for a, b in itertools.pairwise(found)):
            raise self.wrong(key, f"not ascending below {below}")
        return tuple(found)

    def shape(self, key: str) -> tuple[int, ...]:
        """Sizes in numbers."""
        found = self.items(key)
        if len(found) > 32 or not all(type(v) is int and 0 <= v <= _LARGEST for v in found):
            raise self.wrong(key, "no shape")
        return tuple(found)

    def sizes(self, key: str, dims: Collection[str]) -> tuple[int | str, ...]:
        """Sizes in numbers and expressions of the given dimensions."""
        for size in self.items(key):
            if isinstance(size, str):
                if not expressions.names(size) <= set(dims):
                    raise self.wrong(key, "made of dimensions that no input has")
            elif type(size) is not int or not 0 <= size <= _LARGEST:
                raise self.wrong(key, "no shape")
        return tuple(self.items(key))

    def axes(self, key: str, rank: int) -> tuple[str | None, ...] | None:
        """Logical axes, one a dimension, or null."""
        if self.data[key] is None:
            return None
        found = self.items(key)
        if len(found) != rank or not all(a is None or isinstance(a, str) for a in found):
            raise self.wrong(key, f"not one axis for each of {rank} dimensions")
        return tuple(found)

    def dtype(self, key: str) -> str:
        """The dtype of a weight."""
        numpy_dtype(self.text(key))
        return self.data[key]

    def tensor_dtype(self, key: str) -> str:
        """The dtype of an output."""
        if self.data[key] not in TENSORS:
            raise self.wrong(key, f"none of {', '.join(TENSORS)}")
        return self.data[key]

    def input_spec(self) -> TensorSpec:
        """This object as an input."""
        pad, low, high = (self._any_number(key) for key in ("pad", "low", "high"))
        if pad is None:
            raise self.wrong("pad", "no number")
        try:
            spec = Spec(
                tuple(self.items("shape")),
                self.text("dtype"),
                pad=pad,
                lengths=self.optional_text("lengths"),
                axes=self.axes("axes", len(self.items("shape"))),
                low=low,
                high=high,
            )
        except BundleError as error:
            raise BundleError(f"{self.where}: {error}") from None
        return named(self.name("name"), spec)

    def _any_number(self, key: str) -> int | float | bool | None:
        """A number, an infinity or NaN by its name, or null."""
        value = self.data[key]
        if isinstance(value, str) and value in ("inf", "-inf", "nan"):
            return float(value)
        if value is not None and not isinstance(value, int | float):
            raise self.wrong(key, "no number")
        return value

    def sha256(self, key: str) -> str:
        """A SHA-256 in hexadecimal."""
        if not re.fullmatch("[0-9a-f]{64}", self.text(key)):
            raise self.wrong(key, "no SHA-256")
        return self.data[key]

    def path_of(self, name: str) -> str:
        """A name that is a path of this bundle's and not the manifest's."""
        if not safe_path(name) or name == "manifest.json":
            raise BundleError(
                f"{self.where}: files has {name[:80]!r}, which is not a path inside the bundle; "
                "export again"
            )
        return name

    def file(self, key: str, files: Mapping[str, object]) -> str:
        """A file that the manifest lists."""
        if self.text(key) not in files:
            raise self.wrong(key, "not among the bundle's files")
        return self.data[key]


def named(name: str, spec: Spec) -> TensorSpec:
    """A spec with its name."""
    return TensorSpec(
        name=name,
        shape=spec.shape,
        dtype=spec.dtype,
        pad=spec.pad,
        lengths=spec.lengths,
        axes=spec.axes,
        low=spec.low,
        high=spec.high,
    )
