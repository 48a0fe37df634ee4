"""The quickstart's stages in order: corpus, pretrain, profile, portable, score, samples; functions,
sft, grpo, tuned, gain; export, host; quantize, serve; then the report."""

import dataclasses
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from rich.console import Console

from fornax.config import dump_yaml
from fornax.config.errors import DataError
from fornax.data import Dataset, build, load_tokenizer, read_manifest
from fornax.data.files import Storage
from fornax.models import load_pretrained
from fornax.quickstart import hosting, profiled, quantized
from fornax.quickstart.child import not_installed
from fornax.quickstart.config import SIZES, QuickstartConfig
from fornax.quickstart.hosting import MODEL, export_score, serve_and_score
from fornax.quickstart.job import Job
from fornax.quickstart.post_training import STAGES as POST_TRAINING
from fornax.quickstart.report import write_report
from fornax.quickstart.samples import PROMPTS, complete
from fornax.quickstart.score import bits_per_byte, yardsticks
from fornax.quickstart.serving import CHAT_TEMPLATE
from fornax.quickstart.stages import Interrupted, Stage, all_stages
from fornax.train import convert, train

__all__ = ["run"]


def run(config: QuickstartConfig, *, console: Console | None = None) -> int:
    """Take the text on this machine to a model that other tools load, and write the report.

    Stages that an earlier call finished are not run again; pretraining resumes from its latest
    checkpoint.

    Args:
      config: size, place and seed.
      console: where progress is shown; standard error by default.

    Returns:
      The exit code: 0 when all is done, 130 or 143 when a signal stopped it (call again to resume).

    Raises:
      ConfigError: for a directory that holds another quickstart, is in use or not writable.
      DataError, CheckpointError: from the stages.
    """
    console = console or Console(stderr=True, highlight=False)
    size = SIZES[config.size]
    job = Job(config=config, size=size, console=console)
    console.print(
        f"Fornax quickstart ({config.size}, {size.minutes} on two cores) in {config.run_dir}"
    )
    began = time.perf_counter()
    try:
        done = all_stages(config, size, _stages(job), console)
    except Interrupted as stopped:
        console.print("stopped, everything saved; the same command resumes from here")
        return stopped.exit_code
    path = write_report(config.run_dir, config.size, done)
    closing = (
        f"\nreport     {path}",
        f"pretrained {job.portable}  (fornax generate {job.portable} --prompt 'def main(')",
        f"tuned      {job.tuned}  (fornax serve {job.tuned})",
        f"in 4 bits  {job.quantized}  (fornax serve {job.quantized})",
        f"bundle     {job.models / MODEL / '1'}  (fornax host {job.models})",
        f"the runs   fornax ui {config.run_dir}",
        f"all done in {time.perf_counter() - began:.0f} s",
    )
    for line in closing:
        console.print(line, soft_wrap=True)  # whole, so that a command can be copied
    return 0


def _stages(job: Job) -> list[Stage]:
    def bind(function: Callable[[Job], dict[str, object]]) -> Callable[[], dict[str, object]]:
        return lambda: function(job)

    tuning = [
        Stage(name, title, bind(function), line) for name, title, function, line in POST_TRAINING
    ]

    return [
        Stage("corpus", "Corpus and tokenizer", bind(_corpus), _corpus_line),
        Stage("pretrain", "Pretraining", bind(_pretrain), _pretrain_line),
        Stage("profile", "Its steps, profiled", bind(profiled.make), profiled.make_line),
        Stage("portable", "A Hugging Face directory, loaded back", bind(_portable), _portable_line),
        Stage("score", "Held-out files, compared with gzip and xz", bind(_score), _score_line),
        Stage("samples", "Completions", bind(_samples), _samples_line),
        *tuning,
        Stage("export", "Its scoring function, sealed in a bundle", bind(_export), _export_line),
        Stage("host", "The bundle, served over gRPC", bind(_host), _host_line),
        Stage("quantize", "The tuned model in 4 bits", bind(quantized.make), quantized.make_line),
        Stage("serve", "Both, served over HTTP", bind(quantized.serve), quantized.serve_line),
    ]


def _corpus(job: Job) -> dict[str, object]:
    built = build(job.size.build_config(job.dataset), overwrite=True)
    manifest = built.manifest
    return {
        "splits": {
            name: {"files": s.records, "bytes": s.text_bytes, "tokens": s.tokens}
            for name, s in manifest.splits.items()
        },
        "vocab_size": manifest.vocab_size,
        "fingerprint": manifest.fingerprint,
    }


