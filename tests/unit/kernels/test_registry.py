"""Choosing an implementation: order, reasons, by hand, measured, and what is kept on disk."""

import json
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from fornax import kernels
from fornax.kernels import Implementation, KernelError, Operation, autotuning, choices
from fornax.mesh import MeshConfig, make_mesh, use_mesh


@dataclass(frozen=True)
class Call:
    """A call of the operation these tests make up."""

    size: int
    platform: str = "cpu"


def _small_only(call: Call) -> str | None:
    return None if call.size < 10 else f"size {call.size} is above 9"


def _benchmark(call: Call, run: Callable[[], Any]) -> Callable[[], Any]:
    return run


def _operation(times: dict[str, float] | None = None) -> Operation[Call]:
    """Two implementations that take this many seconds."""

    def run(name: str) -> Callable[[], Any]:
        def work() -> jax.Array:
            time.sleep((times or {}).get(name, 0))
            return jnp.zeros(())

        return work

    return Operation(
        "made-up",
        (
            Implementation("small", run("small"), _small_only),
            Implementation("any", run("any"), lambda call: None),
        ),
        _benchmark,
    )


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FORNAX_CACHE_DIR", str(tmp_path))
    return tmp_path


def test_first_that_does_not_decline_is_chosen() -> None:
    assert _operation().choose(Call(1)).name == "small"
    assert _operation().choose(Call(50)).name == "any"


def test_forcing_one_that_declines_says_why_and_what_would_do() -> None:
    with pytest.raises(KernelError, match="size 50 is above 9; use one of: any"):
        _operation().choose(Call(50), "small")


def test_forcing_an_unknown_one_lists_the_known() -> None:
    with pytest.raises(KernelError, match="'fast' is unknown; use one of: small, any"):
        _operation().choose(Call(1), "fast")


def test_nobody_can_run_it() -> None:
    operation = Operation("made-up", (Implementation("small", print, _small_only),), _benchmark)
    with pytest.raises(KernelError, match="small: size 50 is above 9"):
        operation.choose(Call(50))


def test_explain_names_every_reason() -> None:
    assert _operation().explain(Call(50)) == {"small": "size 50 is above 9", "any": "can run it"}


def test_a_deprecated_one_is_taken_by_hand_or_where_no_other_can_run() -> None:
    operation = _operation()
    small, other = operation.implementations
    operation.implementations = (replace(small, deprecated="any"), other)
    with kernels.recording_choices() as made:
        assert operation.choose(Call(1)).name == "any"
    assert [str(choice) for choice in made] == ["made-up: any (small: deprecated: use any)"]
    with pytest.warns(FutureWarning, match="'small' is deprecated.*use any"):
        assert operation.choose(Call(1), "small").name == "small"
    with autotuning():
        operation.choose(Call(1))
    assert choices.lookup("made-up", Call(1)) is None  # there was nothing to measure
    operation.implementations = operation.implementations[:1]
    assert operation.choose(Call(1)).name == "small"


def test_autotuning_keeps_the_fastest_for_later() -> None:
    slow_first = _operation({"small": 0.05})
    assert slow_first.choose(Call(1)).name == "small"
    with autotuning():
        assert slow_first.choose(Call(1)).name == "any"
    assert slow_first.choose(Call(1)).name == "any"
    assert slow_first.choose(Call(2)).name == "small"  # another call was not measured
    kept = json.loads(choices.path_of("made-up", Call(1)).read_text())
    assert kept["seconds"]["small"] > kept["seconds"]["any"]


def test_one_whose_rows_keep_their_bits_is_not_replaced_by_a_faster_one() -> None:
    operation = _operation({"small": 0.05})
    small, other = operation.implementations
    operation.implementations = (replace(small, steady=True), other)
    with autotuning():
        assert operation.choose(Call(1)).name == "small"
    choices.record("made-up", Call(1), {"small": 0.2, "any": 0.1}, {})
    assert operation.choose(Call(1)).name == "small"
    assert operation.choose(Call(50)).name == "any"


