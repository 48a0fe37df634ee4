"""What is sent: prompts drawn at random, read from a file, or rebuilt from a recorded trace."""

import itertools
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fornax.config import DataError
from fornax.llm.bench.config import BenchConfig
from fornax.llm.bench.vocabulary import Vocabulary

__all__ = ["Request", "make_requests"]

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
    for number, row in enumerate(_lines(config)):
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
    for row in _shuffled(config, _rows(config)):
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
    for row in _shuffled(config, _lines(config)):
        prompt = row.get("prompt")
        if not isinstance(prompt, str):
            raise DataError(f"{config.dataset_path}: a line has no text under 'prompt'")
        outputs = config.output_len or row.get("output_tokens", _CUSTOM_OUTPUT)
        inputs = len(await vocabulary.encode(prompt))
        requests.append(Request(prompt=prompt, prompt_tokens=inputs, output_tokens=int(outputs)))
        if len(requests) == config.num_prompts:
            break
    return requests


def _shuffled(config: BenchConfig, rows: Iterable[dict[str, Any]]) -> Iterable[dict[str, Any]]:
    if config.disable_shuffle:
        return rows
    found = list(rows)
    return [found[n] for n in np.random.default_rng([config.seed, 3]).permutation(len(found))]


def _rows(config: BenchConfig) -> Iterator[dict[str, Any]]:
    """Objects of a file that is a JSON list, or lines of JSON."""
    path = _path(config)
    with path.open(encoding="utf-8") as file:
        first = file.read(1)
    if first != "[":
        yield from _lines(config)
        return
    try:
        rows = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise DataError(f"{path}: not JSON: {error}") from None
    if not all(isinstance(row, dict) for row in rows):
        raise DataError(f"{path}: JSON objects belong in its list")
    yield from rows


def _lines(config: BenchConfig) -> Iterator[dict[str, Any]]:
    path = _path(config)
    with path.open(encoding="utf-8") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except ValueError as error:
                raise DataError(f"{path}, line {number}: not JSON: {error}") from None
            if not isinstance(row, dict):
                raise DataError(f"{path}, line {number}: a JSON object belongs here")
            yield row


def _path(config: BenchConfig) -> Path:
    assert config.dataset_path is not None  # the config checks it
    return config.dataset_path


def _whole(row: dict[str, Any], key: str, config: BenchConfig) -> int:
    value = row.get(key)
    if not isinstance(value, int) or value < 1:
        raise DataError(f"{config.dataset_path}: {key}={value!r} must be a whole number above 0")
    return value
