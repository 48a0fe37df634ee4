"""What a user may say about a run: what every task needs, and what pretraining adds."""

import re
from dataclasses import dataclass, field
from typing import ClassVar, Literal
from urllib.parse import urlsplit

from fornax.checkpoint import CheckpointConfig
from fornax.config.errors import ConfigError
from fornax.config.run_requests import MOST_STEPS
from fornax.config.spikes import SpikeConfig
from fornax.data import DataConfig
from fornax.mesh import DtypePolicy, MeshConfig, ProcessConfig
from fornax.models import (
    DecoderConfig,
    PipelineConfig,
    Remat,
    RematPolicy,
    check_remat,
    layers_outside,
)
from fornax.optim import OptimConfig
from fornax.quant import QuantConfig
from fornax.train.diloco.config import DilocoConfig
from fornax.train.guard import SkipConfig

__all__ = [
    "EvalConfig",
    "LogConfig",
    "MLflowConfig",
    "OpenTelemetryConfig",
    "ProfileConfig",
    "PrometheusConfig",
    "TrainConfig",
    "TrainerConfig",
    "WandbConfig",
    "check_mtp_weight",
]


@dataclass(frozen=True, kw_only=True)
class EvalConfig:
    """When and on how much the run is evaluated."""

    every: int | None = None
    """Steps between two evaluations, with one at the end; null never evaluates."""
    batches: int | None = None
    """Batches of one evaluation; null reads the evaluation split once, to its end."""

    def __post_init__(self) -> None:
        """Check the numbers."""
        for name in ("every", "batches"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name}={value} must be 1 or more, or null")


@dataclass(frozen=True, kw_only=True)
class WandbConfig:
    """A Weights & Biases run (needs the extra `wandb`)."""

    project: str = "fornax"
    """Project of the run."""
    entity: str | None = None
    """User or team that owns the project; null takes your default."""
    name: str | None = None
    """Name and id of the run; null takes the run directory's name."""
    mode: Literal["online", "offline"] = "online"
    """`offline` keeps the run on disk for `wandb sync`."""


@dataclass(frozen=True, kw_only=True)
class MLflowConfig:
    """A run of an MLflow tracking server; nothing need be installed here."""

    url: str = "http://127.0.0.1:5000"
    """The server's address, http or https. Credentials come from MLFLOW_TRACKING_TOKEN, or
    MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD."""
    experiment: str = "fornax"
    """Experiment of the run, made if it is not there."""
    name: str | None = None
    """Name of the run; null takes the run directory's name."""

    def __post_init__(self) -> None:
        """Check the address."""
        found = urlsplit(self.url)
        if found.scheme not in ("http", "https") or not found.hostname:
            raise ConfigError(
                f"url={self.url} is not the address of an MLflow server; give one such as "
                "http://127.0.0.1:5000, which mlflow server prints (folders and databases are "
                "read by that server)"
            )
        if found.username or found.password:
            raise ConfigError(
                "url has a password in it, which the run's config would keep in the clear; set "
                "MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD instead"
            )
        if not self.experiment:
            raise ConfigError("experiment is empty; name one, such as fornax")


@dataclass(frozen=True, kw_only=True)
class PrometheusConfig:
    """The latest metrics for Prometheus, at `/metrics` (needs the extra `serve`)."""

    host: str = "127.0.0.1"
    """Address to listen on; there is no password, so leave it to this machine or to a network of
    your own."""
    port: int = 9400
    """Port to listen on; 0 takes one that is free, which is printed."""

    def __post_init__(self) -> None:
        """Check the port."""
        if not 0 <= self.port < 2**16:
            raise ConfigError(f"port={self.port} is not a port; use 0 to 65535")


