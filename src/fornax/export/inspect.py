"""All that a bundle is, as JSON-able data and as lines for a terminal."""

import dataclasses
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from fornax.export.bundle import Bundle, open_bundle
from fornax.export.dtypes import numpy_dtype
from fornax.export.graph import read_graph, readable_versions
from fornax.export.manifest import FORMAT, VERSION, Function, Weight
from fornax.export.spec import Size, TensorSpec

__all__ = ["bytes_text", "describe", "lines", "shape_text"]

_MOST_OPERATIONS = 12


def describe(path: str | Path) -> dict[str, Any]:
    """Everything about a bundle, its files checked against their hashes first.

    Raises:
      BundleError: for a bundle that is damaged, or that this Fornax or jaxlib does not read.
    """
    bundle = open_bundle(path, verify="all")
    manifest = bundle.manifest
    oldest, newest = readable_versions()
    return {
        "path": str(bundle.path),
        "format": FORMAT,
        "version": VERSION,
        "bytes": sum(file.size for file in manifest.files.values()),
        "platforms": list(manifest.platforms),
        "versions": dict(manifest.versions),
        "reads": {"stablehlo": [oldest, newest]},
        "functions": {
            name: _function(bundle, function) for name, function in manifest.functions.items()
        },
        "weights": {name: _weight(weight) for name, weight in manifest.weights.items()},
        "executables": [dataclasses.asdict(found) for found in manifest.executables],
        "metadata": dict(manifest.metadata),
        "files": {name: dataclasses.asdict(file) for name, file in manifest.files.items()},
    }


def _function(bundle: Bundle, function: Function) -> dict[str, object]:
    signature = function.signature
    programs = {}
    for platform, program in function.programs.items():
        graph = read_graph(bundle.read(program.file))
        programs[platform] = {
            "file": program.file,
            "bytes": bundle.manifest.files[program.file].size,
            "operations": graph.size,
            "counts": graph.operations,
            "graph": graph.digest,
        }
    return {
        "inputs": [_tensor(spec) for spec in signature.inputs.values()],
        "outputs": [
            _tensor(spec) | {"tolerance": dataclasses.asdict(function.tolerance[name])}
            for name, spec in signature.outputs.items()
        ],
        "batch": signature.batch,
        "ragged": list(signature.ragged),
        "exact": list(signature.exact),
        "buckets": {dim: list(sizes) for dim, sizes in signature.buckets.items()},
        "shapes": [dict(shape) for shape in signature.shapes],
        "x64": function.x64,
        "weights": len(function.weights),
        "programs": programs,
        "golden": dataclasses.asdict(function.golden) if function.golden else None,
    }


def _tensor(spec: TensorSpec) -> dict[str, Any]:
    kept = {key: value for key, value in dataclasses.asdict(spec).items() if value is not None}
    return kept | {"shape": list(spec.shape)}


def _weight(weight: Weight) -> dict[str, object]:
    return {
        "shape": list(weight.shape),
        "dtype": weight.dtype,
        "axes": None if weight.axes is None else list(weight.axes),
        "bytes": math.prod(weight.shape) * numpy_dtype(weight.dtype).itemsize,
    }


def lines(found: Mapping[str, Any]) -> Iterator[str]:
    """What `describe` found, for a terminal."""
    versions = found["versions"]
    yield f"{found['path']}: bundle, format version {found['version']}"
    yield (
        f"  {len(found['files'])} files, {bytes_text(found['bytes'])}, every SHA-256 as sealed; "
        f"platforms {', '.join(found['platforms'])}"
    )
    yield "  written by " + ", ".join(
        f"{name} {versions[name]}" for name in ("fornax", "jax", "jaxlib") if name in versions
    )
    oldest, newest = found["reads"]["stablehlo"]
    yield f"  graphs are read by {versions.get('window', 'what wrote them')}"
    yield f"  this jaxlib reads StableHLO {oldest} to {newest}"
    for key, value in found["metadata"].items():
        yield f"  {key}: {value}"
    for number, (name, function) in enumerate(found["functions"].items()):
        yield ""
        yield from _function_lines(name, function, default=number == 0)
    yield ""
    yield from _weight_lines(found["weights"])
    if found["executables"]:
        yield ""
        yield f"executables ({len(found['executables'])}; used only where they are trusted)"
        for one in found["executables"]:
            key = ", ".join(f"{k} {v}" for k, v in one["key"].items())
            yield f"  {one['function']} {_dims(one['dims'])}: {one['file']} ({key})"
    yield ""
    yield "files"
    width = max(map(len, found["files"]))
    for name, file in found["files"].items():
        yield f"  {name:<{width}}  {file['size']:>12,}  {file['sha256']}"


