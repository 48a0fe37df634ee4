"""Shapes as optimized HLO prints them: dtype, dimensions, layout, tiles, memory space; their bytes.

`bf16[32,32,4096]{2,1,0:T(8,128)(2,1)S(1)}` is an array whose last dimension is the most minor, laid
out in tiles of 8 x 128 (of pairs of rows), in memory space 1. A tuple prints in parentheses.
"""

import dataclasses
import functools
import math
import re
from collections.abc import Iterable

HBM = 0
"""The memory space that layouts leave out: main memory."""
VMEM = 1
"""TPU's on-chip vector memory."""
HOST = 5
"""The host's memory, where offloaded arrays lie."""

_WIDTHS = {
    0: "token opaque",
    2: "s2 u2",
    4: "s4 u4 f4e2m1fn",
    8: "pred s1 u1 s8 u8",
    16: "s16 u16 f16 bf16",
    32: "s32 u32 f32",
    64: "s64 u64 f64 c64",
    128: "c128",
}
_NAMES = {
    "bf16": "bfloat16",
    "f16": "float16",
    "f32": "float32",
    "f64": "float64",
    "s8": "int8",
    "u8": "uint8",
    "s4": "int4",
    "u4": "uint4",
    "s32": "int32",
    "u32": "uint32",
    "s64": "int64",
    "u64": "uint64",
    "s16": "int16",
    "u16": "uint16",
    "pred": "bool",
    "c64": "complex64",
    "c128": "complex128",
}
_BITS = {dtype: bits for bits, dtypes in _WIDTHS.items() for dtype in dtypes.split()}
_ARRAY = re.compile(r"([a-z]\w*)\[([^\]]*)\](?:\{([^{}]*)\})?")
_TILES = re.compile(r"T((?:\([\d,*]*\))+)")
_SPACE = re.compile(r"S\((\d+)\)")
_ELEMENT_BITS = re.compile(r"E\((\d+)\)")
_NUMBER = re.compile(r"\d+")
COMMENT = re.compile(r"/\*.*?\*/")
SPECIAL = re.compile(r'"[^"\\]*(?:\\.[^"\\]*)*"|[(){}\[\],]', re.DOTALL)
"""A string, a bracket or a comma."""


