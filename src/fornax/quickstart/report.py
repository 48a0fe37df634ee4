"""The quickstart's page: what was made, how good it is, and where the time went."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from markupsafe import Markup, escape

from fornax.quickstart.report_tuning import tuning_sections
from fornax.quickstart.stages import Done
from fornax.train import RunDirectory
from fornax.train.report import Section, bars, duration, render, table, training_sections

__all__ = ["write_report"]

_STAGES = {
    "corpus": "corpus and tokenizer",
    "pretrain": "pretraining",
    "portable": "save, load back, compare",
    "score": "score held-out files",
    "samples": "completions",
    "functions": "cut functions to tune on",
    "sft": "supervised tuning",
    "grpo": "reinforcement learning",
    "tuned": "merge, save, compare",
    "gain": "evaluate three models five times",
    "serve": "serve, ask over HTTP, stop",
    "export": "seal the scoring function",
    "host": "serve it, ask over gRPC, stop",
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
            _serve(results["serve"]),
            _host(results["export"], results["host"]),
            *training_sections(run),
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
        ("bits a byte, held out", f"{bits['fornax']:.3f}"),
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
        lead=f"Bits a byte over {result['files']} held-out files, {result['bytes'] / 1e3:.0f} kB: "
        f"fewer is better. {verdict} The model's count is the cross entropy of every token, end of "
        "file included, each file read on its own; a compressor's is the size of its output.",
        body=bars(
            "Bits a byte",
            [(names[key], bits[key]) for key in names],
            unit="bits a byte",
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


def _serve(result: Mapping[str, Any]) -> Section:
    title = "What a client gets over HTTP"
    if "missing" in result:
        absent = ", ".join(result["missing"])
        return Section(
            title=title,
            lead=f"Not run: {absent} not installed. pip install 'fornax-ai[serve]' brings them.",
            body=Markup(),
        )
    rows = [
        ("ready to serve after", f"{result['seconds_to_ready']:.1f} s"),
        ("first token after", f"{1e3 * result['first_token_seconds']:.0f} ms"),
        ("tokens a second, one client", f"{result['tokens_per_second']}"),
        ("exit code after SIGTERM", str(result["exit_code"])),
    ]
    answers = Markup("").join(
        Markup('<pre><span class="prompt">{}</span><span class="made">{}</span></pre>').format(
            result["prompt"], result[kind]
        )
        + Markup('<p class="sub">{}</p>').format(said)
        for kind, said in (("completion", "/v1/completions"), ("chat", "/v1/chat/completions"))
    )
    return Section(
        title=title,
        lead="fornax serve with the tuned model in a process of its own, asked by OpenAI's client, "
        "stopped by SIGTERM.",
        body=table(("", ""), rows) + answers,
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
        f"was asked over gRPC, {1e3 * result['request_seconds']:.1f} ms a request: how likely "
        "functions of held-out files are, in nats, beside what the model itself says.",
        body=table(("function", "tokens", "served", "computed directly"), rows),
    )


def _stages(done: Mapping[str, Done]) -> Section:
    items = [(_STAGES[name], stage.seconds) for name, stage in done.items()]
    return Section(
        title="The whole quickstart",
        lead="Seconds a stage. Pretraining's own time is broken down above.",
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
        body=table(("split", "files", "bytes", "tokens", "bytes a token"), rows),
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
