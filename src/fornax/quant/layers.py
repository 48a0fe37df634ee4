"""Leaves into few bits, and layers one after the other where text says how.

Legend: N rows of text, T tokens of a row.
"""

import dataclasses
import math
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fornax.checkpoint.safetensors_file import DTYPES, StoredTensor, open_file
from fornax.config.errors import CheckpointError
from fornax.models import Activations, LayerByLayer, StoredModel
from fornax.models.families import read_quantization
from fornax.models.layout import by_expert, flat_variables, num_inputs
from fornax.quant.folds import Folds, find_folds
from fornax.quant.gptq import DAMPING, gptq
from fornax.quant.inputs import find_roundings
from fornax.quant.leaves import Leaf
from fornax.quant.rotation import Rotations
from fornax.quant.rounding import Codes, greatest, round_matrix, scale_divisor
from fornax.quant.statistics import Found, Statistics, layer_statistics
from fornax.quant.tensors import tensors_of, tensors_of_experts
from fornax.quant.verify import batches
from fornax.quant.work import Work

__all__ = [
    "FEWEST_ROWS",
    "convert",
    "enough",
    "find_largest",
    "find_layer_folds",
    "folded",
    "read_back",
    "see",
    "write_layers",
]

FEWEST_ROWS = 128
"""Rows of text that a weight must meet for its errors to be weighed by them."""
_FUSED = {
    **dict.fromkeys(("q", "k", "v"), "qkv"),
    **dict.fromkeys(("gate", "up"), "gate_up"),
    **dict.fromkeys(("q_down", "kv_down"), "down"),
}
"""Linear layers of one input that engines run as one."""
_CHUNK = 2**22


def write_layers(
    work: Work,
    stored: StoredModel,
    leaves: Sequence[Leaf],
    rows_NT: np.ndarray,
    config: Mapping[str, Any],
    largest: Mapping[str, float],
) -> None:
    """Write the leaves of all layers, each by what it meets of the text behind the layers before
    it as they are written.

    Args:
      work: where; layers that are there are read back and run.
      stored: the float model.
      leaves: of the directory.
      rows_NT: int32 tokens.
      config: config.json of what is written.
      largest: see `find_largest`.
    """
    model = LayerByLayer(stored)
    found = [model.embed(tokens_BT) for tokens_BT in batches(rows_NT)]
    for index in range(len(model.kinds)):
        own = [leaf for leaf in leaves if leaf.layer == index]
        left = [leaf for leaf in own if leaf.tensor.name not in work.notes]
        if left:
            seen = see(model, index, own, found)
            folds = find_layer_folds(model, index, own, enough(seen))
            for leaf in left:
                work.add(leaf.tensor.name, *convert(leaf, seen, folds, largest))
        work.flush()
        wanted = {module for leaf in own for module in (leaf.module, *leaf.modules)}
        files = {work.folder / file for name, file in work.places.items() if _owner(name) in wanted}
        layer = model.layer(index, read_back(files, stored, own, config))
        roundings = find_roundings(own, work.notes)
        found = [model.run(layer, index, each, roundings) for each in found]


def see(
    model: LayerByLayer, index: int, leaves: Sequence[Leaf], before: Sequence[Activations]
) -> Found:
    """What the leaves of a layer that are quantized by text meet of it; see `layer_statistics`."""
    by_text = {
        _inner(path): leaf.scheme.method in ("gptq", "awq")
        for leaf in leaves
        if leaf.scheme and leaf.scheme.needs_text
        for path in leaf.parameters
    }
    return layer_statistics(model, index, before, by_text) if by_text else {}


def enough(seen: Found) -> Found:
    """Of the weights that met so much text that scales can be found by it."""
    return {key: each for key, each in seen.items() if each.rows >= FEWEST_ROWS}


def _inner(path: str) -> str:
    """The path of a parameter in its layer."""
    return path.removeprefix("layers/")


def find_layer_folds(model: LayerByLayer, index: int, leaves: Sequence[Leaf], seen: Found) -> Folds:
    """The scales of a layer's inputs where leaves have AWQ or SmoothQuant."""
    schemes = {
        _inner(path): leaf.scheme
        for leaf in leaves
        if leaf.scheme is not None and leaf.scheme.method in ("awq", "smoothquant")
        for path in leaf.parameters
    }
    if not schemes:
        return Folds()
    layer = model.layer(index)
    parameters = {}
    for path, variable in flat_variables(layer).items():
        value, inputs = np.asarray(variable.get_value()), num_inputs(layer, path)
        if inputs:
            experts = value.shape[: path.startswith("experts/") and value.ndim == 3]
            size = math.prod(value.shape[len(experts) :][:inputs])
            value = value.reshape(*experts, size, -1).swapaxes(-1, -2)
        parameters[path] = value
    return find_folds(model.config, index, parameters, seen, schemes)


