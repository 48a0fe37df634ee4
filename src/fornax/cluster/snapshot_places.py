"""Where the agents of a run listen for each other's snapshots, and who holds those of whom."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from fornax.cluster.local import AgentProcess
from fornax.config.credentials import Credentials

__all__ = ["SnapshotPlaces"]


class SnapshotPlaces:
    """What the controller knows of the agents' memory, by rank."""

    def __init__(
        self,
        credentials: Credentials,
        kept: Mapping[int, Mapping[str, Any]] = MappingProxyType({}),
        local: str | None = None,
    ) -> None:
        """Nothing is known but what the launch has.

        Args:
          credentials: what agents show each other.
          kept: by rank, what the agents of an earlier controller had: `KeptMemory.places`.
          local: the directory of each host in which its agents copy snapshots to disk.
        """
        self._credentials, self._kept, self._local = credentials, dict(kept), local
        self._addresses: dict[int, str] = {}
        self._before: dict[int, str] = {}
        self._holds: dict[int, list[int]] = {}
        self._settled: set[int] = set()
        self._new = False

    def let_listen(self, agent: AgentProcess, towards: str, rank: int, hosts: int) -> None:
        """Have an agent take what others send for its memory; where it listens, it says.

        Args:
          agent: a new one.
          towards: address of this machine, as the hosts reach it.
          rank: whose agent it is.
          hosts: of its group; what is kept of ranks that this has not, its agents share.
        """
        shown = self._credentials.fields()
        rest = {
            str(each): kept["files"]
            for each, kept in self._kept.items()
            if each >= hosts and each % hosts == rank
        }
        message = {
            "kind": "listen",
            "credentials": shown,
            "towards": towards,
            "local": self._local,
        }
        agent.send({**message, "kept": self._kept.get(rank), "former": rest})

    def hear(self, rank: int, message: Mapping[str, Any]) -> str | None:
        """Take what an agent says of its memory; in words, what it has fetched."""
        if message["kind"] == "holds":
            self._holds[rank] = list(message["ranks"])
        elif message["kind"] == "listening":
            self.add(rank, message["address"])
        elif message["kind"] == "kept":
            steps = ", ".join(map(str, message["steps"]))
            return f"rank {rank} has its snapshots of steps {steps} from this machine's memory"
        elif message["kind"] == "on_disk":
            steps = ", ".join(map(str, message["steps"]))
            return f"rank {rank} finds steps {steps} on its host's disk, in {message['directory']}"
        elif message["kind"] == "local_checkpoints":
            return f"rank {rank}'s {message['text']}"
        else:
            steps = ", ".join(map(str, message["steps"]))
            whose = "its" if message["of"] == rank else f"rank {message['of']}'s"
            return (
                f"rank {rank} has {whose} snapshots of steps {steps} from the memory of another "
                f"host ({message['bytes'] / 1e6:.1f} MB in {message['seconds']:.2f} s)"
            )
        return None

    def tell(self, agents: Mapping[int, AgentProcess], hosts: int, *, running: bool) -> None:
        """Tell all agents where the others listen, once for all that are new."""
        if not self._new or not (running or len(self._addresses) >= hosts):
            return
        self._new = False
        peers = {"kind": "peers", "addresses": self._addresses, "hosts": hosts}
        for agent in agents.values():
            agent.send(peers)

    def holders(self, rank: int) -> list[str]:
        """Where a rank's new agent finds its snapshots: at the one before it, or who has replicas.

        Nowhere for an agent that was there in the group before.
        """
        if rank in self._settled:
            return []
        before = [self._before[rank]] if rank in self._before else []
        return before + [self._addresses[n] for n, ranks in self._holds.items() if rank in ranks]

    def leaving(self, rank: int, hosts: int) -> dict[str, str]:
        """Where agents listen that leave a group of more than `hosts`, by rank: those whose
        snapshots the agent of `rank` takes over."""
        return {
            str(each): address
            for each, address in self._before.items()
            if each >= hosts and each % hosts == rank
        }

    def replace(self, rank: int) -> None:
        """An agent leaves its place, to another or to none, and is still there."""
        before = self._addresses.get(rank)
        self.forget(rank)
        if before is not None:
            self._before[rank] = before

    def add(self, rank: int, address: str | None) -> None:
        """The new agent of a rank listens at `address`."""
        if address is not None:
            self._addresses[rank], self._new = address, True

    def settle(self, hosts: int) -> None:
        """The agents of all ranks have what there was, and those that they replaced may go."""
        self._before.clear()
        self._kept.clear()
        self._settled = set(range(hosts))

    def forget(self, rank: int) -> None:
        """The agent of a rank is gone."""
        self._addresses.pop(rank, None)
        self._holds.pop(rank, None)
        self._settled.discard(rank)
