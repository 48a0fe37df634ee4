"""Writes the files of this release: `python tests/data/releases/write.py` makes VERSION.tar.xz.

One small file of each kind that Fornax writes and reads again, with the numbers that come out of
it: a dataset, a training run, a Hugging Face directory, an adapter, a quantized directory, a bundle
and a diffusion run. Each later version must read them: tests/integration/test_releases.py.
Written once, when a version is released, and never changed afterwards.
"""

import os
import shutil
import tarfile
import tempfile
from pathlib import Path

import jax
import numpy as np
from flax import nnx

import fornax
from fornax import adapters, export
from fornax.config import load
from fornax.data import BuildConfig, DataConfig, Dataset, Text, TrainBpe, build
from fornax.diffusion.config import DiffusionConfig, DiT, SampleConfig
from fornax.diffusion.data import LettersConfig
from fornax.diffusion.load import load_run as load_diffusion
from fornax.diffusion.prompts import WordsConfig
from fornax.diffusion.run import train as train_diffusion
from fornax.models import Decoder, DecoderConfig, create_decoder, load_pretrained, save_pretrained
from fornax.optim import AdamW, OptimConfig
from fornax.quant import quantize
from fornax.train import TrainConfig, export_model, load_run, read_metrics, train

STEPS, RESUMED = 4, 8
"""Steps of the run as it is stored, and those that it is resumed to."""


def tokens(vocabulary: int) -> np.ndarray:
    """Ids `[2, 12]` int32 that every model here is asked about."""
    return np.random.default_rng(0).integers(0, vocabulary, (2, 12)).astype(np.int32)


def logits(model: Decoder) -> np.ndarray:
    """What a decoder says to `tokens`, float32 `[2, 12, n]`: of each eighth id."""
    return np.asarray(model(tokens(model.config.vocab_size)), np.float32)[..., ::8]


def resumed_losses(run: Path) -> np.ndarray:
    """Resume a stored run in its place to `RESUMED` steps; the losses after `STEPS`, float64."""
    config = load(TrainConfig, file=run / "config.yaml", overrides={"steps": RESUMED})
    train(config, run, accept_changes=("steps",), progress="none")
    rows = [row for row in read_metrics(run / "metrics.jsonl") if "loss" in row]
    return np.array([row["loss"] for row in rows if row["step"] > STEPS])


def answers() -> dict[str, np.ndarray]:
    """What the files in the working directory give, by kind. The run is resumed in its place."""
    found = {"run": logits(load_run("run").model), "hf": logits(load_pretrained("hf"))}
    adapted = load_pretrained("hf")
    adapters.load_peft("adapter", adapted)
    found["adapter"] = logits(adapted)
    found["quantized"] = logits(load_pretrained("quantized"))
    scores = export.load("bundle")["score"](tokens=tokens(272))
    found |= {f"bundle.{name}": np.asarray(array) for name, array in scores.items()}
    found["diffusion"] = load_diffusion("diffusion").draw(["bold serif R", "sans A"], seed=1)
    found["resumed"] = resumed_losses(Path("run"))
    return found


def write() -> None:
    """Make the files in the working directory."""
    Path("texts").mkdir()
    for number in range(40):
        line = f"line {number} of a text that nobody reads, {number * 7 % 13} times. "
        Path("texts", f"{number:02d}.txt").write_text(line * (3 + number % 5))
    corpus = BuildConfig(
        source=Text(path="texts/*.txt"),
        tokenizer=TrainBpe(vocab_size=272),
        holdout=0.1,
        output=Path("data"),
    )
    build(corpus, progress=False)
    shutil.rmtree("texts")
    config = TrainConfig(
        model=DecoderConfig(
            family="llama",
            vocab_size=272,
            hidden_size=16,
            intermediate_size=32,
            num_layers=2,
            num_heads=2,
            initializer_range=0.2,
            tie_embeddings=True,
        ),
        data=DataConfig(source=Dataset(path="data")),
        seq_len=32,
        batch_size=8,
        steps=STEPS,
        save_every=STEPS,
        optim=OptimConfig(optimizer=AdamW(), learning_rate=1e-2),
    )
    train(config, Path("run"), progress="none")
    model = load_run("run").model
    save_pretrained(model, Path("hf"))
    export_model(
        model, Path("bundle"), functions=("score",), batch=(2,), lengths=(16,), platforms=("cpu",)
    )
    wide = DecoderConfig(
        family="llama",
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_layers=1,
        num_heads=2,
        initializer_range=0.2,
    )
    save_pretrained(create_decoder(wide), Path("float"))
    quantize("float", "quantized", scheme="w8a16", group_size=32)
    shutil.rmtree("float")
    adapters.attach(model, adapters.LoRA(rank=2), rngs=nnx.Rngs(0))
    drawn = np.random.default_rng(1)
    state = nnx.state(model, adapters.LoRAParam)
    noisy = jax.tree.map(lambda x: x + drawn.normal(0, 0.3, x.shape).astype(x.dtype), state)
    nnx.update(model, noisy)
    adapters.save_peft(model, Path("adapter"), base="hf")
    diffusion = DiffusionConfig(
        data=LettersConfig(),
        model=DiT(num_layers=1, num_heads=2, head_dim=8, patch=4),
        text=WordsConfig(width=16, length=4),
        batch_size=8,
        steps=2,
        optim=OptimConfig(optimizer=AdamW(), learning_rate=3e-3),
        sample=SampleConfig(every=None, steps=4),
    )
    train_diffusion(diffusion, Path("diffusion"), progress="none")


def main(folder: Path) -> None:
    """Write `VERSION.tar.xz` below `folder`, with the answers of a copy of what is stored."""
    archive = folder / f"{fornax.__version__}.tar.xz"
    if archive.exists():
        raise SystemExit(f"{archive.name} is there, and files of a release never change")
    with tempfile.TemporaryDirectory() as scratch:
        os.chdir(scratch)
        write()
        shutil.copytree(".", "again/copy", ignore=shutil.ignore_patterns("again"))
        os.chdir("again/copy")
        np.savez("../../answers.npz", **answers())
        os.chdir(scratch)
        shutil.rmtree("again")
        for name in (".lock", "report.html", "events.out.*"):  # nothing reads them again
            for path in Path().rglob(name):
                path.unlink()
        with tarfile.open(archive, "w:xz", preset=9) as tar:
            for path in sorted(Path().iterdir()):
                tar.add(path, filter=_anonymous)
        os.chdir(folder)


def _anonymous(info: tarfile.TarInfo) -> tarfile.TarInfo:
    info.uid = info.gid = info.mtime = 0
    info.uname = info.gname = ""
    return info


if __name__ == "__main__":
    main(Path(__file__).resolve().parent)
