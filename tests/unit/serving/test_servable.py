"""A loaded version: right answers whatever shares the batch, refusals, limits, memory."""

import asyncio
import contextlib
import dataclasses
import gc
import sys
import threading
import time
import weakref
from collections.abc import Iterator
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fornax import export, profile
from fornax.config import BundleError, ServingError
from fornax.config.errors import ServingCode
from fornax.export import Spec
from fornax.export.bundle import Bundle
from fornax.export.dtypes import TENSORS, numpy_dtype
from fornax.serving.events import Events
from fornax.serving.execution import devices, runner
from fornax.serving.execution.devices import DevicePool
from fornax.serving.execution.servable import Servable
from fornax.serving.settings import Batching, ModelSettings, NanPolicy, OnMesh, Replicas, Timeouts
from fornax.serving.types import InferRequest

RANDOM = np.random.default_rng(0)
PARAMS = {
    "w": RANDOM.standard_normal((8, 4)).astype("f"),
    "e": RANDOM.standard_normal(64).astype("f"),
}


def predict(params, x):
    return {"y": jnp.tanh(x @ params["w"]), "first": x[:, 0]}


def score(params, ids, n):
    values = params["e"][ids % 64]
    mask = jnp.arange(ids.shape[1])[None, :] < n[:, None]
    return {"sum": jnp.where(mask, values, 0).sum(1), "each": values * 2}


def wide(params, a, d):
    return {"a": a * 3 + 2**40, "d": d * 1.5}


def text(params, s):
    return {"size": (s != 0).sum(1).astype("int32")}


def every(params, **inputs):
    return {name: x[:, ::-1] if name == "bool" else x[:, ::-1] * x for name, x in inputs.items()}


def table(params, m):
    return {"m": m @ m}


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    where = tmp_path_factory.mktemp("bundle") / "m"
    export.save(
        where,
        {
            "predict": predict,
            "score": score,
            "wide": wide,
            "text": text,
            "every": every,
            "table": table,
        },
        PARAMS,
        inputs={
            "predict": {"x": Spec(("b", 8), "float32")},
            "score": {"ids": Spec(("b", "t"), "int32", lengths="n")},
            "wide": {"a": Spec(("b",), "int64"), "d": Spec(("b",), "float64")},
            "text": {"s": Spec(("b", "t"), "bytes")},
            "every": {name: Spec(("b", 3), name) for name in TENSORS},
            "table": {"m": Spec((2, 2), "float32")},
        },
        buckets={"b": [1, 4], "t": [4, 8]},
        platforms=("cpu",),
        check=False,
    )
    return where


@pytest.fixture(scope="module")
def pool() -> DevicePool:
    return DevicePool(numbers=[0, 1])


async def load(path, pool, events=None, **settings) -> Servable:
    return await Servable.create(
        export.open_bundle(path),
        ModelSettings(**settings),
        pool,
        events or Events(),
        name="m",
        version="3",
    )


@pytest.fixture(scope="module")
def model(path, pool, loop) -> Iterator[Servable]:
    servable = loop.run_until_complete(load(path, pool, functions={"wide": Batching(max_rows=3)}))
    yield servable
    loop.run_until_complete(servable.close())


def ask(function: str = "", /, **inputs) -> InferRequest:
    return InferRequest("m", inputs, function=function)


def rows(count: int) -> np.ndarray:
    return RANDOM.standard_normal((count, 8)).astype("f")


async def together(model, *requests):
    return await asyncio.gather(*[model.submit(request) for request in requests])


def refused(model, request, code) -> str:
    with pytest.raises(ServingError) as caught:
        model.submit(request)
    assert caught.value.code is code
    return str(caught.value)


def test_requests_that_come_together_are_computed_together(model, loop):
    before = model.statistics().functions["predict"]
    arrays = [rows(1), rows(2), rows(1)]
    results = loop.run_until_complete(together(model, *[ask(x=x) for x in arrays]))
    for x, result in zip(arrays, results, strict=True):
        np.testing.assert_allclose(result.outputs["y"], np.tanh(x @ PARAMS["w"]), rtol=1e-5)
        np.testing.assert_array_equal(result.outputs["first"], x[:, 0])
        assert (result.model, result.version, result.function) == ("m", "3", "predict")
        assert result.timing.compute_infer > 0
    after = model.statistics().functions["predict"]
    assert after.execution_count - before.execution_count == 1
    assert after.inference_count - before.inference_count == 4
    assert after.success - before.success == 3


