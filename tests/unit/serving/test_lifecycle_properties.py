"""Any order of deploys, failures, rollbacks, unloads and requests: one right version answers."""

import asyncio
import contextlib
import dataclasses
import shutil
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.unit.serving.fakes import FakeServable, Running, deploy, running

from fornax.config import ServingError
from fornax.serving.repository import pin, unpin
from fornax.serving.types import InferRequest

VERSIONS = st.integers(1, 4)
NEWEST_FIRST = {
    "",
    "versions: {type: latest, count: 2}",
    "versions: {type: all}",
    "labels: {stable: 1}",
    "batching: {max_delay_ms: 1}",
}
OTHERS = {
    "versions: {type: named, versions: [2, 3]}",
    "shadow: {version: 3, share: 1}",
    "bathcing: {}",
}
POLICIES = st.sampled_from(sorted(NEWEST_FIRST | OTHERS))
PLAIN = st.one_of(
    st.tuples(st.just("deploy"), VERSIONS, st.sampled_from(["", "", "broken", "crash"])),
    st.tuples(st.just("half"), VERSIONS),
    st.tuples(st.just("configure"), POLICIES),
    st.tuples(st.just("load"), st.sampled_from(["", "1", "2"])),
    st.tuples(st.just("ask"), st.sampled_from(["", "", "1", "3", "stable"])),
    st.tuples(st.sampled_from(["poll", "poll", "poll", "hold", "gate"])),
)
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("deploy"), VERSIONS, st.sampled_from(["", "", "broken", "crash"])),
        st.tuples(st.just("half"), VERSIONS),
        st.tuples(st.just("remove"), VERSIONS),
        st.tuples(st.just("configure"), POLICIES),
        st.tuples(st.just("ask"), st.sampled_from(["", "", "", "1", "2", "3", "4", "stable"])),
        st.tuples(st.just("ask"), st.just("")),
        st.tuples(st.sampled_from(["load", "unload", "rollback"]), st.sampled_from(["", "", "2"])),
        st.tuples(st.just("pin"), VERSIONS),
        st.tuples(st.just("room"), st.integers(0, 4)),
        st.tuples(st.sampled_from(["poll", "poll", "release", "unpin", "hold", "gate", "turn"])),
    ),
    max_size=25,
)
DECIDES = {"pin", "remove", "rollback", "room", "unload"}


@dataclasses.dataclass
class Asked:
    """A request that was accepted: who must answer, and what."""

    answer: asyncio.Future
    version: str
    offset: float


