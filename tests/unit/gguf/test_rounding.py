"""Numbers rounded to GGUF's blocks: by the reader's own way back, and a loop in Python."""

import numpy as np
import pytest

from fornax.gguf import TYPES, dequantize, quantize

KINDS = {kind.name: kind for kind in TYPES.values()}


def numbers(columns: int = 512) -> np.ndarray:
    rng = np.random.default_rng(0)
    return rng.normal(size=(64, columns)).astype(np.float32)


@pytest.mark.parametrize(
    ("name", "most"), [("Q8_0", 4e-5), ("Q4_0", 0.0085), ("Q4_K", 0.0075), ("Q6_K", 0.00061)]
)
def test_squared_errors_of_gaussian_numbers(name: str, most: float):
    x = numbers()
    read = dequantize(quantize(x, KINDS[name]), KINDS[name])
    assert ((read - x) ** 2).sum() / (x**2).sum() < most


def test_q8_0_rounds_halves_away_from_zero():
    x = np.zeros((1, 32), np.float32)
    x[0, :5] = 127, 0.5, -0.5, 2.5, 0.49999997
    codes = quantize(x, KINDS["Q8_0"]).view(KINDS["Q8_0"].layout)["codes"][0, 0]
    assert codes[:5].tolist() == [127, 1, -1, 3, 0]


@pytest.mark.parametrize("name", ["Q8_0", "Q4_0", "Q4_K", "Q6_K", "F16", "BF16", "F32"])
def test_zeros_stay_zeros_and_what_is_no_number_is_refused(name: str):
    x = numbers()
    x[0] = 0
    x[1, :256] = 0
    read = dequantize(quantize(x, KINDS[name]), KINDS[name])
    assert not read[0].any()
    assert not read[1, :256].any()
    x[2, 7] = np.nan
    with pytest.raises(ValueError, match="not finite"):
        quantize(x, KINDS[name])
