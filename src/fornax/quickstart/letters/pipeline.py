"""The letters' quickstart in order: train, judge over training, guidance and steps, look for
copies, film, export, host; then the report."""

import base64
import io
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from rich.console import Console

from fornax.config import dump_yaml
from fornax.diffusion.data import open_examples
from fornax.diffusion.drawing import grid, to_pixels
from fornax.diffusion.letters import Judge, Letters
from fornax.diffusion.load import LoadedRun, load_run
from fornax.diffusion.run import train
from fornax.quickstart.child import not_installed
from fornax.quickstart.letters import hosting
from fornax.quickstart.letters.config import SIZES, LettersQuickstartConfig, Size
from fornax.quickstart.letters.film import animation, trajectory
from fornax.quickstart.letters.report import write_report
from fornax.quickstart.letters.scores import asked, draw_all, nearest, score, summary
from fornax.quickstart.stages import Interrupted, Stage, all_stages

__all__ = ["run"]

SHOWN = ("bold serif R", "sans A", "italic serif Q", "bold sans M", "serif G", "sans S")
_FILMED = 6
_STEPS = 8


@dataclass(frozen=True)
class Job:
    """What the stages share."""

    config: LettersQuickstartConfig
    size: Size

    def best(self) -> tuple[LoadedRun, float, Judge]:
        """The trained run, the scale of guidance that it samples with, and the judge."""
        loaded = load_run(self.config.run_dir)
        return loaded, loaded.sample.guidance, Judge(Letters())


def run(config: LettersQuickstartConfig, *, console: Console | None = None) -> int:
    """Train on letters, judge, export and serve, and write the report.

    Stages that an earlier call finished are not run again; training resumes from its latest
    checkpoint.

    Args:
      config: size, place and seed.
      console: where progress is shown; standard error by default.

    Returns:
      The exit code: 0 when all is done, 130 or 143 when a signal stopped it (call again to resume).

    Raises:
      ConfigError: for a directory that holds another quickstart, is in use or not writable.
      CheckpointError, EngineError: from the stages.
    """
    console = console or Console(stderr=True, highlight=False)
    size = SIZES[config.size]
    job = Job(config, size)
    console.print(
        f"Fornax diffusion quickstart ({config.size}, {size.minutes}) in {config.run_dir}"
    )
    began = time.perf_counter()
    try:
        done = all_stages(config, size, _stages(job), console, letters=True)
    except Interrupted as stopped:
        console.print("stopped, everything saved; the same command resumes from here")
        return stopped.exit_code
    path = write_report(config.run_dir, config.size, done)
    console.print(f"\nreport   {path}")
    console.print(
        f"bundle   {config.run_dir / 'models'}  (fornax host {config.run_dir / 'models'})"
    )
    console.print(f"the run  fornax ui {config.run_dir}")
    console.print(f"all done in {time.perf_counter() - began:.0f} s")
    return 0


def _stages(job: Job) -> list[Stage]:
    def bind(function: Callable[[Job], dict[str, Any]]) -> Callable[[], dict[str, Any]]:
        return lambda: function(job)

    return [
        Stage("train", "Training on letters from this machine's fonts", bind(_train), _train_line),
        Stage("training", "What it draws over training", bind(_training), _training_line),
        Stage("judged", "Judged over guidance and steps", bind(_judged), _judged_line),
        Stage("copies", "Beside the nearest training images", bind(_copies), _copies_line),
        Stage("film", "A film of the sampler", bind(_film), lambda r: f"{r['frames']} frames"),
        Stage("export", "The denoise function, sealed in a bundle", bind(_export), _export_line),
        Stage("host", "The bundle, served, and sampled through", bind(_host), _host_line),
    ]


def _train(job: Job) -> dict[str, Any]:
    config = job.size.train_config(job.config)
    spent = time.process_time()
    result = train(config, job.config.run_dir)
    if result.reason == "signal":
        raise Interrupted(result.exit_code)
    examples = open_examples(config.data, "train")
    return {
        "steps": result.step,
        "images": result.step * config.batch_size,
        "examples": len(examples.bucket),
        "evaluation": result.evaluation,
        "processor_seconds": round(time.process_time() - spent, 1),
        "config": dump_yaml(config),
    }


def _train_line(result: dict[str, Any]) -> str:
    loss = (result["evaluation"] or {}).get("loss")
    held = f", held-out loss {loss:.4f}" if loss is not None else ""
    return f"{result['steps']} steps, {result['images']:,} images{held}"