@dataclass(frozen=True, kw_only=True)
class OpenTelemetryConfig:
    """The latest metrics for an OpenTelemetry collector (needs the extra `otel`)."""

    endpoint: str = "http://127.0.0.1:4318/v1/metrics"
    """Address of a collector that takes OTLP over HTTP."""
    seconds: float = 10.0
    """Between two messages, each with the latest record."""

    def __post_init__(self) -> None:
        """Check address and interval."""
        if urlsplit(self.endpoint).scheme not in ("http", "https"):
            raise ConfigError(
                f"endpoint={self.endpoint} is not an address over HTTP; give one such as "
                "http://127.0.0.1:4318/v1/metrics"
            )
        if not self.seconds > 0:
            raise ConfigError(f"seconds={self.seconds} must be above 0")


@dataclass(frozen=True, kw_only=True)
class LogConfig:
    """What is recorded, and how often."""

    every: int = 1
    """Steps between two lines of `metrics.jsonl`; evaluated steps always have one."""
    tensorboard: bool = True
    """Whether to write TensorBoard event files."""
    wandb: WandbConfig | None = None
    """A Weights & Biases run, or null."""
    mlflow: MLflowConfig | None = None
    """A run of an MLflow server, or null."""
    prometheus: PrometheusConfig | None = None
    """A page for Prometheus to read, from process 0, or null."""
    opentelemetry: OpenTelemetryConfig | None = None
    """A collector to send metrics to, or null."""
    peak_tflops: float | None = None
    """Peak of one device in TFLOP/s, for utilisation; null takes the known peak of the device,
    and reports none for a device without one."""

    def __post_init__(self) -> None:
        """Check the numbers."""
        if self.every < 1:
            raise ConfigError(f"every={self.every} must be 1 or more")
        if self.peak_tflops is not None and self.peak_tflops <= 0:
            raise ConfigError(f"peak_tflops={self.peak_tflops} must be above 0, or null")


