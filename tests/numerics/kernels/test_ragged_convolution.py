"""The convolution of a ragged batch against its sum in float64, sequence by sequence; of the native
kernel also that no bit depends on what is beside a sequence, or on how it is cut.

Legend: T tokens, U sequences, L layers, A slots, K heads, X channels of a head, W width.
"""

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fornax import kernels

L, A, LAYER = 2, 9, 1
run = jax.jit(kernels.ragged_convolution, static_argnames=("implementation", "activation"))
Inputs = dict[str, Any]


@pytest.fixture(params=["native", "xla"])
def how(request: pytest.FixtureRequest) -> Inputs:
    """Each implementation."""
    return {"implementation": request.param, "activation": "silu"}


def ragged(
    counts: tuple[int, ...],
    tokens: int,
    *,
    heads: tuple[int, int] = (3, 7),
    width: int = 4,
    dtype: Any = "float32",
    bias: bool = True,
) -> Inputs:
    """A batch of `tokens` tokens; the sequences are in slots 0, 1, …, the second begins."""
    rng = np.random.default_rng(0)
    rows = np.arange(len(counts), dtype=np.int32)

    def draw(*shape: int) -> jax.Array:
        return jnp.asarray(rng.normal(size=shape), dtype)

    return {
        "x_TKX": draw(tokens, *heads),
        "inputs_LAWKX": draw(L, A, width - 1, *heads),
        "kernel_KXW": draw(*heads, width),
        "bias_KX": draw(*heads) if bias else None,
        "layer": jnp.int32(LAYER),
        "query_start_U1": np.cumsum([0, *counts]).astype(np.int32),
        "slots_U": rows,
        "kept_UJ": rows[:, None],
        "fresh_U": rows == 1,
    }


def alone(batch: Inputs, row: int) -> tuple[np.ndarray, np.ndarray]:
    """y [T, K, X] of one sequence by itself, and all that its channels held, [W - 1 + T, K, X]."""
    own = slice(*batch["query_start_U1"][row : row + 2])
    x, held, kernel = (
        np.asarray(batch[name].astype(jnp.float32), np.float64)
        for name in ("x_TKX", "inputs_LAWKX", "kernel_KXW")
    )
    before = held[LAYER, batch["slots_U"][row]] * (not batch["fresh_U"][row])
    whole = np.concatenate([before, x[own]])
    width = kernel.shape[-1]
    y = np.stack(
        [np.einsum("wkx,kxw->kx", whole[t : t + width], kernel) for t in range(len(x[own]))]
    )
    if batch["bias_KX"] is not None:
        y = y + np.asarray(batch["bias_KX"].astype(jnp.float32), np.float64)
    return y / (1 + np.exp(-y)), whole


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("counts", "tokens", "sizes"),
    [
        ((1,), 1, {}),
        ((1, 1, 2, 1, 5, 0, 1), 16, {"bias": False}),
        ((70, 2, 1), 80, {"heads": (2, 160), "width": 3}),
        ((1, 40), 41, {"heads": (1, 600), "width": 2}),
    ],
    ids=str,
)
def test_each_sequence_is_as_by_itself(
    counts: tuple[int, ...], tokens: int, sizes: Inputs, dtype: str, how: Inputs
) -> None:
    """Single tokens beside prompts; other slots, layers and rows without tokens stay."""
    batch = ragged(counts, tokens, dtype=dtype, **sizes)
    y_TKX, inputs_LAWKX = run(**batch, **how)
    assert y_TKX.dtype == inputs_LAWKX.dtype == dtype
    expected = np.array(batch["inputs_LAWKX"].astype(jnp.float32))
    allowed = 2e-6 if dtype == "float32" else 2**-8
    for row, count in enumerate(counts):
        if not count:
            continue
        own = slice(*batch["query_start_U1"][row : row + 2])
        y, whole = alone(batch, row)
        found = np.asarray(y_TKX[own].astype(jnp.float32))
        np.testing.assert_allclose(found, y, rtol=allowed, atol=allowed)
        expected[LAYER, row] = whole[count:]
    np.testing.assert_array_equal(inputs_LAWKX.astype(jnp.float32), expected)


