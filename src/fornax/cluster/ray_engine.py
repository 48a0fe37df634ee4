"""Ray as the launcher: it places an agent per host, watches it and carries remote Python.

Recovery stays the controller's. On each host an actor holds the agent's process and passes its
messages on; it dies with its host, and the agent with it. A Ray that is started here ends with
this process, keeps its files in a temporary directory, and knows its clients by a token that is in
the environment of its processes only.
"""

import contextlib
import itertools
import os
import pickle
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from multiprocessing import Pipe
from pathlib import Path
from typing import Any, TypeVar

from fornax.cluster.beside_process import BesideJob
from fornax.cluster.calls import attempt, pack, unwrap
from fornax.cluster.devices import require_cpu
from fornax.cluster.files import ClusterFiles
from fornax.cluster.ray_beside import RayBeside, Room
from fornax.cluster.ray_nodes import (
    HOST,
    Node,
    address_for,
    end_actor,
    host_nodes,
    import_ray,
    on,
    own_address,
)
from fornax.config import environment
from fornax.config.credentials import Credentials
from fornax.config.errors import ClusterError
from fornax.config.worker_process import WorkerProcess

__all__ = ["RayAgent", "RayEngine", "RayLauncher"]

T = TypeVar("T")
R = TypeVar("R")

_MOST_HOSTS = 1000  # that this machine plays, where Ray is started for them
_START_SECONDS = 120.0
_CONNECT_SECONDS = 10.0
_LONG_POLL_SECONDS = 1.0
_SHUNNED_SECONDS = 20.0
_STORE_BYTES = 80 * 2**20
_MARK = "FORNAX_RAY_FOLDER"

# Waits until its parent closes the pipe or is gone, then ends what Ray leaves behind.
_REAPER = """
import os, pathlib, shutil, signal, sys
mark = f"{sys.argv[1]}={sys.argv[2]}".encode()
signal.signal(signal.SIGINT, signal.SIG_IGN)
sys.stdin.buffer.read()
while True:
    left = []
    for entry in pathlib.Path("/proc").glob("[0-9]*"):
        try:
            if mark in (entry / "environ").read_bytes().split(bytes(1)):
                os.kill(int(entry.name), signal.SIGKILL)
                left.append(entry)
        except OSError:
            pass
    if not left:
        break
shutil.rmtree(sys.argv[2], ignore_errors=True)
"""


