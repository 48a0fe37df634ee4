"""The quickstart's page: what was made, how good it is, and where the time went."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from markupsafe import Markup, escape

from fornax.pages import Section, bars, render, table
from fornax.quickstart.report_tuning import tuning_sections
from fornax.quickstart.stages import Done
from fornax.train import RunDirectory
from fornax.train.report import duration, training_sections

__all__ = ["write_report"]

_STAGES = {
    "corpus": "corpus and tokenizer",
    "pretrain": "pretraining",
    "profile": "read its capture",
    "portable": "save, load back, compare",
    "score": "score held-out files",
    "samples": "completions",
    "functions": "cut functions to tune on",
    "sft": "supervised tuning",
    "grpo": "reinforcement learning",
    "tuned": "merge, save, compare",
    "gain": "evaluate three models five times",
    "export": "seal the scoring function",
    "host": "serve it, ask over gRPC, stop",
    "quantize": "4 bits, compared with the float model",
    "serve": "serve both, ask over HTTP, stop",
}


def write_report(run_dir: Path, size: str, done: Mapping[str, Done]) -> Path:
    """Write `report.html` from the stages' results and the run's files; returns its path.

    Raises:
      ConfigError: when the page cannot be written.
    """
    results = {name: stage.result for name, stage in done.items()}
    run = RunDirectory(run_dir)
    return render(
        run.report,
        title="From raw text to a tuned model that is served",
        subtitle=f"fornax quickstart, size {size}: the Python standard library's own source on "
        "this machine, one process, no network.",
        figures=_figures(results, done),
        sections=[
            _score(results["score"]),
            _samples(results["samples"]),
            *tuning_sections(
                results, RunDirectory(run_dir / "sft"), RunDirectory(run_dir / "grpo")
            ),
            _host(results["export"], results["host"]),
            _serve(results["quantize"], results["serve"]),
            *training_sections(run),
            _profile(results["profile"]),
            _stages(done),
            _corpus(results["corpus"]),
            _portable(results["portable"]),
        ],
    )


def _figures(results: Mapping[str, Any], done: Mapping[str, Done]) -> list[tuple[str, str]]:
    bits = results["score"]["bits_per_byte"]
    portable = results["portable"]
    reward = {name: of["reward"]["mean"] for name, of in results["gain"]["models"].items()}
    return [
        ("bits per byte, held out", f"{bits['fornax']:.3f}"),
        ("gzip -9 on the same files", f"{bits['gzip']:.3f}"),
        ("parameters", f"{portable['parameters'] / 1e6:.2f} M"),
        ("tokens trained on", f"{results['pretrain']['tokens'] / 1e6:.2f} M"),
        (f"reward after GRPO, {reward['sft']:.3f} before", f"{reward['grpo']:.3f}"),
        ("from text to tuned model", duration(sum(stage.seconds for stage in done.values()))),
    ]


def _score(result: Mapping[str, Any]) -> Section:
    bits = result["bits_per_byte"]
    names = {
        "fornax": "this model",
        "gzip": "gzip -9, file by file",
        "xz": "xz -9, file by file",
        "xz_together": "xz -9, all files as one",
    }
    ours, gzip = bits["fornax"], bits["gzip"]
    verdict = (
        f"It needs {100 * (1 - ours / gzip):.0f} % fewer bits than gzip -9."
        if ours < gzip
        else "It does not beat gzip -9 yet: train for longer."
    )
    return Section(
        title="How well it predicts files it has not seen",
        lead=f"Bits per byte of {result['files']} held-out files, {result['bytes'] / 1e3:.0f} kB: "
        f"fewer is better. {verdict} The model's count is the cross entropy of every token, end of "
        "file included, each file read on its own; a compressor's is the size of its output.",
        body=bars(
            "Bits per byte",
            [(names[key], bits[key]) for key in names],
            unit="bits per byte",
            highlight=names["fornax"],
            fmt="{:.3f}",
        ),
    )


def _samples(result: Mapping[str, Any]) -> Section:
    parts = []
    for sample in result["samples"]:
        how = "greedy" if sample["temperature"] == 0 else f"temperature {sample['temperature']}"
        parts.append(
            Markup('<pre><span class="prompt">{}</span><span class="made">{}</span></pre>').format(
                sample["prompt"], sample["text"]
            )
            + Markup('<p class="sub">{}</p>').format(how)
        )
    return Section(
        title="What the pretrained model writes",
        lead="The prompt in grey, the completion in colour, made by the model loaded back from the "
        "Hugging Face directory.",
        body=Markup("").join(parts),
    )


def _serve(made: Mapping[str, Any], result: Mapping[str, Any]) -> Section:
    title = "The tuned model in 4 bits, compared with the float one"
    cost = (
        f"fornax quantize wrote {made['directory']} by {made['scheme']} in groups of "
        f"{made['group_size']} inputs: {made['tensors']} matrices of the layers; on "
        f"{made['tokens']:,} held-out tokens the divergence from the float model is "
        f"{made['kl']:.4f} nats per token. "
    )
    rows = [
        ("weights, MB", *(f"{made[key] / 1e6:.2f}" for key in ("weights_before", "weights_after"))),
        ("loss, nats per token", *(f"{made[key]:.4f}" for key in ("float_loss", "loss"))),
    ]
    heads = ("", "float", "4 bits")
    if "missing" in result:
        absent = ", ".join(result["missing"])
        return Section(
            title=title,
            lead=f"{cost}Not served: {absent} not installed. pip install 'fornax-ai[serve]' brings "
            "them.",
            body=table(heads, rows),
        )
    both = (result["float"], result["quantized"])
    rows += [
        ("ready to serve after", *(f"{one['seconds_to_ready']:.1f} s" for one in both)),
        ("first token after", *(f"{1e3 * one['first_token_seconds']:.0f} ms" for one in both)),
        ("tokens per second of an answer", *(f"{one['tokens_per_second']:,.0f}" for one in both)),
        ("exit code after SIGTERM", *(str(one["exit_code"]) for one in both)),
    ]
    answers = Markup("").join(
        Markup('<pre><span class="prompt">{}</span><span class="made">{}</span></pre>').format(
            one["prompt"], one["completion"]
        )
        + Markup('<p class="sub">{}</p>').format(said)
        for one, said in zip(both, ("float", "4 bits"), strict=True)
    )
    return Section(
        title=title,
        lead=f"{cost}fornax serve ran each in a process of its own, asked by OpenAI's client and "
        "stopped by SIGTERM.",
        body=table(heads, rows) + answers,
    )


def _host(exported: Mapping[str, Any], result: Mapping[str, Any]) -> Section:
    title = "What the exported scoring function answers"
    made = (
        f"fornax export sealed it in {exported['bundle']}: {exported['files']} files, "
        f"{exported['bytes'] / 1e6:.2f} MB, for {', '.join(exported['platforms'])}. "
    )
    if "missing" in result:
        absent = ", ".join(result["missing"])
        return Section(
            title=title,
            lead=f"{made}Not served: {absent} not installed. pip install 'fornax-ai[serve]' brings "
            "them.",
            body=Markup(),
        )
    rows = [
        (
            one["text"].splitlines()[0],
            str(one["tokens"]),
            f"{one['served']:.4f}",
            f"{one['direct']:.4f}",
        )
        for one in result["scores"]
    ]
    return Section(
        title=title,
        lead=f"{made}fornax host served it, ready after {result['seconds_to_ready']:.1f} s, and "
        f"was asked over gRPC, {1e3 * result['request_seconds']:.1f} ms per request: how likely "
        "functions of held-out files are, in nats, compared with the model itself.",
        body=table(("function", "tokens", "served", "computed directly"), rows),
    )


def _profile(result: Mapping[str, Any]) -> Section:
    title = "Where a step of pretraining spends its time"
    if "missing" in result:
        return Section(title=title, lead=f"Not profiled: {result['missing']}.")
    seconds = {cause: each for cause, each in result["seconds"].items() if each > 0}
    whole = sum(seconds.values())
    parts = ", ".join(f"{cause} {each / whole:.0%}" for cause, each in seconds.items())
    link = Markup(
        '<p><a href="{0}">{0}</a>: operations, flame graph, roofline, memory and time '
        "line, in one file that needs no network.</p>"
    ).format(result["page"])
    return Section(
        title=title,
        lead=f"{result['steps']} steps were captured: {1e3 * whole:.0f} ms each, {parts}. The "
        "modules with most of the operations' time:",
        body=table(("module", "share"), [(name, f"{s:.0%}") for name, s in result["modules"]])
        + link,
    )


def _stages(done: Mapping[str, Done]) -> Section:
    items = [(_STAGES[name], stage.seconds) for name, stage in done.items()]
    return Section(
        title="The whole quickstart",
        lead="Seconds per stage. Pretraining's own time is broken down above.",
        body=bars("Seconds", items, unit="seconds", highlight=_STAGES["pretrain"], fmt="{:.1f}"),
    )


def _corpus(result: Mapping[str, Any]) -> Section:
    rows = [
        (
            {"train": "trained on", "eval": "held out"}.get(name, name),
            f"{split['files']:,}",
            f"{split['bytes']:,}",
            f"{split['tokens']:,}",
            f"{split['bytes'] / max(1, split['tokens']):.2f}",
        )
        for name, split in sorted(result["splits"].items(), reverse=True)
    ]
    return Section(
        title="The corpus",
        lead=f"Generated tables and tests are left out; files are split by a hash of their text. A "
        f"byte-level BPE tokenizer of {result['vocab_size']:,} tokens was trained on the files "
        f"trained on. Fingerprint {result['fingerprint']}.",
        body=table(("split", "files", "bytes", "tokens", "bytes per token"), rows),
    )


def _portable(result: Mapping[str, Any]) -> Section:
    rows = [(name, f"{size:,}") for name, size in sorted(result["files"].items())]
    return Section(
        title="The pretrained model, portable",
        lead=f"{result['directory']} holds a {result['family']} model that transformers and other "
        f"tools load. Loaded back, its logits differ by at most {result['max_abs_difference']:.1e} "
        f"over {result['tokens']:,} tokens of real prompts.",
        body=table(("file", "bytes"), rows)
        + Markup("<pre>fornax generate {} --prompt 'def main('</pre>").format(
            escape(result["directory"])
        ),
    )
