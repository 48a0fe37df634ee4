"""Conversations as prompts: which template, which variables."""

from pathlib import Path
from typing import Any

from fornax.config import ConfigError, EngineError
from fornax.llm.server.chat_reading import check_parsers
from fornax.llm.server.config import ServerConfig
from fornax.llm.server.engine import Engine
from fornax.llm.server.errors import ApiError
from fornax.llm.server.protocol.chat import ChatBody
from fornax.llm.server.protocol.messages import ChatPrompt
from fornax.llm.text import ChatTemplate, special_tokens

__all__ = ["ChatPrompts"]


class ChatPrompts:
    """The chat template of the server, or of a request where that is trusted."""

    def __init__(self, engine: Engine, config: ServerConfig):
        self._engine = engine
        self._config = config
        check_parsers(config)
        self._own = None if config.chat_template is None else self._given(config.chat_template)

    def _given(self, source: str) -> ChatTemplate:
        """A template from a file or, when it looks like one, from the text itself."""
        if not any(mark in source for mark in "{}\n"):
            path = Path(source)
            if not path.is_file():
                raise ConfigError(f"chat_template={source} is no file, and no template either")
            source = path.read_text(encoding="utf-8")
        return self._compiled(source)

    def _compiled(self, source: str) -> ChatTemplate:
        tokenizer = self._engine.tokenizer
        return ChatTemplate(source, None if tokenizer is None else special_tokens(tokenizer))

    def render(self, body: ChatPrompt) -> str:
        """The text that a conversation becomes; 400 for one too long or refused by the template."""
        self._config.request_limits.check_messages(len(body.messages))
        template = self._own or self._engine.chat_template
        if body.chat_template is not None:
            if not self._config.trust_request_chat_template:
                raise ApiError(
                    400,
                    "chat_template is not taken from requests here; the server would have to be "
                    "started with --trust-request-chat-template",
                    param="chat_template",
                )
            template = self._of_request(body.chat_template)
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

    def _of_request(self, source: str) -> ChatTemplate:
        try:
            return self._compiled(source)
        except EngineError as error:
            raise ApiError(400, str(error), param="chat_template") from None

    def _variables(self, body: ChatPrompt) -> dict[str, Any]:
        variables: dict[str, Any] = dict(self._config.default_chat_template_kwargs or {})
        if isinstance(body, ChatBody) and body.reasoning_effort is not None:
            variables["reasoning_effort"] = body.reasoning_effort
            variables["enable_thinking"] = body.reasoning_effort != "none"
        return variables | (body.chat_template_kwargs or {})
