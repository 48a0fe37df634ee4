"""The life of versions, with fakes in place of bundles: deploy, fail, switch, drain, forget."""

import asyncio
import functools
import json
import shutil
import sys
import threading

import pytest
from tests.unit.serving.fakes import deploy, running

from fornax.config import ServingCode, ServingError
from fornax.serving.lifecycle import manager
from fornax.serving.repository import pin, unpin


def in_loop(test):
    """Run an async test to its end, with a limit."""

    @functools.wraps(test)
    def run(*args, **kwargs):
        asyncio.run(asyncio.wait_for(test(*args, **kwargs), 120))

    return run


async def started(root, **config):
    made = running(root, **config)
    await made.host.start()
    return made


@in_loop
async def test_the_newest_version_answers_and_the_older_leaves(tmp_path):
    deploy(tmp_path, "m", 1)
    r = await started(tmp_path)
    deploy(tmp_path, "m", 2)
    await r.host.poll()
    assert await r.version() == "2"
    assert r.index() == {("m", "2"): ("READY", "")}
    assert r.made.live == 1
    assert [(s.version, s.state) for s in r.states] == [
        ("1", "LOADING"), ("1", "READY"), ("2", "LOADING"), ("2", "READY"),
        ("1", "UNLOADING"), ("1", "UNAVAILABLE"),
    ]  # fmt: skip


@in_loop
async def test_until_a_version_is_loaded_it_is_unavailable_and_not_unknown(tmp_path):
    deploy(tmp_path, "m", 1)
    r = running(tmp_path)
    start = asyncio.ensure_future(r.host.start())
    said = []
    while not start.done():
        await asyncio.sleep(0)
        try:
            assert await r.version(version="1") == "1"
        except ServingError as error:
            said.append(error)
    early = [error for error in said if "no model 'm'" not in str(error)]
    assert early
    assert {error.code for error in early} == {ServingCode.UNAVAILABLE}
    with pytest.raises(ServingError, match="has no version '2' served; it has 1") as raised:
        await r.version(version="2")
    assert raised.value.code is ServingCode.NOT_FOUND


class Planning:
    """Makes plans, unless held: then each waits until it is released."""

    def __init__(self, make_plan):
        self.make_plan = make_plan
        self.free, self.begun = threading.Event(), threading.Event()
        self.free.set()

    def __call__(self, situation):
        self.begun.set()
        assert self.free.wait(120)
        return self.make_plan(situation)

    def hold(self):
        self.free.clear()
        self.begun.clear()

    async def held(self):
        while not self.begun.is_set():
            await asyncio.sleep(0.001)


@pytest.fixture
def planning(monkeypatch):
    made = Planning(manager.make_plan)
    monkeypatch.setattr(manager, "make_plan", made)
    yield made
    made.free.set()


async def refusals(r, *versions):
    """Why versions are not answered, as codes."""
    found = []
    for version in versions:
        with pytest.raises(ServingError) as raised:
            await r.ask(version=str(version))
        found.append(raised.value.code)
    return found


UNAVAILABLE, NOT_FOUND = ServingCode.UNAVAILABLE, ServingCode.NOT_FOUND


