"""Options that every method of post-training has, and those of supervised tuning."""

from dataclasses import dataclass, field
from typing import ClassVar, Literal

from fornax.adapters import LoRA
from fornax.config.errors import ConfigError
from fornax.mesh import check_use
from fornax.models import Remat, RematPolicy
from fornax.optim import AdamW, OptimConfig
from fornax.quant import QuantConfig
from fornax.train import TrainerConfig, check_mtp_weight

__all__ = ["SFTConfig", "TuneConfig", "recipe"]


def recipe(learning_rate: float) -> OptimConfig:
    """The optimizer post-training starts from: AdamW without decay, a cosine to the end."""
    return OptimConfig(optimizer=AdamW(b2=0.999, weight_decay=0.0), learning_rate=learning_rate)


@dataclass(frozen=True, kw_only=True)
class TuneConfig(TrainerConfig):
    """What all methods share; each has a config of its own that adds to it."""

    harmless: ClassVar[tuple[str, ...]] = ("doctor",)
    """The doctor looks at a run before its first step, and at no other."""
    without_qat: ClassVar[str] = ""
    """Why the method has no quantization-aware training; nothing where it has."""
    without_scheme: ClassVar[str] = ""
    """Why the method does not train in 8 bits; nothing where it does."""

    model: str
    """The model to start from: a Hugging Face directory, its name on the Hub, or a run."""
    data: str
    """The training data: a file of JSON lines, a dataset's name on the Hub, or what else the
    method's guide names."""
    eval_data: str | None = None
    """Data to evaluate on; null holds back `eval_share` of the training data, or evaluates
    nothing."""
    eval_share: float = 0.0
    """Share of the training data that is held back for evaluation."""
    columns: dict[str, str] = field(default_factory=dict)
    """Names of the data's columns where they are not the usual ones, such as prompt: question."""
    max_length: int = 1024
    """Tokens of a sequence at most, prompt and completion together; no more than the model has
    positions."""
    too_long: Literal["error", "drop", "truncate"] = "error"
    """What happens to longer examples: each is an error with its line, is left out, or is cut."""
    epochs: float | None = None
    """Passes over the training data; with `steps` null, 1."""
    steps: int | None = None  # pyrefly: ignore[bad-override]
    """Steps of the whole run; null makes as many as `epochs` need."""
    shuffle: bool = True
    """Whether each pass takes the examples in an order of its own."""
    virtual_shards: int | None = None
    """Components that the data's position is kept in, for any number of hosts; it must divide
    batch_size, and null takes the first of 8, 4, 2 and 1 that does."""
    freeze_router: bool = False
    """Leave the routers of a mixture as they are where all else is trained. With `lora` they are
    frozen unless its targets name them."""
    lora: LoRA | None = None
    """Train adapters and leave the model as it is; null trains all of it."""
    quant: QuantConfig = field(default_factory=QuantConfig)
    """Quantization-aware training, or products in 8 bits; of all parameters, without `lora`."""
    template: str | None = None
    """A file with the chat template; null takes the model's own."""
    template_variables: dict[str, bool | int | float | str] = field(default_factory=dict)
    """Variables of the chat template, such as enable_thinking: false."""
    optim: OptimConfig = field(default_factory=lambda: recipe(1e-4))
    """Optimizer, schedule, clipping."""
    doctor: bool = True
    """Whether the run's foundations are checked before its first step; a run that is resumed has
    passed already."""
    remat: RematPolicy = "dots"
    """What the backward pass computes again instead of keeping."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_use(self.mesh, "tune")
        if self.max_length < 2:
            raise ConfigError(f"max_length={self.max_length} must be 2 or more")
        if self.epochs is not None and not self.epochs > 0:
            raise ConfigError(f"epochs={self.epochs} must be above 0, or null")
        if not 0 <= self.eval_share < 1:
            raise ConfigError(f"eval_share={self.eval_share} must lie in [0, 1)")
        if self.eval_data is not None and self.eval_share:
            raise ConfigError(
                f"eval_data={self.eval_data} and eval_share={self.eval_share} both say what to "
                "evaluate on; keep one of them"
            )
        if self.eval.every is not None and not self.evaluates:
            raise ConfigError(
                f"eval.every={self.eval.every} has nothing to evaluate on; give eval_data, or "
                "hold some of the data back with eval_share"
            )
        shards = self.shards
        if shards < 1 or self.batch_size % shards:
            raise ConfigError(
                f"virtual_shards={shards} does not divide batch_size={self.batch_size}; use one "
                "that does, or null"
            )
        self._check_quant()
        self.resolved_remat()

    def _check_quant(self) -> None:
        for key, value, why, by_adapters in (
            ("qat", self.quant.qat, self.without_qat, "merged into them they would be rounded"),
            ("scheme", self.quant.scheme, self.without_scheme, "their own products stay floats"),
        ):
            if value is not None and why:
                raise ConfigError(
                    f"quant.{key}={value} is not for this method: {why}; leave it out"
                )
            if value is not None and self.lora is not None:
                raise ConfigError(
                    f"quant.{key}={value} and lora do not go together: adapters are trained beside "
                    f"weights that stay, and {by_adapters}; leave lora out, which trains all "
                    f"parameters, or {key}"
                )

    @property
    def trains_modules(self) -> bool:
        """Whether the model's modules that predict further tokens are trained too, or left out."""
        return False

    @property
    def evaluates(self) -> bool:
        """Whether there is something to evaluate on."""
        return self.eval_data is not None or self.eval_share > 0

    @property
    def shards(self) -> int:
        """`virtual_shards`, resolved."""
        if self.virtual_shards is not None:
            return self.virtual_shards
        return next(count for count in (8, 4, 2, 1) if self.batch_size % count == 0)

    def resolved_remat(self) -> Remat:
        """`remat` as the models take it.

        Raises:
          ConfigError: for `names`, whose names only `fornax train` takes.
        """
        return Remat(policy=self.remat)


@dataclass(frozen=True, kw_only=True)
class SFTConfig(TuneConfig):
    """A run of `fornax tune sft`: conversations, prompts with completions, or plain text."""

    loss_on: Literal["completion", "all"] = "completion"
    """Which tokens are learned: what the assistant wrote (in plain text, everything), its end of
    turn included; or every token."""
    packing: Literal["best_fit", "none"] = "best_fit"
    """Whether several examples share a row of `max_length` tokens, each blind to the others, or
    each has a row of its own, as long as the batch's longest needs."""
    neftune_alpha: float | None = None
    """Noise on the embeddings in training (NEFTune, Jain et al. 2023); 5 is usual, null adds
    none."""
    z_loss: float = 0.0
    """Weight of the squared log-normaliser of the logits."""
    mtp_weight: float | None = None
    """Weight of the loss of the model's modules that predict further tokens, which are trained with
    it; null leaves them out. DeepSeek V3 ended with 0.1."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_mtp_weight(self.mtp_weight)
        if self.mtp_weight is not None and self.lora is not None:
            raise ConfigError(
                f"mtp_weight={self.mtp_weight} and lora do not go together: adapters are trained "
                "without the modules that predict further tokens; leave out lora, which trains all "
                "parameters, or mtp_weight"
            )
        if self.neftune_alpha is not None and not self.neftune_alpha > 0:
            raise ConfigError(f"neftune_alpha={self.neftune_alpha} must be above 0, or null")
        if self.z_loss < 0:
            raise ConfigError(f"z_loss={self.z_loss} must be 0 or more")

    @property
    def trains_modules(self) -> bool:
        """With a weight."""
        return self.mtp_weight is not None
