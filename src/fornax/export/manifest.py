"""`manifest.json`: what a bundle says of itself, and how it is written.

docs/reference/bundle.md describes the format; `reading.py` reads it. `seal` is the SHA-256 of all
the other fields.
"""

import dataclasses
import hashlib
import json
import math
from collections.abc import Mapping
from typing import Any

from fornax.export.spec import Signature, TensorSpec

__all__ = [
    "FORMAT",
    "PLATFORMS",
    "VERSION",
    "Executable",
    "File",
    "Function",
    "Golden",
    "Manifest",
    "Program",
    "Tolerance",
    "Weight",
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
    metadata: Mapping[str, object]
    files: Mapping[str, File]


def to_json(manifest: Manifest) -> bytes:
    """The bytes of `manifest.json`."""
    body: dict[str, object] = {
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


def seal(body: Mapping[str, object]) -> str:
    """SHA-256 of a manifest's fields in one order and spelling, `seal` itself left out."""
    plain = json.loads(json.dumps({k: v for k, v in body.items() if k != "seal"}))
    return hashlib.sha256(
        json.dumps(plain, sort_keys=True, separators=(",", ":")).encode()
    ).hexdigest()


def _function_out(f: Function) -> dict[str, object]:
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


def _spec_out(spec: TensorSpec) -> dict[str, object]:
    fields: dict[str, Any] = {**dataclasses.asdict(spec)}
    for key in ("pad", "low", "high"):
        if isinstance(fields[key], float) and not math.isfinite(fields[key]):
            fields[key] = str(fields[key])  # JSON has no infinities
    return fields
