"""Warm-up inputs and golden outputs: made at save, run and compared at load."""

import dataclasses
import math
from collections.abc import Mapping, Sequence

import numpy as np
from safetensors import SafetensorError, deserialize
from safetensors.numpy import save

from fornax.checkpoint.safetensors_file import DTYPES
from fornax.config.errors import BundleError
from fornax.export import buckets, expressions
from fornax.export.dtypes import BYTES, numpy_dtype
from fornax.export.manifest import Golden, Tolerance
from fornax.export.spec import Signature, TensorSpec

__all__ = [
    "GoldenArrays",
    "Report",
    "arrays_of",
    "coarsest",
    "compare",
    "default_tolerance",
    "difference",
    "dims_for",
    "example",
    "examples",
    "pack",
    "record",
    "regions",
    "unpack",
]

_EPSILON = {"bfloat16": 2.0**-8, "float16": 2.0**-11, "float32": 2.0**-24, "float64": 2.0**-53}
_LETTERS = np.frombuffer(b"abcdefghijklmnopqrstuvwxyz 0123456789", np.uint8)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Report:
    """What a golden run gave: whether all bits agree, and the largest difference by output."""

    exact: bool
    worst: Mapping[str, float]


@dataclasses.dataclass(frozen=True)
class GoldenArrays:
    """Inputs of the golden bucket's sizes, lengths included, and the outputs they had."""

    inputs: Mapping[str, np.ndarray]
    outputs: Mapping[str, np.ndarray]


def pack(arrays: Mapping[str, np.ndarray]) -> bytes:
    """Named arrays as a safetensors file."""
    return save({name: np.asarray(array, order="C") for name, array in arrays.items()})


def unpack(data: bytes, where: object) -> dict[str, np.ndarray]:
    """The arrays in a safetensors file's bytes.

    Raises:
      BundleError: naming `where` when they are not such a file.
    """
    try:
        return {
            name: np.frombuffer(entry["data"], DTYPES[entry["dtype"]]).reshape(entry["shape"])
            for name, entry in deserialize(data)
        }
    except (SafetensorError, KeyError) as error:
        raise BundleError(f"{where} is not a readable safetensors file ({error})") from None


def arrays_of(
    signature: Signature, record: Golden, arrays: Mapping[str, np.ndarray], where: object
) -> GoldenArrays:
    """The arrays of a golden file, checked against the signature.

    Raises:
      BundleError: naming an array that is missing or of another shape or dtype.
    """
    found: dict[str, dict[str, np.ndarray]] = {"input": {}, "output": {}}
    wanted = [("input", s) for s in signature.arguments]
    wanted += [("output", s) for s in signature.outputs.values()]
    for kind, spec in wanted:
        array = arrays.get(f"{kind}.{spec.name}")
        shape, dtype = spec.sizes(record.dims), numpy_dtype(spec.dtype)
        if array is None or array.shape != shape or array.dtype != dtype:
            has = "nothing" if array is None else f"{array.dtype}{array.shape}"
            raise BundleError(
                f"{where} has {has} as {kind} {spec.name!r} of {signature.name!r}, which is "
                f"{dtype}{shape}; export again"
            )
        found[kind][spec.name] = array
    return GoldenArrays(found["input"], found["output"])


def dims_for(signature: Signature) -> Mapping[str, int]:
    """The bucket for generated inputs: the smallest that has two rows, or the smallest."""
    batch = signature.batch
    several = [s for s in signature.shapes if batch is not None and s[batch] > 1]
    return min(several or signature.shapes, key=signature.volume)


def examples(
    signature: Signature,
    dims: Mapping[str, int],
    seed: int = 0,
) -> list[dict[str, np.ndarray]]:
    """Random requests that fill a bucket: one row each, of different sizes along ragged dims."""
    random = np.random.default_rng(seed)
    rows = dims[signature.batch] if signature.batch else 1
    requests = []
    for row in range(rows):
        own = dict(dims)
        if signature.batch:
            own[signature.batch] = 1
        for name in signature.ragged:
            least = dims[name] if row == 0 else math.ceil(dims[name] / 2)
            own[name] = int(random.integers(least, dims[name] + 1))
        requests.append(example(signature, own, random))
    return requests


def example(
    signature: Signature, dims: Mapping[str, int], random: np.random.Generator
) -> dict[str, np.ndarray]:
    """One random request of exactly these sizes, within the specs' bounds."""
    return {
        name: _strings(spec, dims, random)
        if spec.dtype == BYTES
        else _numbers(spec, spec.sizes(dims), random)
        for name, spec in signature.inputs.items()
    }


def _strings(spec: TensorSpec, dims: Mapping[str, int], random: np.random.Generator) -> np.ndarray:
    *shape, longest = spec.sizes(dims)
    found = np.empty(shape, object)
    for index in np.ndindex(*shape):
        found[index] = random.choice(_LETTERS, longest).tobytes()
    return found


def _numbers(spec: TensorSpec, shape: tuple[int, ...], random: np.random.Generator) -> np.ndarray:
    dtype = numpy_dtype(spec.dtype)
    if dtype.kind == "b":
        return random.integers(0, 2, shape).astype(bool)
    if dtype.kind in "iu":
        low = int(spec.low) if spec.low is not None else 0
        high = int(spec.high) if spec.high is not None else low + 2
        return random.integers(low, high, shape, np.uint64 if low >= 0 else np.int64).astype(dtype)
    values = random.standard_normal(shape)
    if spec.low is not None and spec.high is not None:
        values = random.uniform(spec.low, spec.high, shape)
    elif spec.low is not None:
        values = spec.low + np.abs(values)
    elif spec.high is not None:
        values = spec.high - np.abs(values)
    return np.asarray(values, dtype)


