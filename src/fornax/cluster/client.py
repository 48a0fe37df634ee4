"""`Cluster`: train, tune, serve and resize from Python, and run functions on the hosts."""

import contextlib
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar

from fornax.cluster.controller import Job
from fornax.cluster.files import ClusterFiles
from fornax.cluster.launch import (
    EngineName,
    check_local_checkpoints,
    check_sampled,
    open_engine,
    opened_run,
)
from fornax.cluster.local import Engine
from fornax.cluster.status import Status, read_status
from fornax.config.errors import ClusterError, ConfigError
from fornax.config.jsonl import read_json_lines
from fornax.config.quantities import parse_time
from fornax.config.run_paths import default_run_dir

if TYPE_CHECKING:
    from fornax.cluster.routing import RoutingConfig, Server, Service
    from fornax.llm.server import ServeConfig
    from fornax.serving.config import HostConfig

__all__ = ["Cluster", "Run"]

T = TypeVar("T")
R = TypeVar("R")

_POLL_SECONDS = 0.05
_SAMPLER = "fornax.cli.sampler:serve"


class Cluster:
    """Hosts to train, tune and serve on and to call functions on: processes here, or Ray's nodes.

        with Cluster(hosts=4) as cluster:
            run = cluster.train("run.yaml", run_dir="runs/four")
            run.loss()
            run.resize(3)
            totals = cluster.map(measure, shards)
            run.wait()

    Leaving the block saves and stops the runs that are not done, and ends all that was started.
    """

    def __init__(
        self,
        *,
        hosts: int = 2,
        engine: EngineName = "local",
        address: str | None = None,
        private_network: bool = False,
        spares: bool = True,
        mtbf: str = "24h",
        local_checkpoints: str | Path | None = None,
    ) -> None:
        """Start Ray, where it is asked for, or connect to it; nothing else starts yet.

        Args:
          hosts: with how many a run begins. They call functions too; on Ray all its nodes do.
          engine: `local` or `ray`.
          address: of a Ray cluster, `auto`, host:port or ray://host:port; None starts one here,
            which ends with this.
          private_network: see `open_engine`.
          spares: whether each host of a run keeps a process ready for the next fault or resize;
            it holds about 250 MB.
          mtbf: mean time between failures of one host, `90min` or `24h`, until a run has had
            some; how often snapshots are made follows from it.
          local_checkpoints: directory of each host's own disk to which snapshots in memory are
            copied, so that a run resumes from them when all processes are lost; None: nowhere.

        Raises:
          ConfigError: for a directory that cannot be written, or a time that is none; see
            `open_engine`.
          ClusterError: for no hosts; see `open_engine`.
        """
        if hosts < 1:
            raise ClusterError(f"a cluster of {hosts} hosts has none to run on; use 1 or more")
        self.hosts = hosts
        self._spares = spares
        self._mtbf = parse_time("mtbf", mtbf)
        self._local_checkpoints = check_local_checkpoints(local_checkpoints, engine)
        self._engine = open_engine(engine, hosts, address, private_network=private_network)
        self._started: list[Run | Server] = []

    def train(
        self,
        config: str | Path,
        *,
        run_dir: str | Path | None = None,
        flags: Sequence[str] = (),
    ) -> "Run":
        """Begin `fornax train` on all hosts, or resume a run that was stopped.

        Args:
          config: YAML file.
          run_dir: where everything is written; None: `runs/` and the name of the file.
          flags: further words of the command: `["--steps", "200"]`.

        Raises:
          ConfigError: when the directory cannot be written.
          ClusterError: when another launch uses it.
        """
        folder = Path(run_dir or default_run_dir("train", config)).expanduser()
        return self._run(
            ("train", "--config", str(config), "--run-dir", str(folder), *flags), folder
        )

    def tune(
        self,
        method: str,
        config: str | Path | None = None,
        *,
        run_dir: str | Path | None = None,
        samplers: int = 0,
        flags: Sequence[str] = (),
    ) -> "Run":
        """Begin `fornax tune METHOD` on all hosts, or resume a run that was stopped.

        Args:
          method: such as `sft`, `dpo` or `grpo`.
          config: YAML file; None: `flags` say all.
          run_dir: where everything is written; None: `runs/` and the method.
          samplers: processes that draw completions, for grpo, ppo and distill, on this machine or
            each on a host of Ray's that trains nothing; 0: the first host draws them.
          flags: further words of the command: `["--model", "DIR", "--data", "p.jsonl"]`.

        Raises:
          ConfigError: for a method that is not there or has no samplers, or when the directory
            cannot be written.
          ClusterError: when another launch uses it.
        """
        from fornax.tune.methods import METHODS

        if method not in METHODS:
            raise ConfigError(
                f"method={method!r} is none of {', '.join(METHODS)}; give one of them"
            )
        folder = Path(run_dir or default_run_dir(method)).expanduser()
        given = () if config is None else ("--config", str(config))
        words = ("tune", method, *given, "--out", str(folder), *flags)
        if samplers < 0:
            raise ConfigError(f"samplers={samplers} is negative; 0 is the least")
        if samplers:
            check_sampled(words)
        return self._run(words, folder, samplers=samplers)

    def _run(self, words: tuple[str, ...], folder: Path, *, samplers: int = 0) -> "Run":
        job = Job(
            hosts=self.hosts,
            words=words,
            mtbf=self._mtbf,
            local_checkpoints=self._local_checkpoints,
        )
        run = Run(self._engine, job, folder, spares=self._spares, samplers=samplers)
        self._started.append(run)
        return run

    def serve(
        self,
        model: str | Path,
        config: "ServeConfig | None" = None,
        *,
        replicas: int = 2,
        hosts: int = 1,
        run_dir: str | Path | None = None,
        routing: "RoutingConfig | None" = None,
    ) -> "Server":
        """Serve a language model by replicas behind one address, as `fornax launch` does.

        Args:
          model: Hugging Face directory, name on the Hub, or run directory.
          config: options of `fornax serve`; None: its defaults, on a port that the system chooses.
          replicas: how many.
          hosts: processes of a replica, over whose devices its engine is divided.
          run_dir: where events and logs go; None: `runs/` and `serve-` and the name of the model.
          routing: how requests and replicas are treated.

        Raises:
          ConfigError: for an address or directory that is not to be had.
          ClusterError: for too few accelerators, or a directory in use.
        """
        from fornax.cluster.routing import serve_service
        from fornax.llm.server import ServeConfig

        given = ServeConfig(port=0) if config is None else config
        folder = Path(run_dir or Path("runs") / f"serve-{Path(model).name}").expanduser()
        return self._server(
            lambda inner: serve_service(str(model), given, inner),
            folder,
            replicas=replicas,
            hosts=hosts,
            routing=routing,
        )

    def host(
        self,
        config: "HostConfig",
        *,
        replicas: int = 2,
        run_dir: str | Path | None = None,
        routing: "RoutingConfig | None" = None,
    ) -> "Server":
        """Serve a folder of models by replicas behind one address, over HTTP and gRPC.

        Args:
          config: options of `fornax host`, its repository among them.
          replicas: how many.
          run_dir: where events and logs go; None: `runs/host`.
          routing: how requests and replicas are treated.

        Raises:
          ConfigError, ClusterError: see `serve`.
        """
        from fornax.cluster.routing import host_service

        folder = Path(run_dir or Path("runs") / "host").expanduser()
        return self._server(
            lambda inner: host_service(config, inner),
            folder,
            replicas=replicas,
            hosts=1,
            routing=routing,
        )

    def _server(
        self,
        service: "Callable[[Path], Service]",
        folder: Path,
        *,
        replicas: int,
        hosts: int,
        routing: "RoutingConfig | None",
    ) -> "Server":
        from fornax.cluster.ray_engine import RayEngine
        from fornax.cluster.routing import Server

        engine = self._engine if isinstance(self._engine, RayEngine) else None
        server = Server(
            service, folder, replicas=replicas, hosts=hosts, config=routing, engine=engine
        )
        self._started.append(server)
        return server

    def map(self, function: Callable[[T], R], items: Iterable[T]) -> list[R]:
        """Call a function with each item, one item per host at a time, beside the hosts' devices.

        Each host has a process for it, which keeps its imports and what the function leaves in
        memory until the cluster is closed. Function, items and
        results travel by cloudpickle, so that lambdas and functions of `__main__` work and modules
        are imported there by name: locally through the pair of sockets that the process inherits
        from this one, so that no other process can send code; on Ray through Ray.

        Returns:
          The results in the order of the items.

        Raises:
          ClusterError: when the function raises or ends its process; the traceback is the cause.
        """
        return self._engine.map(function, items)

    def close(self) -> None:
        """Save and stop the runs that are not done, stop the servers, and end all processes."""
        with contextlib.ExitStack() as stack:
            stack.callback(self._engine.close)
            for each in self._started:
                stack.callback(each.stop)

    def __enter__(self) -> "Cluster":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


