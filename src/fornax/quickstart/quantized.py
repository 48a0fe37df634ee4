"""The quickstart's last model: the tuned one in 4 bits, what that costs, and both served."""

import itertools
import json
import shutil
from pathlib import Path
from typing import Any

from fornax.quant import quantize
from fornax.quickstart import serving
from fornax.quickstart.child import not_installed
from fornax.quickstart.job import Job
from fornax.quickstart.serving import ASKED, serve_and_ask

__all__ = ["make", "make_line", "serve", "serve_line"]

_SCHEME = "w4a16-gptq"
_GROUP_SIZE = 32
"""Both sizes of model have matrices that no larger group divides."""
_FUNCTIONS = 2048
"""Functions of the files trained on to calibrate with and to hold out, at most."""
_MAX_TOKENS = 64


def make(job: Job) -> dict[str, Any]:
    """Quantize the tuned model, with functions that it was tuned on as the text."""
    text = job.run_dir / "functions/calibration.jsonl"
    _write_texts(job.pairs / "train.jsonl", text)
    shutil.rmtree(job.quantized, ignore_errors=True)  # of a call that ended before it was noted
    report = quantize(
        job.tuned,
        job.quantized,
        scheme=_SCHEME,
        group_size=_GROUP_SIZE,
        data=str(text),
        samples=64,
        length=min(256, job.size.seq_len),
        seed=job.config.seed,
    )
    held_out = report.held_out
    assert held_out is not None  # there is text
    return {
        "directory": str(job.quantized),
        "scheme": _SCHEME,
        "group_size": _GROUP_SIZE,
        "tensors": len(report.quantized),
        "weights_before": sum(_size(job.tuned)),
        "weights_after": sum(_size(job.quantized)),
        "tokens": held_out.tokens,
        "kl": held_out.kl,
        "float_loss": held_out.float_loss,
        "loss": held_out.loss,
    }


def make_line(result: dict[str, Any]) -> str:
    """What it cost."""
    return (
        f"{result['directory']}: {result['weights_after'] / 1e6:.2f} MB of "
        f"{result['weights_before'] / 1e6:.2f}; loss {result['float_loss']:.3f} to "
        f"{result['loss']:.3f} nats per token, KL {result['kl']:.4f}"
    )


def serve(job: Job) -> dict[str, Any]:
    """Serve the tuned model, then the one in 4 bits, and ask both the same."""
    absent = not_installed(serving.PACKAGES)
    if absent:
        return {"missing": absent}
    return {
        name: serve_and_ask(directory, job.run_dir / log, ASKED, max_tokens=_MAX_TOKENS)
        for name, directory, log in (
            ("float", job.tuned, "serve.log"),
            ("quantized", job.quantized, "serve-w4.log"),
        )
    }


def serve_line(result: dict[str, Any]) -> str:
    """How fast they answered."""
    if "missing" in result:
        return (
            f"left out: {', '.join(result['missing'])} not installed; "
            "pip install 'fornax-ai[serve]', then remove stages/serve.json and run again"
        )
    one, other = result["float"], result["quantized"]
    return (
        f"ready in {one['seconds_to_ready']:.1f} s, first token after "
        f"{1e3 * one['first_token_seconds']:.0f} ms, {one['tokens_per_second']:,.0f} tokens/s to "
        f"one client; in 4 bits {other['tokens_per_second']:,.0f}; stopped"
    )


def _write_texts(pairs: Path, out: Path) -> None:
    with pairs.open(encoding="utf-8") as lines:
        texts = [
            json.dumps({"text": pair["prompt"] + pair["completion"]}) + "\n"
            for pair in map(json.loads, itertools.islice(lines, _FUNCTIONS))
        ]
    out.write_text("".join(texts), encoding="utf-8")


def _size(directory: Path) -> list[int]:
    return [path.stat().st_size for path in directory.glob("*.safetensors")]
