"""XProf's own pages of an exported capture of a CPU: not empty, and with our figures."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.compilation_cache import compilation_cache

from fornax import profile
from fornax.mesh.compilation import compiled_anew
from fornax.mesh.hardware.cpu import cpu_chip
from fornax.profile.export import write_xprof

raw_to_tool_data = pytest.importorskip("xprof.convert.raw_to_tool_data")

STEPS = 12
WIDTH = 192


def train(w, x):
    with jax.named_scope("layers"):
        y = jnp.tanh(x @ w) @ w
    return w - 1e-3 * (x.T @ y), y.sum()


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """A profile and the XSpaces that were exported from it."""
    with compiled_anew(True):
        return export_of(tmp_path_factory.mktemp("captured"), train)


@pytest.fixture(scope="module")
def exported_from_cache(tmp_path_factory):
    """The same of a program that jax's compilation cache loaded."""
    folder = tmp_path_factory.mktemp("cached")
    wanted = {
        "jax_compilation_cache_dir": str(folder / "cache"),
        "jax_persistent_cache_min_compile_time_secs": 0.0,
        "jax_persistent_cache_min_entry_size_bytes": -1,
    }
    before = {name: jax.config.values[name] for name in wanted}
    try:
        for name, value in wanted.items():
            jax.config.update(name, value)
        compilation_cache.reset_cache()
        jax.clear_caches()
        jax.block_until_ready(jax.jit(looped)(*arguments()))
        jax.clear_caches()
        return export_of(folder, looped)
    finally:
        for name, value in before.items():
            jax.config.update(name, value)
        compilation_cache.reset_cache()


def looped(w, x):
    """Two loops, forward and back, with buffers that live through one, both, or one round."""

    def loss(w):
        layers = jnp.broadcast_to(w, (3, *w.shape))
        return jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, layers)[0].sum()

    value, gradient = jax.value_and_grad(loss)(w)
    return w - 1e-3 * gradient, value


def arguments():
    return jnp.eye(WIDTH), jnp.linspace(0, 1, 64 * WIDTH).reshape(64, WIDTH)


def export_of(folder, function):
    run = jax.jit(function)
    w, x = arguments()
    jax.block_until_ready(run(w, x))
    with profile.capture(folder):
        for number in range(STEPS):
            with jax.profiler.StepTraceAnnotation("train", step_num=number):
                w, value = run(w, x)
                jax.block_until_ready((w, value))
    out = write_xprof(folder, folder / "xprof")
    return profile.read(folder), [str(path) for path in out.glob("*.xplane.pb")]


def page(exported, name, **parameters):
    data, _ = raw_to_tool_data.xspace_to_tool_data(exported[1], name, {"tqx": "", **parameters})
    return json.loads(data)


def rows_of(table):
    names = [column["id"] for column in table["cols"]]
    return [
        dict(zip(names, (cell.get("v") for cell in row["c"]), strict=True)) for row in table["rows"]
    ]


def test_steps_are_ours(exported):
    table = next(t for t in page(exported, "input_pipeline_analyzer") if t["rows"])
    steps = rows_of(table)
    assert len(steps) >= STEPS - 2  # XProf leaves the first and last out
    for step in steps:
        begin, end = reach(exported[0], int(step["stepnum"]))
        assert step["stepTimeMs"] == pytest.approx((end - begin) / 1e6, rel=1e-3)
    overview = page(exported, "overview_page")
    assert any(rows_of(t) for t in overview if t.get("rows"))


def reach(ours, number):
    """From the first operation of a step to the end of its last, which XProf calls a step."""
    at = next(at for at, step in enumerate(ours.steps) if step.number == number)
    events = [row.events for row in ours.rows if row.device]
    begins = np.concatenate([each.begin[each.step == at] for each in events])
    return begins.min(), max(each.end[each.step == at].max(initial=0) for each in events)


def test_operations_have_our_times_and_work(exported):
    table = exported[0].ops()
    ours = {row.key: row for row in table.rows}
    theirs = {row["hlo_op_name"]: row for row in rows_of(page(exported, "hlo_stats"))}
    assert set(theirs) == set(ours)
    for name, row in theirs.items():
        assert row["total_self_time"] == pytest.approx(1e6 * ours[name].seconds, rel=1e-3)
        assert row["occurrences"] == ours[name].count
    products = [row for row in theirs.values() if ours[row["hlo_op_name"]].category == "matmul"]
    work = sum(row["model_flop_rate"] * row["total_self_time"] * 1e3 for row in products)
    assert work == pytest.approx(STEPS * 3 * 2 * 64 * WIDTH * WIDTH, rel=0.02)


def test_the_roofline_has_this_machines_rates(exported):
    tables = page(exported, "roofline_model")
    operations = rows_of(tables[0])
    assert len(operations) > STEPS
    peak = cpu_chip().peak("float32") / 1e9
    assert float(tables[0]["p"]["peak_flop_rate"]) == pytest.approx(peak, rel=0.01)


@pytest.mark.parametrize(("made", "changes"), [("exported", 3), ("exported_from_cache", 40)])
def test_the_memory_viewer_has_our_peak(made, changes, request):
    exported = request.getfixturevalue(made)
    memory = max(exported[0].memory, key=lambda each: each.peak.bytes)
    program = exported[0].programs[memory.program]
    viewer = page(
        exported, "memory_viewer", host="", module_name=f"{program.name}({program.module_id})"
    )
    assert viewer["peakHeapMib"] * 2**20 == pytest.approx(memory.peak.bytes, abs=1)
    assert viewer["maxHeap"]
    assert len(viewer["heapSizes"]) >= changes  # over the program's order
    assert memory.owners["activations"] > 0


def test_no_other_page_is_empty(exported):
    assert page(exported, "op_profile")["byProgram"]["children"]
    assert rows_of(page(exported, "kernel_stats"))
    assert any(rows_of(table) for table in page(exported, "framework_op_stats"))
    trace = page(exported, "trace_viewer@", trace_viewer_options={"resolution": 0})
    names = {event.get("args", {}).get("name", "") for event in trace["traceEvents"]}
    assert any("Stream #1(Compute)" in name for name in names if isinstance(name, str))
