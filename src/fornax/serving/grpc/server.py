"""The gRPC server: the V2 inference service, health and reflection, on the running event loop."""

from typing import TYPE_CHECKING

from fornax.config.credentials import Credentials
from fornax.serving.access import Auth, Limits, Tls
from fornax.serving.config import Address
from fornax.serving.grpc.front import Compression, Front, Listening
from fornax.serving.grpc.health import Health
from fornax.serving.grpc.inference import Inference
from fornax.serving.grpc.management import Management
from fornax.serving.grpc.methods import METHODS, unary
from fornax.serving.grpc.stream import Streams
from fornax.serving.v2.shared_memory import SharedMemory

if TYPE_CHECKING:
    from fornax.serving.host import Host

__all__ = ["GrpcServer"]


class GrpcServer:
    """Serves a Host over gRPC. Everything runs on the loop that `start` is called in."""

    def __init__(
        self,
        host: "Host",
        address: Address,
        *,
        limits: Limits | None = None,
        auth: Auth | None = None,
        admin: Auth | None = None,
        tls: Tls | None = None,
        credentials: Credentials | None = None,
        shared_memory: SharedMemory | None = None,
        trace_sample_rate: float = 0.0,
        compression: Compression = "none",
    ):
        """Nothing listens yet.

        Args:
          host: the server's Host, or what has its methods.
          address: where to listen; port 0 for any.
          auth: the tokens of which a call must present one, liveness and readiness excepted.
          admin: the tokens for calls that change the server; None: those of `auth`.
          credentials: see `Front`.
          shared_memory: the registry that HTTP has too; None: shared memory is refused.
          trace_sample_rate: share of requests that is traced, for clients that ask.
          compression: of answers; requests come as their client likes.
        """
        limits = limits or Limits()
        self._front = Front(
            address=address,
            limits=limits,
            auth=auth,
            admin=admin,
            tls=tls,
            credentials=credentials,
            compression=compression,
        )
        self._host = host
        memory = SharedMemory(enabled=False) if shared_memory is None else shared_memory
        self._inference = Inference(host, limits, memory)
        self._streams = Streams(self._inference, limits)
        self._management = Management(host, memory, trace_sample_rate)
        self._health: Health | None = None
        self._listening: Listening | None = None

    @property
    def running(self) -> int:
        """Inferences being answered."""
        return self._inference.running

    async def start(self) -> Address:
        """Listen; where.

        Raises:
          OSError: the address cannot be bound.
          ConfigError: the certificate or its key cannot be read.
        """
        events = self._host.events
        self._health = Health(self._host)
        handlers = {
            "ModelInfer": self._inference.handler(),
            "ModelStreamInfer": self._streams.handler(),
        }
        for name in METHODS.keys() - handlers.keys():
            handlers[name] = unary(METHODS[name], getattr(self._management, name))
        self._listening = await self._front.listen(
            handlers, self._health, lambda e: events.tell_refused("grpc", e.code, str(e))
        )
        return self._listening.address

    async def stop(self, drain_seconds: float = 0.0) -> None:
        """Take no new calls, answer those that run for at most `drain_seconds`, close.

        May be called again when it was cancelled.
        """
        if self._listening is None:
            return
        self._inference.stopping = True
        self._streams.close()
        if self._health is not None:
            self._health.close()
        await self._listening.stop(drain_seconds)
        self._listening = None
        self._inference.close()
        if self._health is not None:
            self._health.detach()
            self._health = None
