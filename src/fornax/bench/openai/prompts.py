"""What is sent: prompts drawn at random, read from a file, or rebuilt from a recorded trace."""

import itertools
import json
import string
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from fornax.bench.connection import Exchange
from fornax.bench.openai.config import BenchConfig
from fornax.config import DataError, EngineError

__all__ = ["LocalVocabulary", "Request", "ServedVocabulary", "Vocabulary", "make_requests"]

_WORDS = 4000
"""Random words whose tokens stand for a vocabulary that only the server knows."""
_SHORTEST, _LONGEST_PROMPT, _LONGEST = 4, 1024, 2048
"""Bounds on ShareGPT's conversations, in tokens: those that `vllm bench serve` sets."""
_CUSTOM_OUTPUT = 256
_INPUT, _OUTPUT = 1024, 128


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One request to send."""

    prompt: list[int] | str
    """Tokens, or text."""
    prompt_tokens: int
    output_tokens: int
    """Tokens to generate."""
    timestamp: float = 0.0
    """When it was recorded to arrive, in seconds."""


class Vocabulary(Protocol):
    """What prompts are made of."""

    @property
    def ids(self) -> Sequence[int]:
        """Ids of ordinary tokens."""
        ...

    async def encode(self, text: str) -> list[int]:
        """Tokens of a text, without special tokens."""

    async def decode(self, tokens: Sequence[int]) -> str:
        """Text of tokens."""


class LocalVocabulary:
    """A tokenizer.json."""

    def __init__(self, path: Path) -> None:
        from fornax.data import load_tokenizer

        self._tokenizer = load_tokenizer(path)
        special = {
            number
            for number, token in self._tokenizer.backend.get_added_tokens_decoder().items()
            if token.special
        }
        self.ids = [n for n in range(self._tokenizer.vocab_size) if n not in special]

    async def encode(self, text: str) -> list[int]:
        """Tokens of a text, without special tokens."""
        return self._tokenizer.encode(text).tolist()

    async def decode(self, tokens: Sequence[int]) -> str:
        """Text of tokens."""
        return self._tokenizer.decode(tokens)


class _Server(Protocol):
    url: str

    async def ask(self, path: str, fields: Mapping[str, object], /) -> Exchange:
        """POST JSON fields to a path."""
        ...


@dataclass(frozen=True, slots=True)
class ServedVocabulary:
    """The server's own /tokenize and /detokenize; `ids` are the tokens that random words have."""

    server: _Server
    model: str
    ids: Sequence[int] = ()

    @classmethod
    async def load(cls, server: _Server, model: str, seed: int) -> "ServedVocabulary":
        """Ask for the tokens of words drawn by `seed`."""
        rng = np.random.default_rng([seed, 2])
        letters = list(string.ascii_letters + string.digits + string.punctuation)
        words = ("".join(rng.choice(letters, rng.integers(1, 8))) for _ in range(_WORDS))
        known = await cls(server, model).encode(" ".join(words))
        return cls(server, model, sorted(set(known)))

    async def encode(self, text: str) -> list[int]:
        """Tokens of a text, without special tokens."""
        asked = await self._ask("/tokenize", {"prompt": text, "add_special_tokens": False})
        return asked["tokens"]

    async def decode(self, tokens: Sequence[int]) -> str:
        """Text of tokens."""
        return (await self._ask("/detokenize", {"tokens": list(tokens)}))["prompt"]

    async def _ask(self, path: str, fields: dict[str, object]) -> dict[str, Any]:
        answer = await self.server.ask(path, {"model": self.model, **fields})
        if answer.status != 200:
            raise EngineError(
                f"{self.server.url}{path} answered with status {answer.status}, so prompts cannot "
                "be made with the server's tokenizer; name one with --tokenizer PATH"
            )
        return json.loads(answer.body)


async def make_requests(
    config: BenchConfig, vocabulary: Vocabulary, context: int | None = None
) -> list[Request]:
    """Make the requests of a run, `num_prompts` of them.

    Args:
        context: tokens that the model can hold, where the server says it: random prompts whose
            length nobody chose are made to fit.

    Raises DataError for a file without a request, or with a line that is none.
    """
    if config.dataset_name == "random":
        return await _random(config, vocabulary, context)
    if config.dataset_name == "timed_trace":
        found = await _trace(config, vocabulary)
    elif config.dataset_name == "sharegpt":
        found = await _sharegpt(config, vocabulary)
    else:
        found = await _custom(config, vocabulary)
    if not found:
        raise DataError(f"{config.dataset_path}: no request in it can be sent")
    wanted = min(config.num_prompts, len(found)) if config.no_oversample else config.num_prompts
    if config.follows_timestamps:
        wanted = min(wanted, len(found))  # a recorded arrival happens once
    return list(itertools.islice(itertools.cycle(found), wanted))


async def _random(
    config: BenchConfig, vocabulary: Vocabulary, context: int | None
) -> list[Request]:
    rng = np.random.default_rng([config.seed, 0])
    ids = np.asarray(vocabulary.ids)
    ratio = config.random_range_ratio

    def lengths(mean: int, least: int) -> np.ndarray:
        low, high = int(mean * (1 - ratio)), int(mean * (1 + ratio))
        return np.maximum(rng.integers(low, high + 1, config.num_prompts), least)

    inputs_mean, outputs_mean = _mean_lengths(config, context)
    own = lengths(inputs_mean, 0 if config.random_prefix_len else 1)
    made = lengths(outputs_mean, 1)
    prefix = rng.choice(ids, config.random_prefix_len).tolist()
    requests = []
    for inputs, outputs in zip(own.tolist(), made.tolist(), strict=True):
        tokens = [*prefix, *rng.choice(ids, inputs).tolist()]
        requests.append(await _of_tokens(config, vocabulary, tokens, outputs))
    return requests