def _corpus_line(result: dict[str, Any]) -> str:
    train_split, held = result["splits"]["train"], result["splits"]["eval"]
    return (
        f"{train_split['files']} files, {train_split['bytes'] / 1e6:.1f} MB, "
        f"{train_split['tokens'] / 1e6:.2f}M tokens to train on; {held['files']} files, "
        f"{held['bytes'] / 1e3:.0f} kB held out"
    )


def _pretrain(job: Job) -> dict[str, object]:
    manifest = read_manifest(job.dataset)
    if manifest.eos_id is None:
        raise DataError(f"{job.dataset} has a tokenizer without an end-of-text token")
    config = job.size.train_config(job.dataset, job.config, manifest.eos_id)
    result = train(config, job.run_dir)
    if result.reason == "signal":
        raise Interrupted(result.exit_code)
    goodput = result.goodput
    return {
        "steps": result.step,
        "tokens": result.step * config.batch_size * config.seq_len,
        "evaluation": result.evaluation,
        "seconds": goodput.seconds if goodput else {},
        "config": dump_yaml(config),
    }


def _pretrain_line(result: dict[str, Any]) -> str:
    loss = (result["evaluation"] or {}).get("loss")
    held = f", held-out loss {loss:.3f} nats per token" if loss is not None else ""
    return f"{result['steps']} steps, {result['tokens'] / 1e6:.2f}M tokens{held}"


def _portable(job: Job) -> dict[str, object]:
    parity = convert(job.run_dir, job.portable, overwrite=True)
    (job.portable / "chat_template.jinja").write_text(CHAT_TEMPLATE, encoding="utf-8")
    files = {path.name: path.stat().st_size for path in job.portable.iterdir()}
    return {"directory": str(job.portable), "files": files, **dataclasses.asdict(parity)}


def _portable_line(result: dict[str, object]) -> str:
    return (
        f"{result['directory']}: largest logit difference {result['max_abs_difference']:.1e} "
        f"over {result['tokens']} tokens"
    )


def _score(job: Job) -> dict[str, Any]:
    tokenizer = load_tokenizer(job.dataset / "tokenizer")
    source = Dataset(path=str(job.dataset)).open(Storage(), "eval")
    count = min(len(source), job.size.score_files or len(source))
    documents = [np.asarray(source[i]["tokens"]) for i in range(count)]
    texts = [tokenizer.decode(tokens).encode() for tokens in documents]
    model = load_pretrained(job.portable)
    ours = bits_per_byte(model, documents, texts, length=job.size.seq_len)
    return {
        "files": count,
        "bytes": sum(map(len, texts)),
        "bits_per_byte": {"fornax": ours, **dataclasses.asdict(yardsticks(texts))},
    }


def _score_line(result: dict[str, Any]) -> str:
    bits = result["bits_per_byte"]
    return (
        f"{bits['fornax']:.3f} bits per byte over {result['files']} files; "
        f"gzip -9 {bits['gzip']:.3f}, xz -9 {bits['xz']:.3f}"
    )


def _samples(job: Job) -> dict[str, object]:
    return {"samples": complete(job.portable, PROMPTS, max_tokens=64, seed=job.config.seed)}


def _samples_line(result: dict[str, Any]) -> str:
    first = result["samples"][0]
    return (
        f"{len(result['samples'])} completions, such as {(first['prompt'] + first['text'])[:60]!r}"
    )


def _export(job: Job) -> dict[str, object]:
    return export_score(job.tuned, job.models, length=job.size.seq_len)


def _export_line(result: dict[str, Any]) -> str:
    return (
        f"{result['bundle']}: {result['files']} files, {result['bytes'] / 1e6:.2f} MB, for "
        f"{', '.join(result['platforms'])}"
    )


def _host(job: Job) -> dict[str, object]:
    absent = not_installed(hosting.PACKAGES)
    if absent:
        return {"missing": absent}
    return serve_and_score(
        job.models,
        job.run_dir / "host.log",
        job.tuned,
        job.pairs / "eval.jsonl",
        length=job.size.seq_len,
    )


def _host_line(result: dict[str, Any]) -> str:
    if "missing" in result:
        return (
            f"left out: {', '.join(result['missing'])} not installed; "
            "pip install 'fornax-ai[serve]', then remove stages/host.json and run again"
        )
    return (
        f"ready in {result['seconds_to_ready']:.1f} s; {len(result['scores'])} texts scored, at "
        f"most {result['largest_difference']:.1e} nats from the model's own; "
        f"{1e3 * result['request_seconds']:.1f} ms per request; stopped"
    )
