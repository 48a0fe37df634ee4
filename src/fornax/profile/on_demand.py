"""Captures of a running server, asked for one at a time; each ends by itself.

Of a server of several processes all capture: process 0 is asked, chooses the folder's name, and
tells the others through the same channel as all else (`fornax.mesh.group`).
"""

import contextlib
import datetime
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fornax.config.errors import ClusterError, ProfileError
from fornax.config.frames import LinkError
from fornax.mesh.group import Leader, Member
from fornax.profile.capture import Capture, CaptureOptions

__all__ = ["CAPTURE", "FollowedCaptures", "OnDemand"]

CAPTURE = "capture"
"""The operation by which the others are notified."""
_WRITING_SECONDS = 60.0


class OnDemand:
    """Starts and stops the captures of a server, which all go into one folder.

    Calls take up to half a second, and may come from any thread.
    """

    def __init__(self, directory: Path, leader: Leader | None = None) -> None:
        """Captures nothing yet.

        Args:
          directory: made with the first capture.
          leader: tells the other processes of the server; None: there are none.
        """
        self._directory = directory
        self._leader = leader
        self._capture: Capture | None = None
        self._folder: Path | None = None
        self._turn = threading.Lock()

    @property
    def running(self) -> Path | None:
        """Where the capture that runs goes; None while none does."""
        capture = self._capture
        return self._folder if capture is not None and capture.running else None

    def start(self, seconds: float) -> Path:
        """Begin a capture that ends after this many seconds; returns its folder.

        Raises:
          ProfileError: one runs already, or the folder cannot be written.
        """
        with self._turn:
            if self.running is not None:
                raise ProfileError(
                    f"a profile runs already, into {self.running}; stop it or wait for its end"
                )
            now = datetime.datetime.now().strftime("%Y_%m_%d_%H_%M_%S_%f")
            capture = Capture(self._directory, CaptureOptions(seconds=seconds, folder=now))
            capture.start()
            self._capture = capture
            self._folder = self._directory / "plugins" / "profile" / now
            self._tell(folder=now, seconds=seconds)
            return self._folder

    def stop(self) -> Path:
        """End the capture that runs, or that has ended by itself since it was started; returns its
        folder, which is complete.

        Raises:
          ProfileError: none runs, or it could not be written, in one of the processes.
        """
        with self._turn:
            capture, self._capture = self._capture, None
            if capture is None:
                raise ProfileError("no profile runs; start one")
            try:
                self._tell(folder=None)
            finally:
                folder = capture.stop()
            self._wait(folder)
            return folder

    def close(self) -> None:
        """End what runs, when the server stops; the others do it by themselves."""
        with self._turn:
            capture, self._capture = self._capture, None
            if capture is not None:
                capture.stop()

    def _tell(self, **facts: object) -> None:
        if self._leader is not None:
            try:
                self._leader.tell(CAPTURE, **facts)
            except LinkError as error:
                raise ProfileError(f"the profile is of process 0 alone: {error}") from error

    def _wait(self, folder: Path) -> None:
        """Until the others have written."""
        if self._leader is None:
            return
        try:
            self._leader.wait(_written(folder.name), _WRITING_SECONDS)
        except TimeoutError:
            why = f"another process has not written it after {_WRITING_SECONDS:g} s"
        except (ClusterError, LinkError) as error:
            why = str(error)
        else:
            return
        raise ProfileError(f"the profile in {folder} lacks a process: {why}")


class FollowedCaptures:
    """In another process of a server: captures what process 0 does, under the same name."""

    def __init__(self, directory: Path | None, process_0: Member) -> None:
        """Captures nothing yet.

        Args:
          directory: this process's own, best one that all share; None: it captures nothing.
        """
        self._directory = directory
        self._process_0 = process_0
        self._capture: Capture | None = None
        self._name = ""
        self._refused = ""

    def carry_out(self, facts: Mapping[str, Any]) -> None:
        """Begin the capture that the facts of an operation name, or end the one that runs and
        report that it is written, or why not.

        Raises:
          LinkError: process 0 is gone.
        """
        if facts["folder"] is not None:
            self._name, self._refused = facts["folder"], self._start(facts)
            return
        refused, capture, self._capture = self._refused, self._capture, None
        if capture is not None:
            try:
                capture.stop()
            except ProfileError as error:
                refused = str(error)
        self._process_0.report(_written(self._name), refused or None)

    def _start(self, facts: Mapping[str, Any]) -> str:
        """Begin; why it cannot be, if it cannot."""
        if self._directory is None:
            return "it was started without a folder for profiles (profile_dir)"
        options = CaptureOptions(seconds=facts["seconds"], folder=facts["folder"])
        capture = Capture(self._directory, options)
        try:
            capture.start()
        except ProfileError as error:
            return str(error)
        self._capture = capture
        return ""

    def close(self) -> None:
        """End what runs; process 0 is not notified any more."""
        if self._capture is not None:
            with contextlib.suppress(ProfileError):
                self._capture.stop()


def _written(name: str) -> str:
    return f"capture {name}"
