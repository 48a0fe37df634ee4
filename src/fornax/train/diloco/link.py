"""A rank's connection to the exchange, and which slice of how many it belongs to."""

import socket
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fornax.config import environment
from fornax.config.errors import ClusterError, ConfigError
from fornax.config.frames import Frame, Kind, LinkError, receive, send

__all__ = ["Link", "SlicePlace", "find_slice"]

_CONNECT_SECONDS = 30.0


@dataclass(frozen=True, kw_only=True)
class SlicePlace:
    """Which slice this process belongs to, and where slices meet."""

    index: int
    count: int
    address: str
    """host:port of the exchange."""
    token: str


def find_slice() -> SlicePlace | None:
    """What the environment says; None where it says nothing.

    Raises:
      ConfigError: for variables that are not complete, or no such slice.
    """
    said = environment.slices()
    if not said:
        return None
    try:
        index, count = int(said["FORNAX_SLICE"]), int(said["FORNAX_NUM_SLICES"])
        address, token = said["FORNAX_EXCHANGE"], said["FORNAX_EXCHANGE_TOKEN"]
        if not 0 <= index < count or not address.rpartition(":")[2].isdigit():
            raise ValueError
    except (KeyError, ValueError):
        shown = ", ".join(f"{k}={v}" for k, v in said.items() if "TOKEN" not in k)
        raise ConfigError(
            f"a slice of a DiLoCo run needs FORNAX_SLICE below FORNAX_NUM_SLICES, FORNAX_EXCHANGE "
            f"(host:port) and FORNAX_EXCHANGE_TOKEN, and has {shown}; fornax launch --slices sets "
            "all four"
        ) from None
    return SlicePlace(index=index, count=count, address=address, token=token)


class Link:
    """One connection; every method blocks."""

    def __init__(
        self, place: SlicePlace, *, rank: int, ranks: int, timeout: float, join_timeout: float
    ) -> None:
        """Connect nothing yet.

        Args:
          place: which slice, and where the exchange is.
          rank: this process, within its slice.
          ranks: processes of the slice.
          timeout: seconds that a round waits for slices after the first has come.
          join_timeout: seconds that slices wait for others before they begin without them.
        """
        self.place = place
        self._rank, self._ranks = rank, ranks
        self._timeouts = {"timeout": timeout, "join_timeout": join_timeout}
        self._socket: socket.socket | None = None

    def join(self, steps: list[int], same: Mapping[str, str]) -> int | None:
        """Connect, repeatedly if need be, and ask for a place.

        Args:
          steps: checkpoints that the slice could begin at, 0 for the beginning.
          same: what all slices must have in common.

        Returns:
          The checkpoint that all slices begin at; None: the others train, catch up with them.

        Raises:
          ClusterError: when the exchange refuses this slice, or cannot be reached.
          LinkError: when it went away meanwhile.
        """
        self.close()
        host, _, port = self.place.address.rpartition(":")
        try:
            self._socket = socket.create_connection((host, int(port)), _CONNECT_SECONDS)
        except OSError as error:
            raise ClusterError(
                f"the exchange of the slices at {self.place.address} cannot be reached ({error}); "
                "start the slices with fornax launch --slices"
            ) from error
        self._socket.settimeout(None)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        facts = {
            "token": self.place.token,
            "slices": self.place.count,
            "ranks": self._ranks,
            "steps": steps,
            "same": dict(same),
            **self._timeouts,
        }
        self.send(Kind.JOIN, facts=facts)
        return self._receive(Kind.PLACE).facts["step"]

    def ready(self, digest: str) -> Frame:
        """Say that the state is loaded; returns GO, or the STATE to take over.

        Raises:
          ClusterError: when the slices' common parameters differ.
          LinkError: when the exchange let this slice go.
        """
        self.send(Kind.READY, facts={"digest": digest})
        return self._receive(Kind.GO, Kind.STATE)

    def exchange(self, number: int, body: bytes) -> Frame:
        """Give this slice's change in a round, and wait for those of all that take part.

        Raises:
          LinkError: when the exchange let this slice go.
        """
        self.send(Kind.CONTRIBUTION, number=number, body=body)
        return self._receive(Kind.RESULT)

    def send(
        self,
        kind: Kind,
        *,
        number: int = 0,
        facts: Mapping[str, Any] | None = None,
        body: bytes = b"",
    ) -> None:
        """Send a frame.

        Raises:
          LinkError: when the exchange is gone.
        """
        if self._socket is None:
            raise LinkError("the connection to the exchange is closed")
        send(
            self._socket,
            Frame(
                kind=kind,
                slice=self.place.index,
                rank=self._rank,
                round=number,
                facts=facts or {},
                body=body,
            ),
        )

    def _receive(self, *wanted: Kind) -> Frame:
        if self._socket is None:
            raise LinkError("the connection to the exchange is closed")
        frame = receive(self._socket)
        if frame.kind is Kind.REFUSED:
            raise ClusterError(str(frame.facts["why"]))
        if frame.kind not in wanted:
            raise LinkError(f"the exchange said {frame.kind.name} out of turn")
        return frame

    def close(self) -> None:
        """End the connection."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None
