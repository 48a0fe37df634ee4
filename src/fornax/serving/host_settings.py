"""What the host must be told; `fornax host` tells it by `serving.config.HostConfig`."""

from pathlib import Path
from typing import Literal, Protocol

__all__ = ["HostSettings"]


class HostSettings(Protocol):
    """What the host reads of `serving.config.HostConfig`."""

    @property
    def repository(self) -> Path | None:
        """The folder of models."""

    @property
    def control(self) -> Literal["poll", "explicit", "none"]:
        """How models change while serving."""

    @property
    def poll_seconds(self) -> float:
        """Between looks at the repository."""

    @property
    def load(self) -> tuple[str, ...]:
        """Models to load at the start when control is explicit; * for all."""

    @property
    def strict_readiness(self) -> bool:
        """Whether every model must be ready for the server to be."""

    @property
    def trust_executables(self) -> bool:
        """Whether native code in bundles may be run."""
