"""The weights as the engine's step takes them: packed on one CPU, divided over a mesh elsewhere."""

import dataclasses
import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from fornax import kernels
from fornax.config.errors import ConfigError, EngineError
from fornax.llm.config import EngineConfig
from fornax.llm.devices import DeviceSpec
from fornax.llm.lora import LoRAWeight
from fornax.llm.packing import (
    ParamPath,
    describe_weight,
    first_layers,
    is_packed,
    pack_layers,
    pack_like,
    pack_stored,
    pack_weight,
)
from fornax.llm.placement import Placement, place_weights
from fornax.mesh import tree_shardings
from fornax.models import (
    CodeFormat,
    Decoder,
    DecoderConfig,
    StoredModel,
    abstract_decoder,
    config_from_hf,
    open_pretrained,
    read_config,
    takes,
)

__all__ = ["Weights", "describe_weights", "load_weights", "local_bytes"]

_log = logging.getLogger("fornax.llm")

ParamsByPath = dict[ParamPath, Any]
"""Arrays by path."""
CodeFormats = Mapping[str, CodeFormat | str]
"""What quantized files hold; see `StoredModel.code_formats`."""
_FLOATS: CodeFormats = MappingProxyType({})


@dataclass(frozen=True)
class Weights:
    """A model taken apart for compiled steps."""

    config: DecoderConfig
    dtype: jnp.dtype
    """Of the weights before they are packed."""
    placement: Placement
    graphdef: nnx.GraphDef[Decoder]
    state: nnx.State

    def merge(self, state: nnx.State) -> Decoder:
        """The module with the parameters of `state`, for use inside a compiled function.

        Where weights are packed, matrices of experts and scales of norms are read where they lie in
        the stack of their layers.
        """
        if self.placement.precision is not None:
            placed = [
                (path, variable.replace(_in_place(path, variable.get_value())))
                for path, variable in nnx.to_flat_state(state)
            ]
            state = nnx.from_flat_state(placed)
        return nnx.merge(self.graphdef, state)

    @property
    def nbytes(self) -> int:
        """Bytes on one device."""
        return local_bytes(self.state)

    def adopt(self, params: object, *, copy: bool = False) -> "Weights":
        """Other parameters of the same model.

        Arrays whose dtype and sharding agree are taken as they are, without a copy, unless weights
        are packed (on one CPU).

        Args:
          params: a `Decoder`, its `nnx.State`, or the nested mapping of its arrays; all of them.
          copy: whether to copy those arrays too, so that the caller may give them up.

        Raises:
          EngineError: names or shapes that are not the model's; weights in blocks of a GGUF file.
        """
        given = _of_served(self.config, _by_path(params))
        mine = nnx.to_flat_state(self.state)
        _check_same(self._shapes(mine), given)
        placed = []
        for path, variable in mine:
            value, now = _find(given, path), variable.get_value()
            if isinstance(now, kernels.PackedWeight):
                placed.append((path, variable.replace(pack_like(now, value))))
                continue
            new = jax.device_put(jnp.asarray(value, now.dtype), now.sharding)
            placed.append((path, variable.replace(_copied(new) if copy else new)))
        return dataclasses.replace(self, state=nnx.from_flat_state(placed))

    def _shapes(self, mine: Any) -> dict[ParamPath, tuple[int, ...]]:
        """Path to shape of the parameters as the model itself has them."""
        shapes = {path: tuple(variable.get_value().shape) for path, variable in mine}
        if self.config.tie_embeddings:
            shapes = {path: shape for path, shape in shapes.items() if path[0] != "lm_head"}
        return shapes


def load_weights(
    source: Path | str | Decoder, config: EngineConfig, target: DeviceSpec | None = None
) -> Weights:
    """Load a model's weights, or take over those of a model in memory.

    Args:
      source: a Hugging Face directory, or a decoder, whose arrays are shared where they need not
        be laid out again.
      target: the devices; None for this process's.

    Raises:
      CheckpointError, ConfigError: from loading.
      EngineError: a placement that this machine cannot have.
    """
    if isinstance(source, Decoder):
        model_config, model = _served(source.config, config), source
        stored = model.embed.embedding.get_value().dtype
        dtype = stored if config.dtype == "auto" else jnp.dtype(config.dtype)
        where = place_weights(config, model_config, dtype, target)
        return _lay_out(model_config, dtype, where, _by_path(model))
    model_config = _served(config_from_hf(read_config(source), mtp=config.mtp), config)
    asked = None if config.dtype == "auto" else config.dtype
    # Where weights lie depends on their dtype only through what is computed in.
    where = place_weights(config, model_config, jnp.dtype(asked or jnp.float32), target)
    stored = open_pretrained(
        source, dtype=asked, mesh=where.mesh, rules=where.rules, mtp=config.mtp
    )
    where = place_weights(config, model_config, jnp.dtype(stored.dtype), target)
    formats = _as_served(stored.code_formats(), model_config, config, where)
    weights = _lay_out(model_config, jnp.dtype(stored.dtype), where, stored, formats)
    if formats:
        _log.info("quantized weights of %s: %s", source, _summary(weights, formats))
    return weights


