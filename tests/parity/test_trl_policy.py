"""Policy-gradient losses and their gradients against TRL's own trainers, on the same tokens.

Legend: B rows, T tokens of a row, C tokens of a completion.
"""

import copy
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from tests.parity import trl_setup as setup
from trl import GRPOTrainer, RLOOTrainer
from trl.trainer.utils import add_fused_lm_head, nanstd

from fornax.tune import advantages, losses

pytestmark = pytest.mark.parity
BATCH = setup.rows(0, left=True)
MASK_BT = setup.length_mask(BATCH)
LENGTHS_B = MASK_BT.sum(1)
TEMPERATURE = 0.7
COMPLETION = setup.LENGTH - setup.PROMPT


def _noise(seed: int, scale: float) -> np.ndarray:
    """What moves log-probabilities apart, [B, T - 1]; 0 on prompts."""
    rng = np.random.default_rng(seed)
    return (scale * rng.normal(size=MASK_BT.shape) * MASK_BT).astype(np.float32)


def _logps() -> jax.Array:
    return setup.our_logps(BATCH, temperature=TEMPERATURE)


ADVANTAGES_B = np.array([1.2, -0.7, 0.4, -1.5, 0.9, -0.3], np.float32)

# name: (TRL's loss type, its other settings, our options of the loss, our aggregation)
CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "grpo": ("grpo", {}, {}, {"mode": "sequence_mean"}),
    "dapo": ("dapo", {"epsilon_high": 0.28}, {"clip_high": 0.28}, {"mode": "token_mean"}),
    "bnpo": ("bnpo", {}, {}, {"mode": "token_mean"}),
    "dr_grpo": ("dr_grpo", {}, {}, {"mode": "constant", "max_length": COMPLETION}),
    "dual clip": ("grpo", {"delta": 1.3}, {"clip_c": 1.3}, {"mode": "sequence_mean"}),
    "gspo": (
        "grpo",
        {"level": "sequence", "epsilon_low": 0.05, "epsilon_high": 0.04},
        {"ratio": "sequence", "clip_low": 0.05, "clip_high": 0.04},
        {"mode": "sequence_mean"},
    ),
    "kl": ("grpo", {"beta": 0.4}, {}, {"mode": "sequence_mean"}),
}


def _trainer(model: Any, loss_type: str, settings: dict[str, Any]) -> Any:
    settings = dict(settings)
    args = SimpleNamespace(
        delta=settings.pop("delta", None), use_bias_correction_kl=False, steps_per_generation=1
    )
    attributes = {
        "args": args,
        "loss_type": loss_type,
        "importance_sampling_level": settings.pop("level", "token"),
        "epsilon_low": 0.2,
        "epsilon_high": 0.2,
        "beta": 0.0,
        "top_entropy_quantile": 1.0,
        "off_policy_mask_threshold": None,
        "use_vllm": False,
        "vllm_importance_sampling_correction": True,
        "max_completion_length": COMPLETION,
        "current_gradient_accumulation_steps": 1,
        "_entropy_bonus_enabled": False,
        **settings,
    }
    return setup.bare(GRPOTrainer, model, **attributes)


def _model() -> Any:
    model = copy.deepcopy(setup.theirs())
    add_fused_lm_head(model, temperature=TEMPERATURE, outputs=("log_probs", "entropy"))
    return model


def _given(**extra: np.ndarray) -> dict[str, torch.Tensor]:
    """What TRL's losses take; arrays [B, T - 1] are cut to the completion."""
    given = {
        "prompt_ids": BATCH["input_ids"][:, : setup.PROMPT],
        "prompt_mask": BATCH["real"][:, : setup.PROMPT],
        "completion_ids": BATCH["input_ids"][:, setup.PROMPT :],
        "completion_mask": BATCH["completion"][:, setup.PROMPT :],
        "advantages": ADVANTAGES_B,
        "num_items_in_batch": LENGTHS_B.sum(),
    }
    for name, array in extra.items():
        given[name] = array[:, -COMPLETION:] if np.ndim(array) == 2 else array
    return {name: torch.from_numpy(np.array(array)) for name, array in given.items()}


def _together(loss_BT: jax.Array, **aggregation: Any) -> jax.Array:
    weights = advantages.aggregation_weights(LENGTHS_B, **aggregation)
    return jnp.sum(loss_BT * weights.token_N[:, None]) / weights.normaliser_N.sum()


