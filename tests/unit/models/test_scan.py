"""How layers are cut into scans, and that the cut does not change what is computed."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.models.conftest import CONFIGS, tokens_of

from fornax.config.errors import ConfigError
from fornax.models import create_decoder, stack_layers
from fornax.models.config import LayerKind
from fornax.models.context import LayerContext
from fornax.models.rope import rotations
from fornax.models.scan import plan_segments, run_layers

KINDS = {
    "f": LayerKind(window=None, rope="global"),
    "s": LayerKind(window=4, rope="local"),
    "n": LayerKind(window=None, rope="none"),
}


def _plan(letters: str) -> list[tuple[str, int]]:
    names = {kind: letter for letter, kind in KINDS.items()}
    segments = plan_segments(tuple(KINDS[letter] for letter in letters))
    return [("".join(names[kind] for kind in s.kinds), s.repeats) for s in segments]


@pytest.mark.parametrize(
    ("letters", "plan"),
    [
        ("f", [("f", 1)]),
        ("f" * 32, [("f", 32)]),
        ("sf" * 13, [("sf", 13)]),  # Gemma 2
        ("sssssf" * 4 + "ss", [("s", 2), ("sssfss", 4)]),  # Gemma 3 1B: 26 layers
        ("fffn" * 9, [("fffn", 9)]),  # SmolLM3
        ("f" * 21 + "s" * 7, [("f", 21), ("s", 7)]),  # Qwen2 with max_window_layers
        ("fns", [("fns", 1)]),
    ],
)
def test_released_patterns_compile_few_bodies(letters: str, plan: list[tuple[str, int]]) -> None:
    assert _plan(letters) == plan


@given(st.text("fsn", min_size=1, max_size=20))
def test_a_plan_covers_the_layers_in_order(letters: str) -> None:
    assert "".join(kinds * repeats for kinds, repeats in _plan(letters)) == letters


@given(st.text("fsn", min_size=1, max_size=8))
def test_no_cut_has_fewer_bodies(letters: str) -> None:
    """Against every way of cutting into repeated periods."""

    def fewest(rest: str) -> int:
        if not rest:
            return 0
        return min(
            period + fewest(rest[period * repeats :])
            for period in range(1, len(rest) + 1)
            for repeats in range(1, len(rest) // period + 1)
            if rest.startswith(rest[:period] * repeats)
        )

    assert sum(len(kinds) for kinds, _ in _plan(letters)) == fewest(letters)


def test_uneven_patterns_equal_a_loop_over_the_layers() -> None:
    """sliding, sliding, full, sliding, sliding: two scans beside five calls of one layer."""
    config = dataclasses.replace(
        CONFIGS["windowed"], num_layers=5, attention_pattern=("sliding", "sliding", "full")
    )
    assert len(plan_segments(config.layer_kinds())) > 1
    model = create_decoder(config)
    tokens = jnp.asarray(tokens_of(1, 9))
    positions = jnp.arange(9)[None]
    context = LayerContext(positions, None, dict(rotations(config, positions)))
    graphdef, stack = nnx.split(model.layers)

    @jax.jit
    def both(stack: nnx.State, x_BTD: jax.Array) -> tuple[jax.Array, jax.Array]:
        scanned, _ = run_layers(nnx.merge(graphdef, stack), config.layer_kinds(), x_BTD, context)
        for index, kind in enumerate(config.layer_kinds()):
            layer = nnx.merge(graphdef, jax.tree.map(lambda leaf, i=index: leaf[i], stack))
            x_BTD, _, _ = layer(x_BTD, kind, context)
        return scanned, x_BTD

    scanned, looped = both(stack, model.embed(tokens))
    np.testing.assert_allclose(scanned, looped, atol=1e-5)


def test_a_stacked_layer_needs_logical_axes() -> None:
    class Bare(nnx.Module):
        def __init__(self, rngs: nnx.Rngs):
            self.w = nnx.Param(jax.random.normal(rngs.params(), (2, 2)))

    with pytest.raises(ConfigError, match="a variable without logical axes"):
        stack_layers(Bare, 3, nnx.Rngs(0))