def test_a_profile_shows_batches_and_what_their_requests_waited(model, loop, tmp_path):
    with profile.capture(tmp_path):
        loop.run_until_complete(together(model, *[ask(x=rows(count)) for count in (1, 2)]))
    found = profile.read(tmp_path).serving
    assert {each.model for each in found.requests} == {"m/predict"}
    assert [*found.requests[0].phases] == ["queued", "batch"]
    assert len(found.requests) == 2
    (batch,) = found.batches
    assert (batch.sequences, batch.rows, batch.places, batch.most_rows) == (2, 3, 4, 4)


@pytest.mark.parametrize("neighbour", [np.nan, np.inf, -np.inf, 3e38, -0.0])
def test_no_row_changes_a_bit_of_its_neighbours_answers(model, loop, neighbour):
    x = rows(2)
    hostile = np.full((1, 8), neighbour, "f")
    calm = loop.run_until_complete(together(model, ask(x=x), ask(x=rows(2))))[0]
    first = loop.run_until_complete(together(model, ask(x=hostile), ask(x=x), ask(x=hostile)))[1]
    last = loop.run_until_complete(together(model, ask(x=hostile), ask(x=hostile), ask(x=x)))[2]
    for name, array in calm.outputs.items():
        assert array.tobytes() == first.outputs[name].tobytes() == last.outputs[name].tobytes()


def test_answers_are_those_of_the_exported_function_bit_for_bit_at_its_bucket(model, path, loop):
    alone = export.load(path, verify=False)
    ids = RANDOM.integers(0, 64, (4, 8), np.int32)
    (served,) = loop.run_until_complete(together(model, ask("score", ids=ids)))
    for name, array in alone["score"](ids=ids).items():
        assert served.outputs[name].tobytes() == array.tobytes()


def test_every_dtype_comes_back_bit_for_bit_in_a_shared_batch(model, path, loop):
    def request():
        arrays = {name: RANDOM.integers(0, 7, (2, 3)).astype(numpy_dtype(name)) for name in TENSORS}
        return ask("every", **arrays)

    both = [request(), request()]
    results = loop.run_until_complete(together(model, *both))
    alone = export.load(path, verify=False)["every"]
    for request_, result in zip(both, results, strict=True):
        for name, array in alone(**request_.inputs).items():
            assert result.outputs[name].dtype == numpy_dtype(name)
            assert result.outputs[name].tobytes() == array.tobytes()


def test_a_function_without_rows_computes_each_request_alone(model, loop):
    arrays = [rows(4)[:2, :2] for _ in range(3)]
    before = model.statistics().functions["table"].execution_count
    results = loop.run_until_complete(together(model, *[ask("table", m=m) for m in arrays]))
    for m, result in zip(arrays, results, strict=True):
        np.testing.assert_allclose(result.outputs["m"], m @ m, rtol=1e-5)
    assert model.statistics().functions["table"].execution_count == before + 3


def test_ragged_requests_share_a_bucket_and_get_their_own_sizes_back(model, loop):
    sizes = [(1, 3), (2, 4), (1, 2)]
    every = [RANDOM.integers(0, 64, size, np.int32) for size in sizes]
    before = model.statistics().functions["score"]
    results = loop.run_until_complete(together(model, *[ask("score", ids=ids) for ids in every]))
    for ids, result in zip(every, results, strict=True):
        values = PARAMS["e"][ids]
        assert result.outputs["each"].shape == ids.shape
        np.testing.assert_allclose(result.outputs["sum"], values.sum(1), rtol=1e-5)
    after = model.statistics().functions["score"]
    assert after.bucket_elements - before.bucket_elements == 4 * 4
    assert after.padded_elements - before.padded_elements == 4 * 4 - (3 + 8 + 2)


def test_64_bit_tensors_keep_their_bits(model, loop):
    a, d = np.array([2**53 + 1, -7]), np.array([1 / 3, 1e300])
    (result,) = loop.run_until_complete(together(model, ask("wide", a=a, d=d)))
    assert result.outputs["a"].dtype == np.int64
    np.testing.assert_array_equal(result.outputs["a"], a * 3 + 2**40)
    np.testing.assert_array_equal(result.outputs["d"], d * 1.5)


