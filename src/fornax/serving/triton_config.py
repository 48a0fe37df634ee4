"""Triton's `config.pbtxt` into the settings of a model: what has a counterpart, and what has none.

The fields are those of Triton's `model_config.proto`; the file is protobuf's text format.
"""

import dataclasses
import re
from collections.abc import Callable, Iterator
from typing import Any

from fornax.config import ConfigError, from_mapping
from fornax.serving.settings import ModelSettings

__all__ = ["Converted", "convert_config"]

Message = dict[str, list[Any]]
"""Each field's values in the order of the file; a value is text, a number, a bool, a message."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Converted:
    """What became of a `config.pbtxt`."""

    mapping: dict[str, Any]
    """Keys of `serving.yaml` that differ from their defaults."""
    notes: tuple[str, ...]
    """A sentence for every field that has no counterpart, or another meaning here."""


def convert_config(text: str, source: str = "config.pbtxt") -> Converted:
    """Convert the text of a `config.pbtxt`.

    Raises:
      ConfigError: the text is not of protobuf's format, with the line; or a value that no model
        can be served with.
    """
    message = _Reader(text, source).message()
    mapping: dict[str, Any] = {}
    notes: list[str] = []
    for name, values in message.items():
        convert = _FIELDS.get(name)
        if convert is None:
            notes.append(f"{name} was not converted: {_NONE.get(name, 'no key here says it')}.")
            continue
        try:
            convert(values, mapping, notes)
        except (TypeError, ValueError, AttributeError) as error:
            raise ConfigError(
                f"{source}: {name} does not hold what Triton's model_config.proto says; see that "
                "file for its fields"
            ) from error
    if "dynamic_batching" not in message and "sequence_batching" not in message:
        notes.append(
            "without dynamic_batching Triton runs each request alone; here requests that wait at "
            "the same time share a batch, and none waits for others (batching.max_delay_ms is 0)."
        )
    from_mapping(ModelSettings, mapping, source)
    return Converted(mapping=mapping, notes=tuple(notes))


_BATCHING = {
    "preferred_batch_size": "preferred_sizes",
    "priority_levels": "priority_levels",
    "default_priority_level": "default_priority",
}


def _max_batch_size(values: list[Any], mapping: dict[str, Any], notes: list[str]) -> None:
    if (rows := int(values[-1])) > 0:
        mapping.setdefault("batching", {})["max_rows"] = rows
    else:
        notes.append(
            "max_batch_size 0 means that the first axis is not a batch: export the function with a "
            "fixed first axis, and it is not batched."
        )


def _dynamic_batching(values: list[Any], mapping: dict[str, Any], notes: list[str]) -> None:
    batching = mapping.setdefault("batching", {})
    for name, given in values[-1].items():
        if name == "preferred_batch_size":
            batching["preferred_sizes"] = [int(each) for each in given]
        elif name in _BATCHING:
            batching[_BATCHING[name]] = int(given[-1])
        elif name == "max_queue_delay_microseconds":
            batching["max_delay_ms"] = int(given[-1]) / 1000
        elif name == "default_queue_policy":
            _queue_policy(given[-1], mapping, batching, notes)
        elif name == "preserve_ordering":
            if given[-1] is True:
                notes.append(
                    "dynamic_batching.preserve_ordering was not converted: answers come as they "
                    "are ready, each to its own request."
                )
        else:
            notes.append(
                f"dynamic_batching.{name} was not converted: one queue policy holds for a function."
            )


def _queue_policy(
    policy: Message, mapping: dict[str, Any], batching: dict[str, Any], notes: list[str]
) -> None:
    for name, given in policy.items():
        if name == "max_queue_size" and int(given[-1]):
            batching["queue_limit"] = int(given[-1])
        elif name == "default_timeout_microseconds" and int(given[-1]):
            mapping.setdefault("timeouts", {})["request_seconds"] = int(given[-1]) / 1e6
        elif name == "timeout_action" and given[-1] == "DELAY":
            notes.append(
                "dynamic_batching.default_queue_policy.timeout_action DELAY was not converted: a "
                "request whose deadline is over gets an error."
            )


def _version_policy(values: list[Any], mapping: dict[str, Any], notes: list[str]) -> None:
    ((kind, given),) = values[-1].items()
    inner = given[-1]
    if kind == "latest":
        mapping["versions"] = {"type": "latest", "count": int(inner.get("num_versions", [1])[-1])}
    elif kind == "all":
        mapping["versions"] = {"type": "all"}
    elif kind == "specific":
        mapping["versions"] = {"type": "named", "versions": [int(v) for v in inner["versions"]]}
    else:
        raise ValueError(kind)


def _instance_group(values: list[Any], mapping: dict[str, Any], notes: list[str]) -> None:
    groups = values
    counts = {int(group.get("count", [1])[-1]) for group in groups}
    devices = sorted({int(number) for group in groups for number in group.get("gpus", [])})
    mapping["concurrency"] = max(counts)
    if devices:
        mapping["devices"] = {"type": "replicas", "devices": devices}
    if len(counts) > 1:
        notes.append("instance_group differs by device; the largest count was taken for all.")
    kinds = {group.get("kind", ["KIND_AUTO"])[-1] for group in groups}
    if kinds & {"KIND_CPU", "KIND_GPU"}:
        notes.append(
            "instance_group.kind was not converted: a server's device is chosen for the whole "
            "process (JAX_PLATFORMS), and a bundle holds programs of the platforms it was "
            "exported for."
        )
    for name in sorted({name for group in groups for name in group} - {"count", "kind", "gpus"}):
        if name != "name":
            notes.append(f"instance_group.{name} was not converted: no key here says it.")


def _model_transaction_policy(values: list[Any], mapping: dict[str, Any], notes: list[str]) -> None:
    if values[-1].get("decoupled", [False])[-1] is True:
        notes.append(
            "model_transaction_policy.decoupled was not converted: a bundle answers a request "
            "once. Language models stream their tokens (`fornax serve`, or hosted by type llm)."
        )


def _kept_in_bundle(values: list[Any], mapping: dict[str, Any], notes: list[str]) -> None:
    """Names, types and shapes: the bundle has them."""


_Convert = Callable[[list[Any], dict[str, Any], list[str]], None]
_FIELDS: dict[str, _Convert] = {
    "max_batch_size": _max_batch_size,
    "dynamic_batching": _dynamic_batching,
    "version_policy": _version_policy,
    "instance_group": _instance_group,
    "model_transaction_policy": _model_transaction_policy,
    **dict.fromkeys(("name", "input", "output"), _kept_in_bundle),
}
_BUNDLE = "a bundle is made from the model's own function by `fornax export` or `export.save`"
_NONE = {
    "platform": _BUNDLE,
    "backend": _BUNDLE,
    "runtime": _BUNDLE,
    "default_model_filename": _BUNDLE,
    "cc_model_filenames": _BUNDLE,
    "optimization": "XLA compiles the program; compiler_options takes options of XLA",
    "model_warmup": "every shape of a bundle is compiled and run before the version is ready",
    "response_cache": "answers are not cached",
    "sequence_batching": "requests keep no state between them",
    "ensemble_scheduling": "write the steps as one function and export that",
    "batch_input": "the function gets no tensors that no request brought",
    "batch_output": "the function's outputs are answered as they are",
    "parameters": "they are options of a backend of Triton's",
    "metric_tags": "metrics have the labels model and version",
    "model_operations": "nothing is loaded beside the bundle",
    "model_repository_agents": "a bundle's hash is checked when it loads",
}

_TOKEN = re.compile(
    r"""(?P<space>(?:\s|\#[^\n]*)+)|(?P<name>[A-Za-z_][\w.]*)|(?P<number>[-+]?[\d.][\w.+-]*)"""
    r"""|(?P<text>"(?:[^"\\\n]|\\.)*"|'(?:[^'\\\n]|\\.)*')|(?P<mark>[{}<>\[\]:,;])"""
)


class _Reader:
    """Protobuf's text format, without a schema."""

    def __init__(self, text: str, source: str) -> None:
        self.source = source
        self._tokens = list(self._split(text))
        self._at = 0

    def message(self, closing: str = "") -> Message:
        found: Message = {}
        while (token := self._next(closing)) is not None:
            kind, name, line = token
            if kind != "name":
                raise self._wrong(line, f"{name!r} stands where the name of a field belongs")
            follows = self._peek()
            if follows == ":":
                self._at += 1
                follows = self._peek()
            elif follows not in ("{", "<", "["):
                raise self._wrong(line, f"{name} is followed by neither a colon nor a brace")
            values = self._list() if follows == "[" else [self._value()]
            found.setdefault(name, []).extend(values)
            if self._peek() in (",", ";"):
                self._at += 1
        return found

    def _list(self) -> list[Any]:
        self._at += 1
        values: list[Any] = []
        while self._peek() != "]":
            values.append(self._value())
            if self._peek() == ",":
                self._at += 1
        self._at += 1
        return values

    def _value(self) -> Any:
        if self._at >= len(self._tokens):
            raise self._wrong(self._tokens[-1][2], "the file ends where a value belongs")
        kind, text, line = self._tokens[self._at]
        self._at += 1
        if text in ("{", "<"):
            return self.message("}" if text == "{" else ">")
        if kind == "text":
            value = text[1:-1]
            while self._at < len(self._tokens) and self._tokens[self._at][0] == "text":
                value += self._tokens[self._at][1][1:-1]  # adjacent pieces are one text
                self._at += 1
            return value
        if kind == "name":
            return {"true": True, "false": False}.get(text, text)
        if kind == "number":
            try:
                return int(text, 0) if re.fullmatch(r"[-+]?\d\w*", text) else float(text)
            except ValueError:
                raise self._wrong(line, f"{text!r} is not a number") from None
        raise self._wrong(line, f"{text!r} stands where a value belongs")

    def _peek(self) -> str | None:
        return self._tokens[self._at][1] if self._at < len(self._tokens) else None

    def _next(self, closing: str) -> tuple[str, str, int] | None:
        if self._at >= len(self._tokens):
            if closing:
                raise self._wrong(self._tokens[-1][2], f"{closing!r} is missing at the end")
            return None
        token = self._tokens[self._at]
        self._at += 1
        return None if closing and token[1] == closing else token

    def _split(self, text: str) -> Iterator[tuple[str, str, int]]:
        at = 0
        while at < len(text):
            line = text.count("\n", 0, at) + 1
            match = _TOKEN.match(text, at)
            if match is None or match.lastgroup is None:
                raise self._wrong(line, f"{text[at]!r} is not part of protobuf's text format")
            if match.lastgroup != "space":
                yield match.lastgroup, match.group(), line
            at = match.end()

    def _wrong(self, line: int, what: str) -> ConfigError:
        return ConfigError(f"{self.source}, line {line}: {what}; write fields as name: value")
