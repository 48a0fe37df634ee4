"""What a server is asked before load is put on it: is it ready, and which model has it."""

import asyncio
import json
import time
from dataclasses import dataclass
from typing import Any

from fornax.config import EngineError
from fornax.llm.bench.connection import Exchange, Pool, request_bytes

__all__ = ["Model", "find_model", "wait_until_ready"]

_PAUSE_S = 0.5


@dataclass(frozen=True, slots=True)
class Model:
    """A model that a server has."""

    name: str
    context: int | None
    """Tokens it can hold, where the server says it."""


async def wait_until_ready(pool: Pool, url: str, headers: dict[str, str], timeout_s: float) -> None:
    """Wait until the server says that it takes requests: /ready, or /health where there is none.

    Raises EngineError when that takes longer than `timeout_s`.
    """
    end = time.monotonic() + timeout_s
    while True:
        try:
            status = await _status(pool, f"{url}/ready", headers)
            if status == 404:
                status = await _status(pool, f"{url}/health", headers)
            if status == 200:
                return
            said = f"answers with status {status}"
        except OSError as error:
            said = f"cannot be reached ({error})"
        if time.monotonic() > end:
            raise EngineError(
                f"the server at {url} {said} after {timeout_s:g} s; start it with fornax serve, or "
                "raise ready_check_timeout_sec"
            )
        await asyncio.sleep(_PAUSE_S)


async def _status(pool: Pool, url: str, headers: dict[str, str]) -> int:
    return (await pool.exchange(request_bytes("GET", url, headers=headers))).status


async def find_model(pool: Pool, url: str, headers: dict[str, str], name: str | None) -> Model:
    """Return the model of that name, or the first that the server lists.

    Raises EngineError when there is no server, or it lists no model and none is named.
    """
    try:
        answer = await pool.exchange(request_bytes("GET", f"{url}/v1/models", headers=headers))
    except OSError as error:
        raise EngineError(
            f"no server answers at {url} ({error}); start one with fornax serve, or name another "
            "with --base-url"
        ) from error
    cards = _cards(answer)
    chosen = next((card for card in cards if name in (None, card["id"])), None)
    if chosen is not None:
        return Model(chosen["id"], chosen.get("max_model_len"))
    if name is not None:
        return Model(name, None)
    if answer.status == 401:
        raise EngineError(f"{url} wants a key; set OPENAI_API_KEY, or --header Authorization=…")
    raise EngineError(
        f"{url}/v1/models, status {answer.status}, lists no model; name one with --model"
    )


def _cards(answer: Exchange) -> list[dict[str, Any]]:
    try:
        return [card for card in json.loads(answer.body)["data"] if "id" in card]
    except (ValueError, LookupError, TypeError):
        return []
