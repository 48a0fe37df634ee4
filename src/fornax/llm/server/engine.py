"""What the server asks of an engine: `AsyncEngine` fits, and so does a test's."""

from collections.abc import AsyncIterator, Awaitable, Mapping
from typing import Any, Protocol

from fornax.data import Tokenizer
from fornax.llm.outputs import EmbeddingOutput, RequestOutput
from fornax.llm.sampling_params import SamplingParams
from fornax.llm.stats import Readiness
from fornax.llm.text import ChatTemplate

__all__ = ["Engine"]


class Engine(Protocol):
    """An engine that runs in a thread of its own."""

    @property
    def tokenizer(self) -> Tokenizer | None:
        """The model's; spelled-out special tokens become tokens."""

    @property
    def chat_template(self) -> ChatTemplate | None:
        """The model's; None when its directory has none."""

    @property
    def max_model_len(self) -> int:
        """Tokens of a sequence, prompt and output, at most."""

    @property
    def max_num_seqs(self) -> int:
        """Sequences that run at once."""

    @property
    def default_sampling_params(self) -> Mapping[str, Any]:
        """Fields of SamplingParams as the model's generation_config.json has them."""

    @property
    def num_unfinished(self) -> int:
        """Sequences that run or wait."""

    @property
    def is_sleeping(self) -> bool:
        """Whether the cache was given up until `wake`."""

    def readiness(self) -> Readiness:
        """How far compiling is."""

    def error(self) -> BaseException | None:
        """What the engine died of."""

    def generate(
        self,
        prompt_ids: list[int],
        params: SamplingParams,
        *,
        request_id: str,
        lora: str | None = None,
        priority: int = 0,
        prompt: str | None = None,
        cache_salt: str | None = None,
        constrain_after: tuple[int, ...] = (),
    ) -> AsyncIterator[RequestOutput]:
        """Outputs as they come; EngineError for a request it cannot honour. Closing aborts.

        Constraints on the text hold after the tokens `constrain_after`.
        """

    def embed(
        self,
        prompt_ids: list[int],
        *,
        request_id: str,
        lora: str | None = None,
        priority: int = 0,
        cache_salt: str | None = None,
    ) -> Awaitable[EmbeddingOutput]:
        """The prompt's embedding. Cancelling aborts."""

    async def add_lora(self, name: str, path: str) -> None:
        """Load an adapter."""

    async def remove_lora(self, name: str) -> None:
        """Unload an adapter."""

    def loras(self) -> Mapping[str, str]:
        """Paths of the loaded adapters by name; a snapshot, which later changes leave alone."""

    async def sleep(self, level: int = 1) -> None:
        """Give the cache up."""

    async def wake(self) -> None:
        """Take the cache back."""

    async def reset_prefix_cache(self) -> None:
        """Forget every cached prefix."""

    def start(self) -> None:
        """Start the thread, and compiling."""

    def shutdown(self, drain_seconds: float = 0.0) -> None:
        """Stop the thread, after the running requests or the time."""
