"""Servers in processes of their own."""

import json
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import httpx
import pytest
from tests.long_calls import long_calls

__all__ = ["long_calls"]

ROOT = Path(__file__).parents[3]
SERVER_PROCESS = [sys.executable, "-m", "tests.integration.llm.server_process"]


class Process:
    """A running server."""

    command: ClassVar = SERVER_PROCESS
    start_seconds: ClassVar = 240

    def __init__(self, config: dict[str, Any], log: Path):
        self.log = log
        with log.open("wb") as file:
            self.popen = subprocess.Popen(
                [*self.command, json.dumps({"port": 0, **config})],
                cwd=ROOT,
                stdout=file,
                stderr=subprocess.STDOUT,
            )
        self.url = self._wait()

    def _wait(self) -> str:
        until = time.monotonic() + self.start_seconds
        while time.monotonic() < until:
            found = re.search(r"listening on (http://\S+)", self.log.read_text())
            if found:
                httpx.get(f"{found[1]}/health", timeout=120)  # accepted from that line on
                return found[1]
            assert self.popen.poll() is None, self.log.read_text()
            time.sleep(0.05)
        raise AssertionError(self.log.read_text())

    def client(self, **options: Any) -> httpx.Client:
        return httpx.Client(base_url=self.url, timeout=120, **options)

    def stop(self, seconds: float = 120) -> int:
        """Ask it to stop; its exit code."""
        self.popen.send_signal(signal.SIGTERM)
        return self.popen.wait(seconds)


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Callable[..., Process]]:
    """Starts servers with a config."""
    started: list[Process] = []

    def start(**config: Any) -> Process:
        started.append(Process(config, tmp_path / f"server{len(started)}.log"))
        return started[-1]

    yield start
    for process in started:
        if process.popen.poll() is None:
            process.popen.kill()
            process.popen.wait()