class RayEngine:
    """A connection to a Ray cluster, or one of this machine that is started for it."""

    def __init__(
        self, hosts: int, address: str | None = None, *, private_network: bool = False
    ) -> None:
        """Connect, or start Ray.

        Args:
          hosts: without an address, how many hosts call functions; as many as are asked for train.
          address: `auto`, host:port or ray://host:port of a Ray cluster; None starts one.
          private_network: whether the cluster may have nodes on other machines.

        Raises:
          ConfigError: when Ray is not installed.
          ClusterError: when there is no such cluster, or it has nodes on other machines, where
            the network is not said to be private.
        """
        self.private_network = private_network
        self._reaper: subprocess.Popen[bytes] | None = None
        self._callers: dict[tuple[str, int], Any] = {}
        self.ray: Any = import_ray(own=address is None)
        if self.ray.is_initialized():
            raise ClusterError(
                "this process is connected to a Ray cluster already; call ray.shutdown() before"
            )
        self._callers_most = hosts if address is None else None
        if address is None:
            self._start()
        else:
            self._connect(address)

    def launcher(self, files: ClusterFiles, *, spare: bool) -> "RayLauncher":
        """Places the agents of a run."""
        return RayLauncher(
            self.ray,
            files,
            spare=spare,
            private_network=self.private_network,
            own=self._reaper is not None,
        )

    def map(self, function: Callable[[T], R], items: Iterable[T]) -> list[R]:
        """See `Calls`; function, items and results travel by cloudpickle, within Ray."""
        messages = [pack(function, item) for item in items]
        slots = ((node.id, slot) for node in host_nodes(self.ray) for slot in range(node.slots))
        hosts = [*itertools.islice(slots, self._callers_most)]
        for host in self._callers.keys() - set(hosts):
            del self._callers[host]
        try:
            return self._share(hosts, messages)
        except BaseException:  # some are in the middle of items of this call
            for actor in self._callers.values():
                self.ray.kill(actor, no_restart=True)
            self._callers.clear()
            raise

    def share(self, accelerators: int) -> dict[str, float]:
        """The resources that a process of a server takes of a node: accelerators, else a CPU.

        Args:
          accelerators: how many GPUs; 0: one. Of TPUs a process takes all of its node's.
        """
        if self._reaper is not None:
            return {HOST: 1}
        node = next(iter(host_nodes(self.ray)), None)
        found = {} if node is None else node.accelerators
        if "TPU" in found:
            return {"TPU": found["TPU"]}
        return {"GPU": accelerators or 1} if "GPU" in found else {"CPU": 1}

    def close(self) -> None:
        """Disconnect; a Ray that was started here ends, and its files are removed."""
        self.ray.shutdown()
        if self._reaper is not None:
            assert self._reaper.stdin is not None
            self._reaper.stdin.close()
            self._reaper.wait()

    def _start(self) -> None:
        require_cpu()
        folder = tempfile.mkdtemp(prefix="fornax-ray-")
        self._reaper = subprocess.Popen(
            [sys.executable, "-c", _REAPER, _MARK, folder],
            stdin=subprocess.PIPE,
            start_new_session=True,
        )
        try:
            with environment.marked(_MARK, folder):
                self.ray.init(
                    address="local",
                    num_cpus=max(2, environment.usable_cores()),
                    resources={HOST: _MOST_HOSTS},
                    include_dashboard=False,
                    log_to_driver=False,
                    configure_logging=False,
                    object_store_memory=_STORE_BYTES,
                    _temp_dir=folder,
                    _system_config={"memory_monitor_refresh_ms": 0},  # it would kill agents
                )
        except Exception as error:
            self.close()
            raise ClusterError(f"Ray did not start on this machine: {error}") from error

    def _connect(self, address: str) -> None:
        try:
            if address != "auto":  # where nobody listens Ray would try for minutes
                host, _, port = address.removeprefix("ray://").rpartition(":")
                socket.create_connection((host, int(port)), _CONNECT_SECONDS).close()
            self.ray.init(address=address, log_to_driver=False, configure_logging=False)
        except Exception as error:
            text = " ".join(str(error).split())
            raise ClusterError(
                f"no Ray cluster at {address}: {text:.300}. Start one with ray start --head, or "
                "leave --address out to have one started here"
            ) from error

    def _caller(self, host: tuple[str, int]) -> Any:
        if host not in self._callers:
            actor = self.ray.remote(_Caller).options(num_cpus=0, scheduling_strategy=on(host[0]))
            self._callers[host] = actor.remote(sys.path)
        return self._callers[host]

    def _share(self, hosts: Iterable[tuple[str, int]], messages: Sequence[bytes]) -> list[Any]:
        """One message per host at a time."""
        waiting, idle = deque(enumerate(messages)), deque(hosts)
        busy: dict[Any, tuple[tuple[str, int], int]] = {}
        results: dict[int, Any] = {}
        while waiting or busy:
            while waiting and idle:
                number, message = waiting.popleft()
                host = idle.popleft()
                busy[self._caller(host).call.remote(message)] = (host, number)
            done, _ = self.ray.wait(list(busy), num_returns=1)
            host, number = busy.pop(done[0])
            try:
                address, answer = self.ray.get(done[0])
            except self.ray.exceptions.RayError as error:
                text = str(error).strip().splitlines()[0]
                raise ClusterError(f"a host ended while it ran item {number}: {text}") from error
            results[number] = unwrap(answer, f"host {address}, item {number}")
            idle.append(host)
        return [results[number] for number in range(len(messages))]


