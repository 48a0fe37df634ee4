"""Results as rows of a table: model, measure, value with its interval, a note."""

from collections.abc import Iterator

from fornax.evaluate.harness import metrics
from fornax.evaluate.run import Results

__all__ = ["HEAD", "rows"]

HEAD = ("model", "measure", "value", "note")

Row = tuple[str, str, str, str]


def rows(results: Results) -> Iterator[Row]:
    """Every figure of the results."""
    for model in (results.config.model, results.config.against):
        if model is not None:
            yield from _of_model(results, model)
    yield from _of_comparison(results)


def _of_model(results: Results, model: str) -> Iterator[Row]:
    text = results.perplexity.get(model)
    if text is not None:
        size = f"{text.documents} documents, {text.tokens:,} tokens, {text.bytes:,} bytes"
        yield model, "bits per byte", str(text.bits_per_byte), size
        yield model, "perplexity", str(text.perplexity), "per token"
        yield model, "loss", str(text.loss), "nats per token"
    found = results.generative.get(model)
    if found is not None:
        size = f"{found.prompts} prompts, {found.samples} completions"
        yield model, "reward", str(found.reward), size
        for name, part in found.parts.items():
            failed = found.failures[name]
            if len(found.parts) > 1 or failed:
                note = f"failed on {failed} completions" if failed else ""
                yield model, f"reward/{name}", str(part), note
        for k, passed in found.passes.items():
            yield (
                model,
                f"pass@{k}",
                str(passed),
                f"total reward {results.config.threshold:g} or more",
            )
        yield model, "completion tokens", str(found.tokens), ""
        yield model, "truncated", str(found.truncated), "share that ran out of tokens"
    for task, metric, value, error in metrics(results.tasks.get(model, {})):
        spread = "" if error is None else f" ± {error:.4g}"
        yield model, f"{task} {metric}", f"{value:.4g}{spread}", "lm-eval-harness; standard error"


def _of_comparison(results: Results) -> Iterator[Row]:
    found = results.comparison
    if found is None:
        return
    model = f"{results.config.model} against {results.config.against}"
    counts = f"{found.wins} won, {found.ties} tied, {found.losses} lost of {found.prompts} prompts"
    yield model, "win rate", str(found.win_rate), f"{counts}; p = {found.p_value:.2g}"
    yield model, "difference of scores", str(found.difference), ""
    lengths = f"{found.tokens[0]:.1f} and {found.tokens[1]:.1f} tokens"
    yield model, "longer one wins", f"{found.longer_wins:.3g}", f"mean lengths {lengths}"
