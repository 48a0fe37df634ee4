"""What vLLM asks of a platform: Fornax, to which torch is a way of writing tensors down on the CPU.

vLLM's processes share their memory with no device: only the worker's process starts JAX.
"""

from typing import TYPE_CHECKING

from vllm.exceptions import VLLMValidationError  # pyrefly: ignore[missing-import]
from vllm.platforms.interface import Platform, PlatformEnum  # pyrefly: ignore[missing-import]

from fornax.config.errors import EngineError
from fornax.llm.vllm_plugin.batch import sampling_params
from fornax.llm.vllm_plugin.options import check_config

if TYPE_CHECKING:
    from vllm.config import VllmConfig  # pyrefly: ignore[missing-import]
    from vllm.inputs import ProcessorInputs  # pyrefly: ignore[missing-import]

    import vllm  # pyrefly: ignore[missing-import]

__all__ = ["FornaxPlatform"]

_WORKER = "fornax.llm.vllm_plugin.worker.FornaxWorker"


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
    def supported_dtypes(self) -> list[object]:
        """First what 16-bit floats of the other kind are read as; float32 stays float32."""
        # This module asks which the platform is while it is imported.
        from vllm.utils.torch_utils import (  # pyrefly: ignore[missing-import]
            STR_DTYPE_TO_TORCH_DTYPE,
        )

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
    def update_block_size_for_backend(cls, vllm_config: "VllmConfig") -> None:
        """Any page size will do."""

    @classmethod
    def check_and_update_config(cls, vllm_config: "VllmConfig") -> None:
        """Choose the worker, and refuse what it cannot do.

        Raises:
          ValueError: an option that would be without effect; it is named.
        """
        from vllm.config import (  # pyrefly: ignore[missing-import]
            CompilationMode,
            CUDAGraphMode,
        )

        check_config(vllm_config)
        parallel = vllm_config.parallel_config
        parallel.worker_cls = _WORKER
        # One process drives every device of the mesh.
        parallel.distributed_executor_backend = "uni"
        parallel.disable_custom_all_reduce = True
        vllm_config.scheduler_config.async_scheduling = False
        vllm_config.compilation_config.mode = CompilationMode.NONE
        vllm_config.compilation_config.cudagraph_mode = CUDAGraphMode.NONE

    @classmethod
    def validate_request(
        cls, processed_inputs: "ProcessorInputs", params: "vllm.SamplingParams | vllm.PoolingParams"
    ) -> None:
        """Refuse in the server what the sampler would refuse in the worker.

        Raises:
          VLLMValidationError: a parameter that Fornax does not support; it is named.
        """
        try:
            sampling_params(params)
        except EngineError as error:
            raise VLLMValidationError(str(error)) from error