def test_strings_are_padded_to_a_bucket(model, loop):
    s = np.array([b"abc", b"", b"abcdefg"], object)
    (result,) = loop.run_until_complete(together(model, ask("text", s=s)))
    np.testing.assert_array_equal(result.outputs["size"], [3, 0, 7])


@pytest.mark.parametrize("count", [5, 9])
def test_more_rows_than_the_largest_bucket_are_split_and_joined(model, loop, count):
    x = rows(count)
    (result,) = loop.run_until_complete(together(model, ask(x=x)))
    np.testing.assert_allclose(result.outputs["y"], np.tanh(x @ PARAMS["w"]), rtol=1e-5)
    a = np.arange(count)
    (limited,) = loop.run_until_complete(together(model, ask("wide", a=a, d=a * 1.0)))
    np.testing.assert_array_equal(limited.outputs["a"], a * 3 + 2**40)


def test_an_answer_that_cannot_be_joined_is_an_error(model, loop, monkeypatch):
    def join(signature, parts):
        raise MemoryError("no room")

    monkeypatch.setattr("fornax.serving.execution.function.join", join)
    with pytest.raises(ServingError, match="no room") as caught:
        loop.run_until_complete(together(model, ask(x=rows(5))))
    assert caught.value.code is ServingCode.RESOURCE_EXHAUSTED
    assert model.statistics().pending == 0


def test_models_may_take_a_share_of_what_a_container_has(tmp_path, monkeypatch):
    limit = tmp_path / "memory.max"
    monkeypatch.setattr(devices, "_CGROUPS", (tmp_path / "none", limit))
    device = jax.local_devices()[0]
    limit.write_text("max\n")
    whole = devices.limit_of(device)
    limit.write_text(f"{2**20}\n")
    assert devices.limit_of(device) == int(0.8 * 2**20) < whole


def test_unaligned_and_read_only_arrays_are_read_as_they_are(model, loop):
    x = rows(4)
    shifted = np.frombuffer(b"\0" + x.tobytes(), np.uint8)[1:].view("f").reshape(4, 8)
    assert not shifted.flags.aligned or not shifted.flags.writeable
    (result,) = loop.run_until_complete(together(model, ask(x=shifted)))
    np.testing.assert_array_equal(result.outputs["first"], x[:, 0])


def test_outputs_come_in_the_order_asked_for(model, loop):
    request = ask(x=rows(1))
    request.outputs = ("first", "y")
    (result,) = loop.run_until_complete(together(model, request))
    assert list(result.outputs) == ["first", "y"]


@pytest.mark.parametrize(
    ("request_", "said"),
    [
        (ask(y=rows(1)), "lacks x"),
        (ask(x=rows(1).astype("d")), "float64"),
        (ask(x=rows(1)[:, :4]), "shape"),
        (ask(x=rows(0)), "0 rows"),
        (ask("score", ids=np.zeros((1, 9), np.int32)), "largest bucket is 8"),
        (InferRequest("m", {"x": rows(1)}, outputs=("z",)), "no output 'z'"),
        (InferRequest("m", {"x": rows(1)}, priority=9), "priority 9"),
        (InferRequest("m", {"x": rows(1)}, parameters={"warp": 9}), "'warp'"),
    ],
)
def test_what_the_model_cannot_take_is_refused_with_the_reason(model, request_, said):
    failures = model.statistics().failure
    assert said in refused(model, request_, ServingCode.INVALID_ARGUMENT)
    assert model.statistics().failure == failures + 1


def test_a_function_that_is_not_there_is_named_with_those_that_are(model):
    said = refused(model, ask("prediction", x=rows(1)), ServingCode.NOT_FOUND)
    assert "predict, score" in said


def test_nothing_is_compiled_once_ready(model, loop):
    heard = []
    jax.monitoring.register_event_duration_secs_listener(
        lambda event, *_, **__: heard.append(event) if "compile" in event else None
    )
    jax.jit(lambda x: x + 1.5)(jnp.ones(3))
    assert heard
    heard.clear()
    loop.run_until_complete(
        together(
            model,
            *[ask(x=rows(count)) for count in (1, 2, 4, 6)],
            *[ask("score", ids=np.ones((b, t), np.int32)) for b in (1, 3) for t in (2, 7)],
            ask("wide", a=np.arange(2), d=np.ones(2)),
            ask("text", s=np.array([b"x"], object)),
        )
    )
    assert heard == []
    assert model.statistics().compilations_after_ready == 0