@in_loop
async def test_a_version_is_unavailable_until_it_is_known_that_it_is_not_served(tmp_path, planning):
    deploy(tmp_path, "m", 1)
    deploy(tmp_path, "m", 2)
    deploy(tmp_path, "m", 3, broken="altered")
    r = running(tmp_path)
    r.made.hold.clear()
    planning.hold()
    start = asyncio.ensure_future(r.host.start())
    await planning.held()
    assert await refusals(r, 3, 2, 1, 4) == [UNAVAILABLE] * 3 + [NOT_FOUND]
    planning.free.set()
    while r.made.tries != [3]:
        await asyncio.sleep(0)
    assert await refusals(r, 3, 2, 1) == [UNAVAILABLE] * 3
    planning.hold()
    r.made.hold.set()
    await planning.held()  # 3 has failed, and 2 is not picked yet
    assert await refusals(r, 3, 2, 1) == [UNAVAILABLE] * 3
    planning.free.set()
    await start
    assert await r.version() == "2"
    assert await refusals(r, 3, 1) == [UNAVAILABLE, NOT_FOUND]

    deploy(tmp_path, "m", 4)
    planning.hold()
    poll = asyncio.ensure_future(r.host.poll())
    await planning.held()
    assert await refusals(r, 4, 1) == [UNAVAILABLE, NOT_FOUND]
    planning.free.set()
    await poll
    assert await r.version(version="4") == "4"

    await r.host.unload("m")
    await r.host.poll()  # no plan is being made any more
    assert await refusals(r, 4) == [NOT_FOUND]
    planning.hold()
    load = asyncio.ensure_future(r.host.load("m"))
    await planning.held()
    assert await refusals(r, 4) == [UNAVAILABLE]
    planning.free.set()
    await load
    assert await r.version(version="4") == "4"


@in_loop
async def test_versions_are_not_unknown_to_a_start_that_is_broken_off(tmp_path, planning):
    deploy(tmp_path, "m", 1)
    (tmp_path / "m" / "serving.yaml").write_text("versions: {type: all}")
    r = running(tmp_path)
    planning.hold()
    start = asyncio.ensure_future(r.host.start())
    await planning.held()
    start.cancel()
    await asyncio.wait([start])
    planning.free.set()
    assert await refusals(r, 1, 2) == [UNAVAILABLE, NOT_FOUND]


@in_loop
async def test_no_version_is_unknown_while_the_settings_cannot_be_read(tmp_path):
    deploy(tmp_path, "m", 1)
    (tmp_path / "m" / "serving.yaml").write_text("batchin: {}")
    r = await started(tmp_path)
    for version in ("1", "stable"):
        with pytest.raises(ServingError, match=f"version {version} of m .* did you mean batching"):
            await r.ask(version=version)
    assert await refusals(r, 1, "stable") == [UNAVAILABLE] * 2


@in_loop
async def test_polling_finds_a_new_model_and_a_new_version(tmp_path):
    r = await started(tmp_path, control="poll")
    deploy(tmp_path, "m", 1)
    deploy(tmp_path, "other", 7)
    while len(r.index()) < 2 or any(s != "READY" for s, _ in r.index().values()):
        await asyncio.sleep(0.01)
    assert await r.version("other") == "7"
    shutil.rmtree(tmp_path / "other")
    while any(name == "other" for name, _ in r.index()):
        await asyncio.sleep(0.01)
    with pytest.raises(ServingError, match="no model 'other'"):
        r.host.model_ready("other")
    await r.host.stop(1.0)


@in_loop
async def test_a_version_that_fails_never_serves_and_is_not_tried_again(tmp_path):
    deploy(tmp_path, "m", 1)
    r = await started(tmp_path)
    deploy(tmp_path, "m", 2, broken="weights/d/0 was altered")
    for _ in range(3):
        await r.host.poll()
    assert await r.version() == "1"
    assert r.index()["m", "2"] == ("UNAVAILABLE", "weights/d/0 was altered")
    assert r.made.tries == [1, 2]
    with pytest.raises(ServingError, match="weights/d/0 was altered") as raised:
        await r.ask(version="2")
    assert raised.value.code is ServingCode.UNAVAILABLE
    deploy(tmp_path, "m", 2)
    await r.host.poll()
    assert await r.version() == "2"


@in_loop
async def test_a_fault_that_is_no_error_of_ours_keeps_the_old_version_too(tmp_path):
    deploy(tmp_path, "m", 1)
    r = await started(tmp_path)
    deploy(tmp_path, "m", 2, crash="out of something")
    await r.host.poll()
    assert await r.version() == "1"
    assert r.index()["m", "2"][1] == "RuntimeError: out of something"


