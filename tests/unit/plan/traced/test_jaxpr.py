"""Work, traffic and memory of traced programs beside counts by hand."""

import jax
import jax.numpy as jnp
import pytest
from jax.ad_checkpoint import checkpoint_name

from fornax import kernels
from fornax.plan.traced import walk

BF16 = jnp.bfloat16


def shape(*sizes, dtype=BF16):
    return jax.ShapeDtypeStruct(sizes, dtype)


def traced(function, *arguments, **more):
    with kernels.target_platform("tpu"):
        return walk(jax.make_jaxpr(function)(*arguments), **more)


def by_kind(found):
    flops, moved = {}, {}
    for one in found.work:
        flops[one.kind] = flops.get(one.kind, 0) + one.flops * one.count
        moved[one.kind] = moved.get(one.kind, 0) + one.bytes * one.count
    return flops, moved


def test_products_of_scanned_blocks_count_forward_backward_and_again():
    D, F, L, M = 64, 256, 5, 96

    def loss(weights, x):
        def block(x, w):
            return x + jax.nn.silu(x @ w[0]) @ w[1], None

        return jnp.sum(jax.lax.scan(jax.checkpoint(block), x, weights)[0].astype(jnp.float32))

    weights = (shape(L, D, F), shape(L, F, D))
    forward = 2 * 2 * M * D * F * L
    once, _ = by_kind(traced(loss, weights, shape(M, D)))
    assert once["products"] == forward
    # Two products for each backward, and the first again, of which the activation is made.
    whole, _ = by_kind(traced(jax.grad(loss), weights, shape(M, D)))
    assert whole["products"] == 3 * forward + forward / 2


def test_a_product_reads_its_operands_and_what_is_fused_into_it():
    found = traced(lambda a, b, w: (jnp.tanh(a) + b) @ w, *[shape(32, 64)] * 2, shape(64, 16))
    assert by_kind(found) == (
        {"products": 2 * 32 * 64 * 16},
        {"products": 2 * (2 * 32 * 64 + 64 * 16 + 32 * 16)},
    )
    # Read by two products it is made once: a pass over both, and its own bytes.
    found = traced(
        lambda a, b, w: ((jnp.tanh(a) + b) @ w, (jnp.tanh(a) + b).T @ a),
        *[shape(32, 64)] * 2,
        shape(64, 16),
    )
    assert by_kind(found)[1].get("norms_elementwise", 0) == 0
    found = traced(
        lambda a, b, w: (lambda y: (y @ w, y.T @ a))(jnp.tanh(a) + b),
        *[shape(32, 64)] * 2,
        shape(64, 16),
    )
    assert by_kind(found)[1]["norms_elementwise"] == 2 * 3 * 32 * 64


def test_convolutions_count_their_windows():
    def run(x, w):
        return kernels.convolution(x, w, stride=2)

    flops, _ = by_kind(traced(run, shape(2, 16, 16, 32), shape(3, 3, 32, 48)))
    assert flops["convolutions"] == 2 * (2 * 8 * 8) * (9 * 32) * 48


def test_attention_is_that_of_the_kernel_for_tpus():
    B, T, N, H = 2, 1024, 3, 64

    def loss(q, k, v):
        return jnp.sum(kernels.attention(q, k, v, scale=0.1, causal=False).astype(jnp.float32))

    arrays = [shape(B, T, N, H)] * 3
    product = 2 * B * N * T * T * H
    forward = traced(loss, *arrays)
    assert by_kind(forward)[0]["attention"] == 2 * product
    assert forward.keys == {2.0 * 2 * B * T * N * H: 1.0}
    # Backward makes the scores again, then four products.
    whole = traced(jax.grad(loss, (0, 1, 2)), *arrays)
    assert by_kind(whole)[0]["attention"] == pytest.approx(7 * product)


def test_memory_is_what_is_alive_at_once():
    M = 1024

    def chain(x, w):
        for _ in range(4):
            x = x @ w  # the one before is gone when the next is made
        return x

    size = 2.0 * M * M
    assert traced(chain, shape(M, M), shape(M, M)).peak_bytes == 2 * size
    # All four inputs of the products stay for the backward pass, and the stack of a loop too.
    whole = traced(
        jax.grad(lambda x, w: jnp.sum(chain(x, w).astype(jnp.float32)), 1), *[shape(M, M)] * 2
    )
    assert 5 * size <= whole.peak_bytes <= 8 * size

    def loop(x, ws):
        step = jax.checkpoint(lambda x, w: (jnp.tanh(x @ w), None))
        return jnp.sum(jax.lax.scan(step, x, ws)[0].astype(jnp.float32))

    whole = traced(jax.grad(loop), shape(M, M), shape(16, M, M))
    assert 16 * size <= whole.peak_bytes <= 22 * size


def test_names_and_rounding_to_the_own_dtype_are_no_arrays():
    def run(round_to):
        def step(x, w):
            y = checkpoint_name(x @ w, "y")
            return y @ w, jax.lax.reduce_precision(y, *round_to)

        return traced(step, shape(64, 32), shape(32, 32))

    product = 64 * 32 * 2
    assert run((8, 7)).peak_bytes == 2 * product
    assert run((5, 2)).peak_bytes == 3 * product


def test_weights_of_a_loop_are_cast_before_it():
    D, L, M = 128, 6, 16

    def run(weights, x, *, dtype):
        def block(x, w):
            return x @ w.astype(dtype), None

        return jax.lax.scan(block, x, weights)[0]

    weights, x = shape(L, D, D, dtype=jnp.float32), shape(M, D, dtype=jnp.float32)
    wide = traced(lambda w, x: run(w, x, dtype=jnp.float32), weights, x).peak_bytes
    halves = traced(lambda w, x: run(w, x.astype(BF16), dtype=BF16), weights, x).peak_bytes
    stack, stream = 2 * L * D * D, 2 * M * D
    assert halves - stack == pytest.approx(wide, abs=4 * stream)
    third = traced(lambda w, x: run(w, x.astype(BF16), dtype=BF16), weights, x, scale={0: 1 / 3})
    assert halves - third.peak_bytes == pytest.approx(2 / 3 * stack, abs=4)


def test_divided_arguments_and_their_gradients_count_for_their_share():
    M = 512

    def loss(w, x):
        return jnp.sum((x @ w.astype(BF16)).astype(jnp.float32))

    arguments = shape(M, M, dtype=jnp.float32), shape(64, M)
    whole = traced(jax.grad(loss), *arguments).peak_bytes
    quarter = traced(jax.grad(loss), *arguments, scale={0: 0.25}).peak_bytes
    assert whole - quarter >= 0.75 * 4 * M * M
