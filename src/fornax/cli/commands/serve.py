"""`fornax serve`: a language model behind OpenAI's HTTP interface."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from tyro.conf import Positional, arg

from fornax.cli.configured import ConfigArguments, read_config
from fornax.config import ConfigError

if TYPE_CHECKING:
    from fornax.llm.async_engine import AsyncEngine
    from fornax.llm.server.launch import ServeConfig
    from fornax.llm.stats import Observer


@dataclasses.dataclass(frozen=True, kw_only=True)
class Arguments(ConfigArguments):
    """Serve a model with an OpenAI-compatible API: completions, chats, embeddings.

    Flags are those of `vllm serve` where it has them: --host, --port, --api-key,
    --served-model-name, --max-model-len, --max-num-seqs, --max-num-batched-tokens, --dtype,
    --quantization, --tensor-parallel-size, --enable-lora, --chat-template, --tool-call-parser,
    --reasoning-parser and more: --help-config lists them all with type, default and meaning.
    SIGTERM lets running requests finish.

    examples:
      fornax serve runs/quickstart/hf --port 8000
      fornax serve Qwen/Qwen3-0.6B --max-model-len 8192 --api-key SECRET
      curl localhost:8000/v1/completions -H 'content-type: application/json' \\
        -d '{"prompt": "def main(", "max_tokens": 32}'
    """

    model: Annotated[Positional[str], arg(metavar="MODEL", help_behavior_hint="")] = ""
    """Hugging Face directory, its name on the Hub (org/name[@revision]), run directory, or GGUF
    file."""


def run(arguments: Arguments, overrides: Sequence[str]) -> int:
    """Serve; 0 after a stop that was asked for, 1 when the engine died."""
    from fornax.llm.server.launch import ServeConfig

    config = read_config(ServeConfig, arguments, overrides)
    if config is None:
        return 0
    if not arguments.model:
        raise ConfigError("no model is named; write fornax serve MODEL")
    from fornax.llm.server.launch import serve_model
    from fornax.train import is_run

    return serve_model(arguments.model, config, _build_run if is_run(arguments.model) else None)


def _build_run(model: str, config: "ServeConfig", observer: "Observer") -> "AsyncEngine":
    """An engine for the latest checkpoint of a run directory."""
    from fornax.llm.async_engine import AsyncEngine
    from fornax.llm.build import build_engine
    from fornax.train import load_decoder, tokenizer_folder

    tokenizer = tokenizer_folder(Path(model), config.tokenizer)
    engine = config.engine()
    decoder = load_decoder(model, mtp=engine.mtp)
    return AsyncEngine(build_engine(decoder, engine, tokenizer=tokenizer, observer=observer))
