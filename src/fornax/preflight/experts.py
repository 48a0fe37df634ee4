"""A mixture of experts written down plainly: every expert on every token, weighed, and summed.

It shares parameters and activation with `models.Experts`, and neither the router's code, nor norms,
nor the sorting of tokens, nor grouped products, nor how tokens without room are found.

Legend: B rows, T tokens of a row, M = B T, D model width, F width of an expert, E experts.
"""

import dataclasses
import math

import jax
import jax.numpy as jnp
from flax import nnx

from fornax.models import ExpertsConfig, Routing
from fornax.models.context import LayerContext
from fornax.models.experts import Experts
from fornax.preflight.formulas import normed, over_root_mean_square

__all__ = ["PlainExperts"]


class PlainExperts(Experts):
    """The formula, in float32."""

    def __call__(
        self, x_BTD: jax.Array, context: LayerContext, residual_BTD: jax.Array | None = None
    ) -> tuple[jax.Array, Routing]:
        """Apply -> y [B, T, D], and what the router did."""
        shared_input_BTD = x_BTD
        routed_MD = x_MD = x_BTD.reshape(-1, x_BTD.shape[-1]).astype(jnp.float32)
        if self.config.separate_norms:  # router and experts read the stream itself
            assert residual_BTD is not None
            x_BTD = normed(residual_BTD, self.input_norm)
            x_MD, routed_MD = x_BTD.reshape(routed_MD.shape), self._scaled(residual_BTD)
        logits_ME = routed_MD @ _matrix(self.router.kernel)
        if self.router.bias is not None:
            logits_ME += self.router.bias[...]
        bias_E = 0.0 if self.selection_bias is None else self.selection_bias[...]
        scores_ME, chosen_ME = _choose(logits_ME, bias_E, self.config)
        weights_ME = jnp.where(chosen_ME, scores_ME, 0)
        if self.config.normalize:
            total_M1 = jnp.sum(weights_ME, axis=-1, keepdims=True)
            weights_ME = weights_ME / (total_M1 + self.config.normalize_eps)
        weights_ME = weights_ME * self.config.scale
        if self.expert_scale is not None:
            weights_ME = weights_ME * self.expert_scale[...].astype(jnp.float32)
        segments_BT = context.segment_ids_BT
        real_M = jnp.ones(len(x_MD), bool) if segments_BT is None else segments_BT.ravel() != 0
        run_ME, dropped_E = chosen_ME, None
        if context.drops_tokens and self.config.capacity_factor is not None:
            run_ME = _within(chosen_ME & real_M[:, None], x_BTD.shape[:2], self.config)
            dropped_E = jnp.sum(chosen_ME & real_M[:, None] & ~run_ME, axis=0, dtype=jnp.float32)
        weights_ME = jnp.where(run_ME, weights_ME, 0)
        y_BTD = self._weighed(x_MD, weights_ME, run_ME).reshape(x_BTD.shape)
        y_BTD = normed(y_BTD, self.output_norm)
        if self.shared is not None:
            shared_BTD = self.shared(shared_input_BTD)
            if self.shared_gate is not None:
                shared_BTD = shared_BTD * jax.nn.sigmoid(self.shared_gate(x_BTD))
            y_BTD = y_BTD + normed(shared_BTD, self.shared_norm)
        counted = _counts(logits_ME, scores_ME, chosen_ME, real_M)
        return y_BTD, dataclasses.replace(counted, dropped_E=dropped_E)

    def _scaled(self, residual_BTD: jax.Array) -> jax.Array:
        """What the router reads, [M, D]."""
        assert self.router_scale is not None
        x_MD = residual_BTD.reshape(-1, residual_BTD.shape[-1]).astype(jnp.float32)
        x_MD = over_root_mean_square(x_MD, 1, self.eps) / x_MD.shape[-1] ** 0.5
        return x_MD * self.router_scale[...].astype(jnp.float32)

    def _weighed(self, x_MD: jax.Array, weights_ME: jax.Array, chosen_ME: jax.Array) -> jax.Array:
        """The sum over all experts, those not chosen struck out."""
        rows_MED = jnp.broadcast_to(x_MD[:, None], (*weights_ME.shape, x_MD.shape[-1]))
        if self.config.weigh == "input":
            rows_MED = rows_MED * weights_ME[..., None]
            weights_ME = chosen_ME.astype(jnp.float32)
        parts = [jnp.einsum("med,edf->mef", rows_MED, _matrix(p.kernel)) for p in self._inner()]
        gate_MEF, up_MEF = (
            part if p.bias is None else part + p.bias[...]
            for part, p in zip(parts, self._inner(), strict=True)
        )
        y_MED = jnp.einsum(
            "mef,efd->med", self.activate(gate_MEF, up_MEF), _matrix(self.down.kernel)
        )
        if self.down.bias is not None:
            y_MED += self.down.bias[...]
        return jnp.einsum("med,me->md", y_MED, weights_ME)

    def _inner(self) -> tuple:
        return self.gate, self.up


