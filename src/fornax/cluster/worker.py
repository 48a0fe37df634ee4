"""A worker's process: imports what is slow while it waits, then runs a command as one rank.

When another rank is lost, or all have saved a step because one is to go, the process stays: it
leaves the group, says so, and waits for its place in the next.
"""

import contextlib
import faulthandler
import importlib
import os
import signal
import socket
import sys
import warnings
from collections.abc import Iterator, Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from fornax.config import credentials, environment, worker_record
from fornax.config.errors import GroupLostError
from fornax.config.worker_process import receive, send

__all__ = ["run"]

_STAYS = (GroupLostError.exit_code, 128 + signal.SIGTERM)
"""Exit codes after which the run continues: another rank was lost, or all saved and stopped."""
_LOOK_SECONDS = 0.05


def run(agent: Connection) -> None:
    """Wait for the agent's word on what to run as which rank, and exit as that does."""
    modules = receive(agent)
    with _turn_to_import(agent):
        for name in modules:
            importlib.import_module(name)
    send(agent, {"kind": "ready"})
    while True:
        code = _attempt(receive(agent))
        if code not in _STAYS or not _leave():
            sys.exit(code)
        send(agent, {"kind": "left", "code": code})


@contextlib.contextmanager
def _turn_to_import(agent: Connection) -> Iterator[None]:
    """One spare of a machine imports at a time, and none waits that has something to run.

    The spares of hosts that share a machine would otherwise take the processor from one that a
    group waits for. The turn is a name in the kernel, free again when its holder ends.
    """
    with socket.socket(socket.AF_UNIX) as turn:
        while sys.platform == "linux" and not agent.poll(_LOOK_SECONDS):
            with contextlib.suppress(OSError):
                turn.bind(f"\0fornax-imports-{os.getuid()}")
                break
        yield


def _attempt(job: Mapping[str, Any]) -> int:
    """Run the command once.

    SIGUSR1 writes the stacks of all threads to the file named, whatever the process is doing.
    """
    environment.become(job["environment"])
    credentials.set_of_run(credentials.Credentials(**job["credentials"]))
    stacks = Path(job["stacks"]).open("w")  # noqa: SIM115 - the handler holds it to the end
    faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)
    record = worker_record.current()
    assert record is not None
    module, _, name = job["program"].partition(":")
    try:
        return getattr(importlib.import_module(module), name)(job["words"])
    finally:
        record.change("exit", record.step)  # from here on no heartbeat counts


def _leave() -> bool:
    """Be as before the attempt; False when this process cannot, and a new one must take over."""
    left = "jax" not in sys.modules or _leave_jax()
    worker_record.renew()
    return left


def _leave_jax() -> bool:
    from fornax.checkpoint import forget_group
    from fornax.mesh import leave

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # a save that was cut short is not awaited
        forget_group()
        return leave()
