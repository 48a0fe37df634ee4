"""The messages of a chat and the tools it may call."""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import ConfigDict, Field, model_validator

from fornax.llm.server.errors import ApiError
from fornax.llm.server.protocol.base import Body, Listed, Mapped, Refused

__all__ = ["ChatPrompt", "Message", "NamedToolChoice", "Tool"]


class FunctionCall(Body):
    """A function's name and its arguments as JSON text."""

    name: str
    arguments: str | dict[str, Any] = ""


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
    def _text_only(cls, data: Any) -> Any:
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
    content: str | Listed[ContentPart] | None = None
    """Text, or parts of text."""
    name: str | None = None
    tool_calls: Listed[ToolCall] | None = None
    tool_call_id: str | None = None
    reasoning: str | None = None
    refusal: str | None = None

    refused: ClassVar[Mapping[str, Refused]] = {
        "audio": Refused("input is text"),
        "function_call": Refused("use tool_calls"),
    }

    @model_validator(mode="before")
    @classmethod
    def _one_name_for_reasoning(cls, data: Any) -> Any:
        if isinstance(data, dict) and "reasoning_content" in data:
            data = dict(data)
            other = data.pop("reasoning_content")
            data["reasoning"] = data.get("reasoning") or other
        return data

    def plain(self) -> dict[str, Any]:
        """As chat templates read it."""
        message = self.model_dump(exclude_unset=True)
        if message.get("reasoning") is not None:
            message["reasoning_content"] = message["reasoning"]
        return message


class Function(Body):
    """A function that may be called."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    """Arguments follow the schema when tool_choice forces a call; otherwise the model writes them
    freely."""


class Tool(Body):
    """A tool that may be called: a function."""

    type: Literal["function"] = "function"
    function: Function

    def plain(self) -> dict[str, Any]:
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

    messages: Annotated[Listed[Message], Field(min_length=1)]
    """The conversation so far."""
    tools: Listed[Tool] | None = None
    """What the model may call."""
    add_generation_prompt: bool = True
    """Whether the prompt ends where the model's message begins."""
    continue_final_message: bool = False
    """Whether the model goes on with the last message."""
    add_special_tokens: bool = False
    """Whether the tokenizer adds its special tokens to what the template made."""
    documents: Listed[Mapped[str]] | None = None
    """Documents for templates that take them."""
    chat_template: str | None = None
    """A template of the request's own; the server must trust it."""
    chat_template_kwargs: dict[str, Any] | None = None
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
