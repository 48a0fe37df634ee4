"""The gated MLP.

Legend: B batch, T tokens, D model width, F hidden width.
"""

import functools
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from fornax import kernels
from fornax.kernels import checkpoint_name
from fornax.mesh import constrain
from fornax.models.config import DecoderConfig
from fornax.models.projection import Projection, project, residual_std
from fornax.models.scope import scoped

__all__ = ["MLP", "GatedActivation"]


class MLP(nnx.Module):
    """The gated MLP: down(activation(gate(x)) * up(x)) (Shazeer 2020)."""

    def __init__(
        self,
        config: DecoderConfig,
        *,
        width: int | None = None,
        rngs: nnx.Rngs,
        dtype: DTypeLike,
        compute_dtype: DTypeLike,
    ):
        """Make the three projections; `width` is F, None for the model's own."""
        width = config.intermediate_size if width is None else width
        make = functools.partial(
            Projection,
            bias=config.mlp_bias,
            rngs=rngs,
            dtype=dtype,
            compute_dtype=compute_dtype,
        )
        embed, mlp = {"embed": config.hidden_size}, {"mlp": width}
        self.gate = make(embed, mlp, std=config.initializer_range)
        self.up = make(embed, mlp, std=config.initializer_range)
        self.down = make(mlp, embed, std=residual_std(config))
        self.activation = config.activation

    @scoped
    def __call__(self, x_BTD: jax.Array) -> jax.Array:
        """Apply -> y [B, T, D]."""
        gate_BTF, up_BTF = project(x_BTD, self.gate, self.up)
        gate_BTF = checkpoint_name(gate_BTF, "mlp_gate")
        up_BTF = checkpoint_name(up_BTF, "mlp_up")
        with jax.named_scope("activation"):
            h_BTF = kernels.gated_linear_unit(gate_BTF, up_BTF, activation=self.activation)
        y_BTD = self.down(constrain(h_BTF, ("batch", "length", "activation_mlp")))
        return checkpoint_name(y_BTD, "mlp_down")


@dataclass(frozen=True)
class GatedActivation:
    """What a gated MLP's last projection is applied to, of the products of the two before it."""

    name: kernels.Activation
    clip: float | None = None
    """See `ExpertsConfig.clip`."""
    clip_gain: float = 1.702
    """See `ExpertsConfig.clip_gain`."""

    def __call__(self, gate: jax.Array, up: jax.Array) -> jax.Array:
        """Apply, elementwise."""
        c = self.clip
        if c is None:
            return kernels.gated_linear_unit(gate, up, activation=self.name)
        gate, up = jnp.minimum(gate, c), jnp.clip(up, -c, c)
        return (up + 1) * gate * jax.nn.sigmoid(self.clip_gain * gate)
