"""Profiles of a running server on demand: started and stopped by a request, of bounded length."""

import asyncio
import datetime
import json
import logging
from pathlib import Path

from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.types import Receive, Scope, Send

from fornax.config import ServingCode, ServingError

__all__ = ["Profiler"]

_log = logging.getLogger("fornax.serving")
_PATH = "/v2/profile"


class Profiler:
    """`POST /v2/profile` starts jax's profiler for some seconds; see XProf for what it writes."""

    def __init__(self, folder: Path | None, longest: float):
        """Profiles go into `folder`; None: every request for one is refused."""
        self._folder, self._longest = folder, longest
        self.running: Path | None = None
        """Where the profile that runs goes."""
        self._ending: asyncio.Task[None] | None = None

    async def start(self, seconds: float) -> Path:
        """Start a profile that ends by itself; returns its folder.

        Raises:
          ServingError: profiles are off, one runs already, or it would be too long.
        """
        if self._folder is None:
            raise ServingError(
                ServingCode.FAILED_PRECONDITION,
                "this server makes no profiles; start it with --profile-dir DIR",
            )
        if not 0 < seconds <= self._longest:
            raise ServingError(
                ServingCode.INVALID_ARGUMENT,
                f"seconds={seconds:g} must be above 0 and at most {self._longest:g}, which is "
                "profile_max_seconds",
            )
        if self.running is not None:
            raise ServingError(
                ServingCode.FAILED_PRECONDITION,
                f"a profile runs already, into {self.running}; stop it or wait for its end",
            )
        import jax

        now = datetime.datetime.now(datetime.UTC)
        self.running = self._folder / now.strftime("%Y%m%d-%H%M%S-%f")
        try:
            # In a thread: the server goes on while the profiler starts.
            await asyncio.to_thread(jax.profiler.start_trace, str(self.running))
        except Exception as error:
            self.running = None
            raise ServingError(
                ServingCode.INTERNAL, f"the profiler did not start: {error}"
            ) from error
        self._ending = asyncio.create_task(self._end_after(seconds))
        _log.info("a profile of %g s runs, into %s", seconds, self.running)
        return self.running

    async def stop(self) -> Path:
        """End the profile that runs; returns its folder.

        Raises:
          ServingError: none runs, or it could not be written.
        """
        if self.running is None or self._ending is None:
            raise ServingError(ServingCode.FAILED_PRECONDITION, "no profile runs; start one")
        ending, self._ending = self._ending, None
        ending.cancel()
        return await self._end()

    async def close(self) -> None:
        """End what runs, when the server stops."""
        if self._ending is not None:
            await self.stop()

    async def _end_after(self, seconds: float) -> None:
        await asyncio.sleep(seconds)
        self._ending = None
        try:
            await self._end()
        except ServingError as error:
            _log.error("%s", error)

    async def _end(self) -> Path:
        import jax

        folder = self.running
        assert folder is not None  # its callers looked
        try:
            await asyncio.to_thread(jax.profiler.stop_trace)
        except Exception as error:
            raise ServingError(
                ServingCode.INTERNAL, f"the profile could not be written to {folder}: {error}"
            ) from error
        finally:
            self.running = None
        _log.info("a profile is in %s", folder)
        return folder

    async def app(self, scope: Scope, receive: Receive, send: Send) -> None:
        """`POST /v2/profile` with `{"seconds": 5}` starts one; `{"stop": true}` ends it."""
        try:
            if scope["method"] != "POST" or scope["path"] != _PATH:
                raise ServingError(ServingCode.NOT_FOUND, f"a profile is asked for by POST {_PATH}")
            folder, stopped = await self._answer(await Request(scope, receive).body())
            status, answer = 200, {"directory": str(folder), "running": not stopped}
        except ServingError as error:
            status, answer = error.code.http, {"error": str(error)}
        await JSONResponse(answer, status)(scope, receive, send)

    async def _answer(self, body: bytes) -> tuple[Path, bool]:
        try:
            asked = json.loads(body) if body else {}
        except ValueError as error:
            raise ServingError(
                ServingCode.INVALID_ARGUMENT, f"the body is not JSON: {error}"
            ) from None
        known = isinstance(asked, dict) and set(asked) <= {"seconds", "stop"}
        if not known or not isinstance(asked.get("stop", False), bool):
            raise ServingError(
                ServingCode.INVALID_ARGUMENT,
                'a profile takes {"seconds": 5}, or {"stop": true} to end it',
            )
        if asked.get("stop"):
            return await self.stop(), True
        seconds = asked.get("seconds", 5.0)
        if isinstance(seconds, bool) or not isinstance(seconds, int | float):
            raise ServingError(ServingCode.INVALID_ARGUMENT, "seconds is a number")
        return await self.start(float(seconds)), False
