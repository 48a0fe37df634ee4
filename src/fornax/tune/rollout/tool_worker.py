"""The process that runs tools: a line of JSON in, a line of JSON out; imports no jax."""

import contextlib
import importlib
import importlib.util
import json
import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TextIO

__all__ = ["find_function", "main"]

_PARENT_SECONDS = 0.5


def main() -> None:
    """Serve until standard input ends, or the parent does."""
    parent = os.getppid()
    # What tools print goes to standard error; the answers have a channel of their own.
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    threading.Thread(target=_end_with, args=(parent,), daemon=True).start()
    functions: dict[str, Callable[..., Any]] = {}
    for line in sys.stdin:
        _answer(answers, json.loads(line), functions)


def find_function(name: str) -> Callable[..., Any]:
    """The function that FILE.py:NAME or MODULE:NAME names.

    Raises:
      ValueError: there is none.
    """
    place, _, attribute = name.rpartition(":")
    if not place:
        raise ValueError(f"tool {name!r} names no function; give FILE.py:NAME or MODULE:NAME")
    if place.endswith(".py"):
        module_name = f"fornax_tool_{Path(place).stem}"
        spec = importlib.util.spec_from_file_location(module_name, place)
        if spec is None or spec.loader is None or not Path(place).is_file():
            raise ValueError(f"tool {name!r}: there is no file {place}")
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    else:
        module = importlib.import_module(place)
    found = getattr(module, attribute, None)
    if not callable(found):
        raise ValueError(f"tool {name!r}: {place} has no function {attribute}")
    return found


def _answer(answers: TextIO, request: dict[str, Any], functions: dict[str, Callable]) -> None:
    try:
        for name in request.get("load", ()):
            functions[name] = find_function(name)
        result: Any = ""
        if "function" in request:
            result = functions[request["function"]](**request["arguments"])
        answer = {"result": result if isinstance(result, str) else json.dumps(result, default=str)}
    except BaseException as error:  # a tool may raise anything, SystemExit too
        answer = {"error": f"{type(error).__name__}: {error}"}
    answers.write(json.dumps(answer) + "\n")
    answers.flush()


def _end_with(parent: int) -> None:
    """End this process, whatever runs in it, when the one that began it is gone."""
    while os.getppid() == parent:
        time.sleep(_PARENT_SECONDS)
    with contextlib.suppress(OSError):
        os.killpg(os.getpgid(0), 9)
    os._exit(1)
