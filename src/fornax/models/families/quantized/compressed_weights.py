"""How compressed-tensors keeps a module's weight, and what it is dequantized to.

Layouts, O outputs and I inputs; scales are floats [O, I / group], [O, 1], of blocks, or one:

| layout | `weight` or `weight_packed` | value |
|---|---|---|
| int-quantized | int8 [O, I] | (code - zero point) x scale |
| float-quantized | float8_e4m3fn [O, I] | code x scale |
| naive-quantized | either of these | |
| pack-quantized | int32 [O, I x bits / 32], of codes plus 2^(bits - 1) | as of integers |
| nvfp4-pack-quantized | uint8 [O, I / 2]; scales float8_e4m3fn of 16 | code x scale / global |
| mxfp4-pack-quantized | uint8 [O, I / 2]; scales powers of two, of 32 | code x scale |

Differences and products are rounded to the scales' dtype, those of four-bit floating-point numbers
to bfloat16, as `compressors/*/base.py` of compressed-tensors 0.20 computes them. Older files may
have `weight_g_idx`: the group of each input where GPTQ went by activation order.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import ml_dtypes
import numpy as np

from fornax.checkpoint.safetensors_file import StoredTensor
from fornax.config.errors import ConfigError
from fornax.models.families.quantized.bits import half_bytes, nibbles, unpack, unpack_columns
from fornax.models.families.quantized.codes import (
    NO_PRODUCT,
    CodeFormat,
    Codes,
    StoredCodes,
    floats,
    integers,
    sort_inputs,
)
from fornax.models.families.quantized.mxfp4 import powers_of_two
from fornax.models.families.quantized.tensors import (
    FLOATS,
    DequantizedTensor,
    Module,
    blocks_of,
    finite,
    over_blocks,
    refuse,
    scalar,
    times,
)

__all__ = ["LAYOUTS", "PARTS", "UNUSED", "WeightScheme", "dequantized_weight"]

PARTS = (
    "weight",
    "weight_packed",
    "weight_shape",
    "weight_zero_point",
    "weight_g_idx",
    "weight_global_scale",
)
"""Endings of a quantized module's tensors, beside weight_scale."""
UNUSED = (
    *(f"{what}_{part}" for what in ("input", "output") for part in ("scale", "zero_point")),
    "input_global_scale",
    *(f"{what}_{part}" for what in "qkv" for part in ("scale", "zero_point", "global_scale")),
)
"""Endings of tensors about activations and caches."""
_BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
_STRATEGIES = ("tensor", "channel", "group", "tensor_group", "block")


@dataclass(frozen=True, kw_only=True)
class WeightScheme:
    """What a config group says of weights."""

    layout: str
    bits: Any
    type: Any
    symmetric: Any
    strategy: Any
    group_size: Any
    block: Any

    def checked(self, source: str) -> "WeightScheme":
        """The scheme with its strategy and block filled in.

        Raises:
          ConfigError: for a combination that the layout cannot have.
        """
        strategy, size = self.strategy, self.group_size
        if strategy is None:
            strategy = "tensor" if size is None else "channel" if size == -1 else "group"
        if strategy not in _STRATEGIES:
            raise ConfigError(
                f"{source}: strategy={strategy!r} is not supported; use one of "
                f"{', '.join(_STRATEGIES)}"
            )
        kinds = LAYOUTS[self.layout]
        if (self.type, self.bits) not in kinds or not isinstance(self.symmetric, bool):
            allowed = ", ".join(f"{kind} of {bits} bits" for kind, bits in kinds)
            raise ConfigError(
                f"{source}: type={self.type!r}, num_bits={self.bits!r}, "
                f"symmetric={self.symmetric!r} is not supported in the format {self.layout}, "
                f"which has {allowed}"
            )
        if self.type == "float" and not self.symmetric:
            raise ConfigError(f"{source}: floats with zero points are not supported; only ints")
        grouped = strategy in ("group", "tensor_group")
        if grouped and (type(size) is not int or size < 1):
            raise ConfigError(f"{source}: group_size={size!r} must be a whole number above 0")
        wanted = _GROUPS.get(self.layout)
        if wanted is not None and (not grouped or size != wanted):
            raise ConfigError(
                f"{source}: strategy={strategy!r}, group_size={size!r} is not supported in the "
                f"format {self.layout}, which has groups of {wanted}"
            )
        block = self.block if strategy == "block" else None
        if strategy == "block":
            if isinstance(block, str):  # 128x128 in older files
                block = [
                    int(size) if len(size) < 10 and size.isdecimal() else 0
                    for size in block.split("x")
                ]
            sizes = block if isinstance(block, list) else []
            if len(sizes) != 2 or not all(type(x) is int and x > 0 for x in sizes):
                raise ConfigError(
                    f"{source}: block_structure={self.block!r} is not supported; it has two whole "
                    "numbers above 0, rows and columns"
                )
            block = (sizes[0], sizes[1])
        return replace(self, strategy=strategy, block=block)

    def block_of(self, shape: tuple[int, int], scale: StoredTensor) -> tuple[int, int]:
        """Rows and columns that share a scale in a matrix of this shape.

        Raises:
          CheckpointError: groups that do not divide its columns.
        """
        rows, columns = shape
        if self.strategy == "tensor":
            return rows, columns
        if self.strategy == "channel":
            return 1, columns
        if self.strategy == "block":
            return min(self.block[0], rows), min(self.block[1], columns)
        if columns % self.group_size:
            refuse(scale, f"is of groups of {self.group_size}, which do not divide {columns}")
        return 1, self.group_size


