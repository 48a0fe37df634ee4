"""Linear attention, whose state has a fixed size, in place of attention: what its rules share,
and Gated DeltaNet.

Without a cache all tokens go at once, in chunks; a document is a run of equal segment ids and
starts from scratch. A cache keeps each row's state after its last token (padding leaves it as it
is): a document continues where it was, until another one begins in its row. Beside pages the states
of the sequences of a ragged batch lie in slots.

Legend: B batch, T tokens, D model width, K key heads (groups of Mamba-2), R value heads of a key
head, H key width, V value width, W width of the convolutions, X channels of a head.
"""

import functools
import math
from dataclasses import replace

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from fornax import kernels
from fornax.kernels import checkpoint_name
from fornax.mesh import constrain
from fornax.models.attend import LayerCache, Place
from fornax.models.cache import Cache, DeltaState
from fornax.models.config import DecoderConfig, LayerKind
from fornax.models.context import LayerContext
from fornax.models.norm import RMSNorm
from fornax.models.paged_cache import PagedCache
from fornax.models.projection import Projection, draw, project, residual_std
from fornax.models.scope import scoped

__all__ = [
    "GatedDeltaNet",
    "LinearAttention",
    "Operands",
    "ShortConvolution",
    "draw_step",
    "make_convolutions",
    "named",
    "padding_to_zero",
]

Operands = tuple[jax.Array, jax.Array, jax.Array, jax.Array, jax.Array | None]
"""What `kernels.gated_delta_rule` takes first."""

_EPS = 1e-6
"""Added to the squared length of queries and keys."""


class ShortConvolution(nnx.Module):
    """A causal convolution of each channel over time, then the model's activation.

    Attributes:
      kernel: [K, X, W], the oldest token's weight first.
      bias: [K, X], or None.
    """

    def __init__(
        self,
        heads: dict[str, int],
        channels: int,
        width: int,
        *,
        bias: bool,
        activation: kernels.Activation,
        rngs: nnx.Rngs,
        dtype: DTypeLike,
    ):
        """Draw the kernel, with the deviation of PyTorch's convolutions; the bias is 0.

        Args:
          heads: logical axis to K.
          channels: X.
          width: W.
          bias: whether there is one.
          activation: by its name in `DecoderConfig`.
          rngs: source of randomness.
          dtype: of the parameters.
        """
        shape, axes = (*heads.values(), channels), (*heads, "head_dim")
        drawn = draw(rngs.params(), (*shape, width), dtype, (3 * width) ** -0.5)
        self.kernel = nnx.Param(drawn, axes=(*axes, "conv"))
        self.bias = nnx.Param(jnp.zeros(shape, dtype), axes=axes) if bias else None
        self.activation = activation

    @scoped
    def __call__(
        self, x_BTKX: jax.Array, run_BT: jax.Array, before_BWKX: jax.Array | None
    ) -> jax.Array:
        """Apply -> y [B, T, K, X].

        Args:
          x_BTKX: the channels.
          run_BT: int32 number of each token's document in its row; a token sees its own. 0 is the
            one that `before_BWKX` is of.
          before_BWKX: the W - 1 tokens before; None for zeros.
        """
        length, width = x_BTKX.shape[1], self.kernel[...].shape[2]
        whole = _preceded(x_BTKX, before_BWKX, width)
        runs = jnp.pad(run_BT, ((0, 0), (width - 1, 0)))
        taps = []
        for place in range(width):
            seen_BT = runs[:, place : place + length] == run_BT
            there_BTKX = whole[:, place : place + length]
            taps.append(jnp.where(seen_BT[:, :, None, None], there_BTKX, 0))
        return kernels.weigh_taps(tuple(taps), *self.parameters)

    @property
    def parameters(self) -> tuple[jax.Array, jax.Array | None, kernels.Activation]:
        """Kernel, bias or None, and the activation."""
        bias = None if self.bias is None else self.bias[...]
        return self.kernel[...], bias, self.activation


def _preceded(x_BTKX: jax.Array, before_BWKX: jax.Array | None, width: int) -> jax.Array:
    """The channels [B, W - 1 + T, K, X] with those of the tokens before."""
    if before_BWKX is None:
        return jnp.pad(x_BTKX, ((0, 0), (width - 1, 0), (0, 0), (0, 0)))
    return jnp.concatenate([before_BWKX.astype(x_BTKX.dtype), x_BTKX], axis=1)


