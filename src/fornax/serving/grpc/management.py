"""Every call of the service but inference: health, metadata, repository, memory, settings.

What is told comes from the documents that HTTP tells too.
"""

from collections.abc import Awaitable, Callable
from typing import Any

from google.protobuf import json_format

from fornax.config.errors import ServingCode, ServingError
from fornax.serving.grpc.messages import METHODS
from fornax.serving.grpc.parameters import parameter_values
from fornax.serving.v2 import documents, settings
from fornax.serving.v2.datatypes import refuse
from fornax.serving.v2.shared_memory import CUDA_REFUSED, SharedMemory

__all__ = ["ADMIN", "OPEN", "Management"]

OPEN = frozenset({"ServerLive", "ServerReady", "ModelReady"})
"""Calls that need no token."""
ADMIN = frozenset(
    {
        "RepositoryModelLoad",
        "RepositoryModelUnload",
        "SystemSharedMemoryStatus",
        "SystemSharedMemoryRegister",
        "SystemSharedMemoryUnregister",
        "TraceSetting",
        "LogSettings",
    }
)
"""Calls that change the server or tell of others' memory, and may need a token of their own."""


def _fill(method: str, document: dict[str, Any]) -> Any:
    """A method's answer from a document; fields that only the JSON has are left out."""
    message = METHODS[method].response()
    return json_format.ParseDict(document, message, ignore_unknown_fields=True)


class Management:
    """Answers by the names of methods. `host` is the server's Host."""

    def __init__(self, host: Any, memory: SharedMemory, trace_sample_rate: float = 0.0):
        self._host = host
        self._memory = memory
        self._trace_sample_rate = trace_sample_rate

    def answers(self) -> dict[str, Callable[[Any, Any], Awaitable[Any]]]:
        """Each call's coroutine: of its request and its context."""
        cuda = ("CudaSharedMemoryStatus", "CudaSharedMemoryRegister", "CudaSharedMemoryUnregister")
        return {
            "ServerLive": self._server_live,
            "ServerReady": self._server_ready,
            "ModelReady": self._model_ready,
            "ServerMetadata": self._server_metadata,
            "ModelMetadata": self._model_metadata,
            "ModelConfig": self._model_config,
            "ModelStatistics": self._model_statistics,
            "RepositoryIndex": self._repository_index,
            "RepositoryModelLoad": self._load,
            "RepositoryModelUnload": self._unload,
            "SystemSharedMemoryStatus": self._memory_status,
            "SystemSharedMemoryRegister": self._memory_register,
            "SystemSharedMemoryUnregister": self._memory_unregister,
            **dict.fromkeys(cuda, self._cuda),
            "TraceSetting": self._trace_setting,
            "LogSettings": self._log_settings,
        }

    async def _server_live(self, _: Any, context: Any) -> Any:
        return METHODS["ServerLive"].response(live=self._host.live())

    async def _server_ready(self, _: Any, context: Any) -> Any:
        return METHODS["ServerReady"].response(ready=self._host.ready())

    async def _model_ready(self, request: Any, context: Any) -> Any:
        ready = self._host.model_ready(request.name, request.version)
        return METHODS["ModelReady"].response(ready=ready)

    async def _server_metadata(self, _: Any, context: Any) -> Any:
        return _fill("ServerMetadata", documents.server_metadata())

    async def _model_metadata(self, request: Any, context: Any) -> Any:
        metadata = self._host.metadata(request.name, request.version)
        return _fill("ModelMetadata", documents.model_metadata(metadata))

    async def _model_config(self, request: Any, context: Any) -> Any:
        config = self._host.config(request.name, request.version)
        return _fill("ModelConfig", {"config": config})

    async def _model_statistics(self, request: Any, context: Any) -> Any:
        found = self._host.statistics(request.name, request.version)
        return _fill("ModelStatistics", documents.statistics(found))

    async def _repository_index(self, request: Any, context: Any) -> Any:
        _one_repository(request)
        lines = documents.index(self._host.index(request.ready))
        return _fill("RepositoryIndex", {"models": lines})

    async def _load(self, request: Any, context: Any) -> Any:
        version = _version(request, ())
        await self._host.load(request.model_name, version)
        return METHODS["RepositoryModelLoad"].response()

    async def _unload(self, request: Any, context: Any) -> Any:
        # No model here depends on another, so that there is nothing more to unload.
        version = _version(request, ("unload_dependents",))
        await self._host.unload(request.model_name, version)
        return METHODS["RepositoryModelUnload"].response()

    async def _memory_status(self, request: Any, context: Any) -> Any:
        known = documents.regions(self._memory.regions(request.name))
        return _fill(
            "SystemSharedMemoryStatus", {"regions": {each["name"]: each for each in known}}
        )

    async def _memory_register(self, request: Any, context: Any) -> Any:
        self._memory.register(request.name, request.key, request.byte_size, request.offset)
        return METHODS["SystemSharedMemoryRegister"].response()

    async def _memory_unregister(self, request: Any, context: Any) -> Any:
        self._memory.unregister(request.name)
        return METHODS["SystemSharedMemoryUnregister"].response()

    async def _cuda(self, request: Any, context: Any) -> Any:
        raise ServingError(ServingCode.UNIMPLEMENTED, CUDA_REFUSED)

    async def _trace_setting(self, request: Any, context: Any) -> Any:
        if request.model_name:
            self._host.metadata(request.model_name)
        changes = {
            name: _trace_value(name, setting.value) for name, setting in request.settings.items()
        }
        found = settings.update_trace_settings(changes, self._trace_sample_rate)
        values = {
            name: {"value": [value] if isinstance(value, str) else list(value)}
            for name, value in found.items()
        }
        return _fill("TraceSetting", {"settings": values})

    async def _log_settings(self, request: Any, context: Any) -> Any:
        found = settings.update_log_settings(parameter_values(request.settings))
        response = METHODS["LogSettings"].response()
        for name, value in found.items():
            setting = response.settings[name]
            if isinstance(value, bool):
                setting.bool_param = value
            elif isinstance(value, int):
                setting.uint32_param = value
            else:
                setting.string_param = value
        return response


def _trace_value(name: str, values: Any) -> str | list[str] | None:
    """A trace setting's value: trace_level is a list, no value at all asks for the default."""
    if not values:
        return None
    return list(values) if name == "trace_level" or len(values) > 1 else values[0]


def _one_repository(request: Any) -> None:
    if request.repository_name:
        raise refuse(
            f"repository_name={request.repository_name[:80]!r}: this server has one repository, "
            "without a name; leave it out"
        )


def _version(request: Any, ignored: tuple[str, ...]) -> str:
    """The version that a load or unload names in its parameters; empty: none."""
    _one_repository(request)
    values = parameter_values(request.parameters)
    for name in ignored:
        if not isinstance(values.pop(name, False), bool):
            raise refuse(f"parameter {name} is true or false")
    version = values.pop("version", "")
    if values:
        raise refuse(
            f"parameter {min(values)[:80]!r} has no meaning here: a model's configuration "
            "and files are those of its repository folder; only version is taken"
        )
    if isinstance(version, bool) or not isinstance(version, (str, int)):
        raise refuse("parameter version is a number or a label of the model's")
    return str(version)
