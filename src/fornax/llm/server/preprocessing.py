"""A request becomes the engine's input: its prompt's token ids and its SamplingParams."""

import asyncio
import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, Protocol

from fornax.config import ConfigError, EngineError
from fornax.data import Tokenizer
from fornax.llm.outputs import RequestOutputKind
from fornax.llm.sampling_params import (
    RepetitionDetectionParams,
    SamplingParams,
    StructuredOutputsParams,
)
from fornax.llm.server.chat_parser import check_parsers
from fornax.llm.server.chat_protocol import ChatBody, ChatPrompt
from fornax.llm.server.config import ServerConfig
from fornax.llm.server.errors import ApiError
from fornax.llm.server.protocol import GenerationBody, ResponseFormat
from fornax.llm.text import ChatTemplate, special_tokens

__all__ = ["ChatRenderer", "PromptEncoder", "sampling_params"]


_LONG = 4096
"""Characters from which a text is encoded in a thread, so that streams continue meanwhile."""


class Truncation(Protocol):
    """What a body says about its prompts' tokens."""

    add_special_tokens: bool
    truncate_prompt_tokens: int | None
    truncation_side: Literal["left", "right"] | None


class PromptEncoder:
    """A tokenizer for prompts of at most a length."""

    def __init__(self, tokenizer: Tokenizer, max_model_len: int):
        self._backend = tokenizer.backend
        self.vocab_size = tokenizer.vocab_size
        self.max_model_len = max_model_len
        self._longest = max(map(len, self._backend.get_vocab(with_added_tokens=True)), default=1)

    async def encode(
        self, text: str, *, add_special_tokens: bool, truncated: bool = False
    ) -> list[int]:
        """Token ids; 400 at once for a text that cannot fit, unless it will be truncated."""
        if not truncated and len(text) > self._longest * self.max_model_len:
            raise self._too_long(f"{len(text)} characters")
        if len(text) < _LONG:
            return self._backend.encode(text, add_special_tokens=add_special_tokens).ids
        encoding = await asyncio.to_thread(
            self._backend.encode, text, add_special_tokens=add_special_tokens
        )
        return encoding.ids

    def decode(self, ids: list[int]) -> str:
        """Text of token ids, special ones included."""
        return self._backend.decode(ids, skip_special_tokens=False)

    def pieces(self, ids: list[int]) -> list[str]:
        """Each token as the vocabulary spells it; empty for ids without a token."""
        return [self._backend.id_to_token(number) or "" for number in ids]

    async def tokenize(
        self,
        body: Truncation,
        prompt: str | list[int],
        *,
        reserve: int,
        side: Literal["left", "right"] = "left",
    ) -> list[int]:
        """A prompt's token ids, truncated as `body` asks.

        Args:
            reserve: tokens of the context that a truncation to what it has room for leaves free.
            side: the end that is cut where `body` names none.

        Raises:
            ApiError: 400 for a text or a truncation that cannot fit.
        """
        keep = body.truncate_prompt_tokens
        if isinstance(prompt, str):
            prompt = await self.encode(
                prompt, add_special_tokens=body.add_special_tokens, truncated=keep is not None
            )
        if keep is None:
            return prompt
        if keep > self.max_model_len or keep == 0:
            wrong = f"is above the context of {self.max_model_len}" if keep else "leaves nothing"
            raise ApiError(
                400, f"truncate_prompt_tokens={keep} {wrong}", param="truncate_prompt_tokens"
            )
        count = max(1, self.max_model_len - reserve) if keep < 0 else keep
        return prompt[-count:] if (body.truncation_side or side) == "left" else prompt[:count]

    def max_new_tokens(self, ids: list[int], limit: int | None) -> int:
        """Tokens that may be made after a prompt: `limit`, or what the context has left."""
        if not ids:
            raise ApiError(400, "the prompt has no tokens; give some text", param="prompt")
        left = self.max_model_len - len(ids)
        if left < 1:
            raise self._too_long(f"{len(ids)} tokens")
        if limit is None:
            return left
        if limit > left:
            raise ApiError(
                400,
                f"the context has {self.max_model_len} tokens, but {len(ids)} of the prompt and "
                f"{limit} to be made were asked for; shorten the prompt or max_tokens",
                param="max_tokens",
                code="context_length_exceeded",
            )
        return limit

    def _too_long(self, size: str) -> ApiError:
        return ApiError(
            400,
            f"the prompt has {size}, the context {self.max_model_len} tokens, of which one at "
            "least must be made; shorten the prompt or set truncate_prompt_tokens",
            param="prompt",
            code="context_length_exceeded",
        )


_SHAPED = {"logit_bias", "repetition_detection", "stream_interval", "structured_outputs"}
_COPIED = [
    field.name
    for field in dataclasses.fields(SamplingParams)
    if field.name in GenerationBody.model_fields and field.name not in _SHAPED
]
"""Fields whose name and meaning are the same on both sides."""

_MODEL_DEFAULTS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
"""Fields for which the model's generation_config.json may have a default."""