def test_a_compilation_while_a_request_waits_is_counted(model, loop, monkeypatch):
    function = model._functions["predict"]
    prepared = function.runners[0].prepared[1, ()]
    program = prepared.program

    class Late:
        outputs, shapes = program.outputs, program.shapes
        put = staticmethod(program.put)

        @staticmethod
        def run(buffers):
            jax.jit(lambda x: x * 2.25)(jnp.ones(7))
            return program.run(buffers)

    monkeypatch.setattr(prepared, "program", Late)
    loop.run_until_complete(together(model, ask(x=rows(1))))
    assert function.runners[0].late > 0
    function.runners[0].late = 0


def test_a_program_that_fails_fails_none_but_its_own_request(model, loop, monkeypatch):
    prepared = model._functions["predict"].runners[0].prepared

    def breaking(program):
        class Broken:
            outputs, shapes = program.outputs, program.shapes
            run = staticmethod(program.run)

            @staticmethod
            def put(inputs):
                if (inputs["x"] == 13).any():
                    raise RuntimeError("the device said no")
                return program.put(inputs)

        return Broken

    for each in prepared.values():
        monkeypatch.setattr(each, "program", breaking(each.program))

    async def run():
        futures = [model.submit(ask(x=x)) for x in (rows(1), np.full((1, 8), 13, "f"), rows(1))]
        return await asyncio.gather(*futures, return_exceptions=True)

    good, bad, other = loop.run_until_complete(run())
    assert good.outputs["y"].shape == other.outputs["y"].shape == (1, 4)
    assert bad.code is ServingCode.INTERNAL
    assert "the device said no" in str(bad)


def test_nan_is_refused_for_the_rows_it_came_of_only(path, pool, loop):
    async def run():
        strict = await load(path, pool, nan=NanPolicy(inputs="refuse", outputs="refuse"))
        try:
            bad = rows(1)
            bad[0, 3] = np.nan
            assert "NaN" in refused(strict, ask(x=bad), ServingCode.INVALID_ARGUMENT)
            big = np.full(1, 1.7e308)
            overflow = strict.submit(ask("wide", a=np.ones(1, int), d=big))
            fine = strict.submit(ask("wide", a=np.ones(1, int), d=np.ones(1)))
            results = await asyncio.gather(overflow, fine, return_exceptions=True)
        finally:
            await strict.close()
        return results

    overflow, fine = loop.run_until_complete(run())

    assert overflow.code is ServingCode.INTERNAL
    assert "NaN or infinity" in str(overflow)
    assert fine.outputs["d"][0] == 1.5


def test_a_deadline_passed_is_refused_and_one_that_passes_in_the_queue_is_not_computed(
    path, pool, loop
):
    async def run():
        slow = await load(
            path,
            pool,
            batching=Batching(max_delay_ms=60_000),
            timeouts=Timeouts(request_seconds=30),
        )
        try:
            late = ask(x=rows(1))
            late.deadline = time.monotonic() - 1
            refused(slow, late, ServingCode.DEADLINE_EXCEEDED)
            soon = ask(x=rows(1))
            soon.deadline = time.monotonic() + 0.02
            blocked = slow._functions["predict"]._claims[0][1].limit
            blocked.running += blocked.most  # as if its batches were under way
            with pytest.raises(ServingError) as caught:
                await asyncio.wait_for(slow.submit(soon), 120)
            blocked.running -= blocked.most
            assert caught.value.code is ServingCode.DEADLINE_EXCEEDED
            statistics = slow.statistics()
            assert statistics.execution_count == 0
            assert statistics.reject == {"DEADLINE_EXCEEDED": 2}
            result = None
            for seconds in (1.5, 6.0, 24.0):  # a busy machine may need more
                soon.deadline = time.monotonic() + seconds  # goes out before its delay is over
                with contextlib.suppress(ServingError):
                    result = await slow.submit(soon)
                    break
            assert result is not None
            assert result.outputs["y"].shape == (1, 4)
        finally:
            await slow.close()

    loop.run_until_complete(run())


