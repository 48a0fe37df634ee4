"""Distillation against float64 formulas and finite differences; chunks and devices against whole.

Legend: T tokens, D and E width of student and teacher, V vocabulary, K words stored.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fornax.config.errors import ConfigError, KernelError
from fornax.kernels import linear_loss
from fornax.mesh import MeshConfig, make_mesh, use_mesh
from fornax.tune import losses

T, D, E, V, K = 12, 6, 5, 11, 3
KINDS = ("forward_kl", "reverse_kl", "jensen_shannon")
TAILS = ("bucket", "renormalise", "drop")
_RNG = np.random.default_rng(0)
X_TD, W_DV = _RNG.normal(size=(T, D)), _RNG.normal(size=(D, V))
TEACHER_X_TE, TEACHER_W_EV = _RNG.normal(size=(T, E)), _RNG.normal(size=(E, V))
STUDENT_TV, TEACHER_TV = X_TD @ W_DV, TEACHER_X_TE @ TEACHER_W_EV
WEIGHTS_T = np.where(np.arange(T) % 5 == 0, 0.0, _RNG.uniform(0.5, 1.5, T))
TEMPERATURE, BETA = 1.7, 0.3


def _log_softmax(z: np.ndarray) -> np.ndarray:
    z = z - z.max(-1, keepdims=True)
    return z - np.log(np.exp(z).sum(-1, keepdims=True))


TEACHER_LOGPROBS_TV = _log_softmax(TEACHER_TV / TEMPERATURE)
IDS_TK = np.argsort(-TEACHER_LOGPROBS_TV, axis=-1)[:, :K].astype(np.int32)
STORED_TK = np.take_along_axis(TEACHER_LOGPROBS_TV, IDS_TK, axis=-1)


def _divergence(kind: str, q: np.ndarray, p: np.ndarray) -> np.ndarray:
    """Of log-distributions: q the student's, p the teacher's."""
    if kind == "forward_kl":
        return (np.exp(p) * (p - q)).sum(-1)
    if kind == "reverse_kl":
        return (np.exp(q) * (q - p)).sum(-1)
    m = np.log(BETA * np.exp(p) + (1 - BETA) * np.exp(q))
    return BETA * _divergence("forward_kl", m, p) + (1 - BETA) * _divergence("forward_kl", m, q)


def _whole(kind: str, student: np.ndarray) -> np.ndarray:
    return _divergence(kind, _log_softmax(student / TEMPERATURE), TEACHER_LOGPROBS_TV)


def _topk(kind: str, tail: str, student: np.ndarray) -> np.ndarray:
    q = np.take_along_axis(_log_softmax(student / TEMPERATURE), IDS_TK, axis=-1)
    p = STORED_TK
    if tail == "renormalise":
        q, p = (a - np.log(np.exp(a).sum(-1, keepdims=True)) for a in (q, p))
    if tail == "bucket":
        q, p = (
            np.concatenate([a, np.log(1 - np.exp(a).sum(-1, keepdims=True))], -1) for a in (q, p)
        )
    return _divergence(kind, q, p)


def _options(kind: str) -> dict[str, float]:
    return {"beta": BETA} if kind == "jensen_shannon" else {}


CASES: dict[str, tuple[Callable[[Any], Any], Callable[[np.ndarray], np.ndarray]]] = {
    kind: (
        lambda z, kind=kind: getattr(losses, kind)(
            z, jnp.asarray(TEACHER_TV), temperature=TEMPERATURE, **_options(kind)
        ),
        lambda z, kind=kind: _whole(kind, z),
    )
    for kind in KINDS
} | {
    f"{kind} {tail}": (
        lambda z, kind=kind, tail=tail: getattr(losses, f"topk_{kind}")(
            z,
            jnp.asarray(IDS_TK),
            jnp.asarray(STORED_TK),
            temperature=TEMPERATURE,
            tail=tail,
            **_options(kind),
        ),
        lambda z, kind=kind, tail=tail: _topk(kind, tail, z),
    )
    for kind, tail in [(kind, "bucket") for kind in KINDS]
    + [("forward_kl", "renormalise"), ("reverse_kl", "renormalise"), ("forward_kl", "drop")]
}


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    def all_cases(student: jax.Array) -> dict[str, Any]:
        def value(student: jax.Array, run: Any) -> tuple[jax.Array, Any]:
            loss, metrics = run(student)
            return jnp.sum(loss * WEIGHTS_T), (loss, metrics)

        return {n: jax.grad(value, has_aux=True)(student, run) for n, (run, _) in CASES.items()}

    with jax.enable_x64(True):
        return jax.tree.map(np.asarray, jax.jit(all_cases)(STUDENT_TV))


@pytest.mark.parametrize("name", CASES)
def test_loss_is_the_formula_and_gradient_its_finite_difference(
    name: str, found: dict[str, Any]
) -> None:
    formula = CASES[name][1]
    slope, (loss, _) = found[name]
    np.testing.assert_allclose(loss, formula(STUDENT_TV), rtol=1e-9, atol=1e-12)
    for word in range(V):
        step = np.where(np.arange(V) == word, 1e-6, 0)
        difference = (formula(STUDENT_TV + step) - formula(STUDENT_TV - step)) / 2e-6
        np.testing.assert_allclose(slope[:, word], WEIGHTS_T * difference, atol=1e-8)


def test_the_forward_gradient_is_the_difference_of_the_distributions(found: dict[str, Any]) -> None:
    q, p = np.exp(_log_softmax(STUDENT_TV / TEMPERATURE)), np.exp(TEACHER_LOGPROBS_TV)
    expected = (q - p) / TEMPERATURE * WEIGHTS_T[:, None]
    np.testing.assert_allclose(found["forward_kl"][0], expected, atol=1e-12)


def test_agreement_is_of_favourite_words(found: dict[str, Any]) -> None:
    same = STUDENT_TV.argmax(-1) == TEACHER_TV.argmax(-1)
    assert 0 < same.sum() < T
    for name in ("forward_kl", "reverse_kl bucket"):
        np.testing.assert_array_equal(found[name][1][1]["agreement"], same)
    tail = 1 - np.exp(STORED_TK).sum(-1)
    np.testing.assert_allclose(found["forward_kl drop"][1][1]["tail"], tail, rtol=1e-9)


def test_the_bucket_bounds_the_whole_divergence_and_meets_it_with_all_words() -> None:
    whole = _whole("forward_kl", STUDENT_TV)
    assert (_topk("forward_kl", "bucket", STUDENT_TV) <= whole).all()
    every_TV = jnp.broadcast_to(jnp.arange(V), (T, V))
    teacher = jnp.asarray(TEACHER_LOGPROBS_TV, jnp.float32)

    @jax.jit
    def both(z: jax.Array) -> Any:
        return [
            (
                getattr(losses, f"topk_{name}")(z, every_TV, teacher)[0],
                getattr(losses, name)(z, teacher)[0],
            )
            for name in KINDS
        ]

    for stored, exact in both(jnp.asarray(STUDENT_TV, jnp.float32)):
        np.testing.assert_allclose(stored, exact, rtol=1e-4, atol=1e-6)


def test_ids_below_zero_hold_no_word() -> None:
    """Five slots of which three are used are the same as three."""
    ids = np.concatenate([IDS_TK, np.full((T, 2), -1, np.int32)], axis=1)
    stored = np.concatenate([STORED_TK, np.zeros((T, 2))], axis=1)

    def total(z: jax.Array, ids: Any, stored: Any, tail: Any) -> jax.Array:
        arrays = (z, jnp.asarray(ids), jnp.asarray(stored))
        return jnp.sum(losses.topk_reverse_kl(*arrays, temperature=TEMPERATURE, tail=tail)[0])

    @jax.jit
    def both(z: jax.Array) -> Any:
        slots = ((IDS_TK, STORED_TK), (ids, stored))
        return [[jax.value_and_grad(total)(z, *given, tail) for given in slots] for tail in TAILS]

    for three, five in both(jnp.asarray(STUDENT_TV, jnp.float32)):
        np.testing.assert_allclose(three[0], five[0], rtol=1e-5)
        np.testing.assert_allclose(three[1], five[1], atol=1e-5)


def test_words_the_teacher_never_says_are_no_trouble() -> None:
    teacher = jnp.asarray(np.where(np.arange(V) < 2, -np.inf, TEACHER_TV), jnp.float32)

    @jax.jit
    def slopes(z: jax.Array) -> Any:
        both = (losses.forward_kl, losses.jensen_shannon)
        return [jax.value_and_grad(lambda z, f=f: jnp.sum(f(z, teacher)[0]))(z) for f in both]

    for value, slope in slopes(jnp.asarray(STUDENT_TV, jnp.float32)):
        assert np.isfinite(value)
        assert np.isfinite(slope).all()


def _chunked(kind: str, mesh: Any = None, **options: Any) -> Any:
    arrays = {"x": X_TD, "w": W_DV, "tx": TEACHER_X_TE, "tw": TEACHER_W_EV, "weights": WEIGHTS_T}
    given = {name: jnp.asarray(array, jnp.float32) for name, array in arrays.items()}

    def loss(x: jax.Array, w: jax.Array) -> tuple[jax.Array, Any]:
        if kind == "stored":
            stored = (jnp.asarray(IDS_TK), jnp.asarray(STORED_TK, jnp.float32))
            sums = losses.linear_topk_distillation(
                x, w, *stored, given["weights"], temperature=TEMPERATURE, **options
            )
        else:
            teacher = (given["tx"], given["tw"])
            sums = losses.linear_distillation(
                x,
                w,
                *teacher,
                given["weights"],
                divergence=kind,
                beta=BETA,
                temperature=TEMPERATURE,
                **options,
            )
        return 0.5 * sums.loss_sum, sums

    step = jax.jit(jax.grad(loss, (0, 1), has_aux=True))
    return step(given["x"], given["w"])


def _assert_summed(found: Any, loss: np.ndarray, slope: np.ndarray) -> None:
    """Twice halved: the cotangent of the loss is a half, and slopes are weighted already."""
    (dx, dw), sums = found
    np.testing.assert_allclose(float(sums.loss_sum), (loss * WEIGHTS_T).sum(), rtol=1e-5)
    np.testing.assert_allclose(float(sums.weight_sum), WEIGHTS_T.sum(), rtol=1e-6)
    same = STUDENT_TV.argmax(-1) == TEACHER_TV.argmax(-1)
    np.testing.assert_allclose(float(sums.agreement_sum), (same * WEIGHTS_T).sum(), rtol=1e-6)
    np.testing.assert_allclose(dx, 0.5 * slope @ W_DV.T, atol=2e-6)
    np.testing.assert_allclose(dw, 0.5 * X_TD.T @ slope, atol=4e-6)


@pytest.mark.parametrize(("kind", "chunk"), [(KINDS[0], 100), (KINDS[2], 5)])
def test_chunks_of_hidden_states_are_whole_logits(
    kind: str, chunk: int, found: dict[str, Any]
) -> None:
    slope, (loss, _) = found[kind]
    _assert_summed(_chunked(kind, chunk=chunk), loss, slope)


def test_chunks_of_stored_words_are_whole_logits(found: dict[str, Any]) -> None:
    slope, (loss, _) = found["forward_kl bucket"]
    _assert_summed(_chunked("stored", chunk=5), loss, slope)


def test_eight_devices_agree_with_one(found: dict[str, Any]) -> None:
    slope, (loss, _) = found["jensen_shannon"]
    with use_mesh(make_mesh(MeshConfig(data=2, fsdp=2, tensor=2), jax.devices())):
        _assert_summed(_chunked("jensen_shannon", chunk=1), loss, slope)


def test_a_frozen_projection_has_no_gradient_product() -> None:
    given = [jnp.asarray(a, jnp.float32) for a in (X_TD, W_DV, TEACHER_X_TE, TEACHER_W_EV)]

    def total(x: jax.Array, w: jax.Array) -> jax.Array:
        weights = jnp.asarray(WEIGHTS_T, jnp.float32)
        return losses.linear_distillation(x, w, *given[2:], weights, chunk=5).loss_sum

    def products(wanted: tuple[int, ...]) -> int:
        return jax.jit(jax.grad(total, wanted)).lower(*given[:2]).as_text().count("dot_general")

    assert (products((0,)), products((0, 1))) == (3, 4)


def test_tables_filled_up_differently_meet_on_the_words_they_share() -> None:
    wide_w = np.concatenate([TEACHER_W_EV, np.full((E, 5), 9.0)], axis=1)
    arrays = [jnp.asarray(a, jnp.float32) for a in (X_TD, W_DV, TEACHER_X_TE, wide_w, WEIGHTS_T)]
    with pytest.raises(ConfigError, match="11 words and the teacher's 16"):
        losses.linear_distillation(*arrays)
    found = jax.jit(lambda *a: losses.linear_distillation(*a, vocabulary=V).loss_sum)(*arrays)
    plain = _divergence("forward_kl", _log_softmax(STUDENT_TV), _log_softmax(TEACHER_TV))
    np.testing.assert_allclose(found, (plain * WEIGHTS_T).sum(), rtol=1e-5)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda z: losses.forward_kl(z, z[:, :5]), ConfigError, "11 words and the teacher 5"),
        (lambda z: losses.reverse_kl(z, z, temperature=0.0), ConfigError, "temperature=0.0"),
        (lambda z: losses.jensen_shannon(z, z, beta=1.0), ConfigError, "use forward_kl for 0"),
        (
            lambda z: losses.topk_forward_kl(z, jnp.zeros((T, 2), int), z),
            ConfigError,
            "must have one shape",
        ),
        (
            lambda z: losses.topk_forward_kl(z[:, :2], jnp.zeros((T, 3), int), z[:, :3]),
            ConfigError,
            "are more than the student's 2",
        ),
        (
            lambda z: losses.topk_forward_kl(z, jnp.zeros((T, 3), int), z[:, :3], tail="cut"),
            ConfigError,
            "use one of: bucket",
        ),
        (
            lambda z: losses.linear_distillation(z, z.T, z, z.T, z[0], divergence="kl"),
            ConfigError,
            "use one of: forward_kl",
        ),
        (
            lambda z: losses.linear_distillation(z, z.T, z, z.T, jnp.ones(3)),
            KernelError,
            "must begin with",
        ),
        (lambda z: linear_loss(abs, z, z, None, None, z[:, 0]), KernelError, "must be"),
        (
            lambda z: linear_loss(abs, z, z.T.astype(jnp.bfloat16), None, None, z[:, 0]),
            KernelError,
            "cast both",
        ),
        (
            lambda z: linear_loss(abs, z, z.T, None, None, z[:, 0], chunk=0),
            KernelError,
            "chunk=0",
        ),
    ],
)
def test_what_does_not_fit_is_named(
    call: Callable[[jax.Array], Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        call(jnp.zeros((T, V)))
