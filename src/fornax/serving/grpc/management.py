"""Every call of the service but inference: health, metadata, repository, memory, settings.

Answers are made from the documents that HTTP sends too.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from google.protobuf import json_format
from google.protobuf.message import Message

from fornax.config.errors import ServingCode, ServingError
from fornax.serving.grpc import inference_pb2 as pb
from fornax.serving.grpc.codec import parameter_values
from fornax.serving.v2 import documents, settings
from fornax.serving.v2.datatypes import refuse
from fornax.serving.v2.shared_memory import CUDA_REFUSED, SharedMemory

if TYPE_CHECKING:
    from fornax.serving.host import Host

__all__ = ["Management"]

_Message = TypeVar("_Message", bound=Message)
_Change = pb.RepositoryModelLoadRequest | pb.RepositoryModelUnloadRequest


def _fill(message: _Message, document: dict[str, Any]) -> _Message:
    """Fill a response from a document; fields that only the JSON has are left out."""
    return json_format.ParseDict(document, message, ignore_unknown_fields=True)


class Management:
    """A method for each call, under its name: from the request to the response."""

    def __init__(self, host: "Host", memory: SharedMemory, trace_sample_rate: float = 0.0):
        self._host = host
        self._memory = memory
        self._trace_sample_rate = trace_sample_rate

    async def ServerLive(self, _: pb.ServerLiveRequest) -> pb.ServerLiveResponse:
        return pb.ServerLiveResponse(live=self._host.live())

    async def ServerReady(self, _: pb.ServerReadyRequest) -> pb.ServerReadyResponse:
        return pb.ServerReadyResponse(ready=self._host.ready())

    async def ModelReady(self, request: pb.ModelReadyRequest) -> pb.ModelReadyResponse:
        ready = self._host.model_ready(request.name, request.version)
        return pb.ModelReadyResponse(ready=ready)

    async def ServerMetadata(self, _: pb.ServerMetadataRequest) -> pb.ServerMetadataResponse:
        return _fill(pb.ServerMetadataResponse(), documents.server_metadata())

    async def ModelMetadata(self, request: pb.ModelMetadataRequest) -> pb.ModelMetadataResponse:
        metadata = self._host.metadata(request.name, request.version)
        return _fill(pb.ModelMetadataResponse(), documents.model_metadata(metadata))

    async def ModelConfig(self, request: pb.ModelConfigRequest) -> pb.ModelConfigResponse:
        config = self._host.config(request.name, request.version)
        return _fill(pb.ModelConfigResponse(), {"config": config})

    async def ModelStatistics(
        self, request: pb.ModelStatisticsRequest
    ) -> pb.ModelStatisticsResponse:
        found = self._host.statistics(request.name, request.version)
        return _fill(pb.ModelStatisticsResponse(), documents.statistics(found))

    async def RepositoryIndex(
        self, request: pb.RepositoryIndexRequest
    ) -> pb.RepositoryIndexResponse:
        _one_repository(request)
        lines = documents.index(self._host.index(request.ready))
        return _fill(pb.RepositoryIndexResponse(), {"models": lines})

    async def RepositoryModelLoad(
        self, request: pb.RepositoryModelLoadRequest
    ) -> pb.RepositoryModelLoadResponse:
        version = _version(request, ())
        await self._host.load(request.model_name, version)
        return pb.RepositoryModelLoadResponse()

    async def RepositoryModelUnload(
        self, request: pb.RepositoryModelUnloadRequest
    ) -> pb.RepositoryModelUnloadResponse:
        # No model here depends on another, so that there is nothing more to unload.
        version = _version(request, ("unload_dependents",))
        await self._host.unload(request.model_name, version)
        return pb.RepositoryModelUnloadResponse()

    async def SystemSharedMemoryStatus(
        self, request: pb.SystemSharedMemoryStatusRequest
    ) -> pb.SystemSharedMemoryStatusResponse:
        known = documents.regions(self._memory.regions(request.name))
        return _fill(
            pb.SystemSharedMemoryStatusResponse(),
            {"regions": {each["name"]: each for each in known}},
        )

    async def SystemSharedMemoryRegister(
        self, request: pb.SystemSharedMemoryRegisterRequest
    ) -> pb.SystemSharedMemoryRegisterResponse:
        self._memory.register(request.name, request.key, request.byte_size, request.offset)
        return pb.SystemSharedMemoryRegisterResponse()

    async def SystemSharedMemoryUnregister(
        self, request: pb.SystemSharedMemoryUnregisterRequest
    ) -> pb.SystemSharedMemoryUnregisterResponse:
        self._memory.unregister(request.name)
        return pb.SystemSharedMemoryUnregisterResponse()

    async def CudaSharedMemoryStatus(self, request: Message) -> Message:
        raise ServingError(ServingCode.UNIMPLEMENTED, CUDA_REFUSED)

    CudaSharedMemoryRegister = CudaSharedMemoryUnregister = CudaSharedMemoryStatus

    async def TraceSetting(self, request: pb.TraceSettingRequest) -> pb.TraceSettingResponse:
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
        return _fill(pb.TraceSettingResponse(), {"settings": values})

    async def LogSettings(self, request: pb.LogSettingsRequest) -> pb.LogSettingsResponse:
        found = settings.update_log_settings(parameter_values(request.settings))
        kinds: dict[type, str] = {bool: "bool_param", int: "uint32_param"}
        values = {
            name: {kinds.get(type(value), "string_param"): value} for name, value in found.items()
        }
        return _fill(pb.LogSettingsResponse(), {"settings": values})


def _trace_value(name: str, values: Sequence[str]) -> str | list[str] | None:
    """A trace setting's value: trace_level is a list, no value at all asks for the default."""
    if not values:
        return None
    return list(values) if name == "trace_level" or len(values) > 1 else values[0]


def _one_repository(request: pb.RepositoryIndexRequest | _Change) -> None:
    if request.repository_name:
        raise refuse(
            f"repository_name={request.repository_name[:80]!r}: this server has one repository, "
            "without a name; leave it out"
        )


def _version(request: _Change, ignored: tuple[str, ...]) -> str:
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
