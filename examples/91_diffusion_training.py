"""Train a small flow model on a folder of images with captions, resume it, and draw.

The images are letters that are drawn here; any folder with a `.txt` beside each image will do.
"""

import tempfile
from dataclasses import replace
from pathlib import Path

from PIL import Image

from fornax.diffusion.config import DiffusionConfig, DiT, SampleConfig
from fornax.diffusion.data import ImagesConfig
from fornax.diffusion.drawing import to_pixels
from fornax.diffusion.letters import Letters
from fornax.diffusion.load import load_run
from fornax.diffusion.objectives import Objective
from fornax.diffusion.prompts import WordsConfig
from fornax.diffusion.run import train
from fornax.optim import EMA, AdamW, OptimConfig

folder = Path(tempfile.mkdtemp())
images = folder / "images"
images.mkdir()
letters = Letters()
for number in range(200):
    letter = letters[number]
    Image.fromarray(to_pixels(letter.image)[..., 0]).save(images / f"{number:04d}.png")
    (images / f"{number:04d}.txt").write_text(letter.prompt)

config = DiffusionConfig(
    data=ImagesConfig(path=str(images), channels=1, resolution=16, multiple=4, max_aspect=1.0),
    model=DiT(num_layers=2, num_heads=2, head_dim=32, patch=4),
    text=WordsConfig(width=32, length=4),
    objective=Objective(prediction="data", mean=0.7),
    batch_size=32,
    steps=40,
    optim=OptimConfig(
        optimizer=AdamW(weight_decay=0.0), learning_rate=3e-3, ema=EMA(decay=0.9, warmup=True)
    ),
    sample=SampleConfig(every=20, count=9, steps=8),
)
train(config, folder / "run", progress="lines")
# The same directory resumes where it stopped, now to 60 steps.
more = replace(config, steps=60)
result = train(more, folder / "run", accept_changes=("steps",), progress="lines")
print("grids by step:", sorted(path.name for path in (folder / "run" / "images").iterdir()))

run = load_run(folder / "run")
drawn = run.draw(["bold serif R", "sans A"], seed=1)
for row in drawn[0, ::2, :, 0]:
    print("".join(" .:*#"[int(pixel.clip(-1, 1) * 2 + 2)] for pixel in row))
assert result.step == run.step == 60
assert drawn.shape == (2, 16, 16, 1)
