"""Optimizers see each stacked, head-split parameter as the matrix or vector it is."""

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from fornax.config.errors import ConfigError
from fornax.optim.views import make_views


def view(shape, axes):
    return make_views({"w": jnp.zeros(shape)}, {"w": axes})["w"]


@pytest.mark.parametrize(
    ("shape", "axes", "batch", "core"),
    [
        ((3, 16, 4, 8), ("layers", "embed", "heads", "head_dim"), (3,), (16, 32)),
        ((3, 4, 8, 16), ("layers", "heads", "head_dim", "embed"), (3,), (32, 16)),
        ((3, 16, 2, 8), ("layers", "embed", "kv_heads", "head_dim"), (3,), (16, 16)),
        ((3, 5, 16, 24), ("layers", "expert", "embed", "mlp"), (3, 5), (16, 24)),
        ((3, 4, 8), ("layers", "heads", "head_dim"), (3,), (32,)),
        ((3, 16), ("layers", "norm"), (3,), (16,)),
        ((3, 4, 8), ("layers", "norm", "norm"), (3,), (32,)),
        ((3, 16, 2, 24), ("layers", "embed", None, "mlp"), (3, 2), (16, 24)),
        ((3, 16, 6, 24), ("layers", "embed", "groups", "mlp"), (3, 6), (16, 24)),
        ((3, 6, 24), ("layers", "groups", "mlp"), (3, 6), (24,)),
        ((3, 16, 2, 8), ("layers", "embed", "groups", "head_dim"), (3,), (16, 16)),
        ((32, 16), ("vocab", "embed"), (), (32, 16)),
        ((3,), ("layers",), (3,), (1,)),
        ((), (), (), (1,)),
    ],
)
def test_batch_rows_and_columns(shape, axes, batch, core):
    seen = view(shape, axes)
    assert (seen.batch_shape, seen.core_shape) == (batch, core)
    x = np.arange(np.prod(shape, dtype=int), dtype=np.float32).reshape(shape)
    there = seen.to_core(jnp.asarray(x))
    assert there.shape == batch + core
    np.testing.assert_array_equal(seen.from_core(there), x)


def test_merged_heads_keep_their_order():
    seen = view((2, 16, 4, 8), ("layers", "embed", "heads", "head_dim"))
    x = np.random.default_rng(0).normal(size=(2, 16, 4, 8)).astype(np.float32)
    np.testing.assert_array_equal(seen.to_core(jnp.asarray(x))[1], x[1].reshape(16, 32))


def test_embeddings_and_vectors_are_no_hidden_matrices():
    assert view((2, 16, 24), ("layers", "embed", "mlp")).is_hidden_matrix
    assert not view((32, 16), ("vocab", "embed")).is_hidden_matrix
    assert view((32, 16), ("vocab", "embed")).is_matrix
    assert not view((2, 4, 8), ("layers", "heads", "head_dim")).is_matrix


def test_three_feature_dimensions_are_unclear():
    assert "3 feature dimensions" in view((4, 8, 16), ("embed", "mlp", "vocab")).unclear


def test_axes_come_from_variables():
    class Model(nnx.Module):
        def __init__(self):
            self.w = nnx.Param(jnp.zeros((2, 8, 4)), axes=("layers", "embed", "mlp"))

    views = make_views(nnx.state(Model()))
    assert list(views) == ["w"]
    assert views["w"].batch_shape == (2,)


def test_plain_arrays_are_seen_by_rank():
    views = make_views({"w": jnp.zeros((2, 3)), "b": jnp.zeros(3), "c": jnp.zeros((2, 3, 4))})
    assert views["w"].core_shape == (2, 3)
    assert not views["b"].is_matrix
    assert "no logical axes" in views["c"].unclear


def test_axes_of_another_rank_are_refused():
    with pytest.raises(ConfigError, match=r"w of shape \(2, 3\) has 1 axes"):
        view((2, 3), ("embed",))


def test_axes_that_miss_a_parameter_are_refused():
    with pytest.raises(ConfigError, match="no entry for parameter b"):
        make_views({"a": jnp.zeros(2), "b": jnp.zeros(2)}, {"a": ("norm",)})
