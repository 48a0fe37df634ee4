"""Shadow traffic: what is copied, compared and reported, and that the main answer never waits."""

import asyncio
import json
import math

import ml_dtypes
import numpy as np
import pytest
from tests.unit.serving.fakes import deploy, running

from fornax.config import ServingError
from fornax.serving.lifecycle.shadow import (
    OutputDifferences,
    Percentiles,
    ShadowRequest,
    difference,
)
from fornax.serving.types import InferRequest


def of(values, dtype="float32"):
    return np.array(values, dtype=dtype)


def test_equal_answers_do_not_differ():
    for array in (
        of([[1, 2], [3, 4]]), of([[math.nan, math.inf]]), of([], "int64"), of([True]),
        np.array([b"a", b"\xff"], object), of([1.5], ml_dtypes.bfloat16),
    ):  # fmt: skip
        found = difference(array, array.copy(), 0.0, 0.0)
        assert not found.differs
        assert found.max_absolute == 0.0


@pytest.mark.parametrize(
    ("main", "shadow", "absolute", "relative"),
    [
        (of([1.0]), of([1.5]), 0.5, 0.5),
        (of([1.0, 4.0]), of([1.0, 5.0]), 1.0, 0.25),
        (of([0.0]), of([1.0]), 1.0, 0.0),
        (of([1.0]), of([math.nan]), math.inf, math.inf),
        (of([math.inf]), of([1.0]), math.inf, 0.0),
        (of([math.inf]), of([-math.inf]), math.inf, 0.0),
    ],
)
def test_figures_are_those_of_the_largest_element(main, shadow, absolute, relative):
    found = difference(main, shadow, 0.1, 0.1)
    assert (found.max_absolute, found.max_relative) == (absolute, relative)
    assert found.differs


def test_the_tolerance_is_absolute_plus_relative_of_the_main_answer():
    main, shadow = of([100.0]), of([101.0])
    assert not difference(main, shadow, 0.5, 0.01).differs
    assert difference(main, shadow, 0.5, 0.004).differs


def test_integers_and_strings_differ_when_not_equal():
    assert difference(of([2**53], "int64"), of([2**53 + 1], "int64"), 10.0, 1.0).differs
    assert difference(np.array([b"a"], object), np.array([b"b"], object), 10.0, 1.0).differs


def test_rows_whose_largest_element_moved_are_counted():
    main, shadow = of([[1, 2, 3], [3, 2, 1]]), of([[1, 3, 2], [3, 2, 1]])
    found = difference(main, shadow, 1e9, 0.0)
    assert (found.rows, found.argmax) == (2, 1)
    assert not found.differs


def test_another_shape_is_a_difference_with_its_reason():
    total = OutputDifferences()
    total.add(difference(of([[1.0]]), of([1.0]), 1.0, 1.0))
    report = total.report()
    assert report["differing"] == 1
    assert list(report["problems"]) == ["float32 (1,) where the main answer is float32 (1, 1)"]
    total.add(difference(of([1.0]), of([math.nan]), 1.0, 1.0))
    assert json.loads(json.dumps(total.report(), allow_nan=False))["max_absolute"] == "infinity"


def test_percentiles_are_within_a_tenth():
    latencies = Percentiles()
    for microseconds in range(1, 1001):
        latencies.add(microseconds * 1000)
    assert latencies.quantile(0.5) == pytest.approx(500, rel=0.1)
    assert latencies.quantile(0.99) == pytest.approx(990, rel=0.1)
    assert latencies.report()["mean_us"] == 500.5


def shadowed(root, settings="share: 1", **behaviour):
    for version, how in ((1, {}), (2, behaviour)):
        deploy(root, "m", version, **how)
    (root / "m" / "serving.yaml").write_text(f"shadow: {{version: 2, {settings}}}")
    return running(root)


def run(test):
    asyncio.run(asyncio.wait_for(test, 120))


async def told(r, count):
    """Wait until so many copies were compared, or failed."""
    while sum(r.host.shadow_report("m")["requests"][n] for n in ("compared", "failed")) < count:
        await asyncio.sleep(0.001)


