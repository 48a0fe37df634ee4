"""Sealing functions: traced, written, checked by running them, renamed into place."""

import dataclasses
import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import jax
import jaxlib
import numpy as np

import fornax
from fornax.config.errors import BundleError
from fornax.export import _exported, files, manifest, reading, trial, weights
from fornax.export.declare import LEADING, Buckets, declare_all
from fornax.export.dtypes import Shaped
from fornax.export.manifest import PLATFORMS, Function, Manifest, Program, Tolerance
from fornax.export.modules import take_apart, weight_axes
from fornax.export.spec import Signature, Spec
from fornax.export.trace import Traced, flat_function, is_x64, trace, x64
from fornax.export.trial import Trial
from fornax.mesh.compilation import compiled_anew

__all__ = ["save"]

_Process = Callable[..., object] | Mapping[str, Callable[..., object]] | None


def save(
    path: str | Path,
    functions: Mapping[str, Callable[..., object]],
    params: object,
    *,
    inputs: Mapping[str, Mapping[str, Spec]],
    buckets: Buckets | None = None,
    batch: str | None = LEADING,
    exact: Sequence[str] = (),
    platforms: Sequence[str] = ("cpu", "cuda", "tpu"),
    preprocess: _Process = None,
    postprocess: _Process = None,
    golden: Mapping[str, Mapping[str, object]] | None = None,
    tolerance: float | Tolerance | Mapping[str, float | Tolerance] | None = None,
    axes: Mapping[str, tuple[str | None, ...]] | None = None,
    executables: bool = False,
    metadata: Mapping[str, object] | None = None,
    overwrite: bool = False,
    check: bool = True,
    seed: int = 0,
) -> Manifest:
    """Seal functions and their weights in a directory that needs none of their code.

    Each function is run before it is sealed, on this machine: its rows must not depend on their
    neighbours nor its results on padding, its outputs must be finite, and what is sealed must give
    what the function gives.

    Args:
      path: the bundle's directory; it appears whole or not at all.
      functions: by name, each `fn(params, **inputs) -> {name: array}`. The first one is the
        default of a server.
      params: what the functions take first: an NNX module, Linen variables or any pytree.
      inputs: specs by function and input.
      buckets: the sizes to compile for, by symbolic dimension (all combinations), or a list of
        combinations such as `{"b": 8, "t": 64}`.
      batch: the dimension of rows, by default the one that leads every input; None: none, so that
        a request is run alone.
      exact: dimensions that are never padded: requests must have a bucket's size.
      platforms: of cpu, cuda, rocm, tpu.
      preprocess: `(**inputs) -> dict` of arrays that the function takes instead; or by function.
      postprocess: `(**outputs) -> dict` of arrays that the bundle gives instead; or by function.
      golden: inputs to run at save and at every load, by function; generated where not given.
      tolerance: how far golden outputs may be off at load, for all outputs or by output; by
        default what their dtype allows, and more on another platform.
      axes: logical axes of parameters by path or pattern, laid on a mesh at load.
      executables: whether to add the programs compiled here, which a loader uses only when it is
        told to trust them.
      metadata: anything that JSON holds; kept, not used.
      overwrite: whether an existing bundle may be replaced.
      check: whether to run the functions; without, the bundle has no golden outputs either.
      seed: of the generated inputs.

    Raises:
      BundleError: what cannot be sealed, why, and what to do instead.
    """
    path = Path(path)
    _check_platforms(platforms)
    _check_metadata(metadata)
    signatures = declare_all(tuple(functions), inputs, buckets, batch, exact)
    _known("golden", golden, signatures)
    for what, given in (("preprocess", preprocess), ("postprocess", postprocess)):
        _known(what, given if isinstance(given, Mapping) else None, signatures)
    parts = take_apart(params)
    wide = any(is_x64(s) for s in signatures.values())
    arrays = {name: _array(leaf, wide) for name, leaf in parts.params.items()}
    named = weight_axes(arrays, parts.axes, axes or {})
    flats, traced = {}, {}
    for name, fn in functions.items():
        _check_callable(name, fn, signatures[name], _one(preprocess, name))
        names: list[str] = []
        flats[name] = flat_function(
            parts.bind(fn, name),
            signatures[name],
            tuple(arrays),
            _one(preprocess, name),
            _one(postprocess, name),
            names,
        )
        traced[name] = trace(flats[name], signatures[name], arrays, names, platforms)
    used = {name for t in traced.values() for name in t.weights}
    stored = {n: weights.describe(a, named.get(n)) for n, a in arrays.items() if n in used}
    _check_outputs(tolerance, traced)
    with (
        files.new_directory(path, overwrite=overwrite) as work,
        compiled_anew(executables),
    ):
        found = Manifest(
            platforms=tuple(platforms),
            versions=_versions(next(iter(traced.values()))),
            functions={name: _write_function(work, t) for name, t in traced.items()},
            weights=stored,
            executables=(),
            metadata=dict(metadata or {}),
            files={},
        )
        trials = {n: Trial(work, found, n, flats[n], arrays) for n in functions}
        if check:
            ran = {
                name: trial.run(
                    t, given_inputs=(golden or {}).get(name), tolerance=tolerance, seed=seed
                )
                for name, t in trials.items()
            }
            found = dataclasses.replace(found, functions=ran)
        elif golden:
            raise BundleError("golden inputs need to be run, and check=False; drop one of the two")
        if executables:
            ahead = [e for t in trials.values() for e in t.write_executables()]
            found = dataclasses.replace(found, executables=tuple(ahead))
        weights.write(work, arrays, stored)
        found = dataclasses.replace(found, files=_measured(work))
        data = manifest.to_json(found)
        reading.from_json(data, str(path / files.MANIFEST))
        (work / files.MANIFEST).write_bytes(data)
    return found


