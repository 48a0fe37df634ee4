"""Log-probabilities of tokens against a float64 reference, on one device and on eight.

Legend: T tokens, D model width, V vocabulary.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from fornax import kernels
from fornax.config.errors import KernelError
from fornax.mesh import MeshConfig, make_mesh, use_mesh

T, D, V = 40, 16, 72

OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "softcap and temperatures": {"softcap": 2.0, "temperature": "mixed"},
    "entropy": {"entropy": True, "softcap": 2.0, "temperature": 0.7},
}


def _inputs() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    targets = rng.integers(0, V, size=T)
    targets[rng.permutation(T)[:5]] = -100
    return {
        "x": rng.normal(size=(T, D)),
        "w": rng.normal(size=(D, V)) * 0.3,
        "targets": targets.astype(np.int32),
        "pull": rng.normal(size=T),  # what the loss multiplies log-probabilities with
        "pull_entropy": rng.normal(size=T),
        "mixed": rng.uniform(0.5, 2.0, size=T),
    }


def _oracle(options: dict[str, Any]) -> dict[str, np.ndarray]:
    """Values, and gradients of sum(pull * logprob + pull_entropy * entropy), in float64 numpy."""
    a = _inputs()
    given = options.get("temperature", 1.0)
    tau = a["mixed"] if isinstance(given, str) else np.full(T, given)
    raw = a["x"] @ a["w"]
    cap = options.get("softcap")
    capped = raw if cap is None else cap * np.tanh(raw / cap)
    z = capped / tau[:, None]
    logp = z - np.log(np.exp(z - z.max(1, keepdims=True)).sum(1, keepdims=True)) - z.max(1)[:, None]
    p = np.exp(logp)
    counts = a["targets"] >= 0
    found = {"logprobs": np.where(counts, logp[np.arange(T), np.maximum(a["targets"], 0)], 0)}
    hit = np.eye(V)[np.maximum(a["targets"], 0)]
    slope = (a["pull"] * counts)[:, None] * (hit - p)
    if options.get("entropy"):
        found["entropy"] = -(p * logp).sum(1)
        slope -= a["pull_entropy"][:, None] * p * (logp + found["entropy"][:, None])
    slope /= tau[:, None]
    if cap is not None:
        slope *= 1 - (capped / cap) ** 2
    return {**found, "dx": slope @ a["w"].T, "dw": a["x"].T @ slope}


def _objective(x: jax.Array, w: jax.Array, rest: dict[str, jax.Array], **options: Any):
    temperature = options.pop("temperature", 1.0)
    temperature = rest["mixed"] if isinstance(temperature, str) else temperature
    found = kernels.linear_logprobs(x, w, rest["targets"], temperature=temperature, **options)
    total = jnp.sum(found.logprobs * rest["pull"])
    if found.entropy is not None:
        total += jnp.sum(found.entropy * rest["pull_entropy"])
    return total, found


def _run(dtype: Any = jnp.float32, wanted: tuple[int, ...] = (0, 1), **options: Any):
    a = _inputs()
    wide = jnp.promote_types(dtype, jnp.float32)
    rest = {name: jnp.asarray(a[name], wide) for name in ("pull", "pull_entropy", "mixed")}
    rest["targets"] = jnp.asarray(a["targets"])

    def objective(x: jax.Array, w: jax.Array):
        return _objective(x, w, rest, **options)

    step = jax.jit(jax.value_and_grad(objective, wanted, has_aux=True))
    (_, values), grads = step(jnp.asarray(a["x"], dtype), jnp.asarray(a["w"], dtype))
    named = dict(zip(("dx", "dw"), grads, strict=False))
    found = {**values._asdict(), **named}
    return {name: np.float64(a) for name, a in found.items() if a is not None}


def _assert_close(found: dict[str, Any], expected: dict[str, Any], atol: float) -> None:
    for name in found:
        scale = np.abs(expected[name]).max()
        np.testing.assert_allclose(
            found[name] / scale, expected[name] / scale, rtol=0, atol=atol, err_msg=name
        )


@pytest.mark.parametrize(
    ("name", "implementation"),
    [
        ("softcap and temperatures", "chunked"),
        ("entropy", "chunked"),
        ("entropy", "reference"),
    ],
)
def test_float64_agrees_with_numpy(name: str, implementation: str) -> None:
    with jax.enable_x64(True):
        found = _run(jnp.float64, implementation=implementation, chunk=16, **OPTIONS[name])
    assert set(found) == set(_oracle(OPTIONS[name]))
    _assert_close(found, _oracle(OPTIONS[name]), 1e-13)


@pytest.mark.parametrize(
    ("name", "chunk"),
    [("plain", 16), ("softcap and temperatures", 1000), ("entropy", 16), ("entropy", 1000)],
)
def test_float32_agrees_with_numpy_however_it_is_cut(name: str, chunk: int) -> None:
    _assert_close(_run(chunk=chunk, **OPTIONS[name]), _oracle(OPTIONS[name]), 1e-5)


@pytest.mark.parametrize("name", ["softcap and temperatures", "entropy"])
def test_a_frozen_projection_changes_no_gradient_of_x(name: str) -> None:
    found = _run(chunk=16, wanted=(0,), **OPTIONS[name])
    _assert_close(found, _oracle(OPTIONS[name]), 1e-5)


def test_a_frozen_projection_needs_no_second_logits() -> None:
    a = _inputs()
    rest = {"targets": jnp.asarray(a["targets"]), "pull": jnp.asarray(a["pull"], jnp.float32)}
    x, w = jnp.asarray(a["x"], jnp.float32), jnp.asarray(a["w"], jnp.float32)

    def products(wanted: tuple[int, ...]) -> int:
        step = jax.grad(lambda x, w: _objective(x, w, rest, chunk=16)[0], wanted)
        return jax.jit(step).lower(x, w).as_text().count("dot_general")

    assert products((0,)) == 2
    assert products((0, 1)) == 4


def test_bfloat16_agrees_to_its_precision() -> None:
    name = "entropy"
    _assert_close(_run(jnp.bfloat16, chunk=16, **OPTIONS[name]), _oracle(OPTIONS[name]), 2e-2)


def test_entropy_used_only_as_a_report_adds_no_gradient() -> None:
    a = _inputs()
    x, w = jnp.asarray(a["x"], jnp.float32), jnp.asarray(a["w"], jnp.float32)

    def total(x: jax.Array, entropy: bool) -> jax.Array:
        found = kernels.linear_logprobs(x, w, a["targets"], entropy=entropy, chunk=16)
        return jnp.sum(found.logprobs)

    step = jax.jit(jax.grad(total), static_argnums=1)
    grads = [step(x, entropy) for entropy in (False, True)]
    np.testing.assert_allclose(grads[0], grads[1], atol=1e-6)


@pytest.mark.parametrize(
    ("sizes", "chunk"),
    [
        ({"data": 2, "fsdp": 2, "tensor": 2}, 2),
        ({"data": 2, "fsdp": 2, "tensor": 2}, 1000),
        ({"context": 4}, 2),
    ],
    ids=str,
)
def test_sharded_tokens_and_vocabulary_agree(sizes: dict[str, int], chunk: int) -> None:
    mesh = make_mesh(
        MeshConfig(**{"fsdp": 1, **sizes}), jax.devices()[: int(np.prod(list(sizes.values())))]
    )
    a = _inputs()
    batch = ("slice", "data", "fsdp", "expert", "context")
    specs = {"x": PartitionSpec(batch, None), "w": PartitionSpec("fsdp", "tensor")}
    placed = {
        name: jax.device_put(
            array if array.dtype == np.int32 else array.astype(np.float32),
            NamedSharding(mesh, specs.get(name, PartitionSpec(batch))),
        )
        for name, array in a.items()
    }

    def objective(x: jax.Array, w: jax.Array):
        return _objective(x, w, placed, chunk=chunk, **OPTIONS["entropy"])

    with use_mesh(mesh):
        step = jax.jit(jax.value_and_grad(objective, (0, 1), has_aux=True))
        (_, values), (dx, dw) = step(placed["x"], placed["w"])
    found = {**values._asdict(), "dx": dx, "dw": dw}
    _assert_close({n: np.float64(v) for n, v in found.items()}, _oracle(OPTIONS["entropy"]), 1e-5)


def test_sharded_with_a_frozen_projection_agrees() -> None:
    mesh = make_mesh(MeshConfig(data=2, fsdp=2, tensor=2), jax.devices())
    a = _inputs()
    rest = {n: jnp.asarray(a[n].reshape(4, 10), jnp.float32) for n in ("pull", "mixed")}
    rest["targets"] = jnp.asarray(a["targets"].reshape(4, 10))
    x, w = jnp.asarray(a["x"].reshape(4, 10, D), jnp.float32), jnp.asarray(a["w"], jnp.float32)
    options = OPTIONS["softcap and temperatures"]
    with use_mesh(mesh):
        dx = jax.jit(jax.grad(lambda x: _objective(x, w, rest, chunk=2, **options)[0]))(x)
    _assert_close({"dx": np.float64(dx).reshape(T, D)}, _oracle(options), 1e-5)


def test_tokens_without_a_gradient_add_none_whatever_they_hold() -> None:
    a = _inputs()
    w = jnp.asarray(a["w"], jnp.float32)

    @jax.jit
    @jax.grad
    def dx(x: jax.Array) -> jax.Array:
        found = kernels.linear_logprobs(x, w, a["targets"], chunk=16)
        return jnp.sum(jnp.where(jnp.arange(T) < 30, found.logprobs, 0))

    spoilt = a["x"].copy()
    spoilt[30:] = np.inf
    found = dx(jnp.asarray(spoilt, jnp.float32))
    np.testing.assert_array_equal(found[:30], dx(jnp.asarray(a["x"], jnp.float32))[:30])
    np.testing.assert_array_equal(found[30:], 0)


def test_logits_give_the_same_values_and_filtered_words_count_for_nothing() -> None:
    a = _inputs()
    logits = jnp.asarray(a["x"] @ a["w"], jnp.float32)
    logits_logprobs = jax.jit(kernels.logits_logprobs, static_argnames="entropy")
    found = logits_logprobs(logits, a["targets"], temperature=a["mixed"], entropy=True)
    expected = _oracle({"entropy": True, "temperature": "mixed"})
    _assert_close({n: np.float64(v) for n, v in found._asdict().items()}, expected, 1e-5)

    kept = logits_logprobs(logits[:, :5], jnp.zeros(T, jnp.int32), entropy=True)
    filtered = logits.at[:, 5:].set(-jnp.inf)
    found = logits_logprobs(filtered, jnp.zeros(T, jnp.int32), entropy=True)
    np.testing.assert_allclose(found.logprobs, kept.logprobs, rtol=1e-6)
    np.testing.assert_allclose(found.entropy, kept.entropy, rtol=1e-5)


def test_a_target_beyond_the_vocabulary_is_not_a_number() -> None:
    x, w = jnp.ones((2, D)), jnp.ones((D, V))
    found = kernels.linear_logprobs(x, w, jnp.array([V, 0]))
    assert np.isnan(found.logprobs[0])
    np.testing.assert_allclose(found.logprobs[1], -np.log(V), rtol=1e-6)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"temperature": 0.0}, "temperature=0.0 must be above 0"),
        ({"temperature": jnp.ones(3)}, r"temperature\(3,\) does not broadcast"),
        ({"softcap": -1.0}, "softcap=-1.0 must be above 0"),
        ({"chunk": 0}, "chunk=0 must be 1 or more"),
        ({"targets_T": jnp.zeros(3, jnp.int32)}, "one value per token"),
        ({"targets_T": jnp.zeros(2)}, "targets must be integers"),
        ({"w_DV": jnp.ones((D, V), jnp.bfloat16)}, "cast both to one float dtype"),
        ({"implementation": "fast"}, "use one of: chunked, reference"),
    ],
)
def test_arguments_that_do_not_fit_are_named(change: dict[str, Any], message: str) -> None:
    given = {
        "x_TD": jnp.ones((2, D)),
        "w_DV": jnp.ones((D, V)),
        "targets_T": jnp.zeros(2, jnp.int32),
    }
    with pytest.raises(KernelError, match=message):
        kernels.linear_logprobs(**{**given, **change})