def test_the_shadow_sees_its_share_and_the_report_what_differs(tmp_path):
    async def test():
        r = shadowed(tmp_path, "share: 0.25", offset=0.5)
        await r.host.start()
        x = np.array([[1.0, 2.0]], np.float32)
        for n in range(40):
            result = await r.host.submit(InferRequest("m", {"x": x}, id=f"r{n}"))
            assert result.version == "1"
            assert result.outputs["y"].tolist() == [[1.0, 2.0]]
        await told(r, 10)
        report = json.loads(json.dumps(r.host.shadow_report("m"), allow_nan=False))
        assert report["requests"] == {
            "seen": 40, "copied": 10, "compared": 10, "differing": 10, "failed": 0, "dropped": 0,
            "without_main_answer": 0,
        }  # fmt: skip
        assert report["outputs"]["predict/y"]["max_absolute"] == 0.5
        assert report["outputs"]["predict/y"]["max_relative"] == 0.5
        assert report["outputs"]["predict/y"]["argmax_disagreements"] == 0
        assert report["worst"][0]["id"].startswith("r")
        assert (report["main_version"], report["shadow_version"]) == ("1", "2")
        assert report["latency"]["shadow"]["p50_us"] == pytest.approx(2001, rel=0.1)
        assert [each.report() for each in r.host.shadows()] == [r.host.shadow_report("m")]

    run(test())


def test_the_main_answer_does_not_wait_for_the_shadow(tmp_path):
    async def test():
        r = shadowed(tmp_path, "share: 1, queue_limit: 3")
        await r.host.start()
        shadow = r.host._models["m"].serving[2].servable
        blocked = asyncio.Event()
        asked = []

        async def never(request):
            asked.append(request)
            await blocked.wait()

        shadow._answer = never
        async with asyncio.timeout(120):
            for _ in range(10):
                assert await r.version() == "1"
        await asyncio.sleep(0)
        counts = r.host.shadow_report("m")["requests"]
        assert (counts["copied"], counts["dropped"]) == (3, 7)
        assert all(isinstance(request, ShadowRequest) for request in asked)
        blocked.set()

    run(test())


def test_the_main_answer_is_out_before_the_copy_goes_in(tmp_path):
    async def test():
        r = shadowed(tmp_path)
        await r.host.start()
        order = []
        servable = r.host._models["m"].serving[2].servable
        submit = servable.submit
        servable.submit = lambda request: [order.append("shadow"), submit(request)][1]
        answer = r.host.submit(InferRequest("m", {}))
        answer.add_done_callback(lambda done: order.append("main"))
        await answer
        await told(r, 1)
        assert order == ["main", "shadow"]

    run(test())


def test_a_shadow_that_fails_is_reported_and_nobody_else_notices(tmp_path):
    async def test():
        r = shadowed(tmp_path, fails="out of range")
        await r.host.start()
        for _ in range(3):
            assert await r.version() == "1"
        await told(r, 3)
        report = r.host.shadow_report("m")
        assert report["requests"]["failed"] == 3
        assert report["errors"] == {"out of range": 3}

    run(test())


def test_the_copy_holds_what_the_client_sent_even_if_it_writes_there_again(tmp_path):
    async def test():
        r = shadowed(tmp_path)
        await r.host.start()
        shared = np.zeros((1, 2), np.float32)
        view = shared[:]
        view.flags.writeable = False
        answer = r.host.submit(InferRequest("m", {"x": view}))
        shared[:] = 7.0
        main = (await answer).outputs["y"]
        await told(r, 1)
        # The fake main version reads late and saw the new values: the copy must not have.
        assert main.tolist() == [[7.0, 7.0]]
        assert r.host.shadow_report("m")["outputs"]["predict/y"]["max_absolute"] == 7.0

    run(test())


def test_large_answers_are_compared_too(tmp_path):
    async def test():
        r = shadowed(tmp_path, offset=1)
        await r.host.start()
        await r.ask(x=np.zeros((200, 200), np.float32))
        await told(r, 1)
        assert r.host.shadow_report("m")["outputs"]["predict/y"]["max_absolute"] == 1.0

    run(test())


def test_a_shadow_never_becomes_the_default_until_it_is_promoted(tmp_path):
    async def test():
        r = shadowed(tmp_path)
        await r.host.start()
        assert await r.version(version="2") == "2"
        await r.host.unload("m", "1")
        with pytest.raises(ServingError, match="no version ready"):
            await r.version()
        await r.host.load("m", "1")
        assert await r.version() == "1"
        assert r.host.shadow_report("m")["running"]
        tries = len(r.made.tries)
        (tmp_path / "m" / "serving.yaml").unlink()
        await r.host.poll()
        assert await r.version() == "2"
        assert len(r.made.tries) == tries
        assert not r.host.shadow_report("m")["running"]

    run(test())


