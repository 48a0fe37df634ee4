"""The page of the letters' quickstart: what was drawn, how much of it is right, what it cost."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from markupsafe import Markup

from fornax.pages import Section, bars, lines, render, table
from fornax.quickstart.stages import Done
from fornax.train import RunDirectory
from fornax.train.report import duration, training_sections

__all__ = ["write_report"]

_STAGES = {
    "train": "training",
    "training": "draw and judge over training",
    "judged": "draw and judge over guidance and steps",
    "copies": "nearest neighbours",
    "film": "film",
    "export": "seal the denoise function",
    "host": "serve it, sample through it, stop",
}
_LIMITS = {"tiny": " It shows that everything works; with --size small most letters become right."}


def write_report(run_dir: Path, size: str, done: Mapping[str, Done]) -> Path:
    """Write `report.html` from the stages' results and the run's files; returns its path.

    Raises:
      ConfigError: when the page cannot be written.
    """
    results = {name: stage.result for name, stage in done.items()}
    run = RunDirectory(run_dir)
    return render(
        run.report,
        title="From fonts to letters that are drawn on request",
        subtitle=f"fornax diffusion quickstart, size {size}: a flow model over pixels, trained on "
        "letters of the fonts that matplotlib ships, one process, no network."
        + _LIMITS.get(size, ""),
        figures=_figures(results, done),
        sections=[
            _film(results["film"]),
            _training(results["training"]),
            _judged(results["judged"]),
            _copies(results["copies"]),
            _host(results["export"], results["host"]),
            *training_sections(run),
            _stages(done),
        ],
    )


def _best(result: Mapping[str, Any]) -> Mapping[str, Any]:
    return max(result["rows"], key=lambda row: row["letter"] + row["held_out_both"])


def _figures(results: Mapping[str, Any], done: Mapping[str, Done]) -> list[tuple[str, str]]:
    best = _best(results["judged"])
    return [
        ("letters right", f"{best['letter']:.1%}"),
        ("letters right, pairs held out", f"{best['held_out_letter']:.1%}"),
        ("letter and style right, pairs held out", f"{best['held_out_both']:.1%}"),
        ("images trained on", f"{results['train']['images']:,}"),
        ("processor time of training", duration(results["train"]["processor_seconds"])),
        ("from fonts to a served model", duration(sum(s.seconds for s in done.values()))),
    ]


def _picture(encoded: str, said: str, kind: str = "png") -> Markup:
    return Markup(
        '<p><img style="image-rendering: pixelated; max-width: 100%" alt="{}" '
        'src="data:image/{};base64,{}"></p>'
    ).format(said, kind, encoded)


def _film(result: Mapping[str, Any]) -> Section:
    return Section(
        title="How a letter appears",
        lead=f"The {result['frames'] - 1} steps of Euler's method from noise to letters, under "
        "guidance.",
        body=_picture(result["webp"], "Noise that becomes letters", "webp"),
    )


def _training(result: Mapping[str, Any]) -> Section:
    rows = result["rows"]
    parts = [
        lines(
            "Right, of what was asked for",
            [
                (name, [row["step"] for row in rows], [100 * row[key] for row in rows])
                for name, key in (
                    ("letter", "letter"),
                    ("letter and style", "both"),
                    ("letter and style, pairs held out", "held_out_both"),
                )
            ],
            unit="%",
            from_zero=True,
        )
    ]
    for row in rows:
        said = f"step {row['step']:,}: letter {row['letter']:.0%}, letter and style of pairs held "
        said += f"out {row['held_out_both']:.0%}"
        parts += [_picture(row["picture"], said), Markup('<p class="sub">{}</p>').format(said)]
    return Section(
        title="What it draws over training",
        lead=f"The same noise and prompts at each checkpoint: {', '.join(result['prompts'])}, in "
        f"{result['steps']} steps at guidance {result['guidance']:g}. The judge compares with "
        "templates of every letter and style.",
        body=Markup("").join(parts),
    )


def _judged(result: Mapping[str, Any]) -> Section:
    rows = [
        (
            row["steps"],
            f"{row['guidance']:g}",
            *(f"{row[k]:.1%}" for k in ("letter", "both", "held_out_letter", "held_out_both")),
        )
        for row in result["rows"]
    ]
    held = ("held out: letter", "held out: letter and style")
    head = ("steps", "guidance", "letter", "letter and style", *held)
    pictures = [
        _picture(picture, f"guidance {scale}")
        + Markup('<p class="sub">guidance {}</p>').format(scale)
        for scale, picture in result["pictures"].items()
    ]
    best = _best(result)
    return Section(
        title="Guidance and steps",
        lead=f"Of {result['count']} images for each row: every pair of letter and style that was "
        "trained on, and the 26 pairs that training never saw, whose letters and styles it did. "
        f"The figures at the top are those of {best['steps']} steps at guidance "
        f"{best['guidance']:g}.",
        body=table(head, rows) + Markup("").join(pictures),
    )


def _copies(result: Mapping[str, Any]) -> Section:
    rows = [
        (name, f"{result[key]['median']:.3f}", f"{result[key]['least']:.3f}")
        for name, key in (
            ("drawn by the model", "drawn"),
            ("letters drawn from fonts, unseen", "fresh"),
        )
    ]
    return Section(
        title="Beside the nearest training images",
        lead="Above what the model drew, below it the nearest of all training images, first for "
        f"pairs that were held out, then for others ({', '.join(result['prompts'])}). Root mean "
        "square of the difference, of a range of 2, to the nearest training image: of copies it "
        "would be less than that of unseen letters.",
        body=_picture(result["picture"], "Drawn letters over their nearest training images")
        + table(("", "median", "least"), rows),
    )


def _host(exported: Mapping[str, Any], result: Mapping[str, Any]) -> Section:
    title = "Drawn through a server"
    made = (
        f"fornax export sealed the denoise function in {exported['bundle']}: {exported['files']} "
        f"files, {exported['bytes'] / 1e6:.2f} MB, for {', '.join(exported['platforms'])}. "
    )
    if "missing" in result:
        absent = ", ".join(result["missing"])
        return Section(
            title=title,
            lead=f"{made}Not served: {absent} not installed. pip install 'fornax-ai[serve]' brings "
            "them.",
        )
    return Section(
        title=title,
        lead=f"{made}fornax host served it, ready after {result['seconds_to_ready']:.1f} s, and a "
        f"client sampled through it over gRPC: {result['requests']} requests of "
        f"{1e3 * result['request_seconds']:.1f} ms. The images differ by "
        f"{result['largest_difference']:.1e} at most from those drawn without the server.",
        body=_picture(result["picture"], "Letters drawn through the server"),
    )


def _stages(done: Mapping[str, Done]) -> Section:
    items = [(_STAGES[name], stage.seconds) for name, stage in done.items()]
    return Section(
        title="The whole quickstart",
        lead="Seconds per stage.",
        body=bars("Seconds", items, unit="seconds", highlight=_STAGES["train"], fmt="{:.1f}"),
    )
