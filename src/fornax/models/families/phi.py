"""Phi-3, 3.5 and 4: fused projections, partial rotation, LongRoPE."""

from typing import Any

from fornax.models.config import DecoderConfig
from fornax.models.families.common import read_common, write_common
from fornax.models.families.family import BASE_NAMES, PRE_NORM_NAMES, Family
from fornax.models.families.reader import ConfigReader
from fornax.models.families.rope_keys import read_rope, write_rope
from fornax.models.rope_config import LongRopeScaling

__all__ = ["PHI3"]


def _read(reader: ConfigReader) -> DecoderConfig:
    for key in ("embd_pdrop", "resid_pdrop"):
        reader.expect(key, 0, 0.0)
    for key in ("attention_bias", "mlp_bias", "lm_head_bias"):
        reader.expect(key, False)
    for key in ("full_attn_mod", "interpolate_factor"):
        reader.expect(key, 1)
    fields = read_common(reader, tied=False, eps=1e-5)
    window = reader.take("sliding_window", None)
    return DecoderConfig(
        **fields,
        rope=read_rope(
            reader,
            fields["max_position_embeddings"],
            partial=True,
            aliases={"su": "longrope", "yarn": "longrope"},
            original=reader.take("original_max_position_embeddings", 4_096),
        ),
        sliding_window=window,
        attention_pattern=("full",) if window is None else ("sliding",),
    )


def _write(config: DecoderConfig) -> dict[str, Any]:
    rope = write_rope(config.rope)
    original = config.max_position_embeddings
    if isinstance(config.rope.scaling, LongRopeScaling):
        scaling = rope["rope_scaling"]
        original = scaling.pop("original_max_position_embeddings")
        scaling["type"] = scaling.pop("rope_type")
    return {
        **write_common(config),
        **rope,
        "original_max_position_embeddings": original,
        "embd_pdrop": 0.0,
        "resid_pdrop": 0.0,
        "sliding_window": config.sliding_window,
    }


_FUSED_NAMES = {
    **{
        f"layers/attention/{part}/kernel": "model.layers.{layer}.self_attn.qkv_proj.weight"
        for part in "qkv"
    },
    **{
        f"layers/mlp/{part}/kernel": "model.layers.{layer}.mlp.gate_up_proj.weight"
        for part in ("gate", "up")
    },
}

PHI3 = Family(
    "phi3", "Phi3ForCausalLM", _read, _write, {**BASE_NAMES, **PRE_NORM_NAMES, **_FUSED_NAMES}
)