def read_back(
    files: Collection[Path],
    stored: StoredModel,
    leaves: Sequence[Leaf],
    config: Mapping[str, Any],
) -> StoredModel:
    """The model with leaves of a layer as files have them.

    Args:
      files: safetensors files; leaves that they do not have stay those of `stored`.
      stored: the float model.
      leaves: of the layer.
      config: config.json of what is written.
    """
    wanted = {module for leaf in leaves for module in (leaf.module, *leaf.modules)}
    written = {
        name: tensor
        for file in sorted(files)
        for name, tensor in open_file(file, DTYPES).items()
        if _owner(name) in wanted
    }
    quantization = read_quantization(config)
    if quantization is not None and any(leaf.scheme for leaf in leaves):
        written = quantization.dequantize(written)
    experts = {
        (block.slot.path, leaf.tensor.name): [
            (written[tensor.name], tensor.blocks[0])
            for tensor in by_expert(leaf.layout)
            if tensor.blocks[0].slot.path == block.slot.path
        ]
        for leaf in leaves
        if leaf.stacked and leaf.scheme is not None and leaf.scheme.layout != "gpt-oss"
        for block in leaf.blocks
    }
    blocks = {
        path: {
            index: [
                source
                for tensor, block in sources
                for source in experts.get(
                    (path, tensor.name), [(written.get(tensor.name, tensor), block)]
                )
            ]
            for index, sources in layers.items()
        }
        for path, layers in stored.blocks.items()
    }
    return dataclasses.replace(stored, blocks=blocks)


def _owner(name: str) -> str:
    """The module, or the leaf that is not a weight, that a written tensor belongs to."""
    owner, _, part = name.rpartition(".")
    if part.startswith(("weight", "input_global_scale")):
        return owner
    return name.removesuffix("_blocks").removesuffix("_scales")


def convert(
    leaf: Leaf,
    seen: Found | None = None,
    folds: Folds | None = None,
    largest: Mapping[str, float] | None = None,
    rotations: Rotations | None = None,
) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """The tensors of a leaf, and what is to be noted of them.

    Args:
      leaf: with its scheme.
      seen: of the rows of text that its layer's weights met.
      folds: scales of its layer's inputs.
      largest: see `find_largest`.
      rotations: of the model.

    Raises:
      CheckpointError: for weights that are not numbers.
    """
    values, tensor = leaf.tensor.view(), leaf.tensor
    if leaf.scheme is not None:
        _check(tensor, values)
    scaled = None if folds is None else folded(leaf, values, folds)
    if rotations is not None:
        scaled = rotations.rotated(leaf, values)
    if leaf.scheme is None:
        found = values if scaled is None else scaled.astype(tensor.dtype)
        return {tensor.name: found}, {"scaled": scaled is not None}
    # That of the model: other readers cast scales to it.
    dtype = np.dtype(np.float32) if tensor.dtype.itemsize > 4 else tensor.dtype
    note: dict[str, Any] = {"method": leaf.scheme.method, "scaled": scaled is not None}
    if rotations is not None and leaf.parameter.endswith("attention/o/kernel"):
        note |= rotations.note
    values = values if scaled is None else scaled
    if leaf.scheme.layout == "gpt-oss":
        w_EOI = values if leaf.blocks[0].slot.transposed else values.swapaxes(-1, -2)
        codes = round_matrix(w_EOI.reshape(-1, w_EOI.shape[-1]), leaf.scheme, dtype)
        return tensors_of_experts(tensor.name, codes, w_EOI.shape), note
    made: dict[str, np.ndarray] = {}
    notes: list[dict[str, Any]] = []
    for module, path, expert, w_OI in leaf.matrices(values):
        key = (_inner(path), expert)
        most = None if scaled is not None or largest is None else largest.get(module)
        codes, own = _rounded(leaf, key, w_OI, dtype, seen or {}, folds, most)
        made |= tensors_of(module, codes, leaf.scheme)
        for divisor in own.get("input_divisors", []):
            made[f"{module}.input_global_scale"] = np.array([divisor], np.float32)
        if path != leaf.parameter:  # the first one's text is that of all
            own = {key: own[key] for key in own if key not in ("rows", "input_divisors")}
        notes.append(own)
    return made, note | _merged(notes)


