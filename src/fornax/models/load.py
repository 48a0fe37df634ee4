"""Loading a Hugging Face directory tensor by tensor, each straight into its place and sharding."""

import functools
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from fornax.checkpoint.safetensors_file import StoredTensor, find_tensors
from fornax.config.errors import CheckpointError, ConfigError
from fornax.config.suggest import first_few
from fornax.mesh import DEFAULT_RULES, Rules, named_sharding, parse_dtype, tree_shardings
from fornax.models.config import DecoderConfig
from fornax.models.create import abstract_decoder
from fornax.models.decoder import Decoder
from fornax.models.families import (
    config_from_hf,
    family_by_name,
    num_modules,
    unwrap_tensors,
)
from fornax.models.families.family import Family, TensorName
from fornax.models.layout import Block, TensorLayout, flat_variables, plan_copies, plan_layout

__all__ = [
    "StoredModel",
    "load_pretrained",
    "open_pretrained",
    "read_config",
    "stored_modules",
]


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


def stored_modules(path: str | Path) -> int:
    """How many modules that predict further tokens a Hugging Face directory holds.

    Raises:
      ConfigError, CheckpointError: for what cannot be read.
    """
    values = read_config(path)
    config = config_from_hf(values)
    mtp, count = family_by_name(str(config.family)).mtp, num_modules(values)
    if mtp is None or not count:
        return 0
    starts = mtp.starts(config.num_layers, count)
    names = unwrap_tensors(values, find_tensors(Path(path)))
    return count if any(name.startswith(starts) for name in names) else 0


def load_pretrained(
    path: str | Path,
    dtype: str | np.dtype | None = None,
    mesh: Mesh | None = None,
    rules: Rules = DEFAULT_RULES,
    *,
    compute_dtype: str | np.dtype | None = None,
    mtp: bool = False,
) -> Decoder:
    """A decoder with the weights of a Hugging Face directory.

    Names, shapes and sizes are checked before anything is allocated. Then one tensor at a time is
    cut, converted and written into its place, each device reading its own part only: peak memory is
    the model's plus one tensor.

    Args and errors are those of `open_pretrained`.
    """
    stored = open_pretrained(path, dtype, mesh, rules, compute_dtype=compute_dtype, mtp=mtp)
    stored.fill()
    return stored.model


def open_pretrained(
    path: str | Path,
    dtype: str | np.dtype | None = None,
    mesh: Mesh | None = None,
    rules: Rules = DEFAULT_RULES,
    *,
    compute_dtype: str | np.dtype | None = None,
    mtp: bool = False,
) -> "StoredModel":
    """The weights of a Hugging Face directory, checked and not yet read.

    Args:
      path: directory with config.json and safetensors files (one, or sharded with an index).
      dtype: parameter dtype, "float32" or "bfloat16"; None keeps the file's.
      mesh: where the parameters will live; None for the default device.
      rules: logical axes to mesh axes.
      compute_dtype: see `Decoder`.
      mtp: whether to read the modules that predict further tokens. They are no part of what most
        do with a model, take the memory of a layer each, and make nothing better where no loss
        trains them along: they are left out unless asked for.

    Raises:
      ConfigError: config.json asks for what is not supported, or the dtype must be chosen; modules
        are asked for and there are none.
      CheckpointError: missing, extra or misshapen tensors, by name; a damaged file; pickled
        weights.
      ShardingError: a parameter does not divide over the mesh.
    """
    folder = Path(path)
    values = read_config(folder)
    config = config_from_hf(values, mtp=mtp)
    stored = unwrap_tensors(values, find_tensors(folder))
    family = family_by_name(str(config.family))
    names = family.names
    if not mtp and family.mtp is not None:
        starts = family.mtp.starts(config.num_layers, num_modules(values))
        stored = {name: tensor for name, tensor in stored.items() if not name.startswith(starts)}
    stored = _without_unread_keys(stored, config, names)
    bias = names.get(_BIAS)
    dtype = _choose_dtype(dtype, stored, bias if isinstance(bias, str) else None)
    compute = None if compute_dtype is None else _as_dtype(compute_dtype)
    model = abstract_decoder(config, dtype=dtype, compute_dtype=compute)
    layout = _plan_layout(model, family, stored)
    if family.mtp is not None:
        stored = _without_copies(stored, plan_copies(layout, config, family.mtp), folder)
    stored = _without_known_extras(stored, layout, config.tie_embeddings, folder)
    _check(stored, layout, folder)
    if mesh is not None:
        tree_shardings(nnx.state(model), mesh, rules)  # whether all of it divides
    blocks: dict[str, dict[int | None, list[_Source]]] = {}
    for tensor in layout:
        for block in tensor.blocks:
            layers = blocks.setdefault(block.slot.path, {})
            layers.setdefault(block.slot.layer, []).append((stored[tensor.name], block))
    return StoredModel(model=model, dtype=dtype, mesh=mesh, rules=rules, blocks=blocks)


