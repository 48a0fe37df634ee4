"""How completions are drawn, and the seeds that make every draw its own and repeatable."""

import hashlib
import struct
from dataclasses import dataclass

from fornax.config.errors import ConfigError

__all__ = ["SampleSettings", "sample_seed"]


@dataclass(frozen=True, kw_only=True)
class SampleSettings:
    """How completions are drawn, and where they end."""

    n: int = 1
    """Completions of each prompt."""
    temperature: float = 1.0
    """The logits are divided by it; 0 takes the most likely token, for n=1 only."""
    top_p: float = 1.0
    """Keeps the most likely tokens that together reach this probability."""
    top_k: int = 0
    """Keeps this many of the most likely tokens; 0 keeps all."""
    min_p: float = 0.0
    """Keeps tokens at least this share as likely as the most likely one."""
    max_tokens: int = 256
    """Longest completion, in tokens."""
    min_tokens: int = 0
    """Tokens before which a completion does not end."""
    stop: tuple[str, ...] = ()
    """Text that ends a completion; its tokens stay."""
    stop_token_ids: tuple[int, ...] = ()
    """Tokens, besides the model's end tokens, that end a completion; they stay."""
    ignore_eos: bool = False
    """Goes on after the model's end token."""

    def __post_init__(self) -> None:
        """Check values that the engine would refuse later."""
        for name, least in (("n", 1), ("max_tokens", 1), ("min_tokens", 0), ("top_k", 0)):
            if getattr(self, name) < least:
                raise ConfigError(f"{name}={getattr(self, name)} must be {least} or more")
        if not 0 <= self.temperature <= 2:
            raise ConfigError(f"temperature={self.temperature} must be from 0 to 2")
        if not 0 < self.top_p <= 1:
            raise ConfigError(f"top_p={self.top_p} must be above 0 and at most 1")
        if not 0 <= self.min_p <= 1:
            raise ConfigError(f"min_p={self.min_p} must be from 0 to 1")
        if self.temperature == 0 and self.n > 1:
            raise ConfigError(
                f"n={self.n} at temperature=0 would be {self.n} times the same completion; raise "
                "the temperature, or use n=1"
            )
        if self.min_tokens > self.max_tokens:
            raise ConfigError(
                f"min_tokens={self.min_tokens} is above max_tokens={self.max_tokens}; lower it"
            )

    @property
    def filters(self) -> bool:
        """Whether top-k, top-p or min-p leave tokens out."""
        return bool(self.top_k or self.top_p < 1 or self.min_p)


def sample_seed(run_seed: int, step: int, prompt: int, sample: int = 0) -> int:
    """The seed of one request: 63 bits that differ wherever any of the four does.

    A sampler draws completion i of a request with seed + i, each token with random bits of its
    own place, whatever else is in the batch.

    Args:
      run_seed: of the run.
      step: the round of rollouts.
      prompt: which prompt of the round.
      sample: which completion of the prompt, where each is a request of its own.
    """
    packed = struct.pack(">4q", run_seed, step, prompt, sample)
    digest = hashlib.blake2b(packed, digest_size=8, person=b"fornax rollout").digest()
    return int.from_bytes(digest, "big") >> 1
