"""Planes of TPUs, GPUs and of several ranks, as their profilers document them, read as one kind of
rows."""

import jax
import jax.numpy as jnp
import pytest
from tests.unit.profile.spaces import MS, START, Event, space, write

from fornax import hlo, profile
from fornax.profile.schema import HloProto

PROGRAM = 42


@pytest.fixture(scope="module")
def program() -> tuple[bytes, str]:
    """A real program's HloProto, and the name of the matrix product in it."""

    def step(w, x):
        with jax.named_scope("mlp"):
            return jnp.tanh(x @ w)

    compiled = jax.jit(step).lower(jnp.ones((256, 128)), jnp.ones((64, 256))).compile()
    (module,) = compiled.runtime_executable().hlo_modules()
    proto = HloProto()
    proto.hlo_module.MergeFromString(module.as_serialized_hlo_module_proto())
    facts = hlo.analyse(hlo.parse(module.to_string()), {"devices": 1})
    (product,) = [each.name for each in facts.operations if each.flops]
    return proto.SerializeToString(), product


def tpu_op(name: str, begin: int, duration: int) -> Event:
    """An event of the line "XLA Ops": its metadata is the instruction's text."""
    return Event(
        f"%{name} = f32[64,128]{{1,0}} fusion(%p)",
        begin,
        duration,
        of_name={"program_id": PROGRAM, "hlo_category": "convolution fusion"},
        display=name,
    )


def tpu_lines(dot: str) -> dict[str, list[Event]]:
    """Two steps of 10 ms: a product, a loop that computes and exchanges, a gather behind both."""
    lines = {"Steps": [], "XLA Modules": [], "XLA Ops": [], "Async XLA Ops": []}
    for number in (7, 8):
        at = 10 * MS * (number - 7)
        lines["Steps"].append(Event(str(number), at, 10 * MS))
        lines["XLA Modules"].append(
            Event(f"jit_step({PROGRAM})", at + MS, 8 * MS, {"run_id": number})
        )
        lines["XLA Ops"] += [
            tpu_op(dot, at + MS, 3 * MS),
            tpu_op("while.1", at + 4 * MS, 4 * MS),
            tpu_op("fusion.9", at + 4 * MS, 2 * MS),
            tpu_op("all-reduce.2", at + 6 * MS, 2 * MS),
        ]
        lines["Async XLA Ops"].append(tpu_op("all-gather-start.3", at + 3 * MS, 2 * MS))
    return lines


def tpu_host() -> dict[str, list[Event]]:
    """The step's thread dispatches in the first millisecond and waits for data in the last."""
    events = []
    for at in (0, 10 * MS):
        events += [
            Event("PjitFunction(step)", at, MS),
            Event("input/read", at + 9 * MS, MS),
        ]
    return {"python": events}


@pytest.fixture
def tpu(tmp_path, program):
    proto, dot = program
    message = space(
        {"/device:TPU:0": tpu_lines(dot), "/host:CPU": tpu_host()},
        {"/device:TPU:0": {"device_type_string": "TPU v5p"}},
        programs={"jit_step": (PROGRAM, proto)},
    )
    write(message, tmp_path)
    return profile.read(tmp_path)


def test_tpu_steps_and_causes_come_from_the_device(tpu):
    times = tpu.step_times()
    assert [step.number for step, _ in times] == [7, 8]
    for step, causes in times:
        assert step.end - step.begin == 10 * MS
        # The product, the loop's fusion, and the millisecond of the module that no line explains.
        expected = {"compute": 6, "exchange": 2, "host": 1, "input": 1, "compile": 0, "idle": 0}
        assert causes.nanoseconds == {cause: value * MS for cause, value in expected.items()}