class World:
    """A host and everything that happens to it."""

    def __init__(self, root: Path):
        self.root = root
        self.r: Running = running(root, control="poll", poll_seconds=1000.0)
        self.asked: list[Asked] = []
        self.commands: set[asyncio.Task] = set()
        self.count = 0
        self.was_safe = self.unloads = False
        self.plain = True
        """Whether nothing but the folder says which version is right."""

    async def step(self, name: str, *what: Any) -> None:
        await getattr(self, f"do_{name}", self.command)(*what, **self.extra(name))
        for _ in range(self.count % 7):
            await asyncio.sleep(0)
        self.check(name)
        self.plain &= name not in DECIDES
        idle = self.r.made.hold.is_set() and all(task.done() for task in self.commands)
        if name == "poll" and self.plain and idle:
            self.check_newest()

    def extra(self, name: str) -> dict[str, Any]:
        known = hasattr(self, f"do_{name}")
        return {} if known else {"name": name}

    async def do_deploy(self, version: int, fault: str) -> None:
        self.count += 1
        behaviour = {fault: "as the test asks"} if fault else {}
        deploy(self.root, "m", version, offset=self.count, **behaviour)

    async def do_half(self, version: int) -> None:
        folder = deploy(self.root, "m", version)
        (folder / "content").write_bytes(b"{")

    async def do_remove(self, version: int) -> None:
        shutil.rmtree(self.root / "m" / str(version), ignore_errors=True)

    async def do_configure(self, text: str) -> None:
        (self.root / "m" / "serving.yaml").write_text(text)
        self.plain &= text in NEWEST_FIRST

    async def do_pin(self, version: int) -> None:
        with contextlib.suppress(ServingError):
            pin(self.root, "m", version)

    async def do_unpin(self) -> None:
        unpin(self.root, "m")

    async def do_room(self, limit: int) -> None:
        self.r.made.limit = limit

    async def do_hold(self) -> None:
        _toggle(self.r.made.hold)

    async def do_gate(self) -> None:
        _toggle(self.r.made.gate)

    async def do_turn(self) -> None:
        await asyncio.sleep(0.001)

    async def command(self, version: str = "", *, name: str) -> None:
        """What waits for loads or drains continues beside the steps that follow."""
        host = self.r.host
        call = {"load": host.load, "unload": host.unload, "rollback": host.rollback}.get(name)
        work = host.poll() if name == "poll" else None
        work = host.release("m") if name == "release" else work
        task = asyncio.ensure_future(work if call is None else call("m", version))
        self.commands.add(task)
        await asyncio.wait([task], timeout=0.003)

    async def do_ask(self, version: str) -> None:
        host = self.r.host
        self.count += 1
        x = np.full((1, 1), self.count, np.float32)
        try:
            answer = host.submit(InferRequest("m", {"x": x}, version=version))
        except ServingError:
            assert "m" not in host._models or not host.model_ready("m", version)
            return
        instance = host._models["m"].routes[version]
        servable = instance.servable
        assert isinstance(servable, FakeServable)
        assert version in ("", "stable") or version == str(instance.version)
        offset = servable.content.get("offset", 0)
        self.asked.append(Asked(answer, str(instance.version), self.count + offset))

    def check(self, name: str) -> None:
        """What holds at every moment."""
        model = self.r.host._models.get("m")
        ready = model is not None and model.default is not None
        if model is not None:
            for version, instance in model.serving.items():
                servable = instance.servable
                assert servable.state == "ready"
                assert "broken" not in servable.content
                assert "crash" not in servable.content
                assert servable.content["version"] == version
            for route in model.routes.values():
                assert model.serving[route.version] is route
            if model.default is not None and model.default.version == model.plan.choice.shadow:
                assert not model.serving.keys() & set(model.plan.choice.selected)
        self.unloads |= name == "unload"
        self.was_safe &= not self.unloads
        assert ready or not self.was_safe, f"{name} took the model's last version away"
        self.was_safe = ready and (self.root / "m" / str(model.default.version)).exists()

    async def finish(self) -> None:
        """Let everything end: no request is lost, and the state is what the folder says."""
        made, host = self.r.made, self.r.host
        made.gate.set()
        made.hold.set()
        made.limit = 100
        for asked in self.asked:
            result = await asked.answer
            assert result.version == asked.version
            assert float(result.outputs["y"][0, 0]) == asked.offset
        results = await asyncio.gather(*self.commands, return_exceptions=True)
        assert all(r is None or not isinstance(r, BaseException) or isinstance(r, ServingError)
                   for r in results), results  # fmt: skip
        (self.root / "m" / "serving.yaml").write_text("")
        with contextlib.suppress(ServingError):
            await host.release("m")
        await host.poll()
        await host.poll()
        with contextlib.suppress(ServingError):
            await host.load("m")
        await host.poll()
        self.check_end()
        await host.stop(120.0)
        assert made.live == 0
        assert made.loading == 0

    def check_newest(self) -> int:
        """The newest version that is whole, or was and is in memory, answers; 0 for none."""
        good = [0]
        model = self.r.host._models["m"]
        for folder in (self.root / "m").iterdir():
            if folder.name.isdigit():
                text = (folder / "content").read_text()
                whole = text != "{" and "asks" not in text
                if whole or int(folder.name) in model.serving:
                    good.append(int(folder.name))
        if max(good):
            assert model.default is not None
            assert model.default.version == max(good)
        return max(good)

    def check_end(self) -> None:
        newest = self.check_newest()
        model = self.r.host._models["m"]
        if newest:
            assert set(model.serving) <= {newest} | model.extra
            assert not model.draining


def _toggle(event: asyncio.Event) -> None:
    if event.is_set():
        event.clear()
    else:
        event.set()


async def _live(steps: list[tuple]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder).resolve()
        deploy(root, "m", 1, offset=0)
        world = World(root)
        await world.r.host.start()
        for step in steps:
            await world.step(*step)
        await world.finish()


@settings(max_examples=40)
@given(st.lists(PLAIN, max_size=15))
def test_without_an_operator_the_newest_whole_version_answers(steps):
    asyncio.run(asyncio.wait_for(_live(steps), 120))


@settings(max_examples=60)
@given(STEPS)
def test_whatever_happens_one_right_version_answers_and_no_request_is_lost(steps):
    asyncio.run(asyncio.wait_for(_live(steps), 120))
