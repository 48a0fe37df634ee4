"""From requests of any size to arrays of a bucket's size, and back. Needs numpy only.

A request is a mapping of a function's inputs to arrays; row i of an output belongs to row i of
the inputs. Dimensions: `b` rows of all requests together, others as the function names them.
"""

from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from fornax.config.errors import BundleError
from fornax.export import expressions
from fornax.export.dtypes import BYTES, numpy_dtype
from fornax.export.spec import Signature, TensorSpec

__all__ = [
    "Part",
    "as_arrays",
    "assemble",
    "choose",
    "join",
    "longest",
    "measure",
    "split",
    "take",
    "true_sizes",
]

Request = Mapping[str, np.ndarray]


def as_arrays(signature: Signature, inputs: Mapping[str, object]) -> dict[str, np.ndarray]:
    """Arrays by name. What is an array already keeps its dtype, right or wrong."""
    return {
        name: _as_array(value, signature.inputs[name].dtype if name in signature.inputs else None)
        for name, value in inputs.items()
    }


def _as_array(value: object, dtype: str | None) -> np.ndarray:
    if dtype == BYTES:
        return np.asarray(value, object)
    if dtype is None or hasattr(value, "dtype"):
        return np.asarray(value)
    array, wanted = np.asarray(value), numpy_dtype(dtype)
    if not _kind_fits(array, wanted):
        return array
    return array.astype(wanted)


def _kind_fits(array: np.ndarray, wanted: np.dtype) -> bool:
    """Whether numbers of Python mean the same in a dtype: whole ones anywhere that they fit."""
    kind = array.dtype.kind
    if kind == "b":
        return wanted.kind == "b"
    if kind in "iu" and wanted.kind in "iu":
        limits = np.iinfo(wanted)
        return not array.size or bool(array.min() >= limits.min and array.max() <= limits.max)
    return kind in "iuf" and wanted.kind in "fV"


def measure(signature: Signature, request: Request) -> dict[str, int]:
    """Check one request and say its size along every dimension (bytes: its longest string).

    Raises:
      BundleError: naming the input that is missing, unknown, or of a wrong dtype or shape.
    """
    if request.keys() != signature.inputs.keys():
        _wrong_names(signature, request)
    dims: dict[str, int] = {}
    for name, spec in signature.inputs.items():
        array = request[name]
        shape = array.shape
        if spec.dtype == BYTES:
            _check_bytes(signature, spec, array)
            shape = (*shape, longest(request, spec))
        elif array.dtype != numpy_dtype(spec.dtype):
            raise BundleError(
                f"input {name!r} of {signature.name!r} has dtype {array.dtype}; it takes "
                f"{spec.dtype}"
            )
        if len(shape) != len(spec.shape):
            _wrong_shape(signature, spec, array.shape)
        for size, expected in zip(shape, spec.shape, strict=True):
            if isinstance(expected, str):
                if dims.setdefault(expected, size) != size:
                    if spec.dtype == BYTES and expected == spec.shape[-1]:
                        dims[expected] = max(dims[expected], size)
                    else:
                        raise BundleError(
                            f"input {name!r} of {signature.name!r} has {expected}={size} and "
                            f"another input {expected}={dims[expected]}; they must be equal"
                        )
            elif size != expected:
                _wrong_shape(signature, spec, array.shape)
    return dims


def _wrong_names(signature: Signature, request: Request) -> None:
    missing = [name for name in signature.inputs if name not in request]
    unknown = [name for name in request if name not in signature.inputs]
    what = f"lacks {', '.join(missing)}" if missing else f"has unknown {', '.join(unknown)}"
    raise BundleError(
        f"the request to {signature.name!r} {what}; its inputs are {', '.join(signature.inputs)}"
    )


def _check_bytes(signature: Signature, spec: TensorSpec, array: np.ndarray) -> None:
    if array.dtype != object or not all(type(item) is bytes for item in array.ravel()):
        raise BundleError(
            f"input {spec.name!r} of {signature.name!r} takes an object array of bytes; it has "
            f"dtype {array.dtype}"
        )


def _wrong_shape(signature: Signature, spec: TensorSpec, shape: tuple[int, ...]) -> None:
    takes = spec.shape[:-1] if spec.dtype == BYTES else spec.shape
    raise BundleError(
        f"input {spec.name!r} of {signature.name!r} has shape {shape}; it takes "
        f"({', '.join(map(str, takes))}{',' * (len(takes) == 1)})"
    )


