"""T5's encoder: T5, T5 1.1 and UMT5.

Legend: B batch, S tokens, T query tokens, D model width, N heads, H head width, R buckets of
relative positions.
"""

import functools
import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import DTypeLike

from fornax.config.errors import ConfigError
from fornax.diffusion.models.parts import MLP, Activation, Dense, Embedding, GatedMLP, RMSNorm
from fornax.diffusion.models.text.stack import check_tokens, run_stack
from fornax.mesh import constrain
from fornax.models import stack_layers
from fornax.models.scope import scoped

__all__ = ["T5Config", "T5Encoder", "relative_buckets"]


@dataclass(frozen=True, kw_only=True)
class T5Config:
    """What an encoder of T5 is (Raffel et al. 2020); the defaults are those of T5 1.1 XXL."""

    vocab_size: int = 32_128
    """Token ids."""
    hidden_size: int = 4_096
    """D."""
    head_dim: int = 64
    """H; the heads together may be wider or narrower than D."""
    intermediate_size: int = 10_240
    """Hidden width of the MLPs."""
    num_layers: int = 24
    """Layers."""
    num_heads: int = 64
    """N."""
    num_buckets: int = 32
    """R, half of them for keys behind the query: an even number, at least 4."""
    max_distance: int = 128
    """From this distance on, all keys of a side share a bucket; above R / 4."""
    activation: Activation = "gelu_tanh"
    """Of the MLPs."""
    gated: bool = True
    """Whether the MLPs are gated, as in T5 1.1 (Shazeer 2020)."""
    layer_biases: bool = False
    """Whether each layer has its own table of biases, as in UMT5 (Chung et al. 2023); otherwise all
    take that of the first."""
    norm_eps: float = 1e-6
    """Added to mean squares."""

    def __post_init__(self) -> None:
        if self.num_buckets < 4 or self.num_buckets % 2:
            raise ConfigError(
                f"num_buckets={self.num_buckets} must be even and at least 4: half of them are of "
                "keys behind the query, and half of those of single distances"
            )
        if self.max_distance <= self.num_buckets // 4:
            raise ConfigError(
                f"max_distance={self.max_distance} must be above num_buckets / 4 = "
                f"{self.num_buckets // 4}, the distances that have a bucket of their own"
            )

    @property
    def class_name(self) -> str:
        """The class of transformers."""
        return "UMT5EncoderModel" if self.layer_biases else "T5EncoderModel"


def relative_buckets(length: int, num_buckets: int, max_distance: int) -> np.ndarray:
    """Buckets of the positions of keys relative to queries (Raffel et al. 2020, section 2.1).

    Of the R / 2 buckets of each side one half is of single distances; the others grow with the
    logarithm of the distance up to `max_distance`. In float32, where boundaries lie between
    rounded numbers, as those that trained the models had them.

    Returns:
      int32 [T, S], both `length`, below `num_buckets`.
    """
    at = np.arange(length)
    ahead_TS = at[None, :] - at[:, None]
    side, distance_TS = num_buckets // 2, np.abs(ahead_TS)
    exact = side // 2
    far_TS = np.log(np.maximum(distance_TS, 1).astype(np.float32) / np.float32(exact))
    far_TS = far_TS / np.float32(math.log(max_distance / exact)) * np.float32(side - exact)
    far_TS = np.minimum(exact + far_TS.astype(np.int32), side - 1)
    bucket_TS = np.where(distance_TS < exact, distance_TS, far_TS)
    return (bucket_TS + side * (ahead_TS > 0)).astype(np.int32)


class _Attention(nnx.Module):
    """Attention among all tokens, with a bias for each relative position and no scale."""

    def __init__(
        self, config: T5Config, *, rngs: nnx.Rngs, dtype: DTypeLike, compute_dtype: DTypeLike
    ):
        make = functools.partial(
            Dense, bias=False, rngs=rngs, dtype=dtype, compute_dtype=compute_dtype
        )
        heads = {"heads": config.num_heads, "head_dim": config.head_dim}
        # Scores are not scaled: the initial queries are small instead.
        std = (config.hidden_size * config.head_dim) ** -0.5
        self.q = make(config.hidden_size, heads, std=std)
        self.k, self.v = make(config.hidden_size, heads), make(config.hidden_size, heads)
        self.o = make(heads, {"embed": config.hidden_size})
        if config.layer_biases:
            self.biases = _Biases(config, rngs=rngs, dtype=dtype)

    @scoped
    def __call__(
        self, x_BSD: jax.Array, bias_NTS: jax.Array, mask_BS: jax.Array | None
    ) -> jax.Array:
        q_BSNH, k_BSNH, v_BSNH = self.q(x_BSD), self.k(x_BSD), self.v(x_BSD)
        q_BSNH = constrain(q_BSNH, ("batch", "length", "activation_heads", None))
        with jax.named_scope("core_attention"):
            o_BSNH = jax.nn.dot_product_attention(
                q_BSNH,
                k_BSNH,
                v_BSNH,
                bias=bias_NTS[None],
                mask=None if mask_BS is None else mask_BS[:, None, None, :] != 0,
                scale=1.0,
            )
        return self.o(o_BSNH)


