"""The modules of one decoder layer; `stack.py` stacks them and `scan.py` runs the stack.

Legend: B batch, T query tokens, S key/cache tokens, D model width, N query heads,
K key/value heads, H head width, F hidden width.
"""

import functools
import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jax.typing import DTypeLike

from fornax import kernels
from fornax.mesh import constrain
from fornax.models.attend import AttendOptions, LayerCache
from fornax.models.config import DecoderConfig, LayerKind
from fornax.models.rope import Rotation, apply_rope

__all__ = [
    "ACTIVATIONS",
    "MLP",
    "Attention",
    "AttentionContext",
    "DecoderLayer",
    "Embed",
    "Projection",
    "RMSNorm",
]


@dataclass(frozen=True)
class AttentionContext:
    """What all layers of one forward pass share."""

    positions_BT: jax.Array
    """int32 position of each query within its document."""
    segment_ids_BT: jax.Array | None
    """int32 document of each query, 0 for padding; None when all is one document."""
    rotations: dict[str, Rotation]
    """Cosines and sines by `LayerKind.rope`."""
    consecutive: bool = False
    """Whether positions count up by one with the index inside each document."""
    implementation: str | None = None
    """Attention implementation to force; None lets `kernels.attention` choose."""


def _truncated_normal(
    key: jax.Array, shape: tuple[int, ...], dtype: DTypeLike, std: float
) -> jax.Array:
    return (std * jax.random.truncated_normal(key, -3.0, 3.0, shape)).astype(dtype)


class Projection(nnx.Module):
    """A linear map between groups of axes: x[..., *inputs] -> y[..., *outputs].

    Attributes:
      kernel: [*inputs, *outputs].
      bias: [*outputs], or None.
    """

    def __init__(
        self,
        inputs: dict[str, int],
        outputs: dict[str, int],
        *,
        bias: bool,
        std: float,
        rngs: nnx.Rngs,
        dtype: DTypeLike,
        compute_dtype: DTypeLike,
    ):
        """Make the parameters.

        Args:
          inputs: logical axis to size of the axes summed over.
          outputs: logical axis to size of the axes produced.
          bias: whether a bias is added.
          std: standard deviation of the initial kernel.
          rngs: source of randomness.
          dtype: parameter dtype.
          compute_dtype: dtype of the product.
        """
        shape = (*inputs.values(), *outputs.values())
        axes = (*inputs, *outputs)
        self.num_inputs = len(inputs)
        self.compute_dtype = compute_dtype
        # Drawn as a matrix: the same values, and twice as fast to compile as three axes or four.
        matrix = (math.prod(inputs.values()), math.prod(outputs.values()))
        drawn = _truncated_normal(rngs.params(), matrix, dtype, std)
        self.kernel = nnx.Param(drawn.reshape(shape), axes=axes)
        zeros = jnp.zeros(tuple(outputs.values()), dtype)
        self.bias = nnx.Param(zeros, axes=tuple(outputs)) if bias else None

    def __call__(self, x: jax.Array) -> jax.Array:
        """Apply to the last axes of `x`; the result is in the compute dtype."""
        kernel = self.kernel.get_value()
        if isinstance(kernel, jax.Array):  # otherwise a weight that knows its own product
            kernel = kernel.astype(self.compute_dtype)
        y = kernels.linear(x.astype(self.compute_dtype), kernel, inputs=self.num_inputs)
        return self.add_bias(y)

    def add_bias(self, y: jax.Array) -> jax.Array:
        """Return y [..., *outputs] with the bias, if there is one."""
        return y if self.bias is None else y + self.bias[...].astype(self.compute_dtype)


def project(x: jax.Array, *modules: Projection) -> list[jax.Array]:
    """Apply projections that sum over the same axes of `x`; packed ones share a call.

    Whatever else stands in a projection's place is called as it is.
    """
    weights = [m.kernel.get_value() for m in modules if type(m) is Projection]
    packed = [weight for weight in weights if isinstance(weight, kernels.PackedWeight)]
    if len(packed) < len(modules):
        return [module(x) for module in modules]
    first = modules[0]
    found = kernels.linears(x.astype(first.compute_dtype), packed, inputs=first.num_inputs)
    return [module.add_bias(y) for module, y in zip(modules, found, strict=True)]


