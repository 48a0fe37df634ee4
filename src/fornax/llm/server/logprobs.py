"""Log probabilities in the shapes of completions and of chats."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from fornax.llm.outputs import Logprob

__all__ = ["chat_logprobs", "completion_logprobs", "prompt_logprobs"]

_LOWEST = -9999.0
"""JSON has no infinity; this stands for minus infinity, as in vLLM."""

Position = Mapping[int, Logprob]
Spell = Callable[[int], str]
"""A token's text, for tokens that come without."""


def completion_logprobs(
    ids: Sequence[int],
    positions: Sequence[Position | None],
    offset: int,
    *,
    as_ids: bool,
    top: int,
    spell: Spell,
) -> tuple[dict[str, Any], int]:
    """Completions' object for tokens whose text begins at `offset`; and the offset after them.

    A position is None for the first token of a prompt, which nothing predicts.
    """
    tokens, chosen, offsets = [], [], []
    others: list[dict[str, float] | None] = []
    for number, position in zip(ids, positions, strict=True):
        entry = None if position is None else position.get(number)
        tokens.append(_text(number, entry, as_ids, spell))
        offsets.append(offset)
        offset += len(_text(number, entry, False, spell))
        chosen.append(None if entry is None else _finite(entry.logprob))
        others.append(
            None
            if position is None
            else {
                _text(other, item, as_ids, spell): _finite(item.logprob)
                for other, item in position.items()
                if top < 0 or item.rank <= top or other == number
            }
        )
    shaped = {
        "text_offset": offsets,
        "token_logprobs": chosen,
        "tokens": tokens,
        "top_logprobs": others,
    }
    return shaped, offset


def chat_logprobs(
    ids: Sequence[int], positions: Sequence[Position], *, as_ids: bool, top: int, spell: Spell
) -> dict[str, Any]:
    """Chats' object: each token with the most likely ones at its place."""
    return {
        "content": [
            {
                **_entry(number, position[number], as_ids, spell),
                "top_logprobs": [
                    _entry(other, item, as_ids, spell)
                    for other, item in sorted(position.items(), key=lambda pair: pair[1].rank)
                    if top < 0 or item.rank <= top
                ],
            }
            for number, position in zip(ids, positions, strict=True)
        ]
    }


def prompt_logprobs(positions: Sequence[Position | None] | None) -> list[Any] | None:
    """vLLM's `prompt_logprobs`: for each prompt token, by token id."""
    if positions is None:
        return None
    return [
        None
        if position is None
        else {
            str(number): {
                "logprob": _finite(item.logprob),
                "rank": item.rank,
                "decoded_token": item.decoded_token,
            }
            for number, item in position.items()
        }
        for position in positions
    ]


def _entry(number: int, item: Logprob, as_ids: bool, spell: Spell) -> dict[str, Any]:
    text = _text(number, item, as_ids, spell)
    return {
        "token": text,
        "logprob": _finite(item.logprob),
        "bytes": list(text.encode("utf-8", "replace")),
    }


def _text(number: int, item: Logprob | None, as_ids: bool, spell: Spell) -> str:
    if as_ids:
        return f"token_id:{number}"
    if item is None or item.decoded_token is None:
        return spell(number)
    return item.decoded_token


def _finite(value: float) -> float:
    return value if value > _LOWEST else _LOWEST