@in_loop
async def test_a_start_with_a_broken_newest_version_serves_the_one_before(tmp_path):
    for version in (1, 2):
        deploy(tmp_path, "m", version)
    deploy(tmp_path, "m", 3, broken="no")
    r = await started(tmp_path)
    assert await r.version() == "2"
    assert r.host.ready()
    assert r.made.tries == [3, 2]


@in_loop
async def test_an_incomplete_version_waits_and_says_for_what(tmp_path):
    deploy(tmp_path, "m", 1)
    r = await started(tmp_path)
    folder = deploy(tmp_path, "m", 2)
    content = (folder / "content").read_bytes()
    (folder / "content").write_bytes(content[:3])
    await r.host.poll()
    assert r.made.tries == [1]
    state, reason = r.index()["m", "2"]
    assert state == "UNAVAILABLE"
    assert f"content has 3 of {len(content)} bytes" in reason
    with pytest.raises(ServingError, match="content has 3 of"):
        await r.host.load("m", "2")
    with pytest.raises(ServingError, match="content has 3 of"):
        await r.host.load("m")
    (folder / "content").write_bytes(content)
    await r.host.poll()
    assert await r.version() == "2"


@in_loop
async def test_an_accepted_request_is_answered_by_the_version_that_accepted_it(tmp_path):
    deploy(tmp_path, "m", 1)
    r = await started(tmp_path)
    r.made.gate.clear()
    accepted = [asyncio.ensure_future(r.version()) for _ in range(5)]
    await asyncio.sleep(0)
    deploy(tmp_path, "m", 2)
    await r.host.poll()
    later = asyncio.ensure_future(r.version())
    await asyncio.sleep(0)
    assert r.index()["m", "1"][0] == "UNLOADING"
    with pytest.raises(ServingError, match="version 1 of m is not ready: it is unloading"):
        await r.version(version="1")
    r.made.gate.set()
    assert await asyncio.gather(*accepted) == ["1"] * 5
    assert await later == "2"


@in_loop
async def test_a_version_that_was_overwritten_is_loaded_anew_or_the_copy_in_memory_goes_on(
    tmp_path,
):
    deploy(tmp_path, "m", 1, offset=1)
    r = await started(tmp_path)
    deploy(tmp_path, "m", 1, offset=2, broken="altered")
    await r.host.poll()
    assert (await r.ask()).outputs["y"][0, 0] == 1
    state, reason = r.index()["m", "1"]
    assert state == "READY"
    assert "the copy in memory stays" in reason
    assert "altered" in reason
    deploy(tmp_path, "m", 1, offset=3)
    await r.host.poll()
    assert (await r.ask()).outputs["y"][0, 0] == 3
    assert r.index()["m", "1"] == ("READY", "")
    assert r.made.live == 1


@in_loop
async def test_a_version_between_two_renames_is_not_unloaded(tmp_path):
    folder = deploy(tmp_path, "m", 1)
    r = await started(tmp_path)
    folder.rename(tmp_path / "m" / ".1.old")
    await r.host.poll()
    assert await r.version() == "1"
    deploy(tmp_path, "m", 1, offset=5)
    await r.host.poll()
    assert (await r.ask()).outputs["y"][0, 0] == 5


@in_loop
async def test_a_removed_version_gives_way_to_the_one_before(tmp_path):
    deploy(tmp_path, "m", 1)
    deploy(tmp_path, "m", 2)
    r = await started(tmp_path)
    shutil.rmtree(tmp_path / "m" / "2")
    await r.host.poll()
    await r.host.poll()
    assert await r.version() == "1"
    assert r.made.live == 1


