"""Distillation losses and their gradients against TRL's, on the same logits and hidden states.

Legend: B rows, T tokens, D and E width of student and teacher, V vocabulary.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from trl.experimental.gkd import GKDTrainer
from trl.trainer.distillation_trainer import _chunked_divergence_loss

from fornax.tune import losses

pytestmark = pytest.mark.parity
B, T, D, E, V = 2, 5, 8, 12, 19
CASES = {0.0: "forward_kl", 1.0: "reverse_kl", 0.3: "jensen_shannon"}


@pytest.mark.parametrize("beta", CASES)
def test_divergences_of_logits(beta: float) -> None:
    rng = np.random.default_rng(0)
    student, teacher = rng.normal(size=(2, B, T, V)).astype(np.float32) * 2
    labels = np.where(rng.random((B, T)) < 0.3, -100, 1)
    own = torch.from_numpy(student).requires_grad_()
    their_loss = GKDTrainer.generalized_jsd_loss(
        own, torch.from_numpy(teacher), torch.from_numpy(labels), beta=beta, temperature=1.7
    )
    their_loss.backward()
    options = {"beta": beta} if 0 < beta < 1 else {}
    run = getattr(losses, CASES[beta])

    @jax.jit
    @jax.value_and_grad
    def ours(student: jax.Array) -> jax.Array:
        loss_BT, _ = run(student, jnp.asarray(teacher), temperature=1.7, **options)
        counted = labels != -100
        return jnp.sum(loss_BT * counted) / counted.sum()

    value, slope = ours(jnp.asarray(student))
    np.testing.assert_allclose(float(value), float(their_loss.detach()), rtol=1e-5)
    np.testing.assert_allclose(slope, own.grad.numpy(), atol=1e-6)


@pytest.mark.parametrize("beta", CASES)
def test_chunked_from_hidden_states(beta: float) -> None:
    rng = np.random.default_rng(1)
    x, w = rng.normal(size=(B, T, D)), rng.normal(size=(D, V))
    teacher_x, teacher_w = rng.normal(size=(B, T, E)), rng.normal(size=(E, V))
    mask = (rng.random((B, T)) < 0.7).astype(np.float32)
    x, w, teacher_x, teacher_w = (a.astype(np.float32) for a in (x, w, teacher_x, teacher_w))
    own_x, own_w = torch.from_numpy(x).requires_grad_(), torch.from_numpy(w.T.copy())
    own_w.requires_grad_()
    their_loss, _, count = _chunked_divergence_loss(
        own_x,
        torch.from_numpy(teacher_x),
        own_w,
        torch.from_numpy(teacher_w.T.copy()),
        torch.from_numpy(mask),
        beta,
        student_final_logit_softcapping=3.0,
        teacher_final_logit_softcapping=4.0,
        temperature=1.7,
    )
    their_loss.backward()
    assert int(count) == mask.sum()

    @jax.jit
    def ours(x: jax.Array, w: jax.Array) -> jax.Array:
        sums = losses.linear_distillation(
            x,
            w,
            jnp.asarray(teacher_x),
            jnp.asarray(teacher_w),
            jnp.asarray(mask),
            divergence=CASES[beta],
            beta=beta,
            temperature=1.7,
            softcap=3.0,
            teacher_softcap=4.0,
            chunk=4,
        )
        return sums.loss_sum / sums.weight_sum

    value, (dx, dw) = jax.jit(jax.value_and_grad(ours, (0, 1)))(jnp.asarray(x), jnp.asarray(w))
    np.testing.assert_allclose(float(value), float(their_loss.detach()), rtol=1e-5)
    np.testing.assert_allclose(dx, own_x.grad.numpy(), atol=1e-6)
    np.testing.assert_allclose(dw, own_w.grad.numpy().T, atol=1e-6)
