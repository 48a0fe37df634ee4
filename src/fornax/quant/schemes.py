"""Schemes: how a quantized weight is held, as data, and the names that a user gives."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

import ml_dtypes
import numpy as np

from fornax.config.errors import ConfigError
from fornax.config.suggest import did_you_mean
from fornax.quant.gguf_schemes import GGUF_SCHEMES

__all__ = ["GROUP_SIZES", "SCHEMES", "TRAINED", "Inputs", "Scheme", "scheme_named"]

GROUP_SIZES = (32, 64, 128)
"""Inputs that may share a scale in `pack-quantized`: those that packed products have."""

Scales = Literal["float", "e4m3", "e8m0"]
"""float: the dtype that values have. e4m3: float8_e4m3fn, and one float32 of a whole tensor that
they are divided by. e8m0: powers of two."""
Method = Literal["rounding", "gptq", "awq", "smoothquant"]

_STORED: Mapping[Scales, np.dtype | None] = {
    "float": None,
    "e4m3": np.dtype(ml_dtypes.float8_e4m3fn),
    "e8m0": np.dtype(ml_dtypes.float8_e8m0fnu),
}
_NAMES: Mapping[Scales, str | None] = {
    "float": None,
    "e4m3": "torch.float8_e4m3fn",
    "e8m0": "torch.uint8",
}
"""Their dtypes as compressed-tensors has them in a config."""
_SHARES: Mapping[Scales, tuple[float, ...]] = {
    "float": tuple(1 - 0.05 * step for step in range(9)),
    # Wider ranges too: the greatest value may lie nearer to 4 than to 6.
    "e4m3": (1.0, 0.6, 0.7, 0.8, 0.9, 1.1, 1.2, 1.3, 1.4, 1.5),
    "e8m0": (1.0, 2.0),
}


@dataclass(frozen=True, kw_only=True)
class Inputs:
    """How engines that multiply codes round the inputs of a product as they come, symmetrically."""

    type: Literal["int", "float"]
    bits: int
    group: int | None = None
    """Inputs of a token that share a scale; None for all."""
    scales: Scales = "float"
    """e4m3: the one float32 is in the file, from the calibration text."""

    def config(self) -> dict[str, object]:
        """`input_activations` of a config group of compressed-tensors."""
        strategy = "token" if self.group is None else "group"
        found: dict[str, object] = {
            "num_bits": self.bits,
            "type": self.type,
            "symmetric": True,
            "strategy": "tensor_group" if self.scales == "e4m3" else strategy,
            "group_size": self.group,
            "dynamic": "local" if self.scales == "e4m3" else True,
        }
        return found | _scale_dtypes(self.scales)


def _scale_dtypes(scales: Scales) -> dict[str, object]:
    name = _NAMES[scales]
    return {} if name is None else {"scale_dtype": name, "zp_dtype": name}


@dataclass(frozen=True, kw_only=True)
class Scheme:
    """How a matrix of O outputs and I inputs is rounded, and how it lies in a file."""

    name: str
    type: Literal["int", "float"]
    """Of codes: integers, or floating-point numbers (float8_e4m3fn of 8 bits, e2m1 of 4)."""
    bits: int
    """Of a code."""
    layout: Literal[
        "pack-quantized",
        "int-quantized",
        "float-quantized",
        "nvfp4-pack-quantized",
        "mxfp4-pack-quantized",
        "gpt-oss",
    ]
    """`format` of compressed-tensors, or the MXFP4 of gpt-oss's files."""
    group: int | None = None
    """Inputs of an output that share a scale; None for all."""
    block: tuple[int, int] | None = None
    """Outputs and inputs that share a scale, instead of groups."""
    symmetric: bool = True
    """False: each group has a zero point beside its scale."""
    scales: Scales = "float"
    """How scales are held."""
    clip: bool = False
    """Whether scales are other ones than those of the range where that lowers the squared error."""
    method: Method = "rounding"
    """How codes are chosen; all but rounding need text."""
    inputs: Inputs | None = None
    """None: inputs of products stay floats."""
    rotates: bool = False
    """Whether the model is rotated before it is rounded."""

    @property
    def codes(self) -> np.dtype:
        """Of codes in memory."""
        if self.type == "int":
            return np.dtype(np.int8)
        return np.dtype(ml_dtypes.float8_e4m3fn if self.bits == 8 else ml_dtypes.float4_e2m1fn)

    @property
    def shares(self) -> tuple[float, ...]:
        """Shares of a cell's range that scales are tried for; of powers of two, factors of the one
        at or below it."""
        return _SHARES[self.scales] if self.clip else (1.0,)

    @property
    def largest(self) -> float:
        """The greatest magnitude of a code that scales are made for."""
        if self.type == "float":
            return float(ml_dtypes.finfo(self.codes).max)
        return float(2 ** (self.bits - 1) - 1)

    @property
    def stored_scales(self) -> np.dtype | None:
        """Dtype of scales; None for that of the model."""
        return _STORED[self.scales]

    @property
    def needs_text(self) -> bool:
        """Whether something is measured on calibration text."""
        return self.method != "rounding" or self.measures_inputs

    @property
    def measures_inputs(self) -> bool:
        """Whether the file has the scale of a product's inputs."""
        return self.inputs is not None and self.inputs.scales == "e4m3"

    @property
    def not_trained(self) -> str:
        """Why quantization-aware training does not round by it; nothing where it does."""
        if self.method != "rounding":
            return "its codes are chosen by text, after training"
        if self.measures_inputs:
            return "its scales of inputs are measured on text, after training"
        if self.rotates:
            return "it rotates the model before it rounds"
        if self.scales == "e4m3":
            return "its scales are divided by one number of several matrices"
        return ""

    def cell(self, shape: tuple[int, int]) -> tuple[int, int]:
        """Outputs and inputs that share a scale in a matrix [O, I]."""
        rows, columns = shape
        if self.block is not None:
            return min(self.block[0], rows), min(self.block[1], columns)
        return 1, self.group or columns

    def weights(self) -> dict[str, object]:
        """`weights` of a config group of compressed-tensors."""
        strategy = "block" if self.block else "group" if self.group else "channel"
        found: dict[str, object] = {
            "num_bits": self.bits,
            "type": self.type,
            "symmetric": self.symmetric,
            "strategy": "tensor_group" if self.scales == "e4m3" else strategy,
            "group_size": self.group,
            "block_structure": None if self.block is None else list(self.block),
            "dynamic": False,
        }
        return found | _scale_dtypes(self.scales)


