"""PPO: a value head predicts the return at each token.

Legend: R rows, T tokens of a row, D model width.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from fornax.kernels import linear_logprobs
from fornax.mesh import Rules
from fornax.models import Decoder, Remat, TokenLogprobs
from fornax.train.routing import with_routing
from fornax.train.task import Batch, Loss, Task
from fornax.tune import losses
from fornax.tune.config import PPOConfig
from fornax.tune.policy import Origin
from fornax.tune.rl.components import make_components
from fornax.tune.rl.credit import Credit, KLController, divergence, gae_credit
from fornax.tune.rl.forward import ROUTED, ValueParam, attach_value_head, value_head
from fornax.tune.rl.loss import PolicyLoss, policy_loss
from fornax.tune.rl.packing import Scored
from fornax.tune.rl.rollouts import Rollout
from fornax.tune.rl.task import Components, Objective, rl_task

__all__ = ["make", "ppo_objective", "ppo_task"]


def make(config: PPOConfig, origin: Origin, out: Path) -> Task:
    """The task of `fornax tune ppo`."""
    return ppo_task(config, make_components(config, origin, out))


def with_value_head(components: Components) -> Components:
    """The same, with a value head on the policy, trained with it."""
    pretrained = components.pretrained

    def build(rngs: nnx.Rngs) -> Decoder:
        return attach_value_head(components.build(rngs))

    def load(mesh: Mesh, rules: Rules) -> Decoder:
        assert pretrained is not None
        return attach_value_head(pretrained(mesh, rules))

    return replace(
        components,
        build=build,
        pretrained=None if pretrained is None else load,
        trained=nnx.Any(components.trained, ValueParam),
    )


def ppo_task(config: PPOConfig, components: Components) -> Task:
    """PPO with any policy, prompts, rewards and sampler."""
    return rl_task(config, with_value_head(components), ppo_objective(config))


def ppo_objective(config: PPOConfig) -> Objective:
    """What PPO's steps compute, and its advantages."""
    options = PolicyLoss(
        clip_low=config.clip_low,
        clip_high=config.clip_high,
        clip_dual=config.clip_dual,
        entropy_coefficient=config.entropy_coefficient,
        importance=config.importance,
    )
    controller = KLController(config=config.kl)
    reference = config.kl.coefficient > 0
    forward = Forward(
        temperature=config.rollout.temperature,
        remat=config.resolved_remat(),
        head_alone=config.value_gradient == "head",
    )

    def loss(model: Decoder, batch: Batch) -> Loss:
        found, values_RT = forward.of(model, batch, entropy=True)
        rows = {name: x for name, x in batch.items() if name != "ref_logps"}
        policy = policy_loss(options, rows, found)
        loss = _with_values(config, policy, batch, values_RT)
        return with_routing(loss, model, found.routing, balance=False)

    def credit(rollouts: Sequence[Rollout], scored: Scored) -> Credit:
        costs = [np.zeros(len(r.tokens)) for r in rollouts]
        if reference:
            pairs = zip(scored["old_logps"], scored["ref_logps"], strict=True)
            costs = [controller.coefficient * divergence(old, ref, "k1") for old, ref in pairs]
        return gae_credit(
            rollouts,
            [r.reward - config.truncated_penalty * r.truncated for r in rollouts],
            scored["old_values"],
            costs=costs,
            gamma=config.gamma,
            lam=config.gae_lambda,
            whiten_rewards=config.whiten_rewards,
            whiten_advantages=config.whiten_advantages,
        )

    return Objective(
        loss=loss,
        score=forward,
        reference=replace(forward, reference=True) if reference else None,
        credit=credit,
        aggregation="token_mean",
        controller=controller,
    )


@dataclass(frozen=True, kw_only=True)
class Forward:
    """Log-probabilities of the rows' targets and values, from one pass through the layers."""

    temperature: float
    remat: Remat
    head_alone: bool
    """Whether the values' gradient stops at the hidden states."""
    reference: bool = False
    """Whether it is the reference that is asked, which has no values and whose routers choose."""

    def __call__(self, model: Decoder, rows: Batch) -> Mapping[str, jax.Array]:
        """Arrays [R, T] by the rows' names."""
        found, values_RT = self.of(model, rows)
        if self.reference:
            return {"ref_logps": found.logprobs}
        return {"old_logps": found.logprobs, "old_values": values_RT}

    def of(
        self, model: Decoder, rows: Batch, *, entropy: bool = False
    ) -> tuple[TokenLogprobs, jax.Array]:
        """Log-probabilities and values [R, T].

        The same two calls as `models.token_logprobs`, whose hidden states the value head needs too.
        """
        x_RTD, routing = model.hidden_and_routing(
            rows["tokens"],
            rows["positions"],
            rows["segment_ids"],
            consecutive=True,
            remat=self.remat,
            routed_experts_BTLk=None if self.reference else rows.get(ROUTED),
        )
        found = linear_logprobs(
            x_RTD,
            model.output_weights().astype(x_RTD.dtype),
            rows["targets"],
            temperature=self.temperature,
            softcap=model.config.final_logit_softcap,
            entropy=entropy,
        )
        shown = jax.lax.stop_gradient(x_RTD) if self.head_alone else x_RTD
        found = TokenLogprobs(found.logprobs, found.entropy, routing)
        return found, value_head(model)(shown)


def _with_values(config: PPOConfig, policy: Loss, batch: Batch, values_RT: jax.Array) -> Loss:
    """The policy's loss and the value function's, whose tokens count alike."""
    mask_RT = batch["loss_mask"]
    loss_RT, figures = losses.value_loss(
        values_RT,
        batch["returns"],
        mask_RT,
        old_values_BT=batch["old_values"],
        clip=config.value_clip,
    )
    tokens = jnp.sum(mask_RT)
    total = jnp.sum(loss_RT * batch["token_weights"])
    metrics = {
        "value_loss": (total, policy.weight),
        "value_clip_fraction": (jnp.sum(figures["clipped"] * mask_RT), tokens),
        "value_mean": (jnp.sum(values_RT * mask_RT), tokens),
        "return_mean": (jnp.sum(batch["returns"] * mask_RT), tokens),
    }
    return replace(
        policy,
        total=policy.total + config.value_coefficient * total,
        metrics=policy.metrics | jax.lax.stop_gradient(metrics),
    )
