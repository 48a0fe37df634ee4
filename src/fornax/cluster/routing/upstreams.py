"""Calls over gRPC to replicas, in raw bytes: one channel per replica, and whose word a failure
is."""

import asyncio
from collections.abc import Sequence

import grpc
import grpc.aio

from fornax.cluster.routing.metrics import RouterMetrics
from fornax.cluster.routing.pool import Replica, ReplicaPool
from fornax.cluster.routing.tracing import HEADER as TRACE_HEADER
from fornax.cluster.routing.tracing import RequestTrace
from fornax.config.credentials import HOST_NAME, TOKEN_HEADER, Credentials
from fornax.config.errors import ServingCode, ServingError
from fornax.config.request_id import HEADER
from fornax.serving.grpc.methods import CODE, Context, identify

__all__ = ["REPLICA", "Metadata", "Upstreams", "is_broken", "is_refusal", "say_who"]

Metadata = tuple[tuple[str, str | bytes], ...]

REPLICA = "x-fornax-replica"
"""The metadatum behind a call that has the number of the replica which answered."""
_OPTIONS = (
    ("grpc.max_send_message_length", -1),
    ("grpc.max_receive_message_length", -1),
    ("grpc.use_local_subchannel_pool", 1),  # ports come again with other replicas
    ("grpc.enable_http_proxy", 0),
    ("grpc.enable_retries", 0),
    ("grpc.ssl_target_name_override", HOST_NAME),  # the certificate is the run's, of no address
)
_OWN = frozenset(("user-agent", "x-forwarded-for", HEADER, TOKEN_HEADER))
_BROKEN = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED, grpc.StatusCode.INTERNAL)
_REFUSALS = (ServingCode.UNAVAILABLE.name, ServingCode.RESOURCE_EXHAUSTED.name)


class Upstreams:
    """The channels to the replicas of a pool."""

    def __init__(self, pool: ReplicaPool, metrics: RouterMetrics, credentials: Credentials):
        """`credentials`: see `client_session`."""
        self.pool = pool
        self.metrics = metrics
        self._token = (TOKEN_HEADER, credentials.token)
        shown, key = credentials.certificate.encode(), credentials.key.encode()
        self._secure = grpc.ssl_channel_credentials(shown, key, shown) if key else None
        self._channels: dict[Replica, grpc.aio.Channel] = {}

    async def close(self) -> None:
        """End all calls."""
        await asyncio.gather(*(each.close() for each in self._channels.values()))
        self._channels.clear()

    async def choose(
        self, context: Context, tried: Sequence[Replica] = ()
    ) -> tuple[Replica, grpc.aio.Channel] | None:
        """A replica that takes requests; None where all of them are among those tried.

        Raises:
          ServingError: none is ready in time.
        """
        while (choice := self.pool.choose((), tried)) is None:
            if tried:
                return None
            left, seconds = context.time_remaining(), self.pool.config.queue_timeout
            if not await self.pool.wait(seconds if left is None else min(left, seconds)):
                raise ServingError(
                    ServingCode.UNAVAILABLE,
                    f"no replica is ready, after {seconds:g} s; try again later",
                )
        return choice.replica, await self.channel(choice.replica)

    async def channel(self, replica: Replica) -> grpc.aio.Channel:
        """A replica's channel; closes those of replicas that are gone."""
        channel = self._channels.get(replica)
        if channel is None:
            channel = self._opened(replica.grpc)
            gone = [each for each in self._channels if each.phase == "ended"]
            closing = [self._channels.pop(each).close() for each in gone]
            self._channels[replica] = channel
            await asyncio.gather(*closing)
        return channel

    def _opened(self, address: str) -> grpc.aio.Channel:
        if self._secure is None:
            return grpc.aio.insecure_channel(address, _OPTIONS)
        return grpc.aio.secure_channel(address, self._secure, _OPTIONS)

    def metadata(self, context: Context, trace: RequestTrace | None = None) -> Metadata:
        """What a client's call brings, as a replica gets it, its id, its trace and the token."""
        found = context.invocation_metadata() or ()
        ours: Metadata = ((HEADER, identify(context)), self._token)
        own = _OWN
        if trace is not None:
            own = own | {TRACE_HEADER}
            ours = *ours, (TRACE_HEADER, trace.context.traceparent)
        return *((name, value) for name, value in found if name not in own), *ours

    def broke(self, replica: Replica, breaks: int, why: str) -> None:
        """A replica ended under a call, for the `breaks`th time: it may be made again.

        Raises:
          ServingError: it was made often enough.
        """
        self.pool.suspect(replica)
        if breaks > self.pool.config.max_retries:
            raise ServingError(
                ServingCode.UNAVAILABLE,
                f"{breaks} replicas ended while they answered this request ({why}); it is not "
                "tried again",
            )
        self.metrics.retry("broken")


def say_who(context: Context, replica: Replica) -> None:
    """Tell the client behind its call which replica answers it, and the call's id."""
    metadata = (HEADER, identify(context)), (REPLICA, str(replica.number))
    context.set_trailing_metadata(metadata)


def is_broken(error: grpc.aio.AioRpcError) -> bool:
    """Whether a call ended with its connection, rather than by its server's word."""
    return error.code() in _BROKEN and _said(error) is None


def is_refusal(error: grpc.aio.AioRpcError) -> bool:
    """Whether a server was full or stopping, and another one may take the call."""
    return _said(error) in _REFUSALS


def _said(error: grpc.aio.AioRpcError) -> object:
    return dict(error.trailing_metadata() or ()).get(CODE)