@in_loop
async def test_a_version_that_failed_and_was_removed_is_forgotten(tmp_path):
    deploy(tmp_path, "m", 1)
    r = await started(tmp_path)
    deploy(tmp_path, "m", 2, broken="it is damaged")
    await r.host.poll()
    assert r.index()["m", "2"][0] == "UNAVAILABLE"
    shutil.rmtree(tmp_path / "m" / "2")
    await r.host.poll()
    assert r.index() == {("m", "1"): ("READY", "")}


@in_loop
async def test_a_reload_that_a_newer_version_overtakes_leaves_no_gap(tmp_path):
    deploy(tmp_path, "m", 1)
    r = await started(tmp_path)
    r.made.hold.clear()
    deploy(tmp_path, "m", 1, offset=5)
    polls = [asyncio.create_task(r.host.poll())]
    await asyncio.sleep(0.1)
    deploy(tmp_path, "m", 2, broken="it is damaged")
    polls.append(asyncio.create_task(r.host.poll()))
    await asyncio.sleep(0.1)
    r.made.hold.set()
    while not all(each.done() for each in polls):
        assert await r.version() == "1"
        await asyncio.sleep(0)
    assert await r.version() == "1"


@in_loop
async def test_a_repository_that_is_away_changes_nothing(tmp_path):
    root = tmp_path / "models"
    deploy(root, "m", 1)
    r = await started(root)
    root.rename(tmp_path / "away")
    await r.host.poll()
    assert await r.version() == "1"
    (tmp_path / "away").rename(root)
    deploy(root, "m", 2)
    await r.host.poll()
    assert await r.version() == "2"


@in_loop
async def test_settings_that_cannot_be_read_change_nothing(tmp_path, caplog):
    deploy(tmp_path, "m", 1)
    r = await started(tmp_path)
    (tmp_path / "m" / "serving.yaml").write_text("batchin: {}")
    deploy(tmp_path, "m", 2)
    await r.host.poll()
    assert await r.version() == "1"
    assert "did you mean batching" in r.index()["m", ""][1]
    await r.host.poll()
    assert caplog.text.count("did you mean batching") == 1
    (tmp_path / "m" / "serving.yaml").write_text("labels: {stable: 1}")
    await r.host.poll()
    assert (await r.version(), await r.version(version="stable")) == ("2", "1")


@in_loop
async def test_new_settings_load_a_version_anew_beside_the_old_copy(tmp_path):
    deploy(tmp_path, "m", 1)
    r = await started(tmp_path)
    (tmp_path / "m" / "serving.yaml").write_text("batching: {max_delay_ms: 5}")
    r.made.hold.clear()
    looking = asyncio.ensure_future(r.host.poll())
    while r.made.tries != [1, 1]:
        await asyncio.sleep(0)
    assert await r.version() == "1"
    r.made.hold.set()
    await looking
    assert r.made.live == 1
    assert r.host._models["m"].default.source.settings.batching.max_delay_ms == 5


@in_loop
async def test_policies_and_labels(tmp_path):
    for version in (1, 2, 3, 4):
        deploy(tmp_path, "m", version)
    file = tmp_path / "m" / "serving.yaml"
    file.write_text("versions: {type: latest, count: 2}\nlabels: {stable: 1}")
    r = await started(tmp_path)
    assert sorted(v for _, v in r.index()) == ["1", "3", "4"]
    assert await r.version(version="3") == "3"
    assert await r.version(version="stable") == "1"
    with pytest.raises(ServingError, match="did you mean stable") as raised:
        await r.version(version="stabel")
    assert raised.value.code is ServingCode.NOT_FOUND
    with pytest.raises(ServingError, match="no version '2' served; it has 1, 3, 4"):
        await r.version(version="2")
    file.write_text("versions: {type: named, versions: [2, 9]}")
    await r.host.poll()
    assert await r.version() == "2"
    assert r.index() == {
        ("m", "9"): (
            "UNAVAILABLE",
            "waiting for its files: there is no such version in the repository",
        ),
        ("m", "2"): ("READY", ""),
    }
    file.write_text("versions: {type: all}")
    await r.host.poll()
    assert r.made.live == 4