_Source = tuple[StoredTensor, Block]
_BIAS = "layers/experts/selection_bias"
"""What is float32 whatever the dtype of parameters; so is its like in modules."""


@dataclass(frozen=True, kw_only=True)
class StoredModel:
    """A model whose weights are read one parameter, and one layer, at a time."""

    model: Decoder
    """Abstract, until `fill`."""
    dtype: np.dtype
    """Of parameters."""
    mesh: Mesh | None
    rules: Rules
    blocks: Mapping[str, Mapping[int | None, list[_Source]]]
    """By path of a parameter and index in its stack (None where it has none): where its values
    are, those of experts in order."""

    def fill(self) -> None:
        """Read the parameters that are still abstract into the model."""
        variables = flat_variables(self.model)
        for path in self.blocks:
            if isinstance(variables[path].get_value(), jax.ShapeDtypeStruct):
                variables[path].set_value(self.read(path))

    def read(self, path: str) -> jax.Array:
        """One parameter, such as layers/attention/q/kernel."""
        (array,) = self._read(path, lambda part: (part,), self._place(self._axes(path)))
        return array

    def convert(
        self, path: str, function: Callable[[jax.Array], tuple[jax.Array, ...]]
    ) -> tuple[jax.Array, ...]:
        """What a function makes of a parameter, whose layers never exist together.

        Args:
          path: of the parameter.
          function: of the parameter, or of one layer of a stacked one, to new arrays.

        Returns:
          The function's arrays, those of layers stacked.
        """
        return self._read(path, function, None)

    def _read(
        self, path: str, function: Callable[[jax.Array], tuple[jax.Array, ...]], place: object
    ) -> tuple[jax.Array, ...]:
        layers, axes = self.blocks[path], self._axes(path)
        dtype = np.dtype(np.float32) if path.endswith("/experts/selection_bias") else self.dtype
        if None in layers:
            return function(_put(layers[None], self._place(axes), dtype))
        stacks: list[jax.Array] = []
        for layer, sources in layers.items():
            part = _put(sources, self._place(axes[1:]), dtype)
            made = function(part)
            stacks = stacks or [_zeros(len(layers), x, place or _stacked(x)) for x in made]
            for number, x in enumerate(made):
                write = _write_layer(stacks[number].sharding)
                stacks[number] = write(stacks[number], x, layer)
            for x in (part, *made):
                x.delete()
        return tuple(stacks)

    def _axes(self, path: str) -> tuple[str | None, ...]:
        return flat_variables(self.model)[path].get_metadata()["axes"]

    def _place(self, axes: tuple[str | None, ...]) -> NamedSharding | SingleDeviceSharding:
        if self.mesh is None:
            return SingleDeviceSharding(jax.devices()[0])
        return named_sharding(self.mesh, axes, self.rules)


def _as_dtype(dtype: str | np.dtype) -> np.dtype:
    return parse_dtype(dtype) if isinstance(dtype, str) else np.dtype(dtype)


def _choose_dtype(
    asked: str | np.dtype | None, stored: Mapping[str, StoredTensor], bias: str | None
) -> np.dtype:
    """The dtype of parameters; `bias` is the name of a tensor that is none."""
    allowed = (np.dtype(np.float32), np.dtype(jnp.bfloat16))
    if asked is not None:
        dtype = _as_dtype(asked)
        if dtype not in allowed:
            raise ConfigError(f"dtype={dtype.name} is not supported; use float32 or bfloat16")
        return dtype
    suffix = bias.split("{layer}")[-1] if bias else "\0"
    weights = [tensor for name, tensor in stored.items() if not name.endswith(suffix)]
    found = {tensor.dtype for tensor in weights}
    if len(found) == 1 and (only := found.pop()) in allowed:
        return only
    names = ", ".join(sorted(dtype.name for dtype in {t.dtype for t in weights}))
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


