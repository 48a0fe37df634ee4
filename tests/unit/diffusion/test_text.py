"""Text encoders: what padding changes, meshes, and what is refused."""

import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from fornax.config.errors import CheckpointError, ConfigError, DataError
from fornax.diffusion.models import files
from fornax.diffusion.models.text import (
    CLIPTextConfig,
    CLIPTextEncoder,
    CLIPVisionConfig,
    T5Config,
    T5Encoder,
    load_prompt_tokenizer,
)
from fornax.diffusion.models.text.files import CLIP_TEXT, CLIP_TEXT_PROJECTED, T5, UMT5
from fornax.mesh import MeshConfig, make_mesh, use_mesh
from fornax.models import DecoderConfig, GatedDeltaConfig, abstract_decoder, create_decoder

CLIP_CONFIG = CLIPTextConfig(
    vocab_size=64,
    hidden_size=32,
    intermediate_size=64,
    num_layers=2,
    num_heads=4,
    max_positions=12,
    projection_size=16,
    projects=True,
    eos_token_id=63,
)
T5_CONFIG = T5Config(
    vocab_size=64,
    hidden_size=32,
    head_dim=8,
    intermediate_size=64,
    num_layers=2,
    num_heads=4,
    layer_biases=True,
)
TOKENS = np.random.default_rng(0).integers(0, 63, (8, 12)).astype(np.int32)
MASK = np.ones_like(TOKENS)
MASK[0, 7:] = 0


def _run(module, call):
    graphdef, state = nnx.split(module)
    return jax.jit(lambda state: call(nnx.merge(graphdef, state)))(state)


@pytest.mark.parametrize(
    ("component", "config"), [(CLIP_TEXT_PROJECTED, CLIP_CONFIG), (UMT5, T5_CONFIG)]
)
def test_padding_and_meshes_change_nothing(component, config):
    """Tokens do not depend on what padding holds, nor on how a mesh divides the encoder."""

    def run(module, tokens):
        found = _run(module, lambda module: module(tokens, MASK))
        return found[0] if isinstance(found, tuple) else found

    mesh = make_mesh(MeshConfig(data=2, fsdp=2, tensor=2))
    expected = run(files.create(component, config), TOKENS)
    with use_mesh(mesh):
        found = run(files.create(component, config, mesh=mesh), np.where(MASK > 0, TOKENS, 5))
    seen = MASK > 0
    np.testing.assert_allclose(
        np.asarray(found)[seen], np.asarray(expected)[seen], rtol=1e-4, atol=1e-5
    )


def test_bfloat16_stays_near():
    encoder = files.create(T5, T5Config(**{**vars(T5_CONFIG), "layer_biases": False}))
    half = T5Encoder(encoder.config, rngs=nnx.Rngs(0), compute_dtype=jnp.bfloat16)
    nnx.update(half, nnx.state(encoder))
    expected, found = (_run(each, lambda each: each(TOKENS[:2])) for each in (encoder, half))
    assert found.dtype == jnp.bfloat16
    assert np.abs(np.asarray(found, np.float32) - np.asarray(expected)).max() < 0.1


@functools.cache
def _clip() -> CLIPTextEncoder:
    return files.create(CLIP_TEXT_PROJECTED, CLIP_CONFIG)


@pytest.mark.parametrize(
    ("arguments", "options", "said"),
    [
        ((np.zeros((1, 13), np.int32),), {}, "13 tokens are more than the 12 positions"),
        ((np.zeros((1, 4), np.float32),), {}, "int32"),
        ((np.zeros((1, 4), np.int32), np.ones((1, 5), np.int32)), {}, "does not fit"),
        ((np.zeros((1, 4), np.int32),), {"skip": 3}, "skip=3"),
    ],
)
def test_what_clip_refuses(arguments, options, said):
    with pytest.raises(ConfigError, match=said):
        _clip()(*map(jnp.asarray, arguments), **options)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: CLIPTextConfig(hidden_size=30, num_heads=4), "num_heads=4"),
        (lambda: CLIPVisionConfig(image_size=30), "patches of 14"),
        (lambda: T5Config(num_buckets=7), "num_buckets=7"),
        (lambda: T5Config(num_buckets=32, max_distance=8), "max_distance=8"),
    ],
)
def test_configs_that_make_no_sense(make, said):
    with pytest.raises(ConfigError, match=said):
        make()


@pytest.mark.parametrize(
    ("component", "changes", "said"),
    [
        (T5, {"feed_forward_proj": "gated-tanh"}, "gated-|'tanh'"),
        (T5, {"is_decoder": True}, "is_decoder"),
        (CLIP_TEXT, {"hidden_akt": "gelu"}, "hidden_act"),
    ],
)
def test_folders_that_are_refused(component, changes, said, tmp_path):
    sizes = {"d_model": 32} if component is T5 else {"hidden_size": 32}
    (tmp_path / "config.json").write_text(json.dumps({**sizes, **changes}))
    with pytest.raises(ConfigError, match=said):
        files.load(component, tmp_path)


