"""Shampoo against Anil et al. 2020, written in float64 NumPy, block by block."""

import itertools

import jax
import numpy as np
import pytest
from tests.numerics.optim.one_matrix import run

from fornax.optim import AdamW, Constant, Linear, OptimConfig, Shampoo, build

RATE, B1, B2, DECAY, EPS, RIDGE = 0.03, 0.8, 0.9, 0.1, 1e-8, 1e-4
CALLS, INTERVAL, START = 9, 3, 2


def inverse_fourth_root(a):
    """By Schur-free means: two square roots, each from an SVD, of the ridged inverse."""
    ridged = a + RIDGE * np.linalg.norm(a, 2) * np.eye(len(a))
    root = np.linalg.inv(ridged)
    for _ in range(2):
        u, s, _ = np.linalg.svd(root)
        root = (u * np.sqrt(s)) @ u.T
    return root


class Reference:
    """One matrix, in blocks cut at the given rows and columns."""

    def __init__(self, weight, row_cuts, col_cuts, grafting):
        self.weight = weight.copy()
        rows, cols = [0, *row_cuts, weight.shape[0]], [0, *col_cuts, weight.shape[1]]
        self.blocks = [
            (slice(*r), slice(*c))
            for r in itertools.pairwise(rows)
            for c in itertools.pairwise(cols)
        ]
        self.left = [0.0 for _ in self.blocks]
        self.right = [0.0 for _ in self.blocks]
        self.roots = [(None, None) for _ in self.blocks]
        self.square = np.zeros_like(weight)
        self.momentum = np.zeros_like(weight)
        self.grafting = grafting
        self.calls = 0

    def grafted(self, g):
        if self.grafting == "sgd":
            return g
        if self.grafting == "adagrad":
            self.square = self.square + g**2
            return g / (np.sqrt(self.square) + EPS)
        self.square = B2 * self.square + (1 - B2) * g**2
        return g / (np.sqrt(self.square / (1 - B2 ** (self.calls + 1))) + EPS)

    def update(self, g):
        like = self.grafted(g)
        p = np.zeros_like(g)
        for number, block in enumerate(self.blocks):
            part = g[block]
            self.left[number] = B2 * self.left[number] + (1 - B2) * part @ part.T
            self.right[number] = B2 * self.right[number] + (1 - B2) * part.T @ part
            if self.calls >= START and (self.calls - START) % INTERVAL == 0:
                self.roots[number] = (
                    inverse_fourth_root(self.left[number]),
                    inverse_fourth_root(self.right[number]),
                )
            if self.calls >= START:
                left, right = self.roots[number]
                p[block] = left @ part @ right
        step = like
        if self.calls >= START:
            step = p * np.linalg.norm(like) / np.linalg.norm(p)
        self.momentum = B1 * self.momentum + (1 - B1) * step
        unbiased = self.momentum / (1 - B1 ** (self.calls + 1))
        self.weight -= RATE * (unbiased + DECAY * self.weight)
        self.calls += 1


def shampoo(**more):
    optimizer = Shampoo(
        b1=B1,
        b2=B2,
        eps=EPS,
        matrix_eps=RIDGE,
        weight_decay=DECAY,
        root_interval=INTERVAL,
        start_step=START,
        **more,
    )
    return OptimConfig(optimizer=optimizer, learning_rate=RATE, schedule=Constant(), clip=())


@pytest.mark.parametrize("grafting", ["rmsprop", "adagrad", "sgd"])
def test_stacked_layers_follow_the_paper_each_on_its_own(grafting):
    rng = np.random.default_rng(0)
    start = rng.normal(size=(2, 6, 2, 3))
    grads = [rng.normal(size=start.shape) for _ in range(CALLS)]
    axes = ("layers", "embed", "heads", "head_dim")
    with jax.enable_x64(True):
        got, _ = run(shampoo(grafting=grafting), start, axes, grads)
    for layer in range(2):
        one = Reference(start[layer].reshape(6, 6), [], [], grafting)
        for grad in grads:
            one.update(grad[layer].reshape(6, 6))
        np.testing.assert_allclose(got[layer].reshape(6, 6), one.weight, rtol=1e-8, atol=1e-10)


def test_blocks_have_preconditioners_of_their_own():
    """7 rows in blocks of at most 3 are three of 3, 3 and 1; 5 columns are one of 3, one of 2."""
    rng = np.random.default_rng(1)
    start = rng.normal(size=(7, 5))
    grads = [rng.normal(size=start.shape) for _ in range(CALLS)]
    with jax.enable_x64(True):
        got, state = run(shampoo(block_size=3), start, ("embed", "mlp"), grads)
    one = Reference(start, [3, 6], [3], "rmsprop")
    for grad in grads:
        one.update(grad)
    np.testing.assert_allclose(got, one.weight, rtol=1e-8, atol=1e-10)
    assert {leaf.shape for leaf in jax.tree.leaves(state) if leaf.ndim == 3} == {(6, 3, 3)}


def test_float32_stays_close_to_float64():
    rng = np.random.default_rng(2)
    start = rng.normal(size=(5, 5))
    grads = [rng.normal(size=start.shape) for _ in range(CALLS)]
    narrow = [grad.astype(np.float32) for grad in grads]
    got, _ = run(shampoo(), start.astype(np.float32), ("embed", "mlp"), narrow)
    one = Reference(start, [], [], "rmsprop")
    for grad in grads:
        one.update(grad)
    np.testing.assert_allclose(got, one.weight, rtol=1e-4, atol=1e-4)


def test_a_layer_without_gradient_stays_finite():
    start = np.ones((2, 4, 4), np.float32)
    grads = [np.stack([np.zeros((4, 4)), np.eye(4)]).astype(np.float32)] * CALLS
    got, state = run(shampoo(), start, ("layers", "embed", "mlp"), grads)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(state))
    np.testing.assert_allclose(got[0], (1 - RATE * DECAY) ** CALLS, rtol=1e-5)


def test_shampoo_outruns_adam_on_a_rotated_valley():
    rng = np.random.default_rng(3)
    basis = np.linalg.qr(rng.normal(size=(8, 8)))[0]
    curvature = ((basis * np.logspace(-3, 0, 8)) @ basis.T).astype(np.float32)
    start = rng.normal(size=(8, 8)).astype(np.float32)

    def loss(params):
        w = params["w"]
        return 0.5 * jax.numpy.sum(w * (curvature @ w))

    def final_loss(optimizer):
        config = OptimConfig(optimizer=optimizer, learning_rate=0.05, schedule=Linear(), clip=())
        params = {"w": jax.numpy.asarray(start)}
        built = build(config, total_steps=150, params=params, axes={"w": ("embed", "mlp")})

        def step(carry, _):
            params, state = carry
            return built.update(jax.grad(loss)(params), state, params), None

        (params, _), _ = jax.lax.scan(step, (params, built.init(params)), length=150)
        return float(loss(params))

    ours = final_loss(Shampoo(weight_decay=0.0, root_interval=5))
    assert ours < 0.5 * final_loss(AdamW(b1=0.9, weight_decay=0.0))
