"""Bodies of the images API, as OpenAI has them, and the fields that diffusion adds."""

from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from fornax.llm.server.protocol import Body, Refused, Reply

__all__ = [
    "EditBody",
    "GenerationBody",
    "Image",
    "ImageBody",
    "Images",
    "Model",
    "Models",
    "VariationBody",
]

Prompt = Annotated[str, Field(min_length=1, max_length=32_000)]
_ASKED = Refused("a model draws in one quality: num_inference_steps says how well", ("auto",))


class ImageBody(Body):
    """What all requests for images have."""

    model: str | None = None
    """The model's name; this server has one."""
    n: Annotated[int, Field(ge=1)] | None = 1
    """Images; the i-th has its own noise, the same whatever their number."""
    size: str | None = None
    """WIDTHxHEIGHT in pixels, one of the server's sizes; auto is the first."""
    response_format: Literal["b64_json", "url"] | None = "b64_json"
    """b64_json; url is refused, since nothing is kept."""
    output_format: Literal["png", "jpeg", "webp"] | None = "png"
    """Of the files."""
    output_compression: Annotated[int, Field(ge=0, le=100)] | None = None
    """Quality of jpeg and webp, 0 to 100."""
    user: str | None = None
    """Goes to the access log."""
    num_inference_steps: Annotated[int, Field(ge=1)] | None = None
    """Steps (default: the model's). Not OpenAI's."""
    guidance_scale: Annotated[float, Field(ge=0, le=100)] | None = None
    """Scale of guidance, 1 for none (default: the model's). Not OpenAI's."""
    negative_prompt: Annotated[str, Field(max_length=32_000)] | None = None
    """What to avoid. Not OpenAI's."""
    seed: Annotated[int, Field(ge=0, lt=2**32)] | None = None
    """Of the noise (default: a random one); the answer says it. Not OpenAI's."""
    sampler: str | None = None
    """Of the guide's table (default: the model's). Not OpenAI's."""

    refused: ClassVar[Mapping[str, Refused]] = {
        "background": Refused("images have no transparency", ("auto", "opaque")),
        "moderation": Refused("nothing is moderated here", ("low", "auto")),
        "quality": Refused(_ASKED.reason, ("auto", "standard")),
        "style": Refused("say the style in the prompt"),
    }


class StreamedBody(ImageBody):
    """What requests have whose images may be streamed."""

    stream: bool | None = False
    """Whether images come as server-sent events, with partial images before."""
    partial_images: Annotated[int, Field(ge=0, le=3)] | None = 0
    """Images on the way, of each image, for streams."""


class GenerationBody(StreamedBody):
    """`POST /v1/images/generations`."""

    prompt: Prompt
    """What to draw."""


class StartedBody(Body):
    """What requests have that start from an image."""

    strength: Annotated[float, Field(gt=0, le=1)] | None = None
    """How much of the schedule the image goes through: 1 forgets it. Not OpenAI's."""


class EditBody(StreamedBody, StartedBody):
    """`POST /v1/images/edits`, a form."""

    image: Annotated[list[bytes], Field(min_length=1, max_length=16)]
    """Pictures, PNG, JPEG or WebP, brought to the size: to draw after, one or several, where the
    model can and strength alone is not given; else, and the first with a mask, to start from."""
    mask: bytes | None = None
    """A PNG of the picture's size; where it is transparent, is drawn (default: everywhere, from
    the noised picture)."""
    prompt: Prompt
    """What to draw."""

    refused: ClassVar[Mapping[str, Refused]] = {
        **ImageBody.refused,
        "input_fidelity": Refused("strength says how much of the picture is kept", ("low",)),
    }


class VariationBody(ImageBody, StartedBody):
    """`POST /v1/images/variations`, a form."""

    image: bytes
    """The picture, PNG, JPEG or WebP; it is brought to the size."""


class Image(Reply):
    """An image."""

    b64_json: str


class Images(Reply):
    """All images of a request."""

    created: int
    data: list[Image]
    size: str
    output_format: str
    seed: int
    """With which a request draws the same. Not OpenAI's."""


class Model(Reply):
    """A model."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str


class Models(Reply):
    """All of them."""

    object: Literal["list"]
    data: list[Model]
