"""Transformers of our own: on a mesh as on one device, files, remat, and what is refused."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from fornax.config import FornaxError
from fornax.diffusion.models import (
    COMPONENTS,
    Condition,
    DiTConfig,
    Transformer,
    create,
    load_component,
    save_component,
)
from fornax.diffusion.models.transformer import FractionalRopeConfig, RopeConfig
from fornax.diffusion.models.transformer.positions import rotations
from fornax.mesh import MeshConfig, make_mesh, tree_shardings, use_mesh
from fornax.mesh.rules import DEFAULT_RULES

RNG = np.random.default_rng(0)
SMALL = DiTConfig(channels=4, num_layers=2, num_heads=2, head_dim=8)


def normal(*shape):
    return jnp.asarray(RNG.normal(size=shape), jnp.float32)


TEXT = {
    "text_BSD": normal(4, 5, 6),
    "text_mask_BS": jnp.asarray([[1] * 5, [1, 1, 0, 0, 0], [0] * 5, [1, 0, 1, 0, 0]]),
}
CROSS = dataclasses.replace(
    SMALL, text_width=6, text="cross", positions="sincos", classes=3, pooled=8
)


def video_like():
    """Positions in units of the condition, over all heads, and attention to an image's states."""
    whole = CROSS.transformer()
    (run,) = whole.blocks
    cross = dataclasses.replace(run.block.cross, images=True)
    run = dataclasses.replace(run, block=dataclasses.replace(run.block, cross=cross))
    positions = FractionalRopeConfig(spans=(8.0, 12.0))
    return dataclasses.replace(whole, blocks=(run,), positions=positions, image_states=6)


def after_images():
    """Text and sample as one sequence, and images behind them that have no noise."""
    whole = dataclasses.replace(SMALL, text_width=6).transformer()
    positions = RopeConfig(axes=(2, 2, 4), sample_axes=(1, 2), reference_axis=0, reference_step=10)
    return dataclasses.replace(whole, positions=positions, clean_references=True)


KINDS = {
    "references": (
        after_images(),
        Condition(**TEXT, references=(normal(4, 4, 8, 4), normal(4, 6, 4, 4))),
    ),
    "joint": (
        dataclasses.replace(SMALL, text_width=6, gated=True, activation="silu").transformer(),
        Condition(**TEXT),
    ),
    "cross": (
        CROSS.transformer(),
        Condition(**TEXT, classes_B=jnp.asarray([0, 1, 2, 3]), pooled_BD=normal(4, 8)),
    ),
    "video": (
        video_like(),
        Condition(
            **TEXT,
            text2_BSD=normal(4, 3, 6),
            classes_B=jnp.asarray([0, 1, 2, 3]),
            pooled_BD=normal(4, 8),
            sizes_BN=jnp.asarray([[1.0, 1.0], [0.5, 2.0], [1.0, 1.5], [2.0, 1.0]]),
        ),
    ),
}
X, TIME = normal(4, 8, 12, 4), jnp.asarray([0.0, 10.0, 500.0, 1000.0])


@functools.cache
def made(kind):
    """A transformer whose zeros are drawn too, so that all parts count."""
    config, condition = KINDS[kind]
    abstract = nnx.eval_shape(lambda: Transformer(config, rngs=nnx.Rngs(0)))
    graphdef, state = nnx.split(abstract)
    return graphdef, jax.tree.map(lambda leaf: 0.3 * normal(*leaf.shape), state), condition


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param("joint", marks=pytest.mark.slow),
        pytest.param("cross", marks=pytest.mark.exhaustive),
        pytest.param("video", marks=pytest.mark.exhaustive),
        pytest.param("references", marks=pytest.mark.exhaustive),
    ],
)
def test_output_and_gradient_on_a_mesh_are_those_of_one_device(kind):
    graphdef, state, condition = made(kind)
    mesh = make_mesh(MeshConfig(data=2, fsdp=2, tensor=2))

    def loss(state, remat):
        y = nnx.merge(graphdef, state)(X, TIME, condition, remat=remat)
        return jnp.mean(jnp.square(y - X)), y

    (_, y), gradient = jax.jit(jax.value_and_grad(lambda s: loss(s, "none"), has_aux=True))(state)
    placed = jax.device_put(state, tree_shardings(state, mesh, DEFAULT_RULES))

    def on_mesh(state):
        with use_mesh(mesh):
            return jax.value_and_grad(lambda s: loss(s, "full"), has_aux=True)(state)

    (_, y_mesh), gradient_mesh = jax.jit(on_mesh)(placed)
    np.testing.assert_allclose(y_mesh, y, rtol=1e-4, atol=1e-4)
    for (path, one), other in zip(
        jax.tree_util.tree_leaves_with_path(gradient), jax.tree.leaves(gradient_mesh), strict=True
    ):
        scale = float(jnp.abs(one).max()) + 1e-6
        np.testing.assert_allclose(other / scale, one / scale, atol=1e-3, err_msg=str(path))


def test_padding_of_a_text_changes_nothing():
    for kind in ("joint", "cross"):
        graphdef, state, condition = made(kind)
        module = nnx.merge(graphdef, state)
        call = jax.jit(lambda x, t, c, module=module: module(x, t, c))
        noisy = dataclasses.replace(
            condition,
            text_BSD=jnp.where(condition.text_mask_BS[..., None] > 0, condition.text_BSD, 99.0),
        )
        np.testing.assert_allclose(call(X, TIME, noisy), call(X, TIME, condition), atol=1e-5)


