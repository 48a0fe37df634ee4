"""The process that compiles: what it returns; each way it can fail is one paragraph."""

import importlib.util
import io
import os
import re
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from tests.cases import one_in

from fornax.config.errors import FornaxError, ShardingError
from fornax.plan.compile import (
    CompileError,
    MissingCompilerError,
    Request,
    compile_programs,
    compile_train,
)
from fornax.plan.compile.parent import Progress
from fornax.plan.topology import parse_topology
from fornax.train import TrainConfig


def ask(builder: str, *programs: str, **arguments: Any) -> Request:
    return Request(builder=builder, arguments=arguments, programs=programs or ("square",))


class Recorded(Progress):
    """Remembers the phases."""

    def __init__(self) -> None:
        super().__init__("cpu:2", io.StringIO())
        self.phases: list[str] = []
        self.closed = False

    def phase(self, what: str) -> None:
        self.phases.append(what)

    def close(self) -> None:
        self.closed = True


def test_programs_come_in_the_order_asked_for_and_their_phases_are_shown(toy: str) -> None:
    shown = Recorded()
    cube, square = compile_programs(
        ask(toy, "cube", "square"), parse_topology("cpu:2"), progress=shown
    )
    assert (cube.program, square.program) == ("cube", "square")
    assert (cube.topology, dict(cube.mesh)["fsdp"], len(cube.devices)) == ("cpu:2", 2, 2)
    assert cube.hlo.startswith("HloModule jit")
    assert cube.notes == ("toy",)
    [x] = cube.arguments  # the other one is not read, so it is never sent to a device
    assert (x.name, x.axes, x.shape, x.bytes_device) == ("x", (("fsdp",), ()), (8, 16), 256)
    assert cube.memory.arguments == 256
    assert shown.phases == [
        *("starting", "laying out", "lowering cube", "lowering square"),
        "compiling cube and square",
    ]
    assert shown.closed


@pytest.mark.parametrize(
    ("what", "kind", "said"),
    one_in(
        3,
        [
            ("shard", ShardingError, "^embed: dimension 0 of size 3 does not divide$"),
            ("bug", CompileError, "square cannot be compiled for cpu:2: ValueError: two lines"),
            ("exit", CompileError, "compiling square for cpu:2 ended with exit code 3"),
        ],
    ),
)
def test_failures_are_passed_on(toy: str, what: str, kind: type[FornaxError], said: str) -> None:
    with pytest.raises(kind, match=said) as caught:
        compile_programs(ask(toy, what=what), parse_topology("cpu:2"))
    assert "\n" not in str(caught.value)


def _await(file: Path) -> int:
    for _ in range(3000):
        if file.is_file() and file.read_text():
            return int(file.read_text())
        time.sleep(0.1)
    raise AssertionError("the child never came to its builder")


@pytest.mark.fault
def test_a_killed_child_is_told(toy: str, tmp_path: Path) -> None:
    pid = tmp_path / "pid"
    killer = threading.Thread(target=lambda: os.kill(_await(pid), signal.SIGKILL))
    killer.start()
    with pytest.raises(CompileError, match=r"was killed from outside .* taken up to .* free some"):
        compile_programs(ask(toy, what="sleep", pid=str(pid)), parse_topology("cpu:2"))
    killer.join()


@pytest.mark.fault
@pytest.mark.exhaustive
def test_a_child_that_takes_too_long_is_stopped(toy: str, tmp_path: Path) -> None:
    pid = tmp_path / "pid"
    with pytest.raises(CompileError, match="took longer than 12 s and was stopped"):
        compile_programs(
            ask(toy, what="sleep", pid=str(pid)),
            parse_topology("cpu:2"),
            limit_seconds=12,
        )
    _gone(_await(pid))


@pytest.mark.slow
@pytest.mark.fault
def test_an_interrupt_leaves_no_child(toy: str, tmp_path: Path) -> None:
    pid = tmp_path / "pid"

    class Interrupted(Progress):
        def tick(self) -> None:
            if pid.is_file() and pid.read_text():
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        compile_programs(
            ask(toy, what="sleep", pid=str(pid)),
            parse_topology("cpu:2"),
            progress=Interrupted("cpu:2"),
        )
    _gone(_await(pid))


def _gone(pid: int) -> None:
    for _ in range(3000):
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return
        time.sleep(0.1)
    raise AssertionError(f"process {pid} is still there")


def test_a_missing_compiler_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(MissingCompilerError, match=re.escape("pip install 'fornax-ai[tpu]'")):
        compile_train(TrainConfig(), parse_topology("v5e:2x2"), cache=False)


def test_a_gpu_has_no_compiler_here() -> None:
    with pytest.raises(MissingCompilerError, match="without such a GPU"):
        compile_train(TrainConfig(), parse_topology("h100:8"), cache=False)


def test_lines_for_a_log_and_a_counter_for_a_terminal() -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    for stream, marks in ((io.StringIO(), "\n"), (Terminal(), "\r")):
        shown = Progress("v5e:2x2", stream)
        shown.phase("lowering")
        shown.tick()
        shown.phase("compiling")
        shown.close()
        told = stream.getvalue()
        assert marks in told
        assert (
            re.sub(r"\r[^\n]*\r", "", told).splitlines()[-1].startswith("v5e:2x2  compiling  0 s")
        )
        assert told.count("\n") == 2
