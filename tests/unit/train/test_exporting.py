"""The zoo's exported functions are the decoder's own, to the last bit where the bucket is."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from fornax import export
from fornax.config.errors import ConfigError
from fornax.export.modules import take_apart
from fornax.kernels.registry import target_platform
from fornax.models import Decoder, DecoderConfig, ExpertsConfig, abstract_decoder
from fornax.models.rope_config import DynamicNTKScaling, RopeConfig
from fornax.train import export_model, model_functions

TINY = DecoderConfig(
    vocab_size=48,
    hidden_size=16,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    intermediate_size=24,
    max_position_embeddings=32,
)
TOKENS = np.random.default_rng(0).integers(0, 48, (4, 8), dtype=np.int32)


def drawn(config: DecoderConfig) -> Decoder:
    """A decoder drawn by numpy: nothing is compiled for it."""
    rng = np.random.default_rng(0)
    parts = take_apart(abstract_decoder(config), abstract=True)
    values = {
        name: jnp.asarray(rng.normal(size=slot.shape, scale=0.3), slot.dtype)
        for name, slot in parts.params.items()
    }
    return parts.rebuild(values)


@pytest.fixture(scope="module")
def decoder() -> Decoder:
    return drawn(TINY)


@pytest.fixture(scope="module")
def path(decoder, tmp_path_factory):
    path = tmp_path_factory.mktemp("bundle") / "lm"
    export_model(
        decoder,
        path,
        functions=("logits", "score"),
        batch=(4,),
        lengths=(8,),
        platforms=("cpu",),
        check=False,
    )
    return path


@pytest.fixture(scope="module")
def loaded(path):
    return export.load(path)


@pytest.fixture(scope="module")
def own(decoder):
    """(final norm's output, logits) of the decoder itself, its attention left to XLA."""
    graph, state = nnx.split(decoder)

    @jax.jit
    def run(state, tokens_BT):
        model = nnx.merge(graph, state)
        ones = jnp.ones(tokens_BT.shape, jnp.int32)
        positions = jnp.broadcast_to(jnp.arange(tokens_BT.shape[1]), tokens_BT.shape)
        with target_platform("gpu"):  # the decoder's norm has a native kernel on CPU
            x_BTD = model.hidden(tokens_BT, positions, ones, consecutive=True, implementation="xla")
            return x_BTD, model.logits(x_BTD)

    return [np.asarray(found) for found in run(state, TOKENS)]


def test_logits_are_the_decoders_own_bit_for_bit(loaded, own):
    np.testing.assert_array_equal(loaded["logits"](tokens=TOKENS)["logits"], own[1])


def test_padding_changes_no_logit_but_by_rounding(loaded, own):
    short = loaded["logits"](tokens=TOKENS[:3, :5])["logits"]
    np.testing.assert_allclose(short, own[1][:3, :5], rtol=1e-5, atol=1e-6)


def test_the_score_is_the_sum_of_log_probabilities(loaded, own):
    found = loaded["score"](tokens=TOKENS[:, :6])
    logprobs = np.asarray(jax.nn.log_softmax(own[1]))
    each = np.take_along_axis(logprobs[:, :5], TOKENS[:, 1:6, None], axis=2)[..., 0]
    assert found["tokens"].tolist() == [5] * 4
    np.testing.assert_array_equal(found["logprobs"][:, 0], 0)
    np.testing.assert_allclose(found["logprobs"][:, 1:], each, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(found["logprob"], each.sum(axis=1), rtol=1e-5)


def test_next_token_and_embeddings_leave_padding_out(decoder, own):
    last = model_functions(["embedding"], pooling="last")["embedding"]
    functions = {**model_functions(["next_token", "embedding"]), "last": last}
    lengths = np.array([8, 6, 1, 0], np.int32)

    @jax.jit
    def run(tokens):
        named = functions.items()
        return {name: f(decoder, tokens=tokens, lengths=lengths) for name, f in named}

    found, (x_BTD, logits_BTV) = run(TOKENS), own
    for row, length in enumerate(lengths[:3]):
        for got, expected in (
            (found["next_token"]["logits"][row], logits_BTV[row, length - 1]),
            (found["last"]["embedding"][row], x_BTD[row, length - 1]),
            (found["embedding"]["embedding"][row], x_BTD[row, :length].mean(axis=0)),
        ):
            np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(found["embedding"]["embedding"][3], 0)


@pytest.mark.slow
def test_experts_are_exported_with_open_rows_and_lengths(tmp_path):
    routed = ExpertsConfig(
        num_experts=8, experts_per_token=2, intermediate_size=8, num_groups=2, groups_per_token=1
    )
    model = drawn(dataclasses.replace(TINY, experts=routed))
    kinds = {"functions": ("logits",), "platforms": ("cpu",), "check": False}
    export_model(model, tmp_path / "lm", batch=(2, 4), lengths=(4, 8), **kinds)
    found = export.load(tmp_path / "lm")["logits"](tokens=TOKENS[:3, :7])["logits"]
    x_BTD = model.hidden(jnp.asarray(TOKENS[:3, :7]), implementation="xla")
    np.testing.assert_allclose(found, model.logits(x_BTD), rtol=1e-5, atol=1e-5)


def test_weights_keep_their_logical_axes_and_the_model_is_said(loaded):
    manifest = loaded.bundle.manifest
    assert manifest.weights["layers/mlp/up/kernel"].axes == ("layers", "embed", "mlp")
    assert manifest.metadata["vocab_size"] == 48
    assert list(manifest.functions) == ["logits", "score"]


@pytest.mark.slow
def test_functions_pass_the_checks_of_save(decoder, tmp_path):
    manifest = export_model(
        decoder, tmp_path / "lm", functions=("score", "embedding"), batch=(2,), lengths=(8,)
    )
    assert all(function.golden is not None for function in manifest.functions.values())
    assert set(manifest.platforms) == {"cpu", "cuda", "tpu"}


def test_a_rope_that_looks_at_the_longest_row_looks_at_each_alone():
    rope = RopeConfig(scaling=DynamicNTKScaling(factor=4.0))
    config = DecoderConfig(
        **{**{f: getattr(TINY, f) for f in TINY.__dataclass_fields__}, "rope": rope}
        | {"max_position_embeddings": 4}
    )
    decoder = drawn(config)
    function = model_functions(["next_token"])["next_token"]
    run = jax.jit(lambda tokens, lengths: function(decoder, tokens=tokens, lengths=lengths))
    beside_long = run(TOKENS, np.array([3, 8, 8, 8]))["logits"][0]
    beside_short = run(TOKENS, np.array([3, 1, 1, 1]))["logits"][0]
    np.testing.assert_array_equal(beside_long, beside_short)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"functions": ("logit",)}, r"'logit' is none of the model's \(logits, next_token"),
        ({"functions": ()}, "name a function of the model"),
        ({"lengths": (16, 64)}, "the model reads 32 tokens at most, and --length names 64"),
    ],
)
def test_what_the_model_cannot_do_is_refused(decoder, tmp_path, options, reason):
    with pytest.raises(ConfigError, match=reason):
        export_model(decoder, tmp_path / "x", **options)
