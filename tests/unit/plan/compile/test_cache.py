"""The cache of compiled programs: what it knows again, what it does not, how it stays small."""

import dataclasses
import os
import subprocess
import threading
from pathlib import Path
from typing import Any

import pytest

from fornax.config import environment
from fornax.plan.artifact import Artifact, MemoryFacts
from fornax.plan.compile import OutOfMemoryError, Request, cache, compile_programs
from fornax.plan.topology import parse_topology

_REQUEST = Request(builder="json:dumps", arguments={"config": {"a": 1}}, programs=("step",))
_ARTIFACT = Artifact(
    program="step",
    topology="v5e:2x2",
    mesh={"fsdp": 4},
    devices=(),
    arguments=(),
    memory=MemoryFacts(arguments=1, outputs=2, aliased=3, temporaries=4, code=5),
    hlo="HloModule step\n" * 100,
    versions={},
    lower_seconds=0.0,
    compile_seconds=0.0,
)
_TOPOLOGY = parse_topology("v5e:2x2")


def entries() -> list[Path]:
    folder = environment.cache_dir() / "plans"
    return [path for path in folder.iterdir() if path.is_dir()]


def held_bytes() -> int:
    return sum(file.stat().st_size for entry in entries() for file in entry.iterdir())


def test_an_answer_is_found_again() -> None:
    assert cache.find(_REQUEST, _TOPOLOGY, "step") is None
    cache.keep(_REQUEST, _TOPOLOGY, "step", _ARTIFACT)
    assert cache.find(_REQUEST, _TOPOLOGY, "step") == _ARTIFACT
    assert len(entries()) == 1
    assert 0 < held_bytes() < 10_000


@pytest.mark.parametrize("artifact", [None, _ARTIFACT], ids=["figures only", "with its program"])
def test_a_program_that_does_not_fit_is_an_answer_too(artifact: Artifact | None) -> None:
    error = OutOfMemoryError("step", "v5e:2x2", used=20, limit=10, artifact=artifact)
    cache.keep(_REQUEST, _TOPOLOGY, "step", error)
    found = cache.find(_REQUEST, _TOPOLOGY, "step")
    assert isinstance(found, OutOfMemoryError)
    assert (found.used, found.limit, found.artifact) == (20, 10, artifact)


def test_whatever_makes_another_program_is_another_entry(monkeypatch: pytest.MonkeyPatch) -> None:
    path = cache.path_of(_REQUEST, _TOPOLOGY, "step")
    assert cache.path_of(_REQUEST, _TOPOLOGY, "step") == path
    others = [
        cache.path_of(dataclasses.replace(_REQUEST, arguments={}), _TOPOLOGY, "step"),
        cache.path_of(dataclasses.replace(_REQUEST, options={"xla": 1}), _TOPOLOGY, "step"),
        cache.path_of(dataclasses.replace(_REQUEST, builder="csv:reader"), _TOPOLOGY, "step"),
        cache.path_of(_REQUEST, parse_topology("v5e:2x4"), "step"),
        cache.path_of(_REQUEST, _TOPOLOGY, "eval"),
    ]
    monkeypatch.setenv("LIBTPU_INIT_ARGS", "--xla_tpu_something=true")
    others.append(cache.path_of(_REQUEST, _TOPOLOGY, "step"))
    monkeypatch.delenv("LIBTPU_INIT_ARGS")
    monkeypatch.setattr(cache, "versions", lambda: {"jax": "9"})
    others.append(cache.path_of(_REQUEST, _TOPOLOGY, "step"))
    monkeypatch.undo()
    monkeypatch.setattr(cache, "_source", lambda builder: "another source")
    others.append(cache.path_of(_REQUEST, _TOPOLOGY, "step"))
    assert len({path.name, *(other.name for other in others)}) == 9


@pytest.mark.parametrize("name", ["artifact.json", "hlo.txt.gz"])
@pytest.mark.parametrize("content", [None, b"", b"{", b"[]"], ids=str)
def test_a_damaged_entry_counts_as_none_and_is_replaced(name: str, content: bytes | None) -> None:
    cache.keep(_REQUEST, _TOPOLOGY, "step", _ARTIFACT)
    file = cache.path_of(_REQUEST, _TOPOLOGY, "step") / name
    file.unlink()
    if content is not None:
        file.write_bytes(content)
    assert cache.find(_REQUEST, _TOPOLOGY, "step") is None
    cache.keep(_REQUEST, _TOPOLOGY, "step", _ARTIFACT)
    assert cache.find(_REQUEST, _TOPOLOGY, "step") == _ARTIFACT


def test_the_least_recently_used_go_first(monkeypatch: pytest.MonkeyPatch) -> None:
    requests = [dataclasses.replace(_REQUEST, arguments={"n": n}) for n in range(4)]
    for age, request in enumerate(requests[:3]):
        cache.keep(request, _TOPOLOGY, "step", _ARTIFACT)
        os.utime(cache.path_of(request, _TOPOLOGY, "step"), (1000 + age, 1000 + age))
    assert cache.find(requests[0], _TOPOLOGY, "step") is not None  # used again: no longer oldest
    monkeypatch.setattr(cache, "_LIMIT_BYTES", held_bytes())
    cache.keep(requests[3], _TOPOLOGY, "step", _ARTIFACT)
    left = [cache.find(request, _TOPOLOGY, "step") is not None for request in requests]
    assert left == [True, False, True, True]


def test_many_at_once_leave_one_whole_entry() -> None:
    threads = [
        threading.Thread(target=cache.keep, args=(_REQUEST, _TOPOLOGY, "step", _ARTIFACT))
        for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert cache.find(_REQUEST, _TOPOLOGY, "step") == _ARTIFACT
    assert len(entries()) == 1


def test_a_repeated_compilation_starts_no_child(toy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    request = Request(builder=toy, arguments={}, programs=("square",))
    topology = parse_topology("cpu:2")
    first = compile_programs(request, topology)

    def refuse(*args: Any, **options: Any) -> None:
        raise AssertionError("a child was started")

    monkeypatch.setattr(subprocess, "Popen", refuse)
    assert compile_programs(request, topology) == first
    with pytest.raises(AssertionError, match="a child was started"):
        compile_programs(request, topology, cache=False)
