"""The generate extension: plain JSON in and out, the response whole or as server-sent events.

`{"text_input": "…", "parameters": {"max_tokens": 8}}` asks, `{"model_name": "lm", "model_version":
"1", "text_output": "…"}` answers. A key that names an input is that tensor, also among the
parameters; any other is a parameter. Tensors of one element are bare, outputs of more are flat.
"""

import asyncio
from collections.abc import Mapping
from time import monotonic
from typing import TYPE_CHECKING

import numpy as np
import orjson
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from fornax.config import ServingCode, ServingError
from fornax.serving.access import Limits
from fornax.serving.backend import stream_of
from fornax.serving.http import bodies
from fornax.serving.http.bodies import ClientLeft
from fornax.serving.http.infer import InferHeaders, ResponseWait, check_room, read_headers
from fornax.serving.http.request_ids import request_id_of
from fornax.serving.http.responses import JSON, Headers, failure_response, send_response
from fornax.serving.http.routing import ServerContext
from fornax.serving.types import InferRequest, InferResult, TensorMetadata
from fornax.serving.v2.datatypes import refuse
from fornax.serving.v2.json_tensors import from_json, object_in, parse, to_json
from fornax.serving.v2.parameters import MAX_NAME, common_parameters, function_of

if TYPE_CHECKING:
    from fornax.serving.host import Host

__all__ = ["generate_routes", "read_generate", "write_generate"]

_MODEL = "/v2/models/{model}"
_VERSION = "/v2/models/{model}/versions/{version}"
_MOST = 2**20
"""Bytes of a body, also after decompression."""
_STREAM = "stream"
_EVENTS: Headers = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
]


def generate_routes(context: ServerContext) -> list[Route]:
    """The routes; FastAPI has no part in them."""
    app = _Generate(context)
    return [
        Route(model + call, app, methods=["POST"])
        for model in (_MODEL, _VERSION)
        for call in ("/generate", "/generate_stream")
    ]


