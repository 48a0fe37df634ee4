"""`manifest.json`: what a bundle says of itself, written and read strictly.

docs/reference/bundle.md describes the format. Reading needs no jax and executes nothing; every
field is checked before it is believed, and `seal` is the SHA-256 of all the others.
"""

import dataclasses
import hashlib
import json
import math
from collections.abc import Mapping
from typing import Any

from fornax.config.errors import BundleError
from fornax.export.dtypes import numpy_dtype
from fornax.export.fields import Fields
from fornax.export.spec import Signature, TensorSpec

__all__ = [
    "FORMAT",
    "VERSION",
    "Executable",
    "File",
    "Function",
    "Golden",
    "Manifest",
    "Program",
    "Tolerance",
    "Weight",
    "from_json",
    "seal",
    "to_json",
]

FORMAT = "fornax-bundle"
VERSION = 1
PLATFORMS = ("cpu", "cuda", "rocm", "tpu")


@dataclasses.dataclass(frozen=True, kw_only=True)
class File:
    """A file of the bundle."""

    size: int
    sha256: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tolerance:
    """How far an output may be off: |found - expected| <= absolute + relative * |expected|."""

    relative: float
    absolute: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class Program:
    """StableHLO of a function for one platform, and how it is called.

    `kept` numbers the arguments (weights, then inputs, then lengths) that it takes.
    """

    file: str
    kept: tuple[int, ...]
    calling_convention: int
    uses_global_constants: bool


@dataclasses.dataclass(frozen=True, kw_only=True)
class Golden:
    """Warm-up inputs with the outputs they had: tensors `input.<name>` and `output.<name>`.

    `sizes` has each row's true size along the ragged dimensions; `rows` is None without a batch.
    """

    file: str
    platform: str
    jaxlib: str
    dims: Mapping[str, int]
    rows: int | None
    sizes: Mapping[str, tuple[int, ...]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Function:
    """A function of the bundle.

    `tolerance` holds by output on the golden run's platform, `elsewhere` on the others.
    """

    signature: Signature
    weights: tuple[str, ...]
    programs: Mapping[str, Program]
    x64: bool
    constraints: tuple[str, ...]
    tolerance: Mapping[str, Tolerance]
    elsewhere: Mapping[str, Tolerance]
    golden: Golden | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Weight:
    """An array of the weights; `stored` is the dtype it has in the zarr array."""

    shape: tuple[int, ...]
    dtype: str
    stored: str
    chunks: tuple[int, ...]
    axes: tuple[str | None, ...] | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Executable:
    """Native code compiled ahead of time; `key` says for which machine and compiler."""

    file: str
    function: str
    dims: Mapping[str, int]
    key: Mapping[str, str]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Manifest:
    """What a bundle is. `versions` names the jax, jaxlib, StableHLO and fornax that wrote it."""

    platforms: tuple[str, ...]
    versions: Mapping[str, str]
    functions: Mapping[str, Function]
    weights: Mapping[str, Weight]
    executables: tuple[Executable, ...]
    metadata: Mapping[str, Any]
    files: Mapping[str, File]


def to_json(manifest: Manifest) -> bytes:
    """The bytes of `manifest.json`."""
    body: dict[str, Any] = {
        "format": FORMAT,
        "version": VERSION,
        "platforms": list(manifest.platforms),
        "versions": dict(manifest.versions),
        "functions": [_function_out(f) for f in manifest.functions.values()],
        "weights": [
            {"name": name, **dataclasses.asdict(w)} for name, w in manifest.weights.items()
        ],
        "executables": [dataclasses.asdict(e) for e in manifest.executables],
        "metadata": dict(manifest.metadata),
        "files": {name: dataclasses.asdict(f) for name, f in sorted(manifest.files.items())},
    }
    body["seal"] = seal(body)
    return (json.dumps(body, indent=1, allow_nan=False) + "\n").encode()


def seal(body: Mapping[str, Any]) -> str:
    """SHA-256 of a manifest's fields in one order and spelling, `seal` itself left out."""
    plain = json.loads(json.dumps({k: v for k, v in body.items() if k != "seal"}))
    return hashlib.sha256(
        json.dumps(plain, sort_keys=True, separators=(",", ":")).encode()
    ).hexdigest()


def _function_out(f: Function) -> dict[str, Any]:
    s = f.signature
    return {
        "name": s.name,
        "inputs": [_spec_out(spec) for spec in s.inputs.values()],
        "outputs": [
            {
                "name": o.name,
                "shape": list(o.shape),
                "dtype": o.dtype,
                "tolerance": dataclasses.asdict(f.tolerance[o.name]),
                "elsewhere": dataclasses.asdict(f.elsewhere[o.name]),
            }
            for o in s.outputs.values()
        ],
        "batch": s.batch,
        "exact": list(s.exact),
        "buckets": [dict(shape) for shape in s.shapes],
        "constraints": list(f.constraints),
        "x64": f.x64,
        "weights": list(f.weights),
        "programs": {name: dataclasses.asdict(p) for name, p in f.programs.items()},
        "golden": dataclasses.asdict(f.golden) if f.golden else None,
    }


def _spec_out(spec: TensorSpec) -> dict[str, Any]:
    fields: dict[str, Any] = {**dataclasses.asdict(spec)}
    for key in ("pad", "low", "high"):
        if isinstance(fields[key], float) and not math.isfinite(fields[key]):
            fields[key] = str(fields[key])  # JSON has no infinities
    return fields


def from_json(data: bytes, where: str) -> Manifest:
    """Read and check the bytes of `manifest.json`.

    Raises:
      BundleError: for other formats and versions, an altered manifest, and any field that is
        missing, unknown, of a wrong type, or at odds with another.
    """
    try:
        body = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise BundleError(
            f"{where} is no JSON ({error}); it was truncated or altered: copy the bundle again"
        ) from None
    if not isinstance(body, dict) or body.get("format") != FORMAT:
        raise BundleError(f"{where} is no manifest of a bundle: its format is not {FORMAT!r}")
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
