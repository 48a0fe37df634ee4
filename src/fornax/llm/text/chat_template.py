"""A conversation becomes a prompt: the model's own Jinja template, in a sandbox."""

import json
import re
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from fornax.config.errors import EngineError
from fornax.data import Tokenizer
from fornax.llm.text.chat_files import read_special_tokens, read_templates
from fornax.llm.text.chat_messages import Content, mark_final, plain, prepare

__all__ = ["ChatTemplate", "special_tokens"]


_BEGIN, _END = "\ue000what the model wrote begins\ue000", "\ue000what the model wrote ends\ue000"
_MARKS = {"begin_of_generation": _BEGIN, "end_of_generation": _END}


class _Generation(Extension):
    """`{% generation %}`: marks what the model wrote, for training; its body between two variables
    that only `render_marked` gives a value."""

    tags = {"generation"}  # noqa: RUF012  (jinja2 reads this attribute)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        begin, end = (nodes.Output([nodes.Name(name, "load")]) for name in _MARKS)
        return [node.set_lineno(line) for node in (begin, nodes.Scope(body), end)]


def _raise(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON as it is; Jinja's own filter escapes what HTML would need."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _environment() -> ImmutableSandboxedEnvironment:
    made = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, "jinja2.ext.loopcontrols"]
    )
    made.filters["tojson"] = _to_json
    functions: dict[str, Any] = {
        "raise_exception": _raise,
        "strftime_now": lambda form: datetime.now().strftime(form),
    }
    made.globals.update(functions)
    return made


_ENVIRONMENT = _environment()


def special_tokens(tokenizer: Tokenizer) -> dict[str, str]:
    """What templates call a tokenizer's special tokens: `bos_token`, `eos_token`, `pad_token`."""
    ids = {"bos": tokenizer.bos_id, "eos": tokenizer.eos_id, "pad": tokenizer.pad_id}
    names = {
        f"{role}_token": tokenizer.backend.id_to_token(number)
        for role, number in ids.items()
        if number is not None
    }
    return {role: name for role, name in names.items() if name is not None}


class ChatTemplate:
    """A chat template, with what transformers' templates may use.

    `source` is Jinja text, or several texts by name: `tool_use` serves requests with tools, where
    there is one, and `default` the others. `special_tokens` are variables of the template.

    Raises `EngineError` for a template that is no Jinja.
    """

    def __init__(
        self, source: str | Mapping[str, str], special_tokens: Mapping[str, str] | None = None
    ):
        self.sources = {"default": source} if isinstance(source, str) else dict(source)
        self._special_tokens = dict(special_tokens or {})
        self._compiled = {name: _compile(name, text) for name, text in self.sources.items()}
        self._content = {name: _content(text) for name, text in self.sources.items()}

    @classmethod
    def find(cls, directory: str | Path) -> "ChatTemplate | None":
        """The template of a model's directory; None when it has none.

        `chat_template.jinja` goes before `chat_template.json`, and that before
        `tokenizer_config.json`. Raises `EngineError` for files that cannot be read.
        """
        found = read_templates(Path(directory))
        return cls(found, read_special_tokens(Path(directory))) if found else None

    def with_source(self, source: str) -> "ChatTemplate":
        """Another template for the same model."""
        return ChatTemplate(source, self._special_tokens)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        variables: Mapping[str, Any] | None = None,
        name: str | None = None,
    ) -> str:
        """The prompt's text, special tokens spelled out: encode it without adding any.

        Messages, tools and documents are plain JSON as in OpenAI's requests. `name` picks one of
        several templates. With `continue_final_message` the prompt ends inside the last message.

        Raises `EngineError` for messages that the template refuses, and for content that is not
        text.
        """
        if continue_final_message and add_generation_prompt:
            raise EngineError(
                "continue_final_message goes on with the last message and add_generation_prompt "
                "begins a new one; set one of them to false"
            )
        name = self._pick(name, bool(tools))
        prepared = prepare(messages, self._content[name])
        final = mark_final(prepared) if continue_final_message else None
        given = {
            **plain(variables or {}),
            "messages": prepared,
            "tools": None if tools is None else plain(tools),
            "documents": None if documents is None else plain(documents),
            "add_generation_prompt": add_generation_prompt,
        }
        text = self._render(name, given)
        return text if final is None else final.cut(text)

    def render_marked(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> tuple[str, list[tuple[int, int]]]:
        """A whole conversation, and the spans of characters that `{% generation %}` marks in it.

        Without marks in the template there are no spans. Raises `EngineError` as `render` does.
        """
        name = self._pick(None, bool(tools))
        given = {
            **plain(variables or {}),
            "messages": prepare(messages, self._content[name]),
            "tools": None if tools is None else plain(tools),
            "documents": None,
            "add_generation_prompt": False,
            **_MARKS,
        }
        return _spans(self._render(name, given))

    def _render(self, name: str, given: Mapping[str, Any]) -> str:
        try:
            return self._compiled[name].render({**self._special_tokens, **given})
        except Exception as error:  # a template may fail in any way that a program may
            raise EngineError(
                f"the chat template refuses this conversation ({error}): change its messages"
            ) from error

    def _pick(self, name: str | None, has_tools: bool) -> str:
        if name is None:
            name = "tool_use" if has_tools and "tool_use" in self.sources else "default"
        if name not in self.sources:
            raise EngineError(
                f"the model has no chat template named {name!r}; it has "
                f"{', '.join(sorted(self.sources))}"
            )
        return name


def _spans(text: str) -> tuple[str, list[tuple[int, int]]]:
    """A text without the marks, and where they stood; pairs that hold nothing are left out."""
    pieces, spans, begin, place = [], [], 0, 0
    for piece in re.split(f"({_BEGIN}|{_END})", text):
        if piece == _BEGIN:
            begin = place
        elif piece == _END:
            spans.append((begin, place))
        else:
            pieces.append(piece)
            place += len(piece)
    return "".join(pieces), [(a, b) for a, b in spans if a < b]


def _compile(name: str, source: str) -> jinja2.Template:
    try:
        return _ENVIRONMENT.from_string(source)
    except jinja2.TemplateSyntaxError as error:
        raise EngineError(
            f"the chat template {name!r} is no Jinja: {error.message}, line {error.lineno}"
        ) from error


def _content(source: str) -> Content:
    """Whether a template goes through the parts of a message's content."""
    tree = _ENVIRONMENT.parse(source)
    names = {"content"} | {
        target.name
        for assigned in tree.find_all(nodes.Assign)
        if isinstance(target := assigned.target, nodes.Name) and _reads(assigned.node, {"content"})
    }
    if not any(_reads(loop.iter, names) for loop in tree.find_all(nodes.For)):
        return "text"
    tests = {test.name for test in tree.find_all(nodes.Test)}
    return "both" if "string" in tests else "parts"


def _reads(expression: nodes.Node, names: set[str]) -> bool:
    """Whether an expression is one of these attributes, items or variables, filtered or not."""
    match expression:
        case nodes.Filter(node=nodes.Node() as inner):
            return _reads(inner, names)
        case nodes.Getattr(attr=attribute):
            return attribute in names
        case nodes.Getitem(arg=nodes.Const(value=item)):
            return item in names
        case nodes.Name(name=variable):
            return variable in names
    return False
