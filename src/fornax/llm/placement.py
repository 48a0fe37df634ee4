"""Where an engine's weights lie: packed on one CPU, divided over a mesh elsewhere."""

from dataclasses import dataclass

import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding

from fornax import kernels
from fornax.config.errors import ConfigError, EngineError
from fornax.llm.config import EngineConfig
from fornax.llm.devices import DeviceSpec, attached_devices
from fornax.mesh import DEFAULT_RULES, Rules, merge_rules
from fornax.models import DecoderConfig, check_model

__all__ = ["Placement", "place_weights"]


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


def place_weights(
    config: EngineConfig,
    model: DecoderConfig,
    dtype: jnp.dtype,
    target: DeviceSpec | None = None,
) -> Placement:
    """Where the weights of a model lie.

    Args:
      config: the engine's.
      model: the model's.
      dtype: of the weights before they are packed.
      target: the devices; None for this process's.

    Raises:
      ConfigError, EngineError: what the model or the devices do not take.
    """
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
    # Of few tokens one sum costs less time than a sum of parts and a gathering of them.
    whole: dict[str, tuple[str, ...]] = {"activation_embed": ()}
    if any(count % size for count in key_heads):
        whole |= {"kv_heads": (), "activation_kv_heads": ()}
    if model.vocab_size % size:
        whole |= {"vocab": (), "activation_vocab": ()}
    return merge_rules(DEFAULT_RULES, whole)
