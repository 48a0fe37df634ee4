"""A host of a launched run whose network passes through TCP proxies, which are cut at once.

Its connection to jax's coordination service, those of the collectives (Gloo) and those of the
agents' snapshots are between 127.0.0.1 and a proxy there. Gloo tells the others its own address by
way of the coordination service, as a `sockaddr_in`: the proxy of that connection puts a proxy's in
its place. Of two processes Gloo lets the one with the higher address connect, so the host is shown
below all others, at 0.0.0.0, which Linux takes for this machine, and sees the others above itself.

Once cut, nothing passes, nothing is closed and nobody is answered, as when a network loses all
packets.
"""

import contextlib
import gzip
import re
import selectors
import socket
import struct
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fornax.cluster.local import LocalLauncher
from fornax.config.worker_process import WorkerProcess

__all__ = ["ProxiedLauncher", "Proxies"]

_LOWEST, _HIGHEST = socket.inet_aton("0.0.0.0"), socket.inet_aton("127.255.255.254")
_SOCKADDR = re.compile(rb"\x02\x00(..)(....)(?=\x00{8})", re.DOTALL)
"""Family, port and address, and eight zeros."""
_CHUNK = 1 << 20
_PREFACE = len(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n")


class Proxies:
    """All proxies of one host, in one thread, until there is a file `cut`."""

    def __init__(self, folder: Path) -> None:
        """Begin with none."""
        self._folder = folder
        self._selector = selectors.DefaultSelector()
        self._known: dict[tuple[str, int], int] = {}
        self._lock = threading.Lock()
        threading.Thread(target=self._run, daemon=True).start()

    def of(self, what: str, address: str) -> str:
        """The address of a proxy that passes on to host:port; `what` it is for is noted."""
        host, _, port = address.rpartition(":")
        return f"127.0.0.1:{self._port(what, host, int(port))}"

    def _port(self, what: str, host: str, port: int) -> int:
        with self._lock:
            if (host, port) not in self._known:
                listener = socket.create_server(("127.0.0.1", 0))
                self._known[host, port] = listener.getsockname()[1]
                self._selector.register(listener, selectors.EVENT_READ, (what, host, port))
            return self._known[host, port]

    def _run(self) -> None:
        while not (self._folder / "cut").exists():
            for key, _ in self._selector.select(0.02):
                assert isinstance(key.fileobj, socket.socket)
                if isinstance(key.data, _Link):
                    self._pass(key.fileobj, key.data)
                else:
                    self._connect(key.fileobj, *key.data)

    def _connect(self, listener: socket.socket, what: str, host: str, port: int) -> None:
        near, _ = listener.accept()
        far = socket.create_connection((host, port))
        for each in (near, far):
            each.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        told = what == "coordination"
        for link in (
            _Calls(near, far, self._shown) if told else _Link(near, far),
            _Link(far, near),
        ):
            link.above = told
            self._selector.register(link.here, selectors.EVENT_READ, link)
        with (self._folder / "links").open("a") as file:
            file.write(f"{what}\n")

    def _pass(self, here: socket.socket, link: "_Link") -> None:
        content = b""
        with contextlib.suppress(OSError):
            content = here.recv(_CHUNK)
            link.pass_on(content)
        if not content:
            for each in (here, link.there):
                with contextlib.suppress(KeyError):
                    self._selector.unregister(each)
                each.close()

    def _shown(self, found: re.Match[bytes]) -> bytes:
        """The address that the host tells of itself, as others are to see it."""
        (port,) = struct.unpack("!H", found[1])
        proxy = self._port("collectives", socket.inet_ntoa(found[2]), port)
        return found[0][:2] + struct.pack("!H", proxy) + _LOWEST


class _Link:
    """What one end of a proxied connection says."""

    above = False

    def __init__(self, here: socket.socket, there: socket.socket) -> None:
        self.here, self.there = here, there

    def pass_on(self, content: bytes) -> None:
        self.there.sendall(_SOCKADDR.sub(_above, content) if self.above else content)


class _Calls(_Link):
    """The calls of the host to the coordination service: HTTP/2, in which gRPC's messages are
    compressed."""

    def __init__(self, here: socket.socket, there: socket.socket, shown: Any) -> None:
        super().__init__(here, there)
        self._shown, self._rest, self._begins = shown, b"", True

    def pass_on(self, content: bytes) -> None:
        self._rest += content
        if self._begins and len(self._rest) >= _PREFACE:
            self.there.sendall(self._rest[:_PREFACE])
            self._rest, self._begins = self._rest[_PREFACE:], False
        while not self._begins and len(self._rest) >= 9:
            size = int.from_bytes(self._rest[:3], "big")
            if len(self._rest) < 9 + size:
                return
            head, body = self._rest[3:9], self._rest[9 : 9 + size]
            self._rest = self._rest[9 + size :]
            if head[:1] == b"\0" and size > 5 and size == 5 + int.from_bytes(body[1:5], "big"):
                said = gzip.decompress(body[5:]) if body[:1] == b"\1" else body[5:]
                said = _SOCKADDR.sub(self._shown, said)
                body = b"\0" + len(said).to_bytes(4, "big") + said
            self.there.sendall(len(body).to_bytes(3, "big") + head + body)


def _above(found: re.Match[bytes]) -> bytes:
    """An address of another host, as the host is to see it."""
    return found[0][:4] + _HIGHEST


class ProxiedLauncher(LocalLauncher):
    """The first agent of rank 1, and its workers, have their network through proxies.

    What controller and agent say to each other does not pass them: `fornax.cluster.relay`.
    """

    def start(self, ranks: Sequence[int]) -> dict[int, WorkerProcess]:
        """See `Launcher`."""
        started = super().start(ranks)
        first = self.files.run_dir / "proxied"
        if 1 in started and not first.exists():
            first.touch()
            _proxied(started[1], Proxies(self.files.run_dir))
        return started


def _proxied(agent: WorkerProcess, proxies: Proxies) -> None:
    """Give an agent, and others of it, the addresses of proxies."""
    send, receive = agent.send, agent.receive

    def tell(message: Any) -> None:
        if message["kind"] == "start":
            at = proxies.of("coordination", message["coordinator"])
            message = {**message, "coordinator": at}
        elif message["kind"] == "peers":
            there = {n: proxies.of("snapshots", at) for n, at in message["addresses"].items()}
            message = {**message, "addresses": there}
        send(message)

    def hear(seconds: float | None = None) -> Any:
        message = receive(seconds)
        if message["kind"] == "listening":
            message["address"] = proxies.of("snapshots", message["address"])
        return message

    agent.send, agent.receive = tell, hear  # type: ignore[method-assign]
