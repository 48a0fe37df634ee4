"""Which slice for this run? Plan a recipe for several, without compiling and without a chip."""

from pathlib import Path

from fornax.config import load
from fornax.plan.advice import advise
from fornax.plan.format import format_bytes, format_seconds
from fornax.plan.topology import parse_topology
from fornax.plan.train import plan_train
from fornax.train import TrainConfig

recipe = Path(__file__).parents[1] / "recipes" / "qwen3-8b.yaml"
config = load(TrainConfig, file=recipe)

print(f"{recipe.stem}: {config.batch_size} rows of {config.seq_len} tokens per step\n")
print(f"{'chips':12}{'memory':>10}{'usable':>10}{'fits':>6}{'step':>10}{'MFU':>7}{'days':>7}")
for name in ("v5e:8x8", "v5p:2x4x4", "v6e:8x8", "tpu7x:2x4x4", "h100:8x8"):
    plan = plan_train(config, parse_topology(name), predicted=True)
    memory, speed = plan.main.memory, plan.speed
    assert speed is not None
    days = config.steps * speed.step_seconds / 86_400
    print(
        f"{name:12}{format_bytes(memory.total):>10}{format_bytes(memory.usable):>10}"
        f"{'yes' if plan.fits else 'no':>6}{format_seconds(speed.step_seconds):>10}"
        f"{speed.mfu:>7.1%}{days:>7.1f}"
    )

print("\nwhat would make it fit 64 chips of v5e, cheapest first:")
for change in advise(config, parse_topology("v5e:8x8")):
    memory, step = format_bytes(change.total_bytes), format_seconds(change.step_seconds)
    print(f"  {change.change}: {memory}, {step} per step")
    print(f"    {change.flags}")