@pytest.mark.parametrize("name", CASES)
def test_grpo_and_its_variants(name: str) -> None:
    loss_type, settings, options, aggregation = CASES[name]
    old_BT = np.asarray(_logps()) + _noise(1, 0.3)
    ref_BT = np.asarray(_logps()) + _noise(2, 0.3)
    model = _model()
    trainer = _trainer(model, loss_type, settings)
    given = _given(old_per_token_logps=old_BT, ref_per_token_logps=ref_BT)
    their_loss = trainer._compute_loss(model, given)

    def ours(logps_BT: jax.Array) -> jax.Array:
        loss_BT, _ = losses.policy_gradient(
            logps_BT, old_BT, ADVANTAGES_B[:, None], MASK_BT, **options
        )
        if "beta" in settings:
            kl_BT = losses.kl_penalty(logps_BT, ref_BT, gradient="estimator")
            loss_BT += settings["beta"] * kl_BT * MASK_BT
        return _together(loss_BT, **aggregation)

    setup.assert_same(ours, BATCH, their_loss, model, temperature=TEMPERATURE)
    if name == "dapo":
        _, metrics = losses.policy_gradient(
            _logps(), old_BT, ADVANTAGES_B[:, None], MASK_BT, **options
        )
        found = np.sum(metrics["clipped"] * MASK_BT) / MASK_BT.sum()
        expected = trainer._metrics["eval"]["clip_ratio/region_mean"][0]
        assert 0 < expected < 1
        np.testing.assert_allclose(found, expected, rtol=1e-6)


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("outside", ["truncate", "drop"])
def test_truncated_importance_sampling(level: str, outside: str) -> None:
    """The weights' formula is in the middle of TRL's rollout code; the loss is its own."""
    old_BT = np.asarray(_logps()) + _noise(1, 0.1)
    sampler_BT = old_BT + _noise(4, 0.5)
    weights_BT, metrics = losses.truncated_importance(
        old_BT, sampler_BT, MASK_BT, cap=1.3, floor=0.6, level=level, outside=outside
    )
    assert 0 < np.sum(metrics["truncated"]) < MASK_BT.sum()
    difference = torch.from_numpy((old_BT - sampler_BT) * MASK_BT)[:, -COMPLETION:]
    if level == "sequence":
        difference = difference.sum(-1, keepdim=True)
    exact = torch.exp(difference)
    out = (exact < 0.6) | (exact > 1.3)
    theirs = exact.masked_fill(out, 0.0) if outside == "drop" else exact.clamp(0.6, 1.3)
    model = _model()
    trainer = _trainer(model, "dapo", {"use_vllm": True})
    given = {**_given(old_per_token_logps=old_BT), "importance_sampling_ratio": theirs}
    their_loss = trainer._compute_loss(model, given)

    def ours(logps_BT: jax.Array) -> jax.Array:
        loss_BT, _ = losses.policy_gradient(
            logps_BT, old_BT, ADVANTAGES_B[:, None], MASK_BT, is_weights_BT=weights_BT
        )
        return _together(loss_BT, mode="token_mean")

    setup.assert_same(ours, BATCH, their_loss, model, temperature=TEMPERATURE)


def test_rloo() -> None:
    """TRL's newest RLOO clips the product ratio of a whole completion."""
    old_BT = np.asarray(_logps()) + _noise(1, 0.05)
    model = _model()
    trainer = setup.bare(RLOOTrainer, model, epsilon_low=0.1, epsilon_high=0.1)
    old_B = np.sum(old_BT * MASK_BT, axis=1)
    their_loss = trainer._compute_loss(model, _given(old_logps=old_B))

    def ours(logps_BT: jax.Array) -> jax.Array:
        loss_BT, _ = losses.policy_gradient(
            logps_BT,
            old_BT,
            ADVANTAGES_B[:, None],
            MASK_BT,
            ratio="product",
            clip_low=0.1,
            clip_high=0.1,
        )
        return _together(loss_BT, mode="sequence_mean")

    setup.assert_same(ours, BATCH, their_loss, model, temperature=TEMPERATURE)


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
def test_group_relative_advantages(scale: str) -> None:
    """With TRL's own deviation; the line around it stands inside its rollout code."""
    rng = np.random.default_rng(0)
    rewards_NG = rng.normal(size=(3, 4)).astype(np.float32)
    rewards_NG[1, 2] = np.nan
    rewards = torch.from_numpy(rewards_NG)
    centred = rewards - torch.nanmean(rewards, dim=1, keepdim=True)
    deviation = {"group": nanstd(rewards, dim=1, keepdim=True), "batch": nanstd(rewards)}
    expected = centred / (deviation[scale] + 1e-4) if scale in deviation else centred
    found = advantages.group_relative(rewards_NG, scale=scale)
    np.testing.assert_allclose(found, torch.nan_to_num(expected, nan=0.0), rtol=2e-5, atol=1e-6)