@in_loop
async def test_a_policy_that_names_only_what_is_not_there_keeps_what_is(tmp_path):
    deploy(tmp_path, "m", 1)
    r = await started(tmp_path)
    (tmp_path / "m" / "serving.yaml").write_text("versions: {type: named, versions: [9]}")
    await r.host.poll()
    assert await r.version() == "1"
    deploy(tmp_path, "m", 9)
    await r.host.poll()
    assert await r.version() == "9"
    assert r.made.live == 1


@in_loop
async def test_what_does_not_fit_is_refused_with_figures_and_tried_when_memory_is_free(tmp_path):
    deploy(tmp_path, "m", 1)
    deploy(tmp_path, "big", 1)
    r = running(tmp_path)
    r.made.limit = 2
    await r.host.start()
    deploy(tmp_path, "m", 2)
    await r.host.poll()
    await r.host.poll()
    assert await r.version() == "1"
    assert r.index()["m", "2"] == ("UNAVAILABLE", "2 fit, and this is one more")
    assert r.made.tries.count(2) == 1
    with pytest.raises(ServingError) as raised:
        await r.host.load("m", "2")
    assert raised.value.code is ServingCode.RESOURCE_EXHAUSTED
    await r.host.unload("big")
    await r.host._manager.settled()
    assert await r.version() == "2"
    assert r.made.live == 1


@in_loop
async def test_no_more_versions_load_at_once_than_allowed(tmp_path):
    for n in range(7):
        deploy(tmp_path, f"m{n}", 1)
    r = running(tmp_path)
    r.made.hold.clear()
    start = asyncio.ensure_future(r.host.start())
    while r.made.loading < 2 or [state for state, _ in r.index().values()] != ["LOADING"] * 7:
        await asyncio.sleep(0.001)
    r.made.hold.set()
    await start
    assert r.made.most_at_once == 2
    assert r.host.ready()


@in_loop
async def test_unload_and_load_of_one_version(tmp_path):
    deploy(tmp_path, "m", 1)
    deploy(tmp_path, "m", 2)
    r = await started(tmp_path)
    await r.host.load("m", "1")
    assert (await r.version(), await r.version(version="1")) == ("2", "1")
    await r.host.unload("m", "2")
    assert await r.version() == "1"
    await r.host.poll()
    assert await r.version() == "1"
    assert "by request" in r.index()["m", "2"][1]
    await r.host.load("m", "2")
    assert await r.version() == "2"
    await r.host.unload("m")
    assert not r.host.model_ready("m")
    assert r.made.live == 0
    await r.host.poll()
    assert r.made.live == 0
    with pytest.raises(ServingError, match="no version ready"):
        await r.version()
    await r.host.load("m")
    assert await r.version() == "2"


@in_loop
async def test_unloading_waits_for_what_was_accepted(tmp_path):
    deploy(tmp_path, "m", 1)
    r = await started(tmp_path)
    r.made.gate.clear()
    accepted = asyncio.ensure_future(r.version())
    await asyncio.sleep(0)
    leaving = asyncio.ensure_future(r.host.unload("m"))
    while r.host.model_ready("m"):
        await asyncio.sleep(0.001)
    assert not leaving.done()
    with pytest.raises(ServingError, match="no version ready"):
        await r.version()
    r.made.gate.set()
    await leaving
    assert await accepted == "1"
    assert r.made.live == 0


@in_loop
async def test_a_version_unloaded_while_it_loads_never_serves(tmp_path):
    deploy(tmp_path, "m", 1)
    r = running(tmp_path)
    r.made.hold.clear()
    starting = asyncio.ensure_future(r.host.start())
    while not r.made.loading:
        await asyncio.sleep(0)
    await r.host.unload("m")
    r.made.hold.set()
    await starting
    await r.host._manager.settled()
    assert not r.host.model_ready("m")
    while r.made.live:
        await asyncio.sleep(0)


