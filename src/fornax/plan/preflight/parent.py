"""`preflight`: starts the process with the virtual devices, and hands on what it says."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Collection, Iterator
from typing import Any

from fornax import config as config_room
from fornax.config import FornaxError, dump_yaml, environment
from fornax.plan.preflight.result import GROUPS, Check, Group, Report, check_from
from fornax.train import TrainConfig

__all__ = ["preflight"]

_DEVICES = 8


def preflight(
    config: TrainConfig,
    *,
    quick: bool = False,
    only: Collection[Group] = (),
    progress: Callable[[Check], None] = lambda check: None,
) -> Report:
    """Check every parallel choice of a config on eight virtual CPU devices.

    Runs in a process of its own, so that it does not matter which devices this one has.

    Args:
      config: any pretraining config; its data is not read.
      quick: ask about the choices together; one by one only if something fails.
      only: groups of checks to run (`GROUPS`); none runs all.
      progress: called with each answer as it comes.

    Raises:
      ConfigError: for a group that does not exist, or a config without a model.
      ShardingError: when the config cannot be laid out at all.
      RuntimeError: when the process dies.
    """
    unknown = [name for name in only if name not in GROUPS]
    if unknown:
        raise config_room.ConfigError(
            f"there is no group of checks {unknown[0]!r}; use {', '.join(GROUPS)}"
        )
    request = {"config": dump_yaml(config), "quick": quick, "only": list(only)}
    with tempfile.TemporaryFile() as log:
        child = subprocess.Popen(
            (sys.executable, "-m", "fornax.plan.preflight.child"),
            env=environment.for_child(environment.virtual_cpus(_DEVICES)),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            start_new_session=True,  # Ctrl-C reaches the parent only, which ends the child
        )
        try:
            return _follow(child, request, progress, log)
        finally:
            _end(child)


def _follow(
    child: subprocess.Popen[bytes], request: Any, progress: Callable[[Check], None], log: Any
) -> Report:
    for event in _events(child, request):
        content = event["content"]
        match event["event"]:
            case "check":
                progress(check_from(content))
            case "report":
                return Report.from_mapping(content)
            case "error":
                kind = getattr(config_room, content["type"], FornaxError)
                raise kind(content["message"])
    code = child.wait()
    log.seek(0)
    said = log.read().decode(errors="replace").strip()[-2000:]
    raise RuntimeError(f"the process of the preflight ended with exit code {code}: {said}")


def _events(child: subprocess.Popen[bytes], request: Any) -> Iterator[dict[str, Any]]:
    assert child.stdin is not None
    assert child.stdout is not None
    with contextlib.suppress(BrokenPipeError):  # it died at once: told with its exit code
        child.stdin.write(json.dumps(request).encode())
        child.stdin.close()
    for line in child.stdout:
        yield json.loads(line)


def _end(child: subprocess.Popen[bytes]) -> None:
    """Leave no process behind, whatever happened."""
    for stream in (child.stdin, child.stdout):
        with contextlib.suppress(OSError):
            if stream is not None:
                stream.close()
    if child.poll() is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
    child.wait()
