"""The server's life: take the addresses, load, serve, drain on SIGTERM, exit."""

import asyncio
import contextlib
import gc
import logging
import os
import signal
import time
from collections.abc import Callable, Mapping

import uvloop
from starlette.types import ASGIApp

from fornax import __version__
from fornax.config import ConfigError, environment
from fornax.config.credentials import of_run
from fornax.config.frames import LinkError
from fornax.config.http_server import HttpServer, raise_file_limit
from fornax.config.server_file import recording_server
from fornax.mesh.group import Leader, Member
from fornax.serving.backend import BackendFactory
from fornax.serving.config import Address, HostConfig
from fornax.serving.events import Events, Outcome
from fornax.serving.execution.group import follow, join_host, refuse_backend
from fornax.serving.execution.loading import load_part
from fornax.serving.execution.servable import DevicePool
from fornax.serving.grpc.server import GrpcServer
from fornax.serving.host import Host
from fornax.serving.http import http_app, http_server
from fornax.serving.lifecycle.shadow import ShadowRequest
from fornax.serving.process import give_back_memory, signals
from fornax.serving.statistics import ServerRows
from fornax.serving.telemetry.logs import AccessLog, StateLog, configure_logging
from fornax.serving.telemetry.metrics import Metrics
from fornax.serving.telemetry.profile import Profiler
from fornax.serving.telemetry.tracing import Tracer
from fornax.serving.types import InferRequest
from fornax.serving.v2.shared_memory import SharedMemory

__all__ = ["HostServer", "run_host"]

_log = logging.getLogger("fornax.serving")
_GRACE = 1.0
"""Seconds in which requests are answered that they must be sent again, once a process ended."""
Listener = Callable[[InferRequest, Outcome], None]


def run_host(config: HostConfig, backends: Mapping[str, BackendFactory] | None = None) -> int:
    """Serve until told to stop.

    Args:
      backends: factories of models that are not bundles, by the `type` in serving.yaml.

    Returns:
      The exit code: 0 after a stop that was asked for, 1 after a second signal, or when a model
      failed at the start and `exit_on_error` is set.

    Where FORNAX_ variables say that it is one of several processes, all of them call this with the
    same config: process 0 serves, the others have their parts of models on meshes.

    Raises:
      ConfigError: a repository, address, certificate or file of tokens that is not to be had.
      ClusterError: the processes do not all join, differ, or are asked for what they cannot do.
    """
    configure_logging(config.log_format, config.log_level)
    raise_file_limit()
    backends = backends or {}
    if not environment.coordinator():
        return uvloop.run(_serve(config, backends, None))
    joined = join_host(config)
    if isinstance(joined, Member):
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):  # process 0 decides
            signal.signal(number, signal.SIG_IGN)
        _log.info("has parts of the models of process 0")
        follow(joined, load_part, config.profile_dir)
        return 0
    with contextlib.closing(joined):
        return uvloop.run(_serve(config, dict.fromkeys(backends, refuse_backend), joined))


async def _serve(
    config: HostConfig, backends: Mapping[str, BackendFactory], leader: Leader | None
) -> int:
    async with contextlib.AsyncExitStack() as stack:
        server = HostServer(config, backends, leader)
        stack.push_async_callback(server.close)
        stack.enter_context(signals(server.stop, server.reread))
        await server.listen()
        rows = ServerRows(server.host.statistics)
        name = str(config.repository)
        with recording_server(config.run_dir, "host", name, rows.row):
            return await server.run()


