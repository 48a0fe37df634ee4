"""Fine-tune a model on conversations, and ask it what it learned.

python examples/61_sft.py

It makes its own model of two layers, so it needs no download and runs in seconds; with a model of
yours the two lines that matter are the config and the call.
"""

import json
import tempfile
from pathlib import Path

from fornax.data import load_tokenizer, train_bpe
from fornax.llm.text import ChatTemplate
from fornax.models import DecoderConfig, create_decoder, generate, save_pretrained
from fornax.optim import Constant, OptimConfig
from fornax.train import load_decoder, read_metrics
from fornax.tune import SFTConfig, tune

CAPITALS = {"France": "Paris", "Japan": "Tokyo", "Peru": "Lima", "Kenya": "Nairobi"}
TEMPLATE = (
    "{% for m in messages %}<|begin|>{{ m['role'] }}\n{{ m['content'] }}<|endoftext|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|begin|>assistant\n{% endif %}"
)


def question(country: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": f"What is the capital of {country}?"}]


def make_model(folder: Path) -> Path:
    """A small model with fresh weights, as a Hugging Face directory."""
    texts = [f"user What is the capital of {c}? assistant {a}." for c, a in CAPITALS.items()]
    tokenizer = train_bpe(texts * 4, vocab_size=320)
    tokenizer.save(folder / "tokenizer")
    (folder / "tokenizer" / "chat_template.jinja").write_text(TEMPLATE)
    assert tokenizer.eos_id is not None
    config = DecoderConfig(
        family="llama",
        vocab_size=320,
        hidden_size=64,
        intermediate_size=128,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        max_position_embeddings=64,
        eos_token_ids=(tokenizer.eos_id,),
    )
    save_pretrained(create_decoder(config), folder / "model", folder / "tokenizer")
    return folder / "model"


def ask(run: Path, countries: list[str]) -> list[str]:
    """The model's answers, through the chat template that the run keeps."""
    tokenizer, template = load_tokenizer(run), ChatTemplate.find(run)
    assert template is not None
    tokenizer.backend.encode_special_tokens = False
    prompts = [template.render(question(country)) for country in countries]
    ids = [tokenizer.backend.encode(text, add_special_tokens=False).ids for text in prompts]
    return [tokenizer.decode(answer) for answer in generate(load_decoder(run), ids, max_tokens=6)]


with tempfile.TemporaryDirectory() as name:
    folder = Path(name)
    chats = [
        {"messages": [*question(country), {"role": "assistant", "content": capital}]}
        for country, capital in CAPITALS.items()
    ]
    (folder / "chats.jsonl").write_text("".join(json.dumps(chat) + "\n" for chat in chats))

    config = SFTConfig(
        model=str(make_model(folder)),
        data=str(folder / "chats.jsonl"),
        max_length=64,
        batch_size=2,
        steps=50,
        optim=OptimConfig(learning_rate=3e-3, schedule=Constant()),
    )
    tune(config, folder / "run")

    losses = [record["loss"] for record in read_metrics(folder / "run" / "metrics.jsonl")]
    print(f"loss {losses[0]:.2f} -> {losses[-1]:.4f} over {len(losses)} steps")
    answers = ask(folder / "run", list(CAPITALS))
    for country, answer in zip(CAPITALS, answers, strict=True):
        print(f"What is the capital of {country}? {answer}")
    assert answers == list(CAPITALS.values())