class Run:
    """A launched run; its controller works in a thread of this process."""

    def __init__(
        self, engine: Engine, job: Job, run_dir: Path, *, spares: bool, samplers: int = 0
    ) -> None:
        """Begin; see `Cluster.train` and `Cluster.tune`."""
        self.run_dir = run_dir
        files = ClusterFiles(run_dir)
        with contextlib.ExitStack() as stack:
            stack.enter_context(files.held())
            self._controller = stack.enter_context(
                opened_run(
                    job,
                    files,
                    engine,
                    spare=spares,
                    announce=lambda line: None,
                    samplers=samplers,
                    sampler_program=_SAMPLER,
                )
            )
            self._since = len(self.metrics())
            self._code: int | None = None
            self._error: Exception | None = None
            self._thread = threading.Thread(
                target=self._work, args=(stack.pop_all(),), name=f"run {run_dir}", daemon=True
            )
            self._thread.start()

    def metrics(self) -> list[dict[str, Any]]:
        """The lines of metrics.jsonl: a record a logged step, earlier attempts' too."""
        return read_json_lines(self.run_dir / "metrics.jsonl")

    def loss(self) -> float:
        """The newest recorded loss of this attempt; waits for the first.

        Raises:
          ClusterError: when the run ended without one.
        """
        while len(records := self.metrics()) <= self._since:
            if not self._thread.is_alive() and len(self.metrics()) <= self._since:
                raise ClusterError(f"{self.run_dir} ended before it had a loss{self._why()}")
            time.sleep(_POLL_SECONDS)
        return float(records[-1]["loss"])

    def status(self) -> Status:
        """What each rank does now."""
        return read_status(self.run_dir)

    def resize(self, hosts: int) -> None:
        """Continue with another number of hosts; returns when they train.

        All finish a step and keep it in their agents' memory, and a group of `hosts` resumes from
        there: the same global batches, every record once, losses equal up to the order of the sums
        over hosts.

        Raises:
          ClusterError: for fewer than one, or when the run ends before.
        """
        self._controller.resize(hosts)
        while self._controller.hosts_at_work != hosts:
            if not self._thread.is_alive():
                raise ClusterError(
                    f"{self.run_dir} ended before {hosts} hosts trained{self._why()}"
                )
            time.sleep(_POLL_SECONDS)

    def wait(self, seconds: float | None = None) -> int:
        """Until the run ends; its exit code, 0 when it is done, 143 when it was stopped.

        Raises:
          TimeoutError: when it is still running after this many seconds.
          ClusterError: when it failed again and again.
        """
        self._thread.join(seconds)
        if self._thread.is_alive():
            raise TimeoutError(f"{self.run_dir} is still running after {seconds:g} s")
        if self._error is not None:
            raise self._error
        assert self._code is not None
        return self._code

    def stop(self) -> int:
        """Finish the step, save and end, unless the run has ended; its exit code.

        Raises:
          ClusterError: see `wait`.
        """
        if self._thread.is_alive():
            self._controller.stop()
        return self.wait()

    def _work(self, held_files: contextlib.ExitStack) -> None:
        with held_files:
            try:
                self._code = self._controller.run()
            except Exception as error:
                self._error = error

    def _why(self) -> str:
        return f": {self._error}" if self._error else f", with exit code {self._code}"