@pytest.mark.slow
def test_a_fresh_transformer_trains_its_head_first_and_then_every_part():
    config, condition = KINDS["cross"]
    graphdef, state = nnx.split(create(COMPONENTS[config.class_name], config))

    @jax.jit
    def step(state):
        def loss(state):
            y = nnx.merge(graphdef, state)(X, TIME, condition)
            return jnp.mean(jnp.square(y - X))

        gradient = jax.grad(loss)(state)
        return jax.tree.map(lambda p, g: p - 0.1 * g, state, gradient), gradient

    def sizes(gradient):
        flat = jax.tree_util.tree_leaves_with_path(gradient)
        return {jax.tree_util.keystr(path): float(jnp.abs(leaf).max()) for path, leaf in flat}

    state, first = step(state)
    assert all(size == 0 for path, size in sizes(first).items() if "head" not in path)
    for _ in range(2):
        state, gradient = step(state)
    assert all(size > 0 for size in sizes(gradient).values())


def test_files_of_our_own_are_read_as_written(tmp_path):
    for kind in KINDS:
        graphdef, state, _ = made(kind)
        module = nnx.merge(graphdef, state)
        save_component(module, tmp_path / kind)
        again = load_component(tmp_path / kind)
        assert again.config == module.config
        assert nnx.split(again)[0] == graphdef
        jax.tree.map(np.testing.assert_array_equal, nnx.split(again)[1], state)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"head_dim": 6}, "head_dim=6 is not a multiple of 4"),
        ({"num_layers": 0}, "num_layers=0 must be 1 or more"),
        ({"head_dim": 0}, "head_dim=0 must be 1 or more"),
        ({"patch": 0}, "patch=0 must be 1 or more"),
        ({"mlp_ratio": 0.0}, "mlp_ratio=0 must be above 0"),
        ({"channels": 0}, "channels=0 must be at least 1"),
        ({"activation": "tanh"}, "activation 'tanh' is not known"),
        ({"positions": "sincos", "num_heads": 1, "head_dim": 6}, "not a multiple of 4"),
    ],
)
def test_wrong_configs_are_refused(change, message):
    with pytest.raises(FornaxError, match=message):
        dataclasses.replace(SMALL, **change).transformer()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"positions": FractionalRopeConfig(spans=(8.0,))}, "spans="),
        ({"image_states": None}, "image_states=None"),
    ],
)
def test_wrong_configs_of_video_models_are_refused(change, message):
    with pytest.raises(FornaxError, match=message):
        dataclasses.replace(video_like(), **change)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"positions": None}, "clean_references is of a model that draws after images"),
        ({"first_frame": True}, "first_frame is of videos"),
        ({"pad_multiple": 32}, "pad_multiple does not go with"),
    ],
)
def test_wrong_configs_of_models_after_images_are_refused(change, message):
    with pytest.raises(FornaxError, match=message):
        dataclasses.replace(after_images(), **change)
    with pytest.raises(FornaxError, match="reference_axis=1 must be one of the 3 axes"):
        RopeConfig(axes=(2, 2, 4), sample_axes=(1, 2), reference_axis=1)


def test_text_on_the_samples_axes_stands_on_its_diagonal():
    config = RopeConfig(axes=(2, 2, 4), sample_axes=(1, 2), text="sample_axes")
    for text, sample in zip(*rotations((3, 3), 3, 9, config), strict=True):
        np.testing.assert_array_equal(text, sample[::4])


def test_images_to_draw_after_are_told_apart_by_their_number():
    """The same two in the other order are another condition; padding their sizes would not do."""
    graphdef, state, condition = made("references")
    module = nnx.merge(graphdef, state)
    call = jax.jit(lambda references: module(X, TIME, replaced(condition, references)))
    same = normal(4, 4, 4, 4)
    one, two = condition.references[1][:, :4], same
    forth, back = call((one, two)), call((two, one))
    assert float(jnp.abs(forth - back).max()) > 1e-3
    for wrong, message in (
        ((normal(4, 4, 4, 3),), "3 channels"),
        ((normal(4, 3, 4, 4),), "does not divide"),
    ):
        with pytest.raises(FornaxError, match=message):
            module(X, TIME, replaced(condition, wrong))


def replaced(condition, references):
    return dataclasses.replace(condition, references=references)


def test_wrong_samples_and_conditions_are_refused():
    graphdef, state, given = made("joint")
    module = nnx.merge(graphdef, state)
    with pytest.raises(FornaxError, match=r"\(4, 7, 12, 4\) does not divide into patches of"):
        module(X[:, :7], TIME, given)
    with pytest.raises(FornaxError, match="3 channels"):
        module(X[..., :3], TIME, given)
    with pytest.raises(FornaxError, match="needs text_BSD"):
        module(X, TIME)
    with pytest.raises(FornaxError, match="does not take classes_B"):
        module(X, TIME, dataclasses.replace(given, classes_B=jnp.zeros(4, jnp.int32)))
    width = given.text_BSD.shape[-1]
    other = dataclasses.replace(given, text_BSD=given.text_BSD[..., :-1])
    with pytest.raises(FornaxError, match=rf"text_BSD of width {width}, and they have {width - 1}"):
        module(X, TIME, other)
