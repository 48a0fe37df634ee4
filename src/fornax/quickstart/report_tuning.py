"""The page's sections on post-training: what it gained, samples side by side, how it went."""

from collections.abc import Mapping
from typing import Any

from markupsafe import Markup

from fornax.pages import Section, lines, table
from fornax.quickstart.gain import AFTER, BEFORE, beyond_spread
from fornax.train import RunDirectory
from fornax.train.metrics import read_metrics

__all__ = ["tuning_sections"]

_MODELS = {"base": "pretrained", "sft": "after SFT", "grpo": "after GRPO"}
_WRITTEN = "written by people"
_JUDGED = ("reward", "answers", "parses")


def tuning_sections(
    results: Mapping[str, Any], sft: RunDirectory, grpo: RunDirectory
) -> list[Section]:
    """What the stages of post-training found.

    Args:
      results: of the stages, by name.
      sft: the supervised run.
      grpo: the run of reinforcement learning.
    """
    return [
        _gain(results["gain"]),
        _side_by_side(results["gain"]),
        _course(results, sft, grpo),
    ]


def _gain(result: Mapping[str, Any]) -> Section:
    rows = [
        (_MODELS[name], *(_spread(of[judge]) for judge in _JUDGED), *_shape(of))
        for name, of in result["models"].items()
    ]
    people = result["people"]
    rows.append((_WRITTEN, *(f"{people[judge]:.3f}" for judge in _JUDGED), *_shape(people)))
    clear = beyond_spread(result, BEFORE, AFTER)
    verdict = (
        f"The worst of {result['repeats']} evaluations after GRPO is above the best of "
        f"{result['repeats']} before it."
        if clear
        else "The evaluations after GRPO do not all lie above those before it: no gain is shown."
    )
    return Section(
        title="What tuning gained",
        lead=f"Bodies for {result['prompts']} functions of held-out files, from signature and "
        f"docstring, drawn at temperature {result['temperature']} and judged by a parser; mean ± "
        f"standard deviation of {result['repeats']} evaluations with draws of their own. {verdict} "
        "The reward is 0 for what does not parse or uses no parameter, else the share of "
        "parameters used, halved where the docstring promises a value and none is returned; "
        "“answers” counts only bodies that lack nothing. It does not ask whether a body is right.",
        body=table(
            ("model", "reward", "answers", "parses", "distinct", "tokens", "never ended"), rows
        ),
    )


def _shape(of: Mapping[str, Any]) -> tuple[str, str, str]:
    return f"{100 * of['distinct']:.0f} %", f"{of['tokens']:.1f}", f"{100 * of['unended']:.0f} %"


def _spread(figure: Mapping[str, object]) -> str:
    return f"{figure['mean']:.3f} ± {figure['deviation']:.3f}"


def _side_by_side(result: Mapping[str, Any]) -> Section:
    parts = []
    for sample in result["samples"]:
        cells = [
            (f"{said} · reward {sample[name]['reward']:.2f}", sample[name]["text"])
            for name, said in _MODELS.items()
        ]
        asked = Markup('<pre><span class="prompt">{}</span>{}</pre>').format(
            sample["prompt"], sample["people"].rstrip()
        )
        parts.append(asked + _columns(cells))
    return Section(
        title="The same functions before and after",
        lead="The first held-out functions of the file, none chosen: the prompt in grey with the "
        "body that people wrote, and under it each model's first draw.",
        body=Markup("").join(parts),
    )


def _columns(cells: list[tuple[str, str]]) -> Markup:
    made = Markup("").join(
        Markup(
            '<div style="min-width:0"><p class="sub">{}</p>'
            '<pre><span class="made">{}</span></pre></div>'
        ).format(said, text.strip("\n"))
        for said, text in cells
    )
    return Markup(
        '<div style="display:grid;grid-template-columns:repeat(auto-fit,minmax(300px,1fr));'
        'gap:0 12px;margin-bottom:14px">{}</div>'
    ).format(made)


def _course(results: Mapping[str, Any], sft: RunDirectory, grpo: RunDirectory) -> Section:
    learned, rewarded = read_metrics(sft.metrics), read_metrics(grpo.metrics)
    plots = [
        _curve("SFT: loss on bodies", learned, "loss", "nats per token"),
        _curve("GRPO: reward of what was drawn", rewarded, "reward", "reward"),
        _curve("GRPO: entropy of the next token", rewarded, "entropy", "nats"),
        _curve("GRPO: tokens of a completion", rewarded, "completion_tokens", "tokens"),
    ]
    made = Markup('<div class="plots">') + Markup("").join(plots) + Markup("</div>")
    tuned, pairs, went = results["tuned"], results["functions"], results["grpo"]
    return Section(
        title="How tuning went",
        lead=f"SFT: {results['sft']['steps']} steps on adapters over {pairs['train']:,} functions "
        f"of the files trained on. GRPO from there: {went['steps']} steps, "
        f"{went['completions']:,} completions in groups of {went['group_size']}. "
        f"{tuned['directory']} holds the merged model, {tuned['adapter']} the supervised adapter "
        f"in PEFT's format ({tuned['adapter_bytes']:,} bytes).",
        body=made,
    )


def _curve(title: str, records: list[dict[str, Any]], name: str, unit: str) -> Markup:
    points = [(r["step"], r[name]) for r in records if name in r]
    steps, values = [step for step, _ in points], [value for _, value in points]
    return lines(title, [(name, steps, values)], unit=unit)
