"""`Server`: replicas and their router, served from a thread of a Python program."""

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import uvloop

from fornax.cluster.ray_engine import RayEngine
from fornax.cluster.routing.pool import RoutingConfig
from fornax.cluster.routing.run import opened_router
from fornax.cluster.routing.service import Service
from fornax.cluster.routing.status import ServingStatus, read_serving_status
from fornax.cluster.status import read_events
from fornax.config.errors import ClusterError

__all__ = ["Server"]

_POLL_SECONDS = 0.05


class Server:
    """A model, or a folder of models, that replicas serve behind one address."""

    def __init__(
        self,
        service: Callable[[Path], Service],
        run_dir: Path,
        *,
        replicas: int,
        hosts: int,
        config: RoutingConfig | None,
        engine: RayEngine | None,
    ) -> None:
        """Listen; see `Cluster.serve`.

        Raises:
          ClusterError, ConfigError: see `launch_replicas`.
        """
        self.run_dir = run_dir
        self._code: int | None = None
        self._error: Exception | None = None
        self._listens = threading.Event()
        with contextlib.ExitStack() as stack:
            self._router = stack.enter_context(
                opened_router(
                    service,
                    run_dir,
                    replicas=replicas,
                    hosts=hosts,
                    config=config,
                    engine=engine,
                    announce=lambda line: self._listens.set(),  # the first one says where
                    in_process=True,
                )
            )
            self._thread = threading.Thread(
                target=self._work, args=(stack.pop_all(),), name=f"server {run_dir}", daemon=True
            )
            self._thread.start()
        self._listens.wait()
        if self._error is not None:
            self._thread.join()
            raise self._error

    @property
    def address(self) -> str:
        """Where clients reach it, `http://HOST:PORT`; over gRPC see `status`."""
        return self.status().url

    def status(self) -> ServingStatus:
        """How it fares, and each replica."""
        return read_serving_status(self.run_dir)

    def is_ready(self, replicas: int = 1) -> bool:
        """Whether this many replicas take requests."""
        return [each.phase for each in self.status().replicas].count("ready") >= replicas

    def wait_ready(self, replicas: int | None = None, seconds: float | None = None) -> None:
        """Until this many replicas take requests; None: all.

        Raises:
          TimeoutError: when they do not after this many seconds.
          ClusterError: when the server ended before.
        """
        wanted = self._router.placer.count if replicas is None else replicas
        until = None if seconds is None else time.monotonic() + seconds
        while not self.is_ready(wanted):
            self._check_alive("were ready")
            if until is not None and time.monotonic() > until:
                raise TimeoutError(
                    f"{self.run_dir}: {wanted} replicas are not ready after {seconds:g} s"
                )
            time.sleep(_POLL_SECONDS)

    def rolling_restart(self) -> None:
        """Restart one replica after another, without a failed request; returns when all are done.

        Raises:
          ClusterError: when a replica does not start again, or another restart is under way; the
            others continue as before.
        """
        before = len(read_events(self.run_dir))
        self._call(self._router.roll)
        while not (said := self._rolling_since(before)):
            self._check_alive("were restarted")
            time.sleep(_POLL_SECONDS)
        if said["rolling"] != "done":
            raise ClusterError(f"{self.run_dir}: {said['why']}")

    def wait(self, seconds: float | None = None) -> int:
        """Until it ends; its exit code, 0 after `stop`, 2 for a mistake of yours.

        Raises:
          TimeoutError: when it is still running after this many seconds.
          ClusterError: when no replica started.
        """
        self._thread.join(seconds)
        if self._thread.is_alive():
            raise TimeoutError(f"{self.run_dir} is still running after {seconds:g} s")
        if self._error is not None:
            raise self._error
        assert self._code is not None
        return self._code

    def stop(self) -> int:
        """Let requests finish and end the replicas, unless they have ended; the exit code.

        Raises:
          ClusterError: see `wait`.
        """
        self._call(self._router.stop)
        return self.wait()

    def _work(self, held: contextlib.ExitStack) -> None:
        try:
            with held:
                self._code = uvloop.run(self._serve())
        except Exception as error:
            self._error = error
        finally:
            self._listens.set()

    async def _serve(self) -> int:
        self._loop = asyncio.get_running_loop()
        return await self._router.run()

    def _call(self, function: Callable[[], None]) -> None:
        with contextlib.suppress(RuntimeError):  # the loop has ended
            self._loop.call_soon_threadsafe(function)

    def _rolling_since(self, before: int) -> dict[str, Any] | None:
        """The event of a rolling restart's end, among those after this many."""
        ends = ("done", "stopped")
        found = (e for e in read_events(self.run_dir)[before:] if e.get("rolling") in ends)
        return next(found, None)

    def _check_alive(self, what: str) -> None:
        if not self._thread.is_alive():
            why = f": {self._error}" if self._error else f", with exit code {self._code}"
            raise ClusterError(f"{self.run_dir} ended before the replicas {what}{why}")
