"""An inference request in the V2 protocol's JSON, its binary tensors behind it."""

import dataclasses

import numpy as np

from fornax.config import ServingCode, ServingError
from fornax.serving.access import Limits
from fornax.serving.types import InferRequest
from fornax.serving.v2.datatypes import Raw, count, decode_raw, dtype_of, refuse
from fornax.serving.v2.json_tensors import (
    all_distinct,
    from_json,
    name_in,
    object_in,
    only_known,
    parse,
)
from fornax.serving.v2.parameters import (
    MAX_NAME,
    Common,
    RequestedOutput,
    RequestedOutputs,
    SharedSpan,
    check_shared,
    common_parameters,
    function_of,
    none_left,
    output_options,
    shared_span,
)
from fornax.serving.v2.shared_memory import SharedMemory

__all__ = ["Decoder"]

_KEPT = 256
_KEPT_BYTES = 4096
"""How many texts are remembered, and how long they may be."""
_KEYS = frozenset({"id", "parameters", "inputs", "outputs"})
_INPUT_KEYS = frozenset({"name", "datatype", "shape", "parameters", "data"})
_OUTPUT_KEYS = frozenset({"name", "parameters"})


@dataclasses.dataclass(frozen=True, slots=True)
class _Input:
    name: str
    datatype: str
    shape: tuple[int, ...]
    size: int = -1
    """Bytes behind the JSON; -1: none, it is `array` or in shared memory."""
    array: np.ndarray | None = None
    span: SharedSpan | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class _Plan:
    """What the text of a request says."""

    common: Common
    inputs: list[_Input]
    outputs: RequestedOutputs
    names: tuple[str, ...]
    """Of the outputs."""

    @property
    def repeats(self) -> bool:
        """Whether the same text means the same again, and holds no arrays."""
        return (
            not (self.outputs.id or self.common.others)
            and all(each.size >= 0 for each in self.inputs)
            and all(each.options.span is None for each in self.outputs.outputs)
        )


