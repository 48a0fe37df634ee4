"""`fornax generate`: a prompt completed on the terminal, token by token."""

import dataclasses
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from tyro.conf import Positional, arg

from fornax.config import ConfigError
from fornax.models import Sampling

if TYPE_CHECKING:
    from fornax.data import Tokenizer

# Enough tokens of the prompt for the tokenizer to join the first new one to them.
_CONTEXT = 8
_MAX_TOKENS = 128


@dataclasses.dataclass(frozen=True, kw_only=True)
class Arguments(Sampling):
    """Complete a prompt with a model: a run, a Hugging Face directory, a name on its Hub, or a
    GGUF file.

    The prompt is --prompt, or what comes on standard input. Without --temperature the most likely
    token is taken each time. The text goes to standard output as it is made.

    examples:
      fornax generate runs/quickstart/hf --prompt "def main(" --max-tokens 64
      fornax generate Qwen/Qwen3-0.6B --prompt "The sea is"
      fornax generate runs/mine --temperature 0.8 --top-p 0.95 --seed 1 < prompt.txt
    """

    model: Annotated[Positional[Path], arg(metavar="MODEL")]
    """The model's path, or org/name[@revision] on the Hugging Face Hub."""
    prompt: Annotated[str, arg(metavar="TEXT", help_behavior_hint="")] = ""
    """The text to continue."""
    max_tokens: Annotated[int | None, arg(metavar="INT", help_behavior_hint="")] = None
    """Tokens to make, at most (default: 128, or what the model's positions leave)."""
    tokenizer: Annotated[Path | None, arg(metavar="PATH", help_behavior_hint="")] = None
    """A tokenizer.json or its folder (default: the one beside the model or of its data)."""
    dtype: Annotated[
        Literal["float32", "bfloat16"] | None,
        arg(metavar="{float32,bfloat16}", help_behavior_hint=""),
    ] = None
    """Type of the weights (default: as they are stored)."""


def run(arguments: Arguments) -> int:
    """Complete the prompt; the completion goes to standard output, the rate to standard error."""
    from fornax.data import load_tokenizer
    from fornax.mesh import initialize, parse_dtype
    from fornax.models import stream
    from fornax.train import load_decoder, tokenizer_folder

    prompt = arguments.prompt or _read_prompt()
    initialize()
    dtype = None if arguments.dtype is None else parse_dtype(arguments.dtype)
    model = load_decoder(arguments.model, dtype=dtype)
    folder = tokenizer_folder(arguments.model, arguments.tokenizer)
    if folder is None:
        raise ConfigError(
            f"there is no tokenizer in {arguments.model}; name one with --tokenizer PATH"
        )
    tokenizer = load_tokenizer(folder)
    ids = tokenizer.backend.encode(prompt, add_special_tokens=True).ids
    max_tokens = arguments.max_tokens
    if max_tokens is None:
        room = model.config.max_position_embeddings - len(ids)
        max_tokens = max(1, min(_MAX_TOKENS, room))
    steps = stream(
        model,
        [ids],
        max_tokens=max_tokens,
        sampling=arguments,
        stop_tokens=_stops(model.config.eos_token_ids, tokenizer),
    )
    clock = _Clock()
    sys.stdout.write(prompt)
    sys.stdout.flush()
    for piece in _text(
        ids, clock.count(token for [token] in steps if token is not None), tokenizer
    ):
        sys.stdout.write(piece)
        sys.stdout.flush()
    sys.stdout.write("\n")
    print(clock, file=sys.stderr)  # noqa: T201
    return 0


def _read_prompt() -> str:
    if sys.stdin.isatty():
        raise ConfigError("there is no prompt; give --prompt TEXT, or text on standard input")
    return sys.stdin.read()


def _stops(of_model: tuple[int, ...], tokenizer: "Tokenizer") -> tuple[int, ...]:
    if of_model or tokenizer.eos_id is None:
        return of_model
    return (tokenizer.eos_id,)


def _text(prompt: list[int], tokens: Iterator[int], tokenizer: "Tokenizer") -> Iterator[str]:
    """The text that tokens add, held back while a character is still in parts."""
    ids = prompt[-_CONTEXT:]
    shown = len(tokenizer.decode(ids))
    for token in tokens:
        ids.append(token)
        text = tokenizer.decode(ids)
        if not text.endswith("\ufffd"):
            yield text[shown:]
            shown = len(text)
    yield tokenizer.decode(ids)[shown:]


class _Clock:
    """Counts tokens, and the time after the first of them, which waited for compilation."""

    def __init__(self) -> None:
        self._made = 0
        self._first = self._last = time.monotonic()

    def count(self, tokens: Iterator[int]) -> Iterator[int]:
        for token in tokens:
            self._last = time.monotonic()
            self._first = self._last if not self._made else self._first
            self._made += 1
            yield token

    def __str__(self) -> str:
        seconds = self._last - self._first
        rate = f", {(self._made - 1) / seconds:,.1f} tokens/s after the first" if seconds else ""
        return f"{self._made} tokens{rate}"
