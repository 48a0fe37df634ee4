"""GLM-4: norms before and after each branch, and half of each head rotated in interleaved pairs."""

from typing import Any

from fornax.models.config import DecoderConfig
from fornax.models.families.common import read_common, write_common
from fornax.models.families.family import BASE_NAMES, Family
from fornax.models.families.reader import ConfigReader
from fornax.models.families.rope_keys import read_rope, write_rope

__all__ = ["GLM4"]


def _read(reader: ConfigReader) -> DecoderConfig:
    fields = read_common(reader, tied=False, eps=1.5625e-7)
    for key, default in (("num_kv_heads", 2), ("head_dim", 128)):
        if fields[key] is None:
            fields[key] = default
    return DecoderConfig(
        **fields,
        rope=read_rope(
            reader,
            fields["max_position_embeddings"],
            partial=True,
            fraction=0.5,
            interleaved=True,
        ),
        qkv_bias=reader.take("attention_bias", True),
        norm_placement="sandwich",
    )


def _write(config: DecoderConfig) -> dict[str, Any]:
    return {
        **write_common(config),
        **write_rope(config.rope),
        "partial_rotary_factor": config.rope.fraction,
        "attention_bias": config.qkv_bias,
    }


_LAYER = "model.layers.{layer}"
_NAMES = {
    **BASE_NAMES,
    "layers/attention_norm/scale": f"{_LAYER}.input_layernorm.weight",
    "layers/post_attention_norm/scale": f"{_LAYER}.post_self_attn_layernorm.weight",
    "layers/mlp_norm/scale": f"{_LAYER}.post_attention_layernorm.weight",
    "layers/post_mlp_norm/scale": f"{_LAYER}.post_mlp_layernorm.weight",
    "layers/mlp/gate/kernel": f"{_LAYER}.mlp.gate_up_proj.weight",
    "layers/mlp/up/kernel": f"{_LAYER}.mlp.gate_up_proj.weight",
}

GLM4 = Family("glm4", "Glm4ForCausalLM", _read, _write, _NAMES)
