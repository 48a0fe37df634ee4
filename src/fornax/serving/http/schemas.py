"""What calls take and give, for their checks and the OpenAPI document."""

from pydantic import BaseModel, ConfigDict, Field

__all__ = [
    "Config",
    "Empty",
    "ErrorAnswer",
    "GenerateAnswer",
    "GenerateBody",
    "IndexBody",
    "IndexEntry",
    "InferAnswer",
    "InferBody",
    "Live",
    "LoadBody",
    "LogSettings",
    "Metadata",
    "ModelReady",
    "Ready",
    "RegionAnswer",
    "RegisterBody",
    "RolledBack",
    "ServerMetadata",
    "Shadow",
    "Statistics",
    "TraceSettings",
    "UnloadBody",
]


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class ErrorAnswer(BaseModel):
    """Why a call failed."""

    error: str = Field(description="What was wrong, what is allowed, how to fix it.")


class Empty(BaseModel):
    """Done."""


class Live(BaseModel):
    """The server runs."""

    live: bool


class Ready(BaseModel):
    """The server takes requests."""

    ready: bool


class ModelReady(BaseModel):
    """A model takes requests."""

    name: str
    ready: bool


class ServerMetadata(BaseModel):
    """Who answers."""

    name: str
    version: str
    extensions: list[str] = Field(description="Triton's extensions of the protocol it has.")


class TensorMetadata(BaseModel):
    """A tensor of a model."""

    name: str
    datatype: str
    shape: list[int] = Field(description="-1 for a size that may vary.")


class Metadata(BaseModel):
    """A model's tensors."""

    name: str
    versions: list[str]
    platform: str
    inputs: list[TensorMetadata]
    outputs: list[TensorMetadata]


class Config(BaseModel):
    """A model's configuration, in the names of Triton's."""

    model_config = ConfigDict(extra="allow")
    name: str


class Count(BaseModel):
    """How often, and how long in all."""

    count: int
    ns: int


class RequestStatistics(BaseModel):
    """Requests and where their time went."""

    success: Count
    fail: Count
    queue: Count
    compute_input: Count
    compute_infer: Count
    compute_output: Count
    cache_hit: Count
    cache_miss: Count


class BatchStatistics(BaseModel):
    """Batches of one size."""

    batch_size: int
    compute_input: Count
    compute_infer: Count
    compute_output: Count


class MemoryUsage(BaseModel):
    """Memory that a model takes."""

    type: str
    id: int
    byte_size: int


class ModelStatistics(BaseModel):
    """What a version of a model has done."""

    name: str
    version: str
    last_inference: int = Field(description="Milliseconds since 1970; 0: none yet.")
    inference_count: int = Field(description="Rows answered.")
    execution_count: int = Field(description="Batches computed.")
    inference_stats: RequestStatistics
    batch_stats: list[BatchStatistics]
    memory_usage: list[MemoryUsage]


class Statistics(BaseModel):
    """What models have done."""

    model_stats: list[ModelStatistics]


class IndexBody(_Body):
    """Which versions to list."""

    ready: bool = Field(False, description="Only those that take requests.")


class IndexEntry(BaseModel):
    """A version in the repository."""

    name: str
    version: str
    state: str = Field(description="READY, LOADING, UNLOADING or UNAVAILABLE.")
    reason: str = Field(description="Why it is not ready.")


class LoadBody(_Body):
    """What to load."""

    parameters: dict[str, object] = Field(
        default_factory=dict,
        description="`version`: that one alone. `config` and files are not taken: a model is "
        "configured by its serving.yaml.",
    )


class UnloadBody(_Body):
    """What to unload."""

    parameters: dict[str, object] = Field(
        default_factory=dict,
        description="`version`: that one alone. `unload_dependents`: no model depends on others.",
    )


class RolledBack(BaseModel):
    """The version that serves now, and the one before."""

    name: str
    version: str
    previous: str
    persistent: bool = Field(description="Whether it outlasts a restart.")


class Shadow(BaseModel):
    """How a shadow version's outputs differ."""

    model_config = ConfigDict(extra="allow")


class RegisterBody(_Body):
    """A span of a POSIX shared memory object."""

    key: str = Field(description="The object's name, such as `/input`.")
    byte_size: int = Field(ge=1, lt=2**63)
    offset: int = Field(0, ge=0, lt=2**63)


class RegionAnswer(BaseModel):
    """A registered region."""

    name: str
    key: str
    offset: int
    byte_size: int


class TraceSettings(BaseModel):
    """How requests are traced."""

    model_config = ConfigDict(extra="allow")
    trace_level: list[str]
    trace_rate: str
    trace_mode: str


class LogSettings(BaseModel):
    """What is logged."""

    log_file: str
    log_info: bool
    log_warning: bool
    log_error: bool
    log_verbose_level: int
    log_format: str


class InputTensor(BaseModel):
    """A tensor for the model: in `data`, in binary behind the JSON, or in shared memory."""

    name: str
    datatype: str = Field(description="BOOL, INT8 to UINT64, FP16, BF16, FP32, FP64 or BYTES.")
    shape: list[int]
    data: list[object] | None = Field(
        None, description="The elements, flat in row-major order or nested; NaN is the string NaN."
    )
    parameters: dict[str, object] | None = Field(
        None,
        description="`binary_data_size`, or `shared_memory_region`, `shared_memory_byte_size` and "
        "`shared_memory_offset`.",
    )


class OutputTensor(BaseModel):
    """How an output is wanted."""

    name: str
    parameters: dict[str, object] | None = Field(
        None, description="`binary_data`, `classification`, or where in shared memory."
    )


class InferBody(BaseModel):
    """An inference."""

    id: str | None = None
    parameters: dict[str, object] | None = Field(
        None,
        description="`priority` (1 goes first), `timeout` in microseconds, `function`, "
        "`binary_data_output`; others are for the model.",
    )
    inputs: list[InputTensor] = Field(min_length=1)
    outputs: list[OutputTensor] | None = Field(None, description="Those wanted; none: all.")


class AnswerTensor(BaseModel):
    """A tensor of the model's."""

    name: str
    datatype: str
    shape: list[int]
    data: list[object] | None = Field(None, description="The elements, flat in row-major order.")
    parameters: dict[str, object] | None = None


class InferAnswer(BaseModel):
    """An answer."""

    model_name: str
    model_version: str
    id: str | None = None
    parameters: dict[str, object] | None = None
    outputs: list[AnswerTensor]


class GenerateBody(BaseModel):
    """A request by the names of the model's inputs: a bare element or lists for each."""

    model_config = ConfigDict(extra="allow")
    text_input: object = Field(None, description="The prompt, where the model is one of language.")
    id: str | None = None
    parameters: dict[str, object] | None = Field(
        None,
        description="such as `max_tokens` and `temperature`; inputs may be here as well. "
        "`timeout` in microseconds, `priority` (1 goes first), `function`.",
    )


class GenerateAnswer(BaseModel):
    """An answer by the names of the model's outputs; those of one element are bare."""

    model_config = ConfigDict(extra="allow")
    model_name: str
    model_version: str
    text_output: object = Field(None, description="The text, where the model is one of language.")
    id: str | None = None
    done: bool | None = Field(None, description="Of an event: whether it is the last.")
