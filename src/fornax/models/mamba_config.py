"""Mamba-2 as a config."""

import math
from dataclasses import dataclass

from fornax.config.errors import ConfigError

__all__ = ["Mamba2Config"]


@dataclass(frozen=True, kw_only=True)
class Mamba2Config:
    """Mamba-2 in place of some layers' attention (Dao and Gu 2024, Transformers are SSMs).

    A short causal convolution mixes each channel of the heads' inputs, of B and of C over time.
    Each head has a matrix that a token decays, adds its input times B to, and reads with C. A gate
    multiplies what it reads, which is normalised then.
    """

    num_heads: int
    """Number of heads."""
    head_dim: int
    """Width of a head's input."""
    state_dim: int
    """Width of B and C: numbers of the state for each channel of a head."""
    num_groups: int = 1
    """Groups of heads that share B and C, a divisor of `num_heads`; the norm is over a group."""
    conv_width: int = 4
    """Tokens that a convolution sees, its own included."""
    conv_bias: bool = True
    """Whether the convolutions have a bias."""
    bias: bool = False
    """Whether the projections into and out of the layer have one."""
    dt_limit: tuple[float, float] = (0.0, math.inf)
    """Least and largest step."""

    def __post_init__(self) -> None:
        """Check sizes and limits."""
        for name in ("num_heads", "head_dim", "state_dim", "num_groups", "conv_width"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"mamba2.{name}={getattr(self, name)} must be above 0")
        if self.num_heads % self.num_groups:
            raise ConfigError(
                f"mamba2.num_heads={self.num_heads} is not a multiple of num_groups="
                f"{self.num_groups}; each group has the same number of heads"
            )
        if len(self.dt_limit) != 2 or not 0 <= self.dt_limit[0] < self.dt_limit[1]:
            raise ConfigError(
                f"mamba2.dt_limit={self.dt_limit!r} must be two numbers, the first at least 0 and "
                "below the second"
            )

    @property
    def num_key_heads(self) -> int:
        """K, heads of B and C."""
        return self.num_groups

    @property
    def heads_per_key(self) -> int:
        """R, heads of a group."""
        return self.num_heads // self.num_groups

    @property
    def key_dim(self) -> int:
        """H, width of B and C."""
        return self.state_dim

    @property
    def value_dim(self) -> int:
        """V, width of a head."""
        return self.head_dim

    @property
    def sharded_heads(self) -> int:
        """Heads that the mesh axis `tensor` divides."""
        return self.num_heads

    @property
    def key_width(self) -> int:
        """Width of all groups' B."""
        return self.num_groups * self.state_dim

    @property
    def value_width(self) -> int:
        """Width of all heads' inputs."""
        return self.num_heads * self.head_dim

    @property
    def state_size(self) -> int:
        """Numbers of a row's state in one layer."""
        return self.value_width * self.state_dim

    @property
    def state_flops(self) -> int:
        """Operations a token on one layer's state: to write it and to read it."""
        return 4 * self.state_size

    @property
    def conv_channels(self) -> tuple[tuple[str, int, int], ...]:
        """Of each convolution the logical axis and number of its heads, and a head's channels."""
        groups = ("groups", self.num_groups, self.state_dim)
        return (("heads", self.num_heads, self.head_dim), groups, groups)

    def num_weights(self, hidden_size: int) -> int:
        """Weights of one layer that take part in matrix products."""
        return hidden_size * (3 * self.value_width + 2 * self.key_width + self.num_heads)

    def num_vectors(self, hidden_size: int) -> int:
        """Its other parameters: convolutions, biases, the norm, and three numbers a head."""
        channels = self.value_width + 2 * self.key_width
        biases = self.value_width + channels + self.num_heads + hidden_size
        taps = self.conv_width + self.conv_bias
        return taps * channels + self.bias * biases + self.value_width + 3 * self.num_heads
