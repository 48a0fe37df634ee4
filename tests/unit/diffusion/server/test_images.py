"""The images API through openai's own client, in this process."""

import asyncio
import base64
import io
import time

import httpx
import numpy as np
import openai
import pytest
from PIL import Image
from tests.unit.diffusion.server.conftest import SIDE, WIDTH, After, Network, make_pipeline

from fornax.diffusion.lora import Adapter, ByRow, merge_lora
from fornax.diffusion.pipelines import ImageRequest, References, plan
from fornax.diffusion.server.app import asgi_app, create_app, create_server, start
from fornax.diffusion.server.config import ImageServerConfig
from fornax.diffusion.server.engine import Engine
from fornax.diffusion.server.metrics import Metrics
from fornax.llm.server.limits import RefusalPace


class App:
    """The app, its engine, and clients of it."""

    def __init__(self, pipeline, **config):
        metrics = Metrics("m")
        self.engine = Engine(pipeline, observer=metrics)
        config = ImageServerConfig(disable_access_log=True, served_model_name=("m",), **config)
        self.server = create_server(self.engine, config, model="m", metrics=metrics)
        start(self.server)
        self.asgi = asgi_app(create_app(self.server))
        self.asgi._refusals = RefusalPace(burst=10**6)

    def wait(self):
        while not self.engine.readiness().ready:
            assert self.engine.error() is None
            time.sleep(0.01)

    def run(self, ask):
        """What `ask` makes of openai's client."""

        async def go():
            transport = httpx.ASGITransport(self.asgi)
            async with openai.AsyncOpenAI(
                api_key="none",
                base_url="http://test/v1",
                max_retries=0,
                http_client=httpx.AsyncClient(transport=transport),
            ) as client:
                return await ask(client)

        return asyncio.run(go())

    def request(self, method, path, **options):
        async def go():
            transport = httpx.ASGITransport(self.asgi)
            async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
                return await client.request(method, path, **options)

        return asyncio.run(go())


@pytest.fixture(scope="module")
def app(pipeline):
    made = App(pipeline, sizes=(f"{SIDE}x{SIDE}", f"{SIDE}x{2 * SIDE}"))
    made.wait()
    yield made
    made.engine.shutdown()


def opened(b64):
    return Image.open(io.BytesIO(base64.b64decode(b64)))


def file(array, **options):
    data = io.BytesIO()
    Image.fromarray(array).save(data, "PNG", **options)
    return data.getvalue()


PICTURE = file(np.random.default_rng(0).integers(0, 255, (SIDE, SIDE, 3), np.uint8))


def test_images_are_drawn_by_prompt_and_seed(app):
    async def ask(client):
        return [
            await client.images.generate(model="m", prompt=p, n=2, extra_body={"seed": seed})
            for p, seed in (("R", 1), ("R", 1), ("R", 2), ("B", 1))
        ]

    first, again, other, letter = app.run(ask)
    assert [opened(each.b64_json).size for each in first.data] == [(SIDE, SIDE)] * 2
    assert first.data == again.data
    assert first.data[0] not in (first.data[1], other.data[0], letter.data[0])
    assert first.size == f"{SIDE}x{SIDE}"


def test_an_answer_tells_the_seed_that_draws_it_again(app):
    async def ask(client):
        first = await client.images.generate(prompt="R")
        seed = first.seed
        return first, await client.images.generate(prompt="R", extra_body={"seed": seed})

    first, again = app.run(ask)
    assert first.data == again.data


def test_every_field_changes_the_image(app):
    fields = {
        "num_inference_steps": 7,
        "guidance_scale": 1.5,
        "negative_prompt": "B",
        "sampler": "heun",
    }

    async def ask(client):
        plain = {"prompt": "R", "extra_body": {"seed": 1}}
        seen = [await client.images.generate(**plain)]
        for name, value in fields.items():
            seen.append(
                await client.images.generate(prompt="R", extra_body={"seed": 1, name: value})
            )
        return seen

    assert len({answer.data[0].b64_json for answer in app.run(ask)}) == 1 + len(fields)


def test_size_and_format(app):
    async def ask(client):
        return await client.images.generate(
            prompt="R", size=f"{SIDE}x{2 * SIDE}", output_format="webp", output_compression=50
        )

    image = opened(app.run(ask).data[0].b64_json)
    assert (image.size, image.format) == ((SIDE, 2 * SIDE), "WEBP")


def test_partial_images_are_streamed(app):
    async def ask(client):
        stream = await client.images.generate(
            prompt="R", n=2, stream=True, partial_images=2, extra_body={"seed": 1}
        )
        events = [event async for event in stream]
        return events, await client.images.generate(prompt="R", n=2, extra_body={"seed": 1})

    events, whole = app.run(ask)
    for image in (0, 1):
        mine = [event for event in events if event.image_index == image]
        kinds = [event.type.rpartition(".")[2] for event in mine]
        assert kinds == ["partial_image", "partial_image", "completed"]
        assert [event.partial_image_index for event in mine[:2]] == [0, 1]
        assert mine[-1].b64_json == whole.data[image].b64_json
        assert len({event.b64_json for event in mine}) == 3


