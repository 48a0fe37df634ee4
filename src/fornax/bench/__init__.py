"""Load generators: `fornax bench serve` (OpenAI-compatible) and `fornax bench host` (V2)."""

from fornax.bench.openai.config import BenchConfig
from fornax.bench.openai.outcome import Outcome
from fornax.bench.openai.prompts import Request
from fornax.bench.openai.report import report_lines, summarise, write_result
from fornax.bench.openai.run import BenchRun, bench
from fornax.bench.v2.config import HostBenchConfig
from fornax.bench.v2.report import error_lines, figures, table_lines, write_json
from fornax.bench.v2.run import Measured, bench_host

__all__ = [
    "BenchConfig",
    "BenchRun",
    "HostBenchConfig",
    "Measured",
    "Outcome",
    "Request",
    "bench",
    "bench_host",
    "error_lines",
    "figures",
    "report_lines",
    "summarise",
    "table_lines",
    "write_json",
    "write_result",
]
