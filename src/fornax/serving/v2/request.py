"""An inference request in the V2 protocol's JSON, its binary tensors behind it.

The JSON is read into a `Plan`: everything that its text alone decides. Clients send the same text
again and again with other tensors behind it, so plans are kept.
"""

import dataclasses
import re
from typing import Any

import numpy as np

from fornax.config import ServingCode, ServingError
from fornax.serving.access import Limits
from fornax.serving.types import InferRequest
from fornax.serving.v2.datatypes import Raw, count, decode_raw, dtype_of, refuse
from fornax.serving.v2.json_tensors import from_json
from fornax.serving.v2.parameters import (
    MAX_NAME,
    Common,
    SharedSpan,
    check_shared,
    common_parameters,
    function_of,
    none_left,
    shared_span,
)
from fornax.serving.v2.reading import all_distinct, name_in, object_in, only_known, parse
from fornax.serving.v2.shared_memory import SharedMemory
from fornax.serving.v2.wanted import Output, Wanted

__all__ = ["Decoder"]

_KEPT = 256
_KEPT_BYTES = 4096
_FIRST_ID = re.compile(rb'\s*\{\s*"id"\s*:\s*"([^"\\\x00-\x1f\x7f-\xff]{1,128})"\s*,')
_KEYS = frozenset({"id", "parameters", "inputs", "outputs"})
_INPUT_KEYS = frozenset({"name", "datatype", "shape", "parameters", "data"})
_OUTPUT_KEYS = frozenset({"name", "parameters"})


@dataclasses.dataclass(frozen=True, slots=True)
class _Input:
    name: str
    datatype: str
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    elements: int
    size: int = -1
    """Bytes behind the JSON; -1: none, it is `array` or in shared memory."""
    plain: bool = False
    """Whether its bytes are its array: no BYTES, no BOOL, not empty."""
    array: np.ndarray | None = None
    span: SharedSpan | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class _Plan:
    common: Common
    timeout: float
    """Seconds; 0: none."""
    inputs: tuple[_Input, ...]
    binary: int
    """Bytes behind the JSON, all inputs together."""
    names: tuple[str, ...]
    wanted: Wanted
    """Its regions are not looked up yet."""
    shared: bool
    """Whether outputs go to shared memory."""
    layout: object | None
    """See `InferRequest`; None where the inputs' shapes are not all there is to know."""


