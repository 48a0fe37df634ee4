"""Masks over what the assistant wrote are transformers', and implicit prompts are TRL's."""

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import trl
from transformers import PreTrainedTokenizerFast
from trl.data_utils import extract_prompt

from fornax.data import Tokenizer, train_bpe
from fornax.llm.text import ChatTemplate
from fornax.tune.data import Chat, Codec, Problems, parse_pair, read_lines

pytestmark = pytest.mark.parity

TEMPLATES = Path(trl.__file__).parent / "chat_templates"
FAMILIES = (
    "cohere2",
    "deepseekv3",
    "gemma",
    "gemma3",
    "glm4moe",
    "gptoss",
    "lfm2",
    "llama3",
    "muse_glimmer",
    "nemotron_3_nano",
    "phi3",
    "qwen2_5",
    "qwen3",
    "qwen3_5_think",
    "qwen3_instruct_2507",
)
BAR = "[|\N{FULLWIDTH VERTICAL LINE}]"
MARKERS = re.compile(rf"<{BAR}[^'\"<>{{}}]*?{BAR}>|<(?:start|end)_of_turn>")
NAMES = {"bos_token": "<|begin|>", "eos_token": "<|endoftext|>"}
BASE = train_bpe(["system user assistant hello what is one and two?\n\n\n "] * 4, 300)

SHORT = [
    {"role": "user", "content": "Hello there"},
    {"role": "assistant", "content": "I am fine. 日本 🎉"},
    {"role": "user", "content": "and\n"},
    {"role": "assistant", "content": "2 + 2\n\n"},
]
LONG = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "1 + 1?"},
    {"role": "assistant", "content": "2", "reasoning_content": "easy"},
    *SHORT,
]
CHATS = {"short": SHORT, "long": LONG}


def _pair(family: str) -> tuple[PreTrainedTokenizerFast, Codec]:
    source = (TEMPLATES / f"{family}_training.jinja").read_text()
    backends = [type(BASE.backend).from_str(BASE.backend.to_str()) for _ in range(2)]
    markers = sorted(set(MARKERS.findall(source)))
    for backend in backends:
        backend.add_special_tokens(markers)
    oracle = PreTrainedTokenizerFast(tokenizer_object=backends[0], chat_template=source, **NAMES)
    tokenizer = Tokenizer(backends[1], eos_id=BASE.eos_id, bos_id=BASE.bos_id)
    ends = [backends[1].token_to_id(marker) for marker in markers]
    return oracle, Codec(tokenizer, template=ChatTemplate(source, NAMES), eos_ids=ends)


@pytest.mark.parametrize("family", FAMILIES)
def test_marked_masks_are_transformers(family: str) -> None:
    oracle, codec = _pair(family)
    long = LONG[1:] if family == "gemma" else LONG  # gemma refuses a system prompt
    for messages in (SHORT[:2], SHORT, long):
        expected = oracle.apply_chat_template(
            messages, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
        )
        (found,) = codec.chat(Chat(messages=messages))
        assert sum(expected["assistant_masks"]) > 4
        np.testing.assert_array_equal(found.tokens, expected["input_ids"])
        np.testing.assert_array_equal(found.mask, np.asarray(expected["assistant_masks"], bool))


def test_only_a_token_across_a_mark_is_another() -> None:
    oracle, codec = _pair("qwen3_instruct_2507")
    messages = [SHORT[0], {"role": "assistant", "content": "\n\n2"}]
    theirs = oracle.apply_chat_template(
        messages, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
    )
    (found,) = codec.chat(Chat(messages=messages))
    assert codec.encoder.decode(found.tokens) == oracle.decode(theirs["input_ids"])
    assert found.tokens.tolist() != theirs["input_ids"]
    prompt = oracle.apply_chat_template(
        messages[:1], tokenize=True, return_dict=True, add_generation_prompt=True
    )["input_ids"]
    assert found.tokens[: found.prompt].tolist() == prompt != theirs["input_ids"][: len(prompt)]


@pytest.mark.parametrize("family", ["qwen3", "llama3", "gemma3", "phi3"])
def test_prompts_are_transformers(family: str) -> None:
    oracle, codec = _pair(family)
    expected = oracle.apply_chat_template(
        SHORT[:3], tokenize=True, return_dict=True, add_generation_prompt=True
    )
    np.testing.assert_array_equal(codec.prompt(SHORT[:3]), expected["input_ids"])


def test_implicit_prompts_are_trls(tmp_path: Path) -> None:
    other = {"role": "assistant", "content": "no"}
    lines: list[dict[str, Any]] = [
        {"chosen": SHORT, "rejected": [*SHORT[:3], other]},
        {"chosen": SHORT[:2], "rejected": [*SHORT[:1], other]},
        {"chosen": "Is it? It is blue.", "rejected": "Is it? It was green."},
        {"chosen": "\n\nHuman: Hi\n\nAssistant: A", "rejected": "\n\nHuman: Hi\n\nAssistant: B"},
    ]
    path = tmp_path / "pairs.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)))
    for line, found in zip(lines, read_lines(path, Problems()), strict=True):
        (pair,) = parse_pair(found)
        expected = extract_prompt(line)
        assert pair.prompt == expected["prompt"]
        assert (pair.chosen, pair.rejected) == (expected["chosen"], expected["rejected"])
