"""`fornax bench host`: load on a model server, its latencies and where its time goes."""

import dataclasses
import sys
from collections.abc import Sequence

from fornax.cli.configured import ConfigArguments, read_config
from fornax.config import ConfigError


@dataclasses.dataclass(frozen=True, kw_only=True)
class Arguments(ConfigArguments):
    """Put load on a V2 model server; print latencies, rates, and the server's own split of time.

    Requests are drawn by the model's metadata (--rows, --shape ids:8,128), or read from a file
    (--input rows.npz). Each client sends its next request when the last is answered. A server that
    needs a token gets the first of FORNAX_HOST_TOKEN. --help-config lists every flag.

    examples:
      fornax bench host --model ranker --concurrency 32
      fornax bench host --model ranker --concurrency 1 8 64 --rows 4 --json bench.json
      fornax bench host --model ranker --protocol grpc --url 127.0.0.1:8081 --seconds 10
      fornax bench host --model encoder --shape ids:1,64 --input requests.json
    """


def run(arguments: Arguments, overrides: Sequence[str]) -> int:
    """Measure and print; 1 when no request succeeded."""
    from fornax.bench import HostBenchConfig

    config = read_config(HostBenchConfig, arguments, overrides)
    if config is None:
        return 0
    if not config.model:
        raise ConfigError("no model is named; write fornax bench host --model NAME")
    from fornax.bench import bench_host, error_lines, figures, table_lines, write_json

    measured = list(bench_host(config, progress=_progress if sys.stderr.isatty() else None))
    results = [figures(each) for each in measured]
    print("\n".join(table_lines(results)))  # noqa: T201
    for line in error_lines(measured):
        print(line, file=sys.stderr)  # noqa: T201
    if config.json is not None:
        print(write_json(config.json, config, results))  # noqa: T201
    return 0 if all(result["requests"] for result in results) else 1


def _progress(concurrency: int) -> None:
    print(f"{concurrency} clients", file=sys.stderr, flush=True)  # noqa: T201
