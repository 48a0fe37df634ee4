"""Timing kernels in a child: what crashes loses, what is kept is chosen, what a run's calls are."""

import json
import os
from pathlib import Path

import numpy as np
import pytest

from fornax import kernels
from fornax.cli.main import main
from fornax.data import DataConfig
from fornax.kernels import AttentionCall, GroupedCall, KernelError
from fornax.kernels._paged_attention.call import PagedCall
from fornax.mesh import MeshConfig
from fornax.models import DecoderConfig, config_to_hf
from fornax.plan.kernels import (
    KernelCall,
    Measurement,
    calls_of_serving,
    calls_of_training,
    measure,
)
from fornax.plan.kernels.report import limit_seconds, support_rows
from fornax.plan.serving.engine import ServingConfig
from fornax.plan.topology import parse_topology
from fornax.train import TrainConfig

OWN = """
import os, signal, time
from dataclasses import dataclass
import jax.numpy as jnp
from fornax import kernels

@dataclass(frozen=True)
class Call:
    size: int
    platform: str = "cpu"

def ends():
    os.kill(os.getpid(), signal.SIGKILL)

def fails():
    raise ValueError("no room")

def waits(seconds):
    def work():
        time.sleep(seconds)
        return jnp.zeros(1)
    return work

never = lambda call: None
kernels.register(kernels.Operation(
    "own", (
        kernels.Implementation("ends", ends, never),
        kernels.Implementation("fails", fails, never),
        kernels.Implementation("hangs", waits(100), never),
        kernels.Implementation("slow", waits(0.05), never),
        kernels.Implementation("large only", waits(0), lambda call: f"{call.size} is small"),
        kernels.Implementation("fast", waits(0.02), never),
    ),
    lambda call, run: run,
    call=Call,
))
"""


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "own_kernels.py").write_text(OWN)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setenv("FORNAX_CACHE_DIR", str(tmp_path / "cache"))
    return "own_kernels"


@pytest.mark.exhaustive
@pytest.mark.fault
def test_one_that_ends_the_process_raises_or_hangs_loses_and_the_fastest_is_kept(
    own: str, tmp_path: Path
) -> None:
    call = KernelCall(operation="own", fields={"size": 3, "platform": "cpu"}, chosen="ends")
    [found] = measure([call], keep=True, modules=[own], limit_seconds=8)
    assert found.failures == {
        "ends": "ended its process: SIGKILL",
        "fails": "ValueError: no room",
        "hangs": "took longer than 8 s and was stopped",
    }
    assert found.declined == {"large only": "3 is small"}
    assert found.fastest == "fast"
    assert 0.05 <= found.seconds["slow"] < 1
    [file] = (tmp_path / "cache" / "kernel-choices").glob("own-*.json")
    content = json.loads(file.read_text())
    assert (content["chosen"], content["failures"]) == ("fast", found.failures)


@pytest.mark.slow
def test_what_is_kept_is_chosen_and_what_is_not_kept_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORNAX_CACHE_DIR", str(tmp_path))
    fields = {"platform": "cpu", "rows": 96, "groups": 5, "inputs": 32, "outputs": 24}
    made = GroupedCall(**fields, dtype="float32", devices=1)
    call = KernelCall(operation="grouped_matmul", fields=vars(made), chosen="native")
    [found] = measure([call], keep=False)
    assert kernels.kept("grouped_matmul") == []
    assert {"blockwise"} <= set(found.seconds) <= {"native", "blockwise"}
    [found] = measure([call], keep=True)
    [kept] = kernels.kept("grouped_matmul")
    assert kept.call == vars(made)
    assert kept.chosen == found.fastest
    assert kernels.grouped_matmul_operation.choice(made).implementation == found.fastest


@pytest.mark.parametrize(
    ("modules", "operation", "what"),
    [
        (["no_such_module"], "attention", "importing no_such_module failed"),
        ([], "no such", "there is no operation 'no such'; there are attention"),
    ],
)
def test_what_cannot_be_measured_is_said(modules: list[str], operation: str, what: str) -> None:
    call = KernelCall(operation=operation, fields={}, chosen="")
    with pytest.raises(KernelError, match=what):
        list(measure([call], keep=False, modules=modules))


def _config() -> TrainConfig:
    model = DecoderConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_layers=3, num_heads=4,
        num_kv_heads=2, sliding_window=16, attention_pattern=("sliding", "full"),
    )  # fmt: skip
    return TrainConfig(
        model=model, data=DataConfig(), mesh=MeshConfig(fsdp=2, tensor=2), batch_size=4, seq_len=32
    )