class RayLauncher:
    """Places the agents of one run, at most one on a host."""

    def __init__(
        self,
        ray: Any,
        files: ClusterFiles,
        *,
        spare: bool,
        imports: Sequence[str] = ("fornax.train",),
        private_network: bool = False,
        own: bool = False,
    ) -> None:
        """Start nothing yet.

        Args:
          ray: the module, connected.
          files: of the run.
          spare: whether each agent keeps a process for the next assignment.
          imports: modules that such a process has imported.
          private_network: whether hosts may be on other machines.
          own: whether this Ray was started here, where hosts share the cores.

        Raises:
          ClusterError: see `address_for`.
        """
        self._private_network = private_network
        self.credentials = Credentials.make(tls=private_network)
        """See `Launcher`: with a certificate, as a node of another machine may come at any time."""
        self._own = own
        self._choosing = threading.Lock()
        self._taken: list[str] = []  # nodes, by processes beside hosts and agents that start
        self._ray = ray
        self._files = files
        self._spare = spare
        self._imports = list(imports)
        self._agents: list[RayAgent] = []
        self._shunned: dict[str, float] = {}

    @property
    def address(self) -> str:
        """See `Launcher`."""
        nodes = [node.address for node in host_nodes(self._ray)]
        return address_for(nodes, own_address(), private_network=self._private_network)

    def capacity(self) -> int:
        """How many hosts there are now."""
        now = time.monotonic()
        self._shunned = {node: until for node, until in self._shunned.items() if until > now}
        found = Counter({n.id: n.slots for n in host_nodes(self._ray) if n.id not in self._shunned})
        return (found - Counter(self._taken)).total()

    def start(self, ranks: Sequence[int]) -> dict[int, "RayAgent"]:
        """See `Launcher`; a host on which an agent does not start is left out for a while."""
        with self._choosing:
            nodes = self._free(len(ranks))
            self._taken += [node.id for node in nodes]
        try:
            started = self._started(ranks, nodes)
            self._agents += started
        finally:
            with self._choosing:
                for node in nodes:
                    self._taken.remove(node.id)
        return dict(zip(ranks, started, strict=True))

    def _started(self, ranks: Sequence[int], nodes: Sequence[Node]) -> list["RayAgent"]:
        places = self._free_places(nodes)
        actors = [
            self._actor(rank, node, place)
            for rank, node, place in zip(ranks, nodes, places, strict=True)
        ]
        replies = [actor.pid.remote() for actor in actors]
        pids: list[int] = []
        try:
            for reply in replies:
                pids.append(self._ray.get(reply, timeout=_START_SECONDS))
        except self._ray.exceptions.RayError as error:
            node = nodes[len(pids)]
            self._shunned[node.id] = time.monotonic() + _SHUNNED_SECONDS
            for actor in actors:
                self._ray.kill(actor, no_restart=True)
            text = str(error).strip().splitlines()[0]
            raise ClusterError(f"Ray started no agent at {node.address}: {text:.300}") from error
        return [
            RayAgent(self._ray, actor, pid, node, place)
            for actor, pid, node, place in zip(actors, pids, nodes, places, strict=True)
        ]

    def _free_places(self, nodes: Sequence[Node]) -> list[int]:
        """For each agent that starts, a number that no other of its node has."""
        used = {(agent.node, agent.place) for agent in self._agents if agent.alive}
        found = []
        for node in nodes:
            found.append(next(n for n in itertools.count() if (node.id, n) not in used))
            used.add((node.id, found[-1]))
        return found

    def start_beside(self, job: BesideJob) -> RayBeside:
        """See `Launcher`; a sampler has a host for itself, with its accelerators."""
        take = self._take_host if job.role.computes else self._take_core
        return RayBeside(self._ray, job, take, self._give_back)

    def _take_host(self) -> Room:
        """A host that trains nothing; the last, so that ranks are near each other."""
        with self._choosing:
            node = self._free(1, last=True)[0]
            self._taken.append(node.id)
        return Room({**_whole(node), "scheduling_strategy": on(node.id)}, self._away, node.id)

    def _take_core(self) -> Room:
        """A core wherever Ray has one."""
        cores = 0 if self._own else 1
        return Room({"num_cpus": cores, "scheduling_strategy": "SPREAD"}, self._away)

    def _give_back(self, room: Room, *, shun: bool) -> None:
        if room.node is not None:
            with self._choosing:
                self._taken.remove(room.node)
                if shun:
                    self._shunned[room.node] = time.monotonic() + _SHUNNED_SECONDS

    @property
    def _away(self) -> bool:
        """Whether hosts are on other machines."""
        return self.address != "127.0.0.1"

    def _free(self, count: int, *, last: bool = False) -> list[Node]:
        """Nodes for so many more agents, in the order of ranks."""
        self._agents = [agent for agent in self._agents if agent.alive]
        used = Counter([*(agent.node for agent in self._agents), *self._taken])
        nodes = [node for node in host_nodes(self._ray) if node.id not in self._shunned]
        free = [node for node in nodes for _ in range(node.slots - used[node.id])]
        if len(free) < count:
            raise ClusterError(f"Ray has {len(free)} free hosts, and {count} more are needed")
        return free[-count:] if last else free[:count]

    def _actor(self, rank: int, node: Node, place: int) -> Any:
        setup = {
            "run_dir": str(self._files.run_dir.absolute()),
            "rank": rank,
            "place": place,
            "spare": self._spare,
            "imports": self._imports,
            "environment": environment.of_computation(),
        }
        actor = self._ray.remote(concurrency_groups={"send": 1, "receive": 1})(_Host)
        return actor.options(
            max_restarts=0, scheduling_strategy=on(node.id), **_whole(node)
        ).remote(os.getcwd(), setup)


