"""Which replica was sent which prefixes: what their prefix caches hold, approximately.

A prompt is cut into blocks, and each block's key covers all blocks before it, so that two prompts
share keys as far as they share their beginning. The same idea serves vLLM's prefix cache and the
routers of vLLM's production stack and of SGLang.
"""

from collections import OrderedDict
from collections.abc import Sequence
from typing import Generic, TypeVar

import orjson

__all__ = ["PrefixIndex", "block_keys", "prompt_of"]

R = TypeVar("R")

_BLOCK_BYTES = 64
_LONGEST_BYTES = 128 * 1024
"""Of a prompt that are looked at: hashing them takes below a millisecond."""


def prompt_of(path: str, body: bytes) -> bytes:
    """What a request's cached prefix depends on, the most shared first; empty where nothing does.

    That is model and salt, then the tools and messages of a chat, or the first prompt.
    """
    kind = path.rpartition("/")[2]
    if kind not in ("completions", "generate", "generate_stream"):
        return b""
    try:
        fields = orjson.loads(body)
        if not isinstance(fields, dict):
            return b""
        if "messages" in fields:
            text = orjson.dumps([fields.get("tools"), fields["messages"]])
        else:
            prompt = fields.get("prompt", fields.get("text_input"))
            if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int):
                prompt = prompt[0]
            if not prompt:
                return b""
            text = prompt.encode() if isinstance(prompt, str) else orjson.dumps(prompt)
        return orjson.dumps([path, fields.get("model"), fields.get("cache_salt")]) + text
    except (orjson.JSONDecodeError, UnicodeEncodeError, TypeError):
        return b""  # the replica says what is wrong with it


def block_keys(prompt: bytes) -> list[int]:
    """A key for each whole block of 64 bytes, up to 128 KiB."""
    keys, key = [], 0
    end = min(len(prompt), _LONGEST_BYTES)
    for start in range(0, end - _BLOCK_BYTES + 1, _BLOCK_BYTES):
        key = hash((key, prompt[start : start + _BLOCK_BYTES]))
        keys.append(key)
    return keys


class PrefixIndex(Generic[R]):
    """The replicas that were sent each block, of the blocks used last."""

    def __init__(self, capacity: int = 2**17):
        """Remember `capacity` blocks, 8 MiB of text at 64 bytes each."""
        self._capacity = capacity
        self._holders: OrderedDict[int, set[R]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._holders)

    def matches(self, keys: Sequence[int]) -> dict[R, int]:
        """How many leading blocks each replica was sent; replicas without any are left out."""
        found: dict[R, int] = {}
        alive: set[R] | None = None
        for depth, key in enumerate(keys, 1):
            holders = self._holders.get(key, set())
            alive = holders if alive is None else alive & holders
            if not alive:
                break
            for replica in alive:
                found[replica] = depth
        return found

    def add(self, keys: Sequence[int], replica: R) -> None:
        """Note that a replica is sent these blocks; the ones unused for longest are forgotten."""
        for key in reversed(keys):  # beginnings are newest: they are forgotten last
            holders = self._holders.setdefault(key, set())
            holders.add(replica)
            self._holders.move_to_end(key)
        while len(self._holders) > self._capacity:
            self._holders.popitem(last=False)

    def forget(self, replica: R) -> None:
        """A replica's cache is gone."""
        for key in [key for key, holders in self._holders.items() if replica in holders]:
            self._holders[key].discard(replica)
            if not self._holders[key]:
                del self._holders[key]