def sampling_params(
    body: GenerationBody,
    defaults: Mapping[str, Any],
    *,
    max_tokens: int,
    logprobs: int | None,
    prompt_logprobs: int | None = None,
    structured: StructuredOutputsParams | None = None,
    special_tokens: bool = False,
) -> SamplingParams:
    """The parameters of a request. `structured` stands for the constraints of its body, and
    `special_tokens` keeps them in the text.

    Raises `ApiError` or, from `SamplingParams`, `EngineError` for what is not supported.
    """
    values = {name: defaults[name] for name in _MODEL_DEFAULTS if defaults.get(name) is not None}
    values |= {name: value for name in _COPIED if (value := getattr(body, name)) is not None}
    if prompt_logprobs is not None:
        values["prompt_logprobs"] = prompt_logprobs
    if body.stream and values.get("prompt_logprobs") is not None and body.prompt_logprobs:
        raise ApiError(400, "prompt_logprobs needs stream=false", param="prompt_logprobs")
    if special_tokens:
        values["skip_special_tokens"] = False
    repetition = None
    if body.repetition_detection is not None:
        repetition = RepetitionDetectionParams(**body.repetition_detection.model_dump())
    return SamplingParams(
        **values,
        max_tokens=max_tokens,
        logprobs=logprobs,
        logit_bias=_logit_bias(body.logit_bias),
        repetition_detection=repetition,
        structured_outputs=structured or _structured(body),
        output_kind=RequestOutputKind.DELTA if body.stream else RequestOutputKind.FINAL_ONLY,
    )


def _logit_bias(bias: dict[str, float] | None) -> dict[int, float] | None:
    if not bias:
        return None
    try:
        return {int(token): value for token, value in bias.items()}
    except ValueError:
        raise ApiError(
            400, 'logit_bias: its keys are token ids, such as {"50256": -100}', param="logit_bias"
        ) from None


def _structured(body: GenerationBody) -> StructuredOutputsParams | None:
    """The constraint of `response_format` or `structured_outputs`."""
    form, own = body.response_format, body.structured_outputs
    if form is not None and form.type != "text":
        if own is not None:
            raise ApiError(
                400,
                "response_format and structured_outputs are both given; give one",
                param="structured_outputs",
            )
        return _from_format(form)
    if own is None:
        return None
    return StructuredOutputsParams(**own.model_dump(exclude_unset=True, by_alias=True))


def _from_format(form: ResponseFormat) -> StructuredOutputsParams:
    if form.type == "json_object":
        return StructuredOutputsParams(json_object=True)
    if form.json_schema is not None:
        return StructuredOutputsParams(json=form.json_schema.json_schema)
    tag = form.model_dump(exclude_none=True, exclude={"json_schema"})
    return StructuredOutputsParams(structural_tag=json.dumps(tag))


class ChatRenderer:
    """The chat template of the server, or of a request where that is trusted."""

    def __init__(self, own: ChatTemplate | None, tokenizer: Tokenizer, config: ServerConfig):
        """`own` is the model's template; the config's goes before it.

        Raises:
            ConfigError: the config's template is not a file and no text.
            EngineError: it is not Jinja, or a parser of the config is unknown.
        """
        self._config = config
        self._special_tokens = special_tokens(tokenizer)
        check_parsers(config)
        self._template = own
        if config.chat_template is not None:
            self._template = self._compile(_source(config.chat_template))

    def _compile(self, source: str) -> ChatTemplate:
        return ChatTemplate(source, self._special_tokens)

    def render(self, body: ChatPrompt) -> str:
        """The text that a conversation becomes; 400 for one too long or refused by the template."""
        self._config.request_limits.check_messages(len(body.messages))
        template = self._template
        if body.chat_template is not None:
            if not self._config.trust_request_chat_template:
                raise ApiError(
                    400,
                    "chat_template is not taken from requests here; the server would have to be "
                    "started with --trust-request-chat-template",
                    param="chat_template",
                )
            try:
                template = self._compile(body.chat_template)
            except EngineError as error:
                raise ApiError(400, str(error), param="chat_template") from None
        if template is None:
            raise ApiError(
                400,
                "the model has no chat template; use /v1/completions, or start the server with "
                "--chat-template FILE",
                param="messages",
            )
        tools = None if body.tools is None else [tool.plain() for tool in body.tools]
        if isinstance(body, ChatBody) and body.choice() == "none":
            tools = None if self._config.exclude_tools_when_tool_choice_none else tools
        try:
            return template.render(
                [message.plain() for message in body.messages],
                tools=tools,
                documents=body.documents,
                add_generation_prompt=body.add_generation_prompt,
                continue_final_message=body.continue_final_message,
                variables=self._variables(body),
            )
        except EngineError as error:
            raise ApiError(400, str(error), param="messages") from None

    def _variables(self, body: ChatPrompt) -> dict[str, object]:
        variables: dict[str, object] = dict(self._config.default_chat_template_kwargs or {})
        if isinstance(body, ChatBody) and body.reasoning_effort is not None:
            variables["reasoning_effort"] = body.reasoning_effort
            variables["enable_thinking"] = body.reasoning_effort != "none"
        return variables | (body.chat_template_kwargs or {})


def _source(given: str) -> str:
    """A template's text: `given` itself where it looks like one, else what its file has."""
    if any(mark in given for mark in "{}\n"):
        return given
    path = Path(given)
    if not path.is_file():
        raise ConfigError(f"chat_template={given} is not a file, and no template either")
    return path.read_text(encoding="utf-8")
