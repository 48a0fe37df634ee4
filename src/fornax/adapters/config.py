"""What is adapted, and how."""

import math
from dataclasses import dataclass, field
from typing import Literal

from fornax.config.errors import ConfigError

__all__ = ["LoRA", "Quantization"]

Quantization = Literal["nf4", "int8", "int4", "stored"]


@dataclass(frozen=True, kw_only=True)
class LoRA:
    """Low-rank adapters: y = W x + (alpha / rank) B A x, of which only A and B are trained.

    Hu et al. 2021 (arXiv:2106.09685); rsLoRA: Kalajdzievski 2023 (arXiv:2312.03732); DoRA: Liu et
    al. 2024 (arXiv:2402.09353); QLoRA: Dettmers et al. 2023 (arXiv:2305.14314).
    """

    rank: int = 16
    """Rows of A and columns of B."""
    alpha: float | None = None
    """The adapter's product is multiplied by alpha / rank; null: twice the rank."""
    targets: tuple[str, ...] | None = None
    """Patterns of the modules to adapt: `attention/q` is every path that ends so, `*` is one part
    of a path, and a module that holds others stands for those in it. Null: the projections of
    attention, of MLPs and of experts, each its own; not a router."""
    experts: Literal["own", "shared"] = "own"
    """Whether each expert of a mixture has an A and a B of its own, or all experts of a projection
    share one of each."""
    dropout: float = 0.0
    """Share of an adapter's inputs that is dropped in training."""
    dora: bool = False
    """Train a magnitude for each output beside the direction that A and B change."""
    rslora: bool = False
    """Multiply by alpha / sqrt(rank) instead, so that large ranks keep their effect."""
    init: Literal["kaiming", "gaussian"] = "kaiming"
    """How A is drawn: uniform within 1 / sqrt(inputs), or normal with deviation 1 / rank. B is
    zero, so that training begins at the base model."""
    rank_pattern: dict[str, int] = field(default_factory=dict)
    """Pattern to a rank other than `rank`; the first that fits counts."""
    alpha_pattern: dict[str, float] = field(default_factory=dict)
    """Pattern to an alpha other than `alpha`; the first that fits counts."""
    quantize: Quantization | None = None
    """Hold the adapted modules' base weights in this many bits (QLoRA). `stored`: with the codes
    that the base's files have, 4 bits without zero points or 8, instead of rounding their values
    again."""
    quantize_block: int = 64
    """Inputs that share a scale in a quantized weight, at most; files have their own."""

    def __post_init__(self) -> None:
        """Check the values."""
        for name, rank in {"rank": self.rank, **self.rank_pattern}.items():
            if rank < 1:
                raise ConfigError(f"{name}={rank} adapts nothing; use 1 or more")
        for name, alpha in {"alpha": self.alpha, **self.alpha_pattern}.items():
            if alpha is not None and not (math.isfinite(alpha) and alpha > 0):
                raise ConfigError(f"lora alpha {name}={alpha} must be a number above 0")
        if not 0 <= self.dropout < 1:
            raise ConfigError(f"lora.dropout={self.dropout} must be at least 0 and below 1")
        if self.targets is not None and not self.targets:
            raise ConfigError('lora.targets is empty; name modules, such as ["attention/*"]')
        if self.quantize_block < 2:
            raise ConfigError(f"lora.quantize_block={self.quantize_block} must be 2 or more")
