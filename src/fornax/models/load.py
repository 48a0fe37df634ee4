"""Loading a Hugging Face directory tensor by tensor, each straight into its place and sharding."""

import functools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding, SingleDeviceSharding

from fornax.config.errors import CheckpointError, ConfigError
from fornax.mesh import DEFAULT_RULES, Rules, named_sharding, parse_dtype, tree_shardings
from fornax.models.create import abstract_decoder
from fornax.models.decoder import Decoder
from fornax.models.families import config_from_hf, family_by_name, unwrap_tensors
from fornax.models.layout import Block, TensorLayout, flat_variables, plan_layout
from fornax.models.safetensors_file import StoredTensor, find_tensors

__all__ = ["load_pretrained", "read_config"]

_SHOWN = 5


def read_config(path: str | Path) -> dict[str, Any]:
    """The parsed config.json of a Hugging Face directory.

    Raises:
      CheckpointError: when there is none, or it is not JSON.
    """
    file = Path(path) / "config.json"
    try:
        values = json.loads(file.read_text())
    except OSError as error:
        raise CheckpointError(
            f"{file} cannot be read ({error.strerror}); give a directory with config.json and "
            "safetensors files"
        ) from error
    except ValueError as error:
        raise CheckpointError(f"{file} is not JSON: {error}") from error
    if not isinstance(values, dict):
        raise CheckpointError(f"{file} holds a {type(values).__name__}, not a mapping of keys")
    return values


def load_pretrained(
    path: str | Path,
    dtype: str | np.dtype | None = None,
    mesh: Mesh | None = None,
    rules: Rules = DEFAULT_RULES,
    *,
    compute_dtype: str | np.dtype | None = None,
) -> Decoder:
    """A decoder with the weights of a Hugging Face directory.

    Names, shapes and sizes are checked before anything is allocated. Then one tensor at a time is
    cut, converted and written into its place, each device reading its own part only: peak memory is
    the model's plus one tensor.

    Args:
      path: directory with config.json and safetensors files (one, or sharded with an index).
      dtype: parameter dtype, "float32" or "bfloat16"; None keeps the file's.
      mesh: where the parameters will live; None for the default device.
      rules: logical axes to mesh axes.
      compute_dtype: see `Decoder`.

    Raises:
      ConfigError: config.json asks for what is not supported, or the dtype must be chosen.
      CheckpointError: missing, extra or misshapen tensors, by name; a damaged file; pickled
        weights.
      ShardingError: a parameter does not divide over the mesh.
    """
    folder = Path(path)
    values = read_config(folder)
    config = config_from_hf(values)
    stored = unwrap_tensors(values, find_tensors(folder))
    dtype = _choose_dtype(dtype, stored)
    compute = None if compute_dtype is None else _as_dtype(compute_dtype)
    model = abstract_decoder(config, dtype=dtype, compute_dtype=compute)
    layout = plan_layout(model, family_by_name(str(config.family)).names)
    stored = _without_known_extras(stored, layout, config.tie_embeddings, folder)
    _check(stored, layout, folder)
    return _fill(model, layout, stored, dtype, mesh, rules)


def _as_dtype(dtype: str | np.dtype) -> np.dtype:
    return parse_dtype(dtype) if isinstance(dtype, str) else np.dtype(dtype)


def _choose_dtype(asked: str | np.dtype | None, stored: Mapping[str, StoredTensor]) -> np.dtype:
    allowed = (np.dtype(np.float32), np.dtype(jnp.bfloat16))
    if asked is not None:
        dtype = _as_dtype(asked)
        if dtype not in allowed:
            raise ConfigError(f"dtype={dtype.name} is not supported; use float32 or bfloat16")
        return dtype
    found = {tensor.dtype for tensor in stored.values()}
    if len(found) == 1 and (only := found.pop()) in allowed:
        return only
    names = ", ".join(sorted(dtype.name for dtype in {t.dtype for t in stored.values()}))
    raise ConfigError(
        f"the weights are stored as {names or 'nothing'}; say which dtype to hold them in: "
        "dtype='float32' or dtype='bfloat16'"
    )