def test_measured_choice_that_now_declines_is_not_used() -> None:
    choices.record("made-up", Call(50), {"small": 0.1, "any": 0.2}, {})
    assert _operation().choose(Call(50)).name == "any"


def test_damaged_choice_file_counts_as_none() -> None:
    path = choices.path_of("made-up", Call(1))
    path.parent.mkdir(parents=True)
    path.write_text("{")
    assert _operation().choose(Call(1)).name == "small"


def test_concurrent_records_leave_a_whole_file() -> None:
    with ThreadPoolExecutor(8) as pool:
        for index in range(64):
            seconds = {"small": 1.0, "any": 0.5 + index % 2}
            pool.submit(choices.record, "made-up", Call(1), seconds, {})
    measured = choices.lookup("made-up", Call(1))
    assert measured is not None
    assert measured.chosen in ("small", "any")
    assert [p.name for p in choices.path_of("made-up", Call(1)).parent.iterdir()] == [
        choices.path_of("made-up", Call(1)).name
    ]


def test_tunes_while_tracing() -> None:
    q = jnp.ones((1, 16, 2, 8))
    with autotuning():
        jax.jit(lambda q: kernels.attention(q, q, q, scale=1.0))(q)
    (path,) = choices.path_of("attention", Call(1)).parent.iterdir()
    assert set(json.loads(path.read_text())["seconds"]) <= {"native", "xla"}


def test_candidate_that_raises_loses_and_its_error_is_kept(
    caplog: pytest.LogCaptureFixture,
) -> None:
    broken = jax.ffi.ffi_call("fornax_no_such_target", jax.ShapeDtypeStruct((4,), jnp.float32))
    runs = {"broken": jax.jit(broken), "late": lambda: 1 / 0, "works": lambda: jnp.zeros(4)}

    def benchmark(call: Call, run: Callable[[], Any]) -> Callable[[], Any]:
        return run

    operation = Operation(
        "made-up",
        tuple(Implementation(name, run, lambda call: None) for name, run in runs.items()),
        benchmark,
    )
    with autotuning(), kernels.recording_choices() as made:
        assert operation.choose(Call(1)).name == "works"
    kept = json.loads(choices.path_of("made-up", Call(1)).read_text())
    assert set(kept["seconds"]) == {"works"}
    assert set(kept["failures"]) == {"broken", "late"}
    assert "broken failed and is left out" in caplog.text
    (choice,) = made
    assert "fornax_no_such_target" in str(choice)
    assert "late: failed: ZeroDivisionError" in str(choice)
    assert operation.choice(Call(1)) == choice  # a later process reads the same


def test_where_all_raise_the_first_is_chosen_and_nothing_is_measured_again() -> None:
    calls: list[str] = []

    def benchmark(call: Call, run: Callable[[], Any]) -> Callable[[], Any]:
        calls.append("prepared")
        raise MemoryError("too large")

    implementations = tuple(Implementation(n, print, lambda call: None) for n in ("a", "b"))
    operation = Operation("made-up", implementations, benchmark)
    with autotuning():
        assert operation.choose(Call(1)).name == "a"
        assert operation.choose(Call(1)).name == "a"
    assert calls == ["prepared", "prepared"]


def test_measures_one_device_s_share_of_a_mesh() -> None:
    q_BTNH = jnp.ones((8, 64, 4, 8))
    mesh = make_mesh(MeshConfig(fsdp=4, tensor=2))
    with use_mesh(mesh), autotuning():
        jax.jit(lambda q: kernels.attention(q, q, q, scale=1.0))(q_BTNH)
    (path,) = choices.path_of("attention", Call(1)).parent.iterdir()
    kept = json.loads(path.read_text())
    call = kept["call"]
    assert (call["batch"], call["heads"], call["queries"]) == (2, 2, 64)
    assert kept["failures"] == {}
    assert len(kept["seconds"]) > 1