def test_who_left_is_not_computed_and_a_full_queue_refuses(path, pool, loop):
    async def run():
        events = Events()
        seen = []
        events.finished.append(lambda request, outcome: seen.append((request.id, outcome)))
        short = await load(path, pool, events, batching=Batching(queue_limit=2))
        try:
            requests = [InferRequest("m", {"x": rows(1)}, id=str(i)) for i in range(3)]
            futures = [short.submit(request) for request in requests[:2]]
            refused(short, requests[2], ServingCode.RESOURCE_EXHAUSTED)
            futures[0].cancel()
            futures.append(short.submit(requests[2]))
            await asyncio.gather(*futures[1:])
            statistics = short.statistics()
            assert statistics.inference_count == 2
            assert (statistics.cancel, statistics.success, statistics.failure) == (1, 2, 1)
            assert (statistics.pending, statistics.queued) == (0, 0)
        finally:
            await short.close()
        return seen

    seen = loop.run_until_complete(run())
    assert [name for name, _ in seen] == ["2", "0", "1", "2"]


def test_a_drain_answers_all_and_a_close_gives_the_memory_back(path, pool, loop):
    gc.collect()
    arrays = jax.live_arrays()  # held, so that those of other tests are not freed meanwhile
    held = pool.memory.used("cpu")

    async def run():
        servable = await load(path, pool)
        futures = [servable.submit(ask(x=rows(2))) for _ in range(20)]
        weights = sum(each.nbytes for each in PARAMS.values())
        assert pool.memory.used("cpu") - held == servable.statistics().memory_bytes > weights
        drain = asyncio.ensure_future(servable.drain(120))
        await asyncio.sleep(0)
        refused(servable, ask(x=rows(1)), ServingCode.UNAVAILABLE)
        assert await drain
        assert all(future.result().outputs["y"].shape == (2, 4) for future in futures)
        programs = [
            weakref.ref(prepared.program)
            for function in servable._functions.values()
            for prepared in function.runners[0].prepared.values()
        ]
        await servable.close()
        return programs

    programs = loop.run_until_complete(run())
    gc.collect()
    ended = time.monotonic() + 120
    while (
        len(jax.live_arrays()) > len(arrays) and time.monotonic() < ended
    ):  # a device's thread ends
        time.sleep(0.01)
        gc.collect()
    assert [program() for program in programs] == [None] * len(programs)
    assert pool.memory.used("cpu") == held
    assert len(jax.live_arrays()) == len(arrays)


def test_a_drain_waits_for_no_delay_and_refuses_what_cannot_be_computed_in_time(path, pool, loop):
    async def run():
        servable = await load(path, pool, batching=Batching(max_delay_ms=60_000))
        prompt = servable.submit(ask(x=rows(1)))
        limit = servable._functions["score"]._claims[0][1].limit
        limit.running += limit.most  # as if its batches were under way
        stuck = servable.submit(ask("score", ids=np.ones((1, 2), np.int32)))
        drained = await servable.drain(0.05)
        limit.running -= limit.most
        with pytest.raises(ServingError) as caught:
            await stuck
        assert caught.value.code is ServingCode.UNAVAILABLE
        await servable.close()
        return drained, prompt

    drained, prompt = loop.run_until_complete(run())
    assert not drained
    assert prompt.exception().code is ServingCode.UNAVAILABLE  # they share the limit


def test_a_drain_sends_out_what_waits_for_company(path, pool, loop):
    async def run():
        servable = await load(path, pool, batching=Batching(max_delay_ms=60_000))
        future = servable.submit(ask(x=rows(1)))
        assert await servable.drain(120)
        await servable.close()
        return future.result()

    assert loop.run_until_complete(run()).outputs["y"].shape == (1, 4)


def test_an_observer_that_fails_costs_nobody_an_answer(path, pool, loop, caplog):
    def broken(*_):
        raise RuntimeError("no disk for the log")

    async def run():
        events = Events()
        events.finished.append(broken)
        servable = await load(path, pool, events)
        results = await together(servable, ask(x=rows(1)), ask(x=rows(1)))
        await servable.close()
        return results

    assert len(loop.run_until_complete(run())) == 2
    assert "observer of requests" in caplog.text


@pytest.mark.parametrize(
    ("limit", "said"), [(100, "weights 384 B"), (600, "weights 384 B, programs .* under way")]
)
def test_a_model_that_does_not_fit_is_refused_with_figures_and_leaves_nothing(
    path, loop, limit, said
):
    small = DevicePool(numbers=[0], memory_limit=limit)
    figures = rf"m version 3 needs \S+ \w+ of cpu memory \({said}.*{limit} B of {limit} B are free"
    with pytest.raises(ServingError, match=figures) as caught:
        loop.run_until_complete(load(path, small))
    assert caught.value.code is ServingCode.RESOURCE_EXHAUSTED
    assert small.memory.used("cpu") == 0