def _training(job: Job) -> dict[str, Any]:
    """The same prompts and noise from each checkpoint, and how much of it is right."""
    wanted, judge = asked(max(1, job.size.judged // 4)), Judge(Letters())
    sample = job.size.train_config(job.config).sample
    options = {"steps": _STEPS, "guidance": sample.guidance}
    rows = []
    for path in sorted(
        (job.config.run_dir / "checkpoints").iterdir(), key=lambda p: p.name.zfill(12)
    ):
        if not path.name.isdecimal():
            continue
        loaded = load_run(job.config.run_dir, step=int(path.name))
        images = draw_all(loaded, wanted.prompts, seed=job.config.seed, **options)
        shown = draw_all(loaded, SHOWN, seed=job.config.seed, **options)
        rows.append({"step": loaded.step, **score(judge, images, wanted), "picture": _png(shown)})
    return {"rows": rows, "prompts": list(SHOWN), **options}


def _training_line(result: dict[str, Any]) -> str:
    shares = ", ".join(f"{row['letter']:.0%} at {row['step']}" for row in result["rows"])
    return f"letters right: {shares}"


def _judged(job: Job) -> dict[str, Any]:
    loaded, _, judge = job.best()
    wanted = asked(job.size.judged)
    rows, pictures = [], {}
    for steps in job.size.sample_steps:
        for guidance in job.size.guidances:
            images = draw_all(
                loaded, wanted.prompts, seed=job.config.seed, steps=steps, guidance=guidance
            )
            rows.append({"steps": steps, "guidance": guidance, **score(judge, images, wanted)})
            if steps == job.size.sample_steps[-1]:
                shown = draw_all(
                    loaded, SHOWN, seed=job.config.seed, steps=steps, guidance=guidance
                )
                pictures[f"{guidance:g}"] = _png(shown)
    return {"rows": rows, "pictures": pictures, "count": len(wanted.prompts)}


def _judged_line(result: dict[str, Any]) -> str:
    best = max(result["rows"], key=lambda row: row["letter"] + row["held_out_both"])
    return (
        f"letter {best['letter']:.1%}, pairs held out {best['held_out_both']:.1%} (letter "
        f"{best['held_out_letter']:.1%}) in {best['steps']} steps at guidance {best['guidance']:g}"
    )


def _copies(job: Job) -> dict[str, Any]:
    """Distances of drawn letters to the training set, beside those of letters that nobody drew."""
    loaded, guidance, _ = job.best()
    examples = open_examples(loaded.config.data, "train")
    others = open_examples(loaded.config.data, "eval")
    bank = np.stack([examples.get(i)[0] for i in range(len(examples.bucket))])
    fresh = np.stack([others.get(i)[0] for i in range(min(256, len(others.bucket)))])
    wanted = asked(1)
    drawn = draw_all(
        loaded, wanted.prompts, seed=job.config.seed + 1, steps=_STEPS, guidance=guidance
    )
    index, distance = nearest(drawn, bank)
    held = wanted.held_out
    chosen = np.flatnonzero(held)[:8].tolist() + np.flatnonzero(~held)[:8].tolist()
    pairs = np.concatenate([drawn[chosen], bank[index[chosen]]])
    return {
        "drawn": summary(distance),
        "fresh": summary(nearest(fresh, bank)[1]),
        "picture": _png(pairs, columns=len(chosen)),
        "prompts": [wanted.prompts[i] for i in chosen],
    }


def _copies_line(result: dict[str, Any]) -> str:
    return (
        f"root mean square to the nearest training image: median {result['drawn']['median']:.3f}, "
        f"least {result['drawn']['least']:.3f}; of unseen letters {result['fresh']['median']:.3f} "
        f"and {result['fresh']['least']:.3f}"
    )


def _film(job: Job) -> dict[str, Any]:
    loaded, guidance, _ = job.best()
    frames = trajectory(loaded, SHOWN[:_FILMED], seed=job.config.seed, steps=24, guidance=guidance)
    return {"frames": len(frames), "webp": base64.b64encode(animation(frames)).decode()}


def _export(job: Job) -> dict[str, Any]:
    folder = job.config.run_dir
    return hosting.export_run(folder, folder / "models", len(SHOWN))


def _export_line(result: dict[str, Any]) -> str:
    return (
        f"{result['bundle']}: {result['bytes'] / 1e6:.1f} MB for {', '.join(result['platforms'])}"
    )


def _host(job: Job) -> dict[str, Any]:
    missing = not_installed(hosting.PACKAGES)
    if missing:
        return {"missing": missing}
    folder = job.config.run_dir
    loaded = load_run(folder, compute_dtype=np.float32)  # in which the bundle computes
    guidance, judge = loaded.sample.guidance, Judge(Letters())
    found = hosting.serve_and_draw(
        loaded, folder / "models", folder / "host.log", list(SHOWN), steps=_STEPS, guidance=guidance
    )
    images = np.asarray(found.pop("images"), np.float32)
    score_ = judge.judge(images).score
    return {**found, "picture": _png(images), "like_letters": float(np.median(score_))}


def _host_line(result: dict[str, Any]) -> str:
    if "missing" in result:
        return f"not served: {', '.join(result['missing'])} not installed"
    return (
        f"{result['requests']} requests of {1e3 * result['request_seconds']:.1f} ms; the image "
        f"differs by {result['largest_difference']:.1e} from the one drawn here"
    )


def _png(images: Any, *, columns: int | None = None) -> str:
    """Images in [-1, 1] side by side, as PNG in base64."""
    buffer = io.BytesIO()
    grid(to_pixels(images), columns=columns or len(images)).save(buffer, "PNG")
    return base64.b64encode(buffer.getvalue()).decode()
