"""Scales of inputs, folded into what produces them: AWQ and SmoothQuant.

Each column of a weight is multiplied by c, and whatever produces that input divides by c, so that
the product stays.

AWQ: the error of rounding a column counts less where its input carries much. c is s^a, s the root
mean square of the input over the calibration rows, scaled so that its largest times its smallest is
1; a is the one on a grid that leaves the outputs the least squared error (Lin et al. 2024, section
3.2, which takes the mean magnitude for s). a = 0, no scales, is on the grid.

SmoothQuant: inputs are rounded too, and weights take half of what makes their rounding coarse. c is
(x / w)^1/2, x and w the greatest magnitudes of the input and of its column (Xiao et al. 2023,
equation 4, with its alpha of 0.5).

Legend: O outputs, I inputs.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fornax.models import DecoderConfig
from fornax.quant.rounding import dequantize, round_matrix, spread
from fornax.quant.schemes import Scheme
from fornax.quant.statistics import Found, Statistics

__all__ = ["Folds", "find_folds"]

_EXPONENTS = np.linspace(0, 1, 21)
Key = tuple[str, int | None]
"""Path of a parameter in its layer, and expert."""


@dataclass
class Folds:
    """What becomes of the parameters of a layer before they are rounded."""

    columns: dict[Key, np.ndarray] = field(default_factory=dict)
    """By what the inputs [I] of a matrix are multiplied."""
    rows: dict[Key, np.ndarray] = field(default_factory=dict)
    """By what the outputs [O] of a matrix and of its bias are divided."""
    norms: dict[str, np.ndarray] = field(default_factory=dict)
    """Scales of norms in place of those that there are."""
    skipped: dict[str, str] = field(default_factory=dict)
    """Matrices without scales on their inputs, and why."""


def find_folds(
    config: DecoderConfig,
    index: int,
    parameters: Mapping[str, np.ndarray],
    found: Found,
    schemes: Mapping[str, Scheme],
) -> Folds:
    """Scales of a layer's inputs.

    Args:
      config: the model's.
      index: number of the layer.
      parameters: of the layer, by path; kernels as matrices [O, I], those of experts [E, O, I].
      found: what its weights meet.
      schemes: of the kernels that scales are asked for.
    """
    folds = Folds()
    for producer, consumers in _norm_folds(parameters):
        asked = [path for path in consumers if path in schemes]
        if not asked or (asked[0], None) not in found:
            continue
        own = {path: parameters[path] for path in consumers}
        c_I = _find_scales(own, found[asked[0], None], schemes[asked[0]])
        offset = 1.0 if config.norm_unit_offset else 0.0
        scale, c_I = _norm_scale(parameters[producer], c_I, offset)
        folds.norms[producer] = scale
        folds.columns |= {(path, None): c_I for path in consumers}
    for producer, consumer, reason in _linear_folds(config, index, parameters):
        if consumer not in schemes:
            continue
        if reason:
            folds.skipped[consumer] = reason
            continue
        stacked = parameters[consumer].ndim == 3
        for expert in range(len(parameters[consumer])) if stacked else (None,):
            if (consumer, expert) not in found:
                continue
            w_OI = parameters[consumer] if expert is None else parameters[consumer][expert]
            c_I = _find_scales({consumer: w_OI}, found[consumer, expert], schemes[consumer])
            folds.columns[consumer, expert] = folds.rows[producer, expert] = c_I
    for path in schemes:
        if not any(own == path for own, _ in folds.columns):
            folds.skipped.setdefault(path, "its inputs come from no norm or linear layer alone")
    return folds


def _norm_folds(parameters: Mapping[str, Any]) -> list[tuple[str, list[str]]]:
    """Norms, and all that reads what they give."""
    readers = {
        "attention_norm/scale": [
            *(
                f"{part}attention/{x}/kernel"
                for part in ("", "global_", "shared_", "global_shared_")
                for x in "qkv"
            ),
            *(f"latent/{x}/kernel" for x in ("q", "q_down", "kv_down")),
        ],
        "latent/q_norm/scale": ["latent/q_up/kernel"],
        "latent/kv_norm/scale": ["latent/kv_up/kernel"],
        "mlp_norm/scale": [
            f"{part}mlp/{x}/kernel" for part in ("", "wide_") for x in ("gate", "up")
        ],
    }
    there = {
        norm: [path for path in paths if path in parameters] for norm, paths in readers.items()
    }
    return [(norm, paths) for norm, paths in there.items() if norm in parameters and paths]


def _linear_folds(
    config: DecoderConfig, index: int, parameters: Mapping[str, Any]
) -> list[tuple[str, str, str]]:
    """Linear layers, the one that reads what they give, and why scales do not pass between them."""
    found = []
    for part in ("", "global_"):
        producer, consumer = f"{part}attention/v/kernel", f"{part}attention/o/kernel"
        if producer in parameters:
            reason = ""
            if parameters[producer].shape[0] != parameters[consumer].shape[1]:
                reason = "query heads share a value head"
            elif config.value_norm or config.qkv_clip is not None:
                reason = "values are normalised or cut"
            elif config.layer_kinds()[index].keys != "own":
                reason = "values are of other layers too"
            found.append((producer, consumer, reason))
    experts = config.experts
    kept = "the activation is cut" if experts is not None and experts.clip is not None else ""
    if "experts/up/bias" in parameters:
        kept = kept or "biases of all experts are one tensor"
    for part in ("mlp", "wide_mlp", "experts", "experts/shared"):
        if f"{part}/down/kernel" in parameters:
            reason = kept if part == "experts" else ""
            found.append((f"{part}/up/kernel", f"{part}/down/kernel", reason))
    return found


def _find_scales(
    weights: Mapping[str, np.ndarray], statistics: Statistics, scheme: Scheme
) -> np.ndarray:
    """The scales c [I] that all weights have in common."""
    if scheme.method == "awq":
        return _search(weights, statistics.h_KK, statistics.rows, scheme)
    w_I = np.max([np.abs(w_OI.astype(np.float32)).max(axis=0) for w_OI in weights.values()], axis=0)
    x_I, w_I = (
        np.maximum(each, max(each.max() * 1e-4, 1e-12)) for each in (statistics.most_K, w_I)
    )
    return np.sqrt(x_I / w_I).astype(np.float32)


def _search(
    weights: Mapping[str, np.ndarray], h_II: np.ndarray, rows: int, scheme: Scheme
) -> np.ndarray:
    """The scales c [I] that leave the outputs of all weights together the least squared error."""
    s_I = np.sqrt(np.diagonal(h_II) / max(1, rows)).astype(np.float32)
    s_I = np.maximum(s_I, max(float(s_I.max()) * 1e-4, 1e-12))
    quick = replace(scheme, clip=False)
    best, least = np.ones_like(s_I), np.inf
    for exponent in _EXPONENTS:
        c_I = s_I**exponent
        c_I = (c_I / np.sqrt(c_I.max() * c_I.min())).astype(np.float32)
        error = sum(_error(w_OI.astype(np.float32), c_I, h_II, quick) for w_OI in weights.values())
        if error < least:
            best, least = c_I, error
    return best


def _error(w_OI: np.ndarray, c_I: np.ndarray, h_II: np.ndarray, scheme: Scheme) -> float:
    """tr(D H D^T), D the error of a weight that is rounded with its inputs scaled."""
    codes = round_matrix(w_OI * c_I, scheme, np.dtype(np.float32))
    d_OI = dequantize(codes.values_OI, *spread(codes.grid, scheme, w_OI.shape)) / c_I - w_OI
    moved_OI = jnp.matmul(d_OI, h_II, precision=jax.lax.Precision.HIGHEST)
    return float(jnp.sum(moved_OI * d_OI))


def _norm_scale(
    scale_I: np.ndarray, c_I: np.ndarray, offset: float
) -> tuple[np.ndarray, np.ndarray]:
    """A norm's scale divided by c, in its dtype, and the c that its rounding leaves: the product
    with the weights stays as it is."""
    whole_I = scale_I.astype(np.float32) + offset
    made_I = (whole_I / c_I - offset).astype(scale_I.dtype)
    given_I = made_I.astype(np.float32) + offset
    exact = (given_I != 0) & (whole_I != 0)
    made_I = np.where(exact, made_I, scale_I)
    return made_I, np.where(exact, whole_I / np.where(exact, given_I, 1), 1).astype(np.float32)
