"""Mamba-2: a state space model as linear attention, in place of attention.

    h <- exp(dt A) h + dt B x^T;  y = C^T h + d x

(Dao and Gu 2024, Transformers are SSMs, section 6 and figure 6). To the kernel, C is the query, B
the key and dt x the value of a rule that corrects nothing.

Legend: B batch, T tokens, D model width, N heads, V width of a head, K groups that share B and C,
R heads of a group, H width of B and C, X channels of a group.
"""

import functools

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from fornax import kernels
from fornax.kernels import checkpoint_name
from fornax.models.config import DecoderConfig
from fornax.models.gated_delta import (
    LinearAttention,
    Operands,
    ShortConvolution,
    draw_step,
    make_convolutions,
    named,
    padding_to_zero,
)
from fornax.models.projection import Projection, project, residual_std

__all__ = ["Mamba2"]


class Mamba2(LinearAttention):
    """Mamba-2 with the options of `Mamba2Config`.

    Attributes:
      gate: what multiplies the result, through silu, before it is normalised.
      x: the heads' inputs.
      b: B, of each group.
      c: C, of each group.
      dt: the step of each head, through a softplus, biased.
      x_conv: convolution of the inputs.
      b_conv: of B.
      c_conv: of C.
      dt_bias: [N].
      a_log: [N], the logarithm of -A.
      d: [N], the factor on the input that goes past the state.
      norm: [N, V], the weight of the norm over each group's channels.
      o: the output projection.
    """

    def __init__(
        self, config: DecoderConfig, *, rngs: nnx.Rngs, dtype: DTypeLike, compute_dtype: DTypeLike
    ):
        """Make the parameters: A from -16 to -1, steps from 0.001 to 0.1 (Dao and Gu 2024).

        Raises:
          ValueError: when the config has no Mamba-2.
        """
        mamba = config.mamba2
        if mamba is None:
            raise ValueError("the config has no Mamba-2")
        N = mamba.num_heads
        self.config = mamba
        self.eps = config.norm_eps
        self.compute_dtype = compute_dtype
        make = functools.partial(
            Projection, bias=mamba.bias, rngs=rngs, dtype=dtype, compute_dtype=compute_dtype
        )
        embed = {"embed": config.hidden_size}
        into = functools.partial(make, embed, std=config.initializer_range)
        heads = {"heads": N, "head_dim": mamba.head_dim}
        groups = {"groups": mamba.num_groups, "head_dim": mamba.state_dim}
        self.gate, self.x, self.b, self.c = into(heads), into(heads), into(groups), into(groups)
        self.dt = into({"heads": N})
        self.x_conv, self.b_conv, self.c_conv = make_convolutions(config, rngs=rngs, dtype=dtype)
        self.dt_bias = nnx.Param(draw_step(rngs.params(), (N,), dtype), axes=("heads",))
        rate_N = jax.random.uniform(rngs.params(), (N,), minval=1.0, maxval=16.0)
        self.a_log = nnx.Param(jnp.log(rate_N).astype(dtype), axes=("heads",))
        self.d = nnx.Param(jnp.ones((N,), dtype), axes=("heads",))
        ones_NV = jnp.ones((N, mamba.head_dim), dtype)
        self.norm = nnx.Param(ones_NV, axes=("heads", "head_dim"))
        self.o = make(heads, embed, std=residual_std(config))

    def _projected(self, x_BTD: jax.Array) -> tuple[tuple[jax.Array, ...], tuple[jax.Array, ...]]:
        gate_BTNV, x_BTNV, b_BTKH, c_BTKH, dt_BTN = project(
            x_BTD, self.gate, self.x, self.b, self.c, self.dt
        )
        return (x_BTNV, b_BTKH, c_BTKH), (gate_BTNV, dt_BTN)

    def _convolutions(self) -> tuple[ShortConvolution, ...]:
        return self.x_conv, self.b_conv, self.c_conv

    def _operands(
        self,
        mixed: tuple[jax.Array, ...],
        past: tuple[jax.Array, ...],
        count_B: jax.Array | None,
    ) -> Operands:
        """C, B, the inputs times their steps by group, dt A, and nothing that corrects."""
        (x_BTNV, b_BTKH, c_BTKH), (_, dt_BTN) = mixed, past
        dt_BTN = dt_BTN.astype(jnp.float32) + self.dt_bias[...].astype(jnp.float32)
        dt_BTN = jnp.clip(jax.nn.softplus(dt_BTN), *self.config.dt_limit)
        dt_BTN = padding_to_zero(dt_BTN, count_B)
        a_N = -jnp.exp(self.a_log[...].astype(jnp.float32))
        v_BTNV = dt_BTN[..., None] * named(x_BTNV, "value").astype(jnp.float32)
        return (
            checkpoint_name(c_BTKH, "query"),
            checkpoint_name(b_BTKH, "key"),
            self._by_group(v_BTNV),
            self._by_group(a_N * dt_BTN),
            None,
        )

    def _output(
        self, o_BTKRV: jax.Array, mixed: tuple[jax.Array, ...], past: tuple[jax.Array, ...]
    ) -> jax.Array:
        """What was read and what went past, gated, then normalised over each group."""
        x_BTNV, gate_BTNV = mixed[0].astype(jnp.float32), past[0].astype(jnp.float32)
        d_N1 = self.d[...].astype(jnp.float32)[:, None]
        y_BTNV = o_BTKRV.reshape(x_BTNV.shape) + d_N1 * x_BTNV
        y_BTNV = y_BTNV * jax.nn.silu(gate_BTNV)
        y_BTKX = y_BTNV.reshape(*y_BTNV.shape[:2], self.config.num_groups, -1)
        y_BTKX = kernels.rms_norm(y_BTKX, jnp.ones(y_BTKX.shape[-1:]), eps=self.eps)
        y_BTNV = y_BTKX.reshape(y_BTNV.shape) * self.norm[...].astype(jnp.float32)
        return self.o(y_BTNV.astype(self.compute_dtype))

    def _by_group(self, x_BTN: jax.Array) -> jax.Array:
        """[B, T, N, ...] as [B, T, K, R, ...]."""
        groups, heads = self.config.num_groups, self.config.heads_per_key
        return x_BTN.reshape(*x_BTN.shape[:2], groups, heads, *x_BTN.shape[3:])