def test_the_version_that_answers_goes_on_when_it_is_made_the_shadow(tmp_path):
    async def test():
        for version in (1, 2):
            deploy(tmp_path, "m", version)
        r = running(tmp_path)
        await r.host.start()
        (tmp_path / "m" / "serving.yaml").write_text("shadow: {version: 2}")
        r.made.hold.clear()
        looking = asyncio.ensure_future(r.host.poll())
        while r.made.tries != [2, 1]:
            await asyncio.sleep(0)
        assert await r.version() == "2"
        r.made.hold.set()
        await looking
        assert await r.version() == "1"
        assert r.host.shadow_report("m")["running"]

    run(test())


def test_a_report_says_why_there_is_none(tmp_path):
    async def test():
        deploy(tmp_path, "m", 1)
        r = running(tmp_path)
        await r.host.start()
        with pytest.raises(ServingError, match="put shadow"):
            r.host.shadow_report("m")
        (tmp_path / "m" / "serving.yaml").write_text("shadow: {version: 2}")
        deploy(tmp_path, "m", 2, broken="altered")
        await r.host.poll()
        with pytest.raises(ServingError, match="is not ready: altered"):
            r.host.shadow_report("m")
        assert await r.version() == "1"
        with pytest.raises(ServingError, match="no model"):
            r.host.shadow_report("x")

    run(test())


def test_what_answers_goes_on_when_it_is_the_only_one_and_made_the_shadow(tmp_path, caplog):
    async def test():
        deploy(tmp_path, "m", 1)
        r = running(tmp_path)
        await r.host.start()
        (tmp_path / "m" / "serving.yaml").write_text("shadow: {version: 1}")
        for _ in range(3):
            await r.host.poll()
        assert await r.version() == "1"
        state, reason = r.index()["m", "1"]
        assert state == "READY"
        assert "under shadow, but it still answers, as there is no other version" in reason
        assert [each.message for each in caplog.records] == [f"m version 1: {reason}"]
        with pytest.raises(ServingError, match="version 1 of m is not a shadow: serving"):
            r.host.shadow_report("m")
        deploy(tmp_path, "m", 2)
        await r.host.poll()
        assert await r.version() == "2"
        assert r.index()["m", "1"] == ("READY", "")
        assert r.host.shadow_report("m")["running"]
        assert len(caplog.records) == 1

    run(test())


def test_a_server_that_starts_with_nothing_but_a_shadow_says_so(tmp_path, caplog):
    async def test():
        deploy(tmp_path, "m", 1)
        (tmp_path / "m" / "serving.yaml").write_text("shadow: {version: 1}")
        r = running(tmp_path)
        await r.host.start()
        assert not r.host.ready()
        assert not r.host.model_ready("m")
        words = "under shadow, so it answers no one, and there is no other version that could"
        assert words in r.index()["m", "1"][1]
        assert words in caplog.text
        with pytest.raises(ServingError, match=words):
            await r.version()
        with pytest.raises(ServingError, match=words):
            await r.host.load("m")
        await r.host.load("m", "1")
        assert await r.version(version="1") == "1"
        deploy(tmp_path, "m", 2, broken="altered")
        await r.host.poll()
        assert not r.host.model_ready("m")

    run(test())


def test_a_shadow_that_a_rollback_asks_for_answers_and_says_that_it_is_none(tmp_path):
    async def test():
        r = shadowed(tmp_path)
        await r.host.start()
        deploy(tmp_path, "m", 3)
        await r.host.poll()
        await r.host.rollback("m", "2")
        assert await r.version() == "2"
        assert "but a rollback has it answer" in r.index()["m", "2"][1]

    run(test())


def test_a_shadow_that_is_loaded_by_number_answers_no_one(tmp_path):
    async def test():
        r = running(shadowed(tmp_path).root, load=())
        await r.host.start()
        await r.host.load("m", "1")
        await r.host.load("m", "2")
        assert await r.version() == "1"
        await r.ask()
        assert r.host.shadow_report("m")["running"]

    run(test())
