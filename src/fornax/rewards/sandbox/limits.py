"""What a program in the sandbox may use."""

from dataclasses import dataclass

from fornax.config.errors import ConfigError

__all__ = ["Limits"]


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What one program may use; all of it is private to the program.

    Raises `ConfigError` for numbers that make no sense.
    """

    seconds: float = 5.0
    """Wall time; processor time is held to the same, rounded up."""
    memory_mb: int = 512
    """Address space of a process, in MiB."""
    files_mb: int = 16
    """Size of a file, and of all files of the private folder together, in MiB."""
    processes: int = 1
    """Processes and threads at a time; 1 forbids new processes, threads are limited by memory."""
    output_kb: int = 1024
    """What it may print, in KiB; a program that prints more is ended."""

    def __post_init__(self) -> None:
        for name in ("memory_mb", "files_mb", "processes", "output_kb"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}={getattr(self, name)} must be 1 or more")
        if not 0 < self.seconds <= 3600:
            raise ConfigError(f"seconds={self.seconds} must be above 0 and at most 3600")
        if self.memory_mb < 64:
            raise ConfigError(
                f"memory_mb={self.memory_mb} is less than Python itself needs; give 64"
            )
