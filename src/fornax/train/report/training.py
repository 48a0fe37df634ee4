"""The part of a report that every run has, made from its config, metrics and ledger."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import yaml
from markupsafe import Markup, escape

from fornax.config.errors import ConfigError
from fornax.config.goodput import Goodput, summarise
from fornax.pages import Section, bars, lines, render, series, table, thin
from fornax.train.metrics import read_metrics
from fornax.train.report.experts import experts_section
from fornax.train.report.samples import samples_section
from fornax.train.report.tuning import tuning_figures, tuning_section
from fornax.train.run_dir import RunDirectory
from fornax.train.skip_list import SkipList

__all__ = ["cost_line", "duration", "training_sections", "write"]

_NAMES = {
    "initialise": "start up",
    "compile": "compile",
    "wait_for_data": "wait for data",
    "step": "train steps",
    "snapshot": "copy the state to memory",
    "checkpoint": "blocked on checkpoints",
    "restore": "restore",
    "evaluate": "evaluate",
    "exchange": "exchange with other slices",
    "profile": "capture profiles",
    "spikes": "lost to loss spikes",
    "detection": "notice faults",
    "recovery": "form a new group",
    "waiting": "wait for hosts",
    "lost": "lost to faults",
    "other": "end",
}


def duration(seconds: float) -> str:
    """Seconds as a person writes them: 0.4 s, 12 s, 3 min 5 s, 2 h 10 min."""
    if seconds < 10:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"


def _curves(records: Sequence[Mapping[str, object]]) -> Markup:
    rates = sorted({k for r in records for k in r if k.endswith("_per_second")})
    loss = [
        ("train", *thin(*series(records, "loss"))),
        ("held out", *thin(*series(records, "eval/loss"))),
    ]
    last = records[-1]
    rewarded = any(name.startswith("reward") for name in last)
    of_tokens = "images" not in last and not rewarded
    pictures = [
        lines("Loss", loss, unit="nats per token" if of_tokens else ""),
        lines("Learning rate", [("", *thin(*series(records, "learning_rate")))], from_zero=True),
        lines("Gradient norm", [("", *thin(*series(records, "grad_norm")))], log=True),
    ]
    pictures += [
        lines(
            "Throughput",
            [("", *thin(*series(records, rate)))],
            unit=rate.split("_")[0] + "/s",
            from_zero=True,
        )
        for rate in rates[:1]
    ]
    return Markup('<div class="plots">') + Markup("").join(pictures) + Markup("</div>")


_COUNTED = {
    "tokens": (1e6, "million tokens"),
    "trained_tokens": (1e6, "million trained tokens"),
    "images": (1e3, "thousand images"),
    "completions": (1e3, "thousand completions"),
}
"""What a run counts, by its name in the metrics, and in which amounts that is paid for."""


def cost_line(run_dir: str | Path) -> str | None:
    """What a run cost so far, in a sentence; None where it was given no price."""
    run = RunDirectory(run_dir)
    cost = _cost(summarise(run.goodput), read_metrics(run.metrics))
    return None if cost is None else f"cost: {cost}"


def _cost(goodput: Goodput, records: Sequence[Mapping[str, object]]) -> str | None:
    price, cost, chip_seconds = goodput.price, goodput.cost, goodput.chip_seconds
    if price is None or cost is None or chip_seconds is None:
        return None
    unit = price.currency
    text = (
        f"{cost:,.4g} {unit}, for {chip_seconds / 3600:,.4g} chip-hours at "
        f"{price.chip_hour:g} {unit}"
    )
    last = records[-1] if records else {}
    for name, (amount, words) in _COUNTED.items():
        count = last.get(name)
        if isinstance(count, int | float) and count > 0:
            text += f"; {cost / count * amount:,.4g} {unit} per {words}"
            break
    return f"{text}; {100 * (1 - goodput.goodput):.0f} % of it outside the steps that were kept"


def _time_section(goodput: Goodput, records: Sequence[Mapping[str, object]]) -> Section:
    spent = [(c, s) for c, s in goodput.seconds.items() if s >= 0.005]
    spent.sort(key=lambda item: -item[1])
    picture = bars(
        "Seconds of the training process",
        [(_NAMES.get(c, c), s) for c, s in spent],
        unit="seconds",
        highlight=_NAMES["step"],
    )
    wall = goodput.wall_seconds or 1.0
    rows = [(_NAMES.get(c, c), f"{s:.1f}", f"{100 * s / wall:.1f} %") for c, s in spent]
    cost = _cost(goodput, records)
    starts = "start" if goodput.attempts == 1 else "starts"
    return Section(
        title="Where the time went",
        lead=f"{100 * goodput.goodput:.0f} % of {duration(goodput.wall_seconds)} went into steps "
        f"that were kept; {goodput.attempts} {starts} of the process."
        + (f" Cost: {cost}." if cost else ""),
        body=picture + table(("stage", "seconds", "share"), rows),
    )


def _spikes_section(path: Path) -> Section | None:
    """The rewinds of a run, a row each; None where there was none."""
    rewinds = SkipList.read(path).rewinds
    if not rewinds:
        return None
    rows = [
        (
            str(r.step),
            r.metric.replace("_", " "),
            "not finite" if r.value is None else f"{r.value:.4g}",
            "" if r.limit is None else f"{r.limit:.4g}",
            ", ".join(map(str, r.skipped)),
            f"{r.back_to} ({r.source})",
        )
        for r in rewinds
    ]
    times = "once" if len(rows) == 1 else f"{len(rows)} times"
    return Section(
        title="Loss spikes",
        lead=f"The run went back {times}; the curves are those of the steps that were kept.",
        body=table(("step", "metric", "value", "limit", "batches left out", "back to"), rows),
    )


def _skipped(records: Sequence[Mapping[str, object]]) -> str:
    count = sum(1 for r in records if r.get("skipped"))
    return f" {count} steps were skipped for their gradients." if count else ""


def training_sections(run: RunDirectory) -> list[Section]:
    """Curves, time and config of a run.

    Raises:
      ConfigError: when the directory holds no metrics.
    """
    records = read_metrics(run.metrics)
    if not records:
        raise ConfigError(
            f"{run.metrics} holds no steps; point at the directory of a run that has trained"
        )
    config = run.config.read_text(encoding="utf-8") if run.config.exists() else ""
    return [
        Section(
            title="Training",
            lead=f"{records[-1]['step']} steps; the number beside a curve is its last value."
            f"{_skipped(records)}",
            body=_curves(records),
        ),
        *(
            section
            for section in (
                _spikes_section(run.spikes),
                experts_section(records),
                tuning_section(records),
                samples_section(run.samples),
            )
            if section
        ),
        _time_section(summarise(run.goodput), records),
        Section(
            title="Config",
            lead="The resolved config; it loads back as it stands.",
            body=Markup("<details><summary>config.yaml</summary><pre>")
            + escape(config)
            + Markup("</pre></details>"),
        ),
    ]


def _figures(run: RunDirectory) -> list[tuple[str, str]]:
    records = read_metrics(run.metrics)
    last = records[-1]
    figures = [("steps", f"{last['step']:,}"), ("last loss", f"{last['loss']:.3f}")]
    figures += tuning_figures(records)
    evaluated = series(records, "eval/loss")[1]
    if evaluated:
        figures.append(("held-out loss", f"{evaluated[-1]:.3f}"))
    goodput = summarise(run.goodput)
    figures.append(("wall time", duration(goodput.wall_seconds)))
    figures.append(("goodput", f"{100 * goodput.goodput:.0f} %"))
    if goodput.cost is not None and goodput.price is not None:
        figures.append(("cost", f"{goodput.cost:,.4g} {goodput.price.currency}"))
    return figures


def write(run_dir: str | Path) -> Path:
    """Write `report.html` of a training run and return its path.

    Raises:
      ConfigError: when the directory holds no metrics, or the page cannot be written.
    """
    run = RunDirectory(run_dir)
    sections = training_sections(run)
    task = ""
    if run.config.exists():
        resolved = yaml.safe_load(run.config.read_text(encoding="utf-8")) or {}
        kind = (resolved.get("task") or {}).get("type", "training")
        tuned = isinstance(resolved.get("model"), str)
        task = f"tuned from {resolved['model']}" if tuned else f"{kind} run"
    return render(
        run.report,
        title=run.path.resolve().name,
        subtitle=task or "training run",
        figures=_figures(run),
        sections=sections,
    )
