"""Faults planted in multi-token prediction: each is found, and without one all checks pass."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from fornax.models import decoder, mtp
from fornax.preflight.shrink_decoder import shrink
from fornax.train.tasks import pretrain

from .conftest import EXPERTS, QWEN3, RunChecks, configure
from .test_faults import failed

MODEL = {**QWEN3, "num_layers": 1, "num_mtp_modules": 1}
DATA = {
    "model": MODEL,
    "mtp_weight": 0.5,
    "mesh": {"fsdp": 1, "data": 2},
    "accumulate": 1,
    "remat": "none",
    "dtypes": {},
}


def _token_at(monkeypatch: pytest.MonkeyPatch, more: int) -> None:
    run = mtp.run_modules

    def other(modules: Any, config: Any, x: Any, embedded: Any, *rest: Any, **more_: Any) -> Any:
        return run(modules, config, x, lambda on: embedded(on + more), *rest, **more_)

    monkeypatch.setattr(decoder, "run_modules", other)


def sees_its_target(monkeypatch: pytest.MonkeyPatch) -> None:
    """A module is given the token that it predicts."""
    _token_at(monkeypatch, 1)


def sees_its_own_token(monkeypatch: pytest.MonkeyPatch) -> None:
    """A module is given the token that the model has read already, not the next one."""
    _token_at(monkeypatch, -1)


def _loss(monkeypatch: pytest.MonkeyPatch, change: Callable[..., tuple[Any, Any]]) -> None:
    """Modules have another target or weight; their loss is the one without a z-loss."""
    entropy = pretrain.linear_cross_entropy

    def changed(x: Any, w: Any, targets: Any, weights: Any, **options: Any) -> Any:
        if "z_loss" not in options:
            targets, weights = change(targets, weights)
        return entropy(x, w, targets, weights, **options)

    monkeypatch.setattr(pretrain, "linear_cross_entropy", changed)


def predicts_the_next_token(monkeypatch: pytest.MonkeyPatch) -> None:
    """A module's target is the token that it was given."""
    _loss(monkeypatch, lambda targets, weights: (jnp.roll(targets, 1, axis=1), weights))


def predicts_across_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last token of a document but one has a target: the first of the next document."""
    add = pretrain.add_further_tokens

    def one_document(loss: Any, model: Any, batch: Any, *rest: Any) -> Any:
        return add(
            loss, model, {**batch, "segment_ids": jnp.ones_like(batch["segment_ids"])}, *rest
        )

    monkeypatch.setattr(pretrain, "add_further_tokens", one_document)


def other_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """The hidden state comes first in what is projected."""

    def swapped(self: Any, x_BTD: jax.Array, embedded_BTD: jax.Array) -> jax.Array:
        both = (self.hidden_norm(x_BTD), self.embed_norm(embedded_BTD))
        return self.projection(jnp.concatenate(both, axis=-1))

    monkeypatch.setattr(mtp.MTPModule, "layer_input", swapped)


def weighs_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """The loss of modules has twice its weight."""
    add = pretrain.add_further_tokens
    monkeypatch.setattr(pretrain, "add_further_tokens", lambda *a: add(*a[:-1], 2 * a[-1]))


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "plant",
    [
        sees_its_target,
        predicts_across_the_end,
        pytest.param(sees_its_own_token, marks=pytest.mark.exhaustive),
        pytest.param(predicts_the_next_token, marks=pytest.mark.exhaustive),
        pytest.param(other_order, marks=pytest.mark.exhaustive),
        pytest.param(weighs_twice, marks=pytest.mark.exhaustive),
    ],
    ids=lambda plant: plant.__name__,
)
def test_a_fault_in_multi_token_prediction(
    plant: Callable[[pytest.MonkeyPatch], None],
    run_checks: RunChecks,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plant(monkeypatch)
    assert "data=2" in failed(run_checks("mesh", **DATA))


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [
        pytest.param(
            {"mesh": {"fsdp": 2, "context": 2}, "accumulate": 2, "remat": "dots"},
            marks=pytest.mark.exhaustive,
        ),
        pytest.param(
            {
                "model": {**EXPERTS, "num_mtp_modules": 2},
                "mesh": {"fsdp": 2, "expert": 2},
                "remat": "full",
            },
            marks=pytest.mark.exhaustive,
        ),
        pytest.param(
            {"mesh": {"fsdp": 2, "tensor": 2}, "dtypes": {"compute": "bfloat16"}},
            marks=pytest.mark.exhaustive,
        ),
    ],
    ids=["context", "experts", "bfloat16"],
)
def test_multi_token_prediction_without_a_fault_passes(
    changes: dict[str, Any], run_checks: RunChecks
) -> None:
    report = run_checks("mesh", "packing", "attention", "precision", **{**DATA, **changes})
    assert not failed(report)
    assert {check.group for check in report.checks} >= {"mesh", "packing", "attention"}


def test_at_most_two_modules_stay() -> None:
    for count, left in ((1, 1), (4, 2)):
        config = configure({**MODEL, "num_mtp_modules": count}, mtp_weight=0.5)
        model = shrink(config).config.model
        assert model is not None
        assert model.num_mtp_modules == left
