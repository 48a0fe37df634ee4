"""A `fornax` server in a process of its own, for the stages that ask one questions."""

import contextlib
import importlib.util
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from fornax.config.errors import EngineError

__all__ = ["Child", "child_server", "not_installed"]

_PATIENCE_S = 600
_LOOK_S = 0.05


def not_installed(packages: Sequence[str]) -> list[str]:
    """Those of the packages that are not installed."""
    return [name for name in packages if importlib.util.find_spec(name) is None]


@dataclass(frozen=True, kw_only=True)
class Child:
    """A server that listens at `address`; what it says goes to `log`."""

    process: subprocess.Popen
    address: str
    log: Path

    def wait_until(self, ready: Callable[[], bool]) -> None:
        """Wait until `ready()`; EngineError when the server ends first, or never is."""
        until = time.monotonic() + _PATIENCE_S
        while time.monotonic() < until and self.process.poll() is None:
            if ready():
                return
            time.sleep(_LOOK_S)
        raise EngineError(f"the server was not ready within {_PATIENCE_S} s; {self.log} says why")

    def stop(self) -> int:
        """End it as an operator would; its exit code, which is 0, or EngineError."""
        self.process.send_signal(signal.SIGTERM)
        exit_code = self.process.wait(timeout=60)
        if exit_code != 0:
            raise EngineError(f"the server ended with exit code {exit_code}; {self.log} says why")
        return exit_code


@contextlib.contextmanager
def child_server(words: Sequence[str], log: Path, listens: str) -> Iterator[Child]:
    """Run `fornax` with these words until the block ends.

    Args:
      listens: the pattern of the log's line that says where; its group is the address.

    Raises:
      EngineError: it ends before it listens.
    """
    with log.open("wb") as file:
        process = subprocess.Popen(
            [sys.executable, "-m", "fornax", *words], stdout=file, stderr=subprocess.STDOUT
        )
    try:
        yield Child(process=process, address=_address(process, log, listens), log=log)
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()


def _address(process: subprocess.Popen, log: Path, listens: str) -> str:
    until = time.monotonic() + _PATIENCE_S
    while time.monotonic() < until and process.poll() is None:
        if found := re.search(listens, log.read_text(errors="replace")):
            return found[1]
        time.sleep(_LOOK_S)
    raise EngineError(f"the server did not start; {log} says why")
