"""`fornax quantize`: a model's weights quantized, as compressed-tensors or as a GGUF file."""

import collections
import dataclasses
import logging
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from tyro.conf import Positional, arg

from fornax.cli.configured import ConfigArguments, read_config
from fornax.config import ConfigError

if TYPE_CHECKING:
    from fornax.quant import GGUFScheme, QuantizeConfig, Report


@dataclasses.dataclass(frozen=True, kw_only=True)
class Arguments(ConfigArguments):
    """Write a directory with quantized linear layers (compressed-tensors), or a GGUF file.

    By rounding: w8a16, w4a16, w3a16, w8a8, fp8, fp8-block, mxfp4, mxfp4a16, nvfp4a16 and (rotated)
    w4a4; by text (--data): w4a16-gptq, w3a16-gptq, w4a16-awq, w3a16-awq, smoothquant and nvfp4. As
    one GGUF file of all matrices: f32, f16, bf16, q8_0, q4_0, q4_k_m and q6_k, with no other
    option. A rule gives another scheme to the parameters that its regular expression finds by path,
    such as layers/3/attention/q/kernel. --search measures what each of --schemes costs each part of
    each layer, and keeps the smallest mix within --max-loss. A killed run resumes where it was.
    --help-config lists --rules, --group-size, --samples, --length and the other keys.

    examples:
      fornax quantize models/llama --scheme w4a16-gptq --data calib.jsonl --out models/llama-w4
      fornax quantize models/llama --scheme q4_k_m --out llama.Q4_K_M.gguf
      fornax quantize models/llama --scheme w4a16 --rules 'layers/0/=w8a16' lm_head=fp8 --out w4
      fornax quantize models/llama --search --max-loss 0.5% --data calib.jsonl --out llama-mixed
    """

    source: Annotated[Positional[Path | None], arg(metavar="DIR", help_behavior_hint="")] = None
    """A Hugging Face directory, or a name on the Hub."""
    out: Annotated[Path | None, arg(metavar="PATH", help_behavior_hint="")] = None
    """The directory or the GGUF file to make."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Job:
    source: Path
    out: Path
    config: "QuantizeConfig"


def run(arguments: Arguments, overrides: Sequence[str]) -> int:
    """Quantize, and say what it cost."""
    from fornax.quant import QuantizeConfig

    config = read_config(QuantizeConfig, arguments, overrides)
    if config is None:
        return 0
    source, out = arguments.source, arguments.out
    if source is None or out is None:
        lacks = "DIR" if source is None else "--out"
        raise ConfigError(f"fornax quantize needs {lacks}; write fornax quantize DIR --out PATH")
    from fornax.mesh import initialize
    from fornax.quant import GGUF_SCHEMES
    from fornax.train import is_run

    initialize()
    if is_run(source):
        raise ConfigError(
            f"{source} is a run, and what is quantized is a Hugging Face directory; make "
            f"one first: fornax convert {source} --out DIR"
        )
    job = _Job(source=source, out=out, config=config)
    if config.scheme is not None and config.scheme.lower() in GGUF_SCHEMES:
        return _write_gguf(job, GGUF_SCHEMES[config.scheme.lower()])
    make = _search if config.search else _quantize
    given = {
        name: getattr(config, name) for name in ("rules", "group_size", "samples", "length", "seed")
    }
    _show(make(job, given), out)
    return 0


def _quantize(job: _Job, given: Mapping[str, Any]) -> "Report":
    from fornax.quant import quantize

    if job.config.scheme is None:
        raise ConfigError("no scheme is named; give --scheme NAME, or --search to have one chosen")
    if job.config.schemes:
        raise ConfigError(
            f"--schemes {' '.join(job.config.schemes)} is what --search chooses from; give "
            "--search, or one --scheme alone"
        )
    return quantize(
        job.source,
        job.out,
        scheme=job.config.scheme,
        data=job.config.data,
        max_loss=job.config.max_loss,
        **given,
    )


def _search(job: _Job, given: Mapping[str, Any]) -> "Report":
    if job.config.scheme is not None:
        raise ConfigError(
            f"--scheme {job.config.scheme} and --search are two answers to one question; give one "
            "of them, --schemes says what the search chooses from"
        )
    if job.config.max_loss is None:
        raise ConfigError("--search needs to know what the loss may rise by; give --max-loss 0.5%")
    if job.config.data is None:
        raise ConfigError("--search needs text to measure on; give --data FILE")
    from fornax.cli.quantize_report import search_lines, write_page
    from fornax.quant import CANDIDATES, search

    logger = logging.getLogger("fornax.quant")
    logger.setLevel(logging.INFO)
    logger.propagate = False
    logger.handlers = [logging.StreamHandler(sys.stderr)]
    report = search(
        job.source,
        job.out,
        max_loss=job.config.max_loss,
        data=job.config.data,
        schemes=job.config.schemes or CANDIDATES,
        finish=write_page,
        **given,
    )
    for line in search_lines(report):
        print(line)  # noqa: T201
    print(job.out / "quantization_report.html")  # noqa: T201
    return report


def _show(report: "Report", out: Path) -> None:
    from fornax.config.suggest import first_few

    reasons = collections.Counter(report.kept.values())
    print(  # noqa: T201
        f"{out}: {len(report.quantized)} tensors quantized; "
        f"{report.bytes_after / 1e6:,.1f} MB of {report.bytes_before / 1e6:,.1f} MB"
    )
    without_text = [name for name, note in report.quantized.items() if "reason" in note]
    if without_text:
        print(  # noqa: T201
            f"not by text of its own: {first_few(without_text)}; "
            "quantization_report.json says why and what instead"
        )
    for reason, count in reasons.items():
        print(f"kept {count}: {reason}")  # noqa: T201
    found = report.held_out
    if found is None:
        print("no text was given, so that no logits were compared; --data FILE does")  # noqa: T201
        return
    print(  # noqa: T201
        f"on {found.tokens:,} held-out tokens: KL {found.kl:.5f} nats per token; loss "
        f"{found.float_loss:.4f} to {found.loss:.4f} nats per token ({found.increase:+.3%})"
    )


def _write_gguf(job: _Job, scheme: "GGUFScheme") -> int:
    from fornax.quant import quantize_gguf

    for name in ("data", "rules", "group_size", "max_loss", "search", "schemes"):
        if getattr(job.config, name):
            raise ConfigError(
                f"--{name.replace('_', '-')} does not act on the GGUF scheme {scheme.name}, whose "
                "types llama.cpp's rules choose; leave it out, or take a scheme such as w4a16"
            )
    report = quantize_gguf(job.source, job.out, scheme)
    types = ", ".join(f"{count} {name}" for name, count in report.types.items())
    print(  # noqa: T201
        f"{job.out}: {report.bytes_after / 1e6:,.1f} MB of {report.bytes_before / 1e6:,.1f} "
        f"MB; tensors: {types}"
    )
    for name, error in report.errors.items():
        print(f"{name}: squared error {error:.2e} of the weights' squares")  # noqa: T201
    return 0
