"""A model of the quickstart behind `fornax serve`, asked by OpenAI's client.

The server is a process of its own, started by the command that a user types and stopped by SIGTERM.
"""

import statistics
import time
import urllib.request
from pathlib import Path
from typing import Any

from fornax.quickstart.child import child_server

__all__ = ["ASKED", "CHAT_TEMPLATE", "PACKAGES", "serve_and_ask"]

ASKED = 'def read_text(path, encoding=None):\n    """Return the text of a file."""\n'
"""What the server is asked: a function like those the model was tuned on."""

CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message.content }}"
    "{% if message.role == 'assistant' %}{{ eos_token }}{% endif %}"
    "{% if not loop.last %}{{ '\\n' }}{% endif %}{% endfor %}"
)
"""A base model has no roles: a conversation is its messages in a row, to be continued. An answer
ends with the end token, so that examples of answers can be learned."""

PACKAGES = ("fastapi", "openai", "prometheus_client", "uvicorn")
"""Packages of the extra `[serve]` that this needs."""
_OPTIONS = ("--port", "0", "--max-num-seqs", "4", "--max-num-batched-tokens", "64")
_SERVED = "quickstart"
_ANSWERS = 5
"""Streamed answers; figures are their medians."""


def serve_and_ask(directory: Path, log: Path, prompt: str, *, max_tokens: int) -> dict[str, object]:
    """Serve a model, ask for a completion and for streamed chats, stop it; the result is JSON-able.

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
    words = ("serve", str(directory), *_OPTIONS, "--served-model-name", _SERVED)
    with child_server(words, log, r"listening on (http://\S+)") as server:
        with OpenAI(base_url=f"{server.address}/v1", api_key="none", timeout=60.0) as client:
            server.wait_until(lambda: _ready(server.address))
            ready = time.perf_counter() - began
            answers = _ask(client, prompt, max_tokens)
        exit_code = server.stop()
    return {"seconds_to_ready": round(ready, 2), "exit_code": exit_code, **answers}


def _ask(client: Any, prompt: str, max_tokens: int) -> dict[str, Any]:
    model = client.models.list().data[0].id
    options = {"model": model, "max_tokens": max_tokens, "temperature": 0.0}
    completion = client.completions.create(prompt=prompt, **options)
    answers = [_stream(client, prompt, options) for _ in range(_ANSWERS)]
    text, tokens, _, _ = answers[0]
    return {
        "model": model,
        "prompt": prompt,
        "completion": completion.choices[0].text,
        "chat": text,
        "tokens": completion.usage.completion_tokens + tokens,
        "first_token_seconds": round(statistics.median(each[2] for each in answers), 4),
        "tokens_per_second": round(statistics.median(each[1] / each[3] for each in answers), 1),
    }


def _stream(client: Any, prompt: str, options: dict[str, Any]) -> tuple[str, int, float, float]:
    """A streamed answer, its tokens, and the seconds to its first token and to its end."""
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
    return "".join(pieces), tokens, (first or ended) - began, ended - began


def _ready(address: str) -> bool:
    """Whether the server has compiled its steps."""
    try:
        with urllib.request.urlopen(f"{address}/ready", timeout=10):
            return True
    except OSError:  # not listening yet, or 503
        return False
