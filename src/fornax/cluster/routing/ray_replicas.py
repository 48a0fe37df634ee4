"""Replicas on Ray: it finds room for their processes, watches the nodes and carries what is said.

Each process has an actor, which starts it and says how it fares; it ends with its actor, and the
actor with its node or with this program. The router reaches a replica by its node's address.
"""

import contextlib
import os
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from fornax.cluster.ray_engine import RayEngine
from fornax.cluster.ray_nodes import (
    address_for,
    end_actor,
    host_nodes,
    own_address,
    room,
)
from fornax.cluster.replica_process import Ended, Place, ReplicaHost
from fornax.cluster.routing.replica import Handle, ProcessGroup, Program, group_variables
from fornax.config import environment
from fornax.config.errors import ClusterError

__all__ = ["RayReplicas"]

_LOCAL = "127.0.0.1"
_PLACED_SECONDS = 120.0
_ASK_SECONDS = 60.0
_STACK_SECONDS = 5.0
_REPORT_SECONDS = 1.0


@dataclass(frozen=True, kw_only=True)
class RayReplicas:
    """Starts replicas where a Ray cluster has room for them; see `Placer`.

    A replica of one process goes where Ray spreads them, the processes of a larger one near each
    other, all or none. Each takes accelerators where the cluster has some, else a CPU.
    """

    engine: RayEngine
    program: Program
    count: int
    hosts: int
    devices: int
    """Accelerators of a replica; 0: one per process."""
    closing: threading.Event = field(default_factory=threading.Event)

    def check_network(self) -> None:
        """Refuse nodes on other machines, unless their network is private.

        Raises:
          ClusterError: see `address_for`.
        """
        addresses = [node.address for node in host_nodes(self.engine.ray)]
        address_for(addresses, own_address(), private_network=self.engine.private_network)

    def start(self, number: int) -> Handle:
        """See `Placer`."""
        ray = self.engine.ray
        self.check_network()
        share = self.engine.share(self.devices // self.hosts)
        with contextlib.ExitStack() as undo:
            actors, release = self._actors(share)
            undo.callback(release)
            places = self._placed([each.place.remote() for each in actors], share)
            undo.pop_all()
        processes = [
            _RayProcess(ray, actor, place, release)
            for actor, place in zip(actors, places, strict=True)
        ]
        try:
            return self._begun(number, processes, places)
        except ray.exceptions.RayError as error:
            for each in processes:
                each.kill()
            raise ClusterError(f"its host was lost as it started: {_first_line(error)}") from error

    def give_up(self) -> None:
        """See `Placer`."""
        self.closing.set()

    def _actors(self, share: Mapping[str, float]) -> tuple[list[Any], Callable[[], None]]:
        """An actor a process; what takes their room back."""
        ray, given = self.engine.ray, (os.getcwd(), environment.of_server())
        others = {name: amount for name, amount in share.items() if name not in ("CPU", "GPU")}
        kind = ray.remote(concurrency_groups={"watch": 1})(ReplicaHost)

        def placed(strategy: Any) -> Any:
            options = kind.options(
                num_cpus=share.get("CPU", 0),
                num_gpus=share.get("GPU", 0),
                resources=others,
                max_restarts=0,
                scheduling_strategy=strategy,
            )
            return options.remote(*given)

        if self.hosts == 1:
            actor = placed("SPREAD")
            return [actor], lambda: ray.kill(actor, no_restart=True)
        group, on = room(ray, share, self.hosts)
        actors = [placed(on(rank)) for rank in range(self.hosts)]
        return actors, lambda: ray.util.remove_placement_group(group)

    def _placed(self, replies: list[Any], share: Mapping[str, float]) -> list["Place"]:
        """Where the actors are, once all have a place."""
        ray, until = self.engine.ray, time.monotonic() + _PLACED_SECONDS
        waiting = replies
        while waiting and time.monotonic() < until and not self.closing.is_set():
            _, waiting = ray.wait(waiting, num_returns=len(waiting), timeout=_REPORT_SECONDS)
        try:
            if not waiting:
                return ray.get(replies)
            why = f"Ray started no process for it in {_PLACED_SECONDS:g} s"
        except ray.exceptions.RayError as error:
            why = f"Ray started no actor for it: {_first_line(error)}"
        free = ray.available_resources()
        needs = ", ".join(f"{amount:g} {name}" for name, amount in share.items())
        has = ", ".join(f"{free.get(name, 0.0):g} {name}" for name in share)
        raise ClusterError(
            f"{why}; each of its processes ({self.hosts}) takes {needs}, and {has} is free. Launch "
            "fewer replicas, or add nodes"
        )

    def _begun(
        self, number: int, processes: list["_RayProcess"], places: list["Place"]
    ) -> ProcessGroup:
        here = own_address()
        hosts = [_LOCAL if place.address == here else place.address for place in places]
        together = len(set(hosts)) == 1
        http, grpc, coordinator = processes[0].ports(hosts[0], 3)
        meeting = f"{_LOCAL if together else places[0].address}:{coordinator}"
        files, credentials = self.program.files, self.program.credentials
        for rank, process in enumerate(processes):
            process.begin(
                self.program.entry,
                list(self.program.words(hosts[rank], http, grpc)),
                credentials=credentials.fields(),
                log=str(files.replica_log(number, rank).absolute()),
                stacks=str(files.replica_stacks(number, rank).absolute()),
                variables=group_variables(self.hosts, rank, meeting),
            )
        return ProcessGroup(hosts[0], http, grpc, processes, secure=bool(credentials.key))


class _RayProcess:
    """A replica's process behind an actor; see `Process`."""

    def __init__(self, ray: Any, actor: Any, place: Place, release: Callable[[], None]) -> None:
        """Nothing is started yet; `release` takes the room of all the replica's actors back."""
        self.pid = 0
        self._ray, self._actor, self._place, self._release = ray, actor, place, release
        self._ended: Ended | None = None
        self._stopped = self._killed = False
        self._line = ""

    def ports(self, host: str, count: int) -> list[int]:
        """Free ports of an address of its node."""
        return self._ray.get(self._actor.ports.remote(host, count), timeout=_ASK_SECONDS)

    def begin(self, entry: str, words: list[str], **given: Any) -> None:
        """Start the process."""
        reply = self._actor.begin.remote(entry, words, **given)
        self.pid = self._ray.get(reply, timeout=_ASK_SECONDS)
        threading.Thread(target=self._follow, name="ray replica", daemon=True).start()

    def ended(self) -> Ended | None:
        """See `Process`."""
        return self._ended

    def is_stopped(self) -> bool:
        """See `Process`."""
        return self._stopped

    def terminate(self) -> None:
        """See `Process`."""
        self._actor.terminate.remote()

    def kill(self) -> None:
        """See `Process`."""
        if self._killed:
            return
        self._killed = True
        self._release()
        if self._ended is not None and self._ended.code is None:
            return  # with its host: its number may be another process's
        end_actor(self._ray, self._actor, self._place.pid, self._place.node, self._place.address)

    def last_line(self) -> str:
        """See `Process`."""
        return self._line

    def stacks(self) -> str:
        """See `Process`."""
        try:
            return self._ray.get(self._actor.stacks.remote(), timeout=_STACK_SECONDS)
        except self._ray.exceptions.RayError:
            return ""

    def _follow(self) -> None:
        watch = self._actor.watch.options(concurrency_group="watch")
        try:
            while self._ended is None:
                self._stopped, code, self._line = self._ray.get(watch.remote())
                self._ended = None if code is None else Ended.of(code)
        except Exception as error:  # whatever Ray raises: the actor is gone
            self._ended = Ended(None, f"is lost with its host: {_first_line(error)}")


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:300]
