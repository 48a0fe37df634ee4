"""What the checkpoints of a run are of: a decoder of its own, or one that a run of tuning began at.

A pretraining run's config describes its model; that of `fornax tune` names a directory, and its
checkpoints hold the tuned decoder, or adapters only.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fornax.adapters import LoRA
from fornax.checkpoint import Checkpointer
from fornax.config import from_mapping, from_yaml
from fornax.config.errors import CheckpointError
from fornax.config.text import read_yaml
from fornax.mesh import DtypePolicy
from fornax.models import DecoderConfig
from fornax.optim import OptimConfig
from fornax.train.config import TrainConfig

__all__ = ["RunRecord", "read_run_record"]


@dataclass(frozen=True, kw_only=True)
class RunRecord:
    """A run, as far as its weights go."""

    model: DecoderConfig | None
    """What the decoder is; None where `base` says."""
    base: str | None
    """The directory, of Hugging Face or a run, that tuning began at; None after pretraining."""
    lora: LoRA | None
    """The adapters that were trained; None where the checkpoints hold the decoder itself."""
    freeze_router: bool = False
    """Whether the checkpoints hold all of it but the routers, which are those of `base`."""
    mtp: bool = False
    """Whether modules that predict further tokens were tuned with the model of `base`."""
    dtypes: DtypePolicy
    optim: OptimConfig
    steps: int


def read_run_record(checkpointer: Checkpointer, step: int | None = None) -> RunRecord:
    """The record that a checkpoint keeps; of the latest when `step` is None.

    Raises:
      CheckpointError: when there is no such checkpoint, or it does not say what its model is.
      ConfigError: when its config does not load.
    """
    text = checkpointer.read_config(step)
    source = f"the config saved in {checkpointer.directory}"
    values, _ = read_yaml(text, source)
    base = values.get("model") if isinstance(values, dict) else None
    if isinstance(base, str):
        return _tuned(values, base, source)
    config = from_yaml(TrainConfig, text, source=source)
    if config.model is None:
        raise CheckpointError(f"{source} does not say what the model is")
    return RunRecord(
        model=config.model,
        base=None,
        lora=None,
        dtypes=config.dtypes,
        optim=config.optim,
        steps=config.steps,
    )


def _tuned(values: dict[str, Any], base: str, source: str) -> RunRecord:
    steps = values.get("steps")
    if not isinstance(steps, int):
        raise CheckpointError(f"{source} does not say how many steps the run has")
    lora = values.get("lora")
    return RunRecord(
        model=None,
        base=str(Path(base).expanduser()),
        lora=None if lora is None else from_mapping(LoRA, lora, "lora"),
        freeze_router=values.get("freeze_router", False),
        mtp=values.get("mtp_weight") is not None,
        dtypes=from_mapping(DtypePolicy, values.get("dtypes", {}), "dtypes"),
        optim=from_mapping(OptimConfig, values.get("optim", {}), "optim"),
        steps=steps,
    )
