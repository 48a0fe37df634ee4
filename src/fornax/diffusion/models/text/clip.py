"""CLIP's text encoder, with and without the projection of the pooled state, and layers of both.

Legend: B batch, S tokens, D model width, N heads, H head width.
"""

import functools
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from fornax import kernels
from fornax.config.errors import ConfigError
from fornax.diffusion.models.parts import MLP, Activation, Dense, Embedding, LayerNorm
from fornax.diffusion.models.text.stack import check_tokens, run_stack
from fornax.mesh import constrain
from fornax.models import stack_layers
from fornax.models.scope import scoped

__all__ = ["CLIPLayer", "CLIPTextConfig", "CLIPTextEncoder", "CLIPVisionConfig"]

_LARGEST = 2
"""The `eos_token_id` of files from before transformers' correction, in which it means that the
token of the largest id ends a text."""


@dataclass(frozen=True, kw_only=True)
class CLIPTextConfig:
    """What a text encoder of CLIP is (Radford et al. 2021); the defaults are those of ViT-L/14."""

    vocab_size: int = 49_408
    """Token ids."""
    hidden_size: int = 768
    """D."""
    intermediate_size: int = 3_072
    """Hidden width of the MLPs."""
    num_layers: int = 12
    """Layers."""
    num_heads: int = 12
    """N, a divisor of D."""
    max_positions: int = 77
    """Rows of the table of positions: the longest text, its two special tokens included."""
    activation: Activation = "gelu_sigmoid"
    """Of the MLPs: `gelu_sigmoid` in OpenAI's models, `gelu` in OpenCLIP's."""
    norm_eps: float = 1e-5
    """Added to variances."""
    projection_size: int = 768
    """Width of the projection, if there is one."""
    projects: bool = False
    """Whether the pooled state is projected, as in CLIPTextModelWithProjection."""
    eos_token_id: int = 49_407
    """The token whose state stands for the text. 2, as older files have it, means the token of the
    largest id."""

    def __post_init__(self) -> None:
        if self.num_heads < 1 or self.hidden_size % self.num_heads:
            raise ConfigError(
                f"hidden_size={self.hidden_size} does not divide into num_heads={self.num_heads}; "
                "use a divisor of it"
            )

    @property
    def class_name(self) -> str:
        """The class of transformers."""
        return "CLIPTextModelWithProjection" if self.projects else "CLIPTextModel"


@dataclass(frozen=True, kw_only=True)
class CLIPVisionConfig:
    """What an image encoder of CLIP is (Radford et al. 2021); the defaults are ViT-H/14's."""

    hidden_size: int = 1_280
    """D."""
    intermediate_size: int = 5_120
    """Hidden width of the MLPs."""
    num_layers: int = 32
    """Layers."""
    num_heads: int = 16
    """N, a divisor of D."""
    image_size: int = 224
    """Pixels of an image's side."""
    patch_size: int = 14
    """Pixels of a patch's side, a divisor of it."""
    activation: Activation = "gelu"
    """Of the MLPs: `gelu_sigmoid` in OpenAI's models, `gelu` in OpenCLIP's."""
    norm_eps: float = 1e-5
    """Added to variances."""
    projection_size: int = 1_024
    """Kept for files: nothing is projected."""

    def __post_init__(self) -> None:
        if self.num_heads < 1 or self.hidden_size % self.num_heads:
            raise ConfigError(
                f"hidden_size={self.hidden_size} does not divide into num_heads={self.num_heads}; "
                "use a divisor of it"
            )
        if self.patch_size < 1 or self.image_size % self.patch_size:
            raise ConfigError(
                f"image_size={self.image_size} does not divide into patches of "
                f"{self.patch_size} pixels; use a divisor of it"
            )

    @property
    def class_name(self) -> str:
        """The class of transformers."""
        return "CLIPVisionModel"


class _Attention(nnx.Module):
    """Attention with biases."""

    def __init__(
        self,
        config: CLIPTextConfig | CLIPVisionConfig,
        *,
        causal: bool,
        rngs: nnx.Rngs,
        dtype: DTypeLike,
        compute_dtype: DTypeLike,
    ):
        make = functools.partial(Dense, rngs=rngs, dtype=dtype, compute_dtype=compute_dtype)
        width = config.hidden_size // config.num_heads
        heads = {"heads": config.num_heads, "head_dim": width}
        self.q, self.k, self.v = (make(config.hidden_size, heads) for _ in range(3))
        self.o = make(heads, {"embed": config.hidden_size})
        self.scale, self.causal = width**-0.5, causal

    @scoped
    def __call__(self, x_BSD: jax.Array, mask_BS: jax.Array | None) -> jax.Array:
        q_BSNH, k_BSNH, v_BSNH = self.q(x_BSD), self.k(x_BSD), self.v(x_BSD)
        q_BSNH = constrain(q_BSNH, ("batch", "length", "activation_heads", None))
        # Padding is not seen, and sees the tokens before it.
        seen = None if mask_BS is None else jnp.ones_like(mask_BS)
        o_BSNH = kernels.attention(
            q_BSNH,
            k_BSNH,
            v_BSNH,
            scale=self.scale,
            causal=self.causal,
            segment_ids_q_BT=seen,
            segment_ids_k_BS=mask_BS,
        )
        return self.o(o_BSNH)


