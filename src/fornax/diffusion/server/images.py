"""`POST /v1/images/generations`, `/edits`, `/variations`, and `GET /v1/models`."""

import asyncio
import base64
import secrets
import time
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
from fastapi import APIRouter, Request
from pydantic import ValidationError
from pydantic_core import to_json
from starlette.responses import Response

from fornax.config.errors import ConfigError, DataError, EngineError
from fornax.diffusion.pipelines import ImageRequest, Size, parse_size, shown
from fornax.diffusion.pipelines.pictures import (
    encode_picture,
    open_picture,
)
from fornax.diffusion.server.engine import Done, Failed, Partial, Told
from fornax.diffusion.server.multipart import read_form
from fornax.diffusion.server.protocol import (
    EditBody,
    GenerationBody,
    ImageBody,
    Images,
    Model,
    Models,
    StreamedBody,
    VariationBody,
)
from fornax.diffusion.server.state import Server, ServerDep
from fornax.llm.server.errors import ApiError, from_validation
from fornax.llm.server.generation import GenerationResponse
from fornax.llm.server.middleware import RequestContext
from fornax.llm.server.protocol import failures
from fornax.llm.server.web import ContextDep, StrictRoute

__all__ = ["router"]

router = APIRouter(tags=["OpenAI"], route_class=StrictRoute)
B = TypeVar("B", bound=ImageBody)
_NO_URL = (
    "response_format url is not supported: this server keeps no images to point to; ask for "
    "b64_json, and decode it"
)


@router.get("/v1/models", response_model=Models, responses=failures(body=False))
async def models(server: ServerDep) -> Models:
    """The model under each of its names, and its adapters."""
    names = (*server.names, *server.engine.pipeline.adapters)
    return Models(object="list", data=[_model(server, name) for name in names])


@router.get("/v1/models/{name:path}", response_model=Model, responses=failures(404, body=False))
async def model(name: str, server: ServerDep) -> Model:
    """One of them."""
    server.check_model(name)
    return _model(server, name)


def _model(server: Server, name: str) -> Model:
    return Model(id=name, object="model", created=server.created, owned_by="fornax")


@router.post("/v1/images/generations", response_model=Images, responses=failures(404, 429, 503))
async def generations(body: GenerationBody, server: ServerDep, context: ContextDep) -> Response:
    """Draw images of a prompt."""
    return _answer(server, context, body, "image_generation", prompt=body.prompt)


@router.post("/v1/images/edits", response_model=Images, responses=failures(404, 415, 429, 503))
async def edits(request: Request, server: ServerDep, context: ContextDep) -> Response:
    """Draw what a prompt says after pictures, over one, or where its mask is transparent."""
    body = await _form(request, EditBody)
    return _answer(server, context, body, "image_edit", prompt=body.prompt, started=body)


@router.post("/v1/images/variations", response_model=Images, responses=failures(404, 415, 429, 503))
async def variations(request: Request, server: ServerDep, context: ContextDep) -> Response:
    """Draw a picture again from its noised self, without a prompt."""
    body = await _form(request, VariationBody)
    return _answer(server, context, body, "image_variation", prompt=None, started=body)


async def _form(request: Request, kind: type[B]) -> B:
    """A form as a body: its texts are read as the types of the fields; 400 as for JSON."""
    fields = read_form(
        request.headers.get("content-type", ""),
        await request.body(),
        several=("image",) if kind is EditBody else (),
    )
    for name, value in fields.items():
        values = value if isinstance(value, list) else [value]
        picture = name in ("image", "mask")
        if any(isinstance(one, bytes) != picture for one in values):
            ways = ["text", "a file"]
            found, use = ways if picture else reversed(ways)
            raise ApiError(400, f"{name} is sent as {found}; send it as {use}", param=name)
    try:
        return kind.model_validate(fields, strict=False)
    except ValidationError as error:
        raise from_validation(error) from None


@dataclass(frozen=True, slots=True)
class _Picture:
    """An image or a partial one, as a file in base64."""

    image: int
    index: int | None
    """Of a partial one; None for the image."""
    b64: str


def _answer(
    server: Server,
    context: RequestContext,
    body: ImageBody,
    kind: str,
    *,
    prompt: str | None,
    started: "EditBody | VariationBody | None" = None,
) -> Response:
    """The answer to a request; all of it that can be refused at once is."""
    name, size = _check(server, body)
    seed = secrets.randbelow(2**32) if body.seed is None else body.seed
    pictures = _pictures(server, started, size)
    request = ImageRequest(
        prompt=prompt,
        negative=body.negative_prompt,
        count=body.n or 1,
        size=size,
        steps=body.num_inference_steps,
        guidance=body.guidance_scale,
        seed=seed,
        sampler=body.sampler,
        strength=None if started is None else started.strength,
        adapter=body.model if body.model in server.engine.pipeline.adapters else None,
        **pictures,
    )
    streams, partials = False, 0
    if isinstance(body, StreamedBody) and body.stream:
        streams, partials = True, body.partial_images or 0
    form, quality = body.output_format or "png", body.output_compression
    context.log_fields.update(images=request.count, size=name, user=body.user)

    def encode(pixels: np.ndarray) -> str:
        file = encode_picture(pixels, form, 100 if quality is None else quality)
        return base64.b64encode(file).decode("ascii")

    return GenerationResponse(
        server,
        context,
        lambda: [_drawn(server, request, partials, encode)],
        _Builder(kind, name, form, seed, streams=streams),
        streams=streams,
    )


