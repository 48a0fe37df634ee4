"""A conversation becomes a prompt: the model's own Jinja template, in a sandbox."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, Literal, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from fornax.config.errors import EngineError
from fornax.data import Tokenizer
from fornax.gguf import is_gguf, tokenizer_file

__all__ = ["ChatTemplate", "special_tokens"]


def read_templates(directory: Path) -> dict[str, str]:
    """Templates by name; empty when the directory has none.

    `chat_template.jinja` and `additional_chat_templates/*.jinja`, else the key `chat_template` of
    `chat_template.json` or `tokenizer_config.json`: a text, or texts by name. A GGUF file has the
    last of them in it.
    """
    folder = directory / "additional_chat_templates"
    files = {file.stem: file for file in sorted(folder.glob("*.jinja"))}
    if (directory / "chat_template.jinja").is_file():
        files["default"] = directory / "chat_template.jinja"
    if files:
        return {name: _text(file) for name, file in files.items()}
    for name in ("chat_template.json", "tokenizer_config.json"):
        found = _json(directory / name).get("chat_template")
        if found:
            return _named(found, directory / name)
    return {}


def read_special_tokens(directory: Path) -> dict[str, str]:
    """Special tokens by role, such as `bos_token`, from the files beside the tokenizer."""
    tokens: dict[str, str] = {}
    for name in ("special_tokens_map.json", "tokenizer_config.json"):
        for key, value in _json(directory / name).items():
            if isinstance(value, dict):
                value = value.get("content")
            if key.endswith("_token") and isinstance(value, str):
                tokens[key] = value
    return tokens


def _named(found: Any, file: Path) -> dict[str, str]:
    if isinstance(found, str):
        return {"default": found}
    if isinstance(found, dict):
        found = [{"name": name, "template": text} for name, text in found.items()]
    try:
        return {str(entry["name"]): str(entry["template"]) for entry in found}
    except (TypeError, KeyError) as error:
        raise EngineError(
            f"{file}: chat_template must be a text or a list of name and template"
        ) from error


def _text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise EngineError(f"{file} cannot be read ({error})") from error


def _json(file: Path) -> dict[str, object]:
    text = tokenizer_file(file.parent, file.name) if is_gguf(file.parent) else None
    if text is None and not file.is_file():
        return {}
    try:
        content = json.loads(_text(file) if text is None else text)
    except ValueError as error:
        raise EngineError(f"{file} is not valid JSON ({error})") from error
    if not isinstance(content, dict):
        raise EngineError(f"{file} must hold a JSON object")
    return content


Content = Literal["text", "parts", "both"]
"""What a template takes as a message's content."""

_REASONING = ("reasoning_content", "thinking", "reasoning")
_MARK = "\ue000the end of the final message "
"""Ends in a space: a template that trims the content shows it by taking that away."""


def plain(value: object) -> Any:
    """A copy out of JSON's own types: a template must see no object with methods of its own."""
    if value is None or type(value) in (str, int, float, bool):
        return value
    if isinstance(value, str | int | float):
        return next(kind(value) for kind in (str, int, float) if isinstance(value, kind))
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, bytes | bytearray):
        return [plain(item) for item in value]
    raise EngineError(f"a chat template takes JSON, but was given a {type(value).__name__}")


def prepare(messages: Sequence[Mapping[str, object]], content: Content) -> list[dict[str, Any]]:
    """Messages for a template. Raises `EngineError` for none, and for content that is not text."""
    if not messages:
        raise EngineError("messages is empty; give at least one")
    return [_prepare(message, content) for message in messages]


def _prepare(message: Mapping[str, object], content: Content) -> dict[str, Any]:
    made = plain(message)
    if not isinstance(made, dict) or not isinstance(made.get("role"), str):
        raise EngineError(f"a message must be an object with a role, but one is {message!r}")
    if isinstance(made.get("content"), list):
        parts = [_part(part) for part in made["content"]]
        made["content"] = "\n".join(part["text"] for part in parts) if content == "text" else parts
    elif content == "parts" and isinstance(made.get("content"), str):
        made["content"] = [{"type": "text", "text": made["content"]}]
    if made.get("tool_calls"):
        made["tool_calls"] = [_tool_call(call) for call in made["tool_calls"]]
    reasoning = next((made[key] for key in _REASONING if made.get(key) is not None), None)
    if reasoning is not None:
        made = {"thinking": reasoning, **made, "reasoning_content": reasoning}
    return made


