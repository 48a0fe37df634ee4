"""What a network predicts of a noised example, and the clean data that it thereby claims.

Shapes: x_BX is a batch of examples of any shape X; alpha and sigma are () or (B,).
"""

from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp

__all__ = ["Point", "Prediction", "along", "preconditioning", "target", "to_data"]

Prediction = Literal["noise", "data", "v", "flow", "edm"]
"""The network's output: the noise; the data; v = alpha noise - sigma data (Salimans and Ho 2022);
the flow's velocity noise - data; or EDM's F, of which the data is `skip x + out F`."""


class Point(NamedTuple):
    """Where on the way from noise to data: each () or (B,), float32 (float64 under x64)."""

    t: jax.Array
    alpha: jax.Array
    sigma: jax.Array


def along(value: jax.Array, x_BX: jax.Array) -> jax.Array:
    """A value of each row, () or (B,), shaped so that it multiplies the rows of `x_BX`."""
    return value.reshape(value.shape + (1,) * (x_BX.ndim - 1)) if value.ndim else value


def preconditioning(sigma: jax.Array, sigma_data: float) -> tuple[jax.Array, jax.Array, jax.Array]:
    """EDM's coefficients (c_skip, c_out, c_in) (Karras et al. 2022, table 1), of sigma's shape."""
    total = sigma**2 + sigma_data**2
    return sigma_data**2 / total, sigma * sigma_data * total**-0.5, total**-0.5


def to_data(
    prediction: Prediction,
    output_BX: jax.Array,
    x_BX: jax.Array,
    point: Point,
    *,
    sigma_data: float = 0.5,
) -> jax.Array:
    """The data that the network's output stands for, in the dtype of `x_BX`.

    Args:
      prediction: what `output_BX` is. `noise` needs alpha > 0; `flow` any path, on which it is
        noise - data; `edm` needs alpha = 1.
      output_BX: the network's output, any floating dtype.
      x_BX: alpha data + sigma noise, float32 or float64.
      point: the noise level of each row, or of all.
      sigma_data: standard deviation of the data, for `edm`.
    """
    alpha, sigma = along(point.alpha, x_BX), along(point.sigma, x_BX)
    output_BX = output_BX.astype(x_BX.dtype)
    match prediction:
        case "noise":
            return (x_BX - sigma * output_BX) / alpha
        case "data":
            return output_BX
        case "v":
            return (alpha * x_BX - sigma * output_BX) / (alpha**2 + sigma**2)
        case "flow":
            return (x_BX - sigma * output_BX) / (alpha + sigma)
        case "edm":
            skip, out, _ = preconditioning(sigma, sigma_data)
            return skip * x_BX + out * output_BX


def target(
    prediction: Prediction,
    data_BX: jax.Array,
    noise_BX: jax.Array,
    point: Point,
    *,
    sigma_data: float = 0.5,
) -> jax.Array:
    """What the network should predict; `to_data` of it is `data_BX`.

    For `edm` sigma must not be 0. Arguments as of `to_data`.
    """
    alpha, sigma = along(point.alpha, data_BX), along(point.sigma, data_BX)
    match prediction:
        case "noise":
            return noise_BX
        case "data":
            return data_BX
        case "v":
            return alpha * noise_BX - sigma * data_BX
        case "flow":
            return noise_BX - data_BX
        case "edm":
            # (data - skip x) / out without the difference of near equals at small sigma.
            total = jnp.sqrt(sigma**2 + sigma_data**2)
            return (sigma * data_BX - sigma_data**2 * noise_BX) / (sigma_data * total)
