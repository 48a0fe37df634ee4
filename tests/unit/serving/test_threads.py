"""Small programs that are not divided over threads: the same bits, and only where it is faster."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fornax import export
from fornax.config.environment import one_cpu_thread
from fornax.export import Spec, _exported
from fornax.export.buckets import assemble
from fornax.export.golden import examples
from fornax.export.undivided import share_undivided
from fornax.export.weights import Weights
from fornax.serving.execution import loading
from fornax.serving.execution.runner import Prepared, Runner
from fornax.serving.execution.scheduler import FairLock


def product(params, x):
    return {"y": jnp.tanh(x @ params["w"]) @ params["w"].T}


@pytest.fixture(scope="module")
def bundle(tmp_path_factory):
    path = tmp_path_factory.mktemp("threads") / "1"
    w = np.random.default_rng(0).standard_normal((256, 512), dtype=np.float32)
    inputs = {"f": {"x": Spec(("b", 256), "float32")}}
    export.save(
        path, {"f": product}, {"w": w}, inputs=inputs, buckets={"b": [64]}, platforms=("cpu",)
    )
    return export.open_bundle(path)


@pytest.fixture(scope="module")
def held(bundle):
    return bundle.load_weights()


@pytest.fixture
def undivided(held, monkeypatch):
    monkeypatch.setattr("fornax.export.undivided.cpu_threads", lambda: 2)
    found = share_undivided(held)
    yield found
    found.delete()


@pytest.fixture
def runner(bundle, held):
    program = bundle.compile("f", {"b": 64}, held)
    prepared = {(64, ()): Prepared(program, {"b": 64}, 64 * 256, 100e-6)}
    signature = bundle.signature("f")
    return Runner(signature, prepared, on_host=True, wait_inside=True, lock=FairLock())


def _answer(program):
    inputs = assemble(program.signature, program.dims, examples(program.signature, program.dims))
    return np.asarray(program.run(program.put(inputs))[0])


def test_it_shares_the_weights_and_leaves_them_where_they_are(bundle, held, undivided):
    before = bundle.compile("f", {"b": 64}, held)
    after = bundle.compile("f", {"b": 64}, undivided.weights, undivided.placement)
    np.testing.assert_array_equal(_answer(after), _answer(before))
    mine, theirs = held.params["w"], undivided.weights.params["w"]
    assert np.asarray(mine).ctypes.data == np.asarray(theirs).ctypes.data
    assert mine.devices() != theirs.devices() or mine.device.client is not theirs.device.client
    undivided.delete()
    assert theirs.is_deleted()
    assert not mine.is_deleted()
    assert np.isfinite(_answer(before)).all()


@pytest.mark.parametrize(("divided", "alone", "chosen"), [(2e-4, 1e-4, 1), (1e-4, 1e-4, 0)])
def test_a_small_program_runs_the_way_that_is_faster(
    bundle, undivided, runner, monkeypatch, divided, alone, chosen
):
    (prepared,) = runner.prepared.values()
    program = prepared.program
    times = {True: divided, False: alone}
    monkeypatch.setattr(loading, "_time", lambda one, inputs: times[one is program])
    assert loading.choose_threads(bundle, undivided, runner, None) == chosen
    assert (prepared.program is not program) == chosen
    assert prepared.seconds == (alone if chosen else 100e-6)


@pytest.mark.parametrize("seconds", [1e-5, 1e-2])
def test_tiny_and_long_programs_are_not_compiled_twice(bundle, undivided, runner, seconds):
    (prepared,) = runner.prepared.values()
    prepared.seconds = seconds
    assert loading.choose_threads(None, undivided, runner, None) == 0


def test_other_bits_are_never_chosen(bundle, undivided, runner, monkeypatch):
    run = loading._run
    (prepared,) = runner.prepared.values()
    divided = prepared.program

    def off(program, inputs):
        outputs = run(program, inputs)
        return outputs if program is divided else [np.nextafter(each, 9) for each in outputs]

    monkeypatch.setattr(loading, "_run", off)
    monkeypatch.setattr(loading, "_time", lambda one, inputs: 1.0 if one is divided else 1e-4)
    assert loading.choose_threads(bundle, undivided, runner, None) == 0
    assert prepared.program is divided


def test_what_cannot_be_timed_stays_as_it_is(bundle, undivided, runner, caplog):
    (prepared,) = runner.prepared.values()
    program = prepared.program
    loading._speed_up(bundle, undivided, runner, {"xla_has_no_such_option": True})
    assert prepared.program is program
    assert "could not be timed" in caplog.text


def test_one_thread_is_nothing_to_divide_over(held, monkeypatch):
    monkeypatch.setattr("fornax.export.undivided.cpu_threads", lambda: 1)
    assert share_undivided(held) is None


@pytest.mark.parametrize("dtype", ["float64", "bfloat16", "int8", "bool"])
def test_weights_of_any_width_are_shared(dtype, monkeypatch):
    monkeypatch.setenv("NPROC", "2")
    with jax.enable_x64(True):
        weights = Weights({"w": jnp.ones((8, 64), dtype), "s": jnp.zeros((), dtype)})
    found = share_undivided(weights)
    assert found is not None
    assert found.weights.params["w"].dtype == dtype
    found.delete()


def test_weights_whose_copies_would_take_memory_are_not_shared(monkeypatch):
    monkeypatch.setenv("NPROC", "2")
    assert share_undivided(Weights({"w": jnp.ones((8, 64), "int4")})) is None


def test_loads_at_once_do_not_see_the_environment_of_the_device_being_made(held, monkeypatch):
    monkeypatch.setenv("NPROC", "2")
    make, making = _exported.calling_device, threading.Event()

    def slowly():
        with one_cpu_thread():
            making.set()
            time.sleep(0.05)
        return make()

    monkeypatch.setattr(_exported, "calling_device", slowly)
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(share_undivided, held)
        assert making.wait(120)
        second = pool.submit(share_undivided, held)
        for each in (first, second):
            each.result().delete()