@in_loop
async def test_explicit_control_loads_what_is_asked_for_and_nothing_else(tmp_path):
    for name in ("a", "b"):
        deploy(tmp_path, name, 1)
        deploy(tmp_path, name, 2)
    r = await started(tmp_path, load=("a",))
    assert r.host.ready()
    assert r.index() == {
        ("a", "2"): ("READY", ""),
        ("b", ""): ("UNAVAILABLE", "none of its versions is loaded"),
    }
    await r.host.load("b", "1")
    assert await r.version("b") == "1"
    assert r.made.tries == [2, 1]
    deploy(tmp_path, "a", 3)
    await r.host.load("b")
    assert (await r.version("a"), await r.version("b")) == ("2", "2")
    assert await r.version("b", "1") == "1"
    for name, version, said in (("c", "", "no model 'c'"), ("a", "9", "no version '9'")):
        with pytest.raises(ServingError, match=said) as raised:
            await r.host.load(name, version)
        assert raised.value.code is ServingCode.NOT_FOUND
    with pytest.raises(ServingError, match="not a model name"):
        await r.host.load("../a")


@in_loop
async def test_explicit_control_lists_what_comes_and_forgets_what_goes(tmp_path):
    r = await started(tmp_path)
    deploy(tmp_path, "late", 1)
    while not r.index():
        await asyncio.sleep(0.01)
    assert r.index() == {("late", ""): ("UNAVAILABLE", "none of its versions is loaded")}
    assert r.host.ready()
    await r.host.load("late")
    shutil.rmtree(tmp_path / "late")
    await asyncio.sleep(0.05)
    assert await r.version("late") == "1"
    await r.host.unload("late")
    while r.index():
        await asyncio.sleep(0.01)
    await r.host.stop(1.0)


@in_loop
async def test_control_none_looks_once(tmp_path):
    deploy(tmp_path, "m", 1)
    r = await started(tmp_path, control="none")
    deploy(tmp_path, "m", 2)
    await r.host.poll()
    assert await r.version() == "1"


@in_loop
async def test_a_name_to_load_at_the_start_must_be_there(tmp_path):
    deploy(tmp_path, "ranker", 1)
    with pytest.raises(ServingError, match="did you mean ranker"):
        await started(tmp_path, load=("rankr",))


@in_loop
async def test_control_none_refuses_changes(tmp_path):
    deploy(tmp_path, "m", 1)
    r = await started(tmp_path, control="none")
    for change in (r.host.load, r.host.unload):
        with pytest.raises(ServingError, match="control=none") as raised:
            await change("m")
        assert raised.value.code is ServingCode.UNAVAILABLE
    assert await r.version() == "1"


@in_loop
async def test_readiness_waits_for_what_was_there_at_the_start_only(tmp_path):
    deploy(tmp_path, "m", 1, broken="no")
    deploy(tmp_path, "other", 1)
    (tmp_path / "empty").mkdir()
    r = await started(tmp_path)
    assert r.host.live()
    assert not r.host.ready()
    assert r.host.model_ready("other")
    deploy(tmp_path, "m", 2)
    await r.host.poll()
    assert r.host.ready()
    deploy(tmp_path, "late", 1, broken="no")
    await r.host.poll()
    assert r.host.ready()
    r.host.stopping = True
    assert not r.host.ready()
    assert await r.version() == "2"
    loose = await started(tmp_path, strict_readiness=False)
    assert loose.host.ready()


@in_loop
async def test_stopping_answers_what_was_accepted_and_leaves_nothing(tmp_path):
    deploy(tmp_path, "m", 1)
    r = await started(tmp_path, control="poll")
    r.made.gate.clear()
    accepted = asyncio.ensure_future(r.version())
    await asyncio.sleep(0)
    stopping = asyncio.ensure_future(r.host.stop(120.0))
    await asyncio.sleep(0.01)
    assert not stopping.done()
    r.made.gate.set()
    await stopping
    assert await accepted == "1"
    assert r.made.live == 0
    assert not r.host.live()
    await r.host.stop(0.0)