class LinearAttention(nnx.Module):
    """A layer that reads and writes a state, whatever its rule: without a cache, with one, and in
    the slots beside pages.

    What differs: what the layer projects, what its rule takes of that, and what becomes of the
    result.
    """

    def _projected(self, x_BTD: jax.Array) -> tuple[tuple[jax.Array, ...], tuple[jax.Array, ...]]:
        """What the convolutions take, [B, T, K, X] each, and what goes past them."""
        raise NotImplementedError

    def _convolutions(self) -> tuple[ShortConvolution, ...]:
        """In the order of what they take."""
        raise NotImplementedError

    def _operands(
        self,
        mixed: tuple[jax.Array, ...],
        past: tuple[jax.Array, ...],
        count_B: jax.Array | None,
    ) -> Operands:
        """What the rule takes, of what the convolutions gave and what went past them; tokens from
        count_B on, which are padding, leave the state as it is."""
        raise NotImplementedError

    def _output(
        self, o_BTKRV: jax.Array, mixed: tuple[jax.Array, ...], past: tuple[jax.Array, ...]
    ) -> jax.Array:
        """y [B, T, D] of what the rule read."""
        raise NotImplementedError

    @scoped
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
          count_B: int32, how many tokens of a row are not padding; they come first.
        """
        inputs, past = self._projected(x_BTD)
        run_BT = jnp.cumsum(starts_BT.astype(jnp.int32), axis=1)
        before = (None,) * len(inputs) if state is None else state.inputs
        mixed = tuple(
            convolve(x, run_BT, seen)
            for convolve, x, seen in zip(self._convolutions(), inputs, before, strict=True)
        )
        operands = self._operands(mixed, past, count_B)
        with jax.named_scope("recurrence"):
            o_BTKRV, memory_BKRHV = kernels.gated_delta_rule(
                *operands,
                starts_BT=starts_BT,
                state_BKRHV=None if state is None else state.memory_BKRHV,
            )
        y_BTD = self._output(checkpoint_name(o_BTKRV, "attention"), mixed, past)
        if state is None or count_B is None:
            return y_BTD, None
        kept = (
            _last_inputs(x, seen, run_BT, count_B)
            for x, seen in zip(inputs, state.inputs, strict=True)
        )
        return y_BTD, DeltaState(tuple(kept), memory_BKRHV)

    def _continue(
        self, x_BTD: jax.Array, context: LayerContext, cache: LayerCache
    ) -> tuple[jax.Array, LayerCache]:
        """Continue from the state that the cache keeps; padding between tokens is skipped."""
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
        """Continue from the slots of a ragged batch's sequences."""
        slots = cache.states
        assert slots is not None, "the cache is of a model without linear layers"
        inputs, past = self._projected(x_1TD)
        with jax.named_scope("convolutions"):
            found = [
                slots.convolve(place.layer, index, x_1TKX[0], *convolution.parameters)
                for index, (convolution, x_1TKX) in enumerate(
                    zip(self._convolutions(), inputs, strict=True)
                )
            ]
        mixed = tuple(y_TKX[None] for y_TKX, _ in found)
        operands = jax.tree.map(lambda x_1T: x_1T[0], self._operands(mixed, past, None))
        with jax.named_scope("recurrence"):
            o_TKRV, memory_LAKRHV = slots.read_and_write(place.layer, *operands)
        stacks = DeltaState(tuple(stack_LAWKX for _, stack_LAWKX in found), memory_LAKRHV)
        slots = replace(slots, stacks=stacks)
        y_1TD = self._output(o_TKRV[None], mixed, past)
        return y_1TD, LayerCache(replace(cache, states=slots), place)


