"""A config that cannot be a model is an error that names the value and the fix."""

from typing import Any

import pytest

from fornax.config import ConfigError, from_mapping, to_mapping
from fornax.models import (
    DecoderConfig,
    DynamicNTKScaling,
    LinearScaling,
    Llama3Scaling,
    LongRopeScaling,
    RopeConfig,
    YarnScaling,
)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"num_layers": 0}, "num_layers=0 must be above 0"),
        ({"hidden_size": 30}, "hidden_size=30 does not divide into num_heads=8"),
        ({"num_kv_heads": 3}, "num_heads=8 is not a multiple of num_kv_heads=3"),
        ({"head_dim": 7}, r"rope\.fraction=1\.0 of head_dim=7 rotates 7 dimensions"),
        ({"rope": RopeConfig(fraction=0.01)}, "rotates 0 dimensions"),
        ({"attention_pattern": ("sliding",)}, "sliding_window is None; set the window"),
        ({"attention_pattern": ()}, "need at least one value"),
        ({"sliding_window": 8}, "sliding_window=8 is used by no layer"),
        ({"local_rope": RopeConfig()}, "local_rope is used by no layer"),
        ({"eos_token_ids": (1, 32_000)}, "eos_token_ids has 32000, outside the vocabulary"),
        ({"pad_token_id": -1}, "pad_token_id has -1"),
        ({"final_logit_softcap": 0.0}, r"final_logit_softcap=0\.0 must be above 0"),
        (
            {
                "rope": RopeConfig(
                    scaling=LongRopeScaling(
                        short_factor=(1.0,),
                        long_factor=(1.0,),
                        original_max_position_embeddings=8,
                    )
                )
            },
            "short_factor has 1 values; 64 rotated dimensions need 32",
        ),
        (
            {
                "head_dim": 2,
                "rope": RopeConfig(scaling=DynamicNTKScaling(factor=2.0)),
            },
            "type=dynamic needs more than 2 rotated dimensions",
        ),
    ],
)
def test_impossible_models(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        DecoderConfig(**fields)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: RopeConfig(theta=0), "theta=0"),
        (lambda: RopeConfig(fraction=1.5), r"fraction=1\.5"),
        (lambda: LinearScaling(factor=0), "factor=0"),
        (lambda: YarnScaling(factor=2, original_max_position_embeddings=0), "original_max_po"),
        (
            lambda: Llama3Scaling(
                factor=8,
                low_freq_factor=4,
                high_freq_factor=4,
                original_max_position_embeddings=64,
            ),
            "high_freq_factor=4 must be above low_freq_factor=4",
        ),
        (
            lambda: LongRopeScaling(
                short_factor=(1.0,), long_factor=(), original_max_position_embeddings=64
            ),
            "short_factor has 1 values and long_factor 0",
        ),
    ],
)
def test_impossible_ropes(make: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make()


def test_a_config_survives_yaml() -> None:
    config = DecoderConfig(
        rope=RopeConfig(scaling=YarnScaling(factor=4, original_max_position_embeddings=64)),
        sliding_window=16,
        attention_pattern=("sliding", "full"),
        local_rope=RopeConfig(theta=100),
        eos_token_ids=(1, 2),
    )
    assert from_mapping(DecoderConfig, to_mapping(config)) == config


def test_layers_repeat_their_patterns() -> None:
    config = DecoderConfig(
        num_layers=5,
        sliding_window=16,
        attention_pattern=("sliding", "full"),
        rope_pattern=(True, True, False),
        local_rope=RopeConfig(theta=100),
    )
    assert [(kind.window, kind.rope) for kind in config.layer_kinds()] == [
        (16, "local"),
        (None, "global"),
        (16, "none"),
        (None, "global"),
        (16, "local"),
    ]
