"""The trainer: drives a task to a trained model, and resumes it exactly after any stop.

`train(config, run_dir)` does everything; a task says what is trained. One process or many, one
device or a mesh, first start or resume: the same call.
"""

from fornax.config.goodput import Goodput, summarise
from fornax.config.spikes import DrillConfig, SpikeConfig, SpikeLimit
from fornax.train.config import (
    EvalConfig,
    LogConfig,
    MLflowConfig,
    ProfileConfig,
    TrainConfig,
    TrainerConfig,
    WandbConfig,
    check_mtp_weight,
)
from fornax.train.convert import Parity, convert, tokenizer_folder
from fornax.train.exporting import FUNCTIONS, export_model, model_functions
from fornax.train.goodput import Ledger
from fornax.train.guard import SkipConfig
from fornax.train.metrics import read_metrics
from fornax.train.run import TrainResult, train
from fornax.train.run_dir import RunDirectory
from fornax.train.task import Batch, Batches, Hosts, Loss, PostTraining, Samples, Task
from fornax.train.tasks import next_token_loss, pretrain_task
from fornax.train.weights import (
    Loaded,
    count_modules,
    is_run,
    load_decoder,
    load_run,
    model_config,
    run_config,
    with_model,
)

__all__ = [
    "FUNCTIONS",
    "Batch",
    "Batches",
    "DrillConfig",
    "EvalConfig",
    "Goodput",
    "Hosts",
    "Ledger",
    "Loaded",
    "LogConfig",
    "Loss",
    "MLflowConfig",
    "Parity",
    "PostTraining",
    "ProfileConfig",
    "RunDirectory",
    "Samples",
    "SkipConfig",
    "SpikeConfig",
    "SpikeLimit",
    "Task",
    "TrainConfig",
    "TrainResult",
    "TrainerConfig",
    "WandbConfig",
    "check_mtp_weight",
    "convert",
    "count_modules",
    "export_model",
    "is_run",
    "load_decoder",
    "load_run",
    "model_config",
    "model_functions",
    "next_token_loss",
    "pretrain_task",
    "read_metrics",
    "run_config",
    "summarise",
    "tokenizer_folder",
    "train",
    "with_model",
]
