"""What an exported function takes and gives: specs, and a function's whole signature."""

import dataclasses
import math
from collections.abc import Mapping
from functools import cached_property

import numpy as np

from fornax.config.errors import BundleError
from fornax.export import expressions
from fornax.export.dtypes import BYTES, TENSORS, numpy_dtype

__all__ = ["Signature", "Size", "Spec", "TensorSpec"]

Size = int | str


@dataclasses.dataclass(frozen=True)
class Spec:
    """An input of an exported function.

    Args:
      shape: sizes; a string names a symbolic dimension, shared by all inputs that name it.
      dtype: a dtype of the V2 protocol by numpy's name, or `bytes`: strings on the wire, for the
        function uint8 with the last dimension as the strings' length, filled up with zeros.
      pad: what fills a ragged tail and rows that no request asked for.
      lengths: the name of one more argument of the function, int32 by row, which the loader
        fills with each row's own size along this input's first symbolic dimension after the
        batch: what a mask is made of. No client sends it.
      axes: logical axes for a mesh, one a dimension.
      low: least value of generated inputs (warm-up, golden, checks).
      high: one more than their greatest value; for token ids the size of the vocabulary.
    """

    shape: tuple[Size, ...]
    dtype: str
    _: dataclasses.KW_ONLY
    pad: int | float | bool = 0
    lengths: str | None = None
    axes: tuple[str | None, ...] | None = None
    low: int | float | None = None
    high: int | float | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "shape", tuple(self.shape))
        if self.axes is not None:
            object.__setattr__(self, "axes", tuple(self.axes))
        for size in self.shape:
            if isinstance(size, str):
                if not size.isidentifier():
                    raise BundleError(
                        f"Spec dimension {size!r} is not a name; inputs have numbers and names "
                        "such as 'b', outputs get what the function makes of them"
                    )
            elif not isinstance(size, int) or isinstance(size, bool) or size < 0:
                raise BundleError(f"Spec dimension {size!r} is neither a name nor a size >= 0")
        if self.dtype not in (*TENSORS, BYTES):
            raise BundleError(f"Spec dtype {self.dtype!r} is none of {', '.join(TENSORS)}, {BYTES}")
        if self.dtype == BYTES and (len(self.shape) < 2 or not isinstance(self.shape[-1], str)):
            raise BundleError(
                f"a bytes input needs a named last dimension for the strings' length, as in "
                f"Spec(('b', 'n'), 'bytes'); it has shape {self.shape}"
            )
        if self.axes is not None and len(self.axes) != len(self.shape):
            raise BundleError(f"axes {self.axes} has not one entry for each of {self.shape}")
        if self.lengths is not None and not self.lengths.isidentifier():
            raise BundleError(f"lengths={self.lengths!r} is not a name of an argument")
        self._check_numbers()

    def _check_numbers(self) -> None:
        if self.low is not None and self.high is not None and not self.low < self.high:
            raise BundleError(f"low={self.low} is not below high={self.high}")
        given = {"pad": self.pad, "low": self.low, "high": self.high}
        if self.dtype == BYTES:
            for name, value in given.items():
                if value is not None and value != 0:
                    raise BundleError(f"{name}={value!r} means nothing for bytes; leave it out")
            return
        dtype = numpy_dtype(self.dtype)
        if dtype.kind not in "iu":
            return
        limits = np.iinfo(dtype)
        for name, value in given.items():
            most = limits.max + (name == "high")
            if value is not None and not (value == int(value) and limits.min <= value <= most):
                raise BundleError(
                    f"{name}={value!r} is none of {self.dtype}'s numbers, "
                    f"{limits.min} to {limits.max}"
                )


@dataclasses.dataclass(frozen=True, kw_only=True)
class TensorSpec:
    """A tensor of an exported function by name.

    Sizes of inputs are numbers and names of dimensions, those of outputs expressions of them.
    """

    name: str
    shape: tuple[Size, ...]
    dtype: str
    pad: int | float | bool = 0
    lengths: str | None = None
    axes: tuple[str | None, ...] | None = None
    low: int | float | None = None
    high: int | float | None = None

    def sizes(self, dims: Mapping[str, int]) -> tuple[int, ...]:
        """The shape in numbers."""
        return tuple(expressions.evaluate(size, dims) for size in self.shape)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Signature:
    """A function of a bundle as its callers see it.

    `inputs` are a client's; `lengths` maps the arguments that the loader fills to the input they
    measure; `ragged` are the dimensions padded to a bucket besides `batch`, `exact` those whose
    sizes must be a bucket's. `shapes` lists every combination of sizes that is compiled.
    """

    name: str
    inputs: Mapping[str, TensorSpec]
    outputs: Mapping[str, TensorSpec]
    batch: str | None
    exact: tuple[str, ...]
    shapes: tuple[Mapping[str, int], ...]

    @cached_property
    def dims(self) -> tuple[str, ...]:
        """Symbolic dimensions, in order of first use."""
        return tuple(
            dict.fromkeys(
                size
                for spec in self.inputs.values()
                for size in spec.shape
                if isinstance(size, str)
            )
        )

    @cached_property
    def ragged(self) -> tuple[str, ...]:
        """Dimensions that are padded, the batch apart."""
        return tuple(d for d in self.dims if d != self.batch and d not in self.exact)

    @cached_property
    def buckets(self) -> dict[str, tuple[int, ...]]:
        """Sizes compiled, by dimension, ascending."""
        return {d: tuple(sorted({shape[d] for shape in self.shapes})) for d in self.dims}

    @cached_property
    def by_row(self) -> frozenset[str]:
        """Outputs that have a row for each of the inputs'."""
        return frozenset(
            name
            for name, spec in self.outputs.items()
            if self.batch is not None and spec.shape[:1] == (self.batch,)
        )

    @cached_property
    def lengths(self) -> dict[str, str]:
        """Arguments that the loader fills: name to the input whose rows they measure."""
        found: dict[str, str] = {}
        for name, spec in self.inputs.items():
            if spec.lengths is not None:
                found.setdefault(spec.lengths, name)
        return found

    @cached_property
    def arguments(self) -> tuple[TensorSpec, ...]:
        """What the compiled function takes after the weights, in order; no dtype is `bytes`."""
        plain = [
            dataclasses.replace(s, dtype="uint8") if s.dtype == BYTES else s
            for s in self.inputs.values()
        ]
        sizes = [
            TensorSpec(
                name=name,
                shape=(self.inputs[of].shape[0],),
                dtype="int32",
                axes=(_first(self.inputs[of]),),
            )
            for name, of in self.lengths.items()
        ]
        return (*plain, *sizes)

    def measured(self, name: str) -> str:
        """The dimension along which input `name` is measured for its `lengths`."""
        spec = self.inputs[name]
        for size in spec.shape[1:]:
            if isinstance(size, str) and size != self.batch:
                return size
        raise BundleError(
            f"input {name!r} of {self.name!r} has lengths={spec.lengths!r} and no symbolic "
            f"dimension after the first; its shape is {spec.shape}"
        )

    def rows_of(self, spec: TensorSpec) -> int | None:
        """Which dimension of a tensor is the batch."""
        return spec.shape.index(self.batch) if self.batch in spec.shape else None

    def volume(self, dims: Mapping[str, int]) -> int:
        """Elements of all inputs at these sizes: what choosing a bucket compares."""
        return sum(math.prod(spec.sizes(dims)) for spec in self.inputs.values())


def _first(spec: TensorSpec) -> str | None:
    return spec.axes[0] if spec.axes else None
