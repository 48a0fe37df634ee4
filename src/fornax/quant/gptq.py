"""GPTQ: each input's rounding error is made good by the inputs that are rounded after it.

Of a linear layer y = W x the squared error of y over the calibration rows is tr(D H D^T), D the
error of W and H = X^T X. Inputs are rounded one after the other, and D's share that later inputs
can take back is taken from H's inverse (Frantar et al. 2023, algorithm 1): with U the upper
Cholesky factor of H^-1, rounding input i with error e changes every later input j by -e U_ij /
U_ii.

Legend: O outputs, I inputs.
"""

import numpy as np

from fornax.quant.rounding import Codes, dequantize, find_grid, quantize
from fornax.quant.schemes import Scheme

__all__ = ["gptq"]

DAMPING = 0.01
"""Of the mean of H's diagonal, added to the diagonal."""
_BLOCK = 128
"""Inputs whose errors reach the later ones in one product."""


def gptq(w_OI: np.ndarray, h_II: np.ndarray, scheme: Scheme, dtype: np.dtype) -> Codes:
    """Round a matrix.

    Scales are those of the weights as they are (static groups), found with the errors weighted by
    H's diagonal; inputs are rounded in the order of that diagonal, the greatest first. So the file
    needs no order of its own.

    Args:
      w_OI: finite floats of any dtype.
      h_II: float32 X^T X, or any multiple of it.
      scheme: with groups of inputs.
      dtype: of scales.
    """
    w_OI = w_OI.astype(np.float32)
    inputs = w_OI.shape[1]
    diagonal_I = np.diagonal(h_II).astype(np.float64)
    grid = find_grid(w_OI, scheme, dtype, diagonal_I + _damp(diagonal_I))
    order_I = np.argsort(-diagonal_I, kind="stable")
    u_II = inverse_factor(h_II[np.ix_(order_I, order_I)]).astype(np.float32)
    group_I = order_I // scheme.cell((w_OI.shape[0], inputs))[1]
    scales_GO = np.ascontiguousarray(grid.scales_PG.T.astype(np.float32))
    zeros_GO = None if grid.zeros_PG is None else np.ascontiguousarray(grid.zeros_PG.T)
    rest_IO = np.ascontiguousarray(w_OI.T[order_I])
    codes_IO = np.empty(rest_IO.shape, np.int8)
    for start in range(0, inputs, _BLOCK):
        stop = min(start + _BLOCK, inputs)
        errors_BO = np.empty((stop - start, rest_IO.shape[1]), np.float32)
        for i in range(start, stop):
            scales_O = scales_GO[group_I[i]]
            zeros_O = None if zeros_GO is None else zeros_GO[group_I[i]]
            codes_IO[i] = quantize(rest_IO[i], scales_O, zeros_O, scheme)
            error_O = (rest_IO[i] - dequantize(codes_IO[i], scales_O, zeros_O)) / u_II[i, i]
            rest_IO[i + 1 : stop] -= u_II[i, i + 1 : stop, None] * error_O
            errors_BO[i - start] = error_O
        rest_IO[stop:] -= u_II[start:stop, stop:].T @ errors_BO
    values_OI = np.empty((rest_IO.shape[1], inputs), np.int8)
    values_OI[:, order_I] = codes_IO.T
    return Codes(values_OI, grid)


def _damp(diagonal_I: np.ndarray) -> float:
    """What is added to the diagonal; 1 where nothing was seen, and rounding is to the nearest."""
    return float(DAMPING * diagonal_I.mean()) or 1.0


def inverse_factor(h_II: np.ndarray) -> np.ndarray:
    """Upper Cholesky factor U of the damped H's inverse, U^T U = H^-1, in float64: the inverse of a
    matrix of this condition loses half of float32's digits."""
    h_II = h_II.astype(np.float64)
    h_II[np.diag_indices(len(h_II))] += _damp(np.diagonal(h_II))
    return np.linalg.cholesky(np.linalg.inv(h_II)).T