@pytest.mark.slow
def test_the_calls_of_a_training_step_are_one_devices_share() -> None:
    calls = calls_of_training(_config(), parse_topology("cpu:4"))
    attention = [each for each in calls if each.operation == "attention"]
    assert [each.fields["window"] for each in attention] == [16, None]
    for each in attention:
        assert (each.fields["batch"], each.fields["heads"], each.fields["kv_heads"]) == (2, 2, 1)
        assert AttentionCall(**each.fields)
    assert "linear_cross_entropy" in {each.operation for each in calls}


@pytest.mark.slow
def test_the_calls_of_serving_are_those_of_each_size_of_step(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config_to_hf(_config().model)))
    config = ServingConfig(max_model_len=64, max_num_seqs=4, max_num_batched_tokens=32)
    calls = calls_of_serving(tmp_path, config, parse_topology("cpu:1"))
    sizes = {each.fields["tokens"] for each in calls if each.operation == "paged_attention"}
    assert {1, 32} <= sizes
    assert {each.operation for each in calls} >= {"paged_attention", "paged_write"}


@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("causal", [True, False])
def test_work_of_attention_counts_the_pairs_that_are_seen(causal: bool, window: int | None) -> None:
    call = AttentionCall(
        platform="cpu", batch=3, queries=11, keys=17, heads=4, kv_heads=2, head_dim=8, value_dim=6,
        dtype="float32", causal=causal, window=window, softcap=None, sinks=False, positions=True,
        consecutive=True, balanced=False, segments=False, length_shards=1, exchange="auto",
    )  # fmt: skip
    work = kernels.attention_operation.work
    assert work is not None
    query, key = np.arange(6, 17)[:, None], np.arange(17)[None]
    seen = key <= query if causal else np.ones((11, 17), bool)
    if window is not None:
        seen &= np.abs(query - key) < window
    products = [8, 6, 8, 6, 6, 8, 8]  # scores, sums; again, dp, dv, dq, dk
    assert work(call).flops == 2 * 3 * 4 * seen.sum() * sum(products)
    assert work(call).bytes == 4 * 3 * 3 * (11 * 4 + 17 * 2) * (8 + 6)


@pytest.mark.parametrize("window", [None, 9])
def test_work_of_paged_attention_counts_what_its_benchmark_asks_for(window: int | None) -> None:
    call = PagedCall(
        platform="cpu", tokens=12, rows=8, table_width=4, page_size=16, heads=4, kv_heads=2,
        head_dim=8, dtype="float32", cache_dtype="bfloat16", window=window, softcap=None,
        sinks=False, shared=False,
    )  # fmt: skip
    work = kernels.paged_attention_operation.work
    assert work is not None
    pairs = cached = 0
    for tokens in np.diff(np.arange(9) * 12 // 8):
        seen = [64 - tokens + 1 + at for at in range(tokens)]
        pairs += sum(min(each, window or each) for each in seen)
        cached += min(64, (window or 64) + tokens - 1)
    assert work(call).flops == pytest.approx(4 * pairs * 4 * 8, rel=0.01)
    moved = 2 * 12 * 4 * 8 * 4 + cached * 2 * 2 * 8 * 2
    assert work(call).bytes == pytest.approx(moved, rel=0.05)


def test_a_share_of_the_limit_is_of_what_binds() -> None:
    chip = parse_topology("h100:8").chip
    call = KernelCall(operation="own", fields={}, chosen="")

    def limit(flops: float, moved: float) -> float | None:
        found = Measurement(call=call, flops=flops, bytes=moved, dtype="bfloat16")
        return limit_seconds(found, chip)

    assert limit(0, 0) is None
    assert limit(chip.peak_flops["bfloat16"], 1) == 1
    assert limit(1, 2 * chip.memory_bandwidth) == 2


def test_commands_print_the_table_and_refuse_what_they_do_not_know(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORNAX_CACHE_DIR", str(tmp_path))
    assert main(["kernels", "list"]) == 0
    listed = capsys.readouterr().out
    for row in support_rows():
        assert any(line.split() == list(row) for line in listed.splitlines())
    assert main(["kernels", "show", "attention"]) == 0
    assert "nothing of it was measured" in capsys.readouterr().out
    for words, what in (
        (["kernels", "show"], "needs an operation"),
        (
            ["kernels", "show", "attentio"],
            "there is no operation 'attentio'; use one of: attention",
        ),
        (["kernels", "tune"], "needs a run"),
        (["kernels", "tune", "--config", "x.yaml", "--limit", "0"], "limit=0 is not a time"),
        (["kernels", "tun"], "did you mean tune?"),
    ):
        assert main(words) == 2
        assert what in " ".join(capsys.readouterr().err.split())
