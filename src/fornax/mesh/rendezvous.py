"""All processes of a run meet before jax joins them, so that a missing one is an error by name.

jax's own client ends the process from C++ when a peer does not come. Meeting first, over a plain
socket at the coordinator's address, turns that into an exception that says who is missing.
"""

import socket
import time

from fornax.config.errors import ClusterError

__all__ = ["meet"]

_GO = b"go"
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
    peers: dict[int, socket.socket] = {}
    interface = host if host in ("localhost", "127.0.0.1") else ""
    try:
        listener = socket.create_server((interface, port), backlog=count)
    except OSError as error:
        raise ClusterError(
            f"process 0 cannot listen at {host}:{port} ({error.strerror}); another run may hold "
            "the port: choose another coordinator port"
        ) from error
    with listener:
        while len(peers) < count - 1:
            listener.settimeout(max(0.01, deadline - time.monotonic()))
            try:
                peer, _ = listener.accept()
                peer.settimeout(5.0)
                number = int(peer.recv(16) or b"-1")
            except TimeoutError:
                missing = [n for n in range(1, count) if n not in peers]
                if time.monotonic() < deadline:
                    continue
                raise ClusterError(
                    f"process {', '.join(map(str, missing))} of {count} did not join within "
                    f"{timeout:g} s; start all {count} processes with the same coordinator, or "
                    "set num_processes to how many there are"
                ) from None
            except (OSError, ValueError):
                continue  # a port scanner, or a peer that died while joining and comes again
            if number in peers or not 0 < number < count:
                raise ClusterError(
                    f"process number {number} joined twice or is not below {count}; number the "
                    f"processes 0 to {count - 1}, each once"
                )
            peers[number] = peer
    for peer in peers.values():
        with peer:
            peer.sendall(_GO)


def _report(
    host: str, port: int, count: int, process_id: int, deadline: float, timeout: float
) -> None:
    while time.monotonic() < deadline:
        try:
            with socket.create_connection((host, port), timeout=_RETRY_SECONDS * 5) as peer:
                peer.sendall(str(process_id).encode())
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
