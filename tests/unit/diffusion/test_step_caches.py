"""Caches of steps: rows decide for themselves, alone, in company and on the server; calibration."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from tests.cases import one_in
from tests.unit.diffusion.server.conftest import make_pipeline

from fornax.config.errors import CheckpointError, ConfigError
from fornax.diffusion.lora import ByRow
from fornax.diffusion.models import Condition
from fornax.diffusion.models.transformer import DiTConfig, Transformer
from fornax.diffusion.pipelines import ImageRequest, join, plan
from fornax.diffusion.pipelines.calibration import (
    CALIBRATION,
    calibrate,
    parse_cache,
    with_cache,
)
from fornax.diffusion.pipelines.step_cache import ALWAYS, NEVER, StepCache
from fornax.diffusion.server.slots import Programs, Slots

TEACACHE = StepCache(kind="teacache", threshold=1.25, coefficients=(1.0, 0.0))
MAGCACHE = StepCache(kind="magcache", threshold=0.15, magnitudes=(1.0, 1.2, 1.1, 1.05, 1.04, 1.02))


def random_transformer(**changes) -> Transformer:
    """Two blocks, random everywhere: fresh ones have zeros that hide what blocks do. Keywords are
    fields of `TransformerConfig`."""
    config = DiTConfig(
        channels=1, patch=4, num_layers=2, num_heads=2, head_dim=8, classes=26, mlp_ratio=2.0
    )
    whole = dataclasses.replace(config.transformer(), **changes)
    abstract = nnx.eval_shape(lambda: Transformer(whole, rngs=nnx.Rngs(0)))
    graph, state = nnx.split(abstract)
    rng = np.random.default_rng(0)
    return nnx.merge(
        graph,
        jax.tree.map(
            lambda leaf: jnp.asarray(0.3 * rng.normal(size=leaf.shape), leaf.dtype), state
        ),
    )


@pytest.fixture(scope="module")
def drawing():
    return make_pipeline(denoiser=random_transformer(), steps=8)


def request(prompt, **fields):
    return ImageRequest(prompt=prompt, **{"seed": 3, **fields})


def drawn(pipeline, *requests):
    """Latents of requests drawn together, and evaluations at which blocks ran for any row."""
    job = join([plan(pipeline, each) for each in requests])
    found, kept = pipeline.keeping_scan(job.table, pipeline.cache, job.asks)(job)
    return np.asarray(found), kept.ran_B


@pytest.mark.parametrize("cache", one_in(2, [TEACACHE, MAGCACHE]), ids=lambda cache: cache.kind)
def test_images_do_not_depend_on_company_or_slots(drawing, cache):
    cached = dataclasses.replace(drawing, cache=cache)
    requests = [request("a"), request("m", seed=4, guidance=6.0)]
    together, ran_B = drawn(cached, *requests)
    assert int(ran_B[0]) < 8
    alone = np.concatenate([drawn(cached, each)[0] for each in requests])
    np.testing.assert_allclose(together, alone, atol=1e-5)
    plain = np.concatenate([drawing.run(plan(drawing, each)) for each in requests])
    assert np.abs(together - plain).max() > 1e-3
    # On the server the second joins while the first is half done.
    jobs = [plan(cached, each) for each in requests]
    slots, found = Slots(Programs(cached), jobs[0], (2,)), {}
    slots.join(0, jobs[0], 0)
    for step in range(12):
        if step == 3:
            slots.join(1, jobs[1], 0)
        for slot in slots.advance():
            found[slot] = np.asarray(slots.latent(slot))[0]
            slots.leave(slot)
        if len(found) == 2:
            break
    np.testing.assert_allclose(np.stack([found[0], found[1]]), alone, atol=1e-5)


def test_a_threshold_of_0_leaves_out_nothing(drawing):
    cached = dataclasses.replace(drawing, cache=dataclasses.replace(TEACACHE, threshold=0.0))
    found, ran_B = drawn(cached, request("q", count=2))
    assert ran_B.tolist() == [8] * 4  # both conditions of both rows
    plain = drawing.run(plan(drawing, request("q", count=2)))
    np.testing.assert_allclose(found, plain, atol=1e-5)


def test_magcache_counts_from_the_whole_schedule():
    """As published: accumulated products, at most three in a row, none in the first fifth."""
    magnitudes = (1.0, 1.5, 1.3, 1.01, 0.99, 1.01, 1.0, 1.02, 0.99, 1.2)
    cache = StepCache(kind="magcache", threshold=0.1, magnitudes=magnitudes)
    whole = cache.asks(10, 10)
    ran = [True] * 3 + [False] * 3 + [True, False, False, True]
    assert (whole == ALWAYS).tolist() == ran
    tail = cache.asks(6, 10)  # an image started from: nothing is cached at its first
    assert tail[0] == ALWAYS
    assert (tail[1:4] == NEVER).all()


def test_a_picture_goes_through_the_end_of_the_schedule(drawing):
    cached = dataclasses.replace(drawing, cache=MAGCACHE)
    image = np.zeros((8, 8, 1), np.float32)
    job = plan(cached, request("a", image=image, strength=0.5))
    np.testing.assert_array_equal(job.asks, MAGCACHE.asks(4, 8))
    assert np.isfinite(cached.run(job)).all()


def test_a_calibration_is_kept_and_taken(drawing, tmp_path):
    job = join([plan(drawing, request(prompt)) for prompt in "ab"])
    found, measured = calibrate(drawing, job)
    first = next(measured)
    assert first.kind == "teacache"
    assert first.evaluations == 16  # each of two images alone
    assert len(found.magnitudes) == 8
    assert min(found.coefficients) >= 0
    found.save(tmp_path / CALIBRATION)
    cached = with_cache(drawing, tmp_path, *parse_cache("teacache:0.1"))
    assert cached.cache == StepCache(
        kind="teacache",
        threshold=0.1,
        coefficients=found.coefficients,
        magnitudes=found.magnitudes,
    )
    several = dataclasses.replace(drawing, denoiser=ByRow(drawing.denoiser, []))
    assert with_cache(several, tmp_path, "teacache", 0.1).cache == cached.cache
    error = np.sqrt(
        np.mean((drawn(cached, request("a"), request("b"))[0] - drawing.run(job)) ** 2)
        / np.mean(np.asarray(drawing.run(job)) ** 2)
    )
    assert error == pytest.approx(first.error, rel=1e-3, abs=1e-6)


def test_what_has_no_numbers_is_refused(drawing, tmp_path):
    with pytest.raises(ConfigError, match="fornax diffusion calibrate"):
        with_cache(drawing, tmp_path, "magcache", 0.06)
    with pytest.raises(ConfigError, match="caches of steps are for transformers"):
        with_cache(make_pipeline(), tmp_path, "magcache", 0.06)
    with pytest.raises(ConfigError, match="at least 4 steps"):
        calibrate(drawing, plan(drawing, request("a", steps=3)))
    (tmp_path / CALIBRATION).write_text(json.dumps({"coefficients": [1], "magnitudes": ["x"]}))
    with pytest.raises(CheckpointError, match="make it again"):
        with_cache(drawing, tmp_path, "magcache", 0.06)
    with pytest.raises(ConfigError, match="use one of teacache, magcache"):
        parse_cache("senile")


def test_published_numbers_are_of_a_models_sizes(drawing, tmp_path):
    """Flux-dev's by its config alone: nothing of 12 billion weights is made."""
    flux = dataclasses.replace(
        drawing.denoiser.config,
        class_name="FluxTransformer2DModel",
        num_heads=24,
        head_dim=128,
        positions=None,
        blocks=tuple(
            dataclasses.replace(drawing.denoiser.config.blocks[0], count=n) for n in (19, 38)
        ),
    )
    module = nnx.eval_shape(lambda: Transformer(flux, rngs=nnx.Rngs(0)))
    found = with_cache(dataclasses.replace(drawing, denoiser=module), tmp_path, "magcache", 0.06)
    asks = found.cache.asks(28, 28)
    assert (asks[:6] == ALWAYS).all()
    assert (asks == NEVER).sum() > 8


