"""vLLM's configuration as Fornax's engine takes it, and what of it the worker cannot do.

Whether vLLM is to run over Fornax at all is asked here too, without importing either.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING

from fornax.config import environment, from_mapping
from fornax.llm.config import EngineConfig

if TYPE_CHECKING:
    from vllm.config import VllmConfig  # pyrefly: ignore[missing-import]

__all__ = ["check_config", "engine_config", "register"]

_PLATFORM = "fornax.llm.vllm_plugin.platform.FornaxPlatform"

_ALONE = {
    "pipeline_parallel_size": "divide the layers with tensor_parallel_size",
    "data_parallel_size": "start as many servers",
    "decode_context_parallel_size": "leave it out",
    "prefill_context_parallel_size": "leave it out",
    "nnodes": "leave it out",
}
"""Kinds of parallelism that must be 1, and what to do instead."""

_OFF = {
    "speculative_config": "`fornax serve` speculates",
    "kv_transfer_config": "leave it out",
    "ec_transfer_config": "leave it out",
    "watermark_config": "leave it out",
}
"""Parts of vLLM's configuration that must be absent."""

_MODEL_OFF = {
    "quantization_config": "make such files with `fornax quantize`",
    "hf_overrides": "change the model's config.json, which Fornax reads itself",
    "enable_prompt_embeds": "give tokens",
    "return_sampling_mask": "leave it out",
    "logits_processors": "they are torch code and Fornax samples in JAX",
}
"""Fields of the model's configuration that must be unset."""


def register() -> str | None:
    """The platform, for vLLM's entry point group `vllm.platform_plugins`, where it is wanted.

    vLLM calls what every installed package registers when VLLM_PLUGINS is not set, so that has to
    name Fornax.
    """
    return _PLATFORM if "fornax" in environment.vllm_plugins() else None


def engine_config(config: "VllmConfig") -> EngineConfig:
    """vLLM's configuration as Fornax's."""
    model, cache, scheduler = config.model_config, config.cache_config, config.scheduler_config
    most = model.max_logprobs
    options = {
        "dtype": str(model.dtype).removeprefix("torch."),
        "seed": model.seed,
        "max_model_len": model.max_model_len,
        "max_num_seqs": scheduler.max_num_seqs,
        "max_num_batched_tokens": scheduler.max_num_batched_tokens,
        "block_size": cache.block_size,
        "kv_cache_dtype": cache.cache_dtype,
        "kv_cache_memory_bytes": cache.kv_cache_memory_bytes,
        "gpu_memory_utilization": cache.gpu_memory_utilization,
        "tensor_parallel_size": config.parallel_config.tensor_parallel_size,
        "max_logprobs": model.get_vocab_size() if most == -1 else most,
    }
    if config.lora_config is not None:
        options["enable_lora"] = True
        options["max_loras"] = config.lora_config.max_loras
        options["max_lora_rank"] = config.lora_config.max_lora_rank
    return from_mapping(EngineConfig, options)


def check_config(config: "VllmConfig") -> None:
    """Refuse what would be without effect.

    Raises:
      ValueError: an option that the worker does not support; it is named.
    """
    for name, remedy in _ALONE.items():
        size = getattr(config.parallel_config, name)
        if size > 1:
            raise ValueError(f"{name}={size} must be 1 with Fornax's platform; {remedy}")
    _refuse(config, _OFF)
    _allow("kv_cache_dtype", config.cache_config.cache_dtype, "auto", "float32", "bfloat16")
    _allow("load_format", config.load_config.load_format, "auto", "safetensors")
    model = config.model_config
    if model is not None:
        _refuse(model, _MODEL_OFF)
        _check_quantization(model)
        _allow("runner", model.runner_type, "generate")
        _allow("logprobs_mode", model.logprobs_mode, "raw_logprobs")


def _check_quantization(model: object) -> None:
    """Weights are read as config.json says that they lie in the files, and not rounded."""
    asked, stored = model.quantization, getattr(model.hf_config, "quantization_config", None)  # pyrefly: ignore[missing-attribute]
    if asked is not None and stored is None:
        raise ValueError(
            f"quantization={asked} is not supported by Fornax's platform for weights that are not "
            "quantized in their files; make such files with `fornax quantize`"
        )


def _refuse(config: object, names: Mapping[str, str]) -> None:
    for name, remedy in names.items():
        if getattr(config, name):
            raise ValueError(f"{name} is not supported by Fornax's platform; {remedy}")


def _allow(name: str, value: str, *allowed: str) -> None:
    if value not in allowed:
        raise ValueError(f"{name}={value} must be {' or '.join(allowed)} with Fornax's platform")
