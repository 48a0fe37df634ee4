"""Text encoders beside transformers': states, pooled states, files in both directions."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import torch
import transformers
from flax import nnx
from safetensors.numpy import load_file, save_file

from fornax.diffusion.models import files
from fornax.diffusion.models.text import PromptTokenizer, load_prompt_tokenizer
from fornax.diffusion.models.text import files as text_files
from fornax.diffusion.models.text.t5 import relative_buckets
from fornax.models import load_pretrained

pytestmark = pytest.mark.parity
EOS = 96
TOKENS = np.random.default_rng(0).integers(3, EOS, (2, 20)).astype(np.int32)
TOKENS[0, 9:] = EOS  # padded with the end of text, as CLIP's tokenizer does
TOKENS[1, 19] = EOS
MASK = np.ones((2, 20), np.int32)
MASK[0, 10:] = 0


def _saved(model: Any, folder: Path) -> Any:
    """The model with weights of order one, saved."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 1:
                parameter.add_(0.2 * torch.randn_like(parameter))
            else:
                scale = 1.0 if "embed" in name or "shared" in name else parameter.shape[-1] ** -0.5
                parameter.copy_(scale * torch.randn_like(parameter))
    model.eval().save_pretrained(folder)
    return model


def _theirs(model: Any, mask: np.ndarray | None) -> Any:
    given = None if mask is None else torch.from_numpy(mask)
    with torch.no_grad():
        return model(torch.from_numpy(TOKENS), attention_mask=given, output_hidden_states=True)


def _run(module: nnx.Module, call: Callable[[Any], Any]) -> Any:
    """One compiled program of several calls of a module."""
    graphdef, state = nnx.split(module)
    return jax.jit(lambda state: call(nnx.merge(graphdef, state)))(state)


def _agree(ours: jax.Array | np.ndarray, theirs: torch.Tensor | np.ndarray) -> None:
    expected = np.asarray(theirs)
    assert ours.shape == expected.shape
    error = np.abs(np.asarray(ours) - expected).max()
    assert error <= 1e-4 * np.abs(expected).max()


def _round_trip(component: files.Component, module: Any, folder: Path, again: Path) -> None:
    """What is saved has the tensors that were read, and is a folder of transformers'."""
    files.save(component, module, again)
    written = load_file(again / "model.safetensors")
    read = {component.name(k): v for k, v in load_file(folder / "model.safetensors").items()}
    assert sorted(written) == sorted(read)
    assert all(written[name].tobytes() == read[name].tobytes() for name in read)


def _clip(**options: Any) -> transformers.CLIPTextConfig:
    sizes = {
        "vocab_size": 99,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "projection_dim": 24,
        "bos_token_id": 0,
        "eos_token_id": EOS,
    }
    return transformers.CLIPTextConfig(**{**sizes, **options})


@pytest.mark.parametrize(
    ("component", "options", "mask"),
    [
        pytest.param(text_files.CLIP_TEXT, {}, None, marks=pytest.mark.slow),
        (text_files.CLIP_TEXT, {"eos_token_id": 2, "hidden_act": "gelu"}, MASK),
        (text_files.CLIP_TEXT_PROJECTED, {"layer_norm_eps": 1e-3}, MASK),
    ],
    ids=["quick_gelu", "largest id", "projected"],
)
def test_clip(component: Any, options: Any, mask: Any, tmp_path: Path) -> None:
    kind = getattr(transformers, component.class_name)
    oracle = _saved(kind(_clip(**options)), tmp_path / "their")
    out = _theirs(oracle, mask)
    encoder = files.load(component, tmp_path / "their")
    # Stable Diffusion's clip skip has the final norm, SDXL's has it not.
    (states, pooled), (bare, same), (skipped, _) = _run(
        encoder,
        lambda encoder: (
            encoder(TOKENS, mask),
            encoder(TOKENS, mask, skip=1, norm=False),
            encoder(TOKENS, mask, skip=2),
        ),
    )
    _agree(states, out.last_hidden_state)
    _agree(pooled, out.text_embeds if component.class_name.endswith("n") else out.pooler_output)
    _agree(bare, out.hidden_states[-2])
    np.testing.assert_array_equal(same, pooled)
    inner = getattr(oracle, "text_model", oracle)
    with torch.no_grad():
        _agree(skipped, inner.final_layer_norm(out.hidden_states[-3]))
    _round_trip(component, encoder, tmp_path / "their", tmp_path / "ours")
    again = _theirs(kind.from_pretrained(tmp_path / "ours").eval(), mask)
    torch.testing.assert_close(again.last_hidden_state, out.last_hidden_state)


