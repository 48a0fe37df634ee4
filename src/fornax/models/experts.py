"""A mixture of experts in the MLP's place.

Legend: B batch, T tokens, D model width, F width of an expert, E experts, k experts per token,
M = B T, A = M k assignments of a token to an expert.
"""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from fornax import kernels
from fornax.kernels import checkpoint_name
from fornax.models.capacity import drop_tokens
from fornax.models.config import DecoderConfig
from fornax.models.context import LayerContext
from fornax.models.dispatch import ExpertArrays, ExpertWeight, run_experts
from fornax.models.mlp import MLP, GatedActivation
from fornax.models.norm import RMSNorm
from fornax.models.projection import Projection, draw, residual_std
from fornax.models.routing import Choice, Routing, choose, count_routing
from fornax.models.scope import scoped

__all__ = ["ExpertProjection", "Experts", "SelectionBias"]


class SelectionBias(nnx.Variable):
    """A router's bias for the choice of experts: moved by the load, not by a gradient."""


class ExpertProjection(nnx.Module):
    """One linear layer for each expert.

    Attributes:
      kernel: [E, inputs, outputs].
      bias: [E, outputs], or None.
    """

    num_inputs = 1

    def __init__(
        self,
        num_experts: int,
        inputs: tuple[str, int],
        outputs: tuple[str, int],
        *,
        bias: bool,
        std: float,
        rngs: nnx.Rngs,
        dtype: DTypeLike,
    ):
        """Make the parameters; `inputs` and `outputs` are a logical axis and its size."""
        shape = (num_experts, inputs[1], outputs[1])
        drawn = draw(rngs.params(), (math.prod(shape[:2]), shape[2]), dtype, std)
        self.kernel = nnx.Param(drawn.reshape(shape), axes=("expert", inputs[0], outputs[0]))
        zeros = jnp.zeros((num_experts, outputs[1]), dtype)
        self.bias = nnx.Param(zeros, axes=("expert", outputs[0])) if bias else None

    def weight(
        self, dtype: DTypeLike
    ) -> jax.Array | kernels.GroupedWeight | kernels.PackedWeight | ExpertWeight:
        """What computes its products in a dtype: the kernel, or a weight that knows its own."""
        kernel = self.kernel.get_value()
        return kernel.astype(dtype) if isinstance(kernel, jax.Array) else kernel