class GatedDeltaNet(LinearAttention):
    """Gated DeltaNet with the options of `GatedDeltaConfig`, as Qwen3-Next has it.

    Attributes:
      q: queries.
      k: keys.
      v: values, those of a key head's R heads one behind the other; so are the next one's.
      gate: what multiplies the normalised result, through silu.
      beta: how far a token corrects the state, through a sigmoid.
      decay: how much of the state it forgets, through a softplus, biased.
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
        self.q_conv, self.k_conv, self.v_conv = make_convolutions(config, rngs=rngs, dtype=dtype)
        axes = ("heads", "head_dim")
        self.decay_bias = nnx.Param(draw_step(rngs.params(), (K, R), dtype), axes=axes)
        rate = jax.random.uniform(rngs.params(), (K, R), minval=1.0, maxval=16.0)
        self.log_rate = nnx.Param(jnp.log(rate).astype(dtype), axes=axes)
        self.norm = RMSNorm((delta.value_dim,), config, dtype=dtype, unit_offset=False)
        self.o = make({"heads": K, "head_dim": widths["v"]}, embed, std=residual_std(config))

    def _projected(self, x_BTD: jax.Array) -> tuple[tuple[jax.Array, ...], tuple[jax.Array, ...]]:
        q_BTKH, k_BTKH, v_BTKX, gate_BTKX, beta_BTKR, decay_BTKR = project(
            x_BTD, self.q, self.k, self.v, self.gate, self.beta, self.decay
        )
        return (q_BTKH, k_BTKH, v_BTKX), (gate_BTKX, beta_BTKR, decay_BTKR)

    def _convolutions(self) -> tuple[ShortConvolution, ...]:
        return self.q_conv, self.k_conv, self.v_conv

    def _operands(
        self,
        mixed: tuple[jax.Array, ...],
        past: tuple[jax.Array, ...],
        count_B: jax.Array | None,
    ) -> Operands:
        """Scaled queries and keys of length 1, values by head, logarithms of decays, and beta; in
        float32 but for the values."""
        (q_BTKH, k_BTKH, v_BTKX), (_, beta_BTKR, decay_BTKR) = mixed, past
        q_BTKH = _unit(named(q_BTKH, "query")) * self.config.key_dim**-0.5
        k_BTKH = _unit(named(k_BTKH, "key"))
        rate_KR = jnp.exp(self.log_rate[...].astype(jnp.float32))
        decay_BTKR = decay_BTKR.astype(jnp.float32) + self.decay_bias[...].astype(jnp.float32)
        log_decay_BTKR = padding_to_zero(-rate_KR * jax.nn.softplus(decay_BTKR), count_B)
        beta_BTKR = padding_to_zero(jax.nn.sigmoid(beta_BTKR.astype(jnp.float32)), count_B)
        v_BTKRV = self._by_head(named(v_BTKX, "value"))
        return q_BTKH, k_BTKH, v_BTKRV, log_decay_BTKR, beta_BTKR

    def _output(
        self, o_BTKRV: jax.Array, mixed: tuple[jax.Array, ...], past: tuple[jax.Array, ...]
    ) -> jax.Array:
        """What was read, normalised and gated."""
        del mixed
        gate_BTKX = past[0]
        gate_BTKRV = jax.nn.silu(self._by_head(gate_BTKX).astype(jnp.float32))
        o_BTKRV = self.norm(o_BTKRV) * gate_BTKRV
        return self.o(o_BTKRV.reshape(gate_BTKX.shape).astype(self.compute_dtype))

    def _by_head(self, x_BTKX: jax.Array) -> jax.Array:
        """[B, T, K, R V] as [B, T, K, R, V]."""
        return x_BTKX.reshape(*x_BTKX.shape[:3], self.config.heads_per_key, self.config.value_dim)


def make_convolutions(
    config: DecoderConfig, *, rngs: nnx.Rngs, dtype: DTypeLike
) -> tuple[ShortConvolution, ...]:
    """Those of the linear layers, as `conv_channels` of their config says."""
    rule = config.linear
    assert rule is not None
    make = functools.partial(
        ShortConvolution,
        width=rule.conv_width,
        bias=rule.conv_bias,
        activation=config.activation,
        rngs=rngs,
        dtype=dtype,
    )
    return tuple(make({axis: heads}, width) for axis, heads, width in rule.conv_channels)


def padding_to_zero(x_BTKR: jax.Array, count_B: jax.Array | None) -> jax.Array:
    """With zeros in the places of padding: from count_B on; None for none."""
    if count_B is None:
        return x_BTKR
    real_BT = jnp.arange(x_BTKR.shape[1]) < count_B[:, None]
    return jnp.where(real_BT.reshape(*real_BT.shape, *(1,) * (x_BTKR.ndim - 2)), x_BTKR, 0.0)


def named(x_BTKX: jax.Array, name: str) -> jax.Array:
    """Heads, divided as the mesh's rules say, under a name that remat policies know."""
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


def draw_step(key: jax.Array, shape: tuple[int, ...], dtype: DTypeLike) -> jax.Array:
    """What softplus makes 0.001 to 0.1 of, evenly in the logarithm."""
    low, high = math.log(0.001), math.log(0.1)
    step = jnp.exp(jax.random.uniform(key, shape, minval=low, maxval=high))
    return (step + jnp.log(-jnp.expm1(-step))).astype(dtype)
