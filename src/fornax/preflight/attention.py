"""Grouped-query attention written down plainly: scores of all pairs of tokens, and a softmax.

It shares parameters and angles with `models.Attention`, and neither projections, norms, rotation,
the gate nor a kernel. Keys and values that layers share are handed on by the caller.

Legend: B rows, T query tokens, S key tokens, D model width, N query heads, K key/value heads,
G query heads of a key head, H head width.
"""

import jax
import jax.numpy as jnp

from fornax.models.attention import Attention
from fornax.models.config import LayerKind
from fornax.models.context import LayerContext
from fornax.preflight.formulas import growth, normed, over_root_mean_square, project, seen, turned

__all__ = ["KeysAndValues", "PlainAttention"]

KeysAndValues = tuple[jax.Array, jax.Array]
"""[B, S, K, H] each."""


class PlainAttention(Attention):
    """The formula, in float32."""

    def attend(
        self,
        x_BTD: jax.Array,
        kind: LayerKind,
        context: LayerContext,
        shared: KeysAndValues | None,
    ) -> tuple[jax.Array, KeysAndValues]:
        """Attend among the tokens themselves, to keys and values of one's own or those given.

        Returns:
          y [B, T, D], and the keys and values.
        """
        H = self.o.kernel.shape[1]
        q_BTNH = project("BTD,DNH->BTNH", x_BTD.astype(jnp.float32), self.q)
        gate_BTNH = q_BTNH[..., H:]  # empty without a gate
        q_BTNH = self._placed(q_BTNH[..., :H], "q_norm", kind, context)
        k_BSKH, v_BSKH = shared or self._keys_and_values(x_BTD, kind, context)
        K = k_BSKH.shape[2]
        q_BTKGH = q_BTNH.reshape(*q_BTNH.shape[:2], K, -1, H)
        scores = jnp.einsum("BTKGH,BSKH->BKGTS", q_BTKGH, k_BSKH) * self.scale
        scores *= growth(self.query_scaling, kind, context)[:, None, None, :, None]
        if self.softcap is not None:
            scores = self.softcap * jnp.tanh(scores / self.softcap)
        seen_BKGTS = seen(kind, context)[:, None, None]
        scores = jnp.where(seen_BKGTS, scores, -1e30)
        if self.sinks is not None:  # a key without a value
            sinks = self.sinks[...].astype(jnp.float32).reshape(1, K, -1, 1, 1)
            sinks = jnp.broadcast_to(sinks, (*scores.shape[:-1], 1))
            scores = jnp.concatenate([scores, sinks], axis=-1)
        weights = jax.nn.softmax(scores, axis=-1)[..., : k_BSKH.shape[1]]
        weights = jnp.where(seen_BKGTS, weights, 0)  # padding sees nothing
        o_BTNH = jnp.einsum("BKGTS,BSKH->BTKGH", weights, v_BSKH).reshape(q_BTNH.shape)
        if self.gated:
            o_BTNH = o_BTNH / (1 + jnp.exp(-gate_BTNH))
        return project("BTNH,NHD->BTD", o_BTNH, self.o), (k_BSKH, v_BSKH)

    def _keys_and_values(
        self, x_BTD: jax.Array, kind: LayerKind, context: LayerContext
    ) -> KeysAndValues:
        x_BTD = x_BTD.astype(jnp.float32)
        k_BSKH = v_BSKH = project("BTD,DKH->BTKH", x_BTD, self.k)
        if self.v is not None:
            v_BSKH = project("BTD,DKH->BTKH", x_BTD, self.v)
        if self.value_eps is not None:
            v_BSKH = over_root_mean_square(v_BSKH, 1, self.value_eps)
        return self._placed(k_BSKH, "k_norm", kind, context), self._clipped(v_BSKH)

    def _placed(
        self, x_BTNH: jax.Array, norm: str, kind: LayerKind, context: LayerContext
    ) -> jax.Array:
        """Queries or keys, normalised and turned by their positions."""
        x_BTNH = self._clipped(normed(x_BTNH, getattr(self, norm)))
        if kind.rope == "none":
            return x_BTNH
        x_BTNH = turned(x_BTNH, context.rotations[kind.rope])
        if self.unweighted_eps is not None:
            x_BTNH = over_root_mean_square(x_BTNH, 1, self.unweighted_eps)
        return x_BTNH

    def _clipped(self, x: jax.Array) -> jax.Array:
        return x if self.clip is None else jnp.minimum(jnp.maximum(x, -self.clip), self.clip)