class Experts(nnx.Module):
    """y = sum over a token's experts of weight * expert(x), and of what all tokens run through."""

    def __init__(
        self, config: DecoderConfig, *, rngs: nnx.Rngs, dtype: DTypeLike, compute_dtype: DTypeLike
    ):
        """Make the router and the experts.

        Raises:
          ValueError: when the config has no experts.
        """
        experts = config.experts
        if experts is None:
            raise ValueError("the config has no experts")
        D, E, F = config.hidden_size, experts.num_experts, experts.intermediate_size
        self.config = experts
        self.compute_dtype = compute_dtype
        self.activate = GatedActivation(config.activation, experts.clip, experts.clip_gain)
        self.router = Projection(
            {"embed": D},
            {"router": E},
            bias=experts.router_bias,
            std=config.initializer_range,
            rngs=rngs,
            dtype=dtype,
            compute_dtype=jnp.float32,
        )
        zeros = jnp.zeros((E,), jnp.float32)
        biased = experts.selection_bias
        self.selection_bias = SelectionBias(zeros, axes=("router",)) if biased else None
        into = functools.partial(ExpertProjection, E, bias=experts.bias, rngs=rngs, dtype=dtype)
        self.gate = into(("embed", D), ("mlp", F), std=config.initializer_range)
        self.up = into(("embed", D), ("mlp", F), std=config.initializer_range)
        self.down = into(("mlp", F), ("embed", D), std=residual_std(config))
        make = {"rngs": rngs, "dtype": dtype, "compute_dtype": compute_dtype}
        width = experts.shared_intermediate_size
        self.shared = None if width is None else MLP(config, width=width, **make)
        gate = functools.partial(Projection, {"embed": D}, {"router": 1}, bias=False, **make)
        separate = experts.separate_norms
        norm = functools.partial(RMSNorm, (D,), config, dtype=dtype)
        self.eps = config.norm_eps
        self.input_norm = norm() if separate else None
        self.output_norm = norm() if separate else None
        self.shared_norm = norm() if separate else None
        scale = functools.partial(nnx.Param, jnp.ones((D,), dtype), axes=("norm",))
        self.router_scale = scale() if separate else None
        ones = functools.partial(nnx.Param, jnp.ones((E,), dtype), axes=("router",))
        self.expert_scale = ones() if separate else None
        self.shared_gate = gate(std=config.initializer_range) if experts.shared_gate else None

    @scoped
    def __call__(
        self, x_BTD: jax.Array, context: LayerContext, residual_BTD: jax.Array | None = None
    ) -> tuple[jax.Array, Routing]:
        """Apply -> y [B, T, D], and what the router did.

        Args:
          x_BTD: the layer's normalised input.
          context: what the layers share.
          residual_BTD: the residual stream, which router and experts read instead where the config
            says `separate_norms`.
        """
        shared_input_BTD, routed_BTD = x_BTD, x_BTD
        if self.input_norm is not None:
            assert residual_BTD is not None
            x_BTD, routed_BTD = self.input_norm(residual_BTD), self._router_input(residual_BTD)
        x_MD = routed_BTD.reshape(-1, x_BTD.shape[-1])
        segments_BT = context.segment_ids_BT
        rows = x_MD.shape[0]  # open in an exported function
        is_token_M = jnp.ones(rows, bool) if segments_BT is None else segments_BT.ravel() != 0
        shape = (*x_BTD.shape[:2], self.config.experts_per_token)
        given_BTk = context.routed_experts_BTk
        given_Mk = None if given_BTk is None else given_BTk.reshape(-1, shape[-1])
        choice, routing = self.route(x_MD, is_token_M, given_Mk)
        if context.returns_experts:
            routing = dataclasses.replace(routing, experts_BTk=choice.experts_Mk.reshape(shape))
        E = self.config.num_experts
        experts_BTk = jnp.where(is_token_M[:, None], choice.experts_Mk, E).reshape(shape)
        capacity = self.config.capacity(shape[1]) if context.drops_tokens else None
        if capacity is not None:
            experts_BTk = drop_tokens(experts_BTk, E, capacity, balanced=context.balanced)
            run_E = jnp.sum(jax.nn.one_hot(experts_BTk, E, dtype=jnp.float32), axis=(0, 1, 2))
            routing = dataclasses.replace(routing, dropped_E=routing.assigned_E - run_E)
        y_BTD = run_experts(
            x_BTD.astype(self.compute_dtype),
            choice.weights_Mk.reshape(shape),
            experts_BTk,
            self._arrays(),
            self.activate,
            weigh_input=self.config.weigh == "input",
            exchange=self.config.exchange,
            capacity=capacity,
        )
        y_BTD = checkpoint_name(y_BTD, "mlp_down")
        if self.shared is not None:
            shared_BTD = self.shared(shared_input_BTD)
            if self.shared_gate is not None:
                shared_BTD = shared_BTD * jax.nn.sigmoid(self.shared_gate(x_BTD))
            if self.output_norm is not None and self.shared_norm is not None:
                y_BTD, shared_BTD = self.output_norm(y_BTD), self.shared_norm(shared_BTD)
            y_BTD = y_BTD + shared_BTD
        return y_BTD, routing

    def _router_input(self, residual_BTD: jax.Array) -> jax.Array:
        assert self.router_scale is not None
        D = residual_BTD.shape[-1]
        scale_D = self.router_scale[...].astype(jnp.float32) * D**-0.5
        return kernels.rms_norm(residual_BTD.astype(jnp.float32), scale_D, eps=self.eps)

    def route(
        self, x_MD: jax.Array, is_token_M: jax.Array, given_Mk: jax.Array | None = None
    ) -> tuple[Choice, Routing]:
        """Choose the experts of tokens x [M, D]; `is_token_M` is False for padding, `given_Mk` is
        that of `choose`."""
        logits_ME = self.router(x_MD)
        bias_E = None if self.selection_bias is None else self.selection_bias[...]
        with jax.named_scope("router"):
            choice = choose(logits_ME, self.config, bias_E, given_Mk)
            if self.expert_scale is not None:
                scale_E = self.expert_scale[...].astype(jnp.float32)
                weights_Mk = choice.weights_Mk * scale_E[choice.experts_Mk]
                choice = dataclasses.replace(choice, weights_Mk=weights_Mk)
            return choice, count_routing(logits_ME, choice, is_token_M)

    def _arrays(self) -> ExpertArrays:
        """The experts' parameters in the compute dtype."""
        found: ExpertArrays = {}
        for name, part in (("gate", self.gate), ("up", self.up), ("down", self.down)):
            found[name] = part.weight(self.compute_dtype)
            if part.bias is not None:
                found[f"{name}_bias"] = part.bias[...].astype(self.compute_dtype)
        return found
