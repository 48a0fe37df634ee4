"""FLOPs read from compiled programs against closed forms.

Legend: B batch, T tokens, D width, N heads, H head width, L layers.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from fornax import kernels
from fornax.hlo import Loop, ProgramFacts, analyse, parse
from fornax.kernels import _matmul
from fornax.models import Decoder, DecoderConfig, flops_per_token

pytestmark = pytest.mark.usefixtures("optimized")

B, T = 2, 512
CONFIG = DecoderConfig(
    vocab_size=1024,
    hidden_size=256,
    intermediate_size=512,
    num_layers=4,
    num_heads=4,
    num_kv_heads=2,
    head_dim=64,
)
L, N, H = CONFIG.num_layers, CONFIG.num_heads, CONFIG.head_width
ATTENTION = 4 * B * T * T * L * N * H
"""Of one forward pass whose mask discounts nothing."""


def facts_of(function: Callable[..., Any], *arguments: Any) -> ProgramFacts:
    text = jax.jit(function).lower(*arguments).compile().as_text()
    assert text is not None
    return analyse(parse(text), {"data": 1})


@functools.cache
def compile_training(remat: str, implementation: str) -> jax.stages.Compiled:
    """Compile loss and gradients of a decoder on CPU."""
    config = CONFIG
    graphdef, params = nnx.split(nnx.eval_shape(lambda: Decoder(config, rngs=nnx.Rngs(0))))

    def loss(params: Any, tokens_BT: jax.Array) -> jax.Array:
        decoder = nnx.merge(graphdef, params)
        x_BTD = decoder.hidden(tokens_BT, remat=remat, implementation=implementation)
        logits_BTV = decoder.logits(x_BTD)
        own_BT = jnp.take_along_axis(logits_BTV, tokens_BT[..., None], -1)[..., 0]
        return jnp.mean(jax.nn.logsumexp(logits_BTV, -1) - own_BT)

    tokens = jax.ShapeDtypeStruct((B, T), jnp.int32)
    return jax.jit(jax.value_and_grad(loss)).lower(params, tokens).compile()


def train_facts(remat: str, implementation: str) -> ProgramFacts:
    text = compile_training(remat, implementation).as_text()
    assert text is not None
    return analyse(parse(text), {"data": 1})


def arrays(*shapes: tuple[int, ...]) -> list[jax.ShapeDtypeStruct]:
    return [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]


@pytest.mark.parametrize(
    ("equation", "shapes", "flops"),
    [
        ("mk,kn->mn", [(64, 96), (96, 32)], 2 * 64 * 96 * 32),
        ("btd,dnh->btnh", [(2, 64, 32), (32, 4, 16)], 2 * 2 * 64 * 32 * 4 * 16),
        ("btnh,bsnh->bnts", [(2, 64, 4, 16), (2, 48, 4, 16)], 2 * 2 * 4 * 64 * 48 * 16),
        ("bnts,bsnh->btnh", [(2, 4, 64, 48), (2, 48, 4, 16)], 2 * 2 * 4 * 64 * 48 * 16),
    ],
)
def test_products(equation: str, shapes: list[tuple[int, ...]], flops: int) -> None:
    facts = facts_of(functools.partial(jnp.einsum, equation), *arrays(*shapes))
    assert facts.flops == flops


@pytest.mark.parametrize("stride", [1, 2])
def test_a_convolution_counts_only_what_lies_on_its_input(stride: int) -> None:
    def convolve(x_BHWC: jax.Array, w_HWCF: jax.Array) -> jax.Array:
        return jax.lax.conv_general_dilated(
            x_BHWC, w_HWCF, (stride, stride), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
        )

    facts = facts_of(convolve, *arrays((2, 8, 8, 16), (3, 3, 16, 32)))
    along = {1: 3 * 8 - 2, 2: 3 * 4 - 1}[stride]
    assert facts.flops == 2 * 2 * along**2 * 16 * 32


def test_elementwise_work_is_counted_apart() -> None:
    facts = facts_of(lambda x, y: jnp.sum(jnp.exp(x) * y), *arrays((64, 128), (64, 128)))
    assert facts.flops == 0
    assert facts.transcendentals == 64 * 128
    assert facts.vector_flops == pytest.approx(2 * 64 * 128, rel=0.02)


def test_a_loop_counts_as_often_as_it_runs() -> None:
    def run(x: jax.Array, w: jax.Array) -> jax.Array:
        return jax.lax.scan(lambda x, w: (x @ w, None), x, w)[0]

    facts = facts_of(run, *arrays((8, 64), (7, 64, 64)))
    assert facts.flops == 7 * 2 * 8 * 64 * 64
    assert not facts.notes
    (product,) = (each for each in facts.operations if each.flops)
    assert product.count == 7


def test_a_loop_without_a_known_end_is_named() -> None:
    def run(x: jax.Array, w: jax.Array) -> jax.Array:
        return jax.lax.while_loop(lambda x: jnp.sum(x) < 100, lambda x: x @ w, x)

    facts = facts_of(run, *arrays((8, 64), (64, 64)))
    assert facts.flops == 2 * 8 * 64 * 64
    assert [note for note in facts.notes if "how often this loop runs is not known" in note]
    assert not all(item.exact for item in facts.schedule if isinstance(item, Loop))


def test_of_a_conditional_the_heavier_branch_counts() -> None:
    def run(go: jax.Array, x: jax.Array, w: jax.Array) -> jax.Array:
        return jax.lax.cond(go, lambda: x @ w, lambda: x * 2)

    facts = facts_of(run, jax.ShapeDtypeStruct((), jnp.bool_), *arrays((64, 64), (64, 64)))
    assert facts.flops == 2 * 64**3
    assert any("the one with the most work is counted" in note for note in facts.notes)


def test_a_train_step_without_remat_is_within_one_percent() -> None:
    facts = train_facts("none", "xla")
    assert facts.flops == pytest.approx(B * T * flops_per_token(CONFIG, T), rel=0.01)
    assert not facts.notes


@pytest.mark.parametrize(
    ("remat", "implementation"),
    [
        ("full", "native"),
        ("save_attention", "xla"),
        pytest.param("full", "xla", marks=pytest.mark.exhaustive),
        pytest.param("save_attention", "native", marks=pytest.mark.exhaustive),
    ],
)
def test_a_train_step_with_remat_and_masks_is_within_two_percent(
    remat: str, implementation: str
) -> None:
    facts = train_facts(remat, implementation)
    head = 2 * B * T * CONFIG.vocab_size * CONFIG.hidden_size
    layers = B * T * flops_per_token(CONFIG, 0, training=False) - head
    assert facts.flops == pytest.approx(
        3 * (layers + head) + made_again(remat, layers) + attention(remat, implementation), rel=0.02
    )


def made_again(remat: str, layers: int) -> float:
    """Return the FLOPs of weights' products in the backward pass's second forward pass."""
    # Nothing reads the result of a layer's last product again.
    again = layers - 2 * B * T * L * CONFIG.intermediate_size * CONFIG.hidden_size
    if remat == "save_attention":
        again -= 2 * B * T * L * (N + 2 * CONFIG.kv_heads) * H * CONFIG.hidden_size
    return again


def attention(remat: str, implementation: str) -> float:
    """Return the FLOPs of attention, in all passes; one forward pass is two products a score."""
    if implementation == "xla":
        # The scores are made again in any case, their product with the values if not saved.
        return ATTENTION * (3.5 if remat == "save_attention" else 4)
    # The backward kernel makes five products; the mask hides half of the scores.
    visible = (T + 1) / (2 * T)
    return ATTENTION * visible * (3.5 if remat == "save_attention" else 4.5)


def test_sliding_windows_hide_scores() -> None:
    def attend(q_BTNH: jax.Array, k_BSKH: jax.Array, v_BSKH: jax.Array) -> jax.Array:
        return kernels.attention(
            q_BTNH, k_BSKH, v_BSKH, scale=1.0, window=128, implementation="native"
        )

    facts = facts_of(attend, *arrays((B, T, N, H), (B, T, 2, H), (B, T, 2, H)))
    pairs = 128 * T - 127 * 128 / 2
    assert facts.flops == pytest.approx(4 * B * N * H * pairs, rel=1e-6)


@pytest.mark.parametrize(("remat", "implementation"), [("none", "xla"), ("full", "native")])
def test_the_peak_is_within_two_percent_of_the_compilers_memory(
    remat: str, implementation: str
) -> None:
    memory = compile_training(remat, implementation).memory_analysis()
    assert memory is not None
    used = memory.argument_size_in_bytes + memory.output_size_in_bytes
    used += memory.temp_size_in_bytes - memory.alias_size_in_bytes
    assert train_facts(remat, implementation).peak.bytes == pytest.approx(used, rel=0.02)


def test_lines_are_those_of_the_model() -> None:
    facts = train_facts("none", "xla")
    products = [each for each in facts.operations if each.flops]
    lines = {each.source for each in products}
    assert any("(Attention.__call__)" in line for line in lines)
    assert any("(MLP.__call__)" in line for line in lines)
    assert all(line.startswith("fornax/models/") for line in lines)
    assert any("fornax/kernels/" in each.fornax_source for each in products)


def test_collectives_of_a_mesh_of_cpus_name_their_axes() -> None:
    mesh = jax.make_mesh((2, 4), ("data", "fsdp"), axis_types=(jax.sharding.AxisType.Auto,) * 2)

    def exchange(x: jax.Array) -> tuple[jax.Array, jax.Array]:
        return jax.lax.psum(x, "data"), jax.lax.all_gather(x, "fsdp", tiled=True)

    spec = jax.sharding.PartitionSpec
    mapped = jax.shard_map(
        exchange,
        mesh=mesh,
        in_specs=spec(("data", "fsdp")),
        out_specs=(spec("fsdp"), spec("data")),
        check_vma=False,
    )
    text = jax.jit(mapped).lower(*arrays((64, 32))).compile().as_text()
    assert text is not None
    found = {each.kind: each for each in analyse(parse(text), dict(mesh.shape)).collectives}
    assert (found["all-reduce"].axes, found["all-reduce"].bytes) == (("data",), 8 * 32 * 4)
    assert (found["all-gather"].axes, found["all-gather"].bytes) == (("fsdp",), 32 * 32 * 4)
    assert found["all-gather"].source.endswith("(exchange)")


@pytest.mark.skipif(not _matmul.runs(jnp.bfloat16, 16, 16, 16), reason="needs AVX512-BF16")
def test_native_bfloat16_products_count_as_products() -> None:
    x, w = jnp.ones((2, 64, 96), jnp.bfloat16), jnp.ones((96, 128), jnp.bfloat16)

    def slopes(x: jax.Array, w: jax.Array) -> tuple[jax.Array, jax.Array]:
        return jax.grad(lambda x, w: jnp.sin(kernels.linear(x, w)).sum(), (0, 1))(x, w)

    assert facts_of(slopes, x, w).flops == 3 * 2 * 128 * 96 * 128
    x = jnp.ones((3, 32, 64))
    steps = ((3.4445, -4.7750, 2.0315),) * 5
    found = facts_of(lambda x: kernels.orthogonalize(x, steps, eps=1e-8), x)
    assert found.flops == 3 * 5 * (3 * 32 * 32 * 64 + 32**3)


@pytest.mark.skipif(not _matmul.runs(jnp.bfloat16, 256, 256, 256), reason="needs AVX2")
def test_native_convolutions_count_as_products() -> None:
    x, kernel = jnp.ones((2, 16, 16, 32), jnp.bfloat16), jnp.ones((3, 3, 32, 48), jnp.bfloat16)

    def slopes(x: jax.Array, kernel: jax.Array) -> tuple[jax.Array, jax.Array]:
        return jax.grad(lambda x, k: jnp.sin(kernels.convolution(x, k)).sum(), (0, 1))(x, kernel)

    assert "fornax" in jax.jit(slopes).lower(x, kernel).as_text()
    assert facts_of(slopes, x, kernel).flops == 3 * 2 * 2 * 16 * 16 * 9 * 32 * 48
