"""Gated DeltaNet as a config."""

from dataclasses import dataclass

from fornax.config.errors import ConfigError

__all__ = ["GatedDeltaConfig"]


@dataclass(frozen=True, kw_only=True)
class GatedDeltaConfig:
    """Gated DeltaNet in the place of some layers' attention (Yang, Kautz and Hatamizadeh 2024).

    A short causal convolution mixes each channel of queries, keys and values over time. Each value
    head has a matrix that maps keys to values, which a token decays, corrects and reads. A gate
    multiplies what it reads, normalised.
    """

    num_key_heads: int
    """Number of heads of queries and keys."""
    num_value_heads: int
    """Number of heads of values, a multiple: that many share a key head."""
    key_dim: int
    """Width of a head's query and key."""
    value_dim: int
    """Width of a head's value."""
    conv_width: int = 4
    """Tokens that a convolution sees, its own included."""

    def __post_init__(self) -> None:
        """Check sizes."""
        sizes = ("num_key_heads", "num_value_heads", "key_dim", "value_dim", "conv_width")
        for name in sizes:
            if not getattr(self, name) > 0:
                raise ConfigError(f"gated_delta.{name}={getattr(self, name)} must be above 0")
        if self.num_value_heads % self.num_key_heads:
            raise ConfigError(
                f"gated_delta.num_value_heads={self.num_value_heads} is not a multiple of "
                f"num_key_heads={self.num_key_heads}; each key head serves the same number of "
                "value heads"
            )

    @property
    def heads_per_key(self) -> int:
        """R, value heads of a key head."""
        return self.num_value_heads // self.num_key_heads

    @property
    def key_width(self) -> int:
        """Width of all heads' keys."""
        return self.num_key_heads * self.key_dim

    @property
    def value_width(self) -> int:
        """Width of all heads' values."""
        return self.num_value_heads * self.value_dim

    @property
    def state_size(self) -> int:
        """Numbers of a row's state in one layer."""
        return self.value_width * self.key_dim