def test_preferred_sizes_must_be_buckets(path, pool, loop):
    with pytest.raises(ServingError, match=r"preferred_sizes has 3, .* buckets are 1, 4"):
        loop.run_until_complete(load(path, pool, batching=Batching(preferred_sizes=(3,))))


def test_a_load_that_was_given_up_sets_nothing_aside(path, pool):
    held = pool.memory.used("cpu")

    async def run():
        loading = asyncio.ensure_future(load(path, pool))
        while pool.memory.used("cpu") == held:
            await asyncio.sleep(0.001)
        loading.cancel()
        await asyncio.gather(loading, return_exceptions=True)

    asyncio.run(run())  # and waits for the thread that loads
    assert pool.memory.used("cpu") == held


def test_a_bundle_that_computes_something_else_never_serves(tmp_path, pool, loop, monkeypatch):
    export.save(
        tmp_path / "m",
        {"predict": predict},
        {"w": PARAMS["w"]},
        inputs={"predict": {"x": Spec(("b", 8), "float32")}},
        buckets={"b": [1]},
        platforms=("cpu",),
    )
    load_weights = Bundle.load_weights

    def altered(bundle, placement):
        weights = load_weights(bundle, placement)
        params = {name: each + 0.5 for name, each in weights.params.items()}
        return dataclasses.replace(weights, params=params)

    held = pool.memory.used("cpu")
    monkeypatch.setattr(Bundle, "load_weights", altered)
    with pytest.raises(BundleError, match="off by"):
        loop.run_until_complete(load(tmp_path / "m", pool))
    assert pool.memory.used("cpu") == held


def test_replicas_share_the_load_and_a_mesh_serves_alike(path, pool, loop):
    async def run(devices):
        servable = await load(path, pool, devices=devices)
        try:
            x = rows(4)
            runners = servable._functions["predict"].runners
            results = await asyncio.gather(*[servable.submit(ask(x=x)) for _ in range(20)])
            for result in results:
                np.testing.assert_allclose(result.outputs["y"], np.tanh(x @ PARAMS["w"]), rtol=1e-5)
            return len(runners)
        finally:
            await servable.close()

    assert loop.run_until_complete(run(Replicas(count=0))) == 2
    assert loop.run_until_complete(run(OnMesh())) == 1
    with pytest.raises(ServingError, match=r"devices\.count=3"):
        loop.run_until_complete(run(Replicas(count=3)))


@pytest.mark.parametrize(
    ("seconds", "runs"),
    [
        ([0.03, 0.025], 2),  # what takes long is run once more than to warm it up
        ([0.03, 0.012, 0.013], 3),
        ([0.05, 0.3, 0.02, 0.021], 4),  # the second one was held up
        ([1.5], 1),
        ([0.0] * 6, 6),
    ],
)
def test_a_bucket_is_run_no_more_often_than_its_time_needs(monkeypatch, seconds, runs):
    clock, left = [0.0], [*seconds, *[seconds[-1]] * 9]

    def compute(batch, alone):
        clock[0] += left.pop(0)

    monkeypatch.setattr(runner, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    measured = runner.Runner.__new__(runner.Runner)
    measured.prepared = {(1, ()): runner.Prepared(None, {}, 0)}
    measured._compute = compute
    measured.measure(1, (), None)
    assert len(seconds) + 9 - len(left) == runs
    assert measured.prepared[1, ()].seconds == pytest.approx(min(seconds))


def test_memory_is_summed_while_threads_set_some_aside():
    accounts = devices.Memory({"cpu": 10**9})
    for number in range(50):
        accounts.reserve(f"model {number}", {"cpu": 2}, "")
    done = threading.Event()

    def load():
        while not done.is_set():
            accounts.reserve("another", {"cpu": 1}, "").release()

    interval, thread = sys.getswitchinterval(), threading.Thread(target=load)
    sys.setswitchinterval(1e-6)
    thread.start()
    try:
        # A few thousand sums met the other thread in the midst of a change before.
        assert {accounts.used("cpu") for _ in range(20_000)} <= {100, 101}
    finally:
        done.set()
        thread.join()
        sys.setswitchinterval(interval)
