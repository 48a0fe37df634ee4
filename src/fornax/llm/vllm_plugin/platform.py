"""What vLLM asks of a platform: Fornax, to which torch is a way of writing tensors down on the CPU.

vLLM's processes share their memory with no device: only the worker's process starts JAX.
"""

from collections.abc import Mapping
from typing import Any

from vllm.platforms.interface import Platform, PlatformEnum  # pyrefly: ignore[missing-import]
from vllm.utils.torch_utils import (  # pyrefly: ignore[missing-import]
    STR_DTYPE_TO_TORCH_DTYPE,
)

__all__ = ["FornaxPlatform", "register"]

_WORKER = "fornax.llm.vllm_plugin.worker.FornaxWorker"

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
    "quantization": "give weights in float32 or bfloat16",
    "hf_overrides": "change the model's config.json, which Fornax reads itself",
    "enable_prompt_embeds": "give tokens",
    "return_sampling_mask": "leave it out",
    "logits_processors": "they are torch code and Fornax samples in JAX",
}
"""Fields of the model's configuration that must be unset."""


def register() -> str:
    """The platform, for vLLM's entry point group `vllm.platform_plugins`."""
    return f"{__name__}.FornaxPlatform"


class FornaxPlatform(Platform):
    """One worker that drives all of JAX's devices."""

    # To vLLM all work happens on the CPU, whatever devices JAX drives.
    _enum = PlatformEnum.CPU
    device_name = "fornax"
    device_type = "cpu"
    dispatch_key = "CPU"
    dist_backend = "gloo"
    simple_compile_backend = "eager"

    @property
    def supported_dtypes(self) -> list[Any]:
        """First what 16-bit floats of the other kind are read as; float32 stays float32."""
        return [STR_DTYPE_TO_TORCH_DTYPE[name] for name in ("float32", "bfloat16")]

    @classmethod
    def get_device_name(cls, device_id: int = 0) -> str:
        """The same for every device."""
        return cls.device_name

    @classmethod
    def is_pin_memory_available(cls) -> bool:
        """Torch has no device to pin memory for."""
        return False

    @classmethod
    def manual_seed_all(cls, seed: int) -> None:
        """Torch draws nothing here."""

    @classmethod
    def import_kernels(cls) -> None:
        """Torch's kernels are not needed."""

    @classmethod
    def update_block_size_for_backend(cls, vllm_config: Any) -> None:
        """Any page size will do."""

    @classmethod
    def check_and_update_config(cls, vllm_config: Any) -> None:
        """Choose the worker, and refuse what it cannot do.

        Raises:
          ValueError: an option that would be without effect; it is named.
        """
        from vllm.config import (  # pyrefly: ignore[missing-import]
            CompilationMode,
            CUDAGraphMode,
        )

        _check(vllm_config)
        parallel = vllm_config.parallel_config
        parallel.worker_cls = _WORKER
        # One process drives every device of the mesh.
        parallel.distributed_executor_backend = "uni"
        parallel.disable_custom_all_reduce = True
        vllm_config.scheduler_config.async_scheduling = False
        vllm_config.compilation_config.mode = CompilationMode.NONE
        vllm_config.compilation_config.cudagraph_mode = CUDAGraphMode.NONE

    @classmethod
    def validate_request(cls, processed_inputs: Any, params: Any) -> None:
        """Refuse in the server what the sampler would refuse in the worker.

        Raises:
          VLLMValidationError: a parameter that Fornax does not support; it is named.
        """
        from vllm.exceptions import VLLMValidationError  # pyrefly: ignore[missing-import]

        from fornax.config.errors import EngineError
        from fornax.llm.vllm_plugin.batch import sampling_params

        try:
            sampling_params(params)
        except EngineError as error:
            raise VLLMValidationError(str(error)) from error


def _check(config: Any) -> None:
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
        _allow("runner", model.runner_type, "generate")
        _allow("logprobs_mode", model.logprobs_mode, "raw_logprobs")


def _refuse(config: Any, names: Mapping[str, str]) -> None:
    for name, remedy in names.items():
        if getattr(config, name):
            raise ValueError(f"{name} is not supported by Fornax's platform; {remedy}")


def _allow(name: str, value: str, *allowed: str) -> None:
    if value not in allowed:
        raise ValueError(f"{name}={value} must be {' or '.join(allowed)} with Fornax's platform")
