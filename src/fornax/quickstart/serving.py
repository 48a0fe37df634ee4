"""The quickstart's last stage: the tuned model behind `fornax serve`, asked by OpenAI's client.

The server is a process of its own, started by the command that a user types and stopped by SIGTERM.
"""

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
    "{% if not loop.last %}{{ '\\n' }}{% endif %}{% endfor %}"
)
"""A base model knows no roles: a conversation is its messages in a row, to go on from."""

PACKAGES = ("fastapi", "openai", "prometheus_client", "uvicorn")
"""Packages of the extra `[serve]` that this needs."""
_OPTIONS = ("--port", "0", "--max-num-seqs", "4", "--max-num-batched-tokens", "64")
_SERVED = "quickstart"


def serve_and_ask(directory: Path, log: Path, prompt: str, *, max_tokens: int) -> dict[str, object]:
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


def _ready(address: str) -> bool:
    """Whether the server has compiled its steps."""
    try:
        with urllib.request.urlopen(f"{address}/ready", timeout=10):
            return True
    except OSError:  # not listening yet, or 503
        return False
