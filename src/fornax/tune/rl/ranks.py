"""Rounds for a trainer of several processes: process 0 has them drawn, all train on them.

The others wait at a socket and not in a collective, which would time out while a round is drawn.
Parameters for samplers are gathered from all processes.
"""

import contextlib
import hmac
import secrets
import socket
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

import jax
import numpy as np
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

from fornax.config import environment, errors
from fornax.config.addresses import read_addresses
from fornax.config.credentials import Credentials, of_run
from fornax.config.errors import ClusterError, ConfigError, FornaxError, GroupLostError
from fornax.config.frames import Frame, Kind, LinkError, receive, send
from fornax.mesh import hosts
from fornax.tune.rollout import Completion, Sampler, SamplerStats, SampleSettings
from fornax.tune.rollout.sampler import Weights
from fornax.tune.rollout.segments import HostWeights
from fornax.tune.rollout.shards import arrays_frame, frame_arrays

__all__ = ["NoSampler", "RoundLink", "find_samplers", "host_weights"]

_JOIN_SECONDS = 60.0

T = TypeVar("T")
Make = Callable[[Sampler, int], T]
"""(sampler, number) to a round."""


def find_samplers() -> tuple[Sequence[str], Credentials] | None:
    """Addresses and credentials of the samplers that `fornax launch --samplers` started, if it did.

    Raises:
      ConfigError: for variables that are not complete.
    """
    text, credentials = environment.samplers(), of_run()
    if not text:
        return None
    addresses = read_addresses(text)
    if (
        not addresses
        or credentials is None
        or not all(each.rpartition(":")[2].isdigit() for each in addresses)
    ):
        raise ConfigError(
            f"FORNAX_SAMPLERS={text} must be host:port, with commas between, or @FILE, and this "
            "process must have the token that they ask for, which fornax launch --samplers gives "
            "to the processes that it starts: run the command by it"
        )
    return addresses, credentials


def host_weights(state: nnx.State, *, keep: bool) -> HostWeights:
    """Path to array, on the host, of parameters that may lie on the devices of all processes.

    All processes call it, in the same order. Arrays of CPU devices are not copied: they are for use
    before the next step, which writes over them.

    Args:
      state: of the parameters.
      keep: whether this process needs them; nothing is copied where it does not.
    """
    found: dict[tuple[str | int, ...], np.ndarray] = {}
    for path, leaf in nnx.to_flat_state(state):
        value = leaf.get_value()
        if not (value.is_fully_addressable or value.is_fully_replicated):
            value = jax.jit(lambda x: x, out_shardings=_everywhere(value))(value)
        if keep:
            whole = value if value.is_fully_addressable else value.addressable_data(0)
            found[tuple(map(_part, path))] = np.asarray(whole)
    return found


def _part(key: object) -> str | int:
    return key if isinstance(key, int) else str(key)


def _everywhere(value: jax.Array) -> NamedSharding:
    assert isinstance(value.sharding, NamedSharding)
    return NamedSharding(value.sharding.mesh, PartitionSpec())


class NoSampler:
    """What stands for the sampler in processes that draw nothing."""

    def __init__(self, interrupt: Callable[[], None]) -> None:
        """Let `interrupt` be what ends the wait for a round."""
        self.interrupt = interrupt

    def at(self, version: int) -> "NoSampler":
        """Versions are for process 0 to keep."""
        return self

    def update(self, params: Weights, version: int) -> None:
        """Weights are for process 0 to send."""

    def sample(
        self, prompts: Sequence[Sequence[int]], settings: SampleSettings, seeds: Sequence[int]
    ) -> list[list[Completion]]:
        """Process 0 draws."""
        raise ClusterError("process 0 has rollouts drawn, and this is another")

    def stats(self) -> SamplerStats:
        """Nothing is drawn."""
        return SamplerStats()

    def close(self) -> None:
        """Nothing is held."""


