"""Rotations folded into the weights, so that no input of a product has a few large numbers.

The residual stream x is replaced by R^T x and each value head v by H^T v, R and H orthogonal. RMS
normalisation without its scale commutes with R: what reads the stream takes in the scale and R,
what writes to it R^T, and the float model computes what it did (QuaRot, Ashkboos et al. 2024,
section 4, stages 1a and 1b; SpinQuant's R1 and R2, Liu et al. 2024). No other rotation folds, so
that the inputs of a down projection stay as they are.

A rotation of D = n m, n the greatest power of two in D, is a Walsh-Hadamard matrix of n, a random
orthogonal one of m, and random signs before them.

Legend: D model width, N query heads, K key/value heads, H head width, O outputs, I inputs.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from fornax.config.errors import ConfigError
from fornax.config.suggest import first_few
from fornax.models import DecoderConfig
from fornax.quant.leaves import Leaf

__all__ = ["Rotation", "Rotations", "find_rotations", "make_rotation"]

_CHUNK = 2**20
"""Numbers rotated at a time."""
_NORMS = {
    **{f"attention/{x}/kernel": "attention_norm/scale" for x in "qkv"},
    **{f"latent/{x}/kernel": "attention_norm/scale" for x in ("q", "q_down", "kv_down")},
    **{
        f"{part}/{x}/kernel": "mlp_norm/scale"
        for part in ("mlp", "experts", "experts/shared")
        for x in ("gate", "up")
    },
    "experts/router/kernel": "mlp_norm/scale",
    "experts/shared_gate/kernel": "mlp_norm/scale",
    "lm_head/kernel": "final_norm/scale",
}
"""What reads the residual stream, and through which norm."""
_WRITERS = ("attention/o", "latent/o", "mlp/down", "experts/down", "experts/shared/down")
_OTHERS = (
    *(f"attention/{x}/bias" for x in "qkv"),
    *(f"attention/{x}" for x in ("q_norm/scale", "k_norm/scale", "sinks")),
    *(f"latent/{x}/kernel" for x in ("q_up", "kv_up")),
    *(f"latent/{x}" for x in ("q_norm/scale", "kv_norm/scale", "q_down/bias", "kv_down/bias")),
    *(f"{part}/{x}/bias" for part in ("mlp", "experts", "experts/shared") for x in ("gate", "up")),
    "experts/router/bias",
    "experts/selection_bias",
    "embed/embedding",
)
"""What neither reads nor writes it, and the embeddings."""
_KNOWN = {*_NORMS, *_NORMS.values(), *_OTHERS} | {
    f"{path}/{kind}" for path in _WRITERS for kind in ("kernel", "bias")
}


@dataclass(frozen=True)
class Rotation:
    """An orthogonal matrix R of a power of two times a small number."""

    signs_D: np.ndarray
    small: np.ndarray
    """Orthogonal [m, m]."""

    def after(self, w: np.ndarray) -> np.ndarray:
        """W R of the shape of w [..., D], computed in float64, in float32 or what w is wider."""
        size, m = len(self.signs_D), len(self.small)
        rows = w.reshape(-1, size)
        found = np.empty(rows.shape, np.result_type(w, np.float32))
        n = size // m
        left = 2 ** ((n.bit_length() - 1) // 2)  # the matrix of n is a product of two small ones
        one, other = _hadamard(left), _hadamard(n // left)
        step = max(1, _CHUNK // size)
        for at in range(0, len(rows), step):
            part = rows[at : at + step] * self.signs_D
            part = (part.reshape(-1, n // left) @ other).reshape(-1, left, n // left)
            part = (one @ part).reshape(-1, m, n)
            found[at : at + step] = (self.small.T @ part).reshape(-1, size) / np.sqrt(n)
        return found.reshape(w.shape)

    def before(self, w: np.ndarray) -> np.ndarray:
        """R^T W of matrices w [..., D, I], or R^T w of a vector [D]."""
        return self.after(w) if w.ndim == 1 else self.after(w.swapaxes(-1, -2)).swapaxes(-1, -2)


def _hadamard(size: int) -> np.ndarray:
    """Sylvester's matrix of a power of two, of 1 and -1."""
    found = np.ones((1, 1))
    while len(found) < size:
        found = np.block([[found, found], [found, -found]])
    return found


def make_rotation(size: int, rng: np.random.Generator) -> Rotation:
    """A random rotation of a size."""
    m = size // (size & -size)
    small, triangle = np.linalg.qr(rng.normal(size=(m, m)))
    return Rotation(rng.choice([-1.0, 1.0], size), small * np.sign(np.diagonal(triangle)))


