"""Grafana dashboards of the servers, from a few lines each: `python deploy/dashboards.py`."""

import json
from pathlib import Path

HERE = Path(__file__).parent / "compose" / "grafana" / "dashboards"
SOURCE = {"type": "prometheus", "uid": "${source}"}


def panel(number: int, title: str, unit: str, *queries: tuple[str, str]) -> dict:
    """A graph; each query has its legend. Three form a row."""
    place = {"h": 8, "w": 8, "x": 8 * (number % 3), "y": 8 * (number // 3)}
    targets = [
        {"datasource": SOURCE, "expr": query, "legendFormat": legend, "refId": chr(65 + index)}
        for index, (query, legend) in enumerate(queries)
    ]
    return {
        "id": number + 1,
        "type": "timeseries",
        "title": title,
        "datasource": SOURCE,
        "gridPos": place,
        "fieldConfig": {"defaults": {"unit": unit, "min": 0}, "overrides": []},
        "targets": targets,
    }


def dashboard(uid: str, title: str, *panels: tuple) -> dict:
    """A dashboard whose data source is chosen on its page."""
    variable = {
        "name": "source",
        "type": "datasource",
        "query": "prometheus",
        "label": "Data source",
    }
    return {
        "uid": uid,
        "title": title,
        "schemaVersion": 39,
        "time": {"from": "now-30m", "to": "now"},
        "refresh": "10s",
        "templating": {"list": [variable]},
        "panels": [panel(number, *each) for number, each in enumerate(panels)],
    }


def rate(metric: str, by: str = "") -> str:
    """Of a counter, a second."""
    total = f"rate({metric}[1m])"
    return f"sum by ({by}) ({total})" if by else f"sum({total})"


def share_of_both(part: str, other: str) -> str:
    """Of two counters, what the first is of their sum."""
    return f"{rate(part)} / ({rate(part)} + {rate(other)})"


def quantile(share: float, metric: str) -> str:
    """Of a histogram."""
    return f"histogram_quantile({share}, sum by (le) (rate({metric}_bucket[5m])))"


def quantiles(metric: str) -> list[tuple[str, str]]:
    """Median and tails."""
    return [(quantile(share, metric), f"p{share * 100:g}") for share in (0.5, 0.95, 0.99)]


def mean_us(metric: str) -> tuple[str, str]:
    """Of a sum of microseconds over the requests answered, in seconds."""
    part = metric.removeprefix("nv_inference_").removesuffix("_duration_us")
    return (
        f"{rate(metric)} / {rate('nv_inference_request_success')} / 1e6",
        part.replace("_", " "),
    )


SERVE = dashboard(
    "fornax-serve",
    "Fornax: language models",
    (
        "Requests",
        "short",
        ("sum(vllm:num_requests_running)", "running"),
        ("sum(vllm:num_requests_waiting)", "waiting"),
    ),
    (
        "Tokens",
        "short",
        (rate("vllm:prompt_tokens_total"), "prompt tokens/s"),
        (rate("vllm:generation_tokens_total"), "generated tokens/s"),
    ),
    ("Cache in use", "percentunit", ("max(vllm:kv_cache_usage_perc)", "of the blocks")),
    ("Time to first token", "s", *quantiles("vllm:time_to_first_token_seconds")),
    ("Time between tokens", "s", *quantiles("vllm:inter_token_latency_seconds")),
    ("Time of a request", "s", *quantiles("vllm:e2e_request_latency_seconds")),
    ("Time in the queue", "s", *quantiles("vllm:request_queue_time_seconds")),
    (
        "Ends",
        "reqps",
        (rate("vllm:request_success_total", "finished_reason"), "{{finished_reason}}"),
    ),
    ("HTTP", "reqps", (rate("http_requests_total", "status"), "{{status}}")),
    (
        "Prefix cache hits",
        "percentunit",
        (
            f"{rate('vllm:prefix_cache_hits_total')} / {rate('vllm:prefix_cache_queries_total')}",
            "of prompt tokens",
        ),
    ),
    ("Preemptions", "short", (rate("vllm:num_preemptions_total"), "a second")),
    (
        "Compilations after ready",
        "short",
        ("sum(fornax:compilations_after_ready_total)", "programs"),
    ),
)
HOST = dashboard(
    "fornax-host",
    "Fornax: hosted models",
    ("Requests answered", "reqps", (rate("nv_inference_request_success", "model"), "{{model}}")),
    ("Requests failed", "reqps", (rate("nv_inference_request_failure", "reason"), "{{reason}}")),
    ("Waiting", "short", ("sum by (model) (nv_inference_pending_request_count)", "{{model}}")),
    (
        "Where the time of a request goes",
        "s",
        *(
            mean_us(f"nv_inference_{part}_duration_us")
            for part in ("queue", "compute_input", "compute_infer", "compute_output")
        ),
    ),
    (
        "Rows of a batch",
        "short",
        (
            f"{rate('nv_inference_count', 'model')} / {rate('nv_inference_exec_count', 'model')}",
            "{{model}}",
        ),
    ),
    (
        "Padding",
        "percentunit",
        (f"{rate('fornax_rows_padding_total')} / {rate('fornax_rows_computed_total')}", "of rows"),
    ),
    (
        "Memory of models",
        "bytes",
        ("sum by (model, version) (fornax_model_memory_bytes)", "{{model}} {{version}}"),
    ),
    ("Memory of devices", "bytes", ("sum(fornax_device_memory_used_bytes)", "used")),
    ("Processor", "short", ("rate(process_cpu_seconds_total[1m])", "cores")),
)
IMAGES = dashboard(
    "fornax-images",
    "Fornax: images",
    (
        "Images and requests",
        "short",
        ("sum(fornax:num_images_running)", "images drawn"),
        ("sum(fornax:num_requests_waiting)", "requests waiting"),
    ),
    (
        "Steps",
        "short",
        (rate("fornax:steps_total"), "steps/s"),
        (rate("fornax:step_rows_total"), "rows/s"),
    ),
    (
        "Padding",
        "percentunit",
        (
            share_of_both("fornax:step_padding_rows_total", "fornax:step_rows_total"),
            "of rows",
        ),
    ),
    ("Time of a step", "s", *quantiles("fornax:step_seconds")),
    ("Time of a request", "s", *quantiles("fornax:request_seconds")),
    ("Time in the queue", "s", *quantiles("fornax:queue_seconds")),
    ("Ends", "reqps", (rate("fornax:requests_total", "outcome"), "{{outcome}}")),
    ("HTTP", "reqps", (rate("http_requests_total", "status"), "{{status}}")),
)


def main() -> None:
    """Write each."""
    for each in (SERVE, HOST, IMAGES):
        path = HERE / f"{each['uid'].removeprefix('fornax-')}.json"
        path.write_text(json.dumps(each, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
