"""Train a small flow model on a folder of videos with captions, and draw one as a file.

The videos are letters that move, drawn here; any folder of .gif, .webp or .mp4 files with a `.txt`
beside each will do.
"""

import tempfile
from pathlib import Path

import numpy as np

from fornax.diffusion.config import DiffusionConfig, DiT, SampleConfig
from fornax.diffusion.data import ImagesConfig
from fornax.diffusion.drawing import to_pixels
from fornax.diffusion.letters import Letters
from fornax.diffusion.objectives import Objective
from fornax.diffusion.pipelines import ImageRequest, load_pipeline, plan
from fornax.diffusion.pipelines.clips import encode_video
from fornax.diffusion.prompts import WordsConfig
from fornax.diffusion.run import train
from fornax.optim import EMA, AdamW, OptimConfig

folder = Path(tempfile.mkdtemp())
clips = folder / "clips"
clips.mkdir()
letters = Letters()
for number in range(100):
    still, way = to_pixels(letters[number].image), (-1) ** number
    frames = np.stack([np.roll(still, way * 2 * frame, axis=1) for frame in range(5)])
    (clips / f"{number:03d}.gif").write_bytes(encode_video(frames, "gif", 10))
    text = f"{letters[number].prompt} {'moves right' if way > 0 else 'moves left'}"
    (clips / f"{number:03d}.txt").write_text(text)

data = ImagesConfig(
    path=str(clips), channels=1, resolution=16, multiple=4, max_aspect=1.0, frames=(5,), rate=10
)
config = DiffusionConfig(
    data=data,
    model=DiT(num_layers=1, num_heads=2, head_dim=16, patch=4),
    text=WordsConfig(width=32, length=6),
    objective=Objective(prediction="data", mean=0.7),
    batch_size=16,
    steps=20,
    optim=OptimConfig(
        optimizer=AdamW(weight_decay=0.0), learning_rate=3e-3, ema=EMA(decay=0.9, warmup=True)
    ),
    sample=SampleConfig(every=20, count=4, steps=4),
)
result = train(config, folder / "run", progress="lines")
print("an animated grid:", *(folder / "run" / "images").iterdir())

pipeline = load_pipeline(folder / "run")
job = plan(pipeline, ImageRequest(prompt="bold serif R moves right", seed=1, steps=4))
(video,) = pipeline.images(pipeline.run(job))
(folder / "r.webp").write_bytes(encode_video(video, "webp", 10))
print("a video:", folder / "r.webp", video.shape)
assert result.step == 20
assert video.shape == (5, 16, 16, 1)