@dataclass(frozen=True)
class Rotations:
    """Those of a model."""

    residual: Rotation
    values: Rotation | None
    """Of each value head; None where it does not fold."""
    norms: Mapping[tuple[int | None, str], Leaf]
    """Tensors of norms by number of the layer and path in it."""
    offset: float
    """What is added to a norm's scale."""
    note: dict[str, Any] = field(default_factory=dict)
    """What is to be noted of what reads the heads."""

    def rotated(self, leaf: Leaf, values: np.ndarray) -> np.ndarray | None:
        """The values of a leaf, in float32 at least; None where they stay as they are."""
        made = None
        for path, block in zip(leaf.parameters, leaf.blocks, strict=True):
            inner = path.removeprefix("layers/")
            if not self._touches(inner):
                continue
            made = values.astype(np.result_type(values, np.float32)) if made is None else made
            cut = block.cut_experts if leaf.stacked else block.cut
            part = cut(made)
            turned = self._turned(inner, leaf.layer, part)
            if leaf.stacked:
                part[...] = turned
            else:
                block.put(made, turned)
        return made

    def _touches(self, path: str) -> bool:
        if path == "attention/v/bias":
            return self.values is not None
        writes = path.removesuffix("/kernel").removesuffix("/bias") in _WRITERS
        return writes or path in {"embed/embedding", *_NORMS, *_NORMS.values()}

    def _turned(self, path: str, layer: int | None, w: np.ndarray) -> np.ndarray:
        if path in _NORMS.values():
            return np.full_like(w, 1 - self.offset)
        if path == "embed/embedding":
            return self.residual.after(w)
        if path in _NORMS:
            norm = self.norms[layer, _NORMS[path]]
            w = self.residual.after(w * (norm.tensor.view().astype(w.dtype) + self.offset))
        elif path.endswith("/bias") and path != "attention/v/bias":
            w = self.residual.after(w)
        elif path != "attention/v/bias":
            w = self.residual.before(w)
        if self.values is None:
            return w
        size = len(self.values.signs_D)
        if path == "attention/o/kernel":
            return self.values.after(w.reshape(len(w), -1, size)).reshape(w.shape)
        if path.startswith("attention/v/"):
            heads = w.reshape(-1, size, *w.shape[1:])
            turned = self.values.before(heads) if w.ndim == 2 else self.values.after(heads)
            return turned.reshape(w.shape)
        return w


def find_rotations(config: DecoderConfig, leaves: Sequence[Leaf], seed: int) -> Rotations:
    """The rotations of a model.

    Args:
      config: the model's.
      leaves: of its directory.
      seed: of the rotations.

    Raises:
      ConfigError: when the rotation of the residual stream does not fold into this model.
    """
    if config.tie_embeddings:
        raise _refused("its table of embeddings is the output projection too")
    if config.norm_placement != "pre":
        raise _refused("norms behind its layers scale what they write")
    paths = {path.removeprefix("layers/") for leaf in leaves for path in leaf.parameters}
    unknown = [path for path in paths if path not in _KNOWN]
    if unknown:
        raise _refused(f"of {first_few(sorted(unknown))} it is not known how they read it")
    strangers = [
        leaf.tensor.name
        for leaf in leaves
        if not leaf.paths and not leaf.tensor.name.endswith("rotary_emb.inv_freq")
    ]
    if strangers:
        raise _refused(f"{first_few(strangers)} are not parameters of the decoder, and may read it")
    rng = np.random.default_rng(seed)
    reason = _values_stay(config)
    values = None if reason else make_rotation(config.head_width, rng)
    norms = {
        (leaf.layer, leaf.parameter.removeprefix("layers/")): leaf
        for leaf in leaves
        if leaf.parameter.removeprefix("layers/") in _NORMS.values()
    }
    return Rotations(
        residual=make_rotation(config.hidden_size, rng),
        values=values,
        norms=norms,
        offset=1.0 if config.norm_unit_offset else 0.0,
        note={"values_not_rotated": reason} if reason else {},
    )


def _values_stay(config: DecoderConfig) -> str:
    """Why the rotation of values does not fold; nothing where it does."""
    if config.latent is not None:
        return "they come of a latent"
    if config.value_norm or config.qkv_clip is not None:
        return "they are normalised or cut"
    if config.attention_gate:
        return "what is gathered of them is gated"
    return ""


def _refused(why: str) -> ConfigError:
    return ConfigError(
        f"the residual stream cannot be rotated: {why}; take a scheme without rotations, such as "
        "w8a8 or nvfp4"
    )
