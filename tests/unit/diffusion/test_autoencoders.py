"""Image autoencoders: tiles, meshes, distributions, and what is refused."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from fornax.config.errors import ConfigError
from fornax.diffusion.models import files
from fornax.diffusion.models.autoencoders import (
    AUTOENCODER_DC,
    AUTOENCODER_KL,
    AutoencoderKL,
    DeepCompressionConfig,
    Gaussian,
    KLConfig,
    Tiling,
)
from fornax.diffusion.models.autoencoders.tiling import tiled
from fornax.mesh import MeshConfig, make_mesh, use_mesh

CONFIG = KLConfig(channels=(8, 16), layers=1, norm_groups=4, scale=0.3, shift=0.2)
RNG = np.random.default_rng(0)
IMAGES = jnp.asarray(RNG.uniform(-1, 1, size=(4, 8, 12, 3)), jnp.float32)


@functools.cache
def autoencoder() -> AutoencoderKL:
    return files.create(AUTOENCODER_KL, CONFIG)  # pyrefly: ignore[bad-return]


def there_and_back(module: AutoencoderKL) -> jax.Array:
    graphdef, state = nnx.split(module)

    @jax.jit
    def run(state: nnx.State) -> jax.Array:
        one = nnx.merge(graphdef, state)
        return one.images(one.latents(IMAGES))

    return run(state)


@pytest.mark.slow
def test_a_mesh_gives_the_images_of_one_device():
    mesh = make_mesh(MeshConfig(data=2, fsdp=2, tensor=2))
    module = files.create(AUTOENCODER_KL, CONFIG, mesh=mesh)
    with use_mesh(mesh):
        found = there_and_back(module)
    np.testing.assert_allclose(found, there_and_back(autoencoder()), atol=1e-5)


def test_latents_are_shifted_and_scaled_once():
    z = jnp.asarray(RNG.normal(size=(2, 3, 3, 4)), jnp.float32)
    np.testing.assert_allclose(autoencoder().scaled(z), (z - 0.2) * 0.3, rtol=1e-6)
    back = autoencoder().unscaled(autoencoder().scaled(z))
    np.testing.assert_allclose(back, z, atol=1e-6)


def test_tiles_of_a_local_function_blend_into_the_whole():
    x = jnp.asarray(RNG.normal(size=(1, 19, 15, 2)), jnp.float32)
    run = jax.jit(lambda x: tiled(lambda tile: 2 * tile + 1, x, Tiling(size=8), side=8, out=8))
    found = run(x)
    np.testing.assert_allclose(found, 2 * x + 1, atol=1e-6)
    with pytest.raises(ConfigError, match=r"size=2 .* use a size of 8"):
        tiled(lambda tile: tile, x, Tiling(size=2), side=2, out=0)
    for size, fits in ((100, 96), (40, 64)):  # one is not a multiple of 8, nor is a quarter of one
        with pytest.raises(ConfigError, match=f"not the same pixels; use a size of {fits}"):
            tiled(lambda tile: tile, x, Tiling(size=size), side=size, out=size // 8)
    with pytest.raises(ConfigError, match="less than 1"):
        Tiling(overlap=1.0)


def test_the_divergence_is_that_of_its_samples():
    mean, logvar = (jnp.full((1, 1, 1, 1), value) for value in (0.7, -0.5))
    one = Gaussian(mean, logvar)
    noise = RNG.normal(size=(200_000, 1, 1, 1))
    z = np.asarray(one.sample(jnp.asarray(noise)), np.float64)
    own = -0.5 * noise**2 + 0.25  # logarithms of the two densities, less what they share
    np.testing.assert_allclose(np.mean(own + 0.5 * z**2), one.divergence()[0], atol=0.01)


def test_what_does_not_fit_is_refused():
    with pytest.raises(ConfigError, match="multiples of 2 and 2; crop or resize"):
        autoencoder().encode(IMAGES[:, :7])
    with pytest.raises(ConfigError, match="latents of shape"):
        autoencoder().decode(jnp.zeros((1, 4, 4, 16)))
    with pytest.raises(ConfigError, match="overflow float16"):
        AutoencoderKL(KLConfig(force_upcast=True), rngs=nnx.Rngs(0), dtype=jnp.float16)
    with pytest.raises(ConfigError, match="mean has 3 values"):
        KLConfig(mean=(0.0, 0.0, 0.0))
    values = {**AUTOENCODER_KL.write(CONFIG), "down_block_types": ["AttnDownEncoderBlock2D"] * 2}
    with pytest.raises(ConfigError, match="use DownEncoderBlock2D for each of 2"):
        AUTOENCODER_KL.read(files.Fields(values, "config.json"))
    values = {**AUTOENCODER_DC.write(DeepCompressionConfig()), "decoder_norm_types": "batch_norm"}
    with pytest.raises(ConfigError, match="use rms_norm"):
        AUTOENCODER_DC.read(files.Fields(values, "config.json"))
    with pytest.raises(ConfigError, match="no multiple of latent_channels"):
        DeepCompressionConfig(latent_channels=48)