@dataclasses.dataclass(frozen=True, slots=True)
class Shape:
    """One array, or a tuple of shapes (`elements` is then not None and the rest is empty)."""

    dtype: str = ""
    dims: tuple[int, ...] = ()
    minor_to_major: tuple[int, ...] = ()
    tiles: tuple[tuple[int, ...], ...] = ()
    """In the order printed; -1 stands for the `*` that merges a dimension into the next."""
    space: int = HBM
    element_bits: int = 0
    """0: the dtype's own."""
    elements: tuple["Shape", ...] | None = None

    @property
    def size(self) -> int:
        """Elements of the array; of all arrays of a tuple."""
        if self.elements is not None:
            return sum(element.size for element in self.elements)
        return math.prod(self.dims)

    @property
    def unpadded_bytes(self) -> int:
        """Bytes of the elements alone."""
        return sum(-(-leaf.size * _bits(leaf) // 8) for leaf in leaves(self))

    @property
    def bytes(self) -> int:
        """Bytes in memory, with what the tiles pad, in whatever memory space."""
        return sum(_padded_bytes(leaf) for leaf in leaves(self))

    def bytes_in(self, space: int) -> int:
        """Bytes in memory, with padding, of the arrays in one memory space."""
        return sum(_padded_bytes(leaf) for leaf in leaves(self) if leaf.space == space)

    def at(self, index: tuple[int, ...]) -> "Shape":
        """Return the shape inside nested tuples at `index`."""
        shape = self
        for position in index:
            if shape.elements is None:
                raise IndexError(f"{shape} is not a tuple; it has no element {position}")
            shape = shape.elements[position]
        return shape

    def __str__(self) -> str:
        """Print dtype and dimensions, without the layout."""
        if self.elements is not None:
            return "(" + ", ".join(map(str, self.elements)) + ")"
        return f"{self.dtype}[{','.join(map(str, self.dims))}]"


def leaves(shape: Shape) -> tuple[Shape, ...]:
    """Return the arrays of a shape, in order."""
    if shape.elements is None:
        return (shape,)
    return tuple(leaf for element in shape.elements for leaf in leaves(element))


@functools.lru_cache(maxsize=1 << 16)
def parse_shape(text: str) -> Shape:
    """Parse one printed shape.

    Raises:
        ValueError: the text is not a shape.
    """
    text = COMMENT.sub("", text).strip()
    if text.startswith("("):
        inside = text[1:-1].strip()
        return Shape(elements=tuple(map(parse_shape, split_outer(inside))) if inside else ())
    found = _ARRAY.fullmatch(text)
    if not found:
        raise ValueError(f"not the text of an HLO shape: {text[:200]!r}")
    dtype, dims, layout = found.groups()
    sizes = numbers(dims)
    order, _, rest = (layout or "").partition(":")
    minor_to_major = numbers(order)
    tiles, space, bits = (p.search(rest) for p in (_TILES, _SPACE, _ELEMENT_BITS))
    return Shape(
        dtype,
        sizes,
        minor_to_major if len(minor_to_major) == len(sizes) else tuple(reversed(range(len(sizes)))),
        _tiles(tiles.group(1)) if tiles else (),
        int(space.group(1)) if space else HBM,
        int(bits.group(1)) if bits else 0,
    )


def dtype_bits(dtype: str) -> int:
    """Return the bits of one element of a dtype that HLO names; 8 for float8 in all its forms.

    Raises:
        ValueError: the dtype is not known.
    """
    if dtype in _BITS:
        return _BITS[dtype]
    if dtype.startswith("f8"):
        return 8
    raise ValueError(f"not a dtype of HLO that is known here: {dtype!r}")


def dtype_name(dtype: str) -> str:
    """Return the name that NumPy and JAX use; every float8 is "float8"."""
    return "float8" if dtype.startswith("f8") else _NAMES.get(dtype, dtype)


def largest_dtype(shapes: Iterable[Shape]) -> str:
    """Return the name of the dtype of the largest array, empty where there is none."""
    arrays = [leaf for shape in shapes for leaf in leaves(shape)]
    return dtype_name(max(arrays, key=lambda leaf: leaf.unpadded_bytes).dtype) if arrays else ""


def _bits(shape: Shape) -> int:
    return shape.element_bits or dtype_bits(shape.dtype)


@functools.lru_cache(maxsize=1 << 16)
def _padded_bytes(shape: Shape) -> int:
    if not shape.tiles:
        return -(-shape.size * _bits(shape) // 8)
    inner = [shape.dims[dim] for dim in reversed(shape.minor_to_major)]
    blocks = 1
    for tile in shape.tiles:
        counts, inner = _apply(inner, tile)
        blocks *= math.prod(counts)
    return -(-blocks * math.prod(inner) * _bits(shape) // 8)


def _apply(dims: list[int], tile: tuple[int, ...]) -> tuple[list[int], list[int]]:
    """Return the counts of tiles along each dimension, and the tile's own dimensions."""
    merged = list(dims)
    for position in range(len(tile) - 1):
        if tile[position] == -1 and len(merged) >= 2:
            at = len(merged) - len(tile) + position
            merged[at : at + 2] = [merged[at] * merged[at + 1]]
    sizes = [size for size in tile if size != -1]
    merged = [1] * (len(sizes) - len(merged)) + merged
    kept = len(merged) - len(sizes)
    counts = [-(-dim // size) for dim, size in zip(merged[kept:], sizes, strict=True)]
    return merged[:kept] + counts, sizes


def numbers(text: str) -> tuple[int, ...]:
    """The whole numbers in a text: `{0, 2}` gives (0, 2)."""
    return tuple(map(int, _NUMBER.findall(text)))


def split_outer(text: str) -> list[str]:
    """Split at the text's own commas, not those in strings and brackets."""
    parts, depth, start = [], 0, 0
    for found in SPECIAL.finditer(text):
        token = found.group()
        if token in "([{":
            depth += 1
        elif token in ")]}":
            depth -= 1
        elif token == "," and depth == 0:
            parts.append(text[start : found.start()])
            start = found.end()
    return [*parts, text[start:]]


def _tiles(text: str) -> tuple[tuple[int, ...], ...]:
    """Parse `(8,128)(2,1)`."""
    return tuple(
        tuple(-1 if size == "*" else int(size) for size in group.split(",") if size)
        for group in re.findall(r"\(([\d,*]*)\)", text)
    )