class Decoder:
    """Reads requests; of one event loop."""

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
    ) -> tuple[InferRequest, Wanted]:
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
                f"Inference-Header-Content-Length: {header} is no size of JSON in a body of "
                f"{len(body)} bytes"
            )
        plan, name = self._plan(text)
        inputs = self._inputs(plan, body, len(text))
        common = plan.common
        model, function = function_of(model, common.function)
        wanted = plan.wanted
        if plan.shared or name:
            wanted = self._find(wanted, name)
        request = InferRequest(
            model,
            inputs,
            version,
            function,
            wanted.id,
            plan.names,
            common.priority,
            received + plan.timeout if plan.timeout else None,
            common.others,
            received,
            layout=plan.layout,
        )
        return request, wanted

    def _plan(self, text: bytes) -> tuple[_Plan, str]:
        """What the text says, and the request's id if that is the text's first member."""
        if len(text) > _KEPT_BYTES:
            return self._read(text), ""
        plan = self._plans.get(text)
        if plan is not None:
            return plan, ""
        first = _FIRST_ID.match(text)
        if first is None:
            return self._read(text), ""
        # Without its id, a request has the same text as the one before.
        rest = b"{" + text[first.end() :]
        return self._plans.get(rest) or self._read(rest), first[1].decode("ascii")

    def _inputs(self, plan: _Plan, body: bytes, at: int) -> dict[str, np.ndarray]:
        if len(body) - at != plan.binary:
            raise refuse(
                f"{len(body) - at} bytes follow the JSON where its inputs' binary_data_size sum "
                f"to {plan.binary}"
            )
        inputs = {}
        for each in plan.inputs:
            if each.plain:
                flat = np.frombuffer(body, each.dtype, each.elements, at)
                inputs[each.name] = flat.reshape(each.shape)
                at += each.size
            elif each.size >= 0:
                inputs[each.name] = self._checked(each, memoryview(body)[at : at + each.size])
                at += each.size
            elif each.array is not None:
                inputs[each.name] = each.array
            elif each.span is not None:
                region = self._shared.get(each.span.region)
                inputs[each.name] = self._checked(
                    each, region.read(each.span.offset, each.span.byte_size)
                )
        return inputs

    def _checked(self, spec: _Input, data: Raw) -> np.ndarray:
        return decode_raw(spec.name, spec.datatype, spec.shape, data)

    def _find(self, wanted: Wanted, name: str) -> Wanted:
        """With the regions as they are now, and the request's id."""
        outputs = tuple(
            each
            if each.span is None
            else dataclasses.replace(each, region=self._shared.get(each.span.region))
            for each in wanted.outputs
        )
        return Wanted(wanted.binary, outputs, wanted.id or name)

    def _read(self, text: bytes) -> _Plan:
        document = parse(text)
        only_known("the request", document, _KEYS)
        name = document.get("id", "")
        if type(name) is not str or len(name) > MAX_NAME:
            raise refuse(f"id is no string of at most {MAX_NAME} characters")
        common = common_parameters(
            object_in("the request's parameters", document.get("parameters"))
        )
        inputs = tuple(self._input(each) for each in self._list("inputs", document.get("inputs")))
        if not inputs:
            raise refuse("the request has no inputs; list them under inputs")
        all_distinct("inputs", [each.name for each in inputs])
        outputs = tuple(
            self._output(each, common.binary)
            for each in self._list("outputs", document.get("outputs"))
        )
        check_shared(
            sum(each.span.byte_size for each in inputs if each.span), self._limits.max_body_bytes
        )
        names = tuple(each.name for each in outputs)
        all_distinct("outputs", names)
        timeout, limit = common.timeout, self._limits.request_timeout
        plan = _Plan(
            common,
            min(timeout, limit) if timeout and limit else timeout or limit,
            inputs,
            sum(each.size for each in inputs if each.size > 0),
            names,
            Wanted(common.binary, outputs, name),
            any(each.span is not None for each in outputs),
            object() if all(each.plain for each in inputs) else None,
        )
        if len(text) <= _KEPT_BYTES and not name and all(each.array is None for each in inputs):
            if len(self._plans) >= _KEPT:
                self._plans.clear()
            self._plans[text] = plan
        return plan

    def _list(self, what: str, value: object) -> list[Any]:
        if value is None:
            return []
        if type(value) is not list:
            raise refuse(f"{what} is no list")
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
            return _Input(name, datatype, shape, dtype, elements, span=span)
        if size is None:
            array = from_json(name, datatype, shape, document["data"])
            return _Input(name, datatype, shape, dtype, elements, array=array)
        if type(size) is not int or size < 0:
            raise refuse(f"input {name!r}: binary_data_size={repr(size)[:40]} is no size")
        self._fits(name, size)
        plain = datatype not in ("BYTES", "BOOL") and elements > 0
        if plain and size != elements * dtype.itemsize:
            raise refuse(
                f"input {name!r}: binary_data_size={size} where {datatype} of shape {sizes} takes "
                f"{elements * dtype.itemsize}"
            )
        return _Input(name, datatype, shape, dtype, elements, size, plain)

    def _fits(self, name: str, size: int) -> None:
        if size > self._limits.max_tensor_bytes:
            raise ServingError(
                ServingCode.TOO_LARGE,
                f"input {name!r} has {size} bytes; this server takes "
                f"{self._limits.max_tensor_bytes} a tensor",
            )

    def _output(self, document: object, default: bool) -> Output:
        document = object_in("an output", document, empty=False)
        name = name_in("an output", document)
        only_known(f"output {name!r}", document, _OUTPUT_KEYS)
        parameters = object_in(f"the parameters of output {name!r}", document.get("parameters"))
        binary = parameters.pop("binary_data", default)
        if type(binary) is not bool:
            raise refuse(
                f"output {name!r}: binary_data={repr(binary)[:40]} is neither true nor false"
            )
        classes = parameters.pop("classification", 0)
        if type(classes) is not int or not 0 <= classes < 2**31:
            raise refuse(f"output {name!r}: classification={repr(classes)[:40]} is no number")
        span = shared_span(f"output {name!r}", parameters)
        if span is not None and classes:
            raise refuse(f"output {name!r}: classification cannot go to shared memory")
        none_left(f"output {name!r}", parameters)
        return Output(name, binary, classes, span)
