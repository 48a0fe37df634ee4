"""Whether products of codes are faster than bfloat16 on this device.

Legend: B rows, T tokens of a row, K inputs, N outputs.
"""

import functools
import math
import time
from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from fornax import kernels
from fornax.config.errors import ConfigError
from fornax.models import DecoderConfig, abstract_decoder
from fornax.models.layout import num_inputs
from fornax.quant.config import QuantConfig
from fornax.quant.training import quantized_kernels

__all__ = ["check_speed"]

_WEIGHTS = 2
"""How many weights are measured, the largest of different shapes."""
_TURNS = 5
_MOST_TOKENS = 8192
_MOST_CPU_PRODUCTS = 2**32
"""Multiplications of one product on a CPU: some tens of milliseconds."""


@dataclass(frozen=True)
class _Timing:
    """Least seconds of a product with its two gradients."""

    tokens: int
    K: int
    N: int
    scheme: float
    bfloat16: float

    def __str__(self) -> str:
        times = f"{self.scheme * 1e3:.3g} against {self.bfloat16 * 1e3:.3g} ms"
        return f"{self.tokens} x {self.K} x {self.N} in {times}"


def check_speed(config: QuantConfig, model: DecoderConfig, rows: int, length: int) -> str:
    """Refuse a scheme that is slower here than bfloat16, unless the config allows it.

    The products of the largest weights, forward and backward, are measured on one device, rounding
    included.

    Args:
      config: the scheme.
      model: the run's.
      rows: of a device, that are multiplied at once.
      length: tokens of a row on a device.

    Returns:
      What was measured, in words; nothing where nothing was.

    Raises:
      ConfigError: with the measurement.
    """
    if config.scheme is None or config.allow_slow:
        return ""
    found = [_measure(config.scheme, rows, length, *shape) for shape in _largest(config, model)]
    slow, fast = (sum(getattr(one, n) for one in found) for n in ("scheme", "bfloat16"))
    times = ", ".join(str(one) for one in found)
    device = jax.local_devices()[0].device_kind
    said = (
        f"products in {config.scheme} take {slow / fast:.2g} times as long as in bfloat16 on "
        f"{device} (with both gradients, {times})"
    )
    if slow > fast:
        raise ConfigError(
            f"quant.scheme={config.scheme}: {said}; leave quant.scheme out, or set "
            "quant.allow_slow to true to train so all the same"
        )
    return said


def _largest(config: QuantConfig, model: DecoderConfig) -> list[tuple[int, int]]:
    """(K, N) of the largest weights."""
    decoder = abstract_decoder(model)
    shapes = set()
    for path, variable in quantized_kernels(decoder, config.exclude).items():
        shape, inputs = variable.get_value().shape[1:], num_inputs(decoder, path)
        shapes.add((math.prod(shape[:inputs]), math.prod(shape[inputs:])))
    return sorted(shapes, key=math.prod, reverse=True)[:_WEIGHTS]


def _measure(scheme: str, B: int, T: int, K: int, N: int) -> _Timing:
    most = _MOST_TOKENS
    if jax.default_backend() == "cpu":
        most = min(most, max(128, _MOST_CPU_PRODUCTS // (K * N)))
    T = min(T, most)
    B = max(1, min(B, most // T))
    keys = jax.random.split(jax.random.key(0), 3)
    x_BTK, dy_BTN = (
        jax.random.normal(key, (B, T, width), jnp.bfloat16)
        for key, width in zip(keys, (K, N), strict=False)
    )
    w_KN = jax.random.normal(keys[2], (K, N), jnp.float32)
    products = (
        lambda x, w: kernels.quantized_linear(x, w, jnp.uint32(0), scheme=scheme),
        lambda x, w: kernels.linear(x, w.astype(x.dtype)),
    )
    runs = [
        functools.partial(jax.jit(_with_gradients(each)), x_BTK, w_KN, dy_BTN) for each in products
    ]
    least = [math.inf, math.inf]
    for turn in range(_TURNS + 1):
        for number, run in enumerate(runs):
            began = time.perf_counter()
            jax.block_until_ready(run())
            if turn:  # the first compiles
                least[number] = min(least[number], time.perf_counter() - began)
    return _Timing(B * T, K, N, *least)


def _with_gradients(product: Callable[[jax.Array, jax.Array], jax.Array]) -> Callable:
    def run(x: jax.Array, w: jax.Array, dy: jax.Array) -> tuple[jax.Array, ...]:
        y, pull = jax.vjp(product, x, w)
        return y, *pull(dy)

    return run
