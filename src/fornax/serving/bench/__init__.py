"""Load on a running model server: latencies, rates, and where the server spent the time."""

from fornax.serving.bench.config import HostBenchConfig
from fornax.serving.bench.report import error_lines, figures, table_lines, write_json
from fornax.serving.bench.run import Measured, bench_host

__all__ = [
    "HostBenchConfig",
    "Measured",
    "bench_host",
    "error_lines",
    "figures",
    "table_lines",
    "write_json",
]
