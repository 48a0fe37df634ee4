"""`launch_replicas`: a server as several replicas behind a router, until a signal."""

import asyncio
import contextlib
import itertools
import os
import signal
import sys
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import uvloop

from fornax.cluster.devices import device_variables
from fornax.cluster.files import ClusterFiles
from fornax.cluster.ray_engine import RayEngine
from fornax.cluster.routing.changes import Changes
from fornax.cluster.routing.grpc_proxy import GrpcProxy
from fornax.cluster.routing.metrics import RouterMetrics
from fornax.cluster.routing.pool import ReplicaPool, RoutingConfig
from fornax.cluster.routing.proxy import Proxy, client_session
from fornax.cluster.routing.ray_replicas import RayReplicas
from fornax.cluster.routing.replica import LocalReplicas, Placer, Program
from fornax.cluster.routing.service import Service
from fornax.cluster.routing.supervisor import Events, Supervisor
from fornax.config.credentials import Credentials
from fornax.config.errors import ConfigError
from fornax.config.http_server import HttpServer, raise_file_limit, shown_address
from fornax.config.jsonl import JsonLines, read_json_lines

__all__ = ["ROLLING_RESTART", "Router", "launch_replicas", "opened_router"]

ROLLING_RESTART = signal.SIGUSR1
"""The signal that asks a router for a rolling restart."""
_COMMAND = "fornax.cli.main:main"
_STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def launch_replicas(
    service: Callable[[Path], Service],
    run_dir: str | Path,
    *,
    replicas: int,
    hosts: int = 1,
    config: RoutingConfig | None = None,
    engine: RayEngine | None = None,
    program: str = _COMMAND,
    credentials: Credentials | None = None,
    announce: Callable[[str], None] | None = None,
) -> int:
    """Serve by `replicas` processes behind one address, until a signal.

    The first SIGINT, SIGTERM or SIGHUP lets requests finish, a second one does not; SIGUSR1 starts
    a rolling restart. A replica that ends, stops or hangs is replaced. Nothing that was started is
    left when this returns, or when its process is killed.

    Args:
      service: makes what is served, given a folder for the config of its replicas.
      run_dir: where events and logs go.
      replicas: how many.
      hosts: processes of a replica, over whose devices its engine or bundles are divided.
      config: how requests and replicas are treated.
      engine: the Ray cluster that finds room for the replicas; None: they are processes of this
        machine.
      program: `package.module:NAME`, called with a replica's words in its process.
      credentials: what router and replicas know each other by; None: new ones, with a certificate
        where the replicas may be on other machines.
      announce: shows a line per event; None: standard error.

    Returns:
      0 after a stop that was asked for; 1 after a second signal; 2 when no replica starts for a
      mistake of the user's.

    Raises:
      ClusterError: when no replica starts, there are too few accelerators, or the directory is in
        use.
      ConfigError: for an address that is not to be had, or a directory that cannot be written.
    """
    with opened_router(
        service,
        run_dir,
        replicas=replicas,
        hosts=hosts,
        config=config,
        engine=engine,
        program=program,
        credentials=credentials,
        announce=announce or _say,
    ) as router:
        router.service.configure_logging()
        return uvloop.run(_until_signal(router))


@contextlib.contextmanager
def opened_router(
    service: Callable[[Path], Service],
    run_dir: str | Path,
    *,
    replicas: int,
    hosts: int,
    config: RoutingConfig | None,
    engine: RayEngine | None,
    announce: Callable[[str], None],
    program: str = _COMMAND,
    credentials: Credentials | None = None,
    in_process: bool = False,
) -> Iterator["Router"]:
    """A router, and its run directory while it is there; see `launch_replicas`.

    Args:
      in_process: whether it takes no signals.
    """
    for name, number in (("replicas", replicas), ("hosts", hosts)):
        if number < 1:
            raise ConfigError(f"{name}={number} is below 1; give at least 1")
    files = ClusterFiles(Path(run_dir).expanduser())
    with files.held(), contextlib.ExitStack() as stack:
        made = service(files.directory.absolute())
        stack.callback(_tidy, files, replicas, hosts)
        raise_file_limit()
        if credentials is None:
            credentials = Credentials.make(tls=engine is not None and engine.private_network)
        runs = Program(entry=program, words=made.words, files=files, credentials=credentials)
        placer: Placer
        if engine is None:
            shares = device_variables(replicas, made.devices, hosts)
            placer = LocalReplicas(program=runs, variables=shares)
        else:
            placer = RayReplicas(
                engine=engine, program=runs, count=replicas, hosts=hosts, devices=made.devices
            )
            placer.check_network()
        epoch = 1 + max((event["epoch"] for event in read_json_lines(files.events)), default=0)
        lines = JsonLines(files.events)
        stack.callback(lines.close)
        yield Router(
            service=made,
            placer=placer,
            files=files,
            credentials=credentials,
            config=config or RoutingConfig(),
            events=Events(lines, epoch, announce),
            in_process=in_process,
        )


