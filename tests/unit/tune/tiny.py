"""A model of two layers as a Hugging Face directory, and conversations for it to learn."""

import json
from pathlib import Path
from typing import Any

from fornax.data import Tokenizer, train_bpe
from fornax.models import DecoderConfig, create_decoder, save_pretrained

COLOURS = ("red", "green", "blue", "black", "white", "pink")
TEMPLATE = (
    "{% for m in messages %}<|begin|>{{ m['role'] }}\n{{ m['content'] }}<|endoftext|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|begin|>assistant\n{% endif %}"
)


def small_tokenizer() -> Tokenizer:
    """280 ids: bytes, three special tokens, the commonest pairs."""
    texts = [f"What follows {a}? {b} follows. user assistant" for a in COLOURS for b in COLOURS]
    return train_bpe(texts, vocab_size=280)


def save_model(
    folder: Path, *, seed: int = 0, template: str | None = TEMPLATE, **changes: Any
) -> Path:
    """A model with fresh weights, its tokenizer and chat template; returns its directory.

    It is a llama, unless its config changes that.
    """
    tokenizer = small_tokenizer()
    tokenizer.save(folder / "tokenizer")
    if template is not None:
        (folder / "tokenizer" / "chat_template.jinja").write_text(template)
    assert tokenizer.eos_id is not None
    fields: dict[str, Any] = {
        "vocab_size": 280,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_layers": 2,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 128,
        "initializer_range": 0.2,  # logits wide enough for adapters to choose between
        "eos_token_ids": (tokenizer.eos_id,),
        "family": "llama",
    }
    config = DecoderConfig(**{**fields, **changes})
    save_pretrained(create_decoder(config, seed=seed), folder / "model", folder / "tokenizer")
    return folder / "model"


def chat(number: int) -> dict:
    """A conversation of one turn, or of two."""
    turns = []
    for offset in range(1 + number % 2):
        asked, told = (COLOURS[(number + n + offset) % len(COLOURS)] for n in (0, 1))
        turns += [
            {"role": "user", "content": f"What follows {asked}?"},
            {"role": "assistant", "content": f"{told} follows"},
        ]
    return {"messages": turns}


def save_chats(file: Path, count: int = 36) -> Path:
    """A file of conversations."""
    file.write_text("".join(json.dumps(chat(n)) + "\n" for n in range(count)))
    return file


REWARD = '''
seen = 0

def score(prompt, completion, bonus):
    """Judges with a memory: what it gives depends on how many came before."""
    global seen
    seen += 1
    return completion.count("e") / 4 + bonus * (seen % 5)

def get_state():
    return seen

def set_state(state):
    global seen
    seen = state
'''
"""Judges with a memory, so that a replay that judges twice gives other numbers."""


def save_grpo(folder: Path) -> Path:
    """A model, `prompts.jsonl` and `my_rewards.py` in a folder, which is returned."""
    save_model(folder)
    lines = [{"prompt": f"What follows {c}?", "bonus": 0.01 * i} for i, c in enumerate(COLOURS)]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "my_rewards.py").write_text(REWARD)
    return folder
