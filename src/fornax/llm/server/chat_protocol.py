"""The request and the answers of `POST /v1/chat/completions`."""

from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal

from pydantic import ConfigDict, Field, model_validator

from fornax.llm.server.errors import ApiError
from fornax.llm.server.protocol import (
    Body,
    BoundedDict,
    FailFastList,
    GenerationBody,
    JsonObject,
    PositionLogprob,
    Refused,
    Reply,
    Usage,
)

__all__ = ["Chat", "ChatBody", "ChatPrompt", "Message", "NamedToolChoice", "Tool"]


class FunctionCall(Body):
    """A function's name and its arguments as JSON text."""

    name: str
    arguments: str | JsonObject = ""


class ToolCall(Body):
    """A call that the model made."""

    id: str | None = None
    type: Literal["function"] = "function"
    function: FunctionCall
    index: int | None = None


class ContentPart(Body):
    """A part of a message's content: text."""

    type: Literal["text", "refusal"]
    text: str = ""
    refusal: str = ""

    @model_validator(mode="before")
    @classmethod
    def _text_only(cls, data: object) -> object:
        kind = data.get("type") if isinstance(data, dict) else None
        if isinstance(kind, str) and kind not in ("text", "refusal"):
            raise ApiError(
                400, f"content of type {kind} is not supported: input is text", param="messages"
            )
        return data


class Message(Body):
    """One message; fields that are not named here go to the chat template as they are."""

    model_config = ConfigDict(extra="allow")

    role: str
    """system, developer, user, assistant or tool; others if the chat template knows them."""
    content: str | FailFastList[ContentPart] | None = None
    """Text, or parts of text."""
    name: str | None = None
    tool_calls: FailFastList[ToolCall] | None = None
    tool_call_id: str | None = None
    reasoning: str | None = None
    refusal: str | None = None

    refused: ClassVar[Mapping[str, Refused]] = {
        "audio": Refused("input is text"),
        "function_call": Refused("use tool_calls"),
    }

    @model_validator(mode="before")
    @classmethod
    def _one_name_for_reasoning(cls, data: object) -> object:
        if isinstance(data, dict) and "reasoning_content" in data:
            data = dict(data)
            other = data.pop("reasoning_content")
            data["reasoning"] = data.get("reasoning") or other
        return data

    def plain(self) -> JsonObject:
        """As chat templates read it."""
        message = self.model_dump(exclude_unset=True)
        if message.get("reasoning") is not None:
            message["reasoning_content"] = message["reasoning"]
        return message


class Function(Body):
    """A function that may be called."""

    name: str
    description: str | None = None
    parameters: JsonObject | None = None
    strict: bool | None = None
    """Arguments follow the schema when tool_choice forces a call; otherwise the model writes them
    freely."""


class Tool(Body):
    """A tool that may be called: a function."""

    type: Literal["function"] = "function"
    function: Function

    def plain(self) -> JsonObject:
        """As chat templates and parsers read it."""
        return {"type": self.type, "function": self.function.model_dump(exclude_unset=True)}


class NamedFunction(Body):
    name: str


class NamedToolChoice(Body):
    """The one function that must be called."""

    type: Literal["function"] = "function"
    function: NamedFunction


class ChatPrompt(Body):
    """What a chat template is given."""

    messages: Annotated[FailFastList[Message], Field(min_length=1)]
    """The conversation so far."""
    tools: FailFastList[Tool] | None = None
    """What the model may call."""
    add_generation_prompt: bool = True
    """Whether the prompt ends where the model's message begins."""
    continue_final_message: bool = False
    """Whether the model continues with the last message."""
    add_special_tokens: bool = False
    """Whether the tokenizer adds its special tokens to what the template made."""
    documents: FailFastList[BoundedDict[str]] | None = None
    """Documents for templates that take them."""
    chat_template: str | None = None
    """A template of the request's own; the server must trust it."""
    chat_template_kwargs: JsonObject | None = None
    """Further variables for the template."""

    @model_validator(mode="after")
    def _one_end(self) -> "ChatPrompt":
        if self.continue_final_message and self.add_generation_prompt:
            if "add_generation_prompt" in self.model_fields_set:
                raise ApiError(
                    400,
                    "continue_final_message and add_generation_prompt exclude each other",
                    param="continue_final_message",
                )
            self.add_generation_prompt = False
        return self


_NO_FUNCTIONS = Refused("use tools and tool_choice")


class ChatBody(ChatPrompt, GenerationBody):
    """A conversation to continue with."""

    logprobs: bool | None = False
    """Whether the tokens' log probabilities are returned."""
    top_logprobs: Annotated[int, Field(ge=-1)] | None = 0
    """Log probabilities of this many other tokens at each place; needs logprobs."""
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
    """Whether the last message comes before the answer if it has the same role."""
    return_prompt_text: bool | None = None
    """Whether the answer has the text that the chat template made."""
    metadata: BoundedDict[str] | None = None
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
    routed_experts: str | None = None


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