def _check_platforms(platforms: Sequence[str]) -> None:
    wrong = [p for p in platforms if p not in PLATFORMS]
    if isinstance(platforms, str) or not platforms or wrong or len(set(platforms)) < len(platforms):
        raise BundleError(
            f"platforms={platforms!r} is not a sequence of distinct names of {', '.join(PLATFORMS)}"
        )


def _check_metadata(metadata: Mapping[str, object] | None) -> None:
    try:
        json.dumps(dict(metadata or {}), allow_nan=False)
    except (TypeError, ValueError) as error:
        raise BundleError(
            f"metadata is not what JSON holds ({error}); use names with texts, finite numbers, "
            "lists and dicts"
        ) from None


def _check_callable(
    name: str,
    fn: Callable[..., object],
    signature: Signature,
    preprocess: Callable[..., object] | None,
) -> None:
    """That the first of them to be called takes the inputs by their names."""
    arguments = dict.fromkeys(spec.name for spec in signature.arguments)
    called, first = (fn, (None,)) if preprocess is None else (preprocess, ())
    try:
        inspect.signature(called).bind(*first, **arguments)
    except ValueError:  # builtins tell no signature
        return
    except TypeError as error:
        what = f"function {name!r}" if preprocess is None else f"preprocess of {name!r}"
        takes = "(params, **inputs)" if preprocess is None else "(**inputs)"
        raise BundleError(
            f"{what} is called as {takes} with the inputs {', '.join(arguments)}, and {error}; "
            "name its arguments as the specs and their lengths do"
        ) from None


def _known(what: str, given: Mapping[str, object] | None, functions: Mapping[str, object]) -> None:
    for name in given or {}:
        if name not in functions:
            raise BundleError(
                f"{what} names {name!r}, and the functions are {', '.join(functions)}"
            )


def _check_outputs(tolerance: object, traced: Mapping[str, Traced]) -> None:
    if isinstance(tolerance, Mapping):
        outputs = {o for t in traced.values() for o in t.signature.outputs}
        for name in tolerance:
            if name not in outputs:
                raise BundleError(
                    f"tolerance names {name!r}, and the outputs are {', '.join(sorted(outputs))}"
                )


def _array(leaf: Shaped, wide: bool) -> jax.Array | np.ndarray:
    if isinstance(leaf, jax.Array):
        return leaf
    array = np.asarray(leaf)
    with x64(wide):
        return array.astype(jax.dtypes.canonicalize_dtype(array.dtype), copy=False)


def _one(given: _Process, name: str) -> Callable[..., object] | None:
    return given.get(name) if isinstance(given, Mapping) else given


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
    nothing = dict.fromkeys(t.signature.outputs, Tolerance(relative=0.0, absolute=0.0))
    return Function(
        signature=t.signature,
        weights=t.weights,
        programs=programs,
        x64=t.x64,
        constraints=t.constraints,
        tolerance=nothing,
        elsewhere=nothing,
        golden=None,
    )


def _versions(t: Traced) -> dict[str, str]:
    stablehlo = _exported.stablehlo_version(next(iter(t.modules.values())))
    return {
        "fornax": fornax.__version__,
        "jax": jax.__version__,
        "jaxlib": jaxlib.__version__,
        "stablehlo": stablehlo,
        "window": (
            f"StableHLO {stablehlo} and later, up to five years of its development after jaxlib "
            f"{jaxlib.__version__}"
        ),
    }


def _measured(work: Path) -> dict[str, manifest.File]:
    return {
        str(file.relative_to(work)): files.measure(file)
        for file in sorted(work.rglob("*"))
        if file.is_file()
    }
