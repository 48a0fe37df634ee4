"""What quantization-aware training adds to a step: weights are read to find scales, and rounded."""

import functools
import math
from collections.abc import Iterable, Mapping

from fornax.models import DecoderConfig, abstract_decoder
from fornax.plan.closed_form.shards import LocalStep
from fornax.plan.closed_form.state import StateArray
from fornax.plan.facts import Work
from fornax.quant import QuantConfig, plan_qat

_FLOPS_A_PASS = 12.0
"""Operations that round a number and add up its error."""


def rounded_bytes(local: LocalStep, state: Iterable[StateArray]) -> float:
    """Bytes of the rounded weights, which are made once a step; where another dtype is computed in
    they are rounded into the cast."""
    if local.param_bytes != local.compute_bytes:
        return 0.0
    return float(sum(array.bytes for array, _ in _rounded(local, state)))


def rounding_work(local: LocalStep, state: Iterable[StateArray]) -> Iterable[Work]:
    """Reading each weight once for each scale that is tried and once to round it, and writing."""
    for array, passes in _rounded(local, state):
        yield Work(
            kind="optimizer",
            flops=_FLOPS_A_PASS * passes * math.prod(array.shape),
            bytes=float((passes + 1) * array.bytes),
        )


def _rounded(local: LocalStep, state: Iterable[StateArray]) -> Iterable[tuple[StateArray, int]]:
    passes = _passes(local.model, local.config.quant)
    params = (array for array in state if array.owner == "parameters")
    return ((array, passes[array.name]) for array in params if array.name in passes)


@functools.lru_cache(maxsize=64)
def _passes(model: DecoderConfig, config: QuantConfig) -> Mapping[str, int]:
    """How often each rounded parameter is read, by path."""
    quantizer = plan_qat(abstract_decoder(model), config)
    if quantizer is None:
        return {}
    return {
        path: 1 + max(len(scheme.shares) for scheme in own.schemes if scheme is not None)
        for path, own in quantizer.parameters.items()
    }