@in_loop
async def test_stopping_ends_a_load_that_waits(tmp_path):
    deploy(tmp_path, "m", 1)
    r = await started(tmp_path, load=(), control="explicit")
    r.made.hold.clear()
    loading = asyncio.ensure_future(r.host.load("m"))
    while not r.made.loading:
        await asyncio.sleep(0)
    stopping = asyncio.ensure_future(r.host.stop(1.0))
    with pytest.raises(ServingError, match="loading"):
        await loading
    r.made.hold.set()
    await stopping
    assert r.made.live == 0


@in_loop
async def test_a_rollback_loads_the_older_version_first_and_holds_across_restarts(tmp_path):
    for version in (1, 2, 3):
        deploy(tmp_path, "m", version)
    r = await started(tmp_path)
    done = await r.host.rollback("m")
    assert (done.version, done.previous, done.persistent) == ("2", "3", True)
    assert await r.version() == "2"
    with pytest.raises(ServingError, match="withheld"):
        await r.version(version="3")
    deploy(tmp_path, "m", 4)
    await r.host.poll()
    assert await r.version() == "2"
    await r.host.stop(1.0)
    again = await started(tmp_path)
    assert await again.version() == "2"
    assert (await again.host.rollback("m")).version == "1"
    await again.host.release("m")
    assert await again.version() == "4"
    assert again.made.live == 1


@in_loop
async def test_a_rollback_passes_over_what_does_not_load(tmp_path):
    deploy(tmp_path, "m", 1)
    deploy(tmp_path, "m", 2, broken="no")
    deploy(tmp_path, "m", 3)
    r = await started(tmp_path)
    assert (await r.host.rollback("m")).version == "1"


@in_loop
async def test_a_rollback_that_fails_changes_nothing(tmp_path):
    deploy(tmp_path, "m", 1, broken="altered")
    deploy(tmp_path, "m", 2)
    r = await started(tmp_path)
    for version in ("", "1"):
        with pytest.raises(ServingError, match=r"stays at version 2.*version 1: altered"):
            await r.host.rollback("m", version)
    with pytest.raises(ServingError, match="is the one that answers"):
        await r.host.rollback("m", "2")
    with pytest.raises(ServingError, match="no version '7'"):
        await r.host.rollback("m", "7")
    await r.host.poll()
    assert await r.version() == "2"
    assert not (tmp_path / "m" / "pin.json").exists()


@in_loop
async def test_a_rollback_needs_a_version_that_answers(tmp_path):
    deploy(tmp_path, "m", 1, broken="no")
    r = await started(tmp_path)
    with pytest.raises(ServingError, match="no version that answers"):
        await r.host.rollback("m")
    with pytest.raises(ServingError, match="no model 'x'"):
        await r.host.rollback("x")


@in_loop
async def test_a_rollback_of_a_repository_that_cannot_be_written_says_so(tmp_path, monkeypatch):
    def refuse(*args):
        raise PermissionError(30, "read-only")

    for version in (1, 2):
        deploy(tmp_path, "m", version)
    r = await started(tmp_path)
    monkeypatch.setattr("fornax.serving.lifecycle.commands.pin", refuse)
    assert not (await r.host.rollback("m")).persistent
    await r.host.poll()
    assert await r.version() == "1"
    assert "in this server's memory alone" in r.index()["m", "2"][1]
    await r.host.release("m")
    assert await r.version() == "2"


@in_loop
async def test_loading_what_a_rollback_withheld_ends_it(tmp_path):
    for version in (1, 2):
        deploy(tmp_path, "m", version)
    r = await started(tmp_path)
    await r.host.rollback("m")
    await r.host.load("m", "2")
    assert await r.version() == "2"
    assert not (tmp_path / "m" / "pin.json").exists()


