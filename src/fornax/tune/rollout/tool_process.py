"""A process that runs tools: started when needed, killed when it hangs; imports no jax."""

import json
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection

from fornax.config import load_name
from fornax.config.worker_process import WorkerProcess, receive, send

__all__ = ["ToolProcess", "main"]

_LONGEST = 1 << 20
"""Bytes of an answer that are read, at most."""
_LOAD_SECONDS = 120.0


class ToolProcess:
    """One process; one thread at a time calls it."""

    def __init__(self, functions: Sequence[str]) -> None:
        self._functions = list(functions)
        self._process: WorkerProcess | None = None

    def call(self, function: str, arguments: Mapping[str, object], seconds: float) -> str:
        """The result as text, or `error: …`; what hangs or ends the process costs the process."""
        if self._process is None:
            self._process = WorkerProcess("fornax.tune.rollout.tool_process:main")
            # The import of the tools' files does not count against their time.
            problem = self._ask({"load": self._functions}, _LOAD_SECONDS)
            if "error" in problem:
                self.kill()
                return f"error: {problem['error']}"
        answer = self._ask({"function": function, "arguments": arguments}, seconds)
        return f"error: {answer['error']}" if "error" in answer else answer["result"]

    def kill(self) -> None:
        """End the process and what it began."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()

    def _ask(self, request: Mapping[str, object], seconds: float) -> dict[str, str]:
        assert self._process is not None
        try:
            return self._process.ask(request, seconds, longest=_LONGEST)
        except TimeoutError:
            problem = f"took over {seconds:g} s"
        except EOFError:
            problem = "the tool answered too much, or ended its process"
        self.kill()
        return {"error": problem}


def main(parent: Connection) -> None:
    """Serve until the parent is gone."""
    functions: dict[str, Callable[..., object]] = {}
    while True:
        request = receive(parent)
        try:
            for name in request.get("load", ()):
                functions[name] = load_name(name)
            result: object = ""
            if "function" in request:
                result = functions[request["function"]](**request["arguments"])
            text = result if isinstance(result, str) else json.dumps(result, default=str)
            answer = {"result": text}
        except BaseException as error:  # a tool may raise anything, SystemExit too
            answer = {"error": f"{type(error).__name__}: {error}"}
        send(parent, answer)
