"""Files of text encoders as transformers writes them: config.json and key maps."""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

from fornax.config.errors import ConfigError
from fornax.diffusion.models.files import Component, Fields
from fornax.diffusion.models.keys import Key
from fornax.diffusion.models.text.clip import CLIPTextConfig, CLIPTextEncoder, CLIPVisionConfig
from fornax.diffusion.models.text.clip_vision import CLIPVisionEncoder
from fornax.diffusion.models.text.llava_vision import LlavaVision, LlavaVisionConfig
from fornax.diffusion.models.text.qwen_vision import QwenVisionConfig, QwenVisionEncoder
from fornax.diffusion.models.text.t5 import T5Config, T5Encoder

__all__ = [
    "CLIP_TEXT",
    "CLIP_TEXT_PROJECTED",
    "CLIP_VISION",
    "LLAVA_VISION",
    "QWEN_VISION",
    "T5",
    "UMT5",
    "llava_name",
    "qwen_name",
]

_ACTIVATIONS = {
    "quick_gelu": "gelu_sigmoid",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
    "silu": "silu",
}
"""Activations as transformers calls them; the first of each of ours is what is written."""
_NAMES = {ours: theirs for theirs, ours in reversed(_ACTIVATIONS.items())}

_HARMLESS = (
    # where the file came from
    "dtype",
    "model_type",
    "torch_dtype",
    "transformers_version",
    # of training, and of tokens that the encoder does not look at
    "attention_dropout",
    "bos_token_id",
    "classifier_dropout",
    "decoder_start_token_id",
    "dropout",
    "dropout_rate",
    "initializer_factor",
    "initializer_range",
    "pad_token_id",
    # of the decoder that T5 has elsewhere, and defaults of generation
    "is_encoder_decoder",
    "n_positions",
    "num_decoder_layers",
    "output_past",
    "scale_decoder_outputs",
    "task_specific_params",
    "tie_word_embeddings",
    "tokenizer_class",
    "use_cache",
)
"""Keys that do not change what an encoder computes."""


def _activation(fields: Fields, key: str, name: str) -> Any:
    if name not in _ACTIVATIONS:
        raise ConfigError(
            f"{key}={name!r} of a text encoder is not supported; use one of "
            f"{', '.join(_ACTIVATIONS)}"
        )
    return _ACTIVATIONS[name]


def _read_clip(projects: bool, fields: Fields) -> CLIPTextConfig:
    fields.ignore(*_HARMLESS)
    width = fields.take("hidden_size", 512)
    return CLIPTextConfig(
        vocab_size=fields.take("vocab_size", 49_408),
        hidden_size=width,
        intermediate_size=fields.take("intermediate_size", 2_048),
        num_layers=fields.take("num_hidden_layers", 12),
        num_heads=fields.take("num_attention_heads", 8),
        max_positions=fields.take("max_position_embeddings", 77),
        activation=_activation(fields, "hidden_act", fields.take("hidden_act", "quick_gelu")),
        norm_eps=fields.take("layer_norm_eps", 1e-5),
        projection_size=fields.take("projection_dim", 512),
        projects=projects,
        eos_token_id=fields.take("eos_token_id", 49_407),
    )


def _write_clip(config: CLIPTextConfig) -> dict[str, Any]:
    return {
        "model_type": "clip_text_model",
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "max_position_embeddings": config.max_positions,
        "hidden_act": _NAMES[config.activation],
        "layer_norm_eps": config.norm_eps,
        "projection_dim": config.projection_size,
        "eos_token_id": config.eos_token_id,
    }


def _clip_keys(config: CLIPTextConfig) -> list[Key]:
    return [
        Key("tokens", "text_model.embeddings.token_embedding"),
        Key("positions", "text_model.embeddings.position_embedding"),
        *_clip_layer_keys("text_model", config.num_layers),
        Key("final_norm", "text_model.final_layer_norm"),
        Key("projection", "text_projection"),
    ]


def _clip_layer_keys(model: str, count: int) -> list[Key]:
    layer = functools.partial(Key, layers=range(count))
    at = f"{model}.encoder.layers.{{}}"
    return [
        layer("layers/attention_norm", f"{at}.layer_norm1"),
        layer("layers/attention/q", f"{at}.self_attn.q_proj"),
        layer("layers/attention/k", f"{at}.self_attn.k_proj"),
        layer("layers/attention/v", f"{at}.self_attn.v_proj"),
        layer("layers/attention/o", f"{at}.self_attn.out_proj"),
        layer("layers/mlp_norm", f"{at}.layer_norm2"),
        layer("layers/mlp/up", f"{at}.mlp.fc1"),
        layer("layers/mlp/down", f"{at}.mlp.fc2"),
    ]


