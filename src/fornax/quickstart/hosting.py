"""The tuned model's scoring function, sealed, served, and asked.

The bundle is served by the command that a user types, in a process of its own, and asked over gRPC
how likely functions of held-out files are; the answers are compared with the model's own.
"""

import json
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from fornax.config.errors import ServingError
from fornax.data import load_tokenizer
from fornax.models import Decoder, load_pretrained, token_logprobs
from fornax.quickstart.child import child_server
from fornax.train import export_model

if TYPE_CHECKING:
    from fornax.serving.grpc.client import Client

__all__ = ["MODEL", "PACKAGES", "direct_scores", "export_score", "serve_and_score", "texts_of"]

MODEL = "lm"
"""The model's name in the repository."""

PACKAGES = ("grpc", "prometheus_client", "uvicorn")
"""Packages of the extra `[serve]` that this needs."""
_ROWS = 4
_ASKED = 20


def export_score(model: Path, repository: Path, *, length: int) -> dict[str, object]:
    """Seal the scoring function of the model at `model` as version 1; the result is JSON-able.

    Args:
      model: a Hugging Face directory.
      repository: a folder of models, for `fornax host`.
      length: tokens of a row, at most.
    """
    path = repository / MODEL / "1"
    manifest = export_model(
        model, path, functions=("score",), batch=(_ROWS,), lengths=(length,), overwrite=True
    )
    return {
        "bundle": str(path),
        "files": len(manifest.files),
        "bytes": sum(file.size for file in manifest.files.values()),
        "platforms": list(manifest.platforms),
        "length": length,
    }


def texts_of(pairs: Path, *, count: int = _ROWS) -> list[str]:
    """The first functions of a file of pairs, signature to body."""
    lines = pairs.read_text(encoding="utf-8").splitlines()[:count]
    return [pair["prompt"] + pair["completion"] for pair in map(json.loads, lines)]


def direct_scores(model: Decoder, rows: Sequence[np.ndarray]) -> list[float]:
    """Log-probability, in nats, of each row's tokens after its first; no padding, no bundle."""
    graph, state = nnx.split(model)

    @jax.jit
    def total(state: object, tokens_BT: jax.Array) -> jax.Array:
        decoder = nnx.merge(graph, state)
        found = token_logprobs(decoder, tokens_BT[:, :-1], tokens_BT[:, 1:])
        return jnp.sum(found.logprobs)

    return [float(total(state, row[None])) for row in rows]


def serve_and_score(
    repository: Path, log: Path, model: Path, pairs: Path, *, length: int
) -> dict[str, object]:
    """Serve the repository, score texts over gRPC and directly, stop it; JSON-able.

    Args:
      repository: with the bundle that `export_score` made.
      log: file for the server's log.
      model: what the bundle was made of.
      pairs: a file of functions.
      length: tokens of a row, at most.

    Raises:
      EngineError: the server did not start, or did not stop cleanly; its log says why.
    """
    from fornax.serving.grpc.client import Client

    tokenizer = load_tokenizer(model)
    texts = texts_of(pairs)
    rows = [np.asarray(tokenizer.encode(text), np.int32)[:length] for text in texts]
    began = time.perf_counter()
    words = ("host", str(repository), "--http", "none", "--grpc", "127.0.0.1:0")
    listening = child_server(words, log, r"listens on grpc://(\S+)")
    with listening as server, Client(server.address) as client:
        server.wait_until(lambda: _ready(client))
        ready = time.perf_counter() - began
        found = [client.infer(MODEL, {"tokens": row[None]}) for row in rows]
        times = []
        for _ in range(_ASKED):
            asked = time.perf_counter()
            client.infer(MODEL, {"tokens": rows[0][None]})
            times.append(time.perf_counter() - asked)
        exit_code = server.stop()
    own = direct_scores(load_pretrained(model), rows)
    scores = [
        {
            "text": text,
            "tokens": int(answer["tokens"][0]),
            "served": float(answer["logprob"][0]),
            "direct": score,
        }
        for text, answer, score in zip(texts, found, own, strict=True)
    ]
    return {
        "seconds_to_ready": round(ready, 2),
        "request_seconds": round(statistics.median(times), 5),
        "exit_code": exit_code,
        "scores": scores,
        "largest_difference": max(abs(one["served"] - one["direct"]) for one in scores),
    }


def _ready(client: "Client") -> bool:
    """Whether the model is compiled, checked and takes requests."""
    try:
        return client.ready(MODEL)
    except ServingError:
        return False
