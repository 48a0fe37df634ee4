"""Profiles of a running server on demand: started and stopped by a request, of bounded length."""

import asyncio
import json
import logging
from pathlib import Path

from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.types import Receive, Scope, Send

from fornax.config import ServingCode, ServingError
from fornax.config.errors import ProfileError
from fornax.mesh.group import Leader
from fornax.profile import OnDemand

__all__ = ["Profiler"]

_log = logging.getLogger("fornax.serving")
_PATH = "/v2/profile"


class Profiler:
    """`POST /v2/profile` captures a profile for some seconds; `fornax profile show` reads it."""

    def __init__(self, folder: Path | None, longest: float, leader: Leader | None = None):
        """Profiles go into `folder`; None: every request for one is refused. `leader` tells the
        other processes of the server, if there are any."""
        self._captures = None if folder is None else OnDemand(folder, leader)
        self._longest = longest

    @property
    def running(self) -> Path | None:
        """Where the profile that runs goes."""
        return None if self._captures is None else self._captures.running

    async def start(self, seconds: float) -> Path:
        """Start a profile that ends by itself; returns its folder.

        Raises:
          ServingError: profiles are off, one runs already, or it would be too long.
        """
        captures = self._enabled()
        if not 0 < seconds <= self._longest:
            raise ServingError(
                ServingCode.INVALID_ARGUMENT,
                f"seconds={seconds:g} must be above 0 and at most {self._longest:g}, which is "
                "profile_max_seconds",
            )
        try:
            # In a thread: the server continues while the profiler starts.
            folder = await asyncio.to_thread(captures.start, seconds)
        except ProfileError as error:
            raise ServingError(ServingCode.FAILED_PRECONDITION, str(error)) from error
        _log.info("a profile of %g s runs, into %s", seconds, folder)
        return folder

    async def stop(self) -> Path:
        """End the profile that runs; returns its folder.

        Raises:
          ServingError: profiles are off, none runs, or it could not be written.
        """
        try:
            folder = await asyncio.to_thread(self._enabled().stop)
        except ProfileError as error:
            raise ServingError(ServingCode.FAILED_PRECONDITION, str(error)) from error
        _log.info("a profile is in %s", folder)
        return folder

    async def close(self) -> None:
        """End what runs, when the server stops."""
        if self._captures is not None:
            try:
                await asyncio.to_thread(self._captures.close)
            except ProfileError as error:
                _log.error("%s", error)

    def _enabled(self) -> OnDemand:
        if self._captures is None:
            raise ServingError(
                ServingCode.FAILED_PRECONDITION,
                "this server makes no profiles; start it with --profile-dir DIR",
            )
        return self._captures

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