def _clip_name(name: str) -> str:
    """transformers 5 leaves out the beginning in the class without projection."""
    return name if name.startswith(("text_model.", "text_projection.")) else f"text_model.{name}"


def _clip(class_name: str, projects: bool) -> Component[CLIPTextConfig, CLIPTextEncoder]:
    return Component(
        class_name,
        read=functools.partial(_read_clip, projects),
        write=_write_clip,
        make=CLIPTextEncoder,
        keys=_clip_keys,
        stem="model",
        unread=(".position_ids",),
        name=_clip_name,
    )


def _read_clip_vision(fields: Fields) -> CLIPVisionConfig:
    fields.ignore(*_HARMLESS)
    fields.only("num_channels", 3)
    return CLIPVisionConfig(
        hidden_size=fields.take("hidden_size", 768),
        intermediate_size=fields.take("intermediate_size", 3_072),
        num_layers=fields.take("num_hidden_layers", 12),
        num_heads=fields.take("num_attention_heads", 12),
        image_size=fields.take("image_size", 224),
        patch_size=fields.take("patch_size", 32),
        activation=_activation(fields, "hidden_act", fields.take("hidden_act", "quick_gelu")),
        norm_eps=fields.take("layer_norm_eps", 1e-5),
        projection_size=fields.take("projection_dim", 512),
    )


def _write_clip_vision(config: CLIPVisionConfig) -> dict[str, Any]:
    return {
        "model_type": "clip_vision_model",
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_channels": 3,
        "image_size": config.image_size,
        "patch_size": config.patch_size,
        "hidden_act": _NAMES[config.activation],
        "layer_norm_eps": config.norm_eps,
        "projection_dim": config.projection_size,
    }


def _clip_vision_keys(config: CLIPVisionConfig) -> list[Key]:
    model = "vision_model"
    return [
        Key("class_token", f"{model}.embeddings.class_embedding"),
        Key("patch", f"{model}.embeddings.patch_embedding"),
        Key("positions", f"{model}.embeddings.position_embedding"),
        Key("first_norm", f"{model}.pre_layrnorm"),
        *_clip_layer_keys(model, config.num_layers),
        Key("final_norm", f"{model}.post_layernorm"),
    ]


def _vision_name(name: str) -> str:
    """transformers 5 leaves out the beginning."""
    return name if name.startswith("vision_model.") else f"vision_model.{name}"


CLIP_VISION = Component(
    class_name="CLIPVisionModel",
    read=_read_clip_vision,
    write=_write_clip_vision,
    make=CLIPVisionEncoder,
    keys=_clip_vision_keys,
    stem="model",
    unread=(".position_ids",),
    name=_vision_name,
)


def _read_llava(fields: Fields) -> LlavaVisionConfig:
    fields.only("vision_feature_layer", -2)
    fields.only("vision_feature_select_strategy", "default")
    fields.only("multimodal_projector_bias", True)
    text = fields.need("text_config")
    vision = Fields(fields.need("vision_config"), "vision_config")
    vision.ignore("architectures", "vocab_size")
    config = LlavaVisionConfig(
        vision=_read_clip_vision(vision),
        outputs=text.get("hidden_size", 4_096),
        activation=_activation(
            fields, "projector_hidden_act", fields.take("projector_hidden_act", "gelu")
        ),
    )
    vision.finish()
    return config


def _write_llava(config: LlavaVisionConfig) -> dict[str, Any]:
    return {
        "vision_config": _write_clip_vision(config.vision),
        "text_config": {"hidden_size": config.outputs},
        "projector_hidden_act": _NAMES[config.activation],
        "vision_feature_layer": -2,
        "vision_feature_select_strategy": "default",
    }


def _llava_keys(config: LlavaVisionConfig) -> list[Key]:
    return [
        *(
            dataclasses.replace(key, path=f"vision/{key.path}", name=f"vision_tower.{key.name}")
            for key in _clip_vision_keys(config.vision)
        ),
        Key("projector/up", "multi_modal_projector.linear_1"),
        Key("projector/down", "multi_modal_projector.linear_2"),
    ]