def _whole(node: Node) -> dict[str, Any]:
    """The options of an actor that takes all accelerators of a node."""
    return {
        "num_cpus": 0,
        "num_gpus": node.accelerators.get("GPU", 0),
        "resources": {k: v for k, v in node.accelerators.items() if k != "GPU"},
    }


class RayAgent:
    """An agent behind an actor: messages come out of a local pipe, which a thread fills."""

    def __init__(self, ray: Any, actor: Any, pid: int, node: Node, place: int) -> None:
        """Follow an actor that runs."""
        self.node, self.place = node.id, place
        self.alive = True
        self._ray = ray
        self._actor = actor
        self._pid, self._address = pid, node.address
        self.connection, self._ours = Pipe()
        threading.Thread(target=self._follow, name="ray agent", daemon=True).start()

    def send(self, message: object) -> None:
        """See `AgentProcess`."""
        self._actor.send.options(concurrency_group="send").remote(message)

    def receive(self, seconds: float | None = None) -> object:
        """See `AgentProcess`."""
        if not self.connection.poll(seconds):
            raise TimeoutError
        return self.connection.recv()

    def kill(self) -> int:
        """End actor, agent and workers."""
        self.alive = False
        end_actor(self._ray, self._actor, self._pid, self.node, self._address)
        return -signal.SIGKILL

    def _follow(self) -> None:
        receive = self._actor.receive.options(concurrency_group="receive")
        with contextlib.suppress(Exception):  # whatever Ray raises: the agent is gone
            while (messages := self._ray.get(receive.remote())) is not None:
                for message in messages:
                    self._ours.send(message)
        self.alive = False
        self._ours.close()


class _Host:
    """The actor of a host: holds the agent's process and passes messages on."""

    def __init__(self, folder: str, setup: dict[str, Any]) -> None:
        if Path(folder).is_dir():  # relative paths mean what they do where the command was given
            os.chdir(folder)
        files = ClusterFiles(Path(setup["run_dir"]))
        with files.services.open("ab") as log:
            self._agent = WorkerProcess(
                "fornax.cluster.agent:run", log=log, environment=setup.pop("environment")
            )
        self._agent.send(setup)

    def pid(self) -> int:
        return os.getpid()

    def send(self, message: object) -> None:
        self._agent.send(message)

    def receive(self) -> list[object] | None:
        """What the agent says within a second; None when it is gone."""
        messages: list[object] = []
        try:
            messages.append(self._agent.receive(_LONG_POLL_SECONDS))
            while True:
                messages.append(self._agent.receive(0))
        except TimeoutError:
            return messages
        except EOFError:
            return messages or None


class _Caller:
    """The actor of a host for `map`."""

    def __init__(self, path: Sequence[str]) -> None:
        sys.path.extend(each for each in path if each not in sys.path)

    def call(self, message: bytes) -> tuple[str, tuple[bool, Any]]:
        return own_address(), pickle.loads(attempt(message))