class _Generate:
    """The app; of one event loop."""

    def __init__(self, context: ServerContext):
        self._host = context.host
        self._events = context.events
        self._limits = context.limits
        self._running = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request, whose body has been read."""
        names = scope["path_params"]
        streams = scope["path"].endswith("_stream")
        request = None
        try:
            head = read_headers(dict(scope["headers"]))
            request = await self._read(head, scope, receive, streams)
            request.request_id = request_id_of(scope)
            self._running += 1
            try:
                if streams:
                    await self._stream(request, receive, send)
                else:
                    await self._whole(request, receive, send)
            finally:
                self._running -= 1
        except ClientLeft:
            pass
        except Exception as error:
            if request is None and isinstance(error, ServingError):
                self._events.tell_refused(
                    *("http", error.code, str(error), names["model"]),
                    request_id=request_id_of(scope),
                )
            await send_response(send, failure_response(error))

    async def _read(
        self, head: InferHeaders, scope: Scope, receive: Receive, streams: bool
    ) -> InferRequest:
        limits = self._limits
        body = (await receive())["body"]
        received = monotonic()
        coding = dict(scope["headers"]).get(b"content-encoding")
        if coding is not None:
            body = await bodies.inflate(body, coding, min(_MOST, limits.max_body_bytes))
        check_room(self._running, limits)
        names = scope["path_params"]
        model, version = names["model"], names.get("version", "")
        return read_generate(
            body, head, model, version, self._host, limits, received, streams=streams
        )

    async def _whole(self, request: InferRequest, receive: Receive, send: Send) -> None:
        with ResponseWait(self._host.submit(request), request, receive) as future:
            body = write_generate(await future)
        await send_response(send, (200, [JSON], body))

    async def _stream(self, request: InferRequest, receive: Receive, send: Send) -> None:
        """An event for each piece; errors before the first are answered as those of any request."""
        pieces: asyncio.Queue[InferResult | None] = asyncio.Queue()
        request.pieces = pieces.put_nowait
        begun = False

        async def event(data: bytes, last: bool) -> None:
            nonlocal begun
            if not begun:
                begun = True
                await send({"type": "http.response.start", "status": 200, "headers": _EVENTS})
            data = b"data: %b\n\n" % data
            await send({"type": "http.response.body", "body": data, "more_body": not last})

        try:
            with ResponseWait(self._host.submit(request), request, receive) as future:
                future.add_done_callback(lambda _: pieces.put_nowait(None))
                while (piece := await pieces.get()) is not None:
                    await event(write_generate(piece, done=False), last=False)
                last = write_generate(await future, done=True)
            await event(last, last=True)
        except ClientLeft:
            raise
        except Exception as error:
            if not begun:
                raise
            await event(failure_response(error)[2], last=True)


_OWN = frozenset({"model_name", "model_version", "id", "parameters", "done", "error"})
"""Keys of an answer that are not outputs."""


def read_generate(
    body: bytes,
    head: InferHeaders,
    model: str,
    version: str,
    host: "Host",
    limits: Limits,
    received: float,
    *,
    streams: bool,
) -> InferRequest:
    """The request in `body`.

    `streams`: whether the answer may come in pieces. Then a model that can answer so does, unless
    its input `stream` is there and false.

    Raises ServingError with what is wrong.
    """
    given = parse(body)
    name = given.pop("id", head.id)
    if type(name) is not str or len(name) > MAX_NAME:
        raise refuse(f"id is not a string of at most {MAX_NAME} characters")
    own = object_in("parameters", given.pop("parameters", None))
    if twice := given.keys() & own.keys():
        raise refuse(f"{min(twice)[:80]!r} is given twice, also under parameters; send it once")
    given |= own
    model, function = function_of(model, _function(given))
    asked = f"{model}:{function}" if function else model
    tensors = {spec.name: spec for spec in host.metadata(asked, version).inputs}
    if streams and _STREAM in tensors and stream_of(host.backends.get(model)) is not None:
        given.setdefault(_STREAM, True)
    inputs = {key: _tensor(tensors[key], given.pop(key), limits) for key in tensors if key in given}
    common = common_parameters(given)
    if common.binary:
        raise refuse("binary_data_output: generate answers in JSON; ask infer for binary tensors")
    return InferRequest(
        model,
        inputs,
        version,
        function,
        name,
        priority=common.priority,
        deadline=common.deadline(received, limits.request_timeout),
        parameters=common.others,
        received=received,
        trace=head.trace,
    )


def _function(given: Mapping[str, object]) -> str:
    """What parameter `function` names; what is not a name is refused with the other parameters."""
    function = given.get("function", "")
    return function if isinstance(function, str) else ""


def _tensor(spec: TensorMetadata, value: object, limits: Limits) -> np.ndarray:
    """An input: a bare element, or lists; sizes that are missing in front are 1."""
    shape: list[int] = []
    level = value
    while isinstance(level, list) and len(shape) < len(spec.shape):
        shape.append(len(level))
        level = level[0] if level else None
    for _ in range(len(spec.shape) - len(shape)):
        shape.insert(0, 1)
        value = [value]
    array = from_json(spec.name, spec.datatype, shape, value)
    if array.nbytes > limits.max_tensor_bytes:
        raise ServingError(
            ServingCode.TOO_LARGE,
            f"input {spec.name!r} has {array.nbytes} bytes; this server takes "
            f"{limits.max_tensor_bytes} a tensor",
        )
    return array


def write_generate(result: InferResult, *, done: bool | None = None) -> bytes:
    """An answer, or a piece of one; `done`: whether it is the last, None: there is only one.

    Raises ServingError for outputs that are not for JSON, or named as the answer's own keys.
    """
    document: dict[str, object] = {"model_name": result.model, "model_version": result.version}
    if result.id:
        document["id"] = result.id
    if result.parameters:
        document["parameters"] = dict(result.parameters)
    if done is not None:
        document["done"] = done
    for name, array in result.outputs.items():
        if name in _OWN:
            raise ServingError(
                ServingCode.UNIMPLEMENTED,
                f"output {name!r} has the name of a key of the answer; ask infer for it",
            )
        values = to_json(name, array)
        document[name] = values[0] if array.size == 1 else values
    return orjson.dumps(document, option=orjson.OPT_SERIALIZE_NUMPY)
