"""Larger architectures around a family's decoder, of which Fornax takes the decoder alone."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from fornax.config.errors import ConfigError

__all__ = ["WRAPPERS", "Wrapper", "unwrap_config", "unwrap_tensors"]

_T = TypeVar("_T")


@dataclass(frozen=True)
class Wrapper:
    """One architecture that holds a decoder among other parts."""

    architecture: str
    """The class in `architectures`."""
    decoder: str | Mapping[str, str]
    """The architecture of the decoder in it, or of each `model_type` that it can be; the first is
    that of a decoder that does not say."""
    key: str | None
    """The key of config.json with the decoder's keys; None where it has no others: the decoder
    without its output projection, as text encoders have it."""
    defaults: Mapping[str, Any]
    """Keys of the decoder that released files leave out."""
    shared: tuple[str, ...]
    """Keys that are beside the decoder's own and hold for it too."""
    names: Mapping[str, str]
    """Beginnings of the decoder's tensor names to what they are in the decoder alone."""
    left_out: tuple[str, ...]
    """Beginnings of the names of tensors that belong to other parts."""
    unread: tuple[str, ...] = ()
    """Keys beside the decoder's that are about other parts. An architecture that has some may have
    all keys in one mapping."""


_NAMES = {
    "language_model.model.": "model.",
    "language_model.lm_head.": "lm_head.",
    "model.language_model.": "model.",
    "lm_head.": "lm_head.",
}
_LEFT_OUT = (
    "vision_tower.",
    "multi_modal_projector.",
    "model.vision_tower.",
    "model.multi_modal_projector.",
)
"""What transformers and released files call the parts of most architectures with images."""

_GEMMA3 = Wrapper(
    architecture="Gemma3ForConditionalGeneration",
    decoder="Gemma3ForCausalLM",
    key="text_config",
    defaults={
        "bos_token_id": 2,
        "eos_token_id": 1,
        "head_dim": 256,
        "hidden_activation": "gelu_pytorch_tanh",
        "max_position_embeddings": 131_072,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "pad_token_id": 0,
        "vocab_size": 262_208,
    },
    shared=("eos_token_id", "tie_word_embeddings"),
    names=_NAMES,
    left_out=_LEFT_OUT,
)
_MISTRAL3 = Wrapper(
    architecture="Mistral3ForConditionalGeneration",
    decoder={
        "mistral": "MistralForCausalLM",
        "ministral3": "Ministral3ForCausalLM",
        "mistral4": "Mistral4ForCausalLM",
    },
    key="text_config",
    defaults={"bos_token_id": 1, "eos_token_id": 2},
    shared=("tie_word_embeddings",),
    names=_NAMES,
    left_out=_LEFT_OUT,
)


_LLAVA = Wrapper(
    architecture="LlavaForConditionalGeneration",
    decoder="LlamaForCausalLM",
    key="text_config",
    defaults={
        "hidden_size": 4_096,
        "intermediate_size": 11_008,
        "max_position_embeddings": 2_048,
        "num_attention_heads": 32,
        "num_hidden_layers": 32,
        "rms_norm_eps": 1e-6,
        "vocab_size": 32_000,
    },
    shared=("tie_word_embeddings",),
    names=_NAMES,
    left_out=_LEFT_OUT,
)
_LLAMA4 = Wrapper(
    architecture="Llama4ForConditionalGeneration",
    decoder="Llama4ForCausalLM",
    key="text_config",
    defaults={},
    shared=("tie_word_embeddings",),
    names=_NAMES,
    left_out=("vision_model.", "multi_modal_projector."),
)
_GEMMA4 = Wrapper(
    architecture="Gemma4ForConditionalGeneration",
    decoder="Gemma4ForCausalLM",
    key="text_config",
    defaults={},
    shared=("eos_token_id", "tie_word_embeddings"),
    names={"model.language_model.": "model.", "lm_head.": "lm_head."},
    left_out=(
        "model.vision_tower.",
        "model.audio_tower.",
        "model.embed_vision.",
        "model.embed_audio.",
    ),
)


def _qwen(architecture: str, decoder: str) -> Wrapper:
    """Qwen3.5, whose text model released files have beside a vision tower."""
    return Wrapper(
        architecture=architecture,
        decoder=decoder,
        key="text_config",
        defaults={},
        shared=("tie_word_embeddings",),
        names={"model.language_model.": "model."},
        left_out=("model.visual.",),
    )


