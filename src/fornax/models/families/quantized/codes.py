"""Codes of quantized matrices as packed products take them (`fornax.kernels.pack_codes`).

What a file's own products multiply is laid out again, never rounded: a code times its scale in
float32 is, rounded to what the format's library multiplies in, the dequantized value. A GGUF file's
blocks are `fornax.gguf.BlockIntegers`.

O outputs, I inputs, G groups of inputs, E experts.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np

from fornax.gguf import BlockIntegers

__all__ = ["NO_PRODUCT", "CodeFormat", "Codes", "StoredCodes", "floats", "integers", "sort_inputs"]

NO_PRODUCT = "no product takes codes of its format"
"""Why a matrix is dequantized."""
_GROUPS = (128, 64, 32)
"""Inputs that may share a scale in products."""


class CodeFormat(NamedTuple):
    """How products read codes."""

    precision: Literal["int8", "int4", "fp8", "mxfp4", "blocks"]
    """See `fornax.kernels.pack`; "blocks": see `fornax.kernels.block_weight`."""
    group: int | None
    """Inputs that share a scale, the last group perhaps fewer; None for all of an output, or where
    blocks say it."""
    ordered: bool = False
    """Whether inputs are sorted by their groups, in activation order."""
    kinds: tuple[str, ...] = ()
    """Of blocks: GGUF's type of each layer."""

    def __str__(self) -> str:
        """As logs have it."""
        if self.kinds:
            return " and ".join(sorted(set(self.kinds)))
        text = self.precision if self.group is None else f"{self.precision} by {self.group} inputs"
        return f"{text} in activation order" if self.ordered else text


class Codes(NamedTuple):
    """The arrays of a matrix."""

    values: np.ndarray
    """[O, I]: int4's uint8 from 0 to 15, int8, float8_e4m3fn, or e2m1 as uint8 from 0 to 15."""
    scales: np.ndarray
    """[O, G]: float32, or mxfp4's e8m0 as uint8."""
    zeros: np.ndarray | None = None
    """[O, G] uint8: the code of 0, for int4."""
    order: np.ndarray | None = None
    """[I] int32, in activation order: which of the file's inputs is at each place here."""


@dataclass(frozen=True)
class StoredCodes:
    """The codes of a stored matrix, or of a tensor of one for each expert, not read yet."""

    format: CodeFormat
    reader: Callable[[int], Codes | BlockIntegers]
    """Reads the codes of one matrix, outputs along the first axis of all arrays but `order`."""

    def read(self, matrix: int = 0) -> Codes | BlockIntegers:
        """The codes of one matrix, by its number in a tensor that holds all experts'.

        Raises:
          CheckpointError: scales that are not finite, as reading the values does.
        """
        return self.reader(matrix)


def integers(
    bits: int,
    size: int,
    inputs: int,
    codes: Callable[[], np.ndarray],
    scales: Callable[[], np.ndarray],
    zeros: Callable[[], np.ndarray],
    groups: np.ndarray | None = None,
) -> StoredCodes | str:
    """The codes of a matrix of integers, whose values are (code - zero point) x scale.

    Codes of up to four bits become int4, others int8, which has no zero points: those are
    subtracted. Of eight bits that must leave them in eight, and does where the zero point is 128.

    Args:
      bits: of a code, 2 to 8.
      size: inputs that share a scale.
      inputs: of the matrix.
      codes: reads uint8 [O, I], from 0 to 2^bits - 1.
      scales: reads float32 [O, groups of `size`].
      zeros: reads the zero points, uint8 in the shape of scales.
      groups: the group of each input; None where they lie one after another.

    Returns:
      The codes, or why products cannot take them.
    """
    group = _group(size, inputs)
    if group is None:
        return _no_group(size)
    if bits == 8 and (zeros() != 128).any():
        return "it has 8 bits and zero points other than 128"
    order = None if groups is None else sort_inputs(groups, size)
    if isinstance(order, str):
        return order

    def read(_: int) -> Codes:
        values, points = codes(), zeros()
        if order is not None:
            values = values[:, order]
        if bits <= 4:
            held, points = (_spread(each, size, group, inputs) for each in (scales(), points))
            return Codes(values, held, points, order)
        if bits == 8:
            values = (values ^ np.uint8(128)).view(np.int8)
        else:
            each = np.repeat(points.view(np.int8), min(size, inputs), axis=1)[:, :inputs]
            values = values.view(np.int8) - each
        return Codes(values, _spread(scales(), size, group, inputs), None, order)

    form = CodeFormat("int4" if bits <= 4 else "int8", group, order is not None)
    return StoredCodes(form, read)


def sort_inputs(groups: np.ndarray, size: int) -> np.ndarray | str | None:
    """The order of inputs in which those of each group lie one after another.

    Args:
      groups: the group of each input, from 0.
      size: inputs of a group; of the last one perhaps fewer.

    Returns:
      int32, which input is at each place; None where they are so as they are. Or why there is none.
    """
    places = np.arange(len(groups)) // size
    if (groups == places).all():
        return None
    order = np.argsort(groups, kind="stable").astype(np.int32)
    if (groups[order] != places).any():
        return "its groups in activation order differ in size"
    return order


def floats(
    size: int, inputs: int, codes: Callable[[], np.ndarray], scales: Callable[[], np.ndarray]
) -> StoredCodes | str:
    """The codes of a matrix of float8_e4m3fn.

    Args:
      size: inputs that share a scale.
      inputs: of the matrix.
      codes: reads float8_e4m3fn [O, I].
      scales: reads float32 [O, groups of `size`].

    Returns:
      The codes, or why products cannot take them.
    """
    if size >= inputs:
        return StoredCodes(CodeFormat("fp8", None), lambda _: Codes(codes(), scales()))
    group = _group(size, inputs)
    if group is None:
        return _no_group(size)
    return StoredCodes(
        CodeFormat("fp8", group), lambda _: Codes(codes(), _spread(scales(), size, group, inputs))
    )


def _group(size: int, inputs: int) -> int | None:
    """The largest groups of products that groups of `size` consist of."""
    if size >= inputs:
        return _GROUPS[0]
    return next((group for group in _GROUPS if size % group == 0), None)


def _no_group(size: int) -> str:
    return f"its groups of {size} inputs are not a multiple of {_GROUPS[-1]}"


def _spread(each: np.ndarray, size: int, group: int, inputs: int) -> np.ndarray:
    """What groups of `size` have, for each of the smaller groups that they consist of."""
    count = -(-inputs // group)
    return np.repeat(each, -(-min(size, inputs) // group), axis=1)[:, :count]