class RMSNorm(nnx.Module):
    """x / sqrt(mean(x^2) + eps) * scale, in float32 (Zhang and Sennrich 2019).

    Attributes:
      scale: the weight, of the normalised axes' shape.
    """

    def __init__(self, shape: tuple[int, ...], config: DecoderConfig, *, dtype: DTypeLike):
        """Make the scale: ones, or zeros where the norm multiplies by (1 + scale)."""
        initial = jnp.zeros if config.norm_unit_offset else jnp.ones
        self.eps = config.norm_eps
        self.unit_offset = config.norm_unit_offset
        self.scale = nnx.Param(initial(shape, dtype), axes=("norm",) * len(shape))

    def __call__(self, x: jax.Array) -> jax.Array:
        """Normalise the last axes of `x`; the result has the dtype of `x`."""
        scale = self.scale[...].astype(jnp.float32)
        if self.unit_offset:
            scale = scale + 1.0
        return kernels.rms_norm(x, scale, eps=self.eps)


class Embed(nnx.Module):
    """The table of token embeddings.

    Attributes:
      embedding: [V, D].
    """

    def __init__(
        self, config: DecoderConfig, *, rngs: nnx.Rngs, dtype: DTypeLike, compute_dtype: DTypeLike
    ):
        """Make the table."""
        shape = (config.vocab_size, config.hidden_size)
        table = _truncated_normal(rngs.params(), shape, dtype, config.initializer_range)
        self.embedding = nnx.Param(table, axes=("vocab", "embed"))
        self.scale = config.embedding_scale
        self.compute_dtype = compute_dtype

    def __call__(self, tokens_BT: jax.Array) -> jax.Array:
        """Look up tokens -> x [B, T, D] in the compute dtype."""
        x_BTD = _lookup(self.embedding[...], tokens_BT).astype(self.compute_dtype)
        if self.scale != 1.0:
            x_BTD = x_BTD * jnp.asarray(self.scale, self.compute_dtype)
        return x_BTD


@jax.custom_jvp
def _lookup(table_VD: jax.Array, tokens_BT: jax.Array) -> jax.Array:
    return jnp.take(table_VD, tokens_BT, axis=0)


@_lookup.defjvp
def _lookup_jvp(primals: tuple, tangents: tuple) -> tuple[jax.Array, jax.Array]:
    """The gradient of a token is summed over its occurrences in float32: a bfloat16 sum of
    ones ends at 256."""
    table_VD, tokens_BT = primals
    wide_VD = tangents[0].astype(jnp.promote_types(table_VD.dtype, jnp.float32))
    tangent = jnp.take(wide_VD, tokens_BT, axis=0).astype(table_VD.dtype)
    return _lookup(table_VD, tokens_BT), tangent


class Attention(nnx.Module):
    """Grouped-query attention with the options of `DecoderConfig`."""

    def __init__(
        self, config: DecoderConfig, *, rngs: nnx.Rngs, dtype: DTypeLike, compute_dtype: DTypeLike
    ):
        """Make the projections and the norms of queries and keys."""
        N, K, H = config.num_heads, config.kv_heads, config.head_width
        make = functools.partial(Projection, rngs=rngs, dtype=dtype, compute_dtype=compute_dtype)
        embed = {"embed": config.hidden_size}
        into = functools.partial(make, embed, bias=config.qkv_bias, std=config.initializer_range)
        self.q = into({"heads": N, "head_dim": H})
        self.k = into({"kv_heads": K, "head_dim": H})
        self.v = into({"kv_heads": K, "head_dim": H})
        self.o = make(
            {"heads": N, "head_dim": H},
            embed,
            bias=config.attention_output_bias,
            std=residual_std(config),
        )
        self.q_norm = _qk_norm(config, N, dtype)
        self.k_norm = _qk_norm(config, K, dtype)
        self.scale = config.attention_scale
        self.softcap = config.attention_logit_softcap

    def __call__(
        self,
        x_BTD: jax.Array,
        kind: LayerKind,
        context: AttentionContext,
        cache: LayerCache | None = None,
    ) -> tuple[jax.Array, LayerCache | None]:
        """Attend; returns y [B, T, D] and the cache layer with this pass's keys and values."""
        q_BTNH, k_BTKH, v_BTKH = project(x_BTD, self.q, self.k, self.v)
        if self.q_norm is not None and self.k_norm is not None:
            q_BTNH, k_BTKH = self.q_norm(q_BTNH), self.k_norm(k_BTKH)
        if kind.rope != "none":
            rotation = context.rotations[kind.rope]
            q_BTNH, k_BTKH = apply_rope(q_BTNH, rotation), apply_rope(k_BTKH, rotation)
        q_BTNH = constrain(q_BTNH, ("batch", "length", "activation_heads", None))
        if cache is not None:
            options = AttendOptions(scale=self.scale, window=kind.window, softcap=self.softcap)
            o_BTNH, cache = cache.attend(q_BTNH, k_BTKH, v_BTKH, options)
            return self.o(o_BTNH), cache
        q_BTNH = checkpoint_name(q_BTNH, "query")
        k_BTKH = checkpoint_name(k_BTKH, "key")
        v_BTKH = checkpoint_name(v_BTKH, "value")
        o_BTNH = kernels.attention(
            q_BTNH,
            k_BTKH,
            v_BTKH,
            scale=self.scale,
            causal=True,
            positions_q_BT=context.positions_BT,
            positions_k_BS=context.positions_BT,
            consecutive=context.consecutive,
            segment_ids_q_BT=context.segment_ids_BT,
            segment_ids_k_BS=context.segment_ids_BT,
            window=kind.window,
            softcap=self.softcap,
            implementation=context.implementation,
        )
        return checkpoint_name(self.o(o_BTNH), "attention_out"), None