def test_short_sequences_keep_the_state_after_each_token(how: Inputs) -> None:
    """Beside a long one, which keeps its last; the states continued from are those before the step,
    and slots that nobody names stay."""
    counts, kept = (3, 1, 9, 2, 0), ((1, 3, 5), (6, 99, 99), (0, 99, 99), (99, 2, 99), (4, 7, 8))
    batch = ragged(counts, 16)
    batch["kept_UJ"] = np.array(kept, np.int32)
    y_TKX, inputs_LAWKX = run(**batch, **how)
    expected = np.array(batch["inputs_LAWKX"])
    for row, (count, slots) in enumerate(zip(counts, kept, strict=True)):
        if not count:
            continue
        own = slice(*batch["query_start_U1"][row : row + 2])
        y, whole = alone(batch, row)
        np.testing.assert_allclose(y_TKX[own], y, rtol=2e-6, atol=2e-6)
        ends = range(1, count + 1) if count <= 3 else (count,)
        for end, slot in zip(ends, slots, strict=False):
            if slot < A:
                expected[LAYER, slot] = whole[end : end + 3]
    np.testing.assert_array_equal(inputs_LAWKX, expected)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_bits_do_not_depend_on_company_or_on_how_a_sequence_is_cut(dtype: str) -> None:
    """A prompt in one call, beside others on several threads, and in three."""
    batch = ragged((37, 1, 200), 238, heads=(2, 300), dtype=dtype)
    fixed = {"implementation": "native", "activation": "gelu_tanh"}
    y_TKX, inputs_LAWKX = run(**batch, **fixed)
    for row in range(3):
        begin, end = batch["query_start_U1"][row : row + 2]
        cuts = sorted({begin, min(begin + 1, end), min(begin + 20, end), end})
        inputs, fresh = batch["inputs_LAWKX"], batch["fresh_U"][row : row + 1]
        for first, last in itertools.pairwise(cuts):
            piece = {
                **batch,
                "x_TKX": batch["x_TKX"][first:last],
                "query_start_U1": np.array([0, last - first], np.int32),
                "slots_U": batch["slots_U"][row : row + 1],
                "kept_UJ": batch["kept_UJ"][row : row + 1],
                "fresh_U": fresh,
                "inputs_LAWKX": inputs,
            }
            y, inputs = run(**piece, **fixed)
            fresh = np.array([False])
            np.testing.assert_array_equal(y, y_TKX[first:last])
        np.testing.assert_array_equal(inputs[LAYER, row], inputs_LAWKX[LAYER, row])


def test_what_is_no_number_stays_where_it_is(how: Inputs) -> None:
    """Of a neighbour, of another channel, and of who had the slot before; infinity too."""
    batch = ragged((5, 6, 1), 12)
    clean, _ = run(**batch, **how)
    x_TKX = batch["x_TKX"].at[5:7, 1, 2].set(jnp.nan).at[7, 0, 0].set(-jnp.inf)
    held = batch["inputs_LAWKX"].at[LAYER, 1].set(jnp.nan)  # of the second, which begins
    y_TKX, _ = run(**{**batch, "x_TKX": x_TKX, "inputs_LAWKX": held}, **how)
    wrong = np.isnan(y_TKX)
    assert wrong[5:10, 1, 2].all()
    wrong[5:10, 1, 2] = wrong[7:11, 0, 0] = False
    assert not wrong.any()
    others = np.ones(clean.shape, bool)
    others[5:10, 1, 2] = others[7:11, 0, 0] = False
    np.testing.assert_array_equal(y_TKX[others], clean[others])


def test_who_runs_it_and_what_is_refused() -> None:
    batch = ragged((2, 3), 5)
    operation = kernels.ragged_convolution_operation
    call = kernels.RaggedConvolutionCall(
        platform="cpu", tokens=5, rows=2, kept=1, channels=21, width=4, dtype="bfloat16",
        kept_dtype="float32", bias=True, activation="silu", devices=1,
    )  # fmt: skip
    assert operation.explain(call)["native"] == "x is bfloat16, and slots hold float32"
    for wrong, said in (
        ({"bias_KX": batch["bias_KX"][0]}, r"bias\(7,\) must be \(3, 7\)"),
        ({"inputs_LAWKX": batch["inputs_LAWKX"][:, :, :2]}, r"inputs\(2, 9, 2, 3, 7\) must be"),
        ({"slots_U": np.zeros(3, np.int32)}, r"slots\(3,\) must be \(2,\)"),
        ({"activation": "relu"}, "activation='relu' is unknown; use one of: silu, gelu_tanh"),
        ({"implementation": "quick"}, "implementation='quick' is unknown"),
    ):
        with pytest.raises(kernels.KernelError, match=said):
            kernels.ragged_convolution(**{**batch, "activation": "silu", **wrong})