def test_tpu_operations_have_self_time_and_the_work_of_their_program(tpu, program):
    dot = program[1]
    rows = {row.key: row for row in tpu.ops().rows}
    assert rows[dot].seconds == pytest.approx(2 * 3e-3)
    assert rows["while.1"].seconds == 0  # all of it is its body's
    assert rows["fusion.9"].seconds == pytest.approx(2 * 2e-3)
    assert rows[dot].flops == 2 * (2 * 64 * 256 * 128)
    (operation,) = [tpu.operations[index] for index in rows[dot].operations]
    assert operation.scope == ("mlp",)
    # v5p: 459 TFLOP/s in bfloat16, to which XLA rounds float32 by default, and 2765 GB/s.
    read = 4 * (64 * 256 + 256 * 128 + 64 * 128)
    assert operation.bound == "memory"
    assert operation.bound_seconds == pytest.approx(read / 2.765e12, rel=0.02)
    assert {r.kind for r in tpu.rows if r.device} == {"operations", "exchange"}
    assert tpu.info.platform == "tpu"
    assert tpu.info.device_kind == "TPU v5p"


def gpu_kernel(name: str, op: str, begin: int, duration: int) -> Event:
    stats = {"hlo_op": op, "hlo_module": "jit_step", "program_id": PROGRAM, "correlation_id": begin}
    return Event(name, begin, duration, stats)


def test_gpu_streams_are_rows_and_copies_are_input(tmp_path, program):
    proto, dot = program
    compute, exchange, copies, host = [], [], [], []
    for number in range(3):
        at = 10 * MS * number
        compute.append(gpu_kernel("sm90_gemm", dot, at + 2 * MS, 4 * MS))
        exchange.append(gpu_kernel("ncclDevKernel_AllReduce", "all-reduce.2", at + 5 * MS, 3 * MS))
        copies.append(Event("MemcpyH2D", at + MS, MS))
        host.append(Event("train", at, 9 * MS, {"step_num": 100 + number, "_r": 1}))
        host.append(Event("Wait for device", at + 8 * MS, MS))
    message = space(
        {
            "/device:GPU:0": {
                "Stream #13(Compute)": compute,
                "Stream #20(Compute)": exchange,
                "Stream #14(MemcpyH2D)": copies,
                "XLA Ops": compute,
            },
            "/host:CPU": {"python": host},
        },
        {
            "/device:GPU:0": {
                "device_vendor": "Nvidia",
                "device_type_string": "NVIDIA H100 80GB HBM3",
            }
        },
        programs={"jit_step": (PROGRAM, proto)},
    )
    write(message, tmp_path)
    read = profile.read(tmp_path)
    for number, (step, causes) in enumerate(read.step_times()):
        assert (step.number, step.end - step.begin) == (100 + number, 9 * MS)
        expected = {"compute": 4, "exchange": 2, "input": 1, "host": 1, "idle": 1, "compile": 0}
        assert causes.nanoseconds == {cause: value * MS for cause, value in expected.items()}
    rows = {(row.name, row.kind) for row in read.rows if row.device == "gpu:0"}
    assert rows == {
        ("Stream #13(Compute)", "operations"),
        ("Stream #20(Compute)", "exchange"),
        ("Stream #14(MemcpyH2D)", "operations"),
    }
    table = {row.key: row for row in read.ops().rows}
    assert table[dot].seconds == pytest.approx(3 * 4e-3)
    assert table["all-reduce.2"].category == "exchange"


def rank(ahead: int, slow: int) -> object:
    """Four steps of a rank whose clock is `ahead` and that computes `slow` longer a step."""
    host, device = [], []
    for number in range(4):
        at = 10 * MS * number
        host.append(Event("train", at, 10 * MS, {"step_num": number}))
        stats = {"hlo_module": "jit_step", "program_id": PROGRAM, "run_id": 50 + number}
        stats["device_ordinal"] = 0
        computed = 3 * MS + slow
        device.append(Event("dot.1", at, computed, {**stats, "hlo_op": "dot.1"}))
        reduce = {**stats, "hlo_op": "all-reduce.2"}
        device.append(Event("all-reduce.2", at + computed, 9 * MS - computed, reduce))
    return space({"/host:CPU": {"python": host, "tf_XLAEigen/5": device}}, start=START + ahead)


