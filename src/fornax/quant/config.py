"""Options of low-bit training, and of quantizing a model."""

import re
from dataclasses import dataclass
from typing import Literal

from fornax.config.errors import ConfigError
from fornax.quant.leaves import check_group_size, parse_rule
from fornax.quant.schemes import TRAINED, scheme_named

__all__ = ["QuantConfig", "QuantizeConfig", "TrainingScheme"]

TrainingScheme = Literal["int8", "fp8"]
"""Products whose operands are rounded to integers of 8 bits, or to float8: e4m3 for weights and
activations, e5m2 for gradients."""


@dataclass(frozen=True, kw_only=True)
class QuantConfig:
    """Quantized training; weights stay what `dtypes.params` says."""

    scheme: TrainingScheme | None = None
    """How the linear layers of the layers multiply, forward and backward; null as `dtypes.compute`
    says."""
    exclude: tuple[str, ...] = ()
    """Regular expressions over paths of weights, such as layers/attention/q/kernel, whose products
    stay in `dtypes.compute`."""
    allow_slow: bool = False
    """Whether a scheme may run that takes longer here than bfloat16; else it is an error."""
    qat: str | None = None
    """Quantization-aware training: the scheme of `fornax quantize` by which the forward pass rounds
    weights (w8a16, w4a16, w3a16, w8a8, fp8, fp8-block, mxfp4, mxfp4a16); null rounds none."""
    rules: tuple[str, ...] = ()
    """With `qat`: PATTERN=SCHEME or PATTERN=keep for other leaves, as `fornax quantize` takes
    them."""
    group_size: int | None = None
    """With `qat`: inputs that share a scale in w8a16, w4a16 and w3a16 (32, 64 or 128), as
    `fornax quantize` takes it; null: 128."""

    def __post_init__(self) -> None:
        """Check the combinations."""
        if self.qat is not None:
            if why := scheme_named(self.qat).not_trained:
                raise ConfigError(
                    f"qat={self.qat} is not a scheme to train with, because {why}; use one of "
                    f"{', '.join(TRAINED)}"
                )
            if self.scheme is not None:
                raise ConfigError(
                    f"qat={self.qat} and scheme={self.scheme} are both set: the one trains a model "
                    "for the codes that it will be served in, the other multiplies in low "
                    "precision to be fast; set one of them"
                )
        for name, value in (("rules", [*self.rules]), ("group_size", self.group_size)):
            if value and self.qat is None:
                raise ConfigError(
                    f"{name}={value}: only qat reads {name}, and qat is null; set qat, or leave "
                    f"{name} out"
                )
        for rule in self.rules:
            parse_rule(rule)
        if self.qat is not None:
            check_group_size(self.group_size, [self.qat], self.rules)
        for pattern in self.exclude:
            try:
                re.compile(pattern)
            except re.error as error:
                raise ConfigError(
                    f"exclude: {pattern!r} is not a regular expression: {error}"
                ) from None
        given = [name for name in ("exclude", "allow_slow") if getattr(self, name)]
        if given and self.scheme is None:
            raise ConfigError(
                f"{given[0]} is for a scheme, and scheme is null; set scheme, or leave {given[0]} "
                "out"
            )


@dataclass(frozen=True, kw_only=True)
class QuantizeConfig:
    """How `fornax quantize` stores a model's linear layers."""

    scheme: str | None = None
    """A scheme such as w4a16, w8a16, w4a16-gptq, fp8, mxfp4 or q4_k_m (the help lists all); this or
    `search`."""
    search: bool = False
    """Choose the scheme of each part by what it costs, among `schemes`."""
    max_loss: str | None = None
    """What the loss, in nats, may rise by, such as 0.5%; above it no directory is written. `search`
    needs it."""
    schemes: tuple[str, ...] = ()
    """What `search` chooses from; empty: w8a16, w4a16-gptq and w3a16-gptq."""
    data: str | None = None
    """A file of JSON lines with a column text, to calibrate and to compare logits with; null
    rounds without text and compares nothing."""
    rules: tuple[str, ...] = ()
    """PATTERN=SCHEME or PATTERN=keep: other schemes for the parameters that a regular expression
    finds by path, such as layers/0/=w8a16."""
    group_size: int | None = None
    """Inputs that share a scale in w8a16, w4a16 and w3a16: 32, 64 or 128; null: 128."""
    samples: int = 128
    """Rows of the text to calibrate with, at most."""
    length: int = 512
    """Tokens of a row; at most the model's positions are taken."""
    seed: int = 0
    """Of the order in which texts are taken, and of rotations."""
