"""The weights as the engine's step wants them: packed on one CPU, divided over a mesh elsewhere."""

import dataclasses
import functools
import math
from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding

from fornax import kernels
from fornax.config.errors import ConfigError, EngineError
from fornax.llm.config import EngineConfig
from fornax.llm.devices import DeviceSpec, attached_devices
from fornax.llm.lora import LoRAWeight
from fornax.mesh import DEFAULT_RULES, Rules, merge_rules, tree_shardings
from fornax.models import (
    Decoder,
    DecoderConfig,
    abstract_decoder,
    check_model,
    config_from_hf,
    load_pretrained,
    read_config,
)
from fornax.models.projection import Projection

__all__ = ["Placement", "Weights", "describe_weights", "load_weights", "local_bytes"]


ParamPath = tuple[Hashable, ...]
ParamsByPath = dict[ParamPath, Any]
"""Arrays by path."""


@dataclass(frozen=True)
class Placement:
    """Where and how weights lie."""

    mesh: Mesh | None
    rules: Rules
    precision: kernels.Precision | None
    """Precision of packed weights; None: plain arrays."""
    compute_dtype: jnp.dtype
    """Of activations."""
    single: Sharding | None = None
    """Without a mesh: where everything lies; None for JAX's default device."""

    @property
    def everywhere(self) -> Sharding | None:
        """Where arrays lie that are not divided; None for JAX's default device."""
        return self.single if self.mesh is None else NamedSharding(self.mesh, PartitionSpec())


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
          EngineError: names or shapes that are not the model's.
        """
        given = _of_served(self.config, _by_path(params))
        mine = nnx.to_flat_state(self.state)
        _check_same(self._shapes(mine), given)
        placed = []
        for path, variable in mine:
            value, now = _find(given, path), variable.get_value()
            if isinstance(now, kernels.PackedWeight):
                placed.append((path, variable.replace(_pack_like(now, value))))
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
        be laid out anew.
      target: the devices; None for this process's.

    Raises:
      CheckpointError, ConfigError: from loading.
      EngineError: a placement that this machine cannot have.
    """
    if isinstance(source, Decoder):
        model_config, model = _served(source.config, config), source
        stored = model.embed.embedding.get_value().dtype
        dtype = stored if config.dtype == "auto" else jnp.dtype(config.dtype)
        where = _place(config, model_config, dtype, target)
        return _lay_out(model_config, dtype, where, _by_path(model))
    model_config = _served(config_from_hf(read_config(source), mtp=config.mtp), config)
    asked = None if config.dtype == "auto" else config.dtype
    # Where weights lie depends on their dtype only through what is computed in.
    where = _place(config, model_config, jnp.dtype(asked or jnp.float32), target)
    model = load_pretrained(source, dtype=asked, mesh=where.mesh, rules=where.rules, mtp=config.mtp)
    dtype = model.embed.embedding.get_value().dtype
    return _lay_out(
        model_config, dtype, _place(config, model_config, dtype, target), _by_path(model)
    )


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
    model: DecoderConfig, config: EngineConfig, dtype: jnp.dtype, target: DeviceSpec
) -> Weights:
    """The weights an engine for `target` would have, as shapes: nothing is read or allocated.

    Args:
      dtype: that the weights are stored in, where the engine's config does not choose one.

    Raises:
      ConfigError, EngineError: a placement that the target cannot have.
    """
    dtype = jnp.dtype(dtype if config.dtype == "auto" else config.dtype)
    model = _served(model, config)
    with kernels.target_platform(target.platform):
        return _lay_out(model, dtype, _place(config, model, dtype, target), None)


def _place(
    config: EngineConfig,
    model: DecoderConfig,
    dtype: jnp.dtype,
    target: DeviceSpec | None = None,
) -> Placement:
    check_model(model, "serve adapters" if config.enable_lora else "serve")
    if config.speculative_config is not None:
        check_model(model, "speculation")
    target = target or attached_devices()
    size, platform = config.tensor_parallel_size, target.platform
    if config.quantization is not None and platform != "cpu":
        raise EngineError(
            f"quantization={config.quantization} runs on CPU only; leave it out on {platform}"
        )
    if config.quantization is not None:
        check_model(model, "serve quantized")
    if config.quantization is not None and target.elsewhere:
        raise EngineError(
            f"quantization={config.quantization} runs on JAX's first device; give no other devices"
        )
    compute = jnp.dtype(jnp.float32) if platform == "cpu" else dtype
    if size > 1 or target.elsewhere:
        if target.num_devices < size:
            has = "this engine has" if target.attached else "there are"
            raise EngineError(
                f"tensor_parallel_size={size} and {has} {target.num_devices} devices; give at "
                "most as many"
            )
        return Placement(target.mesh(size), _rules(model, size), None, compute)
    if platform != "cpu":
        return Placement(None, DEFAULT_RULES, None, compute, target.single)
    stored = "float32" if dtype == jnp.float32 else "bfloat16"
    precision: kernels.Precision = config.quantization or stored
    return Placement(None, DEFAULT_RULES, precision, compute, target.single)


