"""What a user may say to the letters' quickstart, and what its sizes mean."""

from dataclasses import dataclass
from pathlib import Path

from fornax.checkpoint import CheckpointConfig
from fornax.diffusion.config import DiffusionConfig, DiT, SampleConfig
from fornax.diffusion.data import LettersConfig
from fornax.diffusion.objectives import Objective
from fornax.diffusion.prompts import WordsConfig
from fornax.mesh import DtypePolicy
from fornax.optim import EMA, AdamW, Linear, Muon, OptimConfig
from fornax.quickstart.stages import SizeName, StagesConfig
from fornax.train import EvalConfig, LogConfig

__all__ = ["SIZES", "LettersQuickstartConfig", "Size"]


@dataclass(frozen=True, kw_only=True)
class LettersQuickstartConfig(StagesConfig):
    """From the fonts on this machine to a model that draws letters."""

    run_dir: Path = Path("runs/letters")
    """Where everything is written; a second call resumes from there."""


@dataclass(frozen=True, kw_only=True)
class Size:
    """A model, how long it trains, and how much of it is judged."""

    num_layers: int
    num_heads: int
    head_dim: int
    batch_size: int
    steps: int
    learning_rate: float
    ema: float
    count: int
    """Different letters to train on."""
    judged: int
    """Images judged of each pair of letter and style that is held out; of others an eighth."""
    sample_steps: tuple[int, ...]
    guidances: tuple[float, ...]
    minutes: str
    """How long the whole takes on two ordinary cores."""

    def train_config(self, config: LettersQuickstartConfig) -> DiffusionConfig:
        """The run: a DiT over 4 x 4 patches that predicts the image, under Muon."""
        steps = config.steps or self.steps
        every = max(1, steps // 5)
        return DiffusionConfig(
            data=LettersConfig(count=self.count, seed=config.seed),
            model=DiT(
                num_layers=self.num_layers,
                num_heads=self.num_heads,
                head_dim=self.head_dim,
                patch=4,
            ),
            text=WordsConfig(width=64, length=4),
            # Which letter it is to be is decided where there is most noise.
            objective=Objective(prediction="data", mean=0.7),
            batch_size=self.batch_size,
            steps=steps,
            seed=config.seed,
            dtypes=DtypePolicy(compute="bfloat16"),
            optim=OptimConfig(
                optimizer=Muon(
                    ns_dtype="bfloat16",
                    consistent_rms=None,
                    weight_decay=0.0,
                    fallback=AdamW(weight_decay=0.0, b2=0.99),
                    fallback_learning_rate_factor=0.15,
                ),
                learning_rate=self.learning_rate,
                schedule=Linear(warmup_steps=max(1, min(50, steps // 10)), end_factor=0.02),
                ema=EMA(decay=self.ema, warmup=True),
            ),
            save_every=every,
            checkpoint=CheckpointConfig(keep_last=6),
            eval=EvalConfig(every=every, batches=4),
            log=LogConfig(every=max(1, steps // 200), tensorboard=False),
            sample=SampleConfig(every=every, steps=8, count=36, guidance=2.0),
        )


SIZES: dict[SizeName, Size] = {
    "small": Size(
        num_layers=4,
        num_heads=4,
        head_dim=48,
        batch_size=64,
        steps=2700,
        learning_rate=0.02,
        ema=0.998,
        count=20_000,
        judged=16,
        sample_steps=(4, 8, 20),
        guidances=(1.0, 1.5, 2.0, 3.0, 4.0),
        minutes="about 14 processor minutes, 35 without bfloat16 instructions",
    ),
    "tiny": Size(
        num_layers=2,
        num_heads=2,
        head_dim=32,
        batch_size=32,
        steps=500,
        learning_rate=0.02,
        ema=0.98,
        count=2000,
        judged=1,
        sample_steps=(4,),
        guidances=(1.0, 3.0),
        minutes="about 2 processor minutes",
    ),
}
