"""Multi-head latent attention as a config."""

from dataclasses import dataclass

from fornax.config.errors import ConfigError

__all__ = ["LatentConfig"]


@dataclass(frozen=True, kw_only=True)
class LatentConfig:
    """Multi-head latent attention (DeepSeek-V2, section 2.1).

    Keys and values of all heads are products of one normalised latent a token, beside which stands
    a key that rotates and that all heads share. A head's query and key are a part of
    `unrotated_dim` numbers, made of the latent, and one of `rotated_dim`. The latents' norms add
    1e-6 to the mean square, whatever `norm_eps` is.
    """

    key_value_rank: int
    """Width of the latent."""
    query_rank: int | None = None
    """Width of the queries' own latent; None makes queries of the residual stream at once."""
    unrotated_dim: int
    """Width of the part of a head's query and key that does not rotate."""
    rotated_dim: int
    """Width of the part that does."""
    value_dim: int
    """Width of a head's value."""
    bias: bool = False
    """Whether the projections into the latents have a bias."""

    def __post_init__(self) -> None:
        """Check sizes."""
        for name in ("key_value_rank", "query_rank", "unrotated_dim", "rotated_dim", "value_dim"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ConfigError(f"latent.{name}={value} must be above 0")

    @property
    def cached_dim(self) -> int:
        """Numbers that a cache keeps of a token: the latent, and the key that all heads share."""
        return self.key_value_rank + self.rotated_dim