class RoundLink:
    """Connections from process 0 to the others, made by all of them together."""

    def __init__(self, *, loopback: bool) -> None:
        """Meet; all processes call this, in the main thread.

        Args:
          loopback: whether all processes are on this machine.

        Raises:
          GroupLostError: when another process does not come.
        """
        self._first = jax.process_index() == 0
        self._credentials = of_run() or Credentials(token="")  # of this meeting is the token below
        self._peers: list[socket.socket] = []
        self._lost = False
        self._closed = False
        self.interrupt: Callable[[], None] = lambda: None
        """Called on process 0 when another process is gone, from any thread."""
        listener: list[socket.socket] = []

        def listen() -> Mapping[str, str]:
            listener.append(socket.create_server(("127.0.0.1" if loopback else "", 0)))
            host = "127.0.0.1" if loopback else socket.gethostname()
            port = listener[0].getsockname()[1]
            return {"host": host, "port": str(port), "token": secrets.token_hex(16)}

        met = hosts.decide(listen)
        try:
            if self._first:
                self._accept(listener[0], met["token"])
            else:
                self._join(met)
        except (OSError, LinkError) as error:
            raise GroupLostError(
                f"process {jax.process_index()} cannot meet the others of the run ({error}); "
                "start all of them again"
            ) from error

    def maker(
        self,
        collect: Make[T],
        save: Callable[[T], Mapping[str, np.ndarray]],
        load: Callable[[Mapping[str, np.ndarray]], T],
    ) -> Make[T]:
        """What has a round in all processes that `collect` makes on process 0.

        Args:
          collect: makes a round, on process 0 alone.
          save: a round as arrays.
          load: what `save` took apart.
        """

        def make(sampler: Sampler, number: int) -> T:
            try:
                batch = collect(sampler, number)
            except FornaxError as error:
                if self._lost:
                    raise _lost_another(error) from error
                facts = {"kind": type(error).__name__, "message": str(error)}
                self._say(Frame(kind=Kind.REFUSED, facts=facts))
                raise
            self._say(arrays_frame(Kind.ROUND, save(batch), number=number))
            return batch

        return make if self._first else lambda sampler, number: load(self._receive(number))

    def close(self) -> None:
        """End the connections."""
        self._closed = True
        for peer in self._peers:
            with contextlib.suppress(OSError):
                peer.shutdown(socket.SHUT_RDWR)

    def _accept(self, listener: socket.socket, token: str) -> None:
        with listener:
            listener.settimeout(_JOIN_SECONDS)
            while len(self._peers) < jax.process_count() - 1:
                peer, _ = listener.accept()
                with contextlib.suppress(LinkError):
                    peer = self._credentials.accept(peer)
                    peer.settimeout(_JOIN_SECONDS)
                    first = receive(peer, longest=0)
                    given = str(first.facts.get("token", ""))
                    if hmac.compare_digest(given.encode(), token.encode()):
                        peer.settimeout(None)
                        self._peers.append(peer)
                        threading.Thread(target=self._watch, args=(peer,), daemon=True).start()
                        continue
                peer.close()

    def _join(self, met: Mapping[str, str]) -> None:
        peer = socket.create_connection((met["host"], int(met["port"])), timeout=_JOIN_SECONDS)
        peer = self._credentials.dial(peer)
        peer.settimeout(None)
        peer.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        self._peers.append(peer)
        send(peer, Frame(kind=Kind.JOIN, facts={"token": met["token"]}))

    def _watch(self, peer: socket.socket) -> None:
        """Until another process, which says nothing, is gone."""
        with contextlib.suppress(LinkError):
            receive(peer, longest=0)
        if not self._closed:
            self._lost = True
            self.interrupt()

    def _say(self, frame: Frame) -> None:
        try:
            for peer in self._peers:
                send(peer, frame)
        except LinkError as error:
            raise _lost_another(error) from error

    def _receive(self, number: int) -> Mapping[str, np.ndarray]:
        try:
            frame = receive(self._peers[0])
        except LinkError as error:
            raise _lost_another(error) from error
        if frame.kind is Kind.REFUSED:
            kind, message = frame.facts["kind"], frame.facts["message"]
            raise getattr(errors, kind, ClusterError)(f"process 0: {message}")
        if frame.facts["number"] != number:
            raise ClusterError(
                f"process 0 made round {frame.facts['number']} and this one waits for {number}"
            )
        return frame_arrays(frame)


def _lost_another(error: Exception) -> GroupLostError:
    return GroupLostError(
        f"process {jax.process_index()} lost another process of the run while a round was drawn "
        f"({error}); start all of them again: they resume from the newest checkpoint. fornax "
        "launch does so by itself"
    )