def _served(model: DecoderConfig, config: EngineConfig) -> DecoderConfig:
    """What is served of a model: of its modules that predict further tokens the first, which
    drafts, or none.

    Raises:
      ConfigError: it has none to draft.
    """
    if config.mtp and not model.num_mtp_modules:
        raise ConfigError(
            "speculative_config.type=mtp and the model has no modules that predict further tokens; "
            "train some (model.num_mtp_modules), or use ngram or draft_model"
        )
    return dataclasses.replace(model, num_mtp_modules=int(config.mtp))


def describe_weights(
    model: DecoderConfig,
    config: EngineConfig,
    dtype: jnp.dtype,
    target: DeviceSpec,
    formats: CodeFormats = _FLOATS,
) -> Weights:
    """The weights an engine for `target` would have, as shapes: nothing is read or allocated.

    Args:
      dtype: that the weights are stored in, where the engine's config does not choose one.
      formats: the `StoredModel.code_formats` of its files, where they are quantized.

    Raises:
      ConfigError, EngineError: a placement that the target cannot have.
    """
    dtype = jnp.dtype(dtype if config.dtype == "auto" else config.dtype)
    model = _served(model, config)
    with kernels.target_platform(target.platform):
        where = place_weights(config, model, dtype, target)
        return _lay_out(model, dtype, where, None, _as_served(formats, model, config, where))


def _as_served(
    formats: CodeFormats, model: DecoderConfig, config: EngineConfig, where: Placement
) -> CodeFormats:
    """The formats, or why this engine dequantizes them all."""
    reason = None
    if where.precision is None:
        reason = "packed weights run on one CPU device"
    elif config.quantization is not None:
        reason = f"to be rounded again to {config.quantization}"
    elif not takes(model, "serve quantized"):
        reason = "this kind of model is served in floats"
    if reason is not None:
        return dict.fromkeys(formats, reason)
    blocks = [path for path, form in formats.items() if isinstance(form, CodeFormat) and form.kinds]
    missing = kernels.blocks_unavailable() if blocks else None
    return formats if missing is None else {**formats, **dict.fromkeys(blocks, missing)}


def _summary(weights: Weights, formats: CodeFormats) -> str:
    """Which weights are packed as what, and which are dequantized for what reason."""
    held = {"/".join(map(str, path)): x.get_value() for path, x in nnx.to_flat_state(weights.state)}
    said: dict[str, list[str]] = {}
    for path, form in formats.items():
        if isinstance(form, str):
            text = f"dequantized, {form}"
        elif isinstance(held.get(path), kernels.PackedWeight) and held[path].precision == form[0]:
            text = f"{form} as stored"
        else:
            text = "dequantized, its product reads an array"
        said.setdefault(text, []).append(path.removesuffix("/kernel"))
    return "; ".join(f"{', '.join(paths)}: {text}" for text, paths in said.items())


def _lay_out(
    config: DecoderConfig,
    dtype: jnp.dtype,
    where: Placement,
    given: ParamsByPath | StoredModel | None,
    formats: CodeFormats = _FLOATS,
) -> Weights:
    """Put the given arrays, or codes of these formats, where they belong; None for shapes."""
    packed = where.precision is not None
    if packed:
        kernels.build_native()  # all at once, rather than one after the other when they are needed
    untied = dataclasses.replace(config, tie_embeddings=False) if packed else config
    model = abstract_decoder(untied, dtype=dtype, compute_dtype=where.compute_dtype)
    graphdef, state = nnx.split(model)
    shardings: ParamsByPath = {}
    if where.mesh is not None:
        shardings = _by_path(tree_shardings(state, where.mesh, where.rules))
    placed = []
    for path, variable in nnx.to_flat_state(state):
        like, place = variable.get_value(), shardings.get(path, where.single)
        name = "/".join(map(str, path))
        form = formats.get(name)
        form = form if isinstance(form, CodeFormat) else None
        form = form if is_packed(model, path, where, form) else None
        if given is None:
            value = describe_weight(model, path, like, where, place, form)
        elif form is not None:
            assert isinstance(given, StoredModel), "only files hold codes"
            value = pack_stored(model, path, like, where, form, given)
        elif (
            isinstance(given, StoredModel)
            and path[0] in ("layers", "mtp")
            and is_packed(model, path, where)
        ):
            value = pack_layers(model, path, like, where, given)
        else:
            value = _find(given, path)
            if path[0] == "mtp":
                value = first_layers(value, like.shape[0])
            if place is None and len(value.devices()) > 1:  # a trainer's, over its mesh
                value = jax.device_put(value, jax.local_devices()[0])
            if is_packed(model, path, where):
                value = pack_weight(model, path, value, where)
            else:
                value = jnp.asarray(value, like.dtype)
                value = value if place is None else jax.device_put(value, place)
        placed.append((path, variable.replace(value)))
    return Weights(config, dtype, where, graphdef, nnx.from_flat_state(placed))


