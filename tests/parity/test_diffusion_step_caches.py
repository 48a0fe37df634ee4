"""Caches of steps beside diffusers' MagCache, and TeaCache as published, over a run of Euler steps.

TeaCache is not in diffusers: its steps are made here of a torch transformer's own parts.
"""

import dataclasses
import itertools
import json

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from diffusers import FluxTransformer2DModel, MagCacheConfig
from tests.parity.diffusion_models import channels_first, loaded, randomized

from fornax.diffusion.models import Condition
from fornax.diffusion.pipelines import ImageRequest, Pipeline, plan
from fornax.diffusion.pipelines.calibration import calibrate
from fornax.diffusion.pipelines.step_cache import StepCache
from fornax.diffusion.samplers import euler
from fornax.diffusion.schedules import flow

pytestmark = pytest.mark.parity
STEPS = 12
SIDE = 4
POLYNOMIAL = (0.5, 1.0, 0.02)
RATIOS = (1.0, 1.2, 1.1, 1.01, 1.03, 0.99, 1.02, 0.97, 0.98, 1.0, 0.95, 0.9)


@pytest.fixture(scope="module")
def flux(tmp_path_factory):
    """A transformer in torch, the same as ours, and a row's inputs."""
    network = randomized(
        FluxTransformer2DModel(
            num_layers=1,
            num_single_layers=1,
            num_attention_heads=2,
            attention_head_dim=16,
            in_channels=16,
            joint_attention_dim=8,
            pooled_projection_dim=6,
            axes_dims_rope=(4, 6, 6),
            guidance_embeds=True,
        )
    )
    rng = np.random.default_rng(1)
    shapes = {"text": (1, 3, 8), "pooled": (1, 6), "noise": (1, 2 * SIDE, 2 * SIDE, 4)}
    given = {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}
    return network, loaded(network, tmp_path_factory.mktemp("flux")), given


def pipeline_of(module, given):
    """The transformer as a pipeline without an autoencoder."""
    condition = Condition(
        text_BSD=jnp.asarray(given["text"]),
        pooled_BD=jnp.asarray(given["pooled"]),
        guidance_B=jnp.full((1,), 3.5),
    )
    return Pipeline(
        name="flux",
        denoiser=module,
        prediction="flow",
        schedule=lambda steps, shape: flow(steps),
        sampler=euler,
        encode=lambda prompts, size, guidance: condition,
        latent_shape=lambda size: given["noise"].shape[1:],
        decode=lambda x_BX: x_BX,
        guidance="embedded",
        steps=STEPS,
        scale=3.5,
    )


def ours(module, given, cache):
    """The end of a run with a cache, and how often the blocks ran."""
    pipeline = dataclasses.replace(pipeline_of(module, given), cache=cache)
    job = plan(pipeline, ImageRequest(latents_BX=jnp.asarray(given["noise"])))
    found, kept = pipeline.keeping_scan(job.table, cache, job.asks)(job)
    return np.asarray(found), int(kept.ran_B[0])


def packed(x_BHWC):
    """[1, H, W, C] -> Flux's [1, T, 4 C] in torch, channels before the places of a patch."""
    x = channels_first(x_BHWC).unfold(2, 2, 2).unfold(3, 2, 2)
    return x.permute(0, 2, 3, 1, 4, 5).reshape(1, SIDE * SIDE, -1)


def unpacked(x_BTC):
    x = x_BTC.reshape(1, SIDE, SIDE, -1, 2, 2).permute(0, 1, 4, 2, 5, 3)
    return x.reshape(1, 2 * SIDE, 2 * SIDE, -1).numpy()


def euler_steps(call, noise):
    """Their Euler steps over our sigmas; `call` takes the packed latents and sigma."""
    sigmas, x = flow(STEPS).sigma, packed(noise)
    for now, then in itertools.pairwise(sigmas):
        x = x + float(then - now) * call(x, float(now))
    return unpacked(x)