def test_edits_keep_what_the_mask_keeps(app):
    mask = np.full((SIDE, SIDE, 4), 255, np.uint8)
    mask[2:5, :, 3] = 0

    async def ask(client):
        return await client.images.edit(
            image=PICTURE, mask=file(mask), prompt="R", n=2, extra_body={"seed": 1}
        )

    answer = app.run(ask)
    grey = np.asarray(Image.open(io.BytesIO(PICTURE)).convert("L")).astype(int)
    for each in answer.data:
        drawn = np.asarray(opened(each.b64_json)).astype(int)
        assert abs(drawn - grey)[mask[..., 3] > 0].max() <= 1
        assert abs(drawn - grey)[mask[..., 3] == 0].mean() > 10


@pytest.mark.filterwarnings("ignore:deprecated")
def test_variations_stay_near_with_little_strength(app):
    async def ask(client):
        return [
            await client.images.create_variation(
                image=PICTURE, extra_body={"seed": 1, "strength": strength}
            )
            for strength in (0.25, 1.0)
        ]

    grey = np.asarray(Image.open(io.BytesIO(PICTURE)).convert("L")).astype(int)
    near, far = (np.asarray(opened(a.data[0].b64_json)).astype(int) for a in app.run(ask))
    assert abs(near - grey).mean() < abs(far - grey).mean()


@pytest.mark.parametrize(
    ("fields", "message", "param"),
    [
        ({}, "prompt is missing", "prompt"),
        ({"prompt": ""}, "prompt", "prompt"),
        ({"prompt": "R", "n": 11}, "10 at most", "n"),
        ({"prompt": "R", "n": "2"}, "integer", "n"),
        ({"prompt": "R", "size": "9x9"}, "draws 8x8, 8x16", "size"),
        ({"prompt": "R", "size": "big"}, "WIDTHxHEIGHT", "size"),
        ({"prompt": "R", "response_format": "url"}, "keeps no images", "response_format"),
        ({"prompt": "R", "stlye": "vivid"}, "not a field", "stlye"),
        ({"prompt": "R", "style": "vivid"}, "in the prompt", "style"),
        ({"prompt": "R", "quality": "high"}, "num_inference_steps", "quality"),
        ({"prompt": "R", "seed": 2**32}, "less than", "seed"),
        ({"prompt": "R", "guidance_scale": 0}, "1 means no guidance here, as 0 does in", None),
        ({"prompt": "R", "num_inference_steps": 101}, "100 at most", "num_inference_steps"),
        ({"prompt": "R", "partial_images": 2}, "set stream", "partial_images"),
        ({"prompt": "R", "output_compression": 5}, "jpeg", "output_compression"),
        ({"prompt": "R", "sampler": "eulr"}, "did you mean euler", None),
        ({"prompt": "R", "negative_prompt": "B", "guidance_scale": 1}, "no effect", None),
    ],
)
def test_what_is_not_honoured_is_refused(app, fields, message, param):
    answer = app.request("POST", "/v1/images/generations", json=fields)
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert message in error["message"]
    assert (error["type"], error["param"]) == ("invalid_request_error", param)


def test_unknown_models_are_404(app):
    async def ask(client):
        listed = await client.models.list()
        with pytest.raises(openai.NotFoundError, match="this server has m"):
            await client.images.generate(prompt="R", model="dall-e-3")
        return [model.id for model in listed.data]

    assert app.run(ask) == ["m"]


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"image": b"no picture"}, "image is not a picture"),
        ({"image": PICTURE[:-60]}, "image cannot be read"),
        ({"image": PICTURE, "mask": PICTURE}, "no transparency"),
        ({"image": PICTURE, "mask": file(np.zeros((4, 4, 4), np.uint8))}, "give them one size"),
        (
            {"image[]": PICTURE, "image": PICTURE},
            "2 images are given, and this model starts from one",
        ),
        ({}, "image is missing"),
        ({"image": PICTURE, "prompt": b"R"}, "prompt is sent as a file"),
    ],
)
def test_broken_pictures_are_refused(app, files, message):
    answer = app.request(
        "POST",
        "/v1/images/edits",
        files={name: ("a.png", data) for name, data in files.items()} or {"x": (None, "1")},
        data={} if "prompt" in files else {"prompt": "R"},
    )
    assert answer.status_code == 400
    assert message in answer.json()["error"]["message"]


def test_a_body_that_is_no_form_is_refused(app):
    assert app.request("POST", "/v1/images/edits", json={"prompt": "R"}).status_code == 415
    headers = {"content-type": "multipart/form-data; boundary=x"}
    broken = app.request("POST", "/v1/images/edits", content=b"--y\r\n", headers=headers)
    assert broken.status_code == 400


