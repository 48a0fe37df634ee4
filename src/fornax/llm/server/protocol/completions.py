"""`POST /v1/completions`: its request and its answers."""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, model_validator

from fornax.llm.server.errors import ApiError
from fornax.llm.server.protocol.base import Listed, Refused, Reply, TokenId, Usage
from fornax.llm.server.protocol.sampling import GenerationBody

__all__ = ["Completion", "CompletionBody"]

_MOST_PROMPTS = 1024


class CompletionBody(GenerationBody):
    """A text to go on from."""

    prompt: str | Listed[TokenId] | Listed[str] | Listed[Listed[TokenId]]
    """A text, its token ids, or several of either."""
    echo: bool | None = False
    """Whether the prompt stands before the completion."""
    logprobs: Annotated[int, Field(ge=-1)] | None = None
    """Log probabilities of the tokens, and of so many others at each place."""
    max_tokens: Annotated[int, Field(ge=0, le=2**31 - 1)] | None = 16
    """Most tokens to make; 0 only with echo."""
    add_special_tokens: bool = True
    """Whether the tokenizer adds its special tokens to the prompt."""

    refused: ClassVar[Mapping[str, Refused]] = {
        **GenerationBody.refused,
        "suffix": Refused("text is made at the end only", ("",)),
        "prompt_embeds": Refused("give text or token ids"),
    }

    @model_validator(mode="after")
    def _consistent(self) -> "CompletionBody":
        if self.stream_options is not None and not self.stream:
            raise ApiError(400, "stream_options needs stream=true", param="stream_options")
        if self.prompt == []:
            raise ApiError(400, "prompt is empty; give a text or token ids", param="prompt")
        if len(self.prompts()) > _MOST_PROMPTS:
            raise ApiError(
                400,
                f"prompt has {len(self.prompts())} prompts; send at most {_MOST_PROMPTS}",
                param="prompt",
            )
        if self.max_tokens == 0 and not self.echo:
            raise ApiError(400, "max_tokens=0 makes nothing without echo", param="max_tokens")
        return self

    def prompts(self) -> list[str] | list[list[int]]:
        """The prompts one by one."""
        prompt: Any = self.prompt
        return prompt if isinstance(prompt, list) and not isinstance(prompt[0], int) else [prompt]


class CompletionLogprobs(Reply):
    text_offset: list[int]
    token_logprobs: list[float | None]
    tokens: list[str]
    top_logprobs: list[dict[str, float] | None] | None


class PositionLogprob(Reply):
    logprob: float
    rank: int
    decoded_token: str | None


class CompletionChoice(Reply):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: Literal["stop", "length", "abort", "repetition"] | None
    stop_reason: int | str | None = None
    prompt_logprobs: list[dict[str, PositionLogprob] | None] | None = None
    prompt_token_ids: list[int] | None = None
    token_ids: list[int] | None = None


class Completion(Reply):
    """The answer to a completion; a stream's chunks are the same object with what is new."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    system_fingerprint: str | None
    usage: Usage | None