class Decoder:
    """Reads requests; of one event loop.

    Clients send the same text again and again with other tensors behind it. What it says is
    remembered: reading it again is a seventh of what a small request costs.
    """

    def __init__(self, limits: Limits, shared_memory: SharedMemory):
        self._limits = limits
        self._shared = shared_memory
        self._plans: dict[bytes, _Plan] = {}

    def decode(
        self,
        body: bytes,
        header: int | None,
        model: str,
        version: str = "",
        received: float = 0.0,
    ) -> tuple[InferRequest, RequestedOutputs]:
        """The request for `model`, or `model:function`, and how its answer is wanted.

        `header` is how many bytes of `body` are JSON; None: all. Arrays of binary inputs are views
        of `body`. `received` is by `time.monotonic()`.

        Raises ServingError with what is wrong.
        """
        if header is None:
            text = body
        elif 0 < header <= len(body):
            text = body[:header]
        else:
            raise refuse(
                f"Inference-Header-Content-Length: {header} is not a size of JSON in a body of "
                f"{len(body)} bytes"
            )
        plan = self._plan(text)
        common = plan.common
        inputs = self._arrays(plan.inputs, body, len(text))
        model, function = function_of(model, common.function)
        request = InferRequest(
            model,
            inputs,
            version,
            function,
            plan.outputs.id,
            plan.names,
            common.priority,
            common.deadline(received, self._limits.request_timeout),
            common.others,
            received,
        )
        return request, plan.outputs

    def _plan(self, text: bytes) -> _Plan:
        if len(text) > _KEPT_BYTES:
            return self._read(text)
        plan = self._plans.get(text)
        if plan is None:
            plan = self._read(text)
            if plan.repeats:
                if len(self._plans) >= _KEPT:
                    self._plans.clear()
                self._plans[text] = plan
        return plan

    def _read(self, text: bytes) -> _Plan:
        document = parse(text)
        only_known("the request", document, _KEYS)
        name = document.get("id", "")
        if type(name) is not str or len(name) > MAX_NAME:
            raise refuse(f"id is not a string of at most {MAX_NAME} characters")
        common = common_parameters(
            object_in("the request's parameters", document.get("parameters"))
        )
        inputs = self._inputs(document.get("inputs"))
        outputs = tuple(
            self._output(each, common.binary)
            for each in self._list("outputs", document.get("outputs"))
        )
        names = tuple(each.name for each in outputs)
        all_distinct("outputs", names)
        return _Plan(common, inputs, RequestedOutputs(common.binary, outputs, name), names)

    def _inputs(self, value: object) -> list[_Input]:
        specs = [self._input(each) for each in self._list("inputs", value)]
        if not specs:
            raise refuse("the request has no inputs; list them under inputs")
        all_distinct("inputs", [each.name for each in specs])
        check_shared(
            sum(each.span.byte_size for each in specs if each.span), self._limits.max_body_bytes
        )
        return specs

    def _arrays(self, specs: list[_Input], body: bytes, at: int) -> dict[str, np.ndarray]:
        """The inputs' arrays; binary ones lie in `body` from `at` on."""
        binary = sum(each.size for each in specs if each.size > 0)
        if len(body) - at != binary:
            raise refuse(
                f"{len(body) - at} bytes follow the JSON where its inputs' binary_data_size sum "
                f"to {binary}"
            )
        arrays = {}
        for each in specs:
            if each.array is not None:
                arrays[each.name] = each.array
                continue
            if each.span is not None:
                region = self._shared.get(each.span.region)
                data: Raw = region.read(each.span.offset, each.span.byte_size)
            else:
                data = memoryview(body)[at : at + each.size]
                at += each.size
            arrays[each.name] = decode_raw(each.name, each.datatype, each.shape, data)
        return arrays

    def _list(self, what: str, value: object) -> list[object]:
        if value is None:
            return []
        if type(value) is not list:
            raise refuse(f"{what} is not a list")
        if len(value) > self._limits.max_tensors:
            raise refuse(
                f"{what} has {len(value)} tensors; this server takes {self._limits.max_tensors}"
            )
        return value

    def _input(self, document: object) -> _Input:
        document = object_in("an input", document, empty=False)
        name = name_in("an input", document)
        only_known(f"input {name!r}", document, _INPUT_KEYS)
        datatype = document.get("datatype")
        dtype = dtype_of(name, datatype)
        assert isinstance(datatype, str)
        sizes = document.get("shape")
        if type(sizes) is not list:
            raise refuse(f"input {name!r} has no shape; it is a list of sizes")
        shape = tuple(sizes)
        elements = count(name, shape)
        self._fits(name, elements * dtype.itemsize)
        parameters = object_in(f"the parameters of input {name!r}", document.get("parameters"))
        size = parameters.pop("binary_data_size", None)
        span = shared_span(f"input {name!r}", parameters)
        none_left(f"input {name!r}", parameters)
        ways = (size is not None) + (span is not None) + ("data" in document)
        if ways != 1:
            raise refuse(
                f"input {name!r} has {'several sources' if ways else 'no data'}; give one of data, "
                "binary_data_size and shared_memory_region"
            )
        if span is not None:
            self._fits(name, span.byte_size)
            return _Input(name, datatype, shape, span=span)
        if size is None:
            array = from_json(name, datatype, shape, document["data"])
            return _Input(name, datatype, shape, array=array)
        if type(size) is not int or size < 0:
            raise refuse(f"input {name!r}: binary_data_size={repr(size)[:40]} is not a size")
        self._fits(name, size)
        fixed = datatype not in ("BYTES", "BOOL") and elements > 0
        if fixed and size != elements * dtype.itemsize:
            raise refuse(
                f"input {name!r}: binary_data_size={size} where {datatype} of shape {sizes} takes "
                f"{elements * dtype.itemsize}"
            )
        return _Input(name, datatype, shape, size)

    def _fits(self, name: str, size: int) -> None:
        if size > self._limits.max_tensor_bytes:
            raise ServingError(
                ServingCode.TOO_LARGE,
                f"input {name!r} has {size} bytes; this server takes "
                f"{self._limits.max_tensor_bytes} a tensor",
            )

    def _output(self, document: object, default: bool) -> RequestedOutput:
        document = object_in("an output", document, empty=False)
        name = name_in("an output", document)
        only_known(f"output {name!r}", document, _OUTPUT_KEYS)
        parameters = object_in(f"the parameters of output {name!r}", document.get("parameters"))
        binary = parameters.pop("binary_data", default)
        if type(binary) is not bool:
            raise refuse(
                f"output {name!r}: binary_data={repr(binary)[:40]} is neither true nor false"
            )
        options = output_options(f"output {name!r}", parameters, self._shared)
        return RequestedOutput(name, binary, options)