def _rules(model: DecoderConfig, size: int) -> Rules:
    """Rules for dividing over `size` devices: what may not divide is kept whole on each."""
    widths = [("heads", model.num_heads)]
    if "mlp" in model.mlps:
        widths.append(("mlp width", model.intermediate_size))
    if model.experts is not None:
        widths.append(("width of an expert", model.experts.intermediate_size))
    if model.num_mtp_modules:
        widths.append(("width, twice over, that its module reads", 2 * model.hidden_size))
    if model.linear is not None:
        widths.append(("heads of linear layers", model.linear.sharded_heads))
    for name, count in widths:
        if count % size:
            raise ConfigError(
                f"tensor_parallel_size={size} does not divide the model's {name}, {count}; use a "
                "divisor of both"
            )
    key_heads = {model.kv_shape(kind)[0] for kind in model.layer_kinds()}
    for count in key_heads:
        if count % size and size % count:
            raise ConfigError(
                f"tensor_parallel_size={size} neither divides the model's {count} key/value "
                "heads nor is a multiple of them; use a size that is one of the two"
            )
    whole: dict[str, tuple[str, ...]] = {}
    if any(count % size for count in key_heads):
        whole |= {"kv_heads": (), "activation_kv_heads": ()}
    if model.vocab_size % size:
        whole |= {"vocab": (), "activation_vocab": ()}
    return merge_rules(DEFAULT_RULES, whole)


def _lay_out(
    config: DecoderConfig, dtype: jnp.dtype, where: Placement, given: ParamsByPath | None
) -> Weights:
    """Put the given arrays where they belong; None for shapes in their place."""
    packed = where.precision is not None
    if packed:
        kernels.build_native()  # all at once, rather than one after the other when they are needed
    untied = dataclasses.replace(config, tie_embeddings=False) if packed else config
    model = abstract_decoder(untied, dtype=dtype, compute_dtype=where.compute_dtype)
    graphdef, state = nnx.split(model)
    given = None if given is None else _of_served(config, given)
    shardings: ParamsByPath = {}
    if where.mesh is not None:
        shardings = _by_path(tree_shardings(state, where.mesh, where.rules))
    placed = []
    for path, variable in nnx.to_flat_state(state):
        place = shardings.get(path, where.single)
        if given is None:
            value = _describe(model, path, variable.get_value(), where, place)
        else:
            value = _find(given, path)
            if place is None and len(value.devices()) > 1:  # a trainer's, over its mesh
                value = jax.device_put(value, jax.local_devices()[0])
            if packed and _packs(model, path):
                value = _pack(model, path, value, where)
            else:
                value = jnp.asarray(value, variable.get_value().dtype)
                value = value if place is None else jax.device_put(value, place)
        placed.append((path, variable.replace(value)))
    return Weights(config, dtype, where, graphdef, nnx.from_flat_state(placed))


def _describe(
    model: Decoder, path: ParamPath, shape: Any, where: Placement, place: Sharding | None
) -> Any:
    """What `_lay_out` makes of an array of this shape and dtype."""
    if where.precision is not None and _packs(model, path):
        shape = jax.eval_shape(lambda value: _pack(model, path, value, where), shape)
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place), shape)


def _pack_like(now: kernels.PackedWeight, value: jax.Array) -> kernels.PackedWeight:
    """Other values of a packed weight, on the device where it lies."""
    (device,) = now.values.devices()
    return kernels.pack(
        jax.device_put(jnp.asarray(value, now.dtype), device),
        inputs=len(now.inputs),
        precision=now.precision,
        group=now.group,
        stacked=now.stacked,
        implementation=now.implementation,
    )


_copied = jax.jit(jnp.copy)


def _find(given: ParamsByPath, path: ParamPath) -> jax.Array:
    if path not in given and path[0] == "lm_head":  # packed apart from the table it equals
        return given["embed", "embedding"].T
    return given[path]


def _packs(model: Decoder, path: ParamPath) -> bool:
    """Whether it is the kernel of a projection.

    What latent attention reads as an array stays as it is (`models.latent`), and so does a single
    output, which would be packed as 32.
    """
    owner = functools.reduce(getattr, map(str, path[:-1]), model)
    is_kernel = isinstance(owner, Projection) and path[-1] == "kernel" and path[-2] != "kv_up"
    return is_kernel and owner.kernel.shape[-1] > 1


_STACKS_OF_EXPERTS = tuple((name, "kernel") for name in ("gate", "up", "down"))


def _in_place(path: ParamPath, value: Any) -> Any:
    """The experts' stack of a projection, or the norms' of scales, as what reads one layer of it;
    all else as it is."""
    if path[0] == "layers" and path[-1] == "scale" and str(path[-2]).endswith("norm"):
        return kernels.StackedScale(values=value)
    if path[:2] != ("layers", "experts") or path[2:] not in _STACKS_OF_EXPERTS:
        return value
    if isinstance(value, LoRAWeight):
        return dataclasses.replace(value, base=_in_place(path, value.base))
    return kernels.GroupedWeight(values=value)


_OF_OUTPUTS: dict[kernels.Precision, kernels.Precision] = {"int4": "int8", "mxfp4": "fp8"}
"""What the output projection has where the layers have 4 bits: its error is each logit's own."""


def _pack(
    model: Decoder, path: ParamPath, value: jax.Array, where: Placement
) -> kernels.PackedWeight:
    projection = functools.reduce(getattr, map(str, path[:-1]), model)
    assert isinstance(projection, Projection), f"{path} is not of a projection"
    precision = where.precision or "float32"
    if "router" in projection.kernel.get_metadata()["axes"]:
        precision = "float32"  # whatever its experts do
    elif path[0] == "lm_head":
        precision = _OF_OUTPUTS.get(precision, precision)
    return kernels.pack(
        jnp.asarray(value),
        inputs=projection.num_inputs,
        precision=precision,
        stacked=path[0] in ("layers", "mtp"),
    )


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
        if path[0] != "mtp" or count == len(value):
            found[path] = value
        elif count:
            found[path] = value[:count]
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