def theirs(network, given):
    """Their transformer of latents and sigma, as `euler_steps` calls it."""
    rows = [[0.0, row, column] for row in range(SIDE) for column in range(SIDE)]
    fixed = {
        "encoder_hidden_states": torch.from_numpy(given["text"]),
        "pooled_projections": torch.from_numpy(given["pooled"]),
        "guidance": torch.full((1,), 3.5),
        "img_ids": torch.tensor(rows),
        "txt_ids": torch.zeros(3, 3),
    }
    return lambda x, sigma: network(
        hidden_states=x, timestep=torch.full((1,), sigma), return_dict=False, **fixed
    )[0]


def check(found, want):
    error = np.abs(found - want).max() / np.abs(want).max()
    assert error < 1e-4, f"differs by {error:.1e}"


@pytest.mark.parametrize("threshold", [0.045, 0.15])
@torch.no_grad()
def test_magcache(flux, threshold):
    network, module, given = flux
    ran = []
    hook = network.single_transformer_blocks[0].attn.register_forward_hook(lambda *_: ran.append(1))
    network.enable_cache(
        MagCacheConfig(
            threshold=threshold, num_inference_steps=STEPS, mag_ratios=torch.tensor(RATIOS)
        )
    )
    try:
        want = euler_steps(theirs(network, given), given["noise"])
    finally:
        network.disable_cache()
        hook.remove()
    cache = StepCache(kind="magcache", threshold=threshold, magnitudes=RATIOS)
    found, ours_ran = ours(module, given, cache)
    check(found, want)
    assert ours_ran == len(ran)
    assert ours_ran < STEPS


@torch.no_grad()
def test_magnitudes(flux, capsys):
    network, module, given = flux
    network.enable_cache(MagCacheConfig(calibrate=True, num_inference_steps=STEPS))
    try:
        euler_steps(theirs(network, given), given["noise"])
    finally:
        network.disable_cache()
    printed = capsys.readouterr().out
    want = json.loads(printed[printed.rindex("\n[") :])
    pipeline = pipeline_of(module, given)
    job = plan(pipeline, ImageRequest(latents_BX=jnp.asarray(given["noise"])))
    found, _ = calibrate(pipeline, job)
    np.testing.assert_allclose(found.magnitudes, want, rtol=1e-4)


@torch.no_grad()
def test_teacache(flux):
    network, module, given = flux
    whole = theirs(network, given)
    seen, ran = {}, []

    hooks = [
        network.x_embedder.register_forward_hook(
            lambda module, args, output: seen.__setitem__("tokens", output)
        ),
        network.time_text_embed.register_forward_hook(
            lambda module, args, output: seen.__setitem__("embedding", output)
        ),
        network.norm_out.register_forward_hook(
            lambda module, args, output: seen.__setitem__("after", args[0])
        ),
    ]
    state = {"step": 0, "distance": 0.0, "signal": None, "residual": None}

    def call(x, sigma):
        output = whole(x, sigma)  # the blocks' work is thrown away where it is left out
        tokens, embedding = seen["tokens"], seen["embedding"]
        signal = network.transformer_blocks[0].norm1(tokens, emb=embedding)[0].double()
        if state["step"] not in (0, STEPS - 1):
            change = (signal - state["signal"]).abs().mean() / state["signal"].abs().mean()
            state["distance"] += max(0.0, float(np.polyval(POLYNOMIAL, float(change))))
        else:
            state["distance"] = np.inf
        state["signal"], state["step"] = signal, state["step"] + 1
        if state["distance"] < 0.4:
            return network.proj_out(network.norm_out(tokens + state["residual"], embedding))
        state["distance"], state["residual"] = 0.0, seen["after"] - tokens
        ran.append(1)
        return output

    try:
        want = euler_steps(call, given["noise"])
    finally:
        for hook in hooks:
            hook.remove()
    cache = StepCache(kind="teacache", threshold=0.4, coefficients=POLYNOMIAL)
    found, ours_ran = ours(module, given, cache)
    check(found, want)
    assert ours_ran == len(ran)
    assert 2 < ours_ran < STEPS
