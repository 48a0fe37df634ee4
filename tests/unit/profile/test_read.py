"""A capture of a small training step on two CPU devices, read and held against what the program is
and what `jax.profiler.ProfileData` says of the same file.

Legend: B rows, D width, L layers.
"""

import json
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from tests.unit.profile.conftest import BANDWIDTH, FLOPS

from fornax import profile
from fornax.config.errors import ProfileError
from fornax.mesh.compilation import compiled_anew
from fornax.profile import Profile
from fornax.profile.memory import read_memory
from fornax.profile.operations import read_program
from fornax.profile.schema import HloProto

B, D, L, DEVICES, STEPS = 64, 128, 3, 2, 4
FIRST = 20
pytestmark = [
    pytest.mark.usefixtures("optimized", "measured_cpu"),
    # jaxlib 0.12 makes types for `ProfileData` in a way that Python 3.13 warns of, and aborts then.
    pytest.mark.filterwarnings("ignore:builtin type .* has no __module__ attribute"),
]


def loss(params, x):
    """The mean square of what L layers make."""

    def layer(x, w):
        with jax.named_scope("mlp"):
            return jnp.tanh(x @ w), None

    with jax.named_scope("layers"):
        y, _ = jax.lax.scan(jax.checkpoint(layer), x, params["w"])
    with jax.named_scope("head"):
        return (y**2).mean()


@jax.jit
def step(state, x):
    """Gradient descent with momentum, the state donated in training, not here."""
    value, gradients = jax.value_and_grad(loss)(state["params"], x)
    with jax.named_scope("optimizer"):
        momentum = 0.9 * state["opt_state"]["w"] + gradients["w"]
        params = {"w": state["params"]["w"] - 0.1 * momentum}
    return {"params": params, "opt_state": {"w": momentum}}, value


@pytest.fixture(scope="module")
def arguments() -> tuple:
    """The state and a batch, divided over two devices."""
    mesh = jax.make_mesh((DEVICES,), ("data",), axis_types=(AxisType.Auto,))
    whole = NamedSharding(mesh, PartitionSpec())
    weights = jax.device_put(jnp.full((L, D, D), 0.01), whole)
    state = {"params": {"w": weights}, "opt_state": {"w": weights}}
    x = jax.device_put(jnp.ones((B, D)), NamedSharding(mesh, PartitionSpec("data")))
    return state, x


@pytest.fixture(scope="module")
def directory(tmp_path_factory, arguments) -> Path:
    """Four annotated steps over two devices, each after it waited 3 ms for its input."""
    folder = tmp_path_factory.mktemp("capture")
    state, x = arguments
    with compiled_anew(True):  # tests of the trainer turn the cache on for their process
        for _ in range(2):  # what comes back is placed as the compiler likes: a second program
            state, _ = jax.block_until_ready(step(state, x))
    with profile.capture(folder):
        for number in range(FIRST, FIRST + STEPS):
            with jax.profiler.StepTraceAnnotation("train", step_num=number):
                with jax.profiler.TraceAnnotation("input/read"):
                    time.sleep(0.003)
                state, _ = jax.block_until_ready(step(state, x))
    return folder


@pytest.fixture(scope="module")
def read(directory: Path) -> Profile:
    return profile.read(directory)


@pytest.fixture(scope="module")
def compiled(arguments):
    """The program as jax has it."""
    with compiled_anew(True):
        return step.lower(*arguments).compile()


def thunks(directory: Path) -> Iterator[tuple[str, str, float, float]]:
    """Line, name, begin, end of each event of an operation, as jax reads them."""
    path = next(directory.glob("plugins/profile/*/*.xplane.pb"))
    data = jax.profiler.ProfileData.from_file(str(path))
    for plane in data.planes:
        for line in plane.lines:
            for event in line.events:
                if not event.name.startswith("end: ") and "hlo_op" in dict(event.stats):
                    end = event.start_ns + event.duration_ns
                    yield line.name, event.name, event.start_ns, end


def test_self_times_of_operations_add_up_to_what_their_threads_ran(directory, read):
    covered, last = 0.0, {}
    for line, _, begin, end in sorted(thunks(directory), key=lambda each: (each[0], each[2])):
        covered += max(end - max(begin, last.get(line, 0)), 0)
        last[line] = max(end, last.get(line, 0))
    assert read.ops().seconds == pytest.approx(covered / 1e9, rel=1e-3)