def test_ranks_are_put_on_one_clock_and_the_late_one_is_named(tmp_path):
    for number, (ahead, slow) in enumerate([(0, 0), (7 * MS, 2 * MS), (-3 * MS, 0)]):
        write(rank(ahead, slow), tmp_path, host=f"host{number}")
    read = profile.read(tmp_path)
    assert read.info.hosts == ("host0", "host1", "host2")
    begins = {step.rank: step.begin for step in read.steps if step.number == 2}
    assert begins == {0: 20 * MS, 1: 20 * MS, 2: 20 * MS}
    assert any("clocks of ranks joined" in note for note in read.info.notes)
    skew = read.skew()
    assert [each.number for each in skew] == [0, 1, 2, 3]
    assert {each.late_rank for each in skew} == {1}
    assert skew[0].seconds == pytest.approx(2e-3)
    assert skew[0].own_seconds == {
        0: pytest.approx(4e-3),
        1: pytest.approx(6e-3),
        2: pytest.approx(4e-3),
    }
    assert read.ops("class").rows[0].count == 12
    assert {row.rank for row in read.rows} == {0, 1, 2}


def test_a_host_that_runs_ahead_does_not_stand_for_its_devices(tmp_path):
    """Annotations that only dispatch are short; the device's runs are the steps, numbered alike."""
    host = [Event("train", n * MS // 10, MS // 20, {"step_num": 5 + n}) for n in range(4)]
    stats = {"hlo_module": "jit_step", "program_id": 1, "device_ordinal": 0, "hlo_op": "dot.1"}
    device = [Event("dot.1", MS + 10 * MS * n, 9 * MS, {**stats, "run_id": n}) for n in range(4)]
    write(space({"/host:CPU": {"python": host, "tf_XLAEigen/5": device}}), tmp_path)
    read = profile.read(tmp_path)
    assert [step.number for step in read.steps] == [5, 6, 7, 8]
    assert [step.end - step.begin for step in read.steps] == [10 * MS] * 3 + [9 * MS]
    assert read.ops(steps=[6]).seconds == pytest.approx(9e-3)


def test_programs_that_are_not_in_the_capture_leave_operations_without_work(tmp_path):
    stats = {"hlo_module": "jit_step", "program_id": 1, "device_ordinal": 0, "hlo_op": "dot.1"}
    write(space({"/host:CPU": {"t": [Event("dot.1", 0, MS, {**stats, "run_id": 1})]}}), tmp_path)
    read = profile.read(tmp_path)
    (row,) = read.ops().rows
    assert (row.key, row.flops, row.bound_seconds, row.program) == ("dot.1", 0, None, "")
    assert any("does not hold all programs" in note for note in read.info.notes)


def test_a_program_that_is_damaged_is_noted_and_leaves_its_times(tmp_path):
    stats = {"hlo_module": "jit_step", "program_id": 9, "device_ordinal": 0, "hlo_op": "dot.1"}
    events = {"/host:CPU": {"t": [Event("dot.1", 0, MS, {**stats, "run_id": 1})]}}
    for number, proto in enumerate((b"\xff" * 40, b"\x0a\x04junk")):
        write(space(events, programs={"jit_step": (9, proto)}), tmp_path, folder=str(number))
        read = profile.read(tmp_path / "plugins" / "profile" / str(number))
        assert read.ops().seconds == pytest.approx(1e-3)
        assert any("jit_step: its HLO is not understood" in note for note in read.info.notes)


def test_a_file_that_ends_between_two_planes_is_noted(tmp_path):
    stats = {"hlo_module": "jit_step", "program_id": 9, "device_ordinal": 0, "hlo_op": "dot.1"}
    made = space({"/host:CPU": {"t": [Event("dot.1", 0, MS, {**stats, "run_id": 1})]}})
    del made.planes[-1]
    write(made, tmp_path)
    read = profile.read(tmp_path)
    assert any("may be cut off" in note for note in read.info.notes)
    assert read.ops().seconds == pytest.approx(1e-3)
