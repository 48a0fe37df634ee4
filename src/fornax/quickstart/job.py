"""What the quickstart's stages share: settings and places."""

import dataclasses
from pathlib import Path

from rich.console import Console

from fornax.quickstart.config import QuickstartConfig, Size

__all__ = ["Job"]


@dataclasses.dataclass(frozen=True)
class Job:
    """What the stages share."""

    config: QuickstartConfig
    size: Size
    console: Console

    @property
    def run_dir(self) -> Path:
        """Where everything is written."""
        return self.config.run_dir

    @property
    def dataset(self) -> Path:
        """The corpus."""
        return self.run_dir / "data"

    @property
    def portable(self) -> Path:
        """The pretrained model, a Hugging Face directory."""
        return self.run_dir / "hf"

    @property
    def pairs(self) -> Path:
        """The functions that are tuned on, and those held out."""
        return self.run_dir / "functions"

    @property
    def sft(self) -> Path:
        """The run of supervised tuning."""
        return self.run_dir / "sft"

    @property
    def grpo(self) -> Path:
        """The run of reinforcement learning."""
        return self.run_dir / "grpo"

    @property
    def tuned(self) -> Path:
        """The tuned model, adapters merged, a Hugging Face directory."""
        return self.run_dir / "hf-tuned"

    @property
    def quantized(self) -> Path:
        """The tuned model in 4 bits, a Hugging Face directory."""
        return self.run_dir / "hf-tuned-w4"

    @property
    def models(self) -> Path:
        """The repository of exported models."""
        return self.run_dir / "models"

    @property
    def adapter(self) -> Path:
        """The supervised run's adapter for the pretrained model, in PEFT's format."""
        return self.run_dir / "adapter"
