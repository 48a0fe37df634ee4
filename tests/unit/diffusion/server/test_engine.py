"""The engine that batches steps: seeds and company, slots, partial images, failures."""

import queue
import threading

import jax.numpy as jnp
import numpy as np
import pytest
from tests.unit.diffusion.server.conftest import make_pipeline

from fornax.config.errors import ConfigError, EngineError
from fornax.diffusion import SAMPLERS
from fornax.diffusion.pipelines import ImageRequest, join, plan
from fornax.diffusion.server.engine import Done, Engine, Failed, Observer, Partial
from fornax.diffusion.server.slots import MEMORY


class Recorder(Observer):
    """Keeps what the engine says."""

    def __init__(self):
        self.rows, self.outcomes = [], []
        self.go_on = threading.Event()
        self.go_on.set()

    def step(self, rows, width, seconds):
        assert self.go_on.wait(240)
        self.rows.append((rows, width))

    def finished(self, outcome, seconds, queued):
        self.outcomes.append(outcome)


class Client:
    """Requests whose answers come to one queue."""

    def __init__(self, engine):
        self.engine, self.told, self.drawings = engine, queue.Queue(), []

    def ask(self, request, **options):
        number = len(self.drawings)
        drawing = self.engine.submit(request, lambda what: self.told.put((number, what)), **options)
        self.drawings.append(drawing)
        return drawing

    def images(self):
        """All images, by request and number; the first failure is raised."""
        found, left = {}, sum(d.request.count for d in self.drawings)
        while left:
            number, what = self.told.get(timeout=240)
            if isinstance(what, Failed):
                raise what.error
            if isinstance(what, Done):
                found[number, what.image] = what.pixels
                left -= 1
        return found


@pytest.fixture(scope="module")
def running(pipeline):
    made = Engine(pipeline, observer=Recorder())
    made.start()
    yield made
    made.shutdown()


@pytest.fixture
def engine(running):
    """One engine for all tests, so that its step compiles once; what it did is forgotten."""
    running._observer.__init__()
    return running


R = ImageRequest(prompt="R", seed=3, steps=6)


def alone(engine, request):
    client = Client(engine)
    client.ask(request)
    return client.images()


@pytest.mark.parametrize("sampler", ["ddpm", "unipc"])
def test_an_image_is_the_same_to_the_bit_alone_and_in_company(engine, sampler):
    request = ImageRequest(prompt="R", seed=3, steps=6, sampler=sampler, count=2)
    first = alone(engine, request)
    client = Client(engine)
    engine._observer.go_on.clear()  # until all have asked
    client.ask(ImageRequest(prompt="B", seed=9, steps=9, sampler="dpm++2m-sde"))
    client.ask(ImageRequest(prompt="C", seed=1, steps=3, guidance=2.0))
    client.ask(request)
    client.ask(ImageRequest(prompt="D", seed=2, steps=5))
    engine._observer.go_on.set()
    crowd = client.images()
    for image in (0, 1):
        np.testing.assert_array_equal(first[0, image], crowd[2, image])
    assert (first[0, 0] != first[0, 1]).any()
    assert max(rows for rows, _ in engine._observer.rows) > 2  # they did share steps


def test_the_engine_and_the_scan_agree(engine, pipeline):
    request = ImageRequest(prompt="R", seed=3, steps=6, sampler="dpm++3m-sde")
    scanned = pipeline.images(pipeline.run(plan(pipeline, request)))
    assert abs(scanned[0].astype(int) - alone(engine, request)[0, 0]).max() <= 1


def test_an_image_of_a_request_does_not_depend_on_their_number(engine):
    few = alone(engine, ImageRequest(prompt="R", seed=3, count=1))
    many = alone(engine, ImageRequest(prompt="R", seed=3, count=6))
    np.testing.assert_array_equal(few[0, 0], many[0, 0])
    assert len(many) == 6  # more than there are slots


def test_a_start_from_an_image_keeps_what_the_mask_keeps(engine, pipeline, image):
    mask = np.zeros(image.shape[:2], np.float32)
    mask[2:5] = 1
    drawn = alone(engine, ImageRequest(prompt="R", seed=3, image=image, mask=mask))[0, 0]
    kept = pipeline.images(jnp.asarray(image)[None])[0]
    np.testing.assert_array_equal(drawn[mask == 0], kept[mask == 0])
    assert (drawn[mask == 1] != kept[mask == 1]).mean() > 0.9
    near = alone(engine, ImageRequest(prompt="R", seed=3, image=image, strength=0.25))[0, 0]
    far = alone(engine, ImageRequest(prompt="R", seed=3, image=image, strength=1.0))[0, 0]
    assert abs(near.astype(int) - kept).mean() < abs(far.astype(int) - kept).mean()


