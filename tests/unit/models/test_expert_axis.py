"""Experts divided over devices: outputs and gradients are those of one device, however routed.

Legend: B batch, T tokens, D model width, F width of an expert, E experts, k experts per token.
"""

import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from fornax.config.errors import ShardingError
from fornax.hlo import analyse, parse
from fornax.mesh import (
    DEFAULT_RULES,
    MeshConfig,
    balance_routed,
    make_mesh,
    named_sharding,
    tree_shardings,
    use_mesh,
)
from fornax.models import Decoder, DecoderConfig, ExpertsConfig, create_decoder
from fornax.models.capacity import drop_tokens
from fornax.models.dispatch import run_experts

B, T, D, F = 8, 3, 8, 4
FORMS = ("all_to_all", "all_gather")
MESHES = {
    "expert": {"expert": 8},
    "expert-fsdp": {"expert": 4, "fsdp": 2},
    "expert-tensor": {"expert": 4, "tensor": 2},
    "expert-data": {"expert": 2, "data": 4},
    "expert-tensor-data": {"expert": 2, "tensor": 2, "data": 2},
    "expert-context-fsdp": {"expert": 2, "context": 2, "fsdp": 2},
}


def _chosen(how: str, tokens: int, E: int, k: int) -> np.ndarray:
    """Experts int32 [tokens, k]; E for the padding that every routing has."""
    rng = np.random.default_rng(0)
    chosen = np.stack([rng.permutation(E)[:k] for _ in range(tokens)])
    if how == "none for some":
        chosen = np.stack([rng.permutation(E // 2)[:k] for _ in range(tokens)])
    if how == "all for one":
        chosen = np.stack([[0, *(1 + rng.permutation(E - 1))[: k - 1]] for _ in range(tokens)])
    chosen[-3:] = E
    return chosen.astype(np.int32)


def _inputs(how: str, E: int, k: int, length: int = T) -> tuple[Any, ...]:
    rng = np.random.default_rng(1)

    def draw(*shape: int) -> np.ndarray:
        return rng.normal(size=shape).astype(np.float32)

    arrays = {
        "gate": draw(E, D, F),
        "up": draw(E, D, F),
        "down": draw(E, F, D),
        "gate_bias": draw(E, F),
        "up_bias": draw(E, F),
        "down_bias": draw(E, D),
    }
    experts = _chosen(how, B * length, E, k).reshape(B, length, k)
    return draw(B, length, D), np.abs(draw(B, length, k)), experts, arrays, draw(B, length, D)


def _compute(
    inputs: tuple[Any, ...], form: str, weigh_input: bool = False, room: int | None = None
) -> Any:
    x, weights, experts, arrays, dy = inputs
    experts = jnp.asarray(experts)
    if room is not None:
        experts = drop_tokens(experts, len(arrays["gate"]), room)

    def run(x: jax.Array, weights: jax.Array, arrays: Any) -> jax.Array:
        return run_experts(
            x,
            weights,
            experts,
            arrays,
            lambda gate, up: jax.nn.silu(gate) * up,
            weigh_input=weigh_input,
            exchange=form,
            capacity=room,
        )

    y, pull = jax.vjp(run, x, weights, arrays)
    return y, *pull(dy)


def _check(
    inputs: tuple[Any, ...],
    sizes: dict[str, int],
    form: str,
    weigh_input: bool = False,
    room: int | None = None,
) -> None:
    run = functools.partial(_compute, inputs, form, weigh_input, room)
    expected = jax.jit(run)()
    with use_mesh(make_mesh(MeshConfig(**{"fsdp": 1, **sizes}))):
        found = jax.jit(lambda: run())()
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5 * max(1.0, np.abs(b).max()))


@pytest.mark.parametrize(
    ("mesh", "form"),
    [
        ("expert", "all_to_all"),
        ("expert-fsdp", "all_gather"),
        ("expert-tensor", "all_to_all"),
        ("expert-data", "all_gather"),
        *((mesh, form) for mesh in ("expert-tensor-data", "expert-context-fsdp") for form in FORMS),
    ],
)
def test_outputs_and_gradients_are_those_of_one_device(mesh: str, form: str) -> None:
    length = 4 if "context" in mesh else T
    _check(_inputs("any", 8, 3, length), MESHES[mesh], form, weigh_input=mesh == "expert-tensor")


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    ("how", "E", "k"),
    [("none for some", 16, 2), ("all for one", 8, 2), ("any", 4, 4), ("all for one", 8, 1)],
)
def test_wherever_the_tokens_go(how: str, E: int, k: int, form: str) -> None:
    _check(_inputs(how, E, k), {"expert": 4, "data": 2}, form)


@pytest.mark.parametrize(
    ("how", "mesh", "form"),
    [
        ("all for one", "expert-context-fsdp", "all_to_all"),
        ("all for one", "expert-data", "all_gather"),
        *(
            pytest.param(how, mesh, form, marks=pytest.mark.exhaustive)
            for how in ("all for one", "any")
            for mesh in ("expert", "expert-tensor-data", "expert-context-fsdp")
            for form in FORMS
        ),
    ],
)
def test_rows_with_room_are_those_of_one_device(how: str, mesh: str, form: str) -> None:
    """Rows of 8 tokens, of which one expert has room for 3; buffers have no room for more."""
    _check(_inputs(how, 8, 3, 8), MESHES[mesh], form, room=3)


def test_dropping_is_that_of_rows_in_order_on_any_mesh() -> None:
    """Also where the length is in balanced order over devices."""
    experts_BTk = _inputs("all for one", 8, 3, 16)[2]
    want = experts_BTk.copy()
    for row in want:
        taken = np.zeros(9, int)
        for token in row:
            for slot, expert in enumerate(token):
                taken[expert] += 1
                token[slot] = expert if taken[expert] <= 5 else 8
    assert (want != experts_BTk).any()
    np.testing.assert_array_equal(drop_tokens(jnp.asarray(experts_BTk), 8, 5), want)
    with use_mesh(make_mesh(MeshConfig(fsdp=2, context=4))):
        run = jax.jit(functools.partial(drop_tokens, num_experts=8, capacity=5, balanced=True))
        found = run(balance_routed(jnp.asarray(experts_BTk)[None])[0])
        np.testing.assert_array_equal(found, balance_routed(jnp.asarray(want)[None])[0])


@pytest.mark.parametrize("form", FORMS)
def test_buffers_have_room_for_the_capacity(form: str) -> None:
    """Rows of gate and up in the compiled program, and its memory: 4 devices with 4 of 16 experts
    each and 2 rows of 64 tokens, of which each expert has room for 10, or for all 64."""
    inputs = _inputs("any", 16, 3, 64)

    def compiled(room: int | None) -> Any:
        with use_mesh(make_mesh(MeshConfig(fsdp=1, expert=4), jax.devices()[:4])):
            run = functools.partial(_compute, inputs, form, room=room)
            return jax.jit(run).lower().compile()

    small, large = compiled(10), compiled(None)
    # Of each of 4 devices' 2 rows 4 experts run 10 tokens each, or all 64 with 3 choices.
    for program, rows in ((small, 4 * 2 * 4 * 10), (large, 4 * 2 * 64 * 3)):
        assert max(map(int, re.findall(r"f32\[(\d+),4\]", program.as_text()))) == rows
    sizes = [program.memory_analysis().temp_size_in_bytes for program in (small, large)]
    assert sizes[0] < (0.5 if form == "all_to_all" else 0.9) * sizes[1]


@pytest.mark.parametrize("form", FORMS)
def test_one_expert_is_on_every_device(form: str) -> None:
    _check(_inputs("any", 1, 1), {"expert": 4, "data": 2}, form)


@pytest.mark.parametrize("form", FORMS)
def test_a_batch_that_does_not_divide_is_on_every_device(form: str) -> None:
    inputs = _inputs("any", 8, 3)
    x, weights, experts, arrays, dy = inputs
    _check((x[:3], weights[:3], experts[:3], arrays, dy[:3]), {"expert": 4, "data": 2}, form)


def test_an_empty_expert_gets_a_gradient_of_exact_zeros() -> None:
    inputs = _inputs("none for some", 16, 2)
    for form in FORMS:
        with use_mesh(make_mesh(MeshConfig(fsdp=1, expert=8))):
            _, _, _, gradients = jax.jit(functools.partial(_compute, inputs, form))()
        for gradient in gradients.values():
            assert np.all(np.isfinite(gradient))
            assert not np.any(gradient[8:])


def test_experts_that_do_not_divide_are_refused_with_the_fix() -> None:
    config = DecoderConfig(
        hidden_size=16,
        num_heads=2,
        num_layers=1,
        experts=ExpertsConfig(num_experts=6, experts_per_token=2, intermediate_size=8),
    )
    mesh = make_mesh(MeshConfig(fsdp=2, expert=4))
    said = (
        r"experts/.*kernel: dimension 1 \(expert\) of size 6 does not divide over expert=4; choose"
    )
    with pytest.raises(ShardingError, match=said):
        create_decoder(config, mesh=mesh)


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS)
def test_a_device_has_its_share_of_the_work(form: str) -> None:
    """FLOPs of the compiled gradients, where each token has all experts: rows fill the buffers."""
    config = DecoderConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_heads=4,
        num_kv_heads=4,
        num_layers=2,
        mlp_pattern=("mlp", "experts"),
        experts=ExpertsConfig(
            num_experts=8, experts_per_token=8, intermediate_size=32, exchange=form
        ),
    )
    graphdef, state = nnx.split(nnx.eval_shape(lambda: Decoder(config, rngs=nnx.Rngs(0))))

    def loss(state: Any, tokens: jax.Array) -> jax.Array:
        logits = nnx.merge(graphdef, state)(tokens)
        return jnp.sum(jax.nn.logsumexp(logits, axis=-1))

    def flops(devices: int) -> float:
        mesh = make_mesh(MeshConfig(fsdp=1, expert=devices), jax.devices()[:devices])
        shardings = tree_shardings(state, mesh, DEFAULT_RULES)
        rows = named_sharding(mesh, ("batch", "length"), DEFAULT_RULES)
        tokens = jax.ShapeDtypeStruct((8, 32), jnp.int32, sharding=rows)
        put = jax.tree.map(
            lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), state, shardings
        )
        gradients = jax.jit(jax.grad(loss), out_shardings=shardings)
        with use_mesh(mesh):
            text = gradients.lower(put, tokens).compile().as_text()
        assert text is not None
        return analyse(parse(text), dict(mesh.shape)).flops

    tokens, experts = 8 * 32, 3 * 2 * 32 * 32 * 8
    assert flops(1) > 3 * tokens * experts
    assert flops(8) <= 1.1 * flops(1) / 8