def test_the_input_of_the_first_block_is_normed_and_modulated():
    """TeaCache's signal of a DiT beside the formula, in float64."""
    module = random_transformer()
    rng = np.random.default_rng(0)
    x, seen = jnp.asarray(rng.normal(size=(2, 8, 8, 1)), jnp.float32), {}

    def around(blocks, x_BTD, first):
        seen.update(tokens=x_BTD, first=first())
        return blocks(x_BTD)

    condition, time_B = Condition(classes_B=jnp.asarray([3, 4])), jnp.asarray([20.0, 900.0])
    found = module(x, time_B, condition, around=around)
    np.testing.assert_array_equal(found, module(x, time_B, condition))
    tokens = np.asarray(seen["tokens"], np.float64)
    normed = tokens - tokens.mean(-1, keepdims=True)
    normed /= np.sqrt(np.mean(normed**2, -1, keepdims=True) + 1e-6)
    rows = normed.reshape(-1, normed.shape[-1])
    for row, (own, want) in enumerate(zip(normed, np.asarray(seen["first"]), strict=True)):
        # An affine map of each channel, the same for all tokens of a row.
        for channel in range(rows.shape[-1]):
            fit = np.polyfit(own[:, channel], want[:, channel], 1)
            np.testing.assert_allclose(
                np.polyval(fit, own[:, channel]), want[:, channel], atol=1e-4, err_msg=f"{row}"
            )