def _qk_norm(config: DecoderConfig, heads: int, dtype: DTypeLike) -> RMSNorm | None:
    if config.qk_norm == "none":
        return None
    over = (config.head_width,) if config.qk_norm == "head" else (heads, config.head_width)
    return RMSNorm(over, config, dtype=dtype)


class MLP(nnx.Module):
    """The gated MLP: down(activation(gate(x)) * up(x)) (Shazeer 2020)."""

    def __init__(
        self, config: DecoderConfig, *, rngs: nnx.Rngs, dtype: DTypeLike, compute_dtype: DTypeLike
    ):
        """Make the three projections."""
        make = functools.partial(
            Projection,
            bias=config.mlp_bias,
            rngs=rngs,
            dtype=dtype,
            compute_dtype=compute_dtype,
        )
        embed, mlp = {"embed": config.hidden_size}, {"mlp": config.intermediate_size}
        self.gate = make(embed, mlp, std=config.initializer_range)
        self.up = make(embed, mlp, std=config.initializer_range)
        self.down = make(mlp, embed, std=residual_std(config))
        self.activation = config.activation

    def __call__(self, x_BTD: jax.Array) -> jax.Array:
        """Apply -> y [B, T, D]."""
        gate_BTF, up_BTF = project(x_BTD, self.gate, self.up)
        gate_BTF = checkpoint_name(gate_BTF, "mlp_gate")
        up_BTF = checkpoint_name(up_BTF, "mlp_up")
        h_BTF = ACTIVATIONS[self.activation](gate_BTF) * up_BTF
        y_BTD = self.down(constrain(h_BTF, ("batch", "length", "activation_mlp")))
        return checkpoint_name(y_BTD, "mlp_down")


ACTIVATIONS = {
    "silu": jax.nn.silu,
    "gelu_tanh": functools.partial(jax.nn.gelu, approximate=True),
}
"""The activation of an MLP's gate, by its name in `DecoderConfig`."""


class DecoderLayer(nnx.Module):
    """Attention and MLP, each inside a residual branch with its norms."""

    def __init__(
        self, config: DecoderConfig, *, rngs: nnx.Rngs, dtype: DTypeLike, compute_dtype: DTypeLike
    ):
        """Make the branches; norms that the placement does not use are None."""
        make = {"rngs": rngs, "dtype": dtype, "compute_dtype": compute_dtype}
        before = config.norm_placement in ("pre", "sandwich")
        after = config.norm_placement in ("post", "sandwich")

        def norm(wanted: bool) -> RMSNorm | None:
            return RMSNorm((config.hidden_size,), config, dtype=dtype) if wanted else None

        self.attention_norm = norm(before)
        self.attention = Attention(config, **make)
        self.post_attention_norm = norm(after)
        self.mlp_norm = norm(before)
        self.mlp = MLP(config, **make)
        self.post_mlp_norm = norm(after)

    def __call__(
        self,
        x_BTD: jax.Array,
        kind: LayerKind,
        context: AttentionContext,
        cache: LayerCache | None = None,
    ) -> tuple[jax.Array, LayerCache | None]:
        """Run the layer; returns x [B, T, D] and the updated cache layer."""
        x_BTD = checkpoint_name(x_BTD, "layer_input")
        branch, cache = self.attention(_maybe(self.attention_norm, x_BTD), kind, context, cache)
        x_BTD = x_BTD + _maybe(self.post_attention_norm, branch)
        branch = self.mlp(_maybe(self.mlp_norm, x_BTD))
        x_BTD = x_BTD + _maybe(self.post_mlp_norm, branch)
        return constrain(x_BTD, ("batch", "length", "activation_embed")), cache


def _maybe(norm: RMSNorm | None, x: jax.Array) -> jax.Array:
    return x if norm is None else norm(x)


def residual_std(config: DecoderConfig) -> float:
    """Initial deviation of projections into the residual stream (GPT-2, section 2.3)."""
    shrink = math.sqrt(2 * config.num_layers) if config.scale_residual_init else 1.0
    return config.initializer_range / shrink
