"""All processes of a run meet before jax joins them, so that a missing one is an error by name.

jax's own client ends the process from C++ when a peer does not come. Meeting first, over a plain
socket at the coordinator's address, turns that into an exception that says who is missing.

A process says one line, `fornax-join COUNT NUMBER`, and is told to go when all have come. A process
that connects and says anything else, or nothing (a port scanner, a health check), is ignored.
"""

import re
import selectors
import socket
import time
from dataclasses import dataclass, field

from fornax.config.errors import ClusterError

__all__ = ["meet"]

_GO = b"go"
_HELLO = re.compile(rb"fornax-join (\d{1,9}) (\d{1,9})\n")
_LONGEST_HELLO = 40
_MOST_STRANGERS = 256
_RETRY_SECONDS = 0.2


def meet(address: str, count: int, process_id: int, timeout: float) -> None:
    """Return once all `count` processes have called this; process 0 listens at `address`.

    Args:
      address: host:port of process 0.
      count: how many processes must come.
      process_id: this process's number, 0 to count - 1.
      timeout: seconds to wait.

    Raises:
      ClusterError: for an address that is none, a number that came twice, or processes that did
        not come in time; the message names them.
    """
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        raise ClusterError(f"coordinator {address!r} is not host:port, such as 127.0.0.1:8476")
    deadline = time.monotonic() + timeout
    if process_id == 0:
        _gather(host, int(port), count, deadline, timeout)
    else:
        _report(host, int(port), count, process_id, deadline, timeout)


def _gather(host: str, port: int, count: int, deadline: float, timeout: float) -> None:
    interface = host if host in ("localhost", "127.0.0.1") else ""
    try:
        listener = socket.create_server((interface, port), backlog=count + _MOST_STRANGERS)
    except OSError as error:
        raise ClusterError(
            f"process 0 cannot listen at {host}:{port} ({error.strerror}); another run may hold "
            "the port: choose another coordinator port"
        ) from error
    with listener, _Gathering(listener, count) as gathering:
        while len(gathering.joined) < count - 1:
            left = deadline - time.monotonic()
            if left <= 0:
                missing = [n for n in range(1, count) if n not in gathering.joined]
                raise ClusterError(
                    f"process {', '.join(map(str, missing))} of {count} did not join within "
                    f"{timeout:g} s; start all {count} processes with the same coordinator, or "
                    "set num_processes to how many there are"
                )
            gathering.listen(left)
        gathering.go()


@dataclass
class _Gathering:
    """The connections to process 0: those that joined, and strangers that have not yet spoken."""

    listener: socket.socket
    count: int
    joined: dict[int, socket.socket] = field(default_factory=dict)
    _strangers: dict[socket.socket, bytes] = field(default_factory=dict)

    def __enter__(self) -> "_Gathering":
        self._selector = selectors.DefaultSelector()
        self.listener.setblocking(False)
        self._selector.register(self.listener, selectors.EVENT_READ)
        return self

    def __exit__(self, *exception: object) -> None:
        for peer in (*self._strangers, *self.joined.values()):
            peer.close()
        self._selector.close()

    def listen(self, seconds: float) -> None:
        """Take what comes within `seconds`.

        Raises:
          ClusterError: for a number that came twice, or a process of another count.
        """
        for key, _ in self._selector.select(seconds):
            peer = key.fileobj
            assert isinstance(peer, socket.socket)
            if peer is self.listener:
                self._accept()
            elif peer in self._strangers:
                self._hear(peer)
            elif (number := self._number(peer)) is not None:
                # A process says nothing after its line: it died while joining, and may come again.
                del self.joined[number]
                self._close(peer)

    def go(self) -> None:
        """Tell all that joined."""
        for peer in self.joined.values():
            peer.setblocking(True)
            peer.sendall(_GO)

    def _accept(self) -> None:
        try:
            peer, _ = self.listener.accept()
        except OSError:
            return  # it went away again
        peer.setblocking(False)
        if len(self._strangers) == _MOST_STRANGERS:
            oldest = next(iter(self._strangers))
            del self._strangers[oldest]
            self._close(oldest)
        self._strangers[peer] = b""
        self._selector.register(peer, selectors.EVENT_READ)

    def _hear(self, peer: socket.socket) -> None:
        try:
            heard = peer.recv(_LONGEST_HELLO)
        except OSError:
            heard = b""
        said = self._strangers.pop(peer) + heard
        hello = _HELLO.fullmatch(said)
        if hello is not None:
            self._join(peer, int(hello[1]), int(hello[2]))
        elif heard and b"\n" not in said and len(said) < _LONGEST_HELLO:
            self._strangers[peer] = said
        else:
            self._close(peer)

    def _join(self, peer: socket.socket, count: int, number: int) -> None:
        if _ended(peer):
            self._close(peer)
            return
        if number in self.joined and _ended(self.joined[number]):
            self._close(self.joined.pop(number))
        if count != self.count or number in self.joined or not 0 < number < count:
            self._close(peer)
            raise ClusterError(
                f"process number {number} of {count} joined twice, or does not belong to this run "
                f"of {self.count} processes; number the processes 0 to {self.count - 1}, each once"
            )
        self.joined[number] = peer

    def _number(self, peer: socket.socket) -> int | None:
        return next((n for n, other in self.joined.items() if other is peer), None)

    def _close(self, peer: socket.socket) -> None:
        self._selector.unregister(peer)
        peer.close()


def _ended(peer: socket.socket) -> bool:
    """Whether a process that has said its line has died since: it would say no more."""
    try:
        peer.recv(1, socket.MSG_PEEK)
    except BlockingIOError:
        return False
    except OSError:
        pass
    return True


def _report(
    host: str, port: int, count: int, process_id: int, deadline: float, timeout: float
) -> None:
    while time.monotonic() < deadline:
        try:
            with socket.create_connection((host, port), timeout=_RETRY_SECONDS * 5) as peer:
                peer.sendall(f"fornax-join {count} {process_id}\n".encode())
                peer.settimeout(max(0.01, deadline - time.monotonic()))
                if peer.recv(len(_GO)) == _GO:
                    return
        except OSError:
            pass  # process 0 has not started to listen, or its listener closed: try until deadline
        time.sleep(_RETRY_SECONDS)
    raise ClusterError(
        f"process {process_id} of {count} could not join the run at {host}:{port} within "
        f"{timeout:g} s; start all {count} processes, and check that the address is process 0's "
        "and reachable"
    )
