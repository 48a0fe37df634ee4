"""Reading `manifest.json` strictly: every field is checked before it is believed.

It needs no jax and executes nothing. What is unknown, missing, of a wrong type or at odds with
another field is a BundleError that names it.
"""

import json
import math
from collections.abc import Mapping

from fornax.config.errors import BundleError
from fornax.export.dtypes import numpy_dtype
from fornax.export.fields import Fields
from fornax.export.manifest import (
    FORMAT,
    PLATFORMS,
    VERSION,
    Executable,
    File,
    Function,
    Golden,
    Manifest,
    Program,
    Tolerance,
    Weight,
    seal,
)
from fornax.export.spec import Signature, TensorSpec

__all__ = ["from_json"]


def from_json(data: bytes, where: str) -> Manifest:
    """Read and check the bytes of `manifest.json`.

    Raises:
      BundleError: for other formats and versions, an altered manifest, and any field that is
        missing, unknown, of a wrong type, or at odds with another.
    """
    try:
        return _read(data, where)
    except RecursionError:
        raise BundleError(
            f"{where} is nested deeper than any manifest; copy the bundle again"
        ) from None


def _read(data: bytes, where: str) -> Manifest:
    try:
        body = json.loads(data)
        json.dumps(body, ensure_ascii=False).encode()  # half a surrogate fits no protocol
    except ValueError as error:
        raise BundleError(
            f"{where} is not JSON ({error}); it was truncated or altered: copy the bundle again"
        ) from None
    if not isinstance(body, dict) or body.get("format") != FORMAT:
        raise BundleError(f"{where} is not a manifest of a bundle: its format is not {FORMAT!r}")
    if body.get("version") != VERSION:
        raise BundleError(
            f"{where} has format version {body.get('version')!r} and this Fornax reads "
            f"{VERSION}; export again, or load it with the Fornax that wrote it"
        )
    if body.get("seal") != seal(body):
        raise BundleError(
            f"{where} was altered: its contents do not match its seal; copy the bundle again, "
            "or export again instead of editing a bundle"
        )
    return _checked(Fields(body, where))


def _checked(fields: Fields) -> Manifest:
    fields.only(
        "format version platforms versions functions weights executables metadata files seal"
    )
    files = {
        fields.path_of(name): File(size=f.size("size"), sha256=f.sha256("sha256"))
        for name, f in fields.mapping_of("files", "size sha256")
    }
    weights = {}
    for f in fields.records("weights", "name shape dtype stored chunks axes"):
        name = f.text("name")
        if name in weights:
            raise f.wrong("name", "named twice")
        weights[name] = Weight(
            shape=f.shape("shape"),
            dtype=f.dtype("dtype"),
            stored=f.dtype("stored"),
            chunks=f.shape("chunks"),
            axes=f.axes("axes", len(f.shape("shape"))),
        )
        _check_stored(f, weights[name], files)
    functions = {}
    for f in fields.records("functions", _FUNCTION):
        function = _function_in(f, weights, files)
        if function.signature.name in functions:
            raise f.wrong("name", "named twice")
        functions[function.signature.name] = function
    if not functions:
        raise fields.wrong("functions", "empty")
    platforms = fields.names("platforms", among=PLATFORMS)
    for name, function in functions.items():
        if set(function.programs) != set(platforms):
            raise fields.wrong("functions", f"{name!r} has programs for other platforms")
    executables = []
    for f in fields.records("executables", "file function dims key"):
        owner = functions.get(f.text("function"))
        if owner is None:
            raise f.wrong("function", "no function of this bundle")
        executables.append(
            Executable(
                file=f.file("file", files),
                function=f.text("function"),
                dims=_dims(f, "dims", owner.signature),
                key=f.texts("key"),
            )
        )
    return Manifest(
        platforms=platforms,
        versions=fields.texts("versions"),
        functions=functions,
        weights=weights,
        executables=tuple(executables),
        metadata=fields.mapping("metadata"),
        files=files,
    )


def _check_stored(f: Fields, weight: Weight, files: Mapping[str, File]) -> None:
    """That an array has sensible chunks and no more bytes than the files that hold it."""
    itemsize = numpy_dtype(weight.dtype).itemsize
    stored = weight.shape
    if weight.stored != weight.dtype:
        stored = (*stored, itemsize)
        if weight.stored != "uint8":
            raise f.wrong("stored", "neither its dtype nor uint8")
    fits = len(weight.chunks) == len(stored) and all(
        1 <= chunk <= max(1, size) for chunk, size in zip(weight.chunks, stored, strict=True)
    )
    if not fits:
        raise f.wrong("chunks", f"no division of {stored}")
    held = sum(file.size for name, file in files.items() if name.startswith("weights/"))
    if math.prod(weight.shape) * itemsize > max(held, _PACKED):
        raise f.wrong("shape", f"more than the {held} bytes of all weights")