def choose(signature: Signature, rows: int | None, sizes: Mapping[str, int]) -> Mapping[str, int]:
    """The cheapest compiled sizes that hold `rows` rows and `sizes` along the other dimensions.

    Raises:
      BundleError: when none does, naming the dimension and its limits.
    """
    best: Mapping[str, int] | None = None
    least = 0
    for dims in signature.shapes:
        if _holds(signature, dims, rows, sizes):
            volume = signature.volume(dims)
            if best is None or volume < least:
                best, least = dims, volume
    if best is None:
        raise _too_large(signature, rows, sizes)
    return best


def _holds(
    signature: Signature, dims: Mapping[str, int], rows: int | None, sizes: Mapping[str, int]
) -> bool:
    for name, bucket in dims.items():
        if name == signature.batch:
            if rows is not None and rows > bucket:
                return False
        elif name in signature.exact:
            if sizes[name] != bucket:
                return False
        elif sizes[name] > bucket:
            return False
    return True


def _too_large(signature: Signature, rows: int | None, sizes: Mapping[str, int]) -> BundleError:
    wanted = dict(sizes)
    if signature.batch is not None and rows is not None:
        wanted[signature.batch] = rows
    for name, allowed in signature.buckets.items():
        size = wanted.get(name)
        if size is None:
            continue
        if name in signature.exact and size not in allowed:
            return BundleError(
                f"{signature.name!r} was asked for {name}={size}; it takes {name} of exactly "
                f"{', '.join(map(str, allowed))}"
            )
        if name not in signature.exact and size > allowed[-1]:
            return BundleError(
                f"{signature.name!r} was asked for {name}={size}; the largest bucket is "
                f"{allowed[-1]}: send less, or export with a larger bucket"
            )
    return BundleError(
        f"{signature.name!r} was asked for {wanted}, which no bucket holds; it has "
        f"{[dict(shape) for shape in signature.shapes]}"
    )


def assemble(
    signature: Signature, dims: Mapping[str, int], requests: Sequence[Request]
) -> dict[str, np.ndarray]:
    """Arrays of exactly the bucket's sizes: the requests' rows one after another, then padding.

    The lengths a function asked for are filled in. Requests are measured ones (see `measure`); an
    input that fills its bucket already is passed on, not copied.
    """
    arrays: dict[str, np.ndarray] = {}
    for name, spec in signature.inputs.items():
        shape = spec.sizes(dims)
        if len(requests) == 1 and spec.dtype != BYTES and requests[0][name].shape == shape:
            arrays[name] = requests[0][name]
        elif spec.dtype == BYTES:
            arrays[name] = _assemble_bytes(signature, spec, shape, requests)
        else:
            arrays[name] = _assemble(signature, spec, shape, requests)
    for argument, of in signature.lengths.items():
        arrays[argument] = _lengths(signature, of, dims, requests)
    return arrays


def _assemble(
    signature: Signature, spec: TensorSpec, shape: tuple[int, ...], requests: Sequence[Request]
) -> np.ndarray:
    arrays = [request[spec.name] for request in requests]
    dtype = numpy_dtype(spec.dtype)
    if signature.batch is not None and not any(isinstance(size, str) for size in spec.shape[1:]):
        rows = sum([len(array) for array in arrays])
        whole = np.empty(shape, dtype)
        np.concatenate(arrays, out=whole[:rows])
        whole[rows:] = spec.pad
        return whole
    whole = np.zeros(shape, dtype) if spec.pad == 0 else np.full(shape, spec.pad, dtype)
    start = 0
    for array in arrays:
        if signature.batch is None:
            whole[tuple(slice(0, n) for n in array.shape)] = array
            continue
        stop = start + len(array)
        if array.ndim == 2:
            whole[start:stop, : array.shape[1]] = array
        else:
            whole[(slice(start, stop), *(slice(0, n) for n in array.shape[1:]))] = array
        start = stop
    return whole


def _assemble_bytes(
    signature: Signature, spec: TensorSpec, shape: tuple[int, ...], requests: Sequence[Request]
) -> np.ndarray:
    whole = np.zeros(shape, np.uint8)
    start = 0
    for request in requests:
        array = request[spec.name]
        for index, item in np.ndenumerate(array):
            at = (index[0] + start, *index[1:]) if signature.batch else index
            whole[at][: len(item)] = np.frombuffer(item, np.uint8)
        start += array.shape[0]
    return whole


def _lengths(
    signature: Signature, of: str, dims: Mapping[str, int], requests: Sequence[Request]
) -> np.ndarray:
    spec = signature.inputs[of]
    found = np.zeros((expressions.evaluate(spec.shape[0], dims),), np.int32)
    start = 0
    for request in requests:
        array = request[of]
        rows = array.shape[0]
        found[start : start + rows] = _row_sizes(signature, spec, array)
        start += rows
    return found