@pytest.mark.exhaustive
def test_clips_images(tmp_path: Path) -> None:
    """The states that Wan attends to: before the last layer, class token first."""
    config = transformers.CLIPVisionConfig(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=3,
        num_attention_heads=4,
        image_size=12,
        patch_size=4,
        hidden_act="gelu",
    )
    oracle = _saved(transformers.CLIPVisionModel(config), tmp_path / "their")
    encoder = files.load(text_files.CLIP_VISION, tmp_path / "their")
    images = np.random.default_rng(0).normal(size=(2, 12, 12, 3)).astype(np.float32)
    pixels = torch.from_numpy(images.transpose(0, 3, 1, 2).copy())
    with torch.no_grad():
        out = oracle(pixels, output_hidden_states=True)
    skipped, last = _run(encoder, lambda encoder: (encoder(images, skip=1), encoder(images)))
    _agree(skipped, out.hidden_states[-2])
    _agree(last, out.hidden_states[-1])
    _round_trip(text_files.CLIP_VISION, encoder, tmp_path / "their", tmp_path / "ours")


def test_clip_folders_of_older_versions(tmp_path: Path) -> None:
    """Names with the inner model's in front, and a table of positions as integers."""
    oracle = _saved(transformers.CLIPTextModel(_clip()), tmp_path / "their")
    file = tmp_path / "their" / "model.safetensors"
    tensors = {f"text_model.{name}": array for name, array in load_file(file).items()}
    tensors["text_model.embeddings.position_ids"] = np.arange(77)[None]
    save_file(tensors, file)
    encoder = files.load(text_files.CLIP_TEXT, tmp_path / "their")
    _agree(
        _run(encoder, lambda encoder: encoder(TOKENS)[0]), _theirs(oracle, None).last_hidden_state
    )


def _t5_sizes(**options: Any) -> dict[str, Any]:
    sizes = {"vocab_size": 99, "d_model": 32, "d_kv": 12, "d_ff": 48, "num_layers": 3}
    return {**sizes, "num_heads": 4, "relative_attention_num_buckets": 8, **options}


@pytest.mark.parametrize(
    ("component", "options", "mask"),
    [
        (text_files.T5, {"feed_forward_proj": "gated-gelu"}, None),
        pytest.param(
            text_files.T5,
            {"feed_forward_proj": "relu", "layer_norm_epsilon": 1e-3},
            MASK,
            marks=pytest.mark.slow,
        ),
        pytest.param(
            text_files.T5, {"feed_forward_proj": "gated-silu"}, MASK, marks=pytest.mark.slow
        ),
        (text_files.UMT5, {"relative_attention_max_distance": 12}, MASK),
    ],
    ids=["gated-gelu", "relu", "gated-silu", "umt5"],
)
def test_t5(component: Any, options: Any, mask: Any, tmp_path: Path) -> None:
    kind = getattr(transformers, component.class_name)
    config = kind.config_class(**_t5_sizes(**options))
    oracle = _saved(kind(config), tmp_path / "their")
    expected = _theirs(oracle, mask).last_hidden_state
    encoder = files.load(component, tmp_path / "their")
    _agree(_run(encoder, lambda encoder: encoder(TOKENS, mask)), expected)
    _round_trip(component, encoder, tmp_path / "their", tmp_path / "ours")
    again = _theirs(kind.from_pretrained(tmp_path / "ours").eval(), mask)
    torch.testing.assert_close(again.last_hidden_state, expected)


@pytest.mark.parametrize(("buckets", "distance"), [(32, 128), (8, 20), (64, 256), (32, 100)])
def test_buckets_of_relative_positions(buckets: int, distance: int) -> None:
    from transformers.models.t5.modeling_t5 import T5Attention

    at = torch.arange(600)
    expected = T5Attention._relative_position_bucket(
        at[None, :] - at[:, None], num_buckets=buckets, max_distance=distance
    )
    np.testing.assert_array_equal(relative_buckets(600, buckets, distance), expected.numpy())


LLM = {
    "vocab_size": 99,
    "hidden_size": 32,
    "intermediate_size": 56,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "attn_implementation": "eager",
}


def _language_model(name: str) -> Any:
    if name == "qwen2.5-vl":
        rope = {"type": "mrope", "mrope_section": [1, 1, 2]}
        vision = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2}
        config = transformers.Qwen2_5_VLConfig(
            text_config={**LLM, "rope_scaling": rope},
            vision_config={**vision, "out_hidden_size": 32},
        )
        return transformers.Qwen2_5_VLForConditionalGeneration(config)
    if name == "gemma2":
        more = {"head_dim": 8, "query_pre_attn_scalar": 8, "sliding_window": 6}
        return transformers.Gemma2Model(transformers.Gemma2Config(**LLM, **more))
    if name == "llama":
        return transformers.LlamaModel(transformers.LlamaConfig(**LLM))
    return transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**LLM, head_dim=8))


SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in ("qwen3", "gemma2")]


@pytest.mark.parametrize("name", ["qwen2.5-vl", "llama", *SLOW])
def test_language_models(name: str, tmp_path: Path) -> None:
    """Chosen states, those of padding too: one family attends to them."""
    oracle = _saved(_language_model(name), tmp_path)
    expected = _theirs(oracle, MASK).hidden_states
    layers = (0, 2, -2, -1)
    decoder = load_pretrained(tmp_path)
    found = _run(decoder, lambda decoder: decoder.hidden_states(TOKENS, MASK, layers=layers))
    # Padding a window behind the text sees nothing, of which theirs makes a mean of all.
    rows = np.s_[:] if name != "gemma2" else MASK > 0
    for place, layer in enumerate(layers):
        _agree(found[:, :, place][rows], expected[layer].numpy()[rows])


def test_a_language_model_with_all_keys_in_one_mapping(tmp_path: Path) -> None:
    """As the first files of Qwen2.5-VL are."""
    oracle = _saved(_language_model("qwen2.5-vl"), tmp_path)
    file = tmp_path / "config.json"
    values = json.loads(file.read_text())
    text = values.pop("text_config")
    rope = {"mrope_section": [1, 1, 2], "type": "mrope"}
    theta = text.pop("rope_parameters")["rope_theta"]
    flat = {**text, **values, "rope_theta": theta, "rope_scaling": rope}
    file.write_text(json.dumps({**flat, "vision_token_id": 5}))
    decoder = load_pretrained(tmp_path)
    found = _run(decoder, lambda decoder: decoder.hidden_states(TOKENS, MASK, layers=(-1,)))
    _agree(found[:, :, 0], _theirs(oracle, MASK).hidden_states[-1])


PROMPTS = [
    "A photo of a cat's 12 whiskers, wow!",
    "",
    "ÉTÉ  naïve\tcafé — 猫 <|endoftext|> x",
    " ".join(["many words"] * 20),
]


@pytest.mark.parametrize("padding", ["<|endoftext|>", "!"])
def test_clips_tokenizer(padding: str, tmp_path: Path) -> None:
    """SDXL's second one pads with an exclamation mark."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    backend = Tokenizer(models.BPE(unk_token="<|endoftext|>", end_of_word_suffix="</w>"))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=700,
        special_tokens=["<|startoftext|>", "<|endoftext|>"],
        initial_alphabet=letters,
        end_of_word_suffix="</w>",
        show_progress=False,
    )
    words = [*letters, *(letter + "</w>" for letter in letters)]
    backend.train_from_iterator([p.lower() for p in PROMPTS] * 3 + words, trainer)
    backend.model.save(str(tmp_path))
    names = {"pad_token": padding, "tokenizer_class": "CLIPTokenizer", "model_max_length": 77}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(names))
    theirs = transformers.CLIPTokenizer.from_pretrained(tmp_path)
    _same_ids(load_prompt_tokenizer(tmp_path), theirs)
    theirs.save_pretrained(tmp_path / "json")  # with tokenizer.json
    _same_ids(load_prompt_tokenizer(tmp_path / "json"), theirs)


def test_t5s_tokenizer(tmp_path: Path) -> None:
    letters = sorted({letter for prompt in PROMPTS for letter in prompt} - {" ", "\t"})
    pieces = [(token, 0.0) for token in ("<pad>", "</s>", "<unk>")]
    pieces += [("▁", -2.0), ("▁a", -1.5), ("wor", -1.0), *((each, -3.0) for each in letters[:-3])]
    transformers.T5Tokenizer(vocab=pieces, extra_ids=0).save_pretrained(tmp_path)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    _same_ids(load_prompt_tokenizer(tmp_path), theirs)


def _same_ids(ours: PromptTokenizer, theirs: Any) -> None:
    for length in (16, 60):
        options = {"padding": "max_length", "truncation": True, "max_length": length}
        expected = theirs(PROMPTS, **options, return_tensors="np")
        tokens_BS, mask_BS = ours.encode(PROMPTS, length)
        np.testing.assert_array_equal(tokens_BS, expected["input_ids"])
        np.testing.assert_array_equal(mask_BS, expected["attention_mask"])
    expected = theirs(PROMPTS, padding=True, return_tensors="np")
    np.testing.assert_array_equal(ours.encode(PROMPTS)[0], expected["input_ids"])