def coarsest(dtypes: Sequence[str]) -> float:
    """The largest rounding step of some dtypes; numbers of few bits are computed in bfloat16."""
    small = {d: _EPSILON["bfloat16"] for d in dtypes if d.startswith(("float8", "float4"))}
    return max(((_EPSILON | small).get(d, 0.0) for d in dtypes), default=0.0)


def default_tolerance(array: np.ndarray, *, elsewhere: bool, precision: float = 0.0) -> Tolerance:
    """How far an output may be off: in proportion to its precision and its largest value.

    Args:
      array: what it was.
      elsewhere: on another platform, which multiplies float32 in fewer bits (TPUs by default in
        bfloat16's 8).
      precision: the rounding step of what it is computed from, where that is coarser.
    """
    epsilon = _EPSILON.get(array.dtype.name)
    if epsilon is None:
        return Tolerance(relative=0.0, absolute=0.0)
    finite = np.asarray(array, np.float64)
    finite = np.abs(finite[np.isfinite(finite)])
    scale = float(finite.max(initial=0.0))
    relative = max(epsilon, precision, _EPSILON["bfloat16"] if elsewhere else 0.0) ** 0.55
    return Tolerance(relative=relative, absolute=relative * scale)


def difference(
    found: np.ndarray, expected: np.ndarray, tolerance: Tolerance
) -> tuple[str | None, float]:
    """In words which element is off most and how far, or None; and the largest difference."""
    if found.shape != expected.shape or found.dtype != expected.dtype:
        return (
            f"is {found.dtype}{found.shape} instead of {expected.dtype}{expected.shape}",
            math.inf,
        )
    if found.tobytes() == expected.tobytes() or not found.size:
        return None, 0.0
    wide = np.longdouble if found.dtype.kind in "iu" else np.float64
    a, b = found.astype(wide), expected.astype(wide)
    with np.errstate(invalid="ignore", over="ignore"):
        off = np.abs(a - b)
        off = np.where(np.isnan(a) & np.isnan(b) | (a == b), 0, off)
        off = np.where(np.isnan(off), math.inf, off)
        allowed = tolerance.absolute + tolerance.relative * np.where(np.isfinite(b), np.abs(b), 0)
        excess = np.where(off > allowed, off - allowed, 0)
    worst = float(off.max())
    bad = int(np.count_nonzero(off > allowed))
    if not bad:
        return None, worst
    at = np.unravel_index(int(excess.argmax()), found.shape)
    index = f"[{', '.join(map(str, at))}]" if at else "(its only element)"
    return (
        f"has {found[at]} instead of {expected[at]} at {index}, off by {float(off[at]):.3g} where "
        f"{float(allowed[at]):.3g} is allowed; {bad} of {found.size} elements are off",
        worst,
    )


def compare(
    signature: Signature,
    golden: Golden,
    tolerance: Mapping[str, Tolerance],
    found: Mapping[str, np.ndarray],
    expected: Mapping[str, np.ndarray],
    where: str,
) -> Report:
    """Compare a golden run with what it gave at save; padding is not looked at.

    Raises:
      BundleError: naming the output, the element that is off most, and how far.
    """
    exact, worst = True, {}
    for name, spec in signature.outputs.items():
        worst[name] = 0.0
        for region in regions(signature, spec, golden):
            a, b = found[name][region], expected[name][region]
            words, off = difference(a, b, tolerance[name])
            if words:
                raise BundleError(
                    f"{signature.name!r} is numerically off on {where}: output {name!r} {words}. "
                    "Export again on this platform, or with a tolerance if this is expected"
                )
            worst[name] = max(worst[name], off)
            exact = exact and a.tobytes() == b.tobytes()
    return Report(exact=exact, worst=worst)


def regions(signature: Signature, spec: TensorSpec, golden: Golden) -> list[tuple[slice, ...]]:
    by_row = signature.batch is not None and spec.shape[:1] == (signature.batch,)
    if not golden.sizes:
        return [(slice(0, golden.rows),) if by_row else ()]
    if not by_row:
        own = {**golden.dims, **{name: max(v) for name, v in golden.sizes.items()}}
        return [tuple(slice(0, n) for n in spec.sizes(own))]
    regions: list[tuple[slice, ...]] = []
    for row in range(golden.rows or 0):
        own = {**golden.dims, **{name: v[row] for name, v in golden.sizes.items()}}
        tail = (slice(0, expressions.evaluate(size, own)) for size in spec.shape[1:])
        regions.append((slice(row, row + 1), *tail))
    return regions


def record(
    signature: Signature,
    dims: Mapping[str, int],
    requests: Sequence[Mapping[str, np.ndarray]],
    file: str,
    platform: str,
    jaxlib: str,
) -> Golden:
    """The manifest's entry for golden requests."""
    rows = None
    if signature.batch is not None:
        rows = sum(next(iter(r.values())).shape[0] for r in requests)
    sizes = buckets.true_sizes(signature, requests)
    return Golden(
        file=file,
        platform=platform,
        jaxlib=jaxlib,
        dims=dict(dims),
        rows=rows,
        sizes={name: tuple(values) for name, values in sizes.items()},
    )
