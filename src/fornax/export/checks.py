"""What `save` finds out by running a function before it is sealed.

Rows must not depend on their neighbours, results not on padding: a server puts requests of
strangers and of different sizes into one batch.
"""

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from fornax.config.errors import BundleError
from fornax.export import buckets
from fornax.export.golden import default_tolerance, difference, example, examples
from fornax.export.manifest import Tolerance
from fornax.export.spec import Signature

__all__ = ["Run", "check_finite", "check_padding", "check_rows"]

Request = Mapping[str, np.ndarray]
Run = Callable[[Mapping[str, int], Mapping[str, np.ndarray]], Mapping[str, np.ndarray]]
"""Sizes and arrays of exactly these sizes to outputs."""

_EXACT = {"float16": 2.0**-9, "bfloat16": 2.0**-6, "float32": 2.0**-20, "float64": 2.0**-49}


def check_finite(signature: Signature, results: Sequence[Request]) -> None:
    """That no output has NaN or infinity.

    Raises:
      BundleError: naming the output and the element.
    """
    for row, result in enumerate(results):
        for name, array in result.items():
            if array.dtype.kind not in "fV":
                continue
            bad = ~np.isfinite(array.astype(np.float64))
            if bad.any():
                at = tuple(int(i) for i in np.argwhere(bad)[0])
                raise BundleError(
                    f"output {name!r} of {signature.name!r} is {array[at]} at {list(at)} for "
                    f"golden request {row}; if the generated inputs are out of range, bound them "
                    "with Spec(…, low=, high=) or pass golden inputs of your own"
                )


def check_rows(signature: Signature, dims: Mapping[str, int], run: Run) -> None:
    """That a row's result is the same whatever its neighbours are, in one bucket.

    Raises:
      BundleError: naming the output and the element that another row changed.
    """
    if signature.batch is None or dims[signature.batch] < 2:
        return
    ours, others = examples(signature, dims, 1), examples(signature, dims, 2)
    before = _rows(signature, dims, ours, run)
    for kept in (0, 1):
        mixed = [ours[i] if i % 2 == kept else others[i] for i in range(len(ours))]
        after = _rows(signature, dims, mixed, run)
        for row in range(kept, len(ours), 2):
            for name, spec in signature.outputs.items():
                a, b = after[row][name], before[row][name]
                words, _ = difference(a, b, _near(b))
                if not words:
                    continue
                by_row = spec.shape[:1] == (signature.batch,)
                raise BundleError(
                    f"rows of {signature.name!r} influence each other: with other neighbours, "
                    f"output {name!r} of row {row} {words}. A server puts requests of different "
                    "clients into one batch: "
                    + (
                        "compute each row from itself alone (a batch norm must use its stored "
                        "statistics), or pass batch=None"
                        if by_row
                        else f"an output without dimension {signature.batch!r} must not depend on "
                        "the inputs; give it that dimension first"
                    )
                )


def _rows(
    signature: Signature, dims: Mapping[str, int], requests: Sequence[Request], run: Run
) -> list[dict[str, np.ndarray]]:
    outputs = run(dims, buckets.assemble(signature, dims, requests))
    return buckets.take(signature, dims, outputs, requests)


def _near(expected: np.ndarray) -> Tolerance:
    relative = _EXACT.get(expected.dtype.name, 0.0)
    finite = np.asarray(expected, np.float64) if relative else np.zeros(0)
    finite = np.abs(finite[np.isfinite(finite)])
    return Tolerance(relative=relative, absolute=relative * float(finite.max(initial=0.0)))


def check_padding(
    signature: Signature,
    dims: Mapping[str, int],
    run: Run,
    tolerance: Mapping[str, Tolerance] | None,
    *,
    open_sizes: bool,
    precision: float,
) -> None:
    """That a request gives the same in a bucket as at exactly its own size.

    Args:
      dims: the bucket to pad to.
      tolerance: the user's, by output; None: what the outputs' dtypes allow.
      open_sizes: whether the function takes any size; else another bucket's is used.
      precision: the rounding step of what the outputs are computed from.

    Raises:
      BundleError: naming the dimension, the output and the element that padding changed.
    """
    for name in signature.ragged:
        for small, large in _pairs(signature, dims, name, open_sizes):
            _check_pair(signature, name, small, large, run, tolerance or {}, precision)


def _pairs(
    signature: Signature, dims: Mapping[str, int], name: str, open_sizes: bool
) -> list[tuple[dict[str, int], dict[str, int]]]:
    if open_sizes and dims[name] > 1:
        return [({**dims, name: max(1, dims[name] // 2)}, dict(dims))]
    sizes = signature.buckets[name]
    larger = [n for n in sizes if n > dims[name]]
    return [(dict(dims), {**dims, name: larger[0]})] if larger else []


def _check_pair(
    signature: Signature,
    name: str,
    small: Mapping[str, int],
    large: Mapping[str, int],
    run: Run,
    tolerance: Mapping[str, Tolerance],
    precision: float,
) -> None:
    rows = small[signature.batch] if signature.batch else 1
    random = np.random.default_rng(3)
    one = {**small, **({signature.batch: 1} if signature.batch else {})}
    requests = [example(signature, one, random) for _ in range(rows)]
    expected = _rows(signature, small, requests, run)
    found = _rows(signature, large, requests, run)
    for row in range(rows):
        for output in signature.outputs:
            a, b = found[row][output], expected[row][output]
            allowed = tolerance.get(output) or default_tolerance(
                b, elsewhere=False, precision=precision
            )
            words, _ = difference(a, b, allowed)
            if words:
                raise BundleError(
                    f"{signature.name!r} depends on padding: with {name!r} filled up from "
                    f"{small[name]} to {large[name]}, output {output!r} of row {row} {words}. "
                    f"Give the input lengths='n' in its Spec and mask with that argument "
                    f"(int32 [{signature.batch or 1}], each row's own {name}), or pass "
                    f"exact=({name!r},) to accept the buckets' sizes only"
                )