def test_measures_a_share_of_a_divided_length() -> None:
    q_BTNH = jnp.ones((2, 2048, 2, 8))
    with use_mesh(make_mesh(MeshConfig(fsdp=1, context=8))), autotuning():
        jax.jit(lambda q: kernels.attention(q, q, q, scale=1.0, exchange="all_gather"))(q_BTNH)
    (path,) = choices.path_of("attention", Call(1)).parent.iterdir()
    kept = json.loads(path.read_text())
    assert kept["failures"] == {}
    assert set(kept["seconds"]) == {"blockwise", "xla"}


def test_what_needs_other_devices_is_taken_by_its_place() -> None:
    """A ring, where nothing before it can run: no share of it could be timed."""
    q_BTNH = jnp.ones((2, 64, 2, 8))
    mesh = make_mesh(MeshConfig(fsdp=1, context=8))
    with use_mesh(mesh), autotuning(), kernels.recording_choices() as made:
        jax.eval_shape(lambda q: kernels.attention(q, q, q, scale=1.0), q_BTNH)
    (choice,) = made
    assert choice.implementation == "ring"
    assert [name for name, _ in choice.declined] == ["native"]
    assert not choices.path_of("attention", Call(1)).parent.exists()


def test_a_choice_says_why_what_is_preferred_declined() -> None:
    with kernels.recording_choices() as made:
        _operation().choose(Call(50))
        _operation().choose(Call(50))
        _operation().choose(Call(1))
        _operation().choose(Call(1), "any")
    assert [str(choice) for choice in made] == [
        "made-up: any (small: size 50 is above 9)",
        "made-up: small",
        "made-up: any",
    ]


def test_a_choice_leaves_other_platforms_out() -> None:
    elsewhere = Implementation("tpu only", print, lambda call: None, platform="tpu")
    operation = Operation(
        "made-up", (elsewhere, Implementation("any", print, lambda call: None)), _benchmark
    )
    assert str(operation.choice(Call(1))) == "made-up: any"
    assert operation.explain(Call(1))["tpu only"] == "it runs on tpu, not on cpu"
    with pytest.raises(KernelError, match="it runs on tpu, not on cpu"):
        operation.choose(Call(1), "tpu only")


def test_target_platform_changes_who_can_run() -> None:
    q = jnp.ones((1, 16, 2, 8))
    with (
        kernels.target_platform("tpu"),
        pytest.raises(KernelError, match="not on tpu"),
    ):
        kernels.attention(q, q, q, scale=1.0, implementation="native")
    with (
        pytest.raises(KernelError, match="use one of: cpu, gpu, tpu"),
        kernels.target_platform("npu"),
    ):
        pass


def test_another_implementation_stands_where_it_is_put() -> None:
    operation = _operation()
    operation.add(Implementation("first", print, lambda call: None))
    operation.add(Implementation("middle", print, _small_only), before="any")
    assert [one.name for one in operation.implementations] == ["first", "small", "middle", "any"]
    assert operation.choose(Call(1)).name == "first"
    with pytest.raises(KernelError, match="has an implementation 'any' already"):
        operation.add(Implementation("any", print, lambda call: None))
    with pytest.raises(KernelError, match="before='last' is unknown; use one of: first, small"):
        operation.add(Implementation("other", print, lambda call: None), before="last")


def test_names_are_taken_once_and_calls_need_their_class() -> None:
    with pytest.raises(KernelError, match="there is an operation 'attention' already"):
        kernels.register(Operation("attention", (), _benchmark, call=Call))
    with pytest.raises(KernelError, match="give Operation"):
        kernels.register(_operation())
    assert kernels.operations()["attention"] is kernels.attention_operation


def test_calls_that_leave_the_choice_open_are_recorded_once() -> None:
    operation = _operation()
    with kernels.recording_calls() as found:
        for size in (1, 50, 1):
            operation.choose(Call(size))
        operation.choose(Call(2), "any")
    assert {call: choice.implementation for (_, call), choice in found.items()} == {
        Call(1): "small",
        Call(50): "any",
    }
