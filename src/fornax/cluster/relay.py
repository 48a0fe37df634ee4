"""Between a host and the rest of the run: a process that a drill holds, to cut the host off.

It passes on what controller and agent say to each other, and forwards the worker's connections to
the coordination service over TCP. While it is held (SIGSTOP) nothing passes and nothing is closed,
as when a network loses all packets. Workers reach each other directly, as jax has them do.
"""

import contextlib
import socket
import threading
from multiprocessing.connection import Connection, wait

from fornax.config.worker_process import WorkerProcess, receive

__all__ = ["run"]

_BLOCK = 1 << 16


def run(controller: Connection) -> None:
    """The relay's process: until the controller or the agent is no more."""
    agent = WorkerProcess("fornax.cluster.agent:run")
    agent.send(receive(controller))
    while True:
        for ready in wait([controller, agent.connection]):
            if ready is agent.connection:
                controller.send_bytes(agent.connection.recv_bytes())
                continue
            message = receive(controller)
            if message["kind"] == "start":
                message["coordinator"] = _forward(message["coordinator"])
            agent.send(message)


def _forward(address: str) -> str:
    """An address of this process whose connections are passed on to `address`."""
    listener = socket.create_server(("127.0.0.1", 0))
    threading.Thread(target=_accept, args=(listener, address), daemon=True).start()
    return f"127.0.0.1:{listener.getsockname()[1]}"


def _accept(listener: socket.socket, address: str) -> None:
    host, _, port = address.rpartition(":")
    while True:
        near, _ = listener.accept()
        try:
            far = socket.create_connection((host, int(port)))
        except OSError:
            near.close()  # the service of an earlier group: it has ended
            continue
        for source, target in ((near, far), (far, near)):
            threading.Thread(target=_copy, args=(source, target), daemon=True).start()


def _copy(source: socket.socket, target: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while block := source.recv(_BLOCK):
            target.sendall(block)
    for each in (source, target):
        with contextlib.suppress(OSError):
            each.shutdown(socket.SHUT_RDWR)