def _part(part: Any) -> dict[str, Any]:
    if isinstance(part, str):
        return {"type": "text", "text": part}
    kind = part.get("type") if isinstance(part, dict) else None
    if kind == "refusal":
        part = {"type": "text", "text": part.get("refusal")}
    elif kind != "text":
        raise EngineError(f"content of type {kind} is not supported: the model reads text")
    if not isinstance(part.get("text"), str):
        raise EngineError(f"a part of a message's content has text={part.get('text')!r}; give text")
    return part


def _tool_call(call: Any) -> object:
    """A call whose arguments are an object: templates write the JSON themselves."""
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("arguments"), str):
        return call
    text = function["arguments"]
    try:
        arguments = json.loads(text) if text.strip() else {}
    except (ValueError, RecursionError) as error:
        raise EngineError(
            f"tool_calls: arguments of {function.get('name')!r} are not JSON ({error})"
        ) from error
    return {**call, "function": {**function, "arguments": arguments}}


@dataclass(frozen=True)
class Final:
    """The last message's text, to be found again in the prompt."""

    text: str

    def cut(self, prompt: str) -> str:
        """The prompt up to the end of the last message's text."""
        place = prompt.rfind(_MARK.strip())
        if place < 0 or self.text.strip() not in prompt:
            raise EngineError(
                "continue_final_message: the chat template does not show the final message's "
                "content as it is; leave continue_final_message out"
            )
        kept = prompt[place : place + len(_MARK)] == _MARK
        return prompt[:place] if kept else prompt[:place].rstrip()


def mark_final(messages: list[dict[str, Any]]) -> Final:
    """Mark where the last message's text ends. Raises `EngineError` when it has none."""
    content = messages[-1].get("content")
    if isinstance(content, str):
        messages[-1]["content"] = content + _MARK
        return Final(content)
    if isinstance(content, list) and content:
        text = content[-1]["text"]
        content[-1] = {**content[-1], "text": text + _MARK}
        return Final(text)
    raise EngineError("continue_final_message: the final message has no content to continue with")


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
    value: object,
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

    Raises `EngineError` for a template that is not Jinja.
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
        """The template of a model's directory or GGUF file; None when it has none.

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
        messages: Sequence[Mapping[str, object]],
        *,
        tools: Sequence[Mapping[str, object]] | None = None,
        documents: Sequence[Mapping[str, object]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        variables: Mapping[str, object] | None = None,
    ) -> str:
        """The prompt's text, special tokens spelled out: encode it without adding any.

        Messages, tools and documents are plain JSON as in OpenAI's requests. With
        `continue_final_message` the prompt ends inside the last message.

        Raises `EngineError` for messages that the template refuses, and for content that is not
        text.
        """
        if continue_final_message and add_generation_prompt:
            raise EngineError(
                "continue_final_message continues with the last message and add_generation_prompt "
                "begins a new one; set one of them to false"
            )
        given = self._given(messages, tools, variables)
        final = mark_final(given["messages"]) if continue_final_message else None
        given["documents"] = None if documents is None else plain(documents)
        given["add_generation_prompt"] = add_generation_prompt
        text = self._render(given)
        return text if final is None else final.cut(text)

    def render_marked(
        self,
        messages: Sequence[Mapping[str, object]],
        *,
        tools: Sequence[Mapping[str, object]] | None = None,
        variables: Mapping[str, object] | None = None,
    ) -> tuple[str, list[tuple[int, int]]]:
        """A whole conversation, and the spans of characters that `{% generation %}` marks in it.

        Without marks in the template there are no spans. Raises `EngineError` as `render` does.
        """
        return _spans(self._render(self._given(messages, tools, variables) | _MARKS))

    def _given(
        self,
        messages: Sequence[Mapping[str, object]],
        tools: Sequence[Mapping[str, object]] | None,
        variables: Mapping[str, object] | None,
    ) -> dict[str, Any]:
        """The template's variables, for a whole conversation."""
        return {
            **plain(variables or {}),
            "messages": prepare(messages, self._content[self._pick(tools)]),
            "tools": None if tools is None else plain(tools),
            "documents": None,
            "add_generation_prompt": False,
        }

    def _render(self, given: Mapping[str, Any]) -> str:
        template = self._compiled[self._pick(given["tools"])]
        try:
            return template.render({**self._special_tokens, **given})
        except Exception as error:  # a template may fail in any way that a program may
            raise EngineError(
                f"the chat template refuses this conversation ({error}): change its messages"
            ) from error

    def _pick(self, tools: object) -> str:
        """The name of the template for a request with these tools."""
        name = "tool_use" if tools and "tool_use" in self.sources else "default"
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
            f"the chat template {name!r} is not Jinja: {error.message}, line {error.lineno}"
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