def _function_lines(name: str, function: Mapping[str, Any], *, default: bool) -> Iterator[str]:
    yield f"function {name}{' (the default)' if default else ''}"
    for kind in ("inputs", "outputs"):
        for spec in function[kind]:
            yield f"  {kind[:-1]:<7} {spec['name']}: {spec['dtype']} {_spec_text(spec)}"
    for dim, sizes in function["buckets"].items():
        kinds = (("batch", dim == function["batch"]), ("exact", dim in function["exact"]))
        kind = next((kind for kind, holds in kinds if holds), "ragged")
        yield f"  {kind:<7} {dim} in buckets of {', '.join(map(str, sizes))}"
    if function["buckets"]:
        yield f"  compiled for {len(function['shapes'])} combinations of sizes"
    graphs: dict[str, list[str]] = {}
    for platform, program in function["programs"].items():
        graphs.setdefault(program["graph"], []).append(platform)
    for platforms in graphs.values():
        program = function["programs"][platforms[0]]
        yield (
            f"  graph   {', '.join(platforms)}: {program['operations']} operations, "
            f"{bytes_text(program['bytes'])}: {_counts(program['counts'])}"
        )
    golden = function["golden"]
    yield (
        f"  golden  {_dims(golden['dims'])} on {golden['platform']}, jaxlib {golden['jaxlib']}"
        if golden
        else "  golden  none"
    )
    if function["x64"]:
        yield "  computes with 64-bit types"


def _spec_text(spec: Mapping[str, Any]) -> str:
    text = shape_text(spec["shape"])
    if spec.get("lengths"):
        text += f", true sizes in {spec['lengths']}"
    if spec.get("axes"):
        text += f", axes {_axes(spec['axes'])}"
    if spec.get("tolerance"):
        given = spec["tolerance"]
        text += f", within {given['absolute']:.1e} + {given['relative']:.1e} |x|"
    return text


def _counts(counts: Mapping[str, int]) -> str:
    shown = [f"{count} {name}" for name, count in list(counts.items())[:_MOST_OPERATIONS]]
    more = len(counts) - len(shown)
    return ", ".join(shown) + (f" and {more} more kinds" if more else "")


def _weight_lines(weights: Mapping[str, Any]) -> Iterator[str]:
    numbers = sum(math.prod(weight["shape"]) for weight in weights.values())
    size = bytes_text(sum(weight["bytes"] for weight in weights.values()))
    yield f"weights: {len(weights)} arrays, {numbers:,} numbers, {size}"
    width = max(map(len, weights), default=0)
    for name, weight in weights.items():
        axes = f"  {_axes(weight['axes'])}" if weight["axes"] else ""
        yield f"  {name:<{width}}  {weight['dtype']} {shape_text(weight['shape'])}{axes}"


def _axes(axes: list[str | None]) -> str:
    return f"({', '.join(axis or '-' for axis in axes)})"


def _dims(dims: Mapping[str, int]) -> str:
    return " ".join(f"{name}={size}" for name, size in dims.items()) or "one size"


def shape_text(shape: list[Size] | tuple[Size, ...]) -> str:
    """A shape as `[b, t, 64]`."""
    return f"[{', '.join(map(str, shape))}]"


def bytes_text(count: int) -> str:
    """A size for people."""
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count} bytes"
