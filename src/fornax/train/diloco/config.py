"""What a user may say about DiLoCo; the names are those of torchft and TorchTitan."""

from dataclasses import dataclass

from fornax.config.errors import ConfigError
from fornax.train.diloco.codec import ExchangeDtype

__all__ = ["DilocoConfig"]


@dataclass(frozen=True, kw_only=True)
class DilocoConfig:
    """Slices that train apart; `fornax launch --slices N` starts them.

    One fragment and no delay is DiLoCo (Douillard et al. 2023, arXiv 2311.08105); several fragments
    are Streaming DiLoCo (Douillard et al. 2025, arXiv 2501.18512). The optimizer of the run is the
    inner one. `batch_size` counts the rows of a step over all slices.
    """

    sync_every: int = 100
    """Inner steps between two exchanges of the same parameters, H; a multiple of
    `num_fragments`."""
    num_fragments: int = 1
    """Parts that the parameters are exchanged in, one after the other: layer l belongs to fragment
    l modulo their number, all else to the smallest."""
    fragment_sync_delay: int = 0
    """Inner steps that continue while a fragment is exchanged; less than `sync_every` /
    `num_fragments`."""
    fragment_update_alpha: float = 0.0
    """Share of a slice's own parameters in what it continues with after an exchange; 0 takes the
    common ones. With a delay, some keeps what was learned meanwhile."""
    exchange_dtype: ExchangeDtype = "float32"
    """How the changes are sent: float32, bfloat16, int8, or e3m0 (4 bits), the last two with a
    float32 scale for each 128 values. They are always added in float32."""
    outer_learning_rate: float = 0.7
    """Learning rate of the outer optimizer, SGD with Nesterov momentum."""
    outer_momentum: float = 0.9
    """Its momentum; 0 with a learning rate of 1 averages the slices' parameters."""
    timeout: float = 300.0
    """Seconds that the first slice to exchange waits for the others; those that have not come are
    left out until they take up the common parameters."""

    def __post_init__(self) -> None:
        """Check numbers and combinations."""
        if self.sync_every < 1 or self.num_fragments < 1:
            raise ConfigError(
                f"sync_every={self.sync_every} and num_fragments={self.num_fragments} must be 1 or "
                "more"
            )
        if self.sync_every % self.num_fragments:
            raise ConfigError(
                f"sync_every={self.sync_every} is not a multiple of num_fragments="
                f"{self.num_fragments}: fragments are exchanged at equal distances"
            )
        if not 0 <= self.fragment_sync_delay < self.spacing:
            raise ConfigError(
                f"fragment_sync_delay={self.fragment_sync_delay} must lie between 0 and "
                f"{self.spacing - 1}: sync_every / num_fragments = {self.spacing} steps lie "
                "between two exchanges, and one ends before the next begins"
            )
        if not 0 <= self.fragment_update_alpha < 1:
            raise ConfigError(
                f"fragment_update_alpha={self.fragment_update_alpha} must be 0 or more and below 1"
            )
        if self.outer_learning_rate <= 0 or not 0 <= self.outer_momentum < 1:
            raise ConfigError(
                f"outer_learning_rate={self.outer_learning_rate} must be above 0 and "
                f"outer_momentum={self.outer_momentum} at least 0 and below 1"
            )
        if self.timeout <= 0:
            raise ConfigError(f"timeout={self.timeout} are seconds, above 0")

    @property
    def spacing(self) -> int:
        """Steps between two exchanges."""
        return self.sync_every // self.num_fragments

    def due(self, step: int) -> int | None:
        """The fragment whose exchange begins after `step`; None where none does."""
        turn, between = divmod(step, self.spacing)
        return None if between or not turn else (turn - 1) % self.num_fragments
