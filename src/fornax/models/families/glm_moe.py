"""GLM-4.5 and 4.6: DeepSeek V3's router with grouped-query attention."""

from typing import Any

from fornax.models.config import DecoderConfig
from fornax.models.families.common import read_common, write_common
from fornax.models.families.family import BASE_NAMES, PRE_NORM_NAMES, Family
from fornax.models.families.reader import ConfigReader
from fornax.models.families.rope_keys import read_rope, write_rope
from fornax.models.families.routed import (
    ROUTED_NAMES,
    mlp_pattern,
    read_sigmoid_router,
    write_grouped_router,
    write_routed,
)

__all__ = ["GLM4_MOE"]


def _read(reader: ConfigReader) -> DecoderConfig:
    fields = read_common(reader, tied=False, eps=1e-5)
    return DecoderConfig(
        **fields,
        rope=read_rope(reader, fields["max_position_embeddings"], partial=True, fraction=0.5),
        qkv_bias=reader.take("attention_bias", False),
        qk_norm="head" if reader.take("use_qk_norm", False) else "none",
        mlp_pattern=mlp_pattern(reader, fields["num_layers"], 1),
        experts=read_sigmoid_router(reader, groups=1, open_groups=1, scale=1.0),
    )


def _write(config: DecoderConfig) -> dict[str, Any]:
    return {
        **write_common(config),
        **write_rope(config.rope),
        **write_routed(config),
        **write_grouped_router(config),
        "partial_rotary_factor": config.rope.fraction,
        "attention_bias": config.qkv_bias,
        "use_qk_norm": config.qk_norm == "head",
    }


_NAMES = {**BASE_NAMES, **PRE_NORM_NAMES, **ROUTED_NAMES}
GLM4_MOE = Family("glm4_moe", "Glm4MoeForCausalLM", _read, _write, _NAMES)
