"""A few prompts, completed by the model as another tool would load it."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fornax.data import load_tokenizer
from fornax.models import Sampling, generate, load_pretrained

__all__ = ["PROMPTS", "complete"]

PROMPTS = (
    ("def main(", 0.0),
    ("import os\nimport sys\n\nclass", 0.7),
    ('    """Return the', 0.7),
    ("    def __init__(self,", 0.7),
    ("for i in range(", 0.7),
)
"""Prompts with the temperature they are completed at."""


def complete(
    directory: Path, prompts: Sequence[tuple[str, float]], *, max_tokens: int, seed: int
) -> list[dict[str, Any]]:
    """Complete each prompt; the result is JSON-able.

    Args:
      directory: a Hugging Face directory with its tokenizer.
      prompts: texts and temperatures.
      max_tokens: tokens of a completion, at most.
      seed: of the first prompt's draws; each further prompt has the next one.
    """
    model = load_pretrained(directory)
    tokenizer = load_tokenizer(directory)
    samples = []
    for number, (prompt, temperature) in enumerate(prompts):
        sampling = Sampling(temperature=temperature, seed=(seed + number) % 2**32)
        encoded = [tokenizer.encode(prompt).tolist()]
        completion = generate(model, encoded, max_tokens=max_tokens, sampling=sampling)[0]
        text = tokenizer.decode(completion)
        samples.append({"prompt": prompt, "temperature": temperature, "text": text})
    return samples
