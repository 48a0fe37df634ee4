"""Two bundles compared: signatures, graphs, weights, and outputs on the golden inputs."""

import dataclasses
import itertools
import math
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import TypedDict

import jax
import numpy as np

from fornax.config.errors import BundleError
from fornax.export import golden
from fornax.export.bundle import Bundle, open_bundle
from fornax.export.graph import changes, read_graph
from fornax.export.inspect import shape_text
from fornax.export.manifest import Manifest, Tolerance
from fornax.export.spec import Signature
from fornax.export.weights import Weights

__all__ = ["Difference", "compare", "lines"]

_MOST = 40
"""Lines of one graph's difference that are shown on a terminal."""


class GraphDifference(TypedDict):
    """How two graphs differ."""

    operations: dict[str, list[int]]
    """By name how many there are, [a, b], where that differs."""
    changes: list[str]
    """Lines of a unified difference."""


class OutputDifference(TypedDict):
    """How two outputs differ."""

    largest: float
    expected: float
    """The largest value of a."""
    equal: bool
    """Bit for bit."""
    within: bool
    """Whether the tolerance of a allows it."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Difference:
    """What of two bundles differs; all empty when they are the same to their users."""

    signatures: list[str]
    """Sentences about functions, inputs, outputs, buckets and platforms."""
    graphs: dict[str, GraphDifference]
    """By `function.platform`, where they differ."""
    weights: list[str]
    """Sentences about names, shapes, dtypes, axes and values."""
    outputs: dict[str, OutputDifference]
    """By `function.output`."""
    notes: list[str]
    """What could not be compared, and why; it makes no difference."""

    @property
    def same(self) -> bool:
        """Whether nothing differs."""
        unequal = any(not output["equal"] for output in self.outputs.values())
        return not (self.signatures or self.graphs or self.weights or unequal)


def compare(a: str | Path, b: str | Path) -> Difference:
    """Compare two bundles, both verified first; outputs are computed on this machine.

    Raises:
      BundleError: for one that is damaged or cannot run here.
    """
    left, right = open_bundle(a, verify="all"), open_bundle(b, verify="all")
    signatures = list(_signatures(left.manifest, right.manifest))
    notes: list[str] = []
    placed = (left.load_weights(), right.load_weights())
    return Difference(
        signatures=signatures,
        graphs=dict(_graphs(left, right)),
        weights=list(_weights(left.manifest, right.manifest, *placed)),
        outputs=dict(_outputs(left, right, *placed, notes)),
        notes=notes,
    )


def _signatures(a: Manifest, b: Manifest) -> Iterator[str]:
    yield from _sets("platform", a.platforms, b.platforms)
    yield from _sets("function", a.functions, b.functions)
    for name in _both(a.functions, b.functions):
        for line in _signature(a.functions[name].signature, b.functions[name].signature):
            yield f"{name}: {line}"
    first, other = next(iter(a.functions)), next(iter(b.functions))
    if first != other:
        yield f"the default function is {first} in a, {other} in b"


def _signature(a: Signature, b: Signature) -> Iterator[str]:
    for kind in ("inputs", "outputs"):
        left, right = getattr(a, kind), getattr(b, kind)
        yield from _sets(kind[:-1], left, right)
        for name in _both(left, right):
            old, new = dataclasses.asdict(left[name]), dataclasses.asdict(right[name])
            for key in old:
                if old[key] != new[key]:
                    yield f"{kind[:-1]} {name}: {key} {_show(old[key])} -> {_show(new[key])}"
        if list(left) != list(right) and set(left) == set(right):
            yield f"{kind} in another order: {', '.join(left)} -> {', '.join(right)}"
    for key in ("batch", "exact"):
        old, new = getattr(a, key), getattr(b, key)
        if old != new:
            yield f"{key} {_show(old)} -> {_show(new)}"
    if [dict(shape) for shape in a.shapes] != [dict(shape) for shape in b.shapes]:
        yield f"buckets {_show(dict(a.buckets))} -> {_show(dict(b.buckets))}"


def _graphs(a: Bundle, b: Bundle) -> Iterator[tuple[str, GraphDifference]]:
    for name in _both(a.manifest.functions, b.manifest.functions):
        old, new = (bundle.manifest.functions[name].programs for bundle in (a, b))
        for platform in _both(old, new):
            left, right = a.read(old[platform].file), b.read(new[platform].file)
            if left == right:
                continue
            before, after = read_graph(left), read_graph(right)
            lines = changes(before, after)
            if lines:
                names = sorted(before.operations.keys() | after.operations.keys())
                counts = {
                    n: [before.operations.get(n, 0), after.operations.get(n, 0)] for n in names
                }
                yield (
                    f"{name}.{platform}",
                    {
                        "operations": {n: pair for n, pair in counts.items() if pair[0] != pair[1]},
                        "changes": lines,
                    },
                )


def _weights(a: Manifest, b: Manifest, left: Weights, right: Weights) -> Iterator[str]:
    yield from _sets("weight", a.weights, b.weights)
    for name in _both(a.weights, b.weights):
        old, new = a.weights[name], b.weights[name]
        for key in ("shape", "dtype", "axes"):
            before, after = getattr(old, key), getattr(new, key)
            if before != after:
                yield f"{name}: {key} {_show(before)} -> {_show(after)}"
        if (old.shape, old.dtype) == (new.shape, new.dtype):
            found, expected = np.asarray(right.params[name]), np.asarray(left.params[name])
            if found.tobytes() != expected.tobytes():
                largest = _largest(found, expected)
                scale = _largest(expected, np.zeros_like(expected))
                yield f"{name}: values differ by {largest:.3g} at most, of {scale:.3g}"


def _outputs(
    a: Bundle, b: Bundle, left: Weights, right: Weights, notes: list[str]
) -> Iterator[tuple[str, OutputDifference]]:
    for name in _both(a.manifest.functions, b.manifest.functions):
        one, other = a.manifest.functions[name], b.manifest.functions[name]
        if one.golden is None and other.golden is None:
            notes.append(f"{name}: neither bundle has golden inputs, so no outputs were compared")
            continue
        owner, function = (a, one) if one.golden is not None else (b, other)
        kept, arrays = function.golden, owner.golden(name)
        if kept is None or arrays is None:
            continue
        try:
            before = _run(a, name, kept.dims, left, arrays.inputs)
            after = _run(b, name, kept.dims, right, arrays.inputs)
        except BundleError as error:
            notes.append(f"{name}: the golden inputs of {owner.path} do not fit both: {error}")
            continue
        for output in _both(before, after):
            spec = function.signature.outputs[output]
            regions = golden.regions(function.signature, spec, kept)
            pairs = [(before[output][region], after[output][region]) for region in regions]
            yield f"{name}.{output}", _output(pairs, function.tolerance[output])


def _run(
    bundle: Bundle,
    name: str,
    dims: Mapping[str, int],
    weights: Weights,
    inputs: Mapping[str, np.ndarray],
) -> dict[str, np.ndarray]:
    found = bundle.compile(name, dims, weights)(inputs)
    return {key: np.asarray(value) for key, value in jax.block_until_ready(found).items()}


def _output(pairs: list[tuple[np.ndarray, np.ndarray]], tolerance: Tolerance) -> OutputDifference:
    off = [golden.difference(new, old, tolerance) for old, new in pairs]
    return {
        "largest": max((worst for _, worst in off), default=0.0),
        "expected": max((_largest(old, np.zeros_like(old)) for old, _ in pairs), default=0.0),
        "equal": all(old.tobytes() == new.tobytes() for old, new in pairs),
        "within": all(words is None for words, _ in off),
    }


def _largest(found: np.ndarray, expected: np.ndarray) -> float:
    wide = np.complex128 if found.dtype.kind == "c" else np.float64
    off = np.abs(found.astype(wide) - expected.astype(wide))
    return float(off.max(initial=0.0)) if not np.isnan(off).any() else math.nan


def _sets(what: str, a: Collection[str], b: Collection[str]) -> Iterator[str]:
    for name in a:
        if name not in b:
            yield f"{what} {name} is in a only"
    for name in b:
        if name not in a:
            yield f"{what} {name} is in b only"


def _both(a: Collection[str], b: Collection[str]) -> list[str]:
    return [name for name in a if name in b]


def _show(value: object) -> str:
    if isinstance(value, list | tuple):
        return shape_text(list(value))
    if isinstance(value, dict):
        return " ".join(f"{key}={shape_text(list(sizes))}" for key, sizes in value.items())
    return "none" if value is None else str(value)


def _alike(graphs: Mapping[str, GraphDifference]) -> list[tuple[list[str], GraphDifference]]:
    """Graphs that differ in the same way together: platforms mostly do."""
    found: list[tuple[list[str], GraphDifference]] = []
    for name, graph in graphs.items():
        for names, other in found:
            if other == graph:
                names.append(name)
                break
        else:
            found.append(([name], graph))
    return found


def lines(found: Difference) -> Iterator[str]:
    """What `compare` found, for a terminal."""
    for title, sentences in (("signatures", found.signatures), ("weights", found.weights)):
        if sentences:
            yield f"{title} differ"
            yield from (f"  {sentence}" for sentence in sentences)
        else:
            yield f"{title} are the same"
    if not found.graphs:
        yield "graphs are the same"
    for names, graph in _alike(found.graphs):
        yield f"graph {', '.join(names)} differs"
        for operation, (before, after) in graph["operations"].items():
            yield f"  {operation}: {before} -> {after}"
        yield from (f"  {line}" for line in itertools.islice(graph["changes"], _MOST))
        if len(graph["changes"]) > _MOST:
            yield f"  ... {len(graph['changes']) - _MOST} more lines; --json has all"
    for name, output in found.outputs.items():
        if output["equal"]:
            yield f"output {name} is equal, bit for bit"
        else:
            within = "within" if output["within"] else "beyond"
            yield (
                f"output {name} differs by {output['largest']:.3g} at most, of "
                f"{output['expected']:.3g}: {within} the tolerance of a"
            )
    yield from found.notes
