"""Where a run is written when nobody says: `fornax train` and `fornax launch` must agree on it."""

from pathlib import Path

__all__ = ["default_run_dir"]


def default_run_dir(command: str, config: str | Path | None = None) -> Path:
    """The run directory of a command that names none: below `runs/`, as its config file is called.

    Args:
      command: `train` or the method of `fornax tune`, which names it where there is no config.
      config: the YAML file.
    """
    return Path("runs") / (Path(config).stem if config else command)