class _Biases(nnx.Module):
    """The bias of each head for each bucket of relative positions.

    Attributes:
      table: [R, N].
    """

    def __init__(self, config: T5Config, *, rngs: nnx.Rngs, dtype: DTypeLike):
        shape = (config.num_buckets, config.num_heads)
        drawn = config.hidden_size**-0.5 * jax.random.normal(rngs.params(), shape)
        self.table = nnx.Param(drawn.astype(dtype), axes=(None, "heads"))

    @scoped
    def __call__(self, buckets_TS: np.ndarray, dtype: DTypeLike) -> jax.Array:
        """Biases [N, T, S]."""
        return jnp.moveaxis(self.table[...].astype(dtype)[buckets_TS], -1, 0)


class _Layer(nnx.Module):
    """Attention and an MLP, each behind its norm."""

    def __init__(
        self, config: T5Config, *, rngs: nnx.Rngs, dtype: DTypeLike, compute_dtype: DTypeLike
    ):
        norm = functools.partial(RMSNorm, config.hidden_size, eps=config.norm_eps, dtype=dtype)
        self.attention_norm, self.mlp_norm = norm(), norm()
        make = {"rngs": rngs, "dtype": dtype, "compute_dtype": compute_dtype}
        self.attention = _Attention(config, **make)
        self.mlp = (GatedMLP if config.gated else MLP)(
            config.hidden_size,
            config.intermediate_size,
            config.hidden_size,
            activation=config.activation,
            bias=False,
            **make,
        )

    @scoped
    def __call__(
        self,
        x_BSD: jax.Array,
        buckets_TS: np.ndarray,
        bias_NTS: jax.Array | None,
        mask_BS: jax.Array | None,
    ) -> jax.Array:
        if bias_NTS is None:
            bias_NTS = self.attention.biases(buckets_TS, x_BSD.dtype)
        x_BSD = x_BSD + self.attention(self.attention_norm(x_BSD), bias_NTS, mask_BS)
        x_BSD = x_BSD + self.mlp(self.mlp_norm(x_BSD))
        return constrain(x_BSD, ("batch", "length", "activation_embed"))


class T5Encoder(nnx.Module):
    """T5's encoder (Raffel et al. 2020), as transformers has it.

    Attributes:
      tokens: table [V, D].
      biases: the biases of all layers; None where each has its own.
      layers: all layers, their parameters with a leading "layers" axis.
      final_norm: the norm behind them.
    """

    def __init__(
        self,
        config: T5Config,
        *,
        rngs: nnx.Rngs,
        dtype: DTypeLike = jnp.float32,
        compute_dtype: DTypeLike | None = None,
    ):
        """Make all parameters.

        Args:
          config: what the encoder is.
          rngs: source of randomness.
          dtype: of the parameters.
          compute_dtype: of activations and products; None for that of the parameters. Float16 is
            not for T5: its residual stream grows beyond the largest number.
        """
        compute = dtype if compute_dtype is None else compute_dtype
        make = {"dtype": dtype, "compute_dtype": compute}
        self.config = config
        self.tokens = Embedding(config.vocab_size, config.hidden_size, std=1.0, rngs=rngs, **make)
        self.biases = None if config.layer_biases else _Biases(config, rngs=rngs, dtype=dtype)
        self.layers = stack_layers(
            lambda own: _Layer(config, rngs=own, **make), config.num_layers, rngs
        )
        self.final_norm = RMSNorm(config.hidden_size, eps=config.norm_eps, dtype=dtype)

    @scoped
    def __call__(self, tokens_BS: jax.Array, mask_BS: jax.Array | None = None) -> jax.Array:
        """The final norm's output [B, S, D].

        Args:
          tokens_BS: int32 token ids, with the end of text.
          mask_BS: int32, 0 for padding, which no token sees; None where all are seen, as in SD3 and
            Flux.

        Raises:
          ConfigError: tokens of another shape.
        """
        config = self.config
        check_tokens(tokens_BS, mask_BS, None)
        buckets_TS = relative_buckets(tokens_BS.shape[1], config.num_buckets, config.max_distance)
        x_BSD = constrain(self.tokens(tokens_BS), ("batch", "length", "activation_embed"))
        bias_NTS = None if self.biases is None else self.biases(buckets_TS, x_BSD.dtype)
        x_BSD, _ = run_stack(
            self.layers,
            x_BSD,
            lambda layer, x_BSD: layer(x_BSD, buckets_TS, bias_NTS, mask_BS),
            keep=config.num_layers,
        )
        return self.final_norm(x_BSD)
