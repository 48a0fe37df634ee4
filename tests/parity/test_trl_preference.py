"""Preference losses and their gradients against TRL's own trainers, on the same weights and tokens.

Legend: P pairs; B rows, chosen ones before rejected ones as TRL has them; T tokens of a row.
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
from trl import DPOTrainer, KTOTrainer, RewardTrainer
from trl.experimental.cpo import CPOTrainer
from trl.experimental.orpo import ORPOTrainer
from trl.trainer.utils import add_fused_lm_head

from fornax.tune import losses

pytestmark = [
    pytest.mark.parity,
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"),
]
BATCH = setup.rows(0)
MASK_BT = setup.length_mask(BATCH)
FUSED = ("log_probs", "entropy", "mean_logits", "is_top1")


def _fused(seed: int = 0) -> Any:
    model = copy.deepcopy(setup.theirs(seed))
    add_fused_lm_head(model, outputs=FUSED)
    return model


def _torch(**arrays: np.ndarray) -> dict[str, torch.Tensor]:
    return {name: torch.from_numpy(np.asarray(array)) for name, array in arrays.items()}


def _given() -> dict[str, torch.Tensor]:
    return _torch(
        input_ids=BATCH["input_ids"],
        attention_mask=BATCH["real"],
        completion_mask=BATCH["completion"],
    )


def _pairs(values_B: jax.Array) -> jax.Array:
    return jnp.stack(jnp.split(values_B, 2), axis=-1)


def _sums(logps_BT: jax.Array, *, mean: bool = False) -> jax.Array:
    sums_B = jnp.sum(logps_BT * MASK_BT, axis=1)
    return _pairs(losses.average(sums_B, MASK_BT.sum(1)) if mean else sums_B)


def _dpo_trainer(model: Any, kind: str, beta: float, smoothing: float) -> Any:
    return setup.bare(
        DPOTrainer,
        model,
        ref_model=_fused(1),
        loss_types=[kind],
        loss_weights=[1.0],
        beta=beta,
        label_smoothing=smoothing,
        f_divergence_type="reverse_kl",
        precompute_ref_logps=False,
        use_weighting=False,
        ld_alpha=None,
        args=SimpleNamespace(gradient_checkpointing_kwargs=None),
    )


@pytest.mark.parametrize(
    ("kind", "smoothing", "loss"),
    [
        ("sigmoid", 0.0, losses.dpo),
        ("robust", 0.2, losses.robust_dpo),
        ("ipo", 0.0, losses.ipo),
    ],
)
def test_dpo_and_its_variants(kind: str, smoothing: float, loss: Any) -> None:
    model = _fused()
    trainer = _dpo_trainer(model, kind, 0.3, smoothing)
    their_loss = trainer._compute_loss(model, _given(), False)
    mean = kind == "ipo"
    ref_P2 = _sums(setup.our_logps(BATCH, seed=1), mean=mean)
    options = {"label_smoothing": smoothing} if smoothing else {}

    def ours(logps_BT: jax.Array) -> jax.Array:
        return jnp.mean(loss(_sums(logps_BT, mean=mean), ref_P2, beta=0.3, **options)[0])

    setup.assert_same(ours, BATCH, their_loss, model)
    if kind == "sigmoid":
        _, metrics = losses.dpo(_sums(setup.our_logps(BATCH)), ref_P2, beta=0.3)
        logged = trainer._metrics["eval"]
        for name, other in [
            ("rewards/chosen", "reward_chosen"),
            ("rewards/rejected", "reward_rejected"),
            ("rewards/margins", "reward_margin"),
            ("rewards/accuracies", "accuracy"),
        ]:
            np.testing.assert_allclose(metrics[other].mean(), logged[name][0], rtol=1e-4, atol=1e-6)


def test_kto() -> None:
    """TRL averages the baseline over a micro-batch; ours is whatever mean the task hands in."""
    model, other = _fused(), setup.rows(7)
    desirable_B = np.array([True, False, False, True, False, True])
    trainer = setup.bare(
        KTOTrainer,
        model,
        ref_model=_fused(1),
        calculate_KL=True,
        precompute_ref_logps=False,
        loss_type="kto",
        beta=0.3,
        desirable_weight=1.5,
        undesirable_weight=0.75,
        args=SimpleNamespace(gradient_checkpointing_kwargs=None),
    )
    mismatched = _torch(
        KL_input_ids=other["input_ids"],
        KL_attention_mask=other["real"],
        KL_completion_mask=other["completion"],
    )
    given = {**_given(), **mismatched, "label": torch.from_numpy(desirable_B)}
    their_loss = trainer._compute_loss(model, given, False)
    other_mask_BT = setup.length_mask(other)
    kl = losses.kto_kl(
        *(jnp.sum(setup.our_logps(other, seed=seed) * other_mask_BT, axis=1) for seed in (0, 1))
    )
    np.testing.assert_allclose(float(kl), trainer._metrics["eval"]["kl"][0], rtol=1e-4, atol=1e-5)
    ref_B = jnp.sum(setup.our_logps(BATCH, seed=1) * MASK_BT, axis=1)

    def ours(logps_BT: jax.Array) -> jax.Array:
        policy_B = jnp.sum(logps_BT * MASK_BT, axis=1)
        weights = {"desirable_weight": 1.5, "undesirable_weight": 0.75}
        return jnp.mean(losses.kto(policy_B, ref_B, desirable_B, kl, beta=0.3, **weights)[0])

    setup.assert_same(ours, BATCH, their_loss, model)


def _labelled() -> dict[str, torch.Tensor]:
    """The columns that ORPO's and CPO's trainers join themselves."""
    half = setup.ROWS // 2
    labels = np.where(BATCH["completion"], BATCH["input_ids"], -100)
    columns = {"input_ids": BATCH["input_ids"], "attention_mask": BATCH["real"], "labels": labels}
    return _torch(
        **{f"chosen_{name}": array[:half] for name, array in columns.items()},
        **{f"rejected_{name}": array[half:] for name, array in columns.items()},
    )


def _nll(logps_BT: jax.Array, mask_BT: np.ndarray) -> jax.Array:
    half = setup.ROWS // 2
    return -jnp.sum((logps_BT * mask_BT)[:half]) / mask_BT[:half].sum()


def test_orpo() -> None:
    """TRL adds the negative log-likelihood of the chosen prompt AND completion."""
    model = copy.deepcopy(setup.theirs())
    trainer = setup.bare(
        ORPOTrainer,
        model,
        beta=0.3,
        is_encoder_decoder=False,
        padding_value=0,
        label_pad_token_id=-100,
    )
    their_loss, logged = trainer.get_batch_loss_metrics(model, _labelled())

    def ours(logps_BT: jax.Array) -> jax.Array:
        ratio_P, _ = losses.orpo(_sums(logps_BT, mean=True), beta=0.3)
        return jnp.mean(ratio_P) + _nll(logps_BT, BATCH["real"][:, 1:])

    setup.assert_same(ours, BATCH, their_loss, model)
    _, metrics = losses.orpo(_sums(setup.our_logps(BATCH), mean=True), beta=0.3)
    np.testing.assert_allclose(
        metrics["log_odds_ratio"].mean(), logged["log_odds_chosen"], rtol=1e-4, atol=1e-6
    )


@pytest.mark.parametrize(
    ("kind", "smoothing"), [("sigmoid", 0.0), ("sigmoid", 0.2), ("simpo", 0.1)]
)
def test_cpo_and_simpo(kind: str, smoothing: float) -> None:
    model = copy.deepcopy(setup.theirs())
    trainer = setup.bare(
        CPOTrainer,
        model,
        beta=0.7,
        loss_type=kind,
        simpo_gamma=0.4,
        label_smoothing=smoothing,
        cpo_alpha=0.0 if kind == "simpo" else 0.5,
        alpha=0.0,
        is_encoder_decoder=False,
        pad_token_id=0,
        label_pad_token_id=-100,
    )
    their_loss, _ = trainer.get_batch_loss_metrics(model, _labelled())
    options = {"beta": 0.7, "label_smoothing": smoothing}

    def ours(logps_BT: jax.Array) -> jax.Array:
        if kind == "simpo":
            return jnp.mean(losses.simpo(_sums(logps_BT, mean=True), gamma=0.4, **options)[0])
        loss_P, _ = losses.cpo(_sums(logps_BT), **options)
        return jnp.mean(loss_P) + 0.5 * _nll(logps_BT, MASK_BT)

    setup.assert_same(ours, BATCH, their_loss, model)


@pytest.mark.parametrize(("margin", "centre"), [(False, None), (True, 0.05)])
def test_reward_model(margin: bool, centre: float | None) -> None:
    rng = np.random.default_rng(3)
    scores_P2, margin_P = rng.normal(size=(4, 2)).astype(np.float32), np.full(4, 0.3, np.float32)
    scores = torch.from_numpy(scores_P2.T.reshape(-1, 1).copy()).requires_grad_()

    def model(**given: Any) -> Any:
        return SimpleNamespace(logits=scores)

    trainer = setup.bare(RewardTrainer, torch.nn.Linear(1, 1).eval())
    trainer.args = SimpleNamespace(center_rewards_coefficient=centre)
    given = {"attention_mask": torch.ones(8, 2), "margin": torch.from_numpy(margin_P)}
    if not margin:
        del given["margin"]
    their_loss = trainer.compute_loss(model, given)
    their_loss.backward()

    def ours(scores_P2: jax.Array) -> jax.Array:
        given_P = jnp.asarray(margin_P) if margin else None
        return jnp.mean(losses.bradley_terry(scores_P2, given_P, centre=centre or 0.0)[0])

    value, slope_P2 = jax.value_and_grad(ours)(jnp.asarray(scores_P2))
    np.testing.assert_allclose(float(value), float(their_loss.detach()), rtol=1e-6)
    np.testing.assert_allclose(slope_P2, scores.grad.numpy().reshape(2, 4).T, atol=1e-7)
