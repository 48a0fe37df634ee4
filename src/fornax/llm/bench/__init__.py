"""Load for an OpenAI-compatible server and what it measures: what `fornax bench serve` runs."""

from fornax.llm.bench.config import BenchConfig
from fornax.llm.bench.load import BenchRun, bench
from fornax.llm.bench.outcome import Outcome
from fornax.llm.bench.report import report_lines, write_result
from fornax.llm.bench.summary import summarise
from fornax.llm.bench.workload import Request

__all__ = [
    "BenchConfig",
    "BenchRun",
    "Outcome",
    "Request",
    "bench",
    "report_lines",
    "summarise",
    "write_result",
]