def _check(server: Server, body: ImageBody) -> tuple[str, Size]:
    """The name of the size that is asked for, and the size; 400 and 404 for what is not here."""
    config = server.config
    server.check_model(body.model)
    if body.response_format == "url":
        raise ApiError(400, _NO_URL, param="response_format")
    if (body.n or 1) > config.max_images:
        raise ApiError(
            400,
            f"n={body.n}; this server draws {config.max_images} at most (max_images)",
            param="n",
        )
    if (body.num_inference_steps or 1) > config.max_steps:
        raise ApiError(
            400,
            f"num_inference_steps={body.num_inference_steps}; this server takes "
            f"{config.max_steps} at most (max_steps)",
            param="num_inference_steps",
        )
    if body.output_compression is not None and (body.output_format or "png") == "png":
        raise ApiError(
            400, "output_compression is of jpeg and webp; leave it out", param="output_compression"
        )
    if isinstance(body, StreamedBody) and body.partial_images and not body.stream:
        raise ApiError(400, "partial_images is of streams; set stream", param="partial_images")
    name = next(iter(server.sizes)) if body.size in (None, "auto") else body.size
    if name not in server.sizes:
        try:
            parse_size(name)
        except ConfigError as error:
            raise ApiError(400, str(error), param="size") from None
        raise ApiError(
            400, f"size {name}: this server draws {', '.join(server.sizes)}", param="size"
        )
    return name, server.sizes[name]


def _pictures(
    server: Server, started: "EditBody | VariationBody | None", size: Size
) -> dict[str, Any]:
    """Fields of the request: what is started from or drawn after, and a mask."""
    if started is None:
        return {}
    pipeline, edits = server.engine.pipeline, isinstance(started, EditBody)
    files = started.image if isinstance(started, EditBody) else [started.image]
    mask_file = started.mask if isinstance(started, EditBody) else None
    # A variation is drawn over its image, as with the usual strength.
    strength = started.strength if edits else started.strength or 1.0
    try:
        opened = [open_picture(file, "image") for file in files]
        masked = mask_file is not None
        found = shown(pipeline, opened, size, strength=strength, masked=masked, crop=True)
        if mask_file is None:
            return found
        mask, picture = open_picture(mask_file, "mask"), opened[0]
    except ConfigError as error:
        raise ApiError(400, str(error), param="image") from None
    except DataError as error:
        param = str(error).partition(" ")[0]
        raise ApiError(400, str(error), param=param) from None
    if mask.size != picture.size:
        raise ApiError(
            400,
            f"the mask is {mask.width}x{mask.height} and the image {picture.width}x"
            f"{picture.height}; give them one size",
            param="mask",
        )
    if "A" not in mask.convert("RGBA" if "transparency" in mask.info else mask.mode).mode:
        raise ApiError(
            400,
            "the mask has no transparency: where it is transparent, is drawn; save it as RGBA",
            param="mask",
        )
    height, width = size
    alpha = np.asarray(mask.convert("RGBA").getchannel("A").resize((width, height), 0))
    return {**found, "mask": (alpha < 128).astype(np.float32)}


async def _drawn(
    server: Server, request: ImageRequest, partials: int, encode: Callable[[np.ndarray], str]
) -> AsyncIterator[_Picture]:
    """The request's images as they come; leaving the iterator frees its slots."""
    loop = asyncio.get_running_loop()
    told: asyncio.Queue[Told] = asyncio.Queue()

    def tell(what: Told) -> None:
        loop.call_soon_threadsafe(told.put_nowait, what)

    drawing = server.engine.submit(request, tell, partials=partials)
    try:
        left = request.count
        while left:
            match await told.get():
                case Failed(error):
                    raise _refused(error)
                case Partial(image, index, pixels):
                    yield _Picture(image, index, await asyncio.to_thread(encode, pixels))
                case Done(image, pixels):
                    left -= 1
                    yield _Picture(image, None, await asyncio.to_thread(encode, pixels))
    finally:
        drawing.cancelled = True


def _refused(error: Exception) -> Exception:
    """A failure of a request: its own where it asked for what cannot be."""
    if isinstance(error, EngineError):
        return ApiError(503, str(error), code="stopped")
    return ApiError(400, str(error)) if isinstance(error, (ConfigError, DataError)) else error


class _Builder:
    """Images as an answer, or as events."""

    def __init__(self, kind: str, size: str, form: str, seed: int, *, streams: bool):
        """`kind` begins the names of events."""
        self._kind, self._streams = kind, streams
        self._facts: Mapping[str, object] = {"size": size, "output_format": form, "seed": seed}
        self._images: dict[int, str] = {}
        self._created = int(time.time())

    def push(self, output: _Picture) -> bytes:
        """Take an image."""
        if not self._streams:
            self._images[output.image] = output.b64
            return b""
        partial = output.index is not None
        name = f"{self._kind}.{'partial_image' if partial else 'completed'}"
        event = {
            "type": name,
            "b64_json": output.b64,
            "created_at": self._created,
            "background": "opaque",
            "quality": "auto",
            "image_index": output.image,
            **self._facts,
            **({"partial_image_index": output.index} if partial else {}),
        }
        return b"event: " + name.encode() + b"\ndata: " + to_json(event) + b"\n\n"

    def stream_end(self) -> bytes:
        """Nothing follows the images."""
        return b""

    def body(self) -> bytes:
        """The answer that is not a stream."""
        data = [{"b64_json": self._images[index]} for index in sorted(self._images)]
        return to_json({"created": self._created, "data": data, **self._facts})
