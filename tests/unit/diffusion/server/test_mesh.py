"""A server over eight virtual devices draws what one device draws."""

import dataclasses

import numpy as np
import pytest
from tests.unit.diffusion.server.conftest import make_pipeline
from tests.unit.diffusion.test_step_caches import MAGCACHE, random_transformer

from fornax.config.errors import ConfigError, ShardingError
from fornax.diffusion.lora import Adapter, ByRow
from fornax.diffusion.pipelines import ImageRequest, plan
from fornax.diffusion.server.launch import ServeImagesConfig, laid_out
from fornax.diffusion.server.slots import Programs, Slots
from fornax.mesh import MeshConfig


def drawn(pipeline, job):
    """Latents of both rows of a job, in slots of width 4, of which two stay empty."""
    slots = Slots(Programs(pipeline), job, (4,))
    for row in range(2):
        slots.join(row, job, row)
    while not slots.advance():
        pass
    return np.concatenate([np.asarray(slots.latent(row)) for row in range(2)])


@pytest.mark.slow
def test_images_are_those_of_one_device():
    """With an adapter and a cache of steps."""
    rng = np.random.default_rng(0)
    pair = (np.float32(rng.normal(size=(2, 16, 2))), np.float32(rng.normal(size=(2, 2, 16))))
    rex = Adapter(name="rex", pairs={"blocks/0/attention/q": pair})
    denoiser = ByRow(random_transformer(), [(rex, 1.0)])
    one = make_pipeline(denoiser=denoiser, adapters=("rex",), cache=MAGCACHE, steps=6)
    job = plan(one, ImageRequest(prompt="k", count=2, seed=1, adapter="rex"))
    mesh = MeshConfig(data=2, fsdp=2, tensor=2)
    many = laid_out(one, ServeImagesConfig(mesh=mesh))
    weights = many.denoiser.denoiser.blocks[0].mlp.up.kernel[...]
    assert len(weights.sharding.device_set) == 8
    assert weights.addressable_shards[0].data.size == weights.size // 4
    np.testing.assert_allclose(drawn(many, job), drawn(one, job), atol=1e-5)


def test_what_does_not_divide_is_refused():
    pipeline = make_pipeline(denoiser=random_transformer())
    with pytest.raises(ConfigError, match=r"widths=\(2,\).*= 8; give multiples of it"):
        laid_out(pipeline, ServeImagesConfig(widths=(2,), mesh=MeshConfig()))
    with pytest.raises(ShardingError, match=r"does not divide over tensor=8"):
        laid_out(pipeline, ServeImagesConfig(mesh=MeshConfig(tensor=8)))
    with pytest.raises(ConfigError, match=r"mesh\.expert=2"):
        dataclasses.replace(ServeImagesConfig(), mesh=MeshConfig(expert=2))