def _row_sizes(signature: Signature, spec: TensorSpec, array: np.ndarray) -> int | list[int]:
    along = signature.measured(spec.name)
    if spec.dtype == BYTES and along == spec.shape[-1]:
        return [max(map(len, np.ravel(row)), default=0) for row in array]
    return array.shape[spec.shape.index(along)]


def true_sizes(signature: Signature, requests: Sequence[Request]) -> dict[str, list[int]]:
    """Each row's own size along the ragged dimensions; one entry without a batch."""
    sizes: dict[str, list[int]] = {name: [] for name in signature.ragged}
    for request in requests:
        dims = measure(signature, request)
        rows = dims[signature.batch] if signature.batch else 1
        for name, values in sizes.items():
            values.extend([dims[name]] * rows)
    return sizes


def take(
    signature: Signature,
    dims: Mapping[str, int],
    outputs: Mapping[str, np.ndarray],
    requests: Sequence[Request],
) -> list[dict[str, np.ndarray]]:
    """Each request's share of the outputs, without padding; views, no copies.

    Args:
      outputs: all of the function's outputs or some, as host arrays of the bucket's sizes.
    """
    columns = []
    ragged = False
    for name, array in outputs.items():
        shape = signature.outputs[name].shape
        by_row = name in signature.by_row
        cut = any(isinstance(size, str) for size in (shape[1:] if by_row else shape))
        columns.append((name, array, by_row, shape if cut else None))
        ragged = ragged or cut
    if len(requests) == 1 and not ragged and signature.batch is None:
        return [dict(outputs)]
    first = next(iter(signature.inputs))
    results: list[dict[str, np.ndarray]] = []
    start = 0
    for request in requests:
        stop = start + (len(request[first]) if signature.batch is not None else 0)
        share = {name: array[start:stop] if by_row else array for name, array, by_row, _ in columns}
        if ragged:
            own = {**dims, **_own_sizes(signature, request)}
            for name, _, _, shape in columns:
                if shape is not None:
                    share[name] = _trim(share[name], shape, own)
        results.append(share)
        start = stop
    return results


def _own_sizes(signature: Signature, request: Request) -> dict[str, int]:
    """What `measure` says of a request that it has checked."""
    sizes: dict[str, int] = {}
    for name, spec in signature.inputs.items():
        array = request[name]
        if spec.dtype == BYTES:
            dim = str(spec.shape[-1])
            sizes[dim] = max(sizes.get(dim, 0), longest(request, spec))
        for size, dim in zip(array.shape, spec.shape, strict=False):
            if isinstance(dim, str):
                sizes[dim] = max(sizes.get(dim, 0), size)
    return sizes


def _trim(array: np.ndarray, shape: tuple[int | str, ...], own: Mapping[str, int]) -> np.ndarray:
    wanted = tuple([expressions.evaluate(size, own) for size in shape])
    if wanted == array.shape:
        return array
    if len(wanted) == 2:
        return array[: wanted[0], : wanted[1]]
    return array[tuple(slice(0, size) for size in wanted)]


class Part(dict[str, np.ndarray]):
    """Some rows of a request; its strings count as long as the longest of the whole request.

    Outputs that are as long as the strings are thus of one size in all parts.
    """

    longest: Mapping[str, int]


def longest(request: Request, spec: TensorSpec) -> int:
    """The longest string of a bytes input, of the whole request where this is a part of one."""
    own = max(map(len, request[spec.name].ravel()), default=0)
    return max(own, request.longest[spec.name]) if isinstance(request, Part) else own


def split(
    signature: Signature, request: Request, rows: int, most: int
) -> Iterator[tuple[int, Request]]:
    """Parts of at most `most` of a request's rows, each with how many it has."""
    texts = [spec for spec in signature.inputs.values() if spec.dtype == BYTES]
    sizes = {spec.name: longest(request, spec) for spec in texts}
    for start in range(0, rows, most):
        part = Part({name: array[start : start + most] for name, array in request.items()})
        part.longest = sizes
        yield min(most, rows - start), part


def join(signature: Signature, parts: Sequence[Request]) -> Request:
    """The outputs of all parts as one; those that have no rows are the same in each."""
    if len(parts) == 1:
        return parts[0]
    return {
        name: np.concatenate([part[name] for part in parts]) if name in signature.by_row else array
        for name, array in parts[0].items()
    }