_INTEGERS = tuple(("int", bits) for bits in range(2, 9))
_FLOAT8, _FLOAT4 = ("float", 8), ("float", 4)
LAYOUTS: Mapping[str, tuple[tuple[str, int], ...]] = {
    "int-quantized": _INTEGERS,
    "float-quantized": (_FLOAT8,),
    "naive-quantized": (*_INTEGERS, _FLOAT8),
    "pack-quantized": _INTEGERS,
    "nvfp4-pack-quantized": (_FLOAT4,),
    "mxfp4-pack-quantized": (_FLOAT4,),
}
"""Type and bits of the codes that each layout can have."""
_GROUPS = {"nvfp4-pack-quantized": 16, "mxfp4-pack-quantized": 32}


def dequantized_weight(
    module: Module, scheme: WeightScheme, dtype: np.dtype | None
) -> DequantizedTensor:
    """The weight of a module.

    Args:
      module: its tensors.
      scheme: that of its config group.
      dtype: the model's; None for that of the values.

    Raises:
      CheckpointError: tensors that are missing, or of another dtype or shape than the scheme's.
    """
    make = _four_bit_floats if (scheme.type, scheme.bits) == ("float", 4) else _codes
    shape, computed, rows, codes = make(module, scheme)
    name = f"{module.name}.weight"
    return DequantizedTensor(name, dtype or computed, shape, computed, rows, codes=codes)


_Made = tuple[
    tuple[int, int],
    np.dtype,
    Callable[[int, int], np.ndarray],
    Callable[[], StoredCodes | str],
]
"""Shape, dtype, rows and codes of a `DequantizedTensor`."""


def _codes(module: Module, scheme: WeightScheme) -> _Made:
    packed = scheme.layout == "pack-quantized"
    if packed:
        codes = module.take("weight_packed", "int32")
        shape = _packed_shape(module, codes, scheme.bits)
    else:
        codes = module.take("weight", "int8" if scheme.type == "int" else "float8_e4m3fn")
        shape = (codes.shape[0], codes.shape[1])
    block = scheme.block_of(shape, module.parts["weight_scale"])
    counts = blocks_of(shape, block)
    values = _Codes(
        codes=codes,
        bits=scheme.bits,
        packed=packed,
        shape=shape,
        scale=module.take("weight_scale", *FLOATS, shape=_grid(module, "weight_scale", counts)),
        zeros=_zeros(module, scheme, shape[0], counts),
        block=block,
        groups=_groups(module, scheme, shape[1]),
    )
    return shape, values.scale.dtype, values.rows, values.stored_codes


