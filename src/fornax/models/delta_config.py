"""Gated DeltaNet as a config."""

from dataclasses import dataclass

from fornax.config.errors import ConfigError

__all__ = ["GatedDeltaConfig"]


@dataclass(frozen=True, kw_only=True)
class GatedDeltaConfig:
    """Gated DeltaNet in place of some layers' attention (Yang, Kautz and Hatamizadeh 2024).

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
    def conv_bias(self) -> bool:
        """Whether the convolutions have a bias: none does."""
        return False

    @property
    def sharded_heads(self) -> int:
        """Heads that the mesh axis `tensor` divides."""
        return self.num_key_heads

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

    @property
    def state_flops(self) -> int:
        """Operations a token on one layer's state: to look up, to write and to read."""
        return 6 * self.state_size

    @property
    def conv_channels(self) -> tuple[tuple[str, int, int], ...]:
        """Of each convolution the logical axis and number of its heads, and a head's channels."""
        widths = (self.key_dim, self.key_dim, self.heads_per_key * self.value_dim)
        return tuple(("heads", self.num_key_heads, width) for width in widths)

    def num_weights(self, hidden_size: int) -> int:
        """Weights of one layer that take part in matrix products."""
        widths = 2 * self.key_width + 3 * self.value_width + 2 * self.num_value_heads
        return hidden_size * widths

    def num_vectors(self, hidden_size: int) -> int:
        """Its other parameters: convolutions, decays and the norm."""
        del hidden_size
        convolutions = self.conv_width * (2 * self.key_width + self.value_width)
        return convolutions + 2 * self.num_value_heads + self.value_dim
