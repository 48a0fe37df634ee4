"""`fornax bench serve`: load on a server, and its latencies, throughput and goodput."""

import dataclasses
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from fornax.cli.configured import ConfigArguments, read_config

if TYPE_CHECKING:
    from fornax.bench import BenchRun

_SHOWN_ERRORS = 10


@dataclasses.dataclass(frozen=True, kw_only=True)
class Arguments(ConfigArguments):
    """Put load on an OpenAI-compatible server; print latencies, throughput and goodput.

    Flags and results are those of vllm bench serve; --help-config lists every one. Those used most:
    --host, --port, --base-url, --backend openai-chat, --num-prompts, --request-rate,
    --max-concurrency, --random-input-len, --random-output-len, --dataset-name, --ignore-eos,
    --goodput, --metric-percentiles, --save-result.

    examples:
      fornax bench serve --port 8000 --request-rate 8
      fornax bench serve --num-prompts 200 --max-concurrency 32 --random-input-len 512 --ignore-eos
      fornax bench serve --request-rate 4 --goodput ttft:200 tpot:50 --save-result
      fornax bench serve --dataset-name timed_trace --dataset-path trace.jsonl
    """


def run(arguments: Arguments, overrides: Sequence[str]) -> int:
    """Run the load and print the result."""
    from fornax.bench import BenchConfig

    config = read_config(BenchConfig, arguments, overrides)
    if config is None:
        return 0
    from fornax.bench import bench, report_lines, summarise, write_result

    show = sys.stderr.isatty() and not config.disable_tqdm
    done = bench(config, progress=_progress if show else None)
    result = summarise(config, done.outcomes, done.seconds)
    _show_errors(done)
    print("\n".join(report_lines(config, result)))  # noqa: T201
    if config.save_result:
        print(write_result(config, done.model, result, done.outcomes))  # noqa: T201
    return 0


def _show_errors(done: "BenchRun") -> None:
    errors = [outcome.error for outcome in done.outcomes if outcome.error]
    for error in errors[:_SHOWN_ERRORS]:
        print(f"failed: {error}", file=sys.stderr)  # noqa: T201
    if len(errors) > _SHOWN_ERRORS:
        print(f"and {len(errors) - _SHOWN_ERRORS} more", file=sys.stderr)  # noqa: T201


def _progress(answered: int, total: int) -> None:
    end = "\n" if answered == total else ""
    print(f"\r{answered} of {total} requests", end=end, file=sys.stderr, flush=True)  # noqa: T201
