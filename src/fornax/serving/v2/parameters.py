"""Parameters of requests and tensors that have a meaning in the V2 protocol's extensions."""

import dataclasses
from collections.abc import Mapping

from fornax.config import ServingCode, ServingError
from fornax.serving.v2.datatypes import Raw, refuse
from fornax.serving.v2.shared_memory import Region, SharedMemory

__all__ = [
    "MAX_NAME",
    "Common",
    "OutputOptions",
    "RequestedOutput",
    "RequestedOutputs",
    "SharedSpan",
    "check_shared",
    "common_parameters",
    "function_of",
    "none_left",
    "output_options",
    "shared_span",
]

MAX_NAME = 1024
"""Characters of an id or a name: the log and the answer repeat them."""

_MICROSECOND = 1e-6
_LONGEST = 10**15
"""Microseconds; what is over 30 years is not a timeout."""
_SEQUENCE = ("sequence_id", "sequence_start", "sequence_end")


@dataclasses.dataclass(frozen=True, slots=True)
class Common:
    """What a request's own parameters say."""

    priority: int = 0
    timeout: float = 0.0
    """Seconds; 0: none."""
    function: str = ""
    binary: bool = False
    """Whether outputs are wanted in binary, where they do not say it themselves."""
    others: Mapping[str, object] = dataclasses.field(default_factory=dict)
    """What is for the model."""

    def deadline(self, received: float, limit: float) -> float | None:
        """By when an answer is due: in `timeout` seconds, and in the server's `limit`; 0: none."""
        timeout = min(self.timeout, limit) if self.timeout and limit else self.timeout or limit
        return received + timeout if timeout else None


@dataclasses.dataclass(frozen=True, slots=True)
class SharedSpan:
    """A span of a registered region, by the parameters of a tensor."""

    region: str
    byte_size: int
    offset: int


def common_parameters(parameters: dict[str, object]) -> Common:
    """Read and take what has a meaning; ServingError where that is not as it should be."""
    if not parameters:
        return Common()
    for name in _SEQUENCE:
        if parameters.pop(name, None) not in (None, 0, "", False):
            raise ServingError(
                ServingCode.UNIMPLEMENTED,
                f"parameter {name}: sequences are not served, since functions keep no state "
                "between requests; pass the state as an input",
            )
    priority = _integer(parameters, "priority", 2**32)
    timeout = _integer(parameters, "timeout", _LONGEST)
    function = parameters.pop("function", "")
    if type(function) is not str:
        raise refuse(f"parameter function={repr(function)[:40]} is not a name")
    binary = parameters.pop("binary_data_output", False)
    if type(binary) is not bool:
        raise refuse(f"parameter binary_data_output={repr(binary)[:40]} is not a truth value")
    return Common(priority, timeout * _MICROSECOND, function, binary, parameters)


def function_of(model: str, function: str = "") -> tuple[str, str]:
    """A model's own name and a function, which either may carry: `ranker:score`.

    Raises ServingError when both do, and differ.
    """
    model, _, named = model.partition(":")
    if named and function and named != function:
        raise refuse(
            f"the model's name asks for function {named[:80]!r}, parameter function for "
            f"{function[:80]!r}; leave one out"
        )
    return model, named or function


def check_shared(size: int, most: int) -> None:
    """Refuse a request that would have more than `most` bytes copied out of shared memory."""
    if size > most:
        raise ServingError(
            ServingCode.TOO_LARGE,
            f"the inputs in shared memory have {size} bytes together; this server takes {most}",
        )


def none_left(what: str, parameters: Mapping[str, object]) -> None:
    """Refuse parameters that nothing took."""
    if parameters:
        raise refuse(f"{what}: parameter {min(parameters)[:80]!r} has no meaning here; remove it")


def shared_span(what: str, parameters: dict[str, object]) -> SharedSpan | None:
    """Take the span that a tensor's parameters name; None: it is not in shared memory."""
    region = parameters.pop("shared_memory_region", None)
    if region is None:
        return None
    if type(region) is not str:
        raise refuse(f"{what}: shared_memory_region={repr(region)[:40]} is not a name")
    if "shared_memory_byte_size" not in parameters:
        raise refuse(f"{what} lies in shared memory without shared_memory_byte_size")
    size = _integer(parameters, "shared_memory_byte_size", 2**63, what)
    return SharedSpan(region, size, _integer(parameters, "shared_memory_offset", 2**63, what))


def _integer(
    parameters: dict[str, object], name: str, below: int, what: str = "the request"
) -> int:
    value = parameters.pop(name, 0)
    if type(value) is not int or not 0 <= value < below:
        raise refuse(f"{what}: parameter {name}={repr(value)[:40]} is not an integer from 0")
    return value


@dataclasses.dataclass(frozen=True, slots=True)
class OutputOptions:
    """How an output is wanted, where not as it is in the answer."""

    classes: int = 0
    """Over 0: this many classes in its stead."""
    span: SharedSpan | None = None
    region: Region | None = None
    """Where it goes, if not into the answer."""

    def share(self, name: str, raw: Raw) -> dict[str, str | int]:
        """Put an output's bytes into its span; the parameters that say where they are.

        Raises ServingError where they do not fit.
        """
        assert self.span is not None
        assert self.region is not None
        if len(raw) > self.span.byte_size:
            raise refuse(
                f"output {name!r} has {len(raw)} bytes; shared_memory_byte_size leaves it "
                f"{self.span.byte_size}"
            )
        self.region.write(self.span.offset, raw)
        offset = {"shared_memory_offset": self.span.offset} if self.span.offset else {}
        return {
            "shared_memory_region": self.span.region,
            "shared_memory_byte_size": len(raw),
            **offset,
        }


def output_options(what: str, parameters: dict[str, object], memory: SharedMemory) -> OutputOptions:
    """What an output's parameters say; ServingError for one that has no meaning."""
    classes = parameters.pop("classification", 0)
    if type(classes) is not int or not 0 <= classes < 2**31:
        raise refuse(f"{what}: classification={repr(classes)[:40]} is not a number of classes")
    span = shared_span(what, parameters)
    none_left(what, parameters)
    if span is not None and classes:
        raise refuse(f"{what}: classification cannot go to shared memory")
    return OutputOptions(classes, span, None if span is None else memory.get(span.region))


@dataclasses.dataclass(frozen=True, slots=True)
class RequestedOutput:
    """How the client asks for one output."""

    name: str
    binary: bool
    options: OutputOptions


@dataclasses.dataclass(frozen=True, slots=True)
class RequestedOutputs:
    """How the client asks for the answer."""

    binary: bool
    """For all outputs, where none is named."""
    outputs: tuple[RequestedOutput, ...] = ()
    id: str = ""
    """The request's, which the answer repeats."""
