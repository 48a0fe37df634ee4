"""What a run prints and writes, through the command itself."""

import json

import pytest

from fornax.cli.main import main

SMALL = ["--num-prompts", "4", "--random-input-len", "5", "--random-output-len", "3"]


def test_the_command_prints_what_it_measured(server, capsys):
    words = ["bench", "serve", "--base-url", server.url, *SMALL, "--request-rate", "inf"]
    words += ["--price", "3600000", "--chips", "2"]
    slow = ["--goodput", "ttft:60000", "tpot:60000", "--percentile-metrics", "ttft,e2el"]
    assert main([*words, *slow, "--metric-percentiles", "50,99.9"]) == 0
    lines = dict(line.split(":", 1) for line in capsys.readouterr().out.splitlines() if ":" in line)
    values = {label: float(value) for label, value in lines.items()}
    assert values["Successful requests"] == 4
    assert values["Failed requests"] == 0
    assert values["Total generated tokens"] == 12
    assert values["Request goodput (req/s)"] == values["Request throughput (req/s)"]
    assert values["P50 TTFT (ms)"] <= values["P99.9 TTFT (ms)"]
    assert "Mean E2EL (ms)" in values
    cost = 2000 * values["Benchmark duration (s)"]
    assert values["Cost of the run (US$)"] == pytest.approx(cost, abs=2000 * 0.005 + 0.01 * cost)
    per_million = values["Cost of the run (US$)"] / 12 * 1e6
    assert values["Cost per 1M output tokens (US$)"] == pytest.approx(per_million, rel=0.01)
    assert "Mean TPOT (ms)" not in values


def test_failures_are_shown(server, capsys):
    server.fail_every = 2
    assert main(["bench", "serve", "--base-url", server.url, *SMALL]) == 0
    printed = capsys.readouterr()
    assert printed.err.count("failed: status 503: no room") == 2


def test_no_server_is_the_users_mistake(capsys):
    assert main(["bench", "serve", "--port", "1", "--num-prompts", "1"]) == 2
    assert "start one with fornax serve" in capsys.readouterr().err


@pytest.mark.parametrize("detailed", [False, True])
def test_the_result_is_saved_under_the_names_scripts_know(server, tmp_path, capsys, detailed):
    words = ["bench", "serve", "--base-url", server.url, *SMALL, "--save-result"]
    words += [
        "--result-dir",
        str(tmp_path / "out"),
        "--metadata",
        "version=1",
        "--max-concurrency",
        "2",
    ]
    assert main([*words, *(["--save-detailed"] if detailed else [])]) == 0
    (path,) = (tmp_path / "out").iterdir()
    assert str(path) in capsys.readouterr().out
    assert path.name.startswith("openai-infqps-concurrency2-fake-")
    saved = json.loads(path.read_text())
    assert saved["model_id"] == "fake"
    assert saved["request_rate"] == "inf"
    assert saved["version"] == "1"
    assert saved["completed"] == 4
    assert {"mean_ttft_ms", "p99_tpot_ms", "std_itl_ms", "output_throughput"} <= saved.keys()
    if detailed:
        assert [len(saved[key]) for key in ("ttfts", "itls", "errors", "generated_texts")] == [
            4
        ] * 4
    else:
        assert "ttfts" not in saved
