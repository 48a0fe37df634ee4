"""`POST /v1/chat/completions`: its request and its answers."""

from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal

from pydantic import Field, model_validator

from fornax.llm.server.errors import ApiError
from fornax.llm.server.protocol.base import Mapped, Refused, Reply, Usage
from fornax.llm.server.protocol.completions import PositionLogprob
from fornax.llm.server.protocol.messages import ChatPrompt, NamedToolChoice
from fornax.llm.server.protocol.sampling import GenerationBody

__all__ = ["Chat", "ChatBody", "ChatChunk"]

_NO_FUNCTIONS = Refused("use tools and tool_choice")


class ChatBody(ChatPrompt, GenerationBody):
    """A conversation to go on with."""

    logprobs: bool | None = False
    """Whether the tokens' log probabilities are returned."""
    top_logprobs: Annotated[int, Field(ge=-1)] | None = 0
    """Log probabilities of so many other tokens at each place; needs logprobs."""
    max_tokens: Annotated[int, Field(ge=1, le=2**31 - 1)] | None = None
    """Older name of max_completion_tokens."""
    max_completion_tokens: Annotated[int, Field(ge=1, le=2**31 - 1)] | None = None
    """Most tokens to make; without it what the context has room for."""
    tool_choice: Literal["none", "auto", "required"] | NamedToolChoice | None = None
    """Which tool is called: auto where there are tools, else none."""
    parallel_tool_calls: bool | None = True
    """Whether more than one call may come at once."""
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = (
        None
    )
    """Given to the chat template, with enable_thinking."""
    include_reasoning: bool = True
    """Whether the answer has the reasoning."""
    echo: bool = False
    """Whether the last message stands before the answer if it has the same role."""
    return_prompt_text: bool | None = None
    """Whether the answer has the text that the chat template made."""
    metadata: Mapped[str] | None = None
    """Written to the access log."""
    safety_identifier: str | None = None
    """Written to the access log."""

    refused: ClassVar[Mapping[str, Refused]] = {
        **GenerationBody.refused,
        "audio": Refused("output is text"),
        "modalities": Refused("output is text", (["text"],)),
        "functions": _NO_FUNCTIONS,
        "function_call": _NO_FUNCTIONS,
        "prediction": Refused("use speculative decoding, a setting of the server"),
        "prompt_cache_key": Refused("every prompt's prefix is looked up; use cache_salt to part"),
        "prompt_cache_options": Refused("use cache_salt to part requests"),
        "moderation": Refused("texts are not judged"),
        "prompt_cache_retention": Refused("the cache keeps what it has room for", ("in_memory",)),
        "service_tier": Refused("use priority", ("auto", "default")),
        "store": Refused("nothing is stored", (False,)),
        "verbosity": Refused("say it in the messages", ("medium",)),
        "web_search_options": Refused("the server does not search"),
        "media_io_kwargs": Refused("input is text", ({},)),
        "mm_processor_kwargs": Refused("input is text", ({},)),
    }

    @model_validator(mode="after")
    def _consistent(self) -> "ChatBody":
        if self.stream_options is not None and not self.stream:
            raise ApiError(400, "stream_options needs stream=true", param="stream_options")
        if self.top_logprobs and not self.logprobs:
            raise ApiError(400, "top_logprobs needs logprobs=true", param="top_logprobs")
        choice = self.tool_choice
        if choice not in (None, "none") and not self.tools:
            raise ApiError(400, "tool_choice needs tools", param="tool_choice")
        if isinstance(choice, NamedToolChoice):
            names = [tool.function.name for tool in self.tools or ()]
            if choice.function.name not in names:
                raise ApiError(
                    400,
                    f"tool_choice: {choice.function.name} is not among the tools "
                    f"({', '.join(names)})",
                    param="tool_choice",
                )
        return self

    def limit(self) -> int | None:
        """The most tokens to make, under either name."""
        if self.max_completion_tokens is not None:
            return self.max_completion_tokens
        return self.max_tokens

    def choice(self) -> Literal["none", "auto", "required"] | NamedToolChoice:
        """The tool choice with its default."""
        return self.tool_choice or ("auto" if self.tools else "none")


class TokenLogprob(Reply):
    token: str
    logprob: float
    bytes: list[int] | None


class ContentLogprob(TokenLogprob):
    top_logprobs: list[TokenLogprob]


class ChatLogprobs(Reply):
    content: list[ContentLogprob] | None


class CalledFunction(Reply):
    name: str | None = None
    arguments: str


class Call(Reply):
    id: str | None = None
    type: Literal["function"] | None = None
    index: int | None = None
    function: CalledFunction


class ChatMessage(Reply):
    role: str
    content: str | None
    reasoning: str | None = None
    refusal: str | None = None
    tool_calls: list[Call] | None = None


_Finish = Literal["stop", "length", "tool_calls", "abort", "repetition"]


class ChatChoice(Reply):
    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: _Finish
    stop_reason: int | str | None = None
    token_ids: list[int] | None = None


class Chat(Reply):
    """The answer to a chat."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    system_fingerprint: str | None
    usage: Usage
    prompt_logprobs: list[dict[str, PositionLogprob] | None] | None = None
    prompt_token_ids: list[int] | None = None
    prompt_text: str | None = None


class Delta(Reply):
    role: str | None = None
    content: str | None = None
    reasoning: str | None = None
    tool_calls: list[Call] | None = None


class ChunkChoice(Reply):
    index: int
    delta: Delta
    logprobs: ChatLogprobs | None
    finish_reason: _Finish | None
    stop_reason: int | str | None = None
    token_ids: list[int] | None = None


class ChatChunk(Reply):
    """One event of a chat's stream."""

    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    choices: list[ChunkChoice]
    system_fingerprint: str | None = None
    usage: Usage | None = None
    prompt_token_ids: list[int] | None = None
    prompt_text: str | None = None
