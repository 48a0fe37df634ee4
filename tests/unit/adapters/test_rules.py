"""Patterns over module paths find what they say, and one that finds nothing names what is near."""

import pytest
from flax import nnx

from fornax.adapters import LoRA, attach
from fornax.adapters.rules import matches
from fornax.config.errors import ConfigError
from fornax.models import DecoderConfig, abstract_decoder

CONFIG = DecoderConfig(
    vocab_size=32,
    hidden_size=16,
    intermediate_size=24,
    num_layers=2,
    num_heads=2,
    qk_norm="head",
    tie_embeddings=False,
)


@pytest.mark.parametrize(
    ("pattern", "path", "found"),
    [
        ("attention/q", "layers/attention/q", True),
        ("q", "layers/attention/q", True),
        ("attention/*", "layers/attention/q", True),
        ("attention", "layers/attention/q", True),
        ("layers", "layers/attention/q", True),
        ("layers/*/q", "layers/attention/q", True),
        ("[qv]", "layers/attention/q", True),
        ("layers/q", "layers/attention/q", False),
        ("attention/q", "layers/attention/q_norm", False),
        ("tion/q", "layers/attention/q", False),
        ("*", "layers/attention/q", True),
    ],
)
def test_a_pattern_is_the_end_of_a_path_or_what_holds_it(pattern, path, found):
    assert matches(pattern, path) is found


def attach_to(*targets, **options):
    model = abstract_decoder(CONFIG)
    return attach(model, LoRA(rank=2, targets=targets, **options), rngs=nnx.Rngs(0))


def test_paths_that_were_adapted_are_told():
    assert attach_to("attention/[qv]", "mlp/up") == [
        "layers/attention/q",
        "layers/attention/v",
        "layers/mlp/up",
    ]


@pytest.mark.parametrize(
    ("target", "said"),
    [
        ("attn/q", "near it are layers/attention/q, "),
        ("q_proj", "near it are layers/attention/q"),
        ("down_proj", "near it are layers/mlp/down"),
        ("zzz", "those that can be are layers/attention/k, "),
        ("q_norm", r"only layers/attention/q_norm \(RMSNorm\)"),
        ("lm_head", r"only lm_head \(its kernel is read"),
    ],
)
def test_a_pattern_that_finds_nothing_is_an_error_that_lists_near_paths(target, said):
    with pytest.raises(ConfigError, match=f"lora.targets '{target}' matches no module .*{said}"):
        attach_to("attention/q", target)


def test_patterns_of_ranks_and_alphas_must_find_an_adapted_module_too():
    with pytest.raises(ConfigError, match=r"lora\.rank_pattern 'mlp/up' matches no module"):
        attach_to("attention/*", rank_pattern={"mlp/up": 4})
    with pytest.raises(ConfigError, match=r"lora\.alpha_pattern 'attention/r' matches no"):
        attach_to("attention/*", alpha_pattern={"attention/r": 4.0})


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"rank": 0}, "rank=0"),
        ({"rank_pattern": {"q": 0}}, "q=0"),
        ({"alpha": -1.0}, "alpha=-1"),
        ({"dropout": 1.0}, "dropout=1.0"),
        ({"targets": ()}, "targets is empty"),
        ({"quantize_block": 1}, "quantize_block=1"),
    ],
)
def test_values_that_make_no_adapter_are_refused(options, said):
    with pytest.raises(ConfigError, match=said):
        LoRA(**options)
