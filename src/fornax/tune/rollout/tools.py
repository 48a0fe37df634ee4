"""Python functions as tools: called with JSON arguments, in processes that may hang or crash."""

import inspect
import json
import queue
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from fornax.config import ConfigError, load_name
from fornax.tune.rollout.tool_process import ToolProcess
from fornax.tune.rollout.types import Message, Record, ToolSchemas, Turn

__all__ = ["Tool", "ToolEnvironment", "ToolPool"]


_KINDS: dict[object, str] = {
    str: "string",
    int: "integer",
    float: "number",
    bool: "boolean",
    list: "array",
    dict: "object",
}


def tool_schema(name: str, function: Callable[..., object]) -> dict[str, object]:
    """A function in OpenAI's form.

    Raises:
      ConfigError: a parameter without a type, or of one that JSON does not know.
    """
    hints = typing.get_type_hints(function)
    properties, required = {}, []
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            continue
        if parameter.kind is parameter.POSITIONAL_ONLY or parameter.name not in hints:
            raise ConfigError(
                f"the tool {name} needs a type for {parameter.name}, which must be a parameter by "
                "name: the model sees both"
            )
        properties[parameter.name] = _kind(name, parameter.name, hints[parameter.name])
        if parameter.default is parameter.empty:
            required.append(parameter.name)
    described = inspect.getdoc(function) or ""
    return {
        "type": "function",
        "function": {
            "name": name,
            "description": " ".join(described.split("\n\n")[0].split()),
            "parameters": {"type": "object", "properties": properties, "required": required},
        },
    }


def _kind(tool: str, parameter: str, hint: object) -> dict[str, object]:
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is Literal:
        return {"enum": list(arguments)}
    if origin in (typing.Union, types.UnionType):
        kinds = [_kind(tool, parameter, each) for each in arguments if each is not type(None)]
        return kinds[0] if len(kinds) == 1 else {"anyOf": kinds}
    kind = _KINDS.get(origin or hint)
    if kind is None:
        raise ConfigError(
            f"the tool {tool} takes {parameter} as {hint}, which JSON does not know; use str, int, "
            "float, bool, list, dict or a Literal"
        )
    if kind == "array" and arguments:
        return {"type": kind, "items": _kind(tool, parameter, arguments[0])}
    return {"type": kind}


@dataclass(frozen=True, kw_only=True)
class Tool:
    """A function that the model may call.

    Raises `ConfigError` where there is no such function, or its parameters have no types that JSON
    knows.
    """

    function: str
    """FILE.py:NAME, or MODULE:NAME."""
    timeout_seconds: float = 5.0
    """The longest a call may take; then its process is killed, and the model gets an error."""
    max_characters: int = 2000
    """Of an answer that the model gets to see."""
    name: str = ""
    """What the model calls it (default: the function's own name)."""
    schema: Mapping[str, object] = field(init=False)
    """In OpenAI's form, made of the function's signature and the first lines of its docstring."""

    def __post_init__(self) -> None:
        if not self.timeout_seconds > 0:
            raise ConfigError(f"timeout_seconds={self.timeout_seconds} must be above 0")
        try:
            function = load_name(self.function)
        except Exception as error:
            raise ConfigError(f"the tool {self.function} cannot be used: {error}") from error
        name = self.name or self.function.rpartition(":")[2]
        object.__setattr__(self, "name", name)
        object.__setattr__(self, "schema", tool_schema(name, function))


class ToolPool:
    """Processes that run tools, shared by any number of environments and threads.

    A tool that hangs or ends its process costs that process, which is begun again.
    """

    def __init__(self, tools: Sequence[Tool], *, workers: int = 2) -> None:
        if workers < 1:
            raise ConfigError(f"workers={workers} must be 1 or more")
        self._tools = {tool.name: tool for tool in tools}
        if len(self._tools) < len(tools):
            raise ConfigError("two tools have one name; give one of them another `name`")
        functions = [tool.function for tool in tools]
        self._idle: queue.SimpleQueue[ToolProcess] = queue.SimpleQueue()
        self._workers = [ToolProcess(functions) for _ in range(workers)]
        for worker in self._workers:
            self._idle.put(worker)

    @property
    def schemas(self) -> list[Mapping[str, object]]:
        """Of all tools, for a chat template."""
        return [tool.schema for tool in self._tools.values()]

    def call(self, name: str, arguments: str) -> str:
        """The tool's answer: the result as text (JSON if it is not text), or `error: …`.

        Args:
          name: of the tool.
          arguments: a JSON object, as the model wrote it.
        """
        tool = self._tools.get(name)
        if tool is None:
            return f"error: there is no tool {name}; there are {', '.join(self._tools)}"
        try:
            given = json.loads(arguments or "{}")
        except ValueError as error:
            return f"error: the arguments are not JSON: {error}"
        if not isinstance(given, dict):
            return "error: the arguments must be a JSON object"
        worker = self._idle.get()
        try:
            answer = worker.call(tool.function, given, tool.timeout_seconds)
        finally:
            self._idle.put(worker)
        most = tool.max_characters
        return answer if len(answer) <= most else f"{answer[:most]}… ({len(answer)} characters)"

    def close(self) -> None:
        """End the processes."""
        for worker in self._workers:
            worker.kill()

    def __enter__(self) -> "ToolPool":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class ToolEnvironment:
    """A question answered with tools, which are called until a message has no call.

    The answer is scored by reward functions, not here; `calls` and `failed_calls` of the rewards
    count what was tried, with weights that are 0 unless given.

    Example:
      with ToolPool([Tool(function="tools.py:search")]) as pool:
          environments = [ToolEnvironment(pool) for _ in records]
    """

    def __init__(
        self,
        pool: ToolPool,
        *,
        system: str = "",
        call_reward: float = 0.0,
        failure_reward: float = 0.0,
    ) -> None:
        """The record's `messages` or `prompt` begin the conversation.

        Args:
          pool: runs the tools.
          system: a message before the record's own.
          call_reward: for each call that worked.
          failure_reward: for each that did not; negative, if anything.
        """
        self._pool = pool
        self._system = system
        self._rewards = {"calls": call_reward, "failed_calls": failure_reward}

    @property
    def tools(self) -> ToolSchemas:
        """The pool's."""
        return self._pool.schemas

    def reset(self, record: Record, seed: int) -> Sequence[Message]:
        """The record's own messages."""
        del seed
        given = record.get("messages") or record.get("prompt")
        if not given:
            raise ConfigError("the record has neither messages nor prompt; add one of them")
        messages = [{"role": "user", "content": given}] if isinstance(given, str) else list(given)
        return (
            [{"role": "system", "content": self._system}, *messages] if self._system else messages
        )

    def step(self, message: Message) -> Turn:
        """Run the tools that were called."""
        calls = message.get("tool_calls") or ()
        answers = []
        counts = dict.fromkeys(self._rewards, 0)
        for call in calls:
            function = call["function"]
            text = self._pool.call(function["name"], function["arguments"])
            counts["failed_calls" if text.startswith("error: ") else "calls"] += 1
            answers.append(
                {
                    "role": "tool",
                    "tool_call_id": call["id"],
                    "name": function["name"],
                    "content": text,
                }
            )
        rewards = {name: self._rewards[name] * count for name, count in counts.items()}
        given = {name: value for name, value in rewards.items() if self._rewards[name]}
        return Turn(messages=answers, done=not calls, rewards=given)