def test_partial_images_come_in_order_before_the_image(engine):
    client = Client(engine)
    client.ask(ImageRequest(prompt="R", steps=7), partials=3)
    seen = [client.told.get(timeout=240)[1] for _ in range(4)]
    assert [type(what) for what in seen] == [Partial, Partial, Partial, Done]
    assert [what.index for what in seen[:3]] == [0, 1, 2]


def test_a_cancelled_request_frees_its_slots(engine):
    client = Client(engine)
    long = client.ask(ImageRequest(prompt="R", steps=1000, count=4), partials=3)
    client.told.get(timeout=240)  # it runs, in every slot
    long.cancelled = True
    other = Client(engine)
    other.ask(R)
    assert other.images()
    assert engine._observer.outcomes == ["cancelled", "done"]
    assert engine.num_unfinished == 0


def test_what_fails_fails_alone(engine):
    client = Client(engine)
    client.ask(R)
    bad = Client(engine)
    bad.ask(ImageRequest(prompt="R", sampler="eulr"))
    with pytest.raises(ConfigError, match="did you mean euler"):
        bad.images()
    assert client.images()


def test_an_image_that_is_not_finite_is_an_error():
    engine = Engine(make_pipeline(decode=lambda x: x * jnp.nan))
    engine.start()
    try:
        with pytest.raises(ConfigError, match="not finite"):
            alone(engine, R)
        assert engine.error() is None
    finally:
        engine.shutdown()


def test_an_engine_that_dies_tells_everybody(pipeline):
    class Broken(Observer):
        def step(self, rows, width, seconds):
            raise RuntimeError("the device is gone")

    engine = Engine(pipeline, observer=Broken())
    engine.start()
    with pytest.raises(EngineError, match="before the image was done"):
        alone(engine, R)
    engine.shutdown()
    assert isinstance(engine.error(), RuntimeError)
    with pytest.raises(EngineError, match="ended"):
        alone(engine, R)


@pytest.mark.slow
def test_narrow_programs_draw_the_same_image_but_for_rounding(pipeline, engine):
    made = Engine(pipeline, widths=(1, 4), observer=Recorder())
    made.start()
    try:
        narrow = alone(made, R)[0, 0].astype(int)
        assert {width for _, width in made._observer.rows} == {1}
    finally:
        made.shutdown()
    assert abs(narrow - alone(engine, R)[0, 0]).max() <= 1


def test_slots_remember_what_every_sampler_reads(pipeline):
    memories = {SAMPLERS[name](pipeline.schedule(8, (8, 8, 1))).memory for name in SAMPLERS}
    assert max(memories) == MEMORY


@pytest.mark.slow
def test_jobs_of_one_table_run_as_one_scan(pipeline):
    jobs = [plan(pipeline, ImageRequest(prompt=p, seed=s)) for p, s in (("R", 3), ("B", 4))]
    both = pipeline.images(pipeline.run(join(jobs))).astype(int)
    assert abs(both[1:] - pipeline.images(pipeline.run(jobs[1]))).max() <= 1
    with pytest.raises(ConfigError, match="different samplers"):
        join([jobs[0], plan(pipeline, ImageRequest(prompt="R", steps=5))])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"size": (9, 8)}, "multiples of 8; use 8x8"),
        ({"steps": 0}, "from 1 to 1000"),
        ({"guidance": float("nan")}, "from 0 to 100"),
        ({"seed": -1}, "seed=-1"),
        ({"negative": "B", "guidance": 1.0}, "no effect"),
        ({"strength": 0.5}, "give an image"),
        ({"image": np.zeros((4, 4, 1), np.float32)}, "it is 4x4|is 4x4; it must be 8x8"),
    ],
)
def test_what_cannot_be_drawn_is_refused(pipeline, changes, message):
    with pytest.raises(ConfigError, match=message):
        plan(pipeline, ImageRequest(prompt="R", **changes))