class CLIPLayer(nnx.Module):
    """Attention and an MLP, each behind its norm."""

    def __init__(
        self,
        config: CLIPTextConfig | CLIPVisionConfig,
        *,
        causal: bool,
        rngs: nnx.Rngs,
        dtype: DTypeLike,
        compute_dtype: DTypeLike,
    ):
        """Make the parts; `causal` says whether a token sees those before it alone."""
        norm = functools.partial(LayerNorm, config.hidden_size, eps=config.norm_eps, dtype=dtype)
        self.attention_norm, self.mlp_norm = norm(), norm()
        make = {"rngs": rngs, "dtype": dtype, "compute_dtype": compute_dtype}
        self.attention = _Attention(config, causal=causal, **make)
        self.mlp = MLP(
            config.hidden_size,
            config.intermediate_size,
            config.hidden_size,
            activation=config.activation,
            **make,
        )

    @scoped
    def __call__(self, x_BSD: jax.Array, mask_BS: jax.Array | None) -> jax.Array:
        """Run the layer -> [B, S, D]; tokens whose mask is 0 are not seen."""
        x_BSD = x_BSD + self.attention(self.attention_norm(x_BSD), mask_BS)
        x_BSD = x_BSD + self.mlp(self.mlp_norm(x_BSD))
        return constrain(x_BSD, ("batch", "length", "activation_embed"))


class CLIPTextEncoder(nnx.Module):
    """CLIP's text encoder (Radford et al. 2021), as transformers has it.

    Attributes:
      tokens: table [V, D].
      positions: table of learned positions.
      layers: all layers, their parameters with a leading "layers" axis.
      final_norm: the norm behind them.
      projection: [D, projection_size] without bias, or None.
    """

    def __init__(
        self,
        config: CLIPTextConfig,
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
          compute_dtype: of activations and products; None for that of the parameters.
        """
        compute = dtype if compute_dtype is None else compute_dtype
        make = {"dtype": dtype, "compute_dtype": compute}
        self.config = config
        self.tokens = Embedding(config.vocab_size, config.hidden_size, rngs=rngs, **make)
        self.positions = Embedding(config.max_positions, config.hidden_size, rngs=rngs, **make)
        self.layers = stack_layers(
            lambda own: CLIPLayer(config, causal=True, rngs=own, **make), config.num_layers, rngs
        )
        self.final_norm = LayerNorm(config.hidden_size, eps=config.norm_eps, dtype=dtype)
        self.projection = (
            Dense(config.hidden_size, config.projection_size, bias=False, rngs=rngs, **make)
            if config.projects
            else None
        )

    @scoped
    def __call__(
        self,
        tokens_BS: jax.Array,
        mask_BS: jax.Array | None = None,
        *,
        skip: int = 0,
        norm: bool = True,
    ) -> tuple[jax.Array, jax.Array]:
        """The states of a text and its pooled state.

        Args:
          tokens_BS: int32 token ids, with the start and end of text.
          mask_BS: int32, 0 for tokens that none sees; None where all are seen, as diffusion models
            have been trained.
          skip: how many of the last layers the states leave out: Stable Diffusion's clip skip.
          norm: whether the final norm is applied to the states. Stable Diffusion 1 and 2 do so
            whatever they skip; SDXL and 3 skip one layer and the norm.

        Returns:
          The states [B, S, D], and the pooled state: that of the end of text after all layers and
          the final norm, projected where the model projects, [B, D or projection_size].

        Raises:
          ConfigError: tokens of another shape, or more than there are positions; more layers
            skipped than there are.
        """
        config = self.config
        check_tokens(tokens_BS, mask_BS, config.max_positions)
        if not 0 <= skip <= config.num_layers:
            raise ConfigError(
                f"skip={skip} layers of {config.num_layers} cannot be left out; use 0 to "
                f"{config.num_layers}"
            )
        x_BSD = self.tokens(tokens_BS) + self.positions(jnp.arange(tokens_BS.shape[1]))
        x_BSD = constrain(x_BSD, ("batch", "length", "activation_embed"))
        x_BSD, kept_BSD = run_stack(
            self.layers,
            x_BSD,
            lambda layer, x_BSD: layer(x_BSD, mask_BS),
            keep=config.num_layers - skip,
        )
        last_BSD = self.final_norm(x_BSD)
        if norm:
            kept_BSD = last_BSD if skip == 0 else self.final_norm(kept_BSD)
        pooled_BD = jnp.take_along_axis(last_BSD, self._ends(tokens_BS)[:, None, None], axis=1)[
            :, 0
        ]
        return kept_BSD, pooled_BD if self.projection is None else self.projection(pooled_BD)

    def _ends(self, tokens_BS: jax.Array) -> jax.Array:
        """int32 [B]: where each text ends; 0 for one that has no end, as transformers has it."""
        eos = self.config.eos_token_id
        found_BS = tokens_BS if eos == _LARGEST else (tokens_BS == eos).astype(jnp.int32)
        return jnp.argmax(found_BS, axis=1)
