"""The quickstart's last stage: the tuned model behind `fornax serve`, asked by OpenAI's client.

The server is a process of its own, started by the command that a user types and stopped by SIGTERM.
"""

import contextlib
import importlib.util
import re
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fornax.config.errors import EngineError

__all__ = ["ASKED", "CHAT_TEMPLATE", "missing", "serve_and_ask"]

ASKED = 'def read_text(path, encoding=None):\n    """Return the text of a file."""\n'
"""What the server is asked: a function like those the model was tuned on."""

CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message.content }}"
    "{% if not loop.last %}{{ '\\n' }}{% endif %}{% endfor %}"
)
"""A base model knows no roles: a conversation is its messages in a row, to go on from."""

_NEEDS = ("fastapi", "openai", "prometheus_client", "uvicorn")
_PATIENCE_S = 600
_OPTIONS = ("--port", "0", "--max-num-seqs", "4", "--max-num-batched-tokens", "64")
_SERVED = "quickstart"


def missing() -> list[str]:
    """Packages of the extra `[serve]` that are not installed."""
    return [name for name in _NEEDS if importlib.util.find_spec(name) is None]


def serve_and_ask(directory: Path, log: Path, prompt: str, *, max_tokens: int) -> dict[str, Any]:
    """Serve a model, ask it three ways, stop it; the result is JSON-able.

    Args:
      directory: a Hugging Face directory with its tokenizer.
      log: file for the server's log.
      prompt: what every request begins with.
      max_tokens: tokens of an answer, at most.

    Raises:
      EngineError: the server did not start, or did not stop cleanly; its log says why.
    """
    from openai import OpenAI

    began = time.perf_counter()
    with _server(directory, log) as (process, address):
        with OpenAI(base_url=f"{address}/v1", api_key="none", timeout=60.0) as client:
            _wait_ready(client, process, log)
            ready = time.perf_counter() - began
            answers = _ask(client, prompt, max_tokens)
        process.send_signal(signal.SIGTERM)
        exit_code = process.wait(timeout=60)
    if exit_code != 0:
        raise EngineError(f"the server ended with exit code {exit_code}; {log} says why")
    return {"seconds_to_ready": round(ready, 2), "exit_code": exit_code, **answers}


def _ask(client: Any, prompt: str, max_tokens: int) -> dict[str, Any]:
    model = client.models.list().data[0].id
    options = {"model": model, "max_tokens": max_tokens, "temperature": 0.0}
    completion = client.completions.create(prompt=prompt, **options)
    began = time.perf_counter()
    stream = client.chat.completions.create(
        messages=[{"role": "user", "content": prompt}],
        stream=True,
        stream_options={"include_usage": True},
        **options,
    )
    pieces, first, tokens = [], None, 0
    for chunk in stream:
        if chunk.usage is not None:
            tokens = chunk.usage.completion_tokens
        for choice in chunk.choices:
            if choice.delta.content:
                first = first or time.perf_counter()
                pieces.append(choice.delta.content)
    ended = time.perf_counter()
    seconds = ended - (first or ended)
    return {
        "model": model,
        "prompt": prompt,
        "completion": completion.choices[0].text,
        "chat": "".join(pieces),
        "tokens": completion.usage.completion_tokens + tokens,
        "first_token_seconds": round((first or ended) - began, 4),
        "tokens_per_second": round((tokens - 1) / seconds, 1) if seconds and tokens > 1 else None,
    }


@contextlib.contextmanager
def _server(directory: Path, log: Path) -> Iterator[tuple[subprocess.Popen, str]]:
    command = [sys.executable, "-m", "fornax", "serve", str(directory), *_OPTIONS]
    with log.open("wb") as file:
        process = subprocess.Popen(
            [*command, "--served-model-name", _SERVED], stdout=file, stderr=subprocess.STDOUT
        )
    try:
        yield process, _address(process, log)
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()


def _address(process: subprocess.Popen, log: Path) -> str:
    until = time.monotonic() + _PATIENCE_S
    while time.monotonic() < until and process.poll() is None:
        found = re.search(r"listening on (http://\S+)", log.read_text(errors="replace"))
        if found:
            return found[1]
        time.sleep(0.1)
    raise EngineError(f"the server did not start; {log} says why")


def _wait_ready(client: Any, process: subprocess.Popen, log: Path) -> None:
    """Wait until the server has compiled its steps."""
    address = str(client.base_url).removesuffix("/v1/")
    until = time.monotonic() + _PATIENCE_S
    while time.monotonic() < until and process.poll() is None:
        # OSError: not listening yet, or 503.
        with contextlib.suppress(OSError), urllib.request.urlopen(f"{address}/ready", timeout=10):
            return
        time.sleep(0.1)
    raise EngineError(f"the server was not ready within {_PATIENCE_S} s; {log} says why")