def _matrix(kernel: nnx.Param) -> jax.Array:
    return kernel[...].astype(jnp.float32)


def _choose(
    logits_ME: jax.Array, bias_E: jax.Array | float, config: ExpertsConfig
) -> tuple[jax.Array, jax.Array]:
    """Scores, and which experts a token runs through: those whose rank is below k."""
    softmax = config.score == "softmax"
    scores_ME = jax.nn.softmax(logits_ME) if softmax else jax.nn.sigmoid(logits_ME)
    plain = isinstance(bias_E, float) and config.groups_per_token == config.num_groups
    ranked_ME = jax.lax.stop_gradient(logits_ME if plain else scores_ME + bias_E)
    groups = ranked_ME.reshape(len(ranked_ME), config.num_groups, -1)
    best = jnp.sort(groups, axis=-1)[..., -1 if config.group_score == "max" else -2 :].sum(-1)
    open_MG = _rank(best) < config.groups_per_token
    ranked_ME = jnp.where(open_MG[..., None], groups, -jnp.inf).reshape(ranked_ME.shape)
    return scores_ME, _rank(ranked_ME) < config.experts_per_token


def _within(chosen_ME: jax.Array, shape: tuple[int, ...], config: ExpertsConfig) -> jax.Array:
    """The chosen experts that have room: of each row the first ceil(f k T / E) by position."""
    assert config.capacity_factor is not None
    chosen_BTE = chosen_ME.reshape(*shape, -1)
    count_BTE = jnp.cumsum(chosen_BTE, axis=1)
    even = shape[1] * config.experts_per_token / config.num_experts
    room = math.ceil(round(config.capacity_factor * even, 6))
    return (chosen_BTE & (count_BTE <= room)).reshape(chosen_ME.shape)


def _rank(values: jax.Array) -> jax.Array:
    """How many in a row come before each: larger ones, and equal ones further left."""
    larger = values[..., None, :] > values[..., :, None]
    index = jnp.arange(values.shape[-1])
    equal = (values[..., None, :] == values[..., :, None]) & (index[None, :] < index[:, None])
    return jnp.sum(larger | equal, axis=-1)


def _counts(
    logits_ME: jax.Array, scores_ME: jax.Array, chosen_ME: jax.Array, real_M: jax.Array
) -> Routing:
    share_ME = scores_ME / jnp.sum(scores_ME, axis=-1, keepdims=True)
    real_M1 = real_M[:, None]
    return Routing(
        assigned_E=jnp.sum(jnp.where(real_M1, chosen_ME, 0), axis=0).astype(jnp.float32),
        probability_E=jnp.sum(jnp.where(real_M1, share_ME, 0), axis=0),
        squared_log_normaliser=jnp.sum(
            jnp.where(real_M, jnp.square(jax.nn.logsumexp(logits_ME, axis=-1)), 0)
        ),
        entropy=jnp.zeros(()),  # a metric, which nothing is compared with
        tokens=jnp.sum(real_M).astype(jnp.float32),
    )