_PACKED = 1024
"""Arrays this small may lie compressed among the names."""

_FUNCTION = "name inputs outputs batch exact buckets constraints x64 weights programs golden"
_INPUT = "name shape dtype pad lengths axes low high"


def _function_in(f: Fields, weights: Mapping[str, Weight], files: Mapping[str, File]) -> Function:
    signature, tolerance, elsewhere = _signature_in(f)
    used = f.names("weights", among=tuple(weights))
    count = len(used) + len(signature.arguments)
    programs = {
        name: Program(
            file=p.file("file", files),
            kept=p.ascending("kept", count),
            calling_convention=p.size("calling_convention"),
            uses_global_constants=p.flag("uses_global_constants"),
        )
        for name, p in f.mapping_of(
            "programs", "file kept calling_convention uses_global_constants"
        )
    }
    return Function(
        signature=signature,
        weights=used,
        programs=programs,
        x64=f.flag("x64"),
        constraints=tuple(f.strings("constraints")),
        tolerance=tolerance,
        elsewhere=elsewhere,
        golden=_golden_in(f, signature, files),
    )


def _signature_in(
    f: Fields,
) -> tuple[Signature, dict[str, Tolerance], dict[str, Tolerance]]:
    inputs: dict[str, TensorSpec] = {}
    for i in f.records("inputs", _INPUT):
        spec = i.input_spec()
        if spec.name in inputs:
            raise i.wrong("name", "named twice")
        inputs[spec.name] = spec
    dims = {size for spec in inputs.values() for size in spec.shape if isinstance(size, str)}
    outputs: dict[str, TensorSpec] = {}
    tolerance: dict[str, Tolerance] = {}
    elsewhere: dict[str, Tolerance] = {}
    for o in f.records("outputs", "name shape dtype tolerance elsewhere"):
        name = o.text("name")
        if name in outputs:
            raise o.wrong("name", "named twice")
        outputs[name] = TensorSpec(
            name=name, shape=o.sizes("shape", dims), dtype=o.tensor_dtype("dtype")
        )
        for key, table in (("tolerance", tolerance), ("elsewhere", elsewhere)):
            t = o.inner(key, "relative absolute")
            table[name] = Tolerance(relative=t.number("relative"), absolute=t.number("absolute"))
    batch = f.optional_text("batch")
    if batch is not None and batch not in dims:
        raise f.wrong("batch", "no dimension of the inputs")
    shapes = []
    for s in f.records("buckets", None):
        if set(s.data) != dims:
            raise f.wrong("buckets", f"one has not exactly the dimensions {sorted(dims)}")
        shapes.append({d: s.size(d, least=1) for d in s.data})
    if not shapes:
        raise f.wrong("buckets", "empty")
    signature = Signature(
        name=f.name("name"),
        inputs=inputs,
        outputs=outputs,
        batch=batch,
        exact=f.names("exact", among=tuple(dims)),
        shapes=tuple(shapes),
    )
    for argument, of in signature.lengths.items():
        if argument in inputs:
            raise f.wrong("inputs", f"{argument!r} is both an input and lengths of {of!r}")
        signature.measured(of)
    return signature, tolerance, elsewhere


def _golden_in(f: Fields, signature: Signature, files: Mapping[str, File]) -> Golden | None:
    if f.data["golden"] is None:
        return None
    g = f.inner("golden", "file platform jaxlib dims rows sizes")
    dims = _dims(g, "dims", signature)
    rows = None if g.data["rows"] is None else g.size("rows", least=1)
    batch = signature.batch
    if (rows is None) != (batch is None) or (batch and rows and rows > dims[batch]):
        raise g.wrong("rows", "not of the batch")
    sizes = {}
    for name, values in g.mapping("sizes").items():
        ok = name in signature.dims and isinstance(values, list) and len(values) == (rows or 1)
        if not ok or not all(type(v) is int and 0 <= v <= dims[name] for v in values):
            raise g.wrong("sizes", "not a size of its bucket for each row")
        sizes[name] = tuple(values)
    if set(sizes) != set(signature.ragged):
        raise g.wrong("sizes", "not of the ragged dimensions")
    return Golden(
        file=g.file("file", files),
        platform=g.text("platform"),
        jaxlib=g.text("jaxlib"),
        dims=dims,
        rows=rows,
        sizes=sizes,
    )


def _dims(f: Fields, key: str, signature: Signature) -> dict[str, int]:
    dims = f.mapping(key)
    if dict(dims) not in [dict(shape) for shape in signature.shapes]:
        raise f.wrong(key, "none of the function's buckets")
    return dict(dims)
