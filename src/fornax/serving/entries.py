"""Models of the repository that are no bundles: made before the start, run beside the others."""

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from fornax.config import FornaxError, ServingCode, ServingError
from fornax.serving.entry import Entry, EntryFactory
from fornax.serving.entry_model import VERSION, EntryModel
from fornax.serving.events import Events, StateChange
from fornax.serving.lifecycle import IndexEntry, State
from fornax.serving.repository import scan
from fornax.serving.types import InferRequest, InferResult

__all__ = ["Entries"]

_log = logging.getLogger("fornax.serving")


class Entries:
    """The entries of a repository. One whose settings are wrong is listed with the reason.

    Raises:
      ServingError: the repository cannot be read.
    """

    def __init__(self, root: Path | None, factories: Mapping[str, EntryFactory], events: Events):
        self.entries: dict[str, Entry] = {}
        self.models: dict[str, EntryModel] = {}
        self._events = events
        self._states: dict[str, State] = {}
        self._reasons: dict[str, str] = {}
        self._broken: dict[str, str] = {}
        self._lock = asyncio.Lock()
        if root is None or not factories:
            return
        for name, folder in scan(root, frozenset(factories)).items():
            if folder.type in factories and not folder.problem:
                self._make(name, factories[folder.type], folder.path, folder.entry)

    def _make(
        self, name: str, factory: EntryFactory, path: Path, settings: Mapping[str, Any]
    ) -> None:
        try:
            entry = factory(name, path, settings)
        except FornaxError as error:
            self._broken[name] = str(error)
            return
        self.entries[name], self.models[name] = entry, EntryModel(entry)
        self._states[name] = State.LOADING  # or so it must seem until `start` says otherwise

    def ready(self) -> bool:
        """Whether all of them take requests, those unloaded by request apart."""
        return not self._broken and all(
            each.ready() or self._reasons.get(name) == _UNLOADED
            for name, each in self.entries.items()
        )

    def index(self) -> list[IndexEntry]:
        """A line for each."""
        lines = [self._line(name, each) for name, each in self.entries.items()]
        for name, reason in self._broken.items():
            lines.append(IndexEntry(name, VERSION, State.UNAVAILABLE.value, reason))
        return sorted(lines, key=lambda line: line.name)

    def _line(self, name: str, entry: Entry) -> IndexEntry:
        state = self._states[name]
        if state is State.READY and not entry.ready():
            state = State.UNAVAILABLE
        reason = "" if state is State.READY else self._reason(name)
        return IndexEntry(name, VERSION, state.value, reason)

    def _reason(self, name: str) -> str:
        """Why an entry is not ready: what its start came to, before what it says itself."""
        if self._states[name] is State.LOADING:
            return ""
        return self._reasons.get(name, "") or self.entries[name].reason()

    async def start(self, wanted: Callable[[str], bool]) -> None:
        """Start those wanted, one after another; one that fails keeps no other from starting."""
        for name in self.entries:
            if not wanted(name):
                self._states[name], self._reasons[name] = State.UNAVAILABLE, _UNLOADED
        for name, reason in self._broken.items():
            self._events.tell_state(StateChange(name, VERSION, State.UNAVAILABLE.value, reason))
        for name in self.entries:
            if self._states[name] is not State.LOADING:  # not wanted, or unloaded meanwhile
                continue
            try:
                await self.load(name)
            except FornaxError:
                continue  # its reason is in the index and the log

    async def load(self, name: str) -> None:
        """Start one.

        Raises:
          FornaxError: it cannot be served.
        """
        async with self._lock:
            if self._states[name] is State.READY:
                return
            started = time.monotonic()
            self._enter(name, State.LOADING)
            try:
                await self.entries[name].start()
            except Exception as error:
                reason = str(error)
                if not isinstance(error, FornaxError):
                    reason = f"{type(error).__name__}: {error}"
                    _log.error("%s did not start", name, exc_info=error)
                self._enter(name, State.UNAVAILABLE, reason)
                raise ServingError(_code(error), reason) from error
            self._enter(name, State.READY, seconds=time.monotonic() - started)

    async def unload(self, name: str, drain_seconds: float = 60.0) -> None:
        """Stop one, once it has answered what runs."""
        async with self._lock:
            if self._states[name] is State.READY:
                self._enter(name, State.UNLOADING)
                await self.entries[name].stop(drain_seconds)
            self._enter(name, State.UNAVAILABLE, _UNLOADED)

    async def stop(self, drain_seconds: float) -> None:
        """Stop all of them."""
        names = [name for name, state in self._states.items() if state is State.READY]
        for name in names:
            await self.unload(name, drain_seconds)

    def submit(self, request: InferRequest) -> "asyncio.Future[InferResult]":
        """Have the entry that a request names answer it.

        Raises:
          ServingError: it is not ready, or has no such version.
        """
        entry = self.entries[request.model]
        if request.version not in ("", VERSION):
            raise ServingError(
                ServingCode.NOT_FOUND,
                f"{request.model} has no version {request.version!r}; it has {VERSION}",
            )
        if self._states[request.model] is not State.READY or not entry.ready():
            reason = self._reason(request.model) or "it is loading"
            raise ServingError(ServingCode.UNAVAILABLE, f"{request.model} is not ready: {reason}")
        answer = asyncio.ensure_future(self.models[request.model].infer(request))
        answer.add_done_callback(lambda done: self._tell(request, done))
        return answer

    def _tell(self, request: InferRequest, done: "asyncio.Future[InferResult]") -> None:
        if done.cancelled():
            outcome = ServingError(ServingCode.CANCELLED, "the client went away")
            self._events.tell_finished(request, outcome)
        else:
            self._events.tell_finished(request, done.exception() or done.result())

    def _enter(self, name: str, state: State, reason: str = "", seconds: float = 0.0) -> None:
        self._states[name], self._reasons[name] = state, reason
        self._events.tell_state(StateChange(name, VERSION, state.value, reason, seconds))


_UNLOADED = "it was unloaded by request; load it to serve it again"


def _code(error: Exception) -> ServingCode:
    return error.code if isinstance(error, ServingError) else ServingCode.FAILED_PRECONDITION