@dataclass(frozen=True, kw_only=True)
class ProfileConfig:
    """Captures of a run's steps, in every process; a run can be asked for others while it goes."""

    steps: str | int | None = None
    """First and last step to capture, such as 20..25, or one step; null captures none."""
    every: int | None = None
    """Captures one step in this many throughout, into `continuous/` of the folder; null does
    not."""
    keep: int = 5
    """How many captures of `every` to keep, the newest."""
    keep_mib: int = 256
    """Size of these in MiB; of more than one the oldest go first."""
    out: str | None = None
    """Folder of all captures; null takes the run directory's `profile/`."""
    only: bool = False
    """Whether the run is for `steps` alone: it ends after them and writes no checkpoint."""

    def __post_init__(self) -> None:
        """Check the numbers."""
        window = self.window
        if window is not None and window[1] - window[0] >= MOST_STEPS:
            raise ConfigError(
                f"steps={self.steps} are {window[1] - window[0] + 1} steps, and a capture holds "
                f"{MOST_STEPS} at most; capture fewer, or set every"
            )
        if self.only and window is None:
            raise ConfigError("only is set and steps is null; name the steps, such as 20..25")
        for name in ("every", "keep", "keep_mib"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(
                    f"{name}={value} must be 1 or more" + ", or null" * (name == "every")
                )

    @property
    def window(self) -> tuple[int, int] | None:
        """First and last step of `steps`."""
        if self.steps is None:
            return None
        found = _WINDOW.fullmatch(str(self.steps).strip())
        first, last = (int(found[1]), int(found[2] or found[1])) if found else (0, 0)
        if not 1 <= first <= last:
            raise ConfigError(
                f"steps={self.steps} must be the first and the last step to capture, such as "
                "20..25, counted from 1"
            )
        return first, last


_WINDOW = re.compile(r"(\d{1,15})(?:\.\.(\d{1,15}))?")


@dataclass(frozen=True, kw_only=True)
class TrainerConfig:
    """What the trainer needs whatever the task is; a task's own config adds to it."""

    harmless: ClassVar[tuple[str, ...]] = ()
    """Keys of a task's own that may change from one start of a run to the next."""

    steps: int = 1000
    """Steps of the whole run."""
    batch_size: int = 8
    """Rows of one step, over all devices and micro-batches."""
    accumulate: int = 1
    """Micro-batches a step is computed in: less memory, the same gradients."""
    seed: int = 0
    """Seed of initial weights and of everything random in a step."""
    dtypes: DtypePolicy = field(default_factory=DtypePolicy)
    """Dtypes of parameters and of computation."""
    optim: OptimConfig = field(default_factory=OptimConfig)
    """Optimizer, schedule, clipping."""
    skip: SkipConfig = field(default_factory=SkipConfig)
    """Which updates to leave out."""
    spikes: SpikeConfig | None = None
    """When to go back and leave batches out for a loss spike; null never does."""
    mesh: MeshConfig = field(default_factory=MeshConfig)
    """How devices share the work."""
    processes: ProcessConfig = field(default_factory=ProcessConfig)
    """The processes of the run."""
    eval: EvalConfig = field(default_factory=EvalConfig)
    """Evaluation."""
    save_every: int | Literal["auto"] | None = 500
    """Steps between two checkpoints; null saves only at the end and when asked to stop. `auto`
    computes them again with each save: the interval that loses the least (Young 1974), of the
    seconds that a save stops training and the mean time between failures; an hour at most, and
    at least what a save takes until it is complete, with its copy in `checkpoint.mirror`."""
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    """Which checkpoints to keep, and how they are verified."""
    log: LogConfig = field(default_factory=LogConfig)
    """Metrics."""
    profile: ProfileConfig = field(default_factory=ProfileConfig)
    """Which steps to capture profiles of."""

    def __post_init__(self) -> None:
        """Check numbers and combinations."""
        for name in ("steps", "batch_size", "accumulate"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name}={value} must be 1 or more")
        if isinstance(self.save_every, int) and self.save_every < 1:
            raise ConfigError(f"save_every={self.save_every} must be 1 or more, auto, or null")
        if self.checkpoint.mtbf_hours is not None and self.save_every != "auto":
            raise ConfigError(
                f"checkpoint.mtbf_hours={self.checkpoint.mtbf_hours} is for save_every: auto, and "
                f"save_every is {'null' if self.save_every is None else self.save_every}; set it "
                "to auto, or leave mtbf_hours out"
            )
        if not 0 <= self.seed < 2**32:
            raise ConfigError(f"seed={self.seed} must lie in [0, 2**32)")
        if self.batch_size % self.accumulate:
            raise ConfigError(
                f"batch_size={self.batch_size} does not divide into accumulate={self.accumulate} "
                f"micro-batches; use a multiple of {self.accumulate}"
            )
        window = self.profile.window
        if window is not None and self.steps and window[1] > self.steps:
            raise ConfigError(
                f"profile.steps={self.profile.steps} reaches beyond steps={self.steps}; profile "
                "steps of the run"
            )


@dataclass(frozen=True, kw_only=True)
class TrainConfig(TrainerConfig):
    """A pretraining run."""

    model: DecoderConfig | None = field(default_factory=DecoderConfig)
    """The decoder; null takes the one of `init_from`."""
    data: DataConfig = field(default_factory=DataConfig)
    """What it reads."""
    seq_len: int = 256
    """Tokens a row."""
    remat: RematPolicy = "dots"
    """What the backward pass computes again instead of keeping. `dots` keeps the products, and is
    faster than `none`, which also moves every norm and activation through memory. `names` keeps the
    activations that `remat_save` and `remat_offload` name."""
    remat_save: tuple[str, ...] = ()
    """With `remat: names`, activations of a layer kept on the device: layer_input, query, key,
    value, attention, attention_out, mlp_gate, mlp_up, expert_down, mlp_down."""
    remat_offload: tuple[str, ...] = ()
    """With `remat: names`, activations of a layer kept in the host's memory between the passes."""
    pipeline: PipelineConfig = field(default_factory=PipelineConfig)
    """How the stages of a mesh with `stage` above 1 share a batch."""
    quant: QuantConfig = field(default_factory=QuantConfig)
    """Quantized training, or training for quantization."""
    z_loss: float = 0.0
    """Weight of the squared log-normaliser of the logits (PaLM uses 1e-4)."""
    mtp_weight: float | None = None
    """Weight of the loss of the modules that predict further tokens (`model.num_mtp_modules`);
    DeepSeek V3 took 0.3, later 0.1. With `init_from` it reads them, and null leaves them out."""
    diloco: DilocoConfig | None = None
    """How slices of `fornax launch --slices` train apart and exchange; null: this is one run."""
    init_from: str | None = None
    """Weights to start from: a Hugging Face directory, its name on the Hub, or a run."""

    def __post_init__(self) -> None:
        """Check numbers and combinations."""
        super().__post_init__()
        if self.seq_len < 1:
            raise ConfigError(f"seq_len={self.seq_len} must be 1 or more")
        if self.z_loss < 0:
            raise ConfigError(f"z_loss={self.z_loss} must be 0 or more")
        if self.model is None and self.init_from is None:
            raise ConfigError(
                "model and init_from are both null; describe a model, or name weights"
            )
        self._check_mtp()
        if self.diloco is not None and self.spikes is not None:
            raise ConfigError(
                "diloco and spikes are both set: a slice cannot go back to before a loss spike "
                "without the others; remove spikes, and use skip.outlier_factor to leave single "
                "updates out"
            )
        if self.diloco is not None and self.mesh.across == "stage":
            raise ConfigError(
                "diloco is set and mesh.across=stage: the slices of a DiLoCo run are launches of "
                "their own, each with all stages; set mesh.across to data, or remove diloco"
            )
        remat = self.resolved_remat()
        if self.model is not None:
            check_remat(remat, self.model)
        self._check_pipeline()

    def _check_mtp(self) -> None:
        check_mtp_weight(self.mtp_weight)
        modules = None if self.model is None else self.model.num_mtp_modules
        if modules is not None and (self.mtp_weight is not None) != (modules > 0):
            raise ConfigError(
                f"mtp_weight={'null' if self.mtp_weight is None else self.mtp_weight} and "
                f"model.num_mtp_modules={modules} do not go together: the weight is that of the "
                "modules' loss, and without it nothing trains them; set both, or neither"
            )

    def _check_pipeline(self) -> None:
        stages = self.mesh.num_stages()
        if stages == 1 and self.pipeline != PipelineConfig():
            raise ConfigError(
                "pipeline is for the stages of mesh.stage, which is 1; leave it out, or give "
                "mesh.stage a size"
            )
        if stages == 1 or stages == -1:  # what is left is known with the devices
            return
        if self.model is not None:
            slices = self.mesh.stage_slices()
            layers_outside(self.model.layer_kinds(), stages, self.pipeline, slices=slices)
        multiple = self.accumulate * self.pipeline.count(stages)
        if self.batch_size % multiple:
            raise ConfigError(
                f"batch_size={self.batch_size} does not divide into accumulate={self.accumulate} x "
                f"{self.pipeline.count(stages)} microbatches of the pipeline; use a multiple of "
                f"{multiple}, or change pipeline.microbatches"
            )

    def resolved_remat(self) -> Remat:
        """`remat` with its names.

        Raises:
          ConfigError: for unknown names, or names that do not count.
        """
        return Remat(policy=self.remat, save=self.remat_save, offload=self.remat_offload)


def check_mtp_weight(weight: float | None) -> None:
    """Refuse a weight of the loss of modules that predict further tokens which weighs nothing.

    Raises:
      ConfigError: with what is allowed.
    """
    if weight is not None and not weight > 0:
        raise ConfigError(f"mtp_weight={weight} must be above 0, or null")
