"""Gated DeltaNet: linear attention with a state of a fixed size, in the place of attention.

Without a cache all tokens go at once, in chunks; a document is a run of equal segment ids and
starts anew. A cache keeps each row's state after its last token (padding leaves it as it is): a
document goes on where it was, until another one begins in its row. Beside pages the states of the
sequences of a ragged batch lie in slots.

Legend: B batch, T tokens, D model width, K key heads, R value heads of a key head, H key width,
V value width, W width of the convolutions, X channels of a key head.
"""

import functools
import math
from dataclasses import replace

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jax.typing import DTypeLike

from fornax import kernels
from fornax.mesh import constrain
from fornax.models.attend import LayerCache, Place
from fornax.models.cache import Cache, DeltaState
from fornax.models.config import DecoderConfig, LayerKind
from fornax.models.context import LayerContext
from fornax.models.mlp import ACTIVATIONS
from fornax.models.norm import RMSNorm
from fornax.models.paged_cache import PagedCache
from fornax.models.projection import Projection, draw, project, residual_std

__all__ = ["GatedDeltaNet", "ShortConvolution"]

_EPS = 1e-6
"""Added to the squared length of queries and keys."""


class ShortConvolution(nnx.Module):
    """A causal convolution of each channel over time, then the model's activation.

    Attributes:
      kernel: [K, X, W], the oldest token's weight first.
    """

    def __init__(
        self, heads: int, channels: int, config: DecoderConfig, *, rngs: nnx.Rngs, dtype: DTypeLike
    ):
        """Draw the kernel, with the deviation of PyTorch's convolutions; `channels` is X."""
        assert config.gated_delta is not None
        width = config.gated_delta.conv_width
        drawn = draw(rngs.params(), (heads, channels, width), dtype, (3 * width) ** -0.5)
        self.kernel = nnx.Param(drawn, axes=("heads", "head_dim", "conv"))
        self.activation = config.activation

    def __call__(
        self, x_BTKX: jax.Array, run_BT: jax.Array, before_BWKX: jax.Array | None
    ) -> jax.Array:
        """Apply -> y [B, T, K, X].

        Args:
          x_BTKX: the channels.
          run_BT: int32 number of each token's document in its row; a token sees its own. 0 is the
            one that `before_BWKX` is of.
          before_BWKX: the W - 1 tokens before; None for nothing.
        """
        length, width = x_BTKX.shape[1], self.kernel[...].shape[2]
        whole = _preceded(x_BTKX, before_BWKX, width)
        runs = jnp.pad(run_BT, ((0, 0), (width - 1, 0)))
        taps = []
        for place in range(width):
            seen_BT = runs[:, place : place + length] == run_BT
            there_BTKX = whole[:, place : place + length]
            taps.append(jnp.where(seen_BT[:, :, None, None], there_BTKX, 0))
        return self.weigh(tuple(taps))

    def weigh(self, taps: tuple[jax.Array, ...]) -> jax.Array:
        """Apply to what each place sees: W arrays [..., K, X], the oldest tokens' first."""
        kernel_KXW = self.kernel[...].astype(jnp.float32)
        y = jnp.zeros(taps[0].shape, jnp.float32)
        for place, there in enumerate(taps):
            y = y + there.astype(jnp.float32) * kernel_KXW[:, :, place]
        return ACTIVATIONS[self.activation](y).astype(taps[0].dtype)


def _preceded(x_BTKX: jax.Array, before_BWKX: jax.Array | None, width: int) -> jax.Array:
    """The channels [B, W - 1 + T, K, X] with those of the tokens before."""
    if before_BWKX is None:
        return jnp.pad(x_BTKX, ((0, 0), (width - 1, 0), (0, 0), (0, 0)))
    return jnp.concatenate([before_BWKX.astype(x_BTKX.dtype), x_BTKX], axis=1)