def _packed_shape(module: Module, codes: StoredTensor, bits: int) -> tuple[int, int]:
    """Outputs and inputs, which the file tells beside the packed codes."""
    stated = module.take("weight_shape", "int64", "int32", shape=(2,))
    rows, columns = (int(size) for size in stated.view())
    if min(rows, columns) < 0 or codes.shape != (rows, -(-columns * bits // 32)):
        refuse(
            codes,
            f"has shape {list(codes.shape)}, which does not hold the {rows} x {columns} numbers "
            f"of {bits} bits that weight_shape tells",
        )
    return rows, columns


def _grid(module: Module, part: str, counts: tuple[int, int]) -> tuple[int, ...]:
    """The shape that scales must have: of one for a whole tensor some files leave axes out."""
    there = module.parts.get(part)
    one = counts == (1, 1) and there is not None and there.shape in ((), (1,))
    return there.shape if there is not None and one else counts


def _groups(module: Module, scheme: WeightScheme, columns: int) -> StoredTensor | None:
    if "weight_g_idx" not in module:
        return None
    groups = module.take("weight_g_idx", "int32", shape=(columns,))
    if scheme.strategy != "group":
        refuse(groups, f"is there, and strategy={scheme.strategy} has no groups of inputs")
    return groups


def _zeros(
    module: Module, scheme: WeightScheme, outputs: int, counts: tuple[int, int]
) -> StoredTensor | None:
    part = "weight_zero_point"
    if scheme.symmetric and part not in module:
        return None
    if scheme.type == "float":
        if module.parts[part].view().astype(np.float32).any():
            refuse(module.parts[part], "holds zero points, and floats have none in this format")
        return None
    if part in module and module.parts[part].dtype == np.int32:
        words = -(-outputs * scheme.bits // 32)
        return module.take(part, "int32", shape=(words, counts[1]))
    return module.take(part, "int8", shape=_grid(module, part, counts))


@dataclass(frozen=True, kw_only=True)
class _Codes:
    """Integers, or eight-bit floating-point numbers, with their scales."""

    codes: StoredTensor
    bits: int
    packed: bool
    shape: tuple[int, int]
    scale: StoredTensor
    zeros: StoredTensor | None
    """Of the scales' shape, or packed along the outputs."""
    block: tuple[int, int]
    groups: StoredTensor | None
    """The group of each column; None where they lie one after another."""

    def rows(self, start: int, stop: int) -> np.ndarray:
        """See `DequantizedTensor.rows`."""
        codes = self.codes.view()[start:stop]
        if self.packed:
            codes = unpack(codes, self.bits, self.shape[1]).astype(np.int16) - 2 ** (self.bits - 1)
        first, last = start // self.block[0], (stop - 1) // self.block[0] + 1
        held = _as_grid(self.scale.view())[first:last]
        over = partial(self._over, start=start, stop=stop)
        if self.zeros is not None:
            codes = codes.astype(np.int16) - over(self._zero_points(self.zeros, first, last))
        return times(codes, over(finite(held, self.scale)), self.scale.dtype)

    def stored_codes(self) -> StoredCodes | str:
        """See `DequantizedTensor.codes`."""
        size, inputs = self.block[1], self.shape[1]
        groups = None if self.groups is None else self._checked(self.groups)
        if self.codes.dtype.name == "float8_e4m3fn":
            if groups is not None and sort_inputs(groups, size) is not None:
                return "floats in activation order have no product"
            return floats(size, inputs, self.codes.view, self._scales)
        # Codes of few bits that lie in bytes are not held to those bits.
        bits = self.bits if self.packed else 8
        return integers(
            bits, size, inputs, self._unsigned, self._scales, self._unsigned_zeros, groups
        )

    def _unsigned(self) -> np.ndarray:
        if self.packed:
            return unpack(self.codes.view(), self.bits, self.shape[1])
        return self.codes.view().view(np.uint8) ^ np.uint8(128)

    def _scales(self) -> np.ndarray:
        return self._by_output(finite(self.scale.view(), self.scale))

    def _unsigned_zeros(self) -> np.ndarray:
        half = 2 ** (self.bits - 1) if self.packed else 128
        counts = blocks_of(self.shape, self.block)
        if self.zeros is None:
            return np.full((self.shape[0], counts[1]), half, np.uint8)
        points = self._zero_points(self.zeros, 0, counts[0]) + half
        return self._by_output(points.astype(np.uint8))

    def _by_output(self, held: np.ndarray) -> np.ndarray:
        """What blocks hold, for each output: [O, groups of inputs]."""
        return _as_grid(held)[np.arange(self.shape[0]) // self.block[0]]

    def _over(self, held: np.ndarray, start: int, stop: int) -> np.ndarray:
        """What blocks hold, for each number of the rows."""
        groups = None if self.groups is None else self._checked(self.groups)
        if groups is not None:
            return held[:, groups]
        return over_blocks(held, self.block, start, stop, self.shape[1])

    def _checked(self, groups: StoredTensor) -> np.ndarray | None:
        """The group of each column; None where it was made, and never filled in."""
        found, count = groups.view(), blocks_of(self.shape, self.block)[1]
        if (found < 0).any():
            return None
        if found.max(initial=0) >= count:
            refuse(groups, f"has groups beyond the {count} that have scales")
        return found

    def _zero_points(self, zeros: StoredTensor, first: int, last: int) -> np.ndarray:
        """Those of some rows of the scales."""
        least = -(2 ** (self.bits - 1))
        if zeros.dtype == np.int32:
            begin = first // 32
            words = zeros.view()[begin * self.bits : -(-last * self.bits // 32)]
            found = unpack_columns(words, self.bits, last - begin * 32)
            return found[first - begin * 32 :].astype(np.int16) + least
        points = _as_grid(zeros.view())[first:last].astype(np.int16)
        if points.min(initial=0) < least or points.max(initial=0) >= -least:
            refuse(zeros, f"holds zero points outside {least} to {-least - 1}")
        return points


def _as_grid(held: np.ndarray) -> np.ndarray:
    return held if held.ndim == 2 else held.reshape(1, 1)


def _four_bit_floats(module: Module, scheme: WeightScheme) -> _Made:
    codes = module.take("weight_packed", "uint8")
    shape = (codes.shape[0], codes.shape[1] * 2)
    scale = module.parts["weight_scale"]
    block = scheme.block_of(shape, scale)
    counts = blocks_of(shape, block)
    if scheme.layout == "mxfp4-pack-quantized":
        module.take("weight_scale", "uint8", shape=counts)
        return shape, _BFLOAT16, partial(_mxfp4, codes, scale), partial(_mxfp4_codes, codes, scale)
    module.take("weight_scale", "float8_e4m3fn", shape=counts)
    whole = module.parts.get("weight_global_scale")
    if whole is None:
        refuse(scale, f"is there and {module.name}.weight_global_scale is not")
    module.take("weight_global_scale", *FLOATS, shape=whole.shape)
    return shape, _BFLOAT16, partial(_nvfp4, codes, scale, whole), lambda: NO_PRODUCT


def _mxfp4(codes: StoredTensor, scale: StoredTensor, start: int, stop: int) -> np.ndarray:
    scales = powers_of_two(scale.view()[start:stop], scale)
    return times(nibbles(codes.view()[start:stop]), np.repeat(scales, 32, axis=1), _BFLOAT16)


def _mxfp4_codes(codes: StoredTensor, scale: StoredTensor) -> StoredCodes:
    def read(_: int) -> Codes:
        powers_of_two(scale.view(), scale)  # whether all are numbers
        return Codes(half_bytes(codes.view()), scale.view())

    return StoredCodes(CodeFormat("mxfp4", 32), read)


def _nvfp4(
    codes: StoredTensor, scale: StoredTensor, whole: StoredTensor, start: int, stop: int
) -> np.ndarray:
    divisor = scalar(whole)
    if divisor == 0:
        refuse(whole, "is 0, and scales are divided by it")
    scales = finite(scale.view()[start:stop], scale) / divisor
    return times(nibbles(codes.view()[start:stop]), np.repeat(scales, 16, axis=1), _BFLOAT16)
