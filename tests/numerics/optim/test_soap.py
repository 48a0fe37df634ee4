"""SOAP against algorithms 3 and 4 of Vyas et al. 2024, written in float64 NumPy."""

import jax
import numpy as np
import pytest
from tests.numerics.optim.one_matrix import run

from fornax.optim import SOAP, AdamW, Constant, Linear, OptimConfig, build

RATE, B1, B2, SHAMPOO, DECAY, EPS = 0.03, 0.9, 0.95, 0.8, 0.1, 1e-8
CALLS, FREQUENCY = 8, 3


class Reference:
    """One matrix; a basis of None stands for the identity."""

    def __init__(self, weight, left, right):
        self.weight = weight.copy()
        self.use = (left, right)
        self.gram = [np.zeros((size, size)) for size in weight.shape]
        self.basis = [None, None]
        self.first = np.zeros_like(weight)
        self.second = np.zeros_like(weight)
        self.calls = 0

    def rotate(self, x, back=False):
        left, right = self.basis
        if left is not None:
            x = (left if back else left.T) @ x
        if right is not None:
            x = x @ (right.T if back else right)
        return x

    def update(self, g):
        if self.calls:
            t = self.calls
            self.first = B1 * self.first + (1 - B1) * g
            self.second = B2 * self.second + (1 - B2) * self.rotate(g) ** 2
            m = self.rotate(self.first) / (1 - B1**t)
            v = self.second / (1 - B2**t)
            step = self.rotate(m / (np.sqrt(v) + EPS), back=True)
        else:
            step = 0.0
        for side, outer in enumerate((g @ g.T, g.T @ g)):
            self.gram[side] = SHAMPOO * self.gram[side] + (1 - SHAMPOO) * outer
            if self.use[side] and self.calls == 0:
                self.basis[side] = np.linalg.eigh(self.gram[side])[1][:, ::-1]
            elif self.use[side] and self.calls % FREQUENCY == 0:
                self.basis[side] = np.linalg.qr(self.gram[side] @ self.basis[side])[0]
        self.weight -= RATE * (step + DECAY * self.weight)
        self.calls += 1


def soap(**more):
    optimizer = SOAP(
        b1=B1,
        b2=B2,
        shampoo_beta=SHAMPOO,
        eps=EPS,
        weight_decay=DECAY,
        precondition_frequency=FREQUENCY,
        **more,
    )
    return OptimConfig(optimizer=optimizer, learning_rate=RATE, schedule=Constant(), clip=())


def test_stacked_layers_follow_the_paper_each_on_its_own():
    rng = np.random.default_rng(0)
    start = rng.normal(size=(2, 6, 2, 3))
    grads = [rng.normal(size=start.shape) for _ in range(CALLS)]
    with jax.enable_x64(True):
        got, _ = run(soap(), start, ("layers", "embed", "heads", "head_dim"), grads)
    for layer in range(2):
        one = Reference(start[layer].reshape(6, 6), True, True)
        for grad in grads:
            one.update(grad[layer].reshape(6, 6))
        np.testing.assert_allclose(got[layer].reshape(6, 6), one.weight, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize(("shape", "left"), [((4, 9), True), ((9, 4), False)])
def test_a_side_over_the_limit_keeps_the_identity(shape, left):
    rng = np.random.default_rng(1)
    start = rng.normal(size=shape)
    grads = [rng.normal(size=shape) for _ in range(CALLS)]
    with jax.enable_x64(True):
        got, state = run(soap(max_precondition_dim=4), start, ("embed", "mlp"), grads)
        squares = [x.shape for x in jax.tree.leaves(state) if x.shape == (4, 4)]
    one = Reference(start, left, not left)
    for grad in grads:
        one.update(grad)
    np.testing.assert_allclose(got, one.weight, rtol=1e-8, atol=1e-10)
    assert len(squares) == 2


def test_float32_stays_close_to_float64():
    rng = np.random.default_rng(2)
    start = rng.normal(size=(5, 5))
    grads = [rng.normal(size=start.shape) for _ in range(CALLS)]
    got, _ = run(
        soap(),
        start.astype(np.float32),
        ("embed", "mlp"),
        [grad.astype(np.float32) for grad in grads],
    )
    one = Reference(start, True, True)
    for grad in grads:
        one.update(grad)
    np.testing.assert_allclose(got, one.weight, rtol=1e-4, atol=1e-4)


def test_soap_outruns_adam_on_a_rotated_valley():
    """A quadratic whose axes are not coordinates: the eigenbasis is what SOAP has over Adam."""
    rng = np.random.default_rng(3)
    basis = np.linalg.qr(rng.normal(size=(8, 8)))[0]
    curvature = (basis * np.logspace(-3, 0, 8)) @ basis.T
    start = rng.normal(size=(8, 8)).astype(np.float32)
    target = curvature.astype(np.float32)

    def loss(params):
        w = params["w"]
        return 0.5 * jax.numpy.sum(w * (target @ w))

    def final_loss(optimizer):
        config = OptimConfig(optimizer=optimizer, learning_rate=0.05, schedule=Linear(), clip=())
        params = {"w": jax.numpy.asarray(start)}
        built = build(config, total_steps=150, params=params, axes={"w": ("embed", "mlp")})

        def step(carry, _):
            params, state = carry
            return built.update(jax.grad(loss)(params), state, params), None

        (params, _), _ = jax.lax.scan(step, (params, built.init(params)), length=150)
        return float(loss(params))

    soap_loss = final_loss(SOAP(weight_decay=0.0, precondition_frequency=5))
    adam_loss = final_loss(AdamW(b1=0.95, weight_decay=0.0))
    assert soap_loss < 0.5 * adam_loss
