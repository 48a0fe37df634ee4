"""Serving: a server of exported models, over the V2 inference protocol (HTTP and gRPC).

What needs JAX, FastAPI or gRPC is imported when it is first asked for.
"""

import importlib
from typing import TYPE_CHECKING

from fornax.serving.access import Auth, Limits, Tls
from fornax.serving.backend import Backend, BackendFactory
from fornax.serving.config import HostConfig
from fornax.serving.events import Events, Refusal, StateChange
from fornax.serving.types import (
    InferRequest,
    InferResult,
    ModelMetadata,
    TensorMetadata,
    Timing,
)

if TYPE_CHECKING:
    from fornax.serving.host import Host
    from fornax.serving.run import HostServer, run_host
    from fornax.serving.settings import ModelSettings

__all__ = [
    "Auth",
    "Backend",
    "BackendFactory",
    "Events",
    "Host",
    "HostConfig",
    "HostServer",
    "InferRequest",
    "InferResult",
    "Limits",
    "ModelMetadata",
    "ModelSettings",
    "Refusal",
    "StateChange",
    "TensorMetadata",
    "Timing",
    "Tls",
    "run_host",
]

_LAZY = {"Host": "host", "HostServer": "run", "ModelSettings": "settings", "run_host": "run"}


def __getattr__(name: str) -> object:
    if name in _LAZY:
        return getattr(importlib.import_module(f"fornax.serving.{_LAZY[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
