"""Loss and gradients on a mesh of eight devices are those of one, for every option."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from tests.unit.models.conftest import CONFIGS, decoder_of, tokens_of

from fornax import kernels
from fornax.config.errors import KernelError, ShardingError
from fornax.mesh import (
    DEFAULT_RULES,
    MeshConfig,
    make_mesh,
    named_sharding,
    tree_shardings,
    use_mesh,
)
from fornax.models import abstract_decoder, create_decoder

MESHES = {
    "windowed": [{"data": 2, "fsdp": 2, "tensor": 2}],
    "clipped": [{"context": 2, "tensor": 2, "data": 2}],
}
CASES = [(name, sizes) for name, meshes in MESHES.items() for sizes in meshes]
FURTHER = {
    "biased": [{"fsdp": 2, "tensor": 4}, {"data": 8}],
    "windowed": [
        {"fsdp": 8},
        {"context": 2, "data": 4},
        {"context": 4, "fsdp": 2},
        {"context": 4, "tensor": 2},
    ],
    "experts": [
        {"data": 2, "fsdp": 2, "tensor": 2},
        {"fsdp": 8},
        {"expert": 4, "fsdp": 2},
        {"expert": 2, "data": 4},
        {"expert": 4, "tensor": 2},
        {"expert": 4, "context": 2},
        {"expert": 2, "context": 2, "fsdp": 2},
        {"expert": 2, "tensor": 2, "data": 2},
    ],
    "latent": [
        {"context": 2, "data": 4},
        {"context": 4, "fsdp": 2},
        {"context": 2, "tensor": 2, "fsdp": 2},
    ],
    "linear": [{"data": 2, "fsdp": 2, "tensor": 2}, {"fsdp": 4, "tensor": 2}],
    "clipped": [{"fsdp": 2, "tensor": 4}],
    "mamba": [{"fsdp": 8}, {"data": 2, "fsdp": 2, "tensor": 2}],
}
"""Among them the axes that divide the length or experts, with each other axis."""
RINGS = {
    "windowed": [
        {"context": 2, "fsdp": 4},
        {"context": 4, "tensor": 2},
        {"context": 4, "data": 2},
    ],
    "clipped": [{"expert": 2, "context": 2, "fsdp": 2}, {"context": 4, "tensor": 2}],
    "latent": [{"context": 4, "fsdp": 2}, {"context": 2, "tensor": 2, "fsdp": 2}],
}
"""Where keys and values are passed round: grouped queries, windows, caps; sinks, chunks, experts;
latent attention."""
IDS = np.array([[1] * 5 + [2] * 7, [0] * 3 + [1] * 9] * 4, np.int32)


def _compute(
    name: str, state: Any, tokens: jax.Array, ids: jax.Array, exchange: str = "auto"
) -> Any:
    config = dataclasses.replace(CONFIGS[name], context_exchange=exchange)
    graphdef = nnx.graphdef(abstract_decoder(config))

    def loss(state: Any) -> jax.Array:
        logits_BTV = nnx.merge(graphdef, state)(tokens, None, ids)
        log_probs = jax.nn.log_softmax(logits_BTV[:, :-1])
        picked = jnp.take_along_axis(log_probs, tokens[:, 1:, None], axis=-1)[..., 0]
        return -jnp.sum(picked * (ids[:, :-1] == ids[:, 1:]) * (ids[:, 1:] > 0))

    return jax.value_and_grad(loss)(state)


@functools.cache
def _one_device(name: str) -> Any:
    state = nnx.state(decoder_of(name))
    found = jax.jit(functools.partial(_compute, name))(state, tokens_of(8, 12), IDS)
    return jax.device_get(found)


@functools.cache
def _rounding(name: str) -> list[np.ndarray]:
    """How far one device's gradients move, leaf by leaf, with the last bit of its parameters.

    A program that sums in another order cannot be asked to agree better: where activations are
    small, norms multiply a rounding by the thousand.
    """
    generator = np.random.default_rng(0)
    expected = jax.tree.leaves(_one_device(name)[1])
    run = jax.jit(functools.partial(_compute, name))
    moved = [np.zeros((), np.float32)] * len(expected)
    for _ in range(4):
        state = jax.tree.map(
            lambda leaf: leaf * (1 + generator.integers(-1, 2, leaf.shape) * np.float32(2**-24)),
            nnx.state(decoder_of(name)),
        )
        gradients = jax.tree.leaves(run(state, tokens_of(8, 12), IDS)[1])
        moved = [
            np.maximum(most, np.abs(found - wanted).max())
            for most, found, wanted in zip(moved, gradients, expected, strict=True)
        ]
    return moved


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        *CASES,
        *(
            pytest.param(name, sizes, marks=pytest.mark.exhaustive)
            for name, meshes in FURTHER.items()
            for sizes in meshes
        ),
    ],
    ids=str,
)
def test_loss_and_gradients_are_those_of_one_device(name: str, sizes: dict[str, int]) -> None:
    _check(name, sizes, "auto")


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("name", "sizes"), [(name, sizes) for name in RINGS for sizes in RINGS[name]], ids=str
)
def test_passing_keys_round_makes_no_difference(name: str, sizes: dict[str, int]) -> None:
    with kernels.recording_choices() as made:
        _check(name, sizes, "ring")
    assert "ring" in {each.implementation for each in made}


def _check(name: str, sizes: dict[str, int], exchange: str) -> None:
    mesh = make_mesh(MeshConfig(**{"fsdp": 1, **sizes}))
    state = nnx.state(decoder_of(name))
    shardings = tree_shardings(state, mesh, DEFAULT_RULES)
    rows = named_sharding(mesh, ("batch", "length"), DEFAULT_RULES)
    tokens, ids = jax.device_put((tokens_of(8, 12), IDS), rows)
    run = functools.partial(_compute, name, exchange=exchange)
    run = jax.jit(run, out_shardings=(None, shardings))
    with use_mesh(mesh):
        loss, gradients = run(jax.device_put(state, shardings), tokens, ids)
    expected_loss, expected = _one_device(name)
    assert float(loss) == pytest.approx(float(expected_loss), rel=1e-6)
    leaves = jax.tree.leaves(gradients), jax.tree.leaves(expected), _rounding(name)
    for found, wanted, rounding in zip(*leaves, strict=True):  # both programs round
        atol = max(2e-5 * max(1.0, np.abs(wanted).max()), 2 * rounding)
        np.testing.assert_allclose(found, wanted, atol=atol)


@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        ("biased", {"fsdp": 2, "tensor": 4}),
        ("windowed", {"data": 2, "fsdp": 2, "tensor": 2}),
    ],
    ids=str,
)
def test_created_values_do_not_depend_on_the_mesh(name: str, sizes: dict[str, int]) -> None:
    mesh = make_mesh(MeshConfig(**{"fsdp": 1, **sizes}))
    spread = nnx.state(create_decoder(CONFIGS[name], seed=3, mesh=mesh))
    whole = nnx.state(create_decoder(CONFIGS[name], seed=3))
    for found, wanted in zip(jax.tree.leaves(spread), jax.tree.leaves(whole), strict=True):
        np.testing.assert_array_equal(np.asarray(found), np.asarray(wanted))
    kernel = spread["layers"]["mlp"]["up"]["kernel"].get_value()
    parts = sizes.get("fsdp", 1) * sizes.get("tensor", 1)
    assert kernel.addressable_shards[0].data.size * parts == kernel.size


def test_heads_that_do_not_divide_name_the_parameter() -> None:
    mesh = make_mesh(MeshConfig(fsdp=2, tensor=4))
    with pytest.raises(ShardingError, match=r"layers/attention/k/kernel: dimension 2 \(kv_heads\)"):
        create_decoder(CONFIGS["windowed"], mesh=mesh)


@pytest.mark.parametrize(
    ("exchange", "sizes", "length", "said"),
    [
        (
            "heads",
            {"context": 4, "data": 2},
            16,
            r"cannot exchange by heads \(model.context_exchange\) in this call: native: .*over 4 "
            r"devices, and over those 2 key heads.*do not all divide; use auto or all_gather or "
            r"ring\b",
        ),
        ("ring", {"context": 8}, 4, r"\(length\) of size 4 does not divide over context=8; choose"),
    ],
)
def test_an_exchange_that_cannot_be_had_is_refused(
    exchange: str, sizes: dict[str, int], length: int, said: str
) -> None:
    config = dataclasses.replace(CONFIGS["windowed"], context_exchange=exchange)
    graphdef, state = nnx.split(abstract_decoder(config))
    tokens = jnp.zeros((8, length), jnp.int32)
    with (
        use_mesh(make_mesh(MeshConfig(**{"fsdp": 1, **sizes}))),
        pytest.raises((KernelError, ShardingError), match=said),
    ):
        jax.eval_shape(lambda state: nnx.merge(graphdef, state)(tokens), state)
