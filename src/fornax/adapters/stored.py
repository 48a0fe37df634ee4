"""A base that its files hold quantized, used with its own codes instead of being rounded again.

A kernel's codes and scales become those of `quantize.Blocks`, which stand for the numbers that
reading the files as floats gives, bit for bit.

Legend: O outputs, I inputs of a matrix, G groups of inputs, E experts.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import jax
import numpy as np

from fornax.adapters.quantize import Blocks
from fornax.config.errors import CheckpointError, ConfigError
from fornax.models import CodeFormat, Codes, StoredModel
from fornax.models.layout import flat_variables

__all__ = ["Held", "held_codes", "read_codes", "stored_blocks"]

_INSTEAD = "take lora.quantize=nf4, which rounds its values again, or leave it out of lora.targets"


@dataclass(frozen=True)
class Held:
    """How files hold a kernel."""

    form: CodeFormat | str
    """Or why its codes cannot be used."""
    product: str
    """Dtype that a code times its scale is rounded to."""


def held_codes(stored: StoredModel) -> Mapping[str, Held]:
    """How the quantized kernels of a directory are held, by path."""
    found = {}
    for path, form in stored.code_formats().items():
        first = next(iter(stored.blocks[path].values()))[0][0]
        found[path] = Held(form, str(getattr(first, "computed", first.dtype)))
    return found


def stored_blocks(
    path: str, shape: Sequence[int], axis: int, dtype: str, held: Mapping[str, Held] | None
) -> Blocks:
    """How a kernel is held as its files have it.

    Args:
      path: of the module.
      shape: of the kernel.
      axis: its last axis of inputs, counted from the last one.
      dtype: of the parameter.
      held: of the files; None where there are none.

    Raises:
      ConfigError: when there are no codes, or none that adapters take.
    """
    if held is None:
        raise ConfigError(
            "lora.quantize=stored takes the codes of a quantized Hugging Face directory, and this "
            "base is not read from one; take nf4, int8 or int4"
        )
    own = held.get(f"{path}/kernel")
    if own is None:
        raise ConfigError(f"lora.quantize=stored, and the files hold {path} as floats; {_INSTEAD}")
    formats: Mapping[str, Literal["int4", "int8"]] = {"int4": "int4", "int8": "int8"}
    if isinstance(own.form, str) or own.form.precision not in formats or own.form.ordered:
        why = own.form if isinstance(own.form, str) else f"{own.form} is not held here"
        raise ConfigError(f"lora.quantize=stored cannot use the codes of {path}: {why}; {_INSTEAD}")
    width = shape[axis]
    size = math.gcd(own.form.group or width, width)
    if own.form.precision == "int4" and size % 2:
        raise ConfigError(
            f"lora.quantize=stored cannot use the codes of {path}: groups of {own.form.group} "
            f"inputs and heads of {width} leave no pairs; {_INSTEAD}"
        )
    return Blocks(
        formats[own.form.precision], axis, size, dtype, scale="float32", product=own.product
    )


def read_codes(stored: StoredModel, path: str, blocks: Blocks, held: Held) -> tuple[jax.Array, ...]:
    """The codes and scales of a kernel in the places of `blocks`.

    Args:
      stored: the model.
      path: of the kernel.
      blocks: from `stored_blocks`.
      held: that of the kernel.

    Raises:
      CheckpointError: zero points that are not in the middle of the codes, scales that are not
        finite.
    """
    variable = flat_variables(stored.model)[path]
    axes, whole = variable.get_metadata()["axes"], variable.get_value().shape
    stacked = None not in stored.blocks[path]
    axes, whole = axes[stacked:], whole[stacked:]
    shape = whole[axes[0] == "expert" :]  # of one matrix
    axis = len(shape) + blocks.axis
    count = shape[axis] // blocks.size

    def arrange(codes: Codes) -> tuple[np.ndarray, ...]:
        values = codes.values.swapaxes(-1, -2).reshape(shape)
        if blocks.format == "int4":
            if codes.zeros is not None and (codes.zeros != 8).any():
                raise CheckpointError(
                    f"lora.quantize=stored cannot use the codes of {path}: they have zero points "
                    f"other than 8; {_INSTEAD}"
                )
            pairs = values.reshape(*shape[:axis], shape[axis] // 2, 2, *shape[axis + 1 :])
            values = pairs.take(0, axis + 1) | (pairs.take(1, axis + 1) << 4)
        inputs = codes.values.shape[-1]
        assert isinstance(held.form, CodeFormat)
        groups = np.arange(0, inputs, blocks.size) // (held.form.group or inputs)
        scales = codes.scales.swapaxes(-1, -2)[..., groups, :]
        scales = scales.reshape(*shape[:axis], count, *shape[axis + 1 :])
        return values, scales

    cut = len(whole) + blocks.axis
    return stored.convert_codes(path, arrange, [axes, (*axes[:cut], None, *axes[cut + 1 :])])