_QWEN2_5_VL = Wrapper(
    architecture="Qwen2_5_VLForConditionalGeneration",
    decoder="Qwen2ForCausalLM",
    key="text_config",
    defaults={},
    shared=("tie_word_embeddings",),
    names={"model.language_model.": "model.", "language_model.": "model."},
    left_out=("visual.", "model.visual."),
    unread=(
        "image_token_id",
        "text_config",
        "video_token_id",
        "vision_config",
        "vision_end_token_id",
        "vision_start_token_id",
        "vision_token_id",
    ),
)


def _without_head(name: str) -> Wrapper:
    """The stack of layers alone, whose states are taken. It has no projection to the vocabulary,
    for which the table of embeddings stands."""
    return Wrapper(
        architecture=f"{name}Model",
        decoder=f"{name}ForCausalLM",
        key=None,
        defaults={},
        shared=(),
        names={"model.": "model.", "": "model."},
        left_out=("lm_head.",),
    )


WRAPPERS: tuple[Wrapper, ...] = (
    _GEMMA3,
    _MISTRAL3,
    _LLAVA,
    _LLAMA4,
    _GEMMA4,
    _QWEN2_5_VL,
    _qwen("Qwen3_5ForConditionalGeneration", "Qwen3_5ForCausalLM"),
    _qwen("Qwen3_5MoeForConditionalGeneration", "Qwen3_5MoeForCausalLM"),
    *map(_without_head, ("Llama", "Gemma2", "Qwen2", "Qwen3")),
)


def _wrapper_of(values: Mapping[str, object]) -> Wrapper | None:
    names = values.get("architectures")
    names = names if isinstance(names, list) else []
    return next((wrapper for wrapper in WRAPPERS if wrapper.architecture in names), None)


def unwrap_config(values: Mapping[str, object]) -> Mapping[str, object]:
    """The decoder's own config.json; `values` itself when nothing is around the decoder.

    Raises:
      ConfigError: when the decoder's keys are missing, or it is none that is supported.
    """
    wrapper = _wrapper_of(values)
    if wrapper is None:
        return values
    if wrapper.key is None:
        assert isinstance(wrapper.decoder, str)
        return {**values, "architectures": [wrapper.decoder], "tie_word_embeddings": True}
    inner = values.get(wrapper.key)
    if inner is None and wrapper.unread:
        inner = {key: value for key, value in values.items() if key != "model_type"}
    if not isinstance(inner, Mapping):
        raise ConfigError(
            f"config.json: {wrapper.key}={inner!r} must be a mapping with the keys of the decoder "
            f"in {wrapper.architecture}"
        )
    around = {key: values[key] for key in wrapper.shared if key in values}
    architecture = _decoder_of(wrapper, inner.get("model_type"))
    inner = {key: value for key, value in inner.items() if key not in wrapper.unread}
    return {**wrapper.defaults, **inner, **around, "architectures": [architecture]}


def _decoder_of(wrapper: Wrapper, kind: object) -> str:
    if isinstance(wrapper.decoder, str):
        return wrapper.decoder
    kinds = wrapper.decoder
    if kind is not None and kind not in kinds:
        raise ConfigError(
            f"config.json: {wrapper.key}.model_type={kind!r} is not supported in "
            f"{wrapper.architecture}; use one of {', '.join(kinds)}"
        )
    return kinds[str(kind)] if kind is not None else next(iter(kinds.values()))


def unwrap_tensors(values: Mapping[str, object], tensors: Mapping[str, _T]) -> dict[str, _T]:
    """The decoder's tensors by the names that it gives them alone.

    Args:
      values: the parsed config.json.
      tensors: whatever belongs to each stored name.
    """
    wrapper = _wrapper_of(values)
    if wrapper is None:
        return dict(tensors)
    found: dict[str, _T] = {}
    for name, tensor in tensors.items():
        if name.startswith(wrapper.left_out):
            continue
        start = next((start for start in wrapper.names if name.startswith(start)), "")
        found[wrapper.names.get(start, "") + name.removeprefix(start)] = tensor
    return found