def _mean_lengths(config: BenchConfig, context: int | None) -> tuple[int, int]:
    """Mean tokens of a random prompt without its prefix, and tokens to generate."""
    inputs, outputs = config.input_len or config.random_input_len, config.random_output_len
    outputs = config.output_len or outputs
    room = context or _INPUT + _OUTPUT + config.random_prefix_len
    room = int(room / (1 + config.random_range_ratio)) - config.random_prefix_len
    if outputs is None:
        outputs = max(1, min(_OUTPUT, room // 4 if inputs is None else room - inputs))
    return (max(1, min(_INPUT, room - outputs)) if inputs is None else inputs), outputs


async def _of_tokens(
    config: BenchConfig,
    vocabulary: Vocabulary,
    tokens: list[int],
    outputs: int,
    timestamp: float = 0.0,
) -> Request:
    """A request for a prompt of tokens: sent as they are, or as text where messages are sent."""
    return Request(
        prompt=await vocabulary.decode(tokens) if config.chat else tokens,
        prompt_tokens=len(tokens),
        output_tokens=outputs,
        timestamp=timestamp,
    )


async def _trace(config: BenchConfig, vocabulary: Vocabulary) -> list[Request]:
    """A trace of lengths: `timestamp`, `input_length`, `output_length`, and perhaps `hash_ids`.

    Equal hash ids stand for equal tokens, so prompts share the prefixes that the recorded ones did;
    what the ids do not cover is drawn for the request alone.
    """
    ids, chunk = np.asarray(vocabulary.ids), config.timed_trace_chunk_hash_size
    requests = []
    for number, row in enumerate(_rows(config)):
        length, outputs = _whole(row, "input_length", config), _whole(row, "output_length", config)
        seeds = [[config.seed, 4, int(key)] for key in row.get("hash_ids", [])]
        parts = [np.random.default_rng(seed).choice(ids, chunk) for seed in seeds]
        rest = max(0, length - chunk * len(parts))
        parts.append(np.random.default_rng([config.seed, 5, number]).choice(ids, rest))
        tokens = np.concatenate(parts)[:length].tolist()
        when = float(row.get("timestamp", 0.0)) * config.timed_trace_sec_multiplier
        outputs = config.output_len or outputs
        requests.append(await _of_tokens(config, vocabulary, tokens, outputs, when))
        if len(requests) == config.num_prompts:
            break
    return sorted(requests, key=lambda request: request.timestamp)


async def _sharegpt(config: BenchConfig, vocabulary: Vocabulary) -> list[Request]:
    """First question and length of the first answer of each conversation."""
    requests = []
    for row in _shuffled(config):
        turns = [turn.get("value", "") for turn in row.get("conversations", [])][:2]
        if len(turns) < 2:
            continue
        inputs = len(await vocabulary.encode(turns[0]))
        outputs = config.output_len or len(await vocabulary.encode(turns[1]))
        short = inputs < _SHORTEST or (config.output_len is None and outputs < _SHORTEST)
        if short or inputs > _LONGEST_PROMPT or inputs + outputs > _LONGEST:
            continue
        requests.append(Request(prompt=turns[0], prompt_tokens=inputs, output_tokens=outputs))
        if len(requests) == config.num_prompts:
            break
    return requests


async def _custom(config: BenchConfig, vocabulary: Vocabulary) -> list[Request]:
    """Lines with a `prompt`, and perhaps `output_tokens`."""
    requests = []
    for row in _shuffled(config):
        prompt = row.get("prompt")
        if not isinstance(prompt, str):
            raise DataError(f"{config.dataset_path}: a line has no text under 'prompt'")
        outputs = config.output_len or row.get("output_tokens", _CUSTOM_OUTPUT)
        inputs = len(await vocabulary.encode(prompt))
        requests.append(Request(prompt=prompt, prompt_tokens=inputs, output_tokens=int(outputs)))
        if len(requests) == config.num_prompts:
            break
    return requests


def _shuffled(config: BenchConfig) -> list[dict[str, Any]]:
    rows = _rows(config)
    if config.disable_shuffle:
        return rows
    return [rows[n] for n in np.random.default_rng([config.seed, 3]).permutation(len(rows))]


def _rows(config: BenchConfig) -> list[dict[str, Any]]:
    """Objects of a file that is a JSON list, or lines of JSON."""
    path = config.dataset_path
    assert path is not None  # the config checks it
    text = path.read_text(encoding="utf-8")
    is_list = text.lstrip().startswith("[")
    rows = []
    for number, part in enumerate([text] if is_list else text.split("\n"), 1):
        if not part.strip():
            continue
        try:
            rows += json.loads(part) if is_list else [json.loads(part)]
        except ValueError as error:
            where = path if is_list else f"{path}, line {number}"
            raise DataError(f"{where}: not JSON: {error}") from None
    if not all(isinstance(row, dict) for row in rows):
        raise DataError(f"{path}: JSON objects belong in it, one per line or in one list")
    return rows


def _whole(row: dict[str, Any], key: str, config: BenchConfig) -> int:
    value = row.get(key)
    if not isinstance(value, int) or value < 1:
        raise DataError(f"{config.dataset_path}: {key}={value!r} must be a whole number above 0")
    return value
