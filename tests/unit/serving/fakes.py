"""A repository of small text files and versions that answer with their own number."""

import asyncio
import dataclasses
import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from fornax.config import ServingCode, ServingError
from fornax.serving.events import Events
from fornax.serving.host import Host
from fornax.serving.lifecycle import Source
from fornax.serving.types import InferRequest, InferResult, Timing


@dataclasses.dataclass
class FakeConfig:
    """What a host reads of its configuration."""

    repository: Path
    control: Any = "explicit"
    poll_seconds: float = 0.02
    load: tuple[str, ...] = ("*",)
    strict_readiness: bool = True
    trust_executables: bool = False

    def folder(self) -> Path:
        return self.repository


def deploy(root: Path, name: str, version: int, **behaviour: Any) -> Path:
    """Put a version into the repository as an export does: whole, by one rename."""
    target = root / name / str(version)
    work = root / name / f".{version}.tmp"
    work.mkdir(parents=True)
    content = json.dumps({"version": version, **behaviour}).encode()
    (work / "content").write_bytes(content)
    (work / "manifest.json").write_text(json.dumps({"files": {"content": {"size": len(content)}}}))
    if target.exists():
        shutil.rmtree(target)
    work.rename(target)
    return target


class FakeServable:
    """Answers each request with its version and the content's `offset`."""

    functions = ("predict", "score")

    def __init__(self, source: Source, content: dict[str, Any], made: "Made"):
        self.source, self.content, self.made = source, content, made
        self.pending: set[asyncio.Task[InferResult]] = set()
        self.state = "ready"

    def submit(self, request: InferRequest) -> "asyncio.Future[InferResult]":
        if self.state != "ready":
            raise ServingError(ServingCode.UNAVAILABLE, f"{self.source.version} is {self.state}")
        task = asyncio.ensure_future(self._answer(request))
        self.pending.add(task)
        task.add_done_callback(self.pending.discard)
        return task

    async def _answer(self, request: InferRequest) -> InferResult:
        await self.made.gate.wait()
        await asyncio.sleep(0)
        if self.state == "closed":
            raise AssertionError("a closed version answered")
        if "fails" in self.content:
            raise ServingError(ServingCode.INTERNAL, self.content["fails"])
        x = request.inputs.get("x", np.zeros((1, 2), np.float32))
        return InferResult(
            model=self.source.name,
            version=str(self.source.version),
            function=request.function or "predict",
            id=request.id,
            outputs={"y": x + np.float32(self.content.get("offset", 0.0))},
            timing=Timing(queue=1000, compute_infer=self.source.version * 1_000_000),
        )

    def signature(self, function: str = "") -> Any:
        return SimpleNamespace(name=function or "predict")

    def statistics(self) -> Any:
        return SimpleNamespace(name=self.source.name, version=str(self.source.version))

    async def drain(self, seconds: float) -> bool:
        self.state = "draining"
        if self.pending:
            await asyncio.wait(self.pending, timeout=seconds)
        return not self.pending

    async def close(self) -> None:
        self.state = "closed"
        self.made.live -= 1


class Made:
    """A loader of fakes, and what it has made."""

    def __init__(self) -> None:
        self.live = self.most_at_once = self.loading = 0
        self.tries: list[int] = []
        self.gate = asyncio.Event()
        self.gate.set()
        self.hold = asyncio.Event()
        self.hold.set()
        self.limit = 100
        """How many versions fit."""

    async def __call__(self, source: Source) -> FakeServable:
        self.tries.append(source.version)
        self.loading += 1
        self.most_at_once = max(self.most_at_once, self.loading)
        try:
            content = json.loads((source.path / "content").read_text())
            await self.hold.wait()
            await asyncio.sleep(0)
            if "broken" in content:
                raise ServingError(ServingCode.FAILED_PRECONDITION, content["broken"])
            if "crash" in content:
                raise RuntimeError(content["crash"])
            if self.live >= self.limit:
                raise ServingError(
                    ServingCode.RESOURCE_EXHAUSTED, f"{self.live} fit, and this is one more"
                )
        finally:
            self.loading -= 1
        self.live += 1
        return FakeServable(source, content, self)


@dataclasses.dataclass
class Running:
    """A host over a repository of fakes."""

    host: Host
    made: Made
    root: Path
    states: list[Any]

    async def ask(self, model: str = "m", version: str = "", **inputs: Any) -> InferResult:
        """One request's answer."""
        return await self.host.submit(InferRequest(model, inputs, version=version))

    async def version(self, model: str = "m", version: str = "") -> str:
        """Which version answers."""
        return (await self.ask(model, version)).version

    def index(self) -> dict[tuple[str, str], tuple[str, str]]:
        """State and reason by model and version."""
        return {(e.name, e.version): (e.state, e.reason) for e in self.host.index()}


def running(root: Path, **config: Any) -> Running:
    """A host that is not started."""
    made, events, states = Made(), Events(), []
    events.states.append(states.append)
    host = Host(FakeConfig(root, **config), events=events, loader=made)
    return Running(host, made, root, states)
