"""Muon on our stacked layout against its formulas in float64 NumPy.

Jordan et al. 2024 (Newton-Schulz), Liu et al. 2025 (consistent RMS), with Optax's bias-corrected
Nesterov momentum. Shapes: L layers, D width, N heads, H head width, F hidden.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from tests.cases import one_in

from fornax.optim import Constant, Muon, OptimConfig, build
from fornax.optim.muon import orthogonalize as ours

RATE, BETA, DECAY, CALLS = 0.02, 0.9, 0.1, 4
SHAPES = {
    "q": ((2, 8, 2, 3), ("layers", "embed", "heads", "head_dim")),
    "o": ((2, 2, 3, 8), ("layers", "heads", "head_dim", "embed")),
    "up": ((2, 8, 12), ("layers", "embed", "mlp")),
    "down": ((2, 12, 8), ("layers", "mlp", "embed")),
    "experts": ((2, 3, 8, 4), ("layers", "expert", "embed", "mlp")),
}
COEFFICIENTS = (3.4445, -4.7750, 2.0315)


def as_matrices(name, x):
    """[..., rows, columns], written out for each name rather than derived from axes."""
    return {
        "q": lambda: x.reshape(2, 8, 6),
        "o": lambda: x.reshape(2, 6, 8),
        "up": lambda: x,
        "down": lambda: x,
        "experts": lambda: x.reshape(6, 8, 4),
    }[name]()


def orthogonalize(m):
    a, b, c = COEFFICIENTS
    wide = m.shape[0] <= m.shape[1]
    x = m if wide else m.T
    x = x / (np.linalg.norm(x) + 1e-8)
    for _ in range(5):
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x if wide else x.T


def reference(name, start, grads, consistent_rms):
    """Parameters after all updates, one matrix at a time."""
    weights = as_matrices(name, start).copy()
    for index, weight in enumerate(weights):
        momentum = np.zeros_like(weight)
        for t, grad in enumerate(grads, start=1):
            g = as_matrices(name, grad)[index]
            momentum = BETA * momentum + (1 - BETA) * g
            nesterov = BETA * momentum / (1 - BETA ** (t + 1)) + (1 - BETA) * g / (1 - BETA**t)
            rows, cols = weight.shape
            if consistent_rms is None:
                scale = np.sqrt(max(1.0, cols / rows))
            else:
                scale = np.sqrt(max(rows, cols)) * consistent_rms
            weight -= RATE * (scale * orthogonalize(nesterov) + DECAY * weight)
    return weights.reshape(start.shape)


@pytest.mark.parametrize("consistent_rms", [0.2, None])
def test_every_layer_head_and_expert_is_orthogonalized_as_its_own_matrix(consistent_rms):
    rng = np.random.default_rng(0)
    start = {name: rng.normal(size=shape) for name, (shape, _) in SHAPES.items()}
    grads = [
        {name: rng.normal(size=shape) for name, (shape, _) in SHAPES.items()} for _ in range(CALLS)
    ]
    config = OptimConfig(
        optimizer=Muon(beta=BETA, weight_decay=DECAY, consistent_rms=consistent_rms),
        learning_rate=RATE,
        schedule=Constant(),
        clip=(),
    )
    with jax.enable_x64(True):
        params = jax.tree.map(jax.numpy.asarray, start)
        axes = {name: names for name, (_, names) in SHAPES.items()}
        built = build(config, total_steps=CALLS, params=params, axes=axes)
        state, step = jax.jit(built.init)(params), jax.jit(built.update)
        for grad in grads:
            params, state = step(grad, state, params)
        got = jax.tree.map(np.asarray, params)
    for name in SHAPES:
        want = reference(name, start[name], [grad[name] for grad in grads], consistent_rms)
        # Optax keeps the Newton-Schulz coefficients in its state as it got them: float64 here.
        np.testing.assert_allclose(got[name], want, rtol=1e-9, atol=1e-11, err_msg=name)


def test_muon_update_has_the_consistent_rms():
    rng = np.random.default_rng(1)
    params = {"w": rng.normal(size=(2, 64, 64)).astype(np.float32)}
    config = OptimConfig(
        optimizer=Muon(weight_decay=0.0), learning_rate=1.0, schedule=Constant(), clip=()
    )
    built = build(config, total_steps=1, params=params, axes={"w": ("layers", "embed", "mlp")})
    after, _ = built.update(params, built.init(params), params)
    rms = np.sqrt(np.mean((np.asarray(after["w"]) - params["w"]) ** 2, axis=(1, 2)))
    np.testing.assert_allclose(rms, 0.2, rtol=0.2)


OPTIONS = [
    {},
    {"nesterov": False, "beta": 0.8},
    {"preconditioning": "spectral", "ns_steps": 4},
    {"preconditioning": "aol", "ns_steps": 3},
    {"preconditioning": "schatten"},
    {"ns_coeffs": "dion"},
    {"ns_steps": 7},
    {"adaptive": True},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_one_matrix_moves_as_under_optax_in_float64(options):
    rng = np.random.default_rng(3)
    start = {"up": rng.normal(size=(12, 20)), "down": rng.normal(size=(20, 12))}
    grads = [{name: rng.normal(size=x.shape) for name, x in start.items()} for _ in range(CALLS)]
    muon = Muon(weight_decay=DECAY, **options)
    config = OptimConfig(optimizer=muon, learning_rate=RATE, schedule=Constant(), clip=())
    names = {f.name for f in dataclasses.fields(Muon)} - {"type", "ns_dtype", "mu_dtype"}
    theirs = {n: getattr(muon, n) for n in names if not n.startswith("fallback")}

    def moved(init, step):
        params, state = jax.tree.map(jnp.asarray, start), init(start)
        for grad in grads:
            params, state = jax.jit(step)(grad, state, params)
        return jax.tree.map(np.asarray, params)

    with jax.enable_x64(True):
        built = build(config, total_steps=CALLS, params=start)
        chain = optax.contrib.muon(RATE, **theirs)

        def step(grad, state, params):
            updates, state = chain.update(grad, state, params)
            return optax.apply_updates(params, updates), state

        got, want = moved(built.init, built.update), moved(chain.init, step)
    for name in start:
        np.testing.assert_allclose(got[name], want[name], rtol=1e-9, atol=1e-11, err_msg=name)


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-5), ("bfloat16", 0.012)])
@pytest.mark.parametrize("shape", one_in(3, [((2, 192, 512),), ((3, 192, 192),), ((2, 512, 192),)]))
def test_singular_values_are_those_of_the_polynomial_and_vectors_stay(shape, dtype, tolerance):
    """Against the singular value decomposition in float64, for matrices of condition 1,000."""
    rng = np.random.default_rng(5)
    u, _, vt = np.linalg.svd(rng.normal(size=shape), full_matrices=False)
    s = np.geomspace(1.0, 1e-3, u.shape[-1])
    x = (u * s) @ vt
    coefficients = (COEFFICIENTS,) * 5
    got = ours(jnp.asarray(x, jnp.float32), coefficients, dtype=dtype)
    assert got.dtype == jnp.float32
    s = s / np.linalg.norm(s)
    for a, b, c in coefficients:
        s = a * s + b * s**3 + c * s**5
    want = (u * s) @ vt
    error = np.linalg.norm(np.asarray(got, np.float64) - want) / np.linalg.norm(want)
    assert error < tolerance


def test_products_in_bfloat16_move_parameters_almost_as_float32_does():
    rng = np.random.default_rng(6)
    params = {"w": rng.normal(size=(2, 64, 96)).astype(np.float32)}
    grad = {"w": rng.normal(size=(2, 64, 96)).astype(np.float32)}
    axes = {"w": ("layers", "embed", "mlp")}

    def step(dtype):
        muon = Muon(weight_decay=0.0, ns_dtype=dtype)
        config = OptimConfig(optimizer=muon, learning_rate=1.0, schedule=Constant(), clip=())
        built = build(config, total_steps=1, params=params, axes=axes)
        return np.asarray(built.update(grad, built.init(params), params)[0]["w"]) - params["w"]

    exact, close = step("float32"), step("bfloat16")
    error = np.linalg.norm(exact - close) / np.linalg.norm(exact)
    assert 0 < error < 0.03