def _packed(bits: int, method: Method = "rounding", *, clip: bool = True) -> Scheme:
    suffix = "" if method == "rounding" else f"-{method}"
    return Scheme(
        name=f"w{bits}a16{suffix}",
        type="int",
        bits=bits,
        layout="pack-quantized",
        group=128,
        clip=clip,
        symmetric=method != "awq",
        method=method,
    )


def _int8(name: str, method: Method) -> Scheme:
    return Scheme(
        name=name,
        type="int",
        bits=8,
        layout="int-quantized",
        method=method,
        inputs=Inputs(type="int", bits=8),
    )


def _float4(name: Literal["mxfp4", "nvfp4"], *, rounds_inputs: bool) -> Scheme:
    group: int = 32 if name == "mxfp4" else 16
    scales: Scales = "e8m0" if name == "mxfp4" else "e4m3"
    inputs = Inputs(type="float", bits=4, group=group, scales=scales)
    return Scheme(
        name=name if rounds_inputs else f"{name}a16",
        type="float",
        bits=4,
        layout="mxfp4-pack-quantized" if name == "mxfp4" else "nvfp4-pack-quantized",
        group=group,
        scales=scales,
        clip=True,
        inputs=inputs if rounds_inputs else None,
    )


SCHEMES: Mapping[str, Scheme] = {
    scheme.name: scheme
    for scheme in (
        _packed(8, clip=False),
        _packed(4),
        _packed(3),
        _packed(4, "gptq"),
        _packed(3, "gptq"),
        _packed(4, "awq"),
        _packed(3, "awq"),
        _int8("w8a8", "rounding"),
        _int8("smoothquant", "smoothquant"),
        Scheme(
            name="fp8",
            type="float",
            bits=8,
            layout="float-quantized",
            inputs=Inputs(type="float", bits=8),
        ),
        Scheme(
            name="fp8-block",
            type="float",
            bits=8,
            layout="float-quantized",
            block=(128, 128),
            inputs=Inputs(type="float", bits=8, group=128),
        ),
        Scheme(
            name="w4a4",
            type="int",
            bits=4,
            layout="pack-quantized",
            group=128,
            clip=True,
            inputs=Inputs(type="int", bits=4),
            rotates=True,
        ),
        _float4("mxfp4", rounds_inputs=True),
        _float4("mxfp4", rounds_inputs=False),
        _float4("nvfp4", rounds_inputs=True),
        _float4("nvfp4", rounds_inputs=False),
    )
}
"""What there is, by name."""
TRAINED = tuple(name for name, scheme in SCHEMES.items() if not scheme.not_trained)
"""Names of those that quantization-aware training rounds by."""


def scheme_named(name: str, group_size: int | None = None) -> Scheme:
    """The scheme of a name.

    Args:
      name: a key of `SCHEMES`.
      group_size: inputs that share a scale where the format leaves that open (`pack-quantized`);
        None: 128.

    Raises:
      ConfigError: when there is none, or a size that is not of `GROUP_SIZES`.
    """
    if group_size is not None and group_size not in GROUP_SIZES:
        raise ConfigError(
            f"group_size={group_size} must be one of {', '.join(map(str, GROUP_SIZES))}"
        )
    if name in SCHEMES:
        found = SCHEMES[name]
        if group_size is None or found.layout != "pack-quantized":
            return found
        return replace(found, group=group_size)
    there = f"use one of {', '.join(SCHEMES)}, or of a whole model {', '.join(GGUF_SCHEMES)} (GGUF)"
    hint = did_you_mean(name, [*SCHEMES, *GGUF_SCHEMES], there)
    raise ConfigError(f"there is no scheme {name!r}; {hint}")