def _without_known_extras(
    stored: Mapping[str, StoredTensor],
    layout: list[TensorLayout],
    tied: bool,
    folder: Path,
) -> dict[str, StoredTensor]:
    """Leave out what older files hold beside the weights: computed frequencies, a tied table."""
    expected = {tensor.name for tensor in layout}
    kept = {n: t for n, t in stored.items() if not n.endswith("rotary_emb.inv_freq")}
    head, table = "lm_head.weight", "model.embed_tokens.weight"
    if tied and head in kept and head not in expected and table in kept:
        if not _equal(kept[head], kept[table]):
            raise CheckpointError(
                f"{folder}: config.json ties the embeddings, and {head} differs from {table}; set "
                "tie_word_embeddings to false to load both"
            )
        del kept[head]
    return kept


def _equal(a: StoredTensor, b: StoredTensor) -> bool:
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    left, right = a.view().view(np.uint8), b.view().view(np.uint8)
    rows = max(1, 2**24 // max(1, left.shape[-1]))
    parts = range(0, left.shape[0], rows)
    return all(np.array_equal(left[i : i + rows], right[i : i + rows]) for i in parts)


def _check(stored: Mapping[str, StoredTensor], layout: list[TensorLayout], folder: Path) -> None:
    expected = {tensor.name: tensor.shape for tensor in layout}
    problems = []
    missing = [name for name in expected if name not in stored]
    if missing:
        shapes = [f"{name} {list(expected[name])}" for name in missing]
        problems.append(f"missing {_some(shapes)}")
    extra = [name for name in stored if name not in expected]
    if extra:
        problems.append(f"unexpected {_some([f'{n} {list(stored[n].shape)}' for n in extra])}")
    misshapen = [
        f"{name} expected {list(shape)}, found {list(stored[name].shape)}"
        for name, shape in expected.items()
        if name in stored and stored[name].shape != shape
    ]
    if misshapen:
        problems.append(f"misshapen {_some(misshapen)}")
    if problems:
        raise CheckpointError(
            f"{folder}: the tensors are not those that config.json describes: {'; '.join(problems)}"
        )


def _some(items: list[str]) -> str:
    more = f" and {len(items) - _SHOWN} more" if len(items) > _SHOWN else ""
    return ", ".join(items[:_SHOWN]) + more


def _fill(
    model: Decoder,
    layout: list[TensorLayout],
    stored: Mapping[str, StoredTensor],
    dtype: np.dtype,
    mesh: Mesh | None,
    rules: Rules,
) -> Decoder:
    variables = flat_variables(model)
    places = _places(model, mesh, rules)
    values: dict[str, jax.Array] = {}
    for tensor in layout:
        view = stored[tensor.name].view()
        for block in tensor.blocks:
            path, layer = block.slot.path, block.slot.layer
            if layer is None:
                values[path] = _put(view, block, places[path], dtype)
                continue
            if path not in values:
                values[path] = _zeros(variables[path].shape, dtype, places[path])
            axes = variables[path].get_metadata()["axes"][1:]
            place = places[path] if mesh is None else named_sharding(mesh, axes, rules)
            part = _put(view, block, place, dtype)
            values[path] = _write_layer(places[path])(values[path], part, layer)
            part.delete()
    for path, variable in variables.items():
        variable.set_value(values[path])
    return model


def _places(model: Decoder, mesh: Mesh | None, rules: Rules) -> dict[str, Any]:
    if mesh is None:
        here = SingleDeviceSharding(jax.devices()[0])
        return dict.fromkeys(flat_variables(model), here)
    shardings = nnx.to_flat_state(tree_shardings(nnx.state(model), mesh, rules))
    return {"/".join(map(str, path)): leaf.get_value() for path, leaf in shardings}


def _put(view: np.ndarray, block: Block, place: Any, dtype: np.dtype) -> jax.Array:
    """One parameter, or one layer of it, on its devices: each part cut and converted once."""
    rows = view[block.start : block.stop]
    ours = block.slot.from_stored(rows)

    def cut(index: tuple[slice, ...] | None) -> np.ndarray:
        return np.array(ours[index if index is not None else ...], dtype, order="C")

    return jax.make_array_from_callback(ours.shape, place, cut).block_until_ready()


def _zeros(shape: tuple[int, ...], dtype: np.dtype, place: Any) -> jax.Array:
    return jax.jit(lambda: jnp.zeros(shape, dtype), out_shardings=place)()


@functools.cache
def _write_layer(place: NamedSharding | SingleDeviceSharding) -> Any:
    """A compiled, in-place write of one layer into a stack."""

    def write(stack: jax.Array, part: jax.Array, layer: jax.Array) -> jax.Array:
        return jax.lax.dynamic_update_index_in_dim(stack, part, layer, 0)

    return jax.jit(write, donate_argnums=0, out_shardings=place)