def test_a_model_without_an_encoder_of_images_refuses_edits():
    app = App(make_pipeline(to_latents=None))
    app.wait()
    try:
        answer = app.request("POST", "/v1/images/variations", files={"image": ("a.png", PICTURE)})
    finally:
        app.engine.shutdown()
    assert answer.status_code == 400
    assert "no encoder of images" in answer.json()["error"]["message"]


def test_several_pictures_are_drawn_after_where_the_model_can():
    """They come as `image[]`; the first is the start too where it has a mask or a strength."""
    pipeline = make_pipeline(
        denoiser=After(),
        references=References(size=lambda size: size, most=2, needed=True),
    )
    app, shape = App(pipeline), (SIDE, SIDE, 3)
    pictures = [np.full(shape, 200, np.uint8), np.full(shape, 90, np.uint8)]
    app.wait()

    mask = np.full((SIDE, SIDE, 4), 255, np.uint8)
    mask[2:5, :, 3] = 0

    def edit(*more, **fields):
        return app.request(
            "POST",
            "/v1/images/edits",
            files=[("image[]", ("a.png", file(each))) for each in pictures] + list(more),
            data={"prompt": "R", "seed": "3", **fields},
        )

    try:
        answers = [edit(), edit(strength="0.5"), edit(("mask", ("m.png", file(mask))))]
        refused = app.request("POST", "/v1/images/generations", json={"prompt": "R"})
    finally:
        app.engine.shutdown()
    image = (pictures[0][..., :1] / 127.5 - 1).astype(np.float32)
    where = (mask[..., 3] == 0).astype(np.float32)
    shown = [{}, {"image": image, "strength": 0.5}, {"image": image, "mask": where}]
    for answer, fields in zip(answers, shown, strict=True):
        assert answer.status_code == 200, answer.text
        request = ImageRequest(prompt="R", seed=3, references=tuple(pictures), **fields)
        (want,) = pipeline.images(pipeline.run(plan(pipeline, request)))
        drawn = np.asarray(opened(answer.json()["data"][0]["b64_json"]))
        assert np.abs(drawn.astype(int) - want[..., 0]).max() <= 1
    assert refused.status_code == 400
    assert "draws after an image" in refused.json()["error"]["message"]


def test_health_and_metrics(app):
    assert app.request("GET", "/health").status_code == 200
    assert app.request("GET", "/ready").json()["ready"]
    app.request("POST", "/v1/images/generations", json={"prompt": "R"})
    text = app.request("GET", "/metrics").text
    assert 'fornax:requests_total{model_name="m",outcome="done"}' in text
    assert "fornax:step_rows_total" in text
    row = app.server.row(1.0)
    assert row["requests"] >= 1
    assert 0 < row["batch_fill"] <= 1


def test_a_full_queue_and_a_stopping_server_say_so(app):
    app.engine.num_unfinished += app.engine.slots + app.server.config.max_queued_requests
    try:
        full = app.request("POST", "/v1/images/generations", json={"prompt": "R"})
    finally:
        app.engine.num_unfinished -= app.engine.slots + app.server.config.max_queued_requests
    assert full.status_code == 429
    assert int(full.headers["retry-after"]) >= 1
    app.server.stopping = True
    try:
        stopping = app.request("POST", "/v1/images/generations", json={"prompt": "R"})
    finally:
        app.server.stopping = False
    assert stopping.status_code == 503


def test_a_request_names_an_adapter_and_shares_a_batch_with_others():
    """Each draws what the model draws with its own adapter merged, in one batch."""
    rng = np.random.default_rng(0)
    a, b = rng.normal(size=(WIDTH, 2)), rng.normal(size=(2, 3 * WIDTH))
    rex = Adapter(name="rex", pairs={"mix": (np.float32(a), np.float32(b))})
    several = make_pipeline(
        denoiser=ByRow(Network(), [(rex, 1.0), (rex, 0.5)]), adapters=("rex", "half")
    )
    app = App(several)
    app.wait()

    async def ask(client):
        fields = {"prompt": "R", "extra_body": {"seed": 3}}
        made = [client.images.generate(model=m, **fields) for m in ("m", "rex", "half")]
        answers = await asyncio.gather(*made)
        with pytest.raises(openai.NotFoundError, match="m, rex, half"):
            await client.images.generate(model="fox", **fields)
        return answers, [model.id async for model in client.models.list()]

    try:
        answers, names = app.run(ask)
    finally:
        app.engine.shutdown()
    assert names == ["m", "rex", "half"]
    for answer, scale in zip(answers, (0.0, 1.0, 0.5), strict=True):
        network = Network()
        merge_lora(network, rex, scale)
        pipeline = make_pipeline(denoiser=network)
        job = plan(pipeline, ImageRequest(prompt="R", seed=3))
        want = pipeline.images(pipeline.run(job))[0, ..., 0]
        found = Image.open(io.BytesIO(base64.b64decode(answer.data[0].b64_json)))
        assert np.abs(np.int16(found) - np.int16(want)).max() <= 1
    assert len({answer.data[0].b64_json for answer in answers}) == 3
