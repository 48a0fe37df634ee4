"""U-Nets: meshes, recomputation, precision, and what is refused."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from fornax.config.errors import ConfigError
from fornax.diffusion.models import Condition, files
from fornax.diffusion.models.unet import (
    CONTROLNET,
    UNET_2D_CONDITION,
    ControlNetConfig,
    UNet,
    UNetConfig,
)
from fornax.mesh import MeshConfig, make_mesh, use_mesh

CONFIG = UNetConfig(
    channels=(8, 16),
    layers=(1, 1),
    down_attention=("none", "cross"),
    up_attention=("cross", "none"),
    heads=(2, 2),
    text_dims=(12, 12),
    transformer_layers=((1,), (2,)),
    up_transformer_layers=((1, 1), (1, 1)),
    only_cross_attention=(False, False),
    norm_groups=4,
    time_dim=32,
)
RNG = np.random.default_rng(0)
X = jnp.asarray(RNG.normal(size=(4, 7, 6, 4)), jnp.float32)
TIMES = jnp.asarray([1.0, 250.0, 500.0, 999.0])
MASK = jnp.asarray([[1] * 5, [1, 1, 0, 0, 0], [1] * 5, [1, 1, 1, 1, 0]], jnp.int32)
TEXT = jnp.asarray(RNG.normal(size=(4, 5, 12)), jnp.float32)
CONDITION = Condition(text_BSD=TEXT, text_mask_BS=MASK)


@functools.cache
def unet() -> UNet:
    return files.create(UNET_2D_CONDITION, CONFIG)  # pyrefly: ignore[bad-return]


def loss_and_gradients(module: UNet, remat: str = "none") -> tuple:
    graphdef, state = nnx.split(module)

    def loss(state: nnx.State) -> jax.Array:
        return jnp.mean(nnx.merge(graphdef, state)(X, TIMES, CONDITION, remat=remat) ** 2)

    return jax.jit(jax.value_and_grad(loss))(state)


@functools.cache
def expected() -> tuple:
    return loss_and_gradients(unet())


def check(found: tuple, rtol: float = 1e-4) -> None:
    loss, gradients = expected()
    np.testing.assert_allclose(found[0], loss, rtol=rtol)
    for one, other in zip(jax.tree.leaves(found[1]), jax.tree.leaves(gradients), strict=True):
        scale = float(jnp.max(jnp.abs(other))) + 1e-8
        np.testing.assert_allclose(one, other, rtol=0, atol=rtol * scale)


@pytest.mark.exhaustive
def test_a_mesh_gives_the_loss_and_gradients_of_one_device():
    mesh = make_mesh(MeshConfig(data=2, fsdp=2, tensor=2))
    module = files.create(UNET_2D_CONDITION, CONFIG, mesh=mesh)
    conv = module.up[0].blocks[0].conv1.kernel[...]
    assert conv.addressable_shards[0].data.shape == (3, 3, 16, 8)
    with use_mesh(mesh):
        check(loss_and_gradients(module))


@pytest.mark.slow
def test_a_mesh_gives_the_output_of_one_device():
    mesh = make_mesh(MeshConfig(data=2, fsdp=2, tensor=2))
    graphdef, state = nnx.split(files.create(UNET_2D_CONDITION, CONFIG, mesh=mesh))
    with use_mesh(mesh):
        found = jax.jit(lambda s: nnx.merge(graphdef, s)(X, TIMES, CONDITION))(state)
    np.testing.assert_allclose(found, jax.jit(unet())(X, TIMES, CONDITION), atol=1e-5)


@pytest.mark.exhaustive
def test_recomputed_blocks_give_the_same_gradients():
    check(loss_and_gradients(unet(), "full"))
    check(loss_and_gradients(unet(), "dots"))
    graphdef, state = nnx.split(unet())
    text = str(
        jax.make_jaxpr(lambda s: nnx.merge(graphdef, s)(X, TIMES, CONDITION, remat="full"))(state)
    )
    assert text.count("remat") + text.count("checkpoint") > 5


@pytest.mark.slow
def test_text_that_is_padding_changes_nothing():
    changed = jnp.where(MASK[..., None] > 0, TEXT, 100.0)
    condition = dataclasses.replace(CONDITION, text_BSD=changed)
    call = jax.jit(unet())
    same = call(X, TIMES, condition)
    np.testing.assert_array_equal(same, call(X, TIMES, CONDITION))
    unmasked = dataclasses.replace(condition, text_mask_BS=None)
    assert jnp.max(jnp.abs(call(X, TIMES, unmasked) - same)) > 1e-3


def traced(x: jax.Array, condition: Condition) -> jax.ShapeDtypeStruct:
    """What the network returns, by its shapes alone."""
    run = lambda: UNet(CONFIG, rngs=nnx.Rngs(0))(x, TIMES, condition)  # noqa: E731
    return jax.eval_shape(run)


def test_wrong_inputs_are_refused_by_name():
    with pytest.raises(ConfigError, match="needs text_BSD"):
        traced(X, Condition())
    with pytest.raises(ConfigError, match="does not take classes_B"):
        traced(X, dataclasses.replace(CONDITION, classes_B=jnp.zeros(4, jnp.int32)))
    with pytest.raises(ConfigError, match=r"reads text_BSD of width \d+, and they have 5"):
        traced(X, dataclasses.replace(CONDITION, text_BSD=TEXT[..., :5]))
    with pytest.raises(ConfigError, match="5 channels and the condition's image 0"):
        traced(jnp.zeros((4, 8, 8, 5)), CONDITION)
    with pytest.raises(ConfigError, match="control has 2 residuals and the U-Net passes 4"):
        traced(X, dataclasses.replace(CONDITION, control=(X, X)))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"heads": (3, 2)}, "8 channels do not divide into 3 heads"),
        ({"layers": (1,)}, "layers=.* has 1 entries for 2 levels"),
        ({"transformer_layers": ((1, 1), (2,))}, "a number for each of 1 residual blocks down"),
        ({"size_dim": 8}, "needs projection_dim"),
        ({"class_embedding": "table"}, "needs classes"),
        ({"text_dims": (12, 16), "text_input_dim": 8}, "levels attend to several"),
    ],
)
def test_configs_that_do_not_go_together_are_refused(changes, message):
    with pytest.raises(ConfigError, match=message):
        dataclasses.replace(CONFIG, **changes)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("dual_cross_attention", True, "dual_cross_attention=True is not supported"),
        ("down_block_types", ["SimpleCrossAttnDownBlock2D", "DownBlock2D"], "is not supported"),
        ("time_embedding_type", "fourier", "'fourier' is not supported; use 'positional'"),
        ("class_embed_type", "other", "use one of timestep, identity"),
        ("resnet_time_scale_shift", "spatial", "use 'default' or 'scale_shift'"),
    ],
)
def test_options_of_diffusers_that_are_not_supported_are_refused(key, value, message):
    values = {**UNET_2D_CONDITION.write(CONFIG), key: value}
    with pytest.raises(ConfigError, match=message):
        UNET_2D_CONDITION.read(files.Fields(values, "config.json"))


@pytest.mark.slow
def test_a_fresh_controlnet_adds_nothing():
    control = files.create(CONTROLNET, ControlNetConfig(unet=CONFIG, image_widths=(4, 8)))
    image = jnp.asarray(RNG.uniform(size=(4, 14, 12, 3)), jnp.float32)
    residuals = jax.jit(control)(X, TIMES, image, CONDITION)
    assert [x.shape[1:] for x in residuals] == [
        (7, 6, 8),
        (7, 6, 8),
        (4, 3, 8),
        (4, 3, 16),
        (4, 3, 16),
    ]
    assert max(float(jnp.max(jnp.abs(x))) for x in residuals) == 0
    with pytest.raises(ConfigError, match=r"give an image of \(14, 12, 3\)"):
        control(X, TIMES, image[:, :12], CONDITION)