_copied = jax.jit(jnp.copy)


def _find(given: ParamsByPath | StoredModel, path: ParamPath) -> jax.Array:
    if isinstance(given, StoredModel):
        name = "/".join(map(str, path))
        return given.read(name) if name in given.blocks else given.read("embed/embedding").T
    if path not in given and path[0] == "lm_head":  # packed apart from the table it equals
        return given["embed", "embedding"].T
    return given[path]


_STACKS_OF_EXPERTS = tuple((name, "kernel") for name in ("gate", "up", "down"))


def _in_place(path: ParamPath, value: Any) -> Any:
    """The experts' stack of a projection, or the norms' of scales, as what reads one layer of it;
    all else as it is."""
    if path[0] == "layers" and path[-1] == "scale" and str(path[-2]).endswith("norm"):
        return kernels.StackedScale(values=value)
    if path[:2] != ("layers", "experts") or path[2:] not in _STACKS_OF_EXPERTS:
        return value
    if isinstance(value, kernels.PackedWeight):
        return value
    if isinstance(value, LoRAWeight):
        return dataclasses.replace(value, base=_in_place(path, value.base))
    return kernels.GroupedWeight(values=value)


def local_bytes(tree: object) -> int:
    """Bytes of arrays, or of their shapes, on one device, unpadded."""
    total = 0
    for leaf in jax.tree.leaves(tree):
        shape = leaf.shape if leaf.sharding is None else leaf.sharding.shard_shape(leaf.shape)
        total += math.prod(shape) * leaf.dtype.itemsize
    return total


def _of_served(model: DecoderConfig, given: ParamsByPath) -> ParamsByPath:
    """The arrays without those of modules that are not served; see `_served`."""
    count = model.num_mtp_modules
    found: ParamsByPath = {}
    for path, value in given.items():
        if path[0] != "mtp":
            found[path] = value
        elif count:
            found[path] = first_layers(value, count)
    return found


def _by_path(params: object) -> ParamsByPath:
    """Path to array of a module, a state, or a nested mapping of arrays."""
    if isinstance(params, nnx.Module):
        params = nnx.state(params)
    if isinstance(params, nnx.State):
        return {path: leaf.get_value() for path, leaf in nnx.to_flat_state(params)}
    if not isinstance(params, Mapping):
        raise EngineError(
            f"weights of type {type(params).__name__} are not known; give a Decoder, its "
            "nnx.State, or nested mappings of its arrays"
        )
    found: ParamsByPath = {}
    for key, value in params.items():
        inner = _by_path(value) if isinstance(value, Mapping) else {(): value}
        found |= {(key, *path): leaf for path, leaf in inner.items()}
    return found


def _check_same(wanted: Mapping[ParamPath, tuple[int, ...]], given: ParamsByPath) -> None:
    """Raise EngineError unless the names and shapes are those wanted."""
    names = {path: "/".join(map(str, path)) for path in wanted.keys() | given.keys()}
    problems = [f"missing {names[path]}" for path in wanted.keys() - given.keys()]
    problems += [f"unknown {names[path]}" for path in given.keys() - wanted.keys()]
    problems += [
        f"{names[path]} has shape {tuple(given[path].shape)}, not {wanted[path]}"
        for path in wanted.keys() & given.keys()
        if tuple(given[path].shape) != wanted[path]
    ]
    if problems:
        raise EngineError(
            f"the weights are not this model's: {'; '.join(sorted(problems)[:5])}; give all "
            "parameters under the model's own names"
        )