def test_every_run_of_every_operation_is_counted(directory, read):
    runs: dict[str, int] = {}
    for _, name, _, _ in thunks(directory):
        runs[name] = runs.get(name, 0) + 1
    assert {row.key: row.count for row in read.ops().rows} == runs


def test_flops_are_those_of_the_products_of_a_step(read):
    # Forward, again for remat, and two products backward a layer; the first layer's input needs
    # no gradient, and the compiler may drop the product for it.
    product = 2 * B * D * D
    flops = sum(row.flops for row in read.ops("class").rows) / STEPS
    assert flops in (4 * L * product, (4 * L - 1) * product)


def test_bytes_and_bound_are_the_roofline_of_the_shapes(read):
    (program,) = [p for p in read.programs if p.name == "jit_step"]
    products = [o for o in read.operations if o.category == "matmul"]
    assert products
    for each in products:
        compute = each.flops / (FLOPS / 8)
        memory = each.bytes / (BANDWIDTH / 8)
        assert each.bound_seconds == pytest.approx(max(compute, memory))
        assert each.bound == ("compute" if compute >= memory else "memory")
        assert each.planned_seconds >= each.bound_seconds
        assert each.bytes >= 4 * (B // DEVICES) * D
    assert program.facts.flops * DEVICES == sum(r.flops for r in read.ops().rows) / STEPS


def test_causes_add_up_to_each_step_to_the_nanosecond(read):
    times = read.step_times()
    assert [step.number for step, _ in times] == list(range(FIRST, FIRST + STEPS))
    for each, causes in times:
        assert each.name == "train"
        assert sum(causes.nanoseconds.values()) == each.end - each.begin
        assert all(value >= 0 for value in causes.nanoseconds.values())
        assert causes.nanoseconds["compute"] > 0
        assert causes.nanoseconds["exchange"] > 0
    assert sum(c.nanoseconds["input"] for _, c in times) > 3e6


def test_operations_name_their_module_line_and_direction(read):
    rows = {row.key: row for row in read.ops("module").rows}
    assert {"layers/mlp", "optimizer"} <= rows.keys()
    assert "test_read.py" in rows["layers/mlp"].source
    products = [o for o in read.operations if o.category == "matmul"]
    assert {o.scope for o in products} == {("layers", "mlp")}
    assert {o.backward for o in products} == {True, False}
    exchanges = [o for o in read.operations if o.category == "exchange"]
    assert exchanges
    assert all(o.bound_seconds is None and o.bytes > 0 for o in exchanges)


@pytest.mark.parametrize("by", ["op", "class", "module", "source"])
def test_every_grouping_holds_all_time_and_its_steps(read, by):
    table = read.ops(by)
    assert table.seconds == pytest.approx(read.ops().seconds)
    assert sum(row.share for row in table.rows) == pytest.approx(1)
    assert table.matrix.shape == (STEPS, len(table.rows))
    inside = [row.seconds for row in read.ops(by, steps=table.steps).rows]
    assert table.matrix.sum(axis=0) == pytest.approx(sorted(inside, reverse=True), rel=0.05)


def test_one_step_is_a_part_of_all(read):
    one = read.ops(steps=[FIRST + 1])
    assert one.steps == (FIRST + 1,)
    assert 0 < one.seconds < read.ops().seconds
    assert one.matrix.sum() == pytest.approx(one.seconds)


def test_memory_at_the_peak_is_the_compilers_and_has_owners(read, compiled):
    (memory,) = [m for m in read.memory if read.programs[m.program].name == "jit_step"]
    weights = 4 * L * D * D
    assert memory.owners["weights"] == weights
    assert memory.owners["optimizer"] == weights
    assert memory.owners["activations"] > 0
    assert sum(memory.owners.values()) == memory.peak.bytes
    assert max(sum(m.bytes.values()) for m in memory.course) == memory.peak.bytes
    said = compiled.memory_analysis()
    least = said.argument_size_in_bytes + said.output_size_in_bytes - said.alias_size_in_bytes
    assert least < memory.peak.bytes <= least + said.temp_size_in_bytes
    sources = [buffer.source for buffer in memory.peak.buffers if buffer.kind == "temporary"]
    assert any("test_read.py" in source for source in sources)


def test_a_program_without_its_heaps_order_gets_one(read):
    """As jax's compilation cache loads it; more programs in `test_simulation.py`."""
    (memory,) = [m for m in read.memory if read.programs[m.program].name == "jit_step"]
    program = read.programs[memory.program]
    proto = HloProto.FromString(program.proto)
    assert proto.buffer_assignment.heap_simulator_traces
    del proto.buffer_assignment.heap_simulator_traces[:]
    parts = (program.name, program.module_id, 0, proto.SerializeToString(), program.text, DEVICES)
    derived, module, note = read_program(*parts)
    assert not note
    found = read_memory(memory.program, derived, module)
    assert (found.peak.bytes, found.owners) == (memory.peak.bytes, memory.owners)
    assert len(found.course) > 10


def test_the_input_stage_is_what_steps_waited_for(read):
    (stage,) = read.input
    assert (stage.name, stage.count) == ("read", STEPS)
    assert stage.waited_seconds == stage.seconds > STEPS * 0.003


def test_info_says_what_was_captured(read, directory):
    assert (read.info.platform, read.info.devices, read.info.ranks) == ("cpu", 8, (0,))
    assert read.info.versions["jax"] == jax.__version__
    assert not read.info.truncated
    assert abs(read.info.begin - time.time()) < 3600
    assert read.info.notes == ()
    assert profile.captures(directory) == [directory / "plugins" / "profile" / read.info.folder]


def test_columns_of_rows_agree(read):
    for row in read.rows:
        events = row.events
        assert (events.begin[1:] >= events.begin[:-1]).all()
        assert (events.own <= events.duration).all()
        assert (events.own >= 0).all()
        assert max(events.operation, default=-1) < len(read.operations)
        assert bool(row.device) == (row.kind in ("operations", "exchange"))
        assert (events.operation >= 0).all() == bool(row.device)


def copied(directory: Path, target: Path) -> Path:
    shutil.copytree(directory, target, dirs_exist_ok=True)
    return next(target.glob("plugins/profile/*/*.xplane.pb"))


# Without its record a file that ends between two fields of its message is a whole one.
@pytest.mark.parametrize(
    ("kept", "recorded"),
    [(0.999, True), *((kept, r) for kept in (0, 1, 1000, 0.5) for r in (True, False))],
)
def test_a_file_that_was_cut_off_is_refused_by_name(directory, tmp_path, kept, recorded):
    path = copied(directory, tmp_path)
    if not recorded:
        (path.parent / "capture-0.json").unlink()
    data = path.read_bytes()
    path.write_bytes(data[: kept if isinstance(kept, int) else int(len(data) * kept)])
    with pytest.raises(ProfileError, match=f"{path}.*(empty|truncated|cut off).*capture"):
        profile.read(tmp_path)


def test_a_capture_without_its_record_reads_as_jax_wrote_it(directory, tmp_path, read):
    path = copied(directory, tmp_path)
    (path.parent / "capture-0.json").unlink()
    alone = profile.read(tmp_path)
    assert alone.ops().seconds == read.ops().seconds
    assert alone.operations[0].bound_seconds is None
    assert "made by jax.profiler" in alone.info.notes[0]


def test_a_record_without_its_file_or_its_sense_is_refused(directory, tmp_path):
    path = copied(directory, tmp_path)
    record = path.parent / "capture-0.json"
    values = json.loads(record.read_text())
    record.write_text(json.dumps({**values, "space": "other.xplane.pb"}))
    with pytest.raises(ProfileError, match=r"other\.xplane\.pb is missing"):
        profile.read(tmp_path)
    record.write_text("{")
    with pytest.raises(ProfileError, match=r"capture-0\.json is not a record"):
        profile.read(tmp_path)


def test_a_capture_of_another_processor_has_no_bounds_and_says_so(directory, tmp_path):
    path = copied(directory, tmp_path)
    record = path.parent / "capture-0.json"
    values = json.loads(record.read_text())
    record.write_text(json.dumps({**values, "processor": "Another One"}))
    other = profile.read(tmp_path)
    assert all(each.bound_seconds in (None, 0.0) for each in other.operations)
    assert "made on Another One" in other.info.notes[0]


def test_wrong_questions_are_refused(read, tmp_path):
    with pytest.raises(ProfileError, match=r"by='line'.*op, class, module, source"):
        read.ops("line")
    with pytest.raises(ProfileError, match=r"step 3 .* steps 20 to 23"):
        read.ops(steps=[3])
    with pytest.raises(ProfileError, match="holds no capture"):
        profile.read(tmp_path)
