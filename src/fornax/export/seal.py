"""Sealing a function: trace it, write what it needs, check it by running it, rename into place."""

import itertools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

import fornax
from fornax.config.errors import BundleError
from fornax.export import _exported, fields, files, manifest, weights
from fornax.export.manifest import Function, Manifest, Program, Tolerance
from fornax.export.modules import take_apart, weight_axes
from fornax.export.spec import Signature, Spec
from fornax.export.trace import Traced, flat_function, trace

__all__ = ["save"]

Buckets = Mapping[str, Sequence[int]] | Sequence[Mapping[str, int]]
_LEADING = "the dimension that leads every input"


def save(
    path: str | Path,
    functions: Mapping[str, Callable[..., Any]],
    params: Any,
    *,
    inputs: Mapping[str, Mapping[str, Spec]],
    buckets: Buckets | None = None,
    batch: str | None = _LEADING,
    exact: Sequence[str] = (),
    platforms: Sequence[str] = ("cpu", "cuda", "tpu"),
    preprocess: Callable[..., Any] | Mapping[str, Callable[..., Any]] | None = None,
    postprocess: Callable[..., Any] | Mapping[str, Callable[..., Any]] | None = None,
    axes: Mapping[str, tuple[str | None, ...]] | None = None,
    metadata: Mapping[str, Any] | None = None,
    overwrite: bool = False,
) -> Manifest:
    """Write a bundle of `functions`, each `fn(params, **inputs) -> {name: array}`."""
    path = Path(path)
    if not functions:
        raise BundleError("save was given no functions; name one, as in {'predict': fn}")
    parts = take_apart(params)
    arrays = {name: _array(leaf) for name, leaf in parts.params.items()}
    named = weight_axes(arrays, parts.axes, axes or {})
    traced = {}
    for name, fn in functions.items():
        signature = _signature(name, inputs, buckets, batch, exact)
        names: list[str] = []
        whole = flat_function(
            parts.bind(fn, name),
            signature,
            tuple(arrays),
            _one(preprocess, name),
            _one(postprocess, name),
            names,
        )
        traced[name] = trace(whole, signature, arrays, names, platforms)
    used = {name for t in traced.values() for name in t.weights}
    stored = {
        name: weights.describe(array, named.get(name))
        for name, array in arrays.items()
        if name in used
    }
    with files.new_directory(path, overwrite=overwrite) as work:
        records = {}
        for name, t in traced.items():
            records[name] = _write_function(work, t)
        weights.write(work, arrays, stored)
        found = Manifest(
            platforms=tuple(platforms),
            versions=_versions(next(iter(traced.values()))),
            functions=records,
            weights=stored,
            executables=(),
            metadata=dict(metadata or {}),
            files=_measured(work),
        )
        (work / files.MANIFEST).write_bytes(manifest.to_json(found))
    return found


def _array(leaf: Any) -> Any:
    if isinstance(leaf, jax.Array):
        return leaf
    array = np.asarray(leaf)
    return array.astype(jax.dtypes.canonicalize_dtype(array.dtype))


def _one(given: Any, name: str) -> Callable[..., Any] | None:
    return given.get(name) if isinstance(given, Mapping) else given


def _signature(
    name: str,
    inputs: Mapping[str, Mapping[str, Spec]],
    buckets: Buckets | None,
    batch: str | None,
    exact: Sequence[str],
) -> Signature:
    if name not in inputs:
        raise BundleError(f"inputs has no specs for function {name!r}; it has {', '.join(inputs)}")
    specs = {key: fields.named(key, spec) for key, spec in inputs[name].items()}
    leading = {spec.shape[0] if spec.shape else None for spec in specs.values()}
    if batch == _LEADING:
        only = next(iter(leading)) if len(leading) == 1 else None
        batch = only if isinstance(only, str) else None
    bare = Signature(name=name, inputs=specs, outputs={}, batch=batch, exact=(), shapes=())
    return Signature(
        name=name,
        inputs=specs,
        outputs={},
        batch=batch,
        exact=tuple(d for d in exact if d in bare.dims),
        shapes=_shapes(name, bare.dims, buckets),
    )


def _shapes(
    name: str, dims: tuple[str, ...], buckets: Buckets | None
) -> tuple[dict[str, int], ...]:
    if buckets is None:
        buckets = {}
    if isinstance(buckets, Mapping):
        missing = [d for d in dims if not buckets.get(d)]
        if missing:
            raise BundleError(
                f"{name!r} has the symbolic dimension {missing[0]!r} and buckets has no sizes for "
                f"it; pass buckets={{{missing[0]!r}: [1, 8, 32], …}}"
            )
        sizes = [sorted(set(buckets[d])) for d in dims]
        return tuple(dict(zip(dims, point, strict=True)) for point in itertools.product(*sizes))
    found = {tuple(shape[d] for d in dims): None for shape in buckets}
    return tuple(dict(zip(dims, point, strict=True)) for point in found)


def _write_function(work: Path, t: Traced) -> Function:
    (work / "functions").mkdir(exist_ok=True)
    programs = {}
    for platform, module in t.modules.items():
        file = f"functions/{t.signature.name}.{platform}.mlir"
        (work / file).write_bytes(module)
        programs[platform] = Program(
            file=file,
            kept=t.kept[platform],
            calling_convention=t.calling_convention,
            uses_global_constants=t.uses_global_constants[platform],
        )
    return Function(
        signature=t.signature,
        weights=t.weights,
        programs=programs,
        x64=t.x64,
        constraints=t.constraints,
        tolerance={name: Tolerance(relative=1e-4, absolute=1e-5) for name in t.signature.outputs},
        golden=None,
    )


def _versions(t: Traced) -> dict[str, str]:
    import jaxlib

    module = next(iter(t.modules.values()))
    return {
        "fornax": fornax.__version__,
        "jax": jax.__version__,
        "jaxlib": jaxlib.__version__,
        "stablehlo": _exported.stablehlo_version(module),
    }


def _measured(work: Path) -> dict[str, manifest.File]:
    return {
        str(file.relative_to(work)): files.measure(file)
        for file in sorted(work.rglob("*"))
        if file.is_file()
    }