def _rounded(
    leaf: Leaf,
    key: tuple[str, int | None],
    w_OI: np.ndarray,
    dtype: np.dtype,
    seen: Found,
    folds: Folds | None,
    largest: float | None,
) -> tuple[Codes, dict[str, Any]]:
    """The codes of one matrix, and what is to be noted of it."""
    scheme, statistics = leaf.scheme, seen.get(key)
    assert scheme is not None
    note: dict[str, Any] = {}
    if scheme.measures_inputs:
        most, own = _largest_input(key, seen)
        note["input_divisors"] = [float(scale_divisor(most, scheme.largest))]
        if not own:
            note["reason"] = f"{_few(statistics)}; the scale of inputs is of all experts"
    if scheme.method == "rounding":
        return round_matrix(w_OI, scheme, dtype, largest=largest), note
    if statistics is None or statistics.rows < FEWEST_ROWS:
        reason = _few(statistics) if leaf.layer is not None else "it is outside the layers"
        return round_matrix(w_OI, scheme, dtype), {"method": "rounding", "reason": reason}
    note["rows"] = statistics.rows
    if folds is not None and key[0] in folds.skipped:
        note["unscaled"] = folds.skipped[key[0]]
    if scheme.method == "gptq":
        return gptq(w_OI, statistics.h_KK, scheme, dtype), note
    if scheme.method == "smoothquant":
        return round_matrix(w_OI, scheme, dtype), note
    assert folds is not None
    c_I = folds.columns.get(key, np.float32(1))
    diagonal_I = np.diagonal(statistics.h_KK) / c_I**2
    importance_I = diagonal_I + max(DAMPING * float(diagonal_I.mean()), 1e-30)
    return round_matrix(w_OI, scheme, dtype, importance_I / importance_I.mean()), note


def _few(statistics: Statistics | None) -> str:
    rows = 0 if statistics is None else statistics.rows
    return f"it received {rows} rows of the text, fewer than {FEWEST_ROWS}"


def _largest_input(key: tuple[str, int | None], seen: Found) -> tuple[float, bool]:
    """The greatest magnitude of a weight's inputs, and whether it is its own: an expert that met
    few rows has that of all experts."""
    if key in seen and seen[key].rows >= FEWEST_ROWS:
        return float(seen[key].most_K.max()), True
    found = [float(each.most_K.max()) for (path, _), each in seen.items() if path == key[0]]
    return max(found, default=0.0), False


def _merged(notes: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The notes of a tensor's matrices as one."""
    if len(notes) == 1:
        return notes[0]
    found: dict[str, Any] = {}
    if any("rows" in note for note in notes):
        found["rows"] = sum(note.get("rows", 0) for note in notes)
    for note in notes:
        if "unscaled" in note:
            found["unscaled"] = note["unscaled"]
        for divisor in note.get("input_divisors", []):
            found.setdefault("input_divisors", []).append(divisor)
    few = [note["reason"] for note in notes if "reason" in note]
    if few:
        found["reason"] = f"of {len(few)} of {len(notes)} matrices, the first: {few[0]}"
    return found


def find_largest(leaves: Sequence[Leaf]) -> dict[str, float]:
    """The greatest magnitude that one divisor of float8 scales is for, by module: engines multiply
    by the weights of queries, keys and values as by one, and so by those of gate and up.

    Args:
      leaves: with their schemes; those with other scales are left out.
    """
    alike: dict[tuple[object, ...], list[str]] = {}
    own: dict[str, float] = {}
    for leaf in leaves:
        if leaf.scheme is None or leaf.scheme.scales != "e4m3":
            continue
        for module, path, expert, w_OI in leaf.matrices(leaf.tensor.view()):
            own[module] = greatest(w_OI)
            *parents, name, _ = path.split("/")
            fused = _FUSED.get(name, name)
            alike.setdefault((leaf.layer, expert, *parents, fused), []).append(module)
    return {
        module: max(own[each] for each in modules)
        for modules in alike.values()
        for module in modules
    }


def folded(leaf: Leaf, values: np.ndarray, folds: Folds) -> np.ndarray | None:
    """The values of a leaf with scales on its inputs and outputs; None where there are none."""
    made = None
    for path, block in zip(map(_inner, leaf.parameters), leaf.blocks, strict=True):
        if path in folds.norms:
            return folds.norms[path]
        kernel = path.removesuffix("/bias") + "/kernel" if path.endswith("/bias") else path
        experts = range(len(values)) if leaf.stacked else (leaf.expert,)
        for expert in experts:
            columns = None if path.endswith("/bias") else folds.columns.get((path, expert))
            rows = folds.rows.get((kernel, expert))
            if columns is None and rows is None:
                continue
            made = values.astype(np.float32) if made is None else made
            part = block.cut_experts(made)[expert] if leaf.stacked else block.cut(made)
            scaled = part if columns is None else part * columns
            if rows is not None:
                scaled = scaled / (rows[:, None] if part.ndim == 2 else rows)
            if leaf.stacked:
                part[...] = scaled
            else:
                block.put(made, scaled)
    return made


def _check(tensor: StoredTensor, values: np.ndarray) -> None:
    rows = max(1, _CHUNK // values[:1].size)
    parts = (values[at : at + rows] for at in range(0, len(values), rows))
    if not all(np.isfinite(part.astype(np.float32)).all() for part in parts):
        raise CheckpointError(
            f"{tensor.file}: {tensor.name} holds values that are infinite or no numbers; a scale "
            "would make more of them so: fix the float model first"
        )