class HostServer:
    """The host, what listens for it, and what watches it. `listen`, then `run`, then `close`."""

    def __init__(
        self,
        config: HostConfig,
        backends: Mapping[str, BackendFactory],
        leader: Leader | None = None,
    ):
        """Read everything that may be wrong; take no address and load nothing yet.

        Args:
          backends: factories of models that are not bundles.
          leader: tells the other processes of this server, if there are any.
        """
        config.folder()
        config.check_access()
        self.config = config
        self.events = Events()
        if config.cpu_threads is not None:
            environment.limit_cpu_threads(config.cpu_threads)
        self._devices = DevicePool(
            numbers=config.devices,
            memory_limit=config.model_memory_bytes(),
            leader=leader,
        )
        self._leader = leader
        self.host = Host(config, devices=self._devices, events=self.events, backends=backends)
        self._profiler = Profiler(config.profile_dir, config.profile_max_seconds, leader)
        self._metrics = Metrics(self.host, self._devices.memory)
        self._launched = of_run()
        self._http, self._grpc = self._fronts()
        self._access: AccessLog | None = None
        self._tracer: Tracer | None = None
        self._trimming: asyncio.Task[None] | None = None
        self._states = StateLog()
        self.addresses: dict[str, Address] = {}
        """Where it listens, by protocol; known after `listen`."""
        self._stop = asyncio.Event()
        self._quit = asyncio.Event()

    def _fronts(self) -> tuple[HttpServer | None, GrpcServer | None]:
        config, limits, tls = self.config, self.config.limits(), self.config.tls()
        auth, admin, launched = config.auth(), config.admin_auth(), self._launched
        traced = config.trace_sample_rate if config.trace_endpoint else 0.0
        memory = SharedMemory(
            enabled=config.shared_memory_allowed(), prefixes=config.shared_memory_prefixes
        )
        http = grpc = None
        if (address := config.http_address()) is not None:
            app = http_app(
                self.host,
                limits=limits,
                auth=auth,
                admin=admin,
                extra_apps=self._extra_apps(),
                shared_memory=memory,
                metrics=self._metrics.exposition,
                trace_sample_rate=traced,
            )
            http = http_server(app, address, limits, tls, launched)
        if (address := config.grpc_address()) is not None:
            grpc = GrpcServer(
                self.host,
                address,
                limits=limits,
                auth=auth,
                admin=admin,
                tls=tls,
                credentials=launched,
                shared_memory=memory,
                trace_sample_rate=traced,
                compression=config.grpc_compression,
            )
        return http, grpc

    def _extra_apps(self) -> dict[str, ASGIApp]:
        apps: dict[str, ASGIApp] = {"/v2/profile": self._profiler.app}
        owners: dict[str, str] = {}
        for name, backend in self.host.backends.items():
            for path, app in backend.routes().items():
                if path in owners:
                    raise ConfigError(
                        f"models {owners[path]} and {name} both answer under {path}; leave one of "
                        "them out of the repository"
                    )
                owners[path], apps[path] = name, app
        return apps

    async def listen(self) -> None:
        """Take the addresses: live, and not ready yet.

        Raises:
          ConfigError: an address is not to be had.
        """
        self._watch()
        self._trimming = asyncio.create_task(give_back_memory(self._answered))
        where = []
        secure = "s" if self.config.tls_cert or (self._launched and self._launched.key) else ""
        for name, front, address in (
            ("http", self._http, self.config.http_address()),
            ("grpc", self._grpc, self.config.grpc_address()),
        ):
            if front is not None and address is not None:
                taken = self.addresses[name] = await self._started(name, front, address)
                where.append(f"{name}{secure}://{taken}")
        _log.info("fornax %s listens on %s", __version__, " and ".join(where))

    def _answered(self) -> int | None:
        """Requests that had their answer, good or bad; none while one waits for it."""
        statistics = self.host.statistics()
        if any(each.pending for each in statistics):
            return None
        return sum(each.success + each.failure + each.cancel for each in statistics)

    async def _started(
        self, name: str, front: HttpServer | GrpcServer, address: Address
    ) -> Address:
        try:
            taken = await front.start()
            return taken if isinstance(taken, Address) else Address(*taken)
        except OSError as error:
            raise ConfigError(
                f"--{name} {address} cannot be listened on ({error.strerror or error}); choose "
                "another port, or end the process that has it"
            ) from error

    def _watch(self) -> None:
        config = self.config
        self.events.states.append(self._states.changed)
        self.events.finished.append(_of_clients(self._metrics.latencies.finished))
        if config.access_log != "none":
            self._access = AccessLog(which=config.access_log, form=config.log_format)
            self.events.finished.append(_of_clients(self._access.finished))
            self.events.refused.append(self._access.refused)
        if config.trace_endpoint is not None:
            self._tracer = Tracer(
                endpoint=config.trace_endpoint, sample_rate=config.trace_sample_rate
            )
            self.events.finished.append(_of_clients(self._tracer.finished))

    async def run(self) -> int:
        """Load the models and serve until a signal; the exit code.

        When another process of the server ends, this one does, since what they compute together may
        never return.
        """
        if self._leader is not None:
            loop = asyncio.get_running_loop()

            def lost(error: LinkError) -> None:
                with contextlib.suppress(RuntimeError):  # the loop was closed: it ends anyway
                    loop.call_soon_threadsafe(self._lose, error)

            self._leader.watch(lost)
        loading = asyncio.create_task(self._load())
        stopping = asyncio.create_task(self._stop.wait())
        await asyncio.wait([loading, stopping], return_when=asyncio.FIRST_COMPLETED)
        if not stopping.done():
            failed = loading.result()
            if failed and self.config.exit_on_error:
                _log.error("stopping: %d models failed and exit_on_error is set", failed)
                stopping.cancel()
                return 1
        await stopping
        draining = asyncio.create_task(self._drain(loading))
        quitting = asyncio.create_task(self._quit.wait())
        await asyncio.wait([draining, quitting], return_when=asyncio.FIRST_COMPLETED)
        if not draining.done():
            draining.cancel()
            await asyncio.wait([draining])
            _log.warning("stopped at once, as asked: requests that ran have no answer")
            return 1
        quitting.cancel()
        draining.result()
        return 0

    def _lose(self, error: LinkError) -> None:
        """Answer what waits, unready, and end."""
        _log.critical("stopping: %s", error)
        self.host.stopping = True
        asyncio.get_running_loop().call_later(_GRACE, os._exit, 1)

    async def _load(self) -> int:
        """Load what should be served; how many versions failed."""
        started = time.monotonic()
        memory = ", ".join(
            f"{account} {limit / 2**30:.1f} GiB"
            for account, limit in self._devices.memory.limits.items()
        )
        _log.info("loading the models of %s (room: %s)", self.config.folder(), memory)
        gc.collect()
        gc.freeze()  # modules live as long as the process; what models are made of may go
        await self.host.start()
        served = self.host.index(ready_only=True)
        ready = [f"{each.name} {each.version}" for each in served]
        failed = len(self._states.failed)
        _log.info(
            "%s after %.1f s: serving %s%s",
            "ready" if self.host.ready() else "not ready",
            time.monotonic() - started,
            ", ".join(ready) or "no model yet",
            f"; {failed} failed" if failed else "",
        )
        return failed

    @property
    def stopping(self) -> bool:
        """Whether it was told to stop."""
        return self._stop.is_set()

    def stop(self) -> None:
        """A signal came: the first drains, the second quits."""
        if self._stop.is_set():
            self._quit.set()
        else:
            _log.info("stopping: what was accepted is answered; a second signal quits")
        self._stop.set()

    def reread(self) -> None:
        """SIGHUP: look at the repository now."""
        self._reading = asyncio.create_task(self.host.poll())

    async def _drain(self, loading: "asyncio.Task[int]") -> None:
        end = time.monotonic() + self.config.drain_delay_seconds + self.config.drain_seconds
        self.host.stopping = True
        await asyncio.sleep(self.config.drain_delay_seconds)
        loading.cancel()
        fronts = [front for front in (self._http, self._grpc) if front is not None]
        await asyncio.gather(*(front.stop(_left(end)) for front in fronts))
        await self.host.stop(_left(end))
        _log.info("stopped")

    async def close(self) -> None:
        """Give everything back, whatever happened before."""
        if self._trimming is not None:
            self._trimming.cancel()
        async with contextlib.AsyncExitStack() as rest:  # each is closed whatever another says
            if self._access is not None:
                rest.callback(self._access.close)
            if self._tracer is not None:
                rest.callback(self._tracer.close)
            rest.push_async_callback(self._profiler.close)
            rest.push_async_callback(self.host.stop, 0.0)
            for front in (self._grpc, self._http):
                if front is not None:
                    rest.push_async_callback(_stop_at_once, front)


async def _stop_at_once(front: HttpServer | GrpcServer) -> None:
    # A drain that was cut short has cancelled what would be waited for here.
    with contextlib.suppress(asyncio.CancelledError):
        await front.stop(0.0)


def _of_clients(listener: Listener) -> Listener:
    """A listener that is not told of the copies that shadow traffic is made of."""

    def told(request: InferRequest, outcome: Outcome) -> None:
        if not isinstance(request, ShadowRequest):
            listener(request, outcome)

    return told


def _left(end: float) -> float:
    return max(0.0, end - time.monotonic())
