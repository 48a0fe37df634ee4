"""What vLLM asks of a quantized directory, answered without its own layers.

vLLM lets a quantization method of its own stand for every `quantization_config`, and refuses what
its kernels cannot do. Fornax's worker reads the files as `fornax serve` does, so that one method
stands for all that it reads.
"""

from collections.abc import Mapping
from typing import Any

from fornax.config import environment

__all__ = ["register"]

_NAME = "fornax"


def register() -> None:
    """Add the method, for vLLM's entry point group `vllm.general_plugins`, where it is wanted."""
    if "fornax" not in environment.vllm_plugins():
        return
    from vllm.model_executor.layers.quantization import (  # pyrefly: ignore[missing-import]
        register_quantization_config,
    )
    from vllm.model_executor.layers.quantization.base_config import (  # pyrefly: ignore[missing-import]
        QuantizationConfig,
    )
    from vllm.platforms import current_platform  # pyrefly: ignore[missing-import]

    class StoredQuantization(QuantizationConfig):
        """Weights as their files hold them: Fornax's readers say what they stand for."""

        def __init__(self, values: Mapping[str, Any]) -> None:
            super().__init__()
            self.values = values

        def get_name(self) -> str:
            """The method's name."""
            return _NAME

        def get_supported_act_dtypes(self) -> list[object]:
            """The platform's."""
            return current_platform.supported_dtypes

        @classmethod
        def get_min_capability(cls) -> int:
            """No device of torch's is used."""
            return -1

        @staticmethod
        def get_config_filenames() -> list[str]:
            """None but config.json."""
            return []

        @classmethod
        def from_config(cls, config: dict[str, Any]) -> "StoredQuantization":
            """From a `quantization_config`, which the worker reads again, strictly."""
            return cls(config)

        @classmethod
        def override_quantization_method(
            cls, hf_quant_cfg: dict[str, Any], user_quant: str | None, hf_config: object = None
        ) -> str | None:
            """Stand for every method, unless a user names another than the files'."""
            del hf_config
            same = user_quant in (None, _NAME, hf_quant_cfg.get("quant_method"))
            return _NAME if same else None

        def get_quant_method(self, layer: object, prefix: str) -> None:
            """Torch holds no layer."""

    register_quantization_config(_NAME)(StoredQuantization)
