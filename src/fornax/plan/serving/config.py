"""The engine that is planned for: its keys are those of `fornax serve`."""

import dataclasses
from dataclasses import dataclass

from fornax.llm.config import EngineConfig

__all__ = ["ServingConfig"]


@dataclass(frozen=True, kw_only=True)
class ServingConfig(EngineConfig):
    """An engine's limits and choices, its tensor parallelism possibly left to the plan."""

    tensor_parallel_size: int = 0
    """Devices that each layer is divided over; 0: as many of the topology's as the model divides
    over (one on CPU)."""

    def __post_init__(self) -> None:
        """Check what the engine checks."""
        if self.tensor_parallel_size:
            super().__post_init__()
        else:
            self.engine(1)

    def engine(self, size: int) -> EngineConfig:
        """The engine's own config, with `size` where the tensor parallelism is left open."""
        fields = dataclasses.fields(EngineConfig)
        values = {field.name: getattr(self, field.name) for field in fields}
        values["tensor_parallel_size"] = self.tensor_parallel_size or size
        return EngineConfig(**values)