def llava_name(name: str) -> str | None:
    """The key map's name of a tensor of `LlavaForConditionalGeneration`; None for its text's."""
    name = name.removeprefix("model.")
    if name.startswith("vision_tower."):
        return f"vision_tower.{_vision_name(name.removeprefix('vision_tower.'))}"
    return name if name.startswith("multi_modal_projector.") else None


LLAVA_VISION = Component(
    class_name="LlavaForConditionalGeneration",
    read=_read_llava,
    write=_write_llava,
    make=LlavaVision,
    keys=_llava_keys,
    stem="model",
    unread=(".position_ids",),
)
"""The part of it that sees."""


def _read_qwen(fields: Fields) -> QwenVisionConfig:
    fields.ignore(*_HARMLESS, "tokens_per_second")
    fields.only("hidden_act", "silu")
    for name in ("in_channels", "in_chans"):
        fields.only(name, 3)
    side = fields.take("patch_size", 14)
    fields.only("spatial_patch_size", side)
    rope = fields.take("rope_parameters", None) or {}
    if rope.get("rope_theta", 10_000.0) != 10_000.0:
        raise ConfigError(
            f"vision_config: rope_parameters={rope} is not supported; rope_theta is 10000"
        )
    return QwenVisionConfig(
        hidden_size=fields.take("hidden_size", 3_584),
        intermediate_size=fields.take("intermediate_size", 3_420),
        num_layers=fields.take("depth", 32),
        num_heads=fields.take("num_heads", 16),
        frames=fields.take("temporal_patch_size", 2),
        patch_size=side,
        merge=fields.take("spatial_merge_size", 2),
        window_size=fields.take("window_size", 112),
        full_layers=tuple(fields.take("fullatt_block_indexes", (7, 15, 23, 31))),
        outputs=fields.take("out_hidden_size", 3_584),
    )


def _write_qwen(config: QwenVisionConfig) -> dict[str, Any]:
    return {
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "depth": config.num_layers,
        "num_heads": config.num_heads,
        "temporal_patch_size": config.frames,
        "patch_size": config.patch_size,
        "spatial_merge_size": config.merge,
        "window_size": config.window_size,
        "fullatt_block_indexes": list(config.full_layers),
        "out_hidden_size": config.outputs,
    }


def _qwen_keys(config: QwenVisionConfig) -> list[Key]:
    layer = functools.partial(Key, layers=range(config.num_layers))
    patch = (config.frames, config.patch_size, config.patch_size)
    return [
        Key("patch", "patch_embed.proj", patch=patch, unfolded=True),
        layer("layers/attention_norm", "blocks.{}.norm1"),
        layer("layers/q", "blocks.{}.attn.qkv"),
        layer("layers/k", "blocks.{}.attn.qkv"),
        layer("layers/v", "blocks.{}.attn.qkv"),
        layer("layers/out", "blocks.{}.attn.proj"),
        layer("layers/mlp_norm", "blocks.{}.norm2"),
        layer("layers/mlp/gate", "blocks.{}.mlp.gate_proj"),
        layer("layers/mlp/up", "blocks.{}.mlp.up_proj"),
        layer("layers/mlp/down", "blocks.{}.mlp.down_proj"),
        Key("merge_norm", "merger.ln_q"),
        Key("merger/up", "merger.mlp.0"),
        Key("merger/down", "merger.mlp.2"),
    ]


def qwen_name(name: str) -> str | None:
    """The key map's name of a tensor of `Qwen2_5_VLForConditionalGeneration`; None for its
    text's."""
    name = name.removeprefix("model.")
    return name.removeprefix("visual.") if name.startswith("visual.") else None


QWEN_VISION = Component(
    class_name="Qwen2_5_VLForConditionalGeneration",
    read=_read_qwen,
    write=_write_qwen,
    make=QwenVisionEncoder,
    keys=_qwen_keys,
    stem="model",
)
"""The part of it that sees."""
CLIP_TEXT = _clip("CLIPTextModel", projects=False)
CLIP_TEXT_PROJECTED = _clip("CLIPTextModelWithProjection", projects=True)


