"""`fornax eval`: how good a model is, with intervals."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

from tyro.conf import arg

from fornax.cli.arguments import NO_DEFAULT
from fornax.cli.configured import ConfigArguments, read_config


@dataclasses.dataclass(frozen=True, kw_only=True)
class Arguments(ConfigArguments):
    """Measure a model: a Hugging Face directory, a GGUF file, or a run of fornax train or tune.

    --text FILES: perplexity and bits per byte. --prompts FILE --reward FUNCTION: completions judged
    by your functions or verifiers (math, code, json_schema, regex, answers_signature), with pass@k.
    --against MODEL: a comparison, by --reward or by a reward model (--judge RUN). --tasks NAMES:
    tasks of lm-eval-harness, where it is installed. Every key of the config is a flag.

    examples:
      fornax eval --model runs/sft --text held_out.txt
      fornax eval --model hf --prompts p.jsonl --reward math --sampling.max-tokens 512
      fornax eval --model hf --prompts p.jsonl --reward code --sampling.n 16 --k 1 8 \\
          --sampling.temperature 0.8 --out evals/code
      fornax eval --model runs/dpo --against hf --prompts p.jsonl --judge runs/reward
      fornax eval --model hf --tasks arc_easy --limit 100
    """

    out: Annotated[Path | None, arg(metavar="DIR", help_behavior_hint="")] = None
    """Where results.json, samples.jsonl and report.html are written."""
    json: Annotated[bool, NO_DEFAULT] = False
    """Print the results as JSON instead of a table."""


def run(arguments: Arguments, overrides: Sequence[str]) -> int:
    """Evaluate, and print what was found."""
    from fornax.evaluate import EvaluateConfig

    config = read_config(EvaluateConfig, arguments, overrides)
    if config is None:
        return 0
    from fornax.evaluate.results import rows, to_json_text
    from fornax.evaluate.run import evaluate
    from fornax.mesh import initialize

    initialize()
    results = evaluate(config, out=arguments.out)
    if arguments.json:
        print(to_json_text(results))  # noqa: T201
        return 0
    _show(list(rows(results)))
    if arguments.out is not None:
        print(f"\n{arguments.out / 'report.html'}")  # noqa: T201
    return 0


def _show(found: Sequence[Sequence[str]]) -> None:
    """A table; the model's name only where it changes."""
    last = ""
    width = max(len(row[1]) for row in found)
    for model, measure, value, note in found:
        if model != last:
            print(f"\n{model}" if last else model)  # noqa: T201
            last = model
        print(f"  {measure:<{width}}  {value}{f'   {note}' if note else ''}")  # noqa: T201
