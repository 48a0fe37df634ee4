"""What a user may say to the quickstart, and what its sizes mean."""

from dataclasses import dataclass
from pathlib import Path

from fornax.data import BuildConfig, DataConfig, Dataset, Stdlib, TrainBpe
from fornax.mesh import DtypePolicy
from fornax.models import DecoderConfig
from fornax.optim import AdamW, Linear, Muon, OptimConfig
from fornax.quickstart.stages import SizeName, StagesConfig
from fornax.quickstart.tuning import Tuning
from fornax.train import EvalConfig, ProfileConfig, TrainConfig

__all__ = ["SIZES", "QuickstartConfig", "Size"]


@dataclass(frozen=True, kw_only=True)
class QuickstartConfig(StagesConfig):
    """From the text on this machine to a model that other tools load."""

    run_dir: Path = Path("runs/quickstart")
    """Where everything is written; a second call resumes from there."""


@dataclass(frozen=True, kw_only=True)
class Size:
    """A model and how long it trains."""

    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    seq_len: int
    batch_size: int
    steps: int
    learning_rate: float
    holdout: float
    """Share of the files that is scored and never trained on."""
    minutes: str
    """How long the whole takes on two ordinary cores."""
    tuning: Tuning
    """What follows pretraining."""
    score_files: int | None = None
    """Held-out files that are scored; none: all of them."""

    def build_config(self, output: Path) -> BuildConfig:
        """How the corpus is made."""
        return BuildConfig(
            source=Stdlib(),
            output=output,
            tokenizer=TrainBpe(vocab_size=self.vocab_size),
            holdout=self.holdout,
        )

    def train_config(self, dataset: Path, config: QuickstartConfig, eos_id: int) -> TrainConfig:
        """The pretraining run: a Qwen3-shaped decoder under Muon and a decaying rate."""
        steps = config.steps or self.steps
        warmup = max(1, steps // 20)
        watched = min(steps, steps // 2 + 1)  # not the first, nor one that is evaluated after
        return TrainConfig(
            model=DecoderConfig(
                vocab_size=self.vocab_size,
                hidden_size=self.hidden_size,
                intermediate_size=self.hidden_size * 8 // 3 // 32 * 32,
                num_layers=self.num_layers,
                num_heads=self.num_heads,
                head_dim=self.hidden_size // self.num_heads,
                max_position_embeddings=self.seq_len,
                qk_norm="head",
                tie_embeddings=True,
                eos_token_ids=(eos_id,),
                family="qwen3",
            ),
            data=DataConfig(source=Dataset(path=str(dataset)), seed=config.seed, virtual_shards=4),
            seq_len=self.seq_len,
            batch_size=self.batch_size,
            steps=steps,
            seed=config.seed,
            dtypes=DtypePolicy(compute="bfloat16"),
            optim=OptimConfig(
                optimizer=Muon(
                    ns_dtype="bfloat16",
                    consistent_rms=None,
                    weight_decay=0.0,
                    fallback=AdamW(weight_decay=0.0),
                    fallback_learning_rate_factor=0.15,
                ),
                learning_rate=self.learning_rate,
                schedule=Linear(warmup_steps=warmup, end_factor=0.02),
            ),
            eval=EvalConfig(every=max(1, steps // 4), batches=8),
            profile=ProfileConfig(steps=f"{watched}..{min(steps, watched + 5)}"),
        )


SIZES: dict[SizeName, Size] = {
    "small": Size(
        vocab_size=2048,
        hidden_size=192,
        num_layers=4,
        num_heads=4,
        seq_len=256,
        batch_size=4,
        steps=2200,
        learning_rate=0.02,
        holdout=0.05,
        minutes="about 10 processor minutes",
        tuning=Tuning(
            max_tokens=96,
            sft_steps=180,
            sft_learning_rate=3e-3,
            grpo_steps=128,
            grpo_learning_rate=2.5e-3,
            eval_prompts=96,
        ),
    ),
    "tiny": Size(
        vocab_size=512,
        hidden_size=64,
        num_layers=2,
        num_heads=2,
        seq_len=128,
        batch_size=4,
        steps=300,
        learning_rate=0.02,
        holdout=0.05,
        score_files=3,
        minutes="about 2 processor minutes",
        tuning=Tuning(
            max_tokens=48,
            sft_steps=40,
            sft_learning_rate=3e-3,
            grpo_steps=6,
            grpo_learning_rate=3e-3,
            eval_prompts=16,
            rank=8,
            batch_size=32,
        ),
    ),
}
