"""`fornax bench serve`: load on a server, and its latencies, throughput and goodput."""

import dataclasses
import sys

from fornax.llm.bench import BenchConfig, bench, report_lines, summarise, write_result

_SHOWN_ERRORS = 10


@dataclasses.dataclass(frozen=True, kw_only=True)
class Arguments(BenchConfig):
    """Put load on an OpenAI-compatible server and measure it: TTFT, TPOT, ITL, throughput, goodput.

    Flags and results are those of vllm bench serve. Prompts are random tokens unless a dataset is
    named.

    examples:
      fornax bench serve --port 8000 --request-rate 8
      fornax bench serve --num-prompts 200 --max-concurrency 32 --random-input-len 512 --ignore-eos
      fornax bench serve --request-rate 4 --goodput ttft:200 tpot:50 --save-result
      fornax bench serve --dataset-name timed_trace --dataset-path trace.jsonl
    """


def run(arguments: Arguments) -> int:
    """Run the load and print the result."""
    show = sys.stderr.isatty() and not arguments.disable_tqdm
    done = bench(arguments, progress=_progress if show else None)
    result = summarise(arguments, done.outcomes, done.seconds)
    errors = [outcome.error for outcome in done.outcomes if outcome.error]
    for error in errors[:_SHOWN_ERRORS]:
        print(f"failed: {error}", file=sys.stderr)  # noqa: T201
    if len(errors) > _SHOWN_ERRORS:
        print(f"and {len(errors) - _SHOWN_ERRORS} more", file=sys.stderr)  # noqa: T201
    print("\n".join(report_lines(arguments, result)))  # noqa: T201
    if arguments.save_result:
        print(write_result(arguments, done.model, result, done.outcomes))  # noqa: T201
    return 0


def _progress(answered: int, total: int) -> None:
    end = "\n" if answered == total else ""
    print(f"\r{answered} of {total} requests", end=end, file=sys.stderr, flush=True)  # noqa: T201
