"""Which tensors are quantized: defaults, rules, and errors for rules that do not fit."""

from pathlib import Path

import pytest

from fornax.checkpoint.safetensors_file import find_tensors
from fornax.config.errors import ConfigError
from fornax.models import (
    DecoderConfig,
    ExpertsConfig,
    create_decoder,
    open_pretrained,
    save_pretrained,
)
from fornax.quant.leaves import Leaf, assign, find_leaves, parse_rule
from fornax.quant.schemes import scheme_named


def assigned(folder: Path, scheme: str, *rules: str) -> dict[str, Leaf]:
    parsed, stored = [parse_rule(rule) for rule in rules], open_pretrained(folder)
    leaves = find_leaves(stored, find_tensors(folder))
    found = assign(leaves, scheme_named(scheme), parsed, stored.model.config)
    return {leaf.tensor.name: leaf for leaf in found}


def test_linear_maps_of_layers_are_quantized_and_all_else_is_kept_with_a_reason(
    model: Path,
) -> None:
    found = assigned(model, "w4a16")
    assert {name for name, leaf in found.items() if leaf.scheme} == {
        f"model.layers.{layer}.{module}_proj.weight"
        for layer in (0, 1)
        for module in (
            *(f"self_attn.{x}" for x in "qkvo"),
            *(f"mlp.{x}" for x in ("gate", "up", "down")),
        )
    }
    kept = {name: leaf.reason for name, leaf in found.items() if not leaf.scheme}
    assert "table of embeddings" in kept["model.embed_tokens.weight"]
    assert kept["model.layers.0.input_layernorm.weight"] == "no matrix of a linear layer"
    assert all(kept.values())


def test_a_rule_changes_what_it_finds(model: Path) -> None:
    found = assigned(model, "w4a16", "layers/1/.*/down=w8a16", "layers/0/attention/=keep")
    assert found["model.layers.1.mlp.down_proj.weight"].scheme == scheme_named("w8a16")
    assert found["model.layers.0.mlp.down_proj.weight"].scheme == scheme_named("w4a16")
    kept = found["model.layers.0.self_attn.q_proj.weight"]
    assert kept.scheme is None
    assert "layers/0/attention/" in kept.reason


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        (["atention/q=keep"], "finds no matrix; near it are .*attention/q/kernel"),
        (["norm=w8a16"], "finds no matrix"),
        (["attention=keep", "/q/=w8a16"], "found by the rules 'attention' and '/q/'"),
        (["embed=w8a16"], "the output projection too"),
        (["attention"], "must be PATTERN=SCHEME"),
        (["(=keep"], "not a regular expression"),
        (["attention=w5"], "no scheme 'w5'"),
        (["kernel=keep"], "nothing is left to quantize"),
    ],
)
def test_rules_that_do_not_fit_are_refused(model: Path, rules: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        assigned(model, "w4a16", *rules)


def test_schemes_that_need_text_do_not_stand_beside_rotations(model: Path) -> None:
    with pytest.raises(ConfigError, match=r"layers.0.mlp.down_proj.weight.*w4a4 rotates"):
        assigned(model, "w4a4", "mlp/down=w4a16-gptq")


def test_inputs_outside_the_layers_are_not_measured(tmp_path: Path) -> None:
    decoder = create_decoder(
        DecoderConfig(vocab_size=32, hidden_size=128, num_layers=1, num_heads=2)
    )
    save_pretrained(decoder, tmp_path / "m")
    with pytest.raises(ConfigError, match="where no inputs are measured"):
        assigned(tmp_path / "m", "fp8", "lm_head=nvfp4")


def test_groups_that_do_not_divide_the_inputs_keep_a_leaf_unless_it_is_named(
    tmp_path: Path,
) -> None:
    config = DecoderConfig(
        vocab_size=32, hidden_size=128, intermediate_size=96, num_layers=1, num_heads=2
    )
    save_pretrained(create_decoder(config), tmp_path / "m")
    found = assigned(tmp_path / "m", "w4a16")
    assert "96 inputs" in found["model.layers.0.mlp.down_proj.weight"].reason
    with pytest.raises(ConfigError, match="groups of 128 do not divide"):
        assigned(tmp_path / "m", "w8a8", "down=w4a16")


def test_routers_stay_floats_unless_named(tmp_path: Path) -> None:
    experts = ExpertsConfig(num_experts=4, experts_per_token=2, intermediate_size=128)
    config = DecoderConfig(
        vocab_size=32, hidden_size=128, num_layers=1, num_heads=2, experts=experts
    )
    save_pretrained(create_decoder(config), tmp_path / "m")
    found = assigned(tmp_path / "m", "w4a16")
    router = next(name for name in found if name.endswith(".gate.weight"))
    assert found[router].reason == "a router"
    assert found[router.replace("gate.weight", "experts.3.w2.weight")].scheme is not None
    named = assigned(tmp_path / "m", "w4a16", "router=w8a16")
    assert named[router].scheme == scheme_named("w8a16")