@in_loop
async def test_a_pin_put_there_by_hand_is_followed(tmp_path):
    for version in (1, 2):
        deploy(tmp_path, "m", version)
    r = await started(tmp_path)
    pin(tmp_path, "m", 1)
    await r.host.poll()
    assert await r.version() == "1"
    unpin(tmp_path, "m")
    await r.host.poll()
    assert await r.version() == "2"


@in_loop
async def test_a_pin_to_a_version_that_fails_keeps_what_answers(tmp_path):
    deploy(tmp_path, "m", 1, broken="no")
    deploy(tmp_path, "m", 2)
    r = await started(tmp_path)
    pin(tmp_path, "m", 1)
    await r.host.poll()
    assert await r.version() == "2"
    assert json.loads((tmp_path / "m" / "pin.json").read_text()) == {"version": "1"}


@in_loop
async def test_a_listener_that_fails_does_not_stop_a_deploy(tmp_path):
    deploy(tmp_path, "m", 1)
    r = running(tmp_path)
    r.host.events.states.append(lambda change: 1 / 0)
    await r.host.start()
    assert await r.version() == "1"


@in_loop
async def test_a_listener_that_hears_ready_finds_it_ready(tmp_path):
    seen = []
    deploy(tmp_path, "m", 1)
    r = running(tmp_path)
    r.host.events.states.append(
        lambda c: seen.append((c.version, c.state, r.host.model_ready("m", c.version)))
    )
    await r.host.start()
    deploy(tmp_path, "m", 2)
    await r.host.poll()
    assert ("1", "READY", True) in seen
    assert ("2", "READY", True) in seen
    assert ("1", "UNLOADING", False) in seen


@in_loop
async def test_a_model_is_loading_until_all_that_could_serve_was_tried(tmp_path):
    for version in (1, 2, 3):
        deploy(tmp_path, "m", version, broken="altered")
    r = running(tmp_path)
    assert r.host.index() == []
    r.made.hold.clear()
    starting = asyncio.ensure_future(r.host.start())
    seen = set()
    while not starting.done():
        await asyncio.sleep(0)
        states = {state for state, _ in r.index().values()}
        assert "LOADING" in states or not states or r.made.tries == [3, 2, 1]
        seen |= {version for _, version in r.index()}
        r.made.hold.set()
    assert seen == {"", "1", "2", "3"}
    assert set(r.index().values()) == {("UNAVAILABLE", "altered")}


@in_loop
async def test_looks_read_again_only_what_has_changed(tmp_path, monkeypatch):
    read, settings = [], []

    def counted(root, path, limit):
        read.extend([path] if path.name == "manifest.json" else [])
        return read_small(root, path, limit)

    def parsed(*args, **kwargs):
        settings.append(args)
        return from_yaml(*args, **kwargs)

    scan = sys.modules["fornax.serving.repository.scan"]  # the function of that name hides it
    read_small, from_yaml = scan.read_small, scan.from_yaml
    monkeypatch.setattr(scan, "read_small", counted)
    monkeypatch.setattr(scan, "from_yaml", parsed)
    folder = deploy(tmp_path, "m", 1)
    (tmp_path / "m" / "serving.yaml").write_text("labels: {a: 1}")
    r = await started(tmp_path)
    for _ in range(3):
        await r.host.poll()
    assert len(read) == len(settings) == 1
    (tmp_path / "m" / "serving.yaml").write_text("labels: {b: 1}")
    manifest = (folder / "manifest.json").read_text()
    (folder / "manifest.json").write_text(manifest + " ")
    await r.host.poll()
    assert len(read) == len(settings) == 2
    assert await r.version(version="b") == "1"
    (folder / "content").unlink()
    for _ in range(2):
        await r.host.poll()
        assert "waiting for its files" in r.index()["m", "1"][1]
    assert len(read) == 4  # of what is not complete, at each look