def _plan_layout(
    model: Decoder, family: Family, stored: Mapping[str, StoredTensor]
) -> list[TensorLayout]:
    """The tensors by the names that the file has: those of transformers, or of released files,
    where modules may have either."""

    def fits(layout: list[TensorLayout]) -> bool:
        return all(tensor.name in stored for tensor in layout)

    layout, released = plan_layout(model, family.names), family.released_names
    if released is None or fits(layout):
        return layout
    layout = plan_layout(model, released)
    modules = {path: name for path, name in family.names.items() if path.startswith("mtp/")}
    mixed = plan_layout(model, {**released, **modules})
    return mixed if fits(mixed) else layout


def _without_copies(
    stored: Mapping[str, StoredTensor], copies: Mapping[str, str], folder: Path
) -> dict[str, StoredTensor]:
    """Leave out what modules hold copies of, once they are seen to be copies."""
    for name, of in copies.items():
        if name in stored and of in stored and not _equal(stored[name], stored[of]):
            raise CheckpointError(
                f"{folder}: {name} differs from {of}, which the module that predicts further "
                "tokens shares with the model; load it without its modules, or copy the tensor"
            )
    return {name: tensor for name, tensor in stored.items() if name not in copies}


def _without_unread_keys(
    stored: Mapping[str, StoredTensor], config: DecoderConfig, names: Mapping[str, TensorName]
) -> dict[str, StoredTensor]:
    """Leave out what would make keys and values in layers that take another's."""
    layers = range(config.num_layers - config.shared_kv_layers, config.num_layers)
    unread = {
        str(names.get(f"layers/attention/{path}")).format(layer=layer)
        for path in ("k/kernel", "k/bias", "v/kernel", "v/bias", "k_norm/scale")
        for layer in layers
    }
    return {name: tensor for name, tensor in stored.items() if name not in unread}


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
        problems.append(f"missing {first_few(shapes)}")
    extra = [name for name in stored if name not in expected]
    if extra:
        problems.append(f"unexpected {first_few([f'{n} {list(stored[n].shape)}' for n in extra])}")
    misshapen = [
        f"{name} expected {list(shape)}, found {list(stored[name].shape)}"
        for name, shape in expected.items()
        if name in stored and stored[name].shape != shape
    ]
    if misshapen:
        problems.append(f"misshapen {first_few(misshapen)}")
    if problems:
        raise CheckpointError(
            f"{folder}: the tensors are not those that config.json describes: {'; '.join(problems)}"
        )


def _put(sources: list[_Source], place: Any, dtype: np.dtype) -> jax.Array:
    """One parameter, or one layer of it, on its devices: each part cut and converted once."""
    parts = [block.slot.from_stored(block.cut(stored.view())) for stored, block in sources]
    if sources[0][1].slot.expert is None:
        (ours,) = parts
        shape = ours.shape

        def cut(index: tuple[slice, ...] | None) -> np.ndarray:
            return np.array(ours[index if index is not None else ...], dtype, order="C")
    else:
        shape = (len(parts), *parts[0].shape)

        def cut(index: tuple[slice, ...] | None) -> np.ndarray:
            experts, *rest = index if index is not None else (slice(None), ...)
            return np.stack([part[tuple(rest)].astype(dtype) for part in parts[experts]])

    return jax.make_array_from_callback(shape, place, cut).block_until_ready()


def _stacked(layer: jax.Array) -> Any:
    """Where a stack of such arrays lies: its layers are not divided."""
    place = layer.sharding
    if not isinstance(place, NamedSharding):
        return place
    return NamedSharding(place.mesh, PartitionSpec(None, *place.spec))


def _zeros(layers: int, layer: jax.Array, place: object) -> jax.Array:
    shape = (layers, *layer.shape)
    return jax.jit(lambda: jnp.zeros(shape, layer.dtype), out_shardings=place)()


@functools.cache
def _write_layer(place: NamedSharding | SingleDeviceSharding) -> Any:
    """A compiled, in-place write of one layer into a stack."""

    def write(stack: jax.Array, part: jax.Array, layer: jax.Array) -> jax.Array:
        return jax.lax.dynamic_update_index_in_dim(stack, part, layer, 0)

    return jax.jit(write, donate_argnums=0, out_shardings=place)
