"""One server, many replicas: a router before them, and what keeps them alive."""

from fornax.cluster.routing.background import Server
from fornax.cluster.routing.pool import Policy, RoutingConfig
from fornax.cluster.routing.run import launch_replicas
from fornax.cluster.routing.service import Service, host_service, serve_service
from fornax.cluster.routing.status import (
    ServingStatus,
    drill_replica,
    read_serving_status,
    request_rolling_restart,
)

__all__ = [
    "Policy",
    "RoutingConfig",
    "Server",
    "Service",
    "ServingStatus",
    "drill_replica",
    "host_service",
    "launch_replicas",
    "read_serving_status",
    "request_rolling_restart",
    "serve_service",
]
