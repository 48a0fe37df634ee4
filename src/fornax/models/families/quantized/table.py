"""The formats of quantized files that are read: one table for code, errors and documentation."""

import logging
from collections.abc import Callable, Mapping
from typing import NamedTuple, Protocol

import numpy as np

from fornax.checkpoint.safetensors_file import FLOATS, StoredTensor
from fornax.config.errors import CheckpointError, ConfigError
from fornax.config.suggest import first_few
from fornax.models.families.quantized.awq import read_awq
from fornax.models.families.quantized.bitsandbytes import read_bitsandbytes
from fornax.models.families.quantized.compressed import read_compressed
from fornax.models.families.quantized.fp8 import read_fp8
from fornax.models.families.quantized.gptq import read_gptq
from fornax.models.families.quantized.modelopt import read_modelopt
from fornax.models.families.quantized.mxfp4 import read_mxfp4
from fornax.models.families.quantized.tensors import Tensor
from fornax.models.families.reader import ConfigReader

__all__ = ["FORMATS", "QUANTIZATION_KEYS", "Quantization", "formats_table", "read_quantization"]

QUANTIZATION_KEYS = ("quantization_config", "compression_config")
"""Of config.json; older files have the second."""

_log = logging.getLogger("fornax.models")


class Scheme(Protocol):
    """What a quantization_config says of weights."""

    def dequantize(
        self, stored: Mapping[str, StoredTensor], dtype: np.dtype | None
    ) -> dict[str, Tensor]:
        """The tensors of the float model, none of them read yet.

        Args:
          stored: the decoder's tensors by name.
          dtype: the model's, by config.json; None where it does not say.

        Raises:
          CheckpointError: tensors that are missing, or of another dtype or shape than the format's.
        """


class Format(NamedTuple):
    """One `quant_method`."""

    method: str
    read: Callable[[ConfigReader], Scheme]
    weights: str
    """Which of its variants are read."""
    product: str
    """In which dtype a weight is its code times its scale."""
    kept: str
    """What packed products take as it is stored, of linear layers and of experts."""


FORMATS = (
    Format(
        "fp8",
        read_fp8,
        "float8_e4m3fn with scales of blocks (128 x 128, or others) or one of a tensor; scales of "
        "32, 16 or (E8M0) 8 bits",
        "float32",
        "all whose blocks are a multiple of 32 inputs wide, or one",
    ),
    Format(
        "compressed-tensors",
        read_compressed,
        "`float-`, `int-` and `naive-quantized`: by tensor, output, group or block; "
        "`pack-quantized`: 2 to 8 bits, by group or output, symmetric or with zero points, "
        "`weight_g_idx`; `nvfp4-pack-quantized`; `mxfp4-pack-quantized`; `mixed-precision`",
        "that of the scales; bfloat16 for NVFP4 and MXFP4",
        "integers of up to 7 bits, of 8 without zero points; floats of 8 bits; MXFP4. Groups of a "
        "multiple of 32 inputs; `weight_g_idx` of integers, in linear layers",
    ),
    Format("mxfp4", read_mxfp4, "experts of gpt-oss, blocks of 32", "float32", "all"),
    Format(
        "awq",
        read_awq,
        "4 bits with zero points, the layout `gemm`",
        "that of the scales",
        "groups of a multiple of 32 inputs",
    ),
    Format(
        "gptq",
        read_gptq,
        "2, 3, 4 and 8 bits, with or without `g_idx`; `checkpoint_format` `gptq` and `gptq_v2`",
        "that of the scales",
        "2, 3 and 4 bits, 8 whose zero points are 128; groups of a multiple of 32 inputs; "
        "activation order in linear layers",
    ),
    Format(
        "bitsandbytes",
        read_bitsandbytes,
        "`nf4` and `fp4`, with or without double quantization",
        "float32, then that of the stored state",
        "none",
    ),
    Format("modelopt", read_modelopt, "`NVFP4`, `W4A16_NVFP4` and `FP8`", "float32", "`FP8`"),
)


def formats_table() -> list[tuple[str, ...]]:
    """For each format its method, what is read of it, the dtype of products, and what is kept."""
    return [(f"`{form.method}`", form.weights, form.product, form.kept) for form in FORMATS]


class Quantization(NamedTuple):
    """How the weights of a directory are quantized."""

    method: str
    scheme: Scheme
    dtype: np.dtype | None
    """The model's, by config.json."""
    unused: tuple[str, ...]
    """Keys of the quantization_config about caches, which stay floats."""

    def dequantize(self, stored: Mapping[str, StoredTensor]) -> dict[str, Tensor]:
        """The tensors of the float model, none of them read yet.

        Args:
          stored: the decoder's tensors by name.

        Raises:
          CheckpointError: none is quantized; one is that the format does not tell how; one is
            missing, or of another dtype or shape than the format's.
        """
        found = self.scheme.dequantize(stored, self.dtype)
        floats = set(FLOATS.values())
        bare = [name for name, tensor in found.items() if tensor.dtype not in floats]
        if bare:
            shown = [f"{name} ({found[name].dtype.name})" for name in bare]
            raise CheckpointError(
                f"{first_few(shown)}: no numbers that a model could hold, and nothing beside them "
                f"says in the way of {self.method} what they stand for; check that "
                "quantization_config in config.json is that of these files"
            )
        if all(isinstance(tensor, StoredTensor) for tensor in found.values()):
            raise CheckpointError(
                f"config.json: quantization_config says that weights are quantized ({self.method}) "
                "and no tensor is; remove it from config.json if they were dequantized"
            )
        return found

    def warn_of_unused(self) -> None:
        """Log what the quantization_config says beside the weights, and is not done."""
        if self.unused:
            _log.warning(
                "config.json: %s of quantization_config is not used: weights are dequantized, and "
                "caches stay floats",
                ", ".join(self.unused),
            )


def read_quantization(values: Mapping[str, object]) -> Quantization | None:
    """How the weights beside a config.json are quantized; None where they are floats.

    Args:
      values: the parsed file.

    Raises:
      ConfigError: for a format, a key or a value that is not supported, by name.
    """
    inner = values.get("text_config")
    places = [values, inner] if isinstance(inner, Mapping) else [values]
    given = [
        (key, place[key])
        for place in places
        for key in QUANTIZATION_KEYS
        if place.get(key) is not None
    ]
    if not given:
        return None
    key, value = given[0]
    reader = ConfigReader({}).nested(key, value)
    method = reader.take("quant_method", None)
    if method is None and "config_groups" in reader:
        method = "compressed-tensors"
    form = next((form for form in FORMATS if form.method == method), None)
    if form is None:
        raise ConfigError(
            f"config.json: {key} has quant_method={method!r}, which is not supported; Fornax reads "
            f"{', '.join(form.method for form in FORMATS)}, and float32, bfloat16 and float16: "
            "give a checkpoint in one of these"
        )
    scheme = form.read(reader)
    unused = [x for x in ("kv_cache_scheme", "kv_cache_quant_algo") if reader.take(x, None)]
    reader.finish()
    named = (place.get(x) for place in places for x in ("dtype", "torch_dtype"))
    dtype = next((x for x in named if isinstance(x, str)), None)
    known = {dtype.name: dtype for dtype in FLOATS.values()}
    return Quantization(form.method, scheme, known.get(dtype or ""), tuple(unused))