def test_two_tables_of_one_folder_must_be_equal(tmp_path):
    """Older folders of T5 hold the table twice."""
    from safetensors.numpy import load_file, save_file

    config = T5Config(**{**vars(T5_CONFIG), "layer_biases": False})
    files.save(T5, files.create(T5, config), tmp_path / "t5")
    file = tmp_path / "t5" / "model.safetensors"
    tensors = load_file(file)
    table = tensors["shared.weight"]
    save_file({**tensors, "encoder.embed_tokens.weight": table}, file)
    np.testing.assert_array_equal(files.load(T5, tmp_path / "t5").tokens.table[...], table)
    save_file({**tensors, "encoder.embed_tokens.weight": table + 1}, file)
    with pytest.raises(CheckpointError, match="one parameter, and differ"):
        files.load(T5, tmp_path / "t5")


def test_states_of_a_language_model():
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_heads": 4}
    decoder = create_decoder(DecoderConfig(**sizes, num_layers=3, attention_pattern=("full",)))
    tokens = TOKENS[:2]
    found, last = _run(
        decoder,
        lambda decoder: (
            decoder.hidden_states(tokens, layers=(-1, 3, 0, -3)),
            decoder.hidden(tokens),
        ),
    )
    np.testing.assert_array_equal(found[:, :, 0], found[:, :, 1])
    np.testing.assert_allclose(found[:, :, 0], last, rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(found[:, :, 2], decoder.embed(tokens))
    shallow = create_decoder(DecoderConfig(**sizes, num_layers=1))
    first = jax.tree.map(lambda leaf: leaf[:1], nnx.state(decoder.layers))
    nnx.update(shallow, {"embed": nnx.state(decoder.embed), "layers": first})
    last = _run(shallow, lambda shallow: shallow.hidden(tokens))
    np.testing.assert_allclose(decoder.final_norm(found[:, :, 3]), last, rtol=1e-5, atol=1e-5)
    for layers in ((), (4,), (-5,)):
        with pytest.raises(ConfigError, match="of a model with 3 layers"):
            decoder.hidden_states(tokens, layers=layers)


def test_a_mask_of_a_recurrent_model_is_refused():
    delta = GatedDeltaConfig(num_key_heads=2, num_value_heads=2, key_dim=8, value_dim=8)
    config = DecoderConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_heads=4,
        num_layers=2,
        attention_pattern=("linear", "full"),
        gated_delta=delta,
    )
    with pytest.raises(ConfigError, match="recurrent layers"):
        abstract_decoder(config).hidden_states(TOKENS[:2], MASK[:2], layers=(-1,))


def test_tokenizers_that_are_refused(tmp_path):
    with pytest.raises(DataError, match="neither"):
        load_prompt_tokenizer(tmp_path)
    (tmp_path / "spiece.model").write_bytes(b"\0")
    with pytest.raises(DataError, match=r"spiece.model and no tokenizer.json"):
        load_prompt_tokenizer(tmp_path)
    (tmp_path / "vocab.json").write_text("{")
    (tmp_path / "merges.txt").write_text("")
    with pytest.raises(DataError, match="are not a tokenizer"):
        load_prompt_tokenizer(tmp_path)
    (tmp_path / "vocab.json").write_text(json.dumps({"a</w>": 0}))
    with pytest.raises(DataError, match="is not CLIP's"):
        load_prompt_tokenizer(tmp_path)


def test_prompts_are_cut_and_padded(tmp_path):
    vocabulary = {each: at for at, each in enumerate(["a</w>", "<|startoftext|>", "<|endoftext|>"])}
    (tmp_path / "vocab.json").write_text(json.dumps(vocabulary))
    (tmp_path / "merges.txt").write_text("#version: 0.2\n")
    tokenizer = load_prompt_tokenizer(tmp_path)
    tokens, mask = tokenizer.encode(["A  a", "a " * 9, ""], 5)
    np.testing.assert_array_equal(tokens, [[1, 0, 0, 2, 2], [1, 0, 0, 0, 2], [1, 2, 2, 2, 2]])
    np.testing.assert_array_equal(mask, [[1, 1, 1, 1, 0], [1] * 5, [1, 1, 0, 0, 0]])
    tokens, mask = tokenizer.encode(["A  a", ""], 5, left=True)
    np.testing.assert_array_equal(tokens, [[2, 1, 0, 0, 2], [2, 2, 2, 1, 2]])
    np.testing.assert_array_equal(mask, [[0, 1, 1, 1, 1], [0, 0, 0, 1, 1]])
    for prompts, length in (([], 5), ("a", 5), (["a"], 2)):
        with pytest.raises(ConfigError, match=r"prompts|length"):
            tokenizer.encode(prompts, length)
