"""Whether a model finds a fact anywhere in its context: `python benchmarks/needle.py`.

Passkeys (Mohtashami and Jaggi 2023): documents repeat five sentences, among which lie keys of four
digits; at the end they are asked for. Two small models are trained on such documents by
`fornax train`, one that attends to its whole context and one whose layers attend to the last 64
tokens each, so that four layers reach no further than 252. Then the engine completes prompts of new
keys, one key each, by length and by the depth at which the key lies. Tokens are bytes.

A run that is done is not made again, so that the command goes on where it was stopped.
"""

import argparse
import json
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from _harness import machine, table, versions, write_results
from fornax.llm import LLM, SamplingParams

FILLER = (
    "The grass is green. ",
    "The sky is blue. ",
    "The sun is yellow. ",
    "Here we go. ",
    "There and back again. ",
)
KEYS = 8
"""Of a training document."""
LONGEST = 1024
LENGTHS = (256, 512, 768, 1024)
DEPTHS = (0.0, 0.25, 0.5, 0.75, 1.0)
RECIPE = Path(__file__).parents[1] / "recipes" / "needle.yaml"
CONTESTANTS = {
    "whole context": (),
    "windows of 64": ("--model.sliding-window", "64", "--model.attention-pattern", "sliding"),
}


def _name(draw: random.Random) -> str:
    return "".join(draw.choices("bcdfghjklmnpqrstvwxyz", k=3))


def _filler(draw: random.Random, length: int) -> list[str]:
    """Sentences of at most that many bytes together."""
    found: list[str] = []
    while length >= len(sentence := draw.choice(FILLER)):
        found.append(sentence)
        length -= len(sentence)
    return found


def documents(count: int) -> Iterator[str]:
    """Training documents: half as long as the longest to that, all keys asked for at the end."""
    draw = random.Random(0)
    for _ in range(count):
        keys: dict[str, str] = {}
        while len(keys) < KEYS:
            keys[_name(draw)] = f"{draw.randrange(10_000):04}"
        facts = [f"The key of {name} is {key}. " for name, key in keys.items()]
        asked = [f"The key of {name}? {keys[name]}. " for name in draw.sample(sorted(keys), KEYS)]
        used = sum(map(len, facts)) + sum(map(len, asked))
        text = _filler(draw, draw.randrange(LONGEST // 2, LONGEST) - used)
        for fact in facts:
            text.insert(draw.randrange(len(text) + 1), fact)
        yield "".join([*text, *asked])


def prompts(length: int, depth: float, count: int) -> Iterator[tuple[str, str]]:
    """Prompts of nearly that many bytes with one key at a depth, 0 the beginning, and the key."""
    draw = random.Random(f"{length} {depth}")
    for _ in range(count):
        name, key = _name(draw), f"{draw.randrange(10_000):04}"
        fact, question = f"The key of {name} is {key}. ", f"The key of {name}?"
        text = _filler(draw, length - len(fact) - len(question) - 5)
        text.insert(round(depth * len(text)), fact)
        yield "".join([*text, question]), f" {key}"


def fornax(*words: str | Path) -> None:
    """Run a command of Fornax."""
    subprocess.run([sys.executable, "-m", "fornax", *map(str, words)], check=True)


def trained(runs: Path, name: str) -> Path:
    """A model in Hugging Face's format, which is made unless it is there."""
    folder = runs / name.replace(" ", "-")
    if not (folder / "hf" / "config.json").exists():
        data = runs / "data"
        if not (data / "dataset.json").exists():
            lines = (json.dumps({"text": text}) + "\n" for text in documents(12_000))
            (runs / "documents.jsonl").write_text("".join(lines))
            source = ("--source.type", "jsonl", "--source.path", runs / "documents.jsonl")
            fornax("data", "build", *source, "--tokenizer.vocab-size", "259", "--output", data)
        where = ("--data.source.path", data, "--run-dir", folder / "run", "--progress", "lines")
        fornax("train", "--config", RECIPE, *where, *CONTESTANTS[name])
        fornax("convert", folder / "run", "--out", folder / "hf")
    return folder / "hf"


def found(model: Path, count: int) -> np.ndarray:
    """Shares of keys that a model completes wholly, [length, depth]."""
    llm = LLM(model, max_model_len=LONGEST + 16, max_num_seqs=8)
    greedy = SamplingParams(temperature=0, max_tokens=5)

    def share(length: int, depth: float) -> float:
        texts, keys = zip(*prompts(length, depth, count), strict=True)
        outputs = llm.generate(list(texts), greedy)
        said = [output.outputs[0].text for output in outputs]
        return float(np.mean([text == key for text, key in zip(said, keys, strict=True)]))

    return np.array([[share(length, depth) for depth in DEPTHS] for length in LENGTHS])


def main() -> None:
    """Train, ask, and write the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=Path, default=Path("runs/needle"))
    parser.add_argument("--prompts", type=int, default=20, help="of each length and depth")
    args = parser.parse_args()
    args.runs.mkdir(parents=True, exist_ok=True)
    text = [
        "# A needle in a long context",
        "",
        f"{machine()}; {versions('jax')}. Shares of {args.prompts} keys of four digits that are "
        f"completed without a mistake, in percent, after training on documents of {LONGEST // 2} "
        f"to {LONGEST} tokens.",
    ]
    for name in CONTESTANTS:
        shares = found(trained(args.runs, name), args.prompts)
        head = ("length", *(f"depth {depth:.0%}" for depth in DEPTHS))
        rows = [
            (length, *(f"{100 * share:.0f}" for share in row))
            for length, row in zip(LENGTHS, shares, strict=True)
        ]
        text += ["", f"## {name.capitalize()}", "", table(head, rows)]
    print("\n".join(text))
    write_results("needle", "\n".join([*text, ""]))


if __name__ == "__main__":
    main()
