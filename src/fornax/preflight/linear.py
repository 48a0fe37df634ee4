"""Linear attention written down plainly: one token after the other reads and writes the state.

It shares parameters and the activation with `models.GatedDeltaNet` and `models.Mamba2`, and neither
projections, convolutions, norms, chunks nor what finds the borders of documents.

Legend: B rows, T tokens of a row, D model width, N heads of values, K heads of keys (groups of
Mamba-2), R heads of values of each, H key width, V value width, W width of the convolutions,
X channels of a head.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from fornax.kernels import ACTIVATIONS
from fornax.models.attend import LayerCache
from fornax.models.config import LayerKind
from fornax.models.context import LayerContext
from fornax.models.gated_delta import GatedDeltaNet, ShortConvolution
from fornax.models.mamba import Mamba2
from fornax.preflight.formulas import begins, normed, over_root_mean_square, project

__all__ = ["PlainGatedDelta", "PlainMamba2"]


class PlainGatedDelta(GatedDeltaNet):
    """Equation 10 of Yang, Kautz and Hatamizadeh 2024, in float32."""

    def __call__(
        self,
        x_BTD: jax.Array,
        kind: LayerKind,
        context: LayerContext,
        cache: LayerCache | None = None,
    ) -> tuple[jax.Array, LayerCache | None]:
        """Mix over time -> y [B, T, D]."""
        into = functools.partial(project, "BTD,DKX->BTKX", x_BTD.astype(jnp.float32))
        first_BT, delta = begins(context), self.config
        q_BTKH = _of_length_1(_mixed(into(self.q), self.q_conv, first_BT)) / delta.key_dim**0.5
        k_BTKH = _of_length_1(_mixed(into(self.k), self.k_conv, first_BT))
        heads = (*x_BTD.shape[:2], delta.num_key_heads, delta.heads_per_key, delta.value_dim)
        v_BTKRV = _mixed(into(self.v), self.v_conv, first_BT).reshape(heads)
        beta_BTKR = 1 / (1 + jnp.exp(-into(self.beta)))
        decay_BTKR = jnp.logaddexp(into(self.decay) + self.decay_bias[...], 0)
        kept_BTKR = jnp.exp(-jnp.exp(self.log_rate[...]) * decay_BTKR)

        def step(state_BKRHV: jax.Array, token: Any) -> tuple[jax.Array, jax.Array]:
            first_B, q_BKH, k_BKH, v_BKRV, kept_BKR, beta_BKR = token
            state_BKRHV = _unless(first_B, state_BKRHV) * kept_BKR[..., None, None]
            wrong_BKRV = v_BKRV - jnp.einsum("BKH,BKRHV->BKRV", k_BKH, state_BKRHV)
            state_BKRHV += jnp.einsum("BKH,BKR,BKRV->BKRHV", k_BKH, beta_BKR, wrong_BKRV)
            return state_BKRHV, jnp.einsum("BKH,BKRHV->BKRV", q_BKH, state_BKRHV)

        empty = jnp.zeros((len(x_BTD), *heads[2:4], delta.key_dim, delta.value_dim))
        o_BTKRV = _token_by_token(
            step, empty, (first_BT, q_BTKH, k_BTKH, v_BTKRV, kept_BTKR, beta_BTKR)
        )
        gate_BTKRV = into(self.gate).reshape(heads)
        o_BTKRV = normed(o_BTKRV, self.norm) * gate_BTKRV / (1 + jnp.exp(-gate_BTKRV))
        o_BTKX = o_BTKRV.reshape(*heads[:3], -1)
        return project("BTKX,KXD->BTD", o_BTKX, self.o), None


class PlainMamba2(Mamba2):
    """Section 6 of Dao and Gu 2024, in float32, with B and C repeated for each head of a group."""

    def __call__(
        self,
        x_BTD: jax.Array,
        kind: LayerKind,
        context: LayerContext,
        cache: LayerCache | None = None,
    ) -> tuple[jax.Array, LayerCache | None]:
        """Mix over time -> y [B, T, D]."""
        into = functools.partial(project, "BTD,DKX->BTKX", x_BTD.astype(jnp.float32))
        first_BT, mamba = begins(context), self.config
        x_BTNV = _mixed(into(self.x), self.x_conv, first_BT)
        b_BTNH, c_BTNH = (
            jnp.repeat(_mixed(into(part), conv, first_BT), mamba.heads_per_key, axis=2)
            for part, conv in ((self.b, self.b_conv), (self.c, self.c_conv))
        )
        dt_BTN = project("BTD,DN->BTN", x_BTD.astype(jnp.float32), self.dt) + self.dt_bias[...]
        least, most = mamba.dt_limit
        dt_BTN = jnp.minimum(jnp.maximum(jnp.logaddexp(dt_BTN, 0), least), most)
        kept_BTN = jnp.exp(-dt_BTN * jnp.exp(self.a_log[...]))

        def step(state_BNHV: jax.Array, token: Any) -> tuple[jax.Array, jax.Array]:
            first_B, x_BNV, b_BNH, c_BNH, dt_BN, kept_BN = token
            state_BNHV = _unless(first_B, state_BNHV) * kept_BN[..., None, None]
            state_BNHV += jnp.einsum("BN,BNH,BNV->BNHV", dt_BN, b_BNH, x_BNV)
            return state_BNHV, jnp.einsum("BNH,BNHV->BNV", c_BNH, state_BNHV)

        empty = jnp.zeros((len(x_BTD), mamba.num_heads, mamba.state_dim, mamba.head_dim))
        tokens = (first_BT, x_BTNV, b_BTNH, c_BTNH, dt_BTN, kept_BTN)
        y_BTNV = _token_by_token(step, empty, tokens) + self.d[...][:, None] * x_BTNV
        gate_BTNV = into(self.gate)
        y_BTNV = y_BTNV * gate_BTNV / (1 + jnp.exp(-gate_BTNV))
        y_BTKX = y_BTNV.reshape(*y_BTNV.shape[:2], mamba.num_groups, -1)
        y_BTNV = over_root_mean_square(y_BTKX, 1, self.eps).reshape(y_BTNV.shape)
        return project("BTNV,NVD->BTD", y_BTNV * self.norm[...], self.o), None


def _token_by_token(step: Any, state: jax.Array, tokens: tuple[jax.Array, ...]) -> jax.Array:
    """What each token reads, [B, T, ...]."""
    by_time = jax.tree.map(lambda x: jnp.moveaxis(x, 1, 0), tokens)
    return jnp.moveaxis(jax.lax.scan(step, state, by_time)[1], 0, 1)


def _unless(first_B: jax.Array, state: jax.Array) -> jax.Array:
    """The state; nothing where a document begins."""
    return jnp.where(first_B.reshape(-1, *(1,) * (state.ndim - 1)), 0, state)


def _mixed(x_BTKX: jax.Array, conv: ShortConvolution, first_BT: jax.Array) -> jax.Array:
    """Each channel's last W values of its document, weighed and summed, through the activation."""
    kernel_KXW = conv.kernel[...].astype(jnp.float32)
    W, document_BT = kernel_KXW.shape[-1], jnp.cumsum(first_BT, axis=1)
    y_BTKX = x_BTKX * kernel_KXW[..., -1]
    for back in range(1, min(W, x_BTKX.shape[1])):
        own_BT = document_BT[:, back:] == document_BT[:, :-back]
        earlier = jnp.where(own_BT[..., None, None], x_BTKX[:, :-back], 0)
        y_BTKX = y_BTKX.at[:, back:].add(earlier * kernel_KXW[..., W - 1 - back])
    if conv.bias is not None:
        y_BTKX = y_BTKX + conv.bias[...].astype(jnp.float32)
    return ACTIVATIONS[conv.activation](y_BTKX)


def _of_length_1(x_BTKH: jax.Array) -> jax.Array:
    return x_BTKH / jnp.sqrt(jnp.sum(x_BTKH * x_BTKH, axis=-1, keepdims=True) + 1e-6)