def _read_t5(defaults: Mapping[str, Any], layer_biases: bool, fields: Fields) -> T5Config:
    fields.ignore(*_HARMLESS, "dense_act_fn", "eos_token_id", "is_gated_act")
    fields.only("is_decoder", False)

    def take(key: str) -> Any:
        return fields.take(key, defaults[key])

    projection = take("feed_forward_proj")
    gated = projection.startswith("gated-")
    name = projection.removeprefix("gated-")
    if gated and name == "gelu":  # as transformers reads it
        name = "gelu_new"
    return T5Config(
        vocab_size=take("vocab_size"),
        hidden_size=take("d_model"),
        head_dim=take("d_kv"),
        intermediate_size=take("d_ff"),
        num_layers=take("num_layers"),
        num_heads=take("num_heads"),
        num_buckets=take("relative_attention_num_buckets"),
        max_distance=take("relative_attention_max_distance"),
        activation=_activation(fields, "feed_forward_proj", name),
        gated=gated,
        layer_biases=layer_biases,
        norm_eps=take("layer_norm_epsilon"),
    )


_T5_DEFAULTS: Mapping[str, Any] = {
    "vocab_size": 32_128,
    "d_model": 512,
    "d_kv": 64,
    "d_ff": 2_048,
    "num_layers": 6,
    "num_heads": 8,
    "relative_attention_num_buckets": 32,
    "relative_attention_max_distance": 128,
    "feed_forward_proj": "relu",
    "layer_norm_epsilon": 1e-6,
}
_UMT5_DEFAULTS: Mapping[str, Any] = {
    **_T5_DEFAULTS,
    "vocab_size": 250_112,
    "d_ff": 1_024,
    "num_layers": 8,
    "num_heads": 6,
    "feed_forward_proj": "gated-gelu",
}


def _write_t5(config: T5Config) -> dict[str, Any]:
    name = _NAMES[config.activation]
    if config.gated:
        name = f"gated-{'gelu' if name == 'gelu_new' else name}"
    return {
        "model_type": "umt5" if config.layer_biases else "t5",
        "vocab_size": config.vocab_size,
        "d_model": config.hidden_size,
        "d_kv": config.head_dim,
        "d_ff": config.intermediate_size,
        "num_layers": config.num_layers,
        "num_heads": config.num_heads,
        "relative_attention_num_buckets": config.num_buckets,
        "relative_attention_max_distance": config.max_distance,
        "feed_forward_proj": name,
        "layer_norm_epsilon": config.norm_eps,
    }


def _t5_keys(config: T5Config) -> list[Key]:
    layer = functools.partial(Key, layers=range(config.num_layers))
    at = "encoder.block.{}.layer"
    biases = "SelfAttention.relative_attention_bias.weight"
    gated = config.gated
    return [
        Key("tokens", "shared"),
        Key("biases/table", f"encoder.block.0.layer.0.{biases}"),
        layer("layers/attention/biases/table", f"{at}.0.{biases}"),
        layer("layers/attention_norm", f"{at}.0.layer_norm"),
        layer("layers/attention/q", f"{at}.0.SelfAttention.q"),
        layer("layers/attention/k", f"{at}.0.SelfAttention.k"),
        layer("layers/attention/v", f"{at}.0.SelfAttention.v"),
        layer("layers/attention/o", f"{at}.0.SelfAttention.o"),
        layer("layers/mlp_norm", f"{at}.1.layer_norm"),
        layer("layers/mlp/gate", f"{at}.1.DenseReluDense.wi_0"),
        layer("layers/mlp/up", f"{at}.1.DenseReluDense.{'wi_1' if gated else 'wi'}"),
        layer("layers/mlp/down", f"{at}.1.DenseReluDense.wo"),
        Key("final_norm", "encoder.final_layer_norm"),
    ]


def _t5_name(name: str) -> str:
    """Older files have the table under both names, or under the encoder's."""
    return "shared.weight" if name == "encoder.embed_tokens.weight" else name


def _t5(
    class_name: str, defaults: Mapping[str, Any], layer_biases: bool
) -> Component[T5Config, T5Encoder]:
    return Component(
        class_name,
        read=functools.partial(_read_t5, defaults, layer_biases),
        write=_write_t5,
        make=T5Encoder,
        keys=_t5_keys,
        stem="model",
        name=_t5_name,
    )


T5 = _t5("T5EncoderModel", _T5_DEFAULTS, layer_biases=False)
UMT5 = _t5("UMT5EncoderModel", _UMT5_DEFAULTS, layer_biases=True)