class GatedDeltaNet(nnx.Module):
    """Gated DeltaNet with the options of `GatedDeltaConfig`, as Qwen3-Next has it.

    Attributes:
      q: queries.
      k: keys.
      v: values, those of a key head's R heads one behind the other; so are the next one's.
      gate: what multiplies the normalised result, through silu.
      beta: how far a token corrects the state, through a sigmoid.
      decay: how much of the state it lets go, through a softplus, biased.
      q_conv: convolution of the queries.
      k_conv: of the keys.
      v_conv: of the values.
      decay_bias: [K, R].
      log_rate: [K, R], the logarithm of what the softplus is multiplied by.
      norm: over each value head.
      o: the output projection.
    """

    def __init__(
        self, config: DecoderConfig, *, rngs: nnx.Rngs, dtype: DTypeLike, compute_dtype: DTypeLike
    ):
        """Make the parameters; decays are drawn as Mamba-2's are (Dao and Gu 2024).

        Raises:
          ValueError: when the config has no gated DeltaNet.
        """
        delta = config.gated_delta
        if delta is None:
            raise ValueError("the config has no gated DeltaNet")
        K, R = delta.num_key_heads, delta.heads_per_key
        widths = {"q": delta.key_dim, "k": delta.key_dim, "v": R * delta.value_dim}
        self.config = delta
        self.compute_dtype = compute_dtype
        make = functools.partial(
            Projection, bias=False, rngs=rngs, dtype=dtype, compute_dtype=compute_dtype
        )
        embed = {"embed": config.hidden_size}

        def into(width: int) -> Projection:
            return make(embed, {"heads": K, "head_dim": width}, std=config.initializer_range)

        self.q, self.k, self.v = (into(widths[name]) for name in "qkv")
        self.gate = into(widths["v"])
        self.beta, self.decay = into(R), into(R)
        conv = functools.partial(ShortConvolution, K, config=config, rngs=rngs, dtype=dtype)
        self.q_conv, self.k_conv, self.v_conv = (conv(widths[name]) for name in "qkv")
        axes = ("heads", "head_dim")
        self.decay_bias = nnx.Param(_decay_bias(rngs.params(), (K, R), dtype), axes=axes)
        rate = jax.random.uniform(rngs.params(), (K, R), minval=1.0, maxval=16.0)
        self.log_rate = nnx.Param(jnp.log(rate).astype(dtype), axes=axes)
        self.norm = RMSNorm((delta.value_dim,), config, dtype=dtype, unit_offset=False)
        self.o = make({"heads": K, "head_dim": widths["v"]}, embed, std=residual_std(config))

    def __call__(
        self,
        x_BTD: jax.Array,
        kind: LayerKind,
        context: LayerContext,
        cache: LayerCache | None = None,
    ) -> tuple[jax.Array, LayerCache | None]:
        """Mix over time; returns y [B, T, D] and the cache layer with the new state."""
        del kind
        if cache is not None:
            return self._continue(x_BTD, context, cache)
        starts_BT = jnp.zeros(x_BTD.shape[:2], bool)
        if context.segment_ids_BT is not None:
            ids_BT = context.segment_ids_BT
            starts_BT = starts_BT.at[:, 1:].set(ids_BT[:, 1:] != ids_BT[:, :-1])
        y_BTD, _ = self._mix(x_BTD, starts_BT)
        return checkpoint_name(y_BTD, "attention_out"), None

    def _mix(
        self,
        x_BTD: jax.Array,
        starts_BT: jax.Array,
        state: DeltaState | None = None,
        count_B: jax.Array | None = None,
    ) -> tuple[jax.Array, DeltaState | None]:
        """y [B, T, D], and the state after it where there was one before.

        Args:
          x_BTD: the tokens.
          starts_BT: bool, whether a token begins a document.
          state: of the tokens before.
          count_B: int32, how many tokens of a row are no padding; they come first.
        """
        q_BTKH, k_BTKH, v_BTKX, gate_BTKX, beta_BTKR, decay_BTKR = project(
            x_BTD, self.q, self.k, self.v, self.gate, self.beta, self.decay
        )
        run_BT = jnp.cumsum(starts_BT.astype(jnp.int32), axis=1)
        inputs = (q_BTKH, k_BTKH, v_BTKX)
        before = (None, None, None) if state is None else state.inputs
        convolutions = (self.q_conv, self.k_conv, self.v_conv)
        q_BTKH, k_BTKH, v_BTKX = (
            convolve(x, run_BT, seen)
            for convolve, x, seen in zip(convolutions, inputs, before, strict=True)
        )
        o_BTKRV, memory_BKRHV = kernels.gated_delta_rule(
            *self._operands(q_BTKH, k_BTKH, v_BTKX),
            *self._rates(decay_BTKR, beta_BTKR, count_B),
            starts_BT=starts_BT,
            state_BKRHV=None if state is None else state.memory_BKRHV,
        )
        y_BTD = self._gated(checkpoint_name(o_BTKRV, "attention"), gate_BTKX)
        if state is None or count_B is None:
            return y_BTD, None
        kept = (
            _last_inputs(x, seen, run_BT, count_B)
            for x, seen in zip(inputs, state.inputs, strict=True)
        )
        return y_BTD, DeltaState(tuple(kept), memory_BKRHV)

    def _operands(
        self, q_BTKH: jax.Array, k_BTKH: jax.Array, v_BTKX: jax.Array
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Scaled queries and keys of length 1, in float32, and values by head."""
        q_BTKH = _unit(_named(q_BTKH, "query")) * self.config.key_dim**-0.5
        k_BTKH = _unit(_named(k_BTKH, "key"))
        return q_BTKH, k_BTKH, self._by_head(_named(v_BTKX, "value"))

    def _gated(self, o_BTKRV: jax.Array, gate_BTKX: jax.Array) -> jax.Array:
        """y [B, T, D]: what was read, normalised and gated."""
        gate_BTKRV = jax.nn.silu(self._by_head(gate_BTKX).astype(jnp.float32))
        o_BTKRV = self.norm(o_BTKRV) * gate_BTKRV
        return self.o(o_BTKRV.reshape(gate_BTKX.shape).astype(self.compute_dtype))

    def _rates(
        self, decay_BTKR: jax.Array, beta_BTKR: jax.Array, count_B: jax.Array | None
    ) -> tuple[jax.Array, jax.Array]:
        """The logarithm of each token's decay, and beta, in float32; 0 for padding."""
        rate_KR = jnp.exp(self.log_rate[...].astype(jnp.float32))
        decay_BTKR = decay_BTKR.astype(jnp.float32) + self.decay_bias[...].astype(jnp.float32)
        log_decay_BTKR = -rate_KR * jax.nn.softplus(decay_BTKR)
        beta_BTKR = jax.nn.sigmoid(beta_BTKR.astype(jnp.float32))
        if count_B is None:
            return log_decay_BTKR, beta_BTKR
        real_BT = jnp.arange(beta_BTKR.shape[1]) < count_B[:, None]
        real_BT11 = real_BT[:, :, None, None]
        return jnp.where(real_BT11, log_decay_BTKR, 0.0), jnp.where(real_BT11, beta_BTKR, 0.0)

    def _by_head(self, x_BTKX: jax.Array) -> jax.Array:
        """[B, T, K, R V] as [B, T, K, R, V]."""
        return x_BTKX.reshape(*x_BTKX.shape[:3], self.config.heads_per_key, self.config.value_dim)

    def _continue(
        self, x_BTD: jax.Array, context: LayerContext, cache: LayerCache
    ) -> tuple[jax.Array, LayerCache]:
        """Go on from the state that the cache keeps; padding between tokens is skipped."""
        whole, ids_BT = cache.cache, context.segment_ids_BT
        if isinstance(whole, PagedCache):
            return self._step(x_BTD, whole, cache.place)
        assert isinstance(whole, Cache)
        assert ids_BT is not None
        assert whole.document_B is not None
        order_BT = jnp.argsort(ids_BT == 0, axis=1, stable=True)
        if x_BTD.shape[1] > 1:  # tokens first, padding after them
            x_BTD = jnp.take_along_axis(x_BTD, order_BT[..., None], axis=1)
            ids_BT = jnp.take_along_axis(ids_BT, order_BT, axis=1)
        before_BT = jnp.concatenate([whole.document_B[:, None], ids_BT[:, :-1]], axis=1)
        starts_BT = (ids_BT != before_BT) & (ids_BT != 0)
        count_B = jnp.sum(ids_BT != 0, axis=1)
        y_BTD, state = self._mix(x_BTD, starts_BT, whole.delta_of(cache.place), count_B)
        assert state is not None
        if x_BTD.shape[1] > 1:
            back_BT = jnp.argsort(order_BT, axis=1)
            y_BTD = jnp.take_along_axis(y_BTD, back_BT[..., None], axis=1)
        return y_BTD, LayerCache(whole.with_delta(state, cache.place), cache.place)

    def _step(
        self, x_1TD: jax.Array, cache: PagedCache, place: Place
    ) -> tuple[jax.Array, LayerCache]:
        """Go on from the slots of a ragged batch's sequences."""
        slots = cache.states
        assert slots is not None, "the cache is of a model without linear layers"
        *inputs, gate_1TKX, beta_1TKR, decay_1TKR = project(
            x_1TD, self.q, self.k, self.v, self.gate, self.beta, self.decay
        )
        channels = tuple(x_1TKX[0] for x_1TKX in inputs)
        before, convolutions = slots.before(place.layer), (self.q_conv, self.k_conv, self.v_conv)
        q_1TKH, k_1TKH, v_1TKX = (
            convolve.weigh(slots.taps(x_TKX, before_UWKX))[None]
            for convolve, x_TKX, before_UWKX in zip(convolutions, channels, before, strict=True)
        )
        operands = (
            *self._operands(q_1TKH, k_1TKH, v_1TKX),
            *self._rates(decay_1TKR, beta_1TKR, None),
        )
        o_TKRV, memory_LAKRHV = slots.read_and_write(place.layer, *(x[0] for x in operands))
        slots = slots.keep(place.layer, channels, before, memory_LAKRHV)
        y_1TD = self._gated(o_TKRV[None], gate_1TKX)
        return y_1TD, LayerCache(replace(cache, states=slots), place)


def _named(x_BTKX: jax.Array, name: str) -> jax.Array:
    x_BTKX = constrain(x_BTKX, ("batch", "length", "activation_heads", None))
    return checkpoint_name(x_BTKX, name)


def _unit(x_BTKH: jax.Array) -> jax.Array:
    """Of length 1, in float32."""
    x_BTKH = x_BTKH.astype(jnp.float32)
    return x_BTKH * jax.lax.rsqrt(jnp.sum(jnp.square(x_BTKH), axis=-1, keepdims=True) + _EPS)


def _last_inputs(
    x_BTKX: jax.Array, before_BWKX: jax.Array, run_BT: jax.Array, count_B: jax.Array
) -> jax.Array:
    """What the convolution's next tokens will see: the last W - 1, of their document alone."""
    kept = before_BWKX.shape[1]
    places = count_B[:, None] + jnp.arange(kept)
    whole = _preceded(x_BTKX, before_BWKX, kept + 1)
    last_BWKX = jnp.take_along_axis(whole, places[..., None, None], axis=1)
    runs = jnp.pad(run_BT, ((0, 0), (kept, 0)))
    current = jnp.max(run_BT, axis=1, keepdims=True)
    same_BW = jnp.take_along_axis(runs, places, axis=1) == current
    return jnp.where(same_BW[..., None, None], last_BWKX, 0).astype(before_BWKX.dtype)


def _decay_bias(key: jax.Array, shape: tuple[int, int], dtype: DTypeLike) -> jax.Array:
    """What softplus makes 0.001 to 0.1 of, evenly in the logarithm."""
    low, high = math.log(0.001), math.log(0.1)
    step = jnp.exp(jax.random.uniform(key, shape, minval=low, maxval=high))
    return (step + jnp.log(-jnp.expm1(-step))).astype(dtype)
