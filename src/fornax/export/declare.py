"""From what `save` is given to a function's signature: dimensions, buckets, batch; checked."""

import itertools
from collections.abc import Mapping, Sequence

from fornax.config.errors import BundleError
from fornax.export.fields import NAME, named
from fornax.export.spec import Signature, Spec, TensorSpec

__all__ = ["LEADING", "Buckets", "declare", "declare_all"]

Buckets = Mapping[str, Sequence[int]] | Sequence[Mapping[str, int]]
LEADING = "the dimension that leads every input"


def declare_all(
    names: Sequence[str],
    inputs: Mapping[str, Mapping[str, Spec]],
    buckets: Buckets | None,
    batch: str | None,
    exact: Sequence[str],
) -> dict[str, Signature]:
    """The signatures of all functions; their outputs are not known yet.

    Raises:
      BundleError: for specs, buckets or dimensions that no function has or that do not fit.
    """
    if not names:
        raise BundleError("save was given no functions; name one, as in {'predict': fn}")
    for name in inputs:
        if name not in names:
            raise BundleError(
                f"inputs has specs for {name!r}, and the functions are {', '.join(names)}"
            )
    found = {name: declare(name, inputs, buckets, batch, exact) for name in names}
    dims = {d for signature in found.values() for d in signature.dims}
    listed = [buckets] if isinstance(buckets, Mapping) else buckets or ()
    given = {d for shape in listed for d in shape}
    for what, unknown in (("buckets", given - dims), ("exact", set(exact) - dims)):
        if unknown:
            raise BundleError(
                f"{what} names {sorted(unknown)[0]!r}, a dimension of no input; they have "
                f"{', '.join(sorted(dims)) or 'no symbolic dimensions'}"
            )
    return found


def declare(
    name: str,
    inputs: Mapping[str, Mapping[str, Spec]],
    buckets: Buckets | None,
    batch: str | None,
    exact: Sequence[str],
) -> Signature:
    """The signature of one function."""
    if not NAME.fullmatch(name):
        raise BundleError(
            f"{name!r} cannot name a function; use letters, digits, '_', '-' and '.', and begin "
            "with a letter"
        )
    if name not in inputs:
        raise BundleError(
            f"inputs has no specs for function {name!r}; pass inputs={{{name!r}: {{'x': "
            "Spec(('b', 4), 'float32')}}"
        )
    specs = {key: _input(name, key, spec) for key, spec in inputs[name].items()}
    if not specs:
        raise BundleError(f"function {name!r} has no inputs; it needs one")
    batch = _batch(name, specs, batch)
    bare = Signature(name=name, inputs=specs, outputs={}, batch=batch, exact=(), shapes=())
    _check_lengths(bare)
    own_exact = tuple(d for d in bare.dims if d in exact)
    if batch in own_exact:
        raise BundleError(f"exact has the batch {batch!r}, whose rows are always filled up")
    return Signature(
        name=name,
        inputs=specs,
        outputs={},
        batch=batch,
        exact=own_exact,
        shapes=_shapes(name, bare.dims, buckets),
    )


def _input(function: str, key: str, spec: Spec) -> TensorSpec:
    if not isinstance(spec, Spec):
        raise BundleError(
            f"input {key!r} of {function!r} is a {type(spec).__name__}; describe it with "
            "Spec(shape, dtype)"
        )
    if not key.isidentifier():
        raise BundleError(f"input {key!r} of {function!r} is not a name of an argument")
    return named(key, spec)


def _batch(name: str, specs: Mapping[str, TensorSpec], batch: str | None) -> str | None:
    leading = {spec.shape[0] if spec.shape else None for spec in specs.values()}
    only = next(iter(leading)) if len(leading) == 1 else None
    if batch == LEADING:
        return only if isinstance(only, str) else None
    if batch is not None and only != batch:
        other = next(s for s in specs.values() if s.shape[:1] != (batch,))
        raise BundleError(
            f"batch={batch!r} does not lead input {other.name!r} of {name!r}, whose shape is "
            f"{other.shape}; every input has the rows as dimension 0, or pass batch=None"
        )
    return batch


def _check_lengths(signature: Signature) -> None:
    for argument in signature.lengths:
        if argument in signature.inputs:
            raise BundleError(
                f"lengths={argument!r} of {signature.name!r} is also an input; the loader makes "
                "it, so take it out of inputs"
            )
        measured = [n for n, s in signature.inputs.items() if s.lengths == argument]
        along = {signature.measured(n) for n in measured}
        strings = [n for n in measured if signature.inputs[n].dtype == "bytes"]
        if len(along) > 1 or (strings and len(measured) > 1):
            raise BundleError(
                f"inputs {', '.join(measured)} of {signature.name!r} share "
                f"lengths={argument!r} and have sizes of their own; name each one's lengths"
            )


def _shapes(
    name: str, dims: tuple[str, ...], buckets: Buckets | None
) -> tuple[dict[str, int], ...]:
    if isinstance(buckets, Mapping) or buckets is None:
        table = buckets or {}
        for d in dims:
            if not table.get(d):
                raise BundleError(
                    f"{name!r} has the symbolic dimension {d!r} and buckets has no sizes for it; "
                    f"pass buckets={{{d!r}: [1, 8, 32], …}}"
                )
        sizes = [sorted({_size(d, n) for n in table[d]}) for d in dims]
        return tuple(dict(zip(dims, point, strict=True)) for point in itertools.product(*sizes))
    found: dict[tuple[int, ...], None] = {}
    for shape in buckets:
        missing = [d for d in dims if d not in shape]
        if missing:
            raise BundleError(f"bucket {dict(shape)} of {name!r} has no size for {missing[0]!r}")
        found[tuple(_size(d, shape[d]) for d in dims)] = None
    if not found:
        raise BundleError(f"buckets is empty; name the sizes to compile {name!r} for")
    return tuple(dict(zip(dims, point, strict=True)) for point in sorted(found))


def _size(dim: str, size: int) -> int:
    if not isinstance(size, int) or isinstance(size, bool) or size < 1:
        raise BundleError(f"bucket {dim}={size!r} is not a size; sizes are whole numbers from 1")
    return size