@dataclass(kw_only=True)
class Router:
    """The router before the replicas of one launch, from start to end."""

    service: Service
    placer: Placer
    files: ClusterFiles
    credentials: Credentials
    config: RoutingConfig
    events: Events
    in_process: bool
    """Whether the process is a program's own, which takes no signals for it."""
    _stop: asyncio.Event = field(default_factory=asyncio.Event)
    _at_once: asyncio.Event = field(default_factory=asyncio.Event)
    _supervisor: Supervisor | None = None
    _rolling: set[asyncio.Task[None]] = field(default_factory=set)

    def stop(self) -> None:
        """Let requests finish and end; asked again, end at once. In the event loop's thread."""
        (self._at_once if self._stop.is_set() else self._stop).set()

    def roll(self) -> None:
        """Restart one replica after another. In the event loop's thread."""
        if self._supervisor is not None:
            self._rolling.add(asyncio.create_task(self._supervisor.rolling_restart()))

    async def run(self) -> int:
        """Serve until `stop`; the exit code, see `launch_replicas`."""
        service, events = self.service, self.events
        pool = ReplicaPool(self.config, partial=service.partial)
        metrics = RouterMetrics(pool)
        async with contextlib.AsyncExitStack() as stack:
            spans = service.spans()
            if spans is not None:
                stack.push_async_callback(asyncio.to_thread, spans.close)
            session = await stack.enter_async_context(client_session(self.credentials))
            changes = Changes(pool)
            fronts: list[HttpServer | GrpcProxy] = [
                service.server(Proxy(service, pool, session, changes, metrics, spans))
            ]
            if service.grpc is not None:
                fronts.append(
                    GrpcProxy(service.grpc, pool, changes, metrics, self.credentials, spans)
                )
            supervisor = self._supervisor = Supervisor(
                self.placer,
                service,
                self.files,
                pool,
                session,
                admit=changes.admit,
                events=events,
                metrics=metrics,
            )
            where = [await _listening(front, service, stack) for front in fronts]
            stack.callback(supervisor.kill)
            self._tell_begin(where)
            keeping = asyncio.create_task(supervisor.run())
            stopping = asyncio.create_task(self._stop.wait())
            await asyncio.wait([keeping, stopping], return_when=asyncio.FIRST_COMPLETED)
            if keeping.done():
                stopping.cancel()
                events.write("ended", "no replica starts", code=_code(keeping))
                return keeping.result()
            running = sum(each.running for each in pool.replicas.values())
            events.write("teardown", f"stopping: {running} requests may finish")
            drains = [each.stop(service.drain_seconds) for each in fronts]
            code = await _drained(drains, self._at_once)
            for task in (keeping, *self._rolling):
                task.cancel()
            await asyncio.wait([keeping, *self._rolling])
            if code == 0:
                await supervisor.stop()
            events.write("ended", f"exit code {code}", code=code)
            return code

    def _tell_begin(self, where: Sequence[str]) -> None:
        name, count = self.service.name, self.placer.count
        self.events.write(
            "forming",
            f"fornax {name} listens on {' and '.join(where)}, before {count} replicas",
            pid=os.getpid(),
            url=where[0],
            **({"grpc": where[1]} if where[1:] else {}),
            **({"in_process": True} if self.in_process else {}),
            replicas=count,
        )


async def _until_signal(router: Router) -> int:
    with _signals(router.stop, router.roll):
        return await router.run()


async def _listening(
    front: HttpServer | GrpcProxy, service: Service, stack: contextlib.AsyncExitStack
) -> str:
    """Let a front listen until the stack is left; where."""
    stack.push_async_callback(front.stop)
    try:
        if isinstance(front, GrpcProxy):
            secure = "s" if front.secure else ""
            return f"grpc{secure}://{await front.start()}"
        host, port = await front.start()
        return f"{service.scheme}://{shown_address(host, port) if port else host}"
    except OSError as error:
        raise ConfigError(
            f"the address cannot be listened on ({error.strerror or error}): choose another "
            "port, or end the process that has it"
        ) from error


async def _drained(stops: Sequence[Coroutine[None, None, None]], at_once: asyncio.Event) -> int:
    """Let requests finish; 1 when there came a second signal."""
    draining = asyncio.gather(*stops)
    quitting = asyncio.create_task(at_once.wait())
    await asyncio.wait([draining, quitting], return_when=asyncio.FIRST_COMPLETED)
    if not draining.done():
        draining.cancel()
        await asyncio.wait([draining])
        return 1
    quitting.cancel()
    draining.result()
    return 0


def _tidy(files: ClusterFiles, replicas: int, hosts: int) -> None:
    """Remove what is not useful when the replicas are gone."""
    (files.directory / "replica.yaml").unlink(missing_ok=True)
    for number, rank in itertools.product(range(replicas), range(hosts)):
        files.replica_stacks(number, rank).unlink(missing_ok=True)


def _code(task: "asyncio.Task[int]") -> int:
    return 1 if task.exception() is not None else task.result()


@contextlib.contextmanager
def _signals(stop: Callable[[], None], roll: Callable[[], None]) -> Iterator[None]:
    loop = asyncio.get_running_loop()
    for number in _STOPS:
        loop.add_signal_handler(number, stop)
    loop.add_signal_handler(ROLLING_RESTART, roll)
    try:
        yield
    finally:
        for number in (*_STOPS, ROLLING_RESTART):
            loop.remove_signal_handler(number)


def _say(line: str) -> None:
    print(f"{time.strftime('%H:%M:%S')}  {line}", file=sys.stderr, flush=True)  # noqa: T201
