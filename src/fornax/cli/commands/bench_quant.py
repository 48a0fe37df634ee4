"""`fornax bench quant`: a model in floats and quantized, side by side on this machine."""

import dataclasses
import json
import platform
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from tyro.conf import Positional, arg

if TYPE_CHECKING:
    from fornax.evaluate.quantized import Measured

_NONE = "—"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Arguments:
    """Measure a float model and quantized ones: predictions, memory, and speed on this machine.

    The first directory is the float model's; the others are the same model quantized, by fornax
    quantize or in any format that Fornax reads. --schemes quantizes the first by each scheme.
    --peers adds llama.cpp (q8_0, q4_k_m), OpenVINO (int8, int4) and CTranslate2 (int8). Bits per
    byte and the divergence (KL) from the first are of the rows that fornax quantize holds out with
    the same --data, --samples, --length and --seed. Each engine runs in a process of its own: the
    time to load it, memory, and generated tokens/s, prompts included, medians.

    examples:
      fornax bench quant models/llama models/llama-w4 --data calib.jsonl
      fornax bench quant models/llama --schemes w8a16 w4a16 w4a16-gptq --data calib.jsonl
      fornax bench quant models/llama --data calib.jsonl --peers .venv-peers/openvino/bin/python
    """

    models: Annotated[Positional[tuple[Path, ...]], arg(metavar="DIR ...", help_behavior_hint="")]
    """Directories, or names on the Hub."""
    data: Annotated[str, arg(metavar="FILE")]
    """JSON lines with a column text."""
    schemes: Annotated[tuple[str, ...], arg(metavar="NAME ...", help_behavior_hint="")] = ()
    """As fornax quantize --help lists them."""
    peers: Annotated[tuple[Path, ...], arg(metavar="PYTHON ...", help_behavior_hint="")] = ()
    """Interpreters that have other engines: make bench-peers."""
    dtype: Annotated[str | None, arg(metavar="NAME", help_behavior_hint="")] = None
    """float32 or bfloat16: of what is not quantized (default: as in the files)."""
    batches: tuple[int, ...] = (1, 8)
    """Sequences generated together."""
    prompt: int = 128
    """Tokens of a prompt."""
    new: int = 64
    """Tokens to generate for each prompt."""
    rounds: int = 5
    """Of each batch size; one more before them does not count."""
    samples: int = 128
    """Rows to calibrate with, at most."""
    length: int = 512
    """Tokens of a row, cut to the model's positions."""
    seed: int = 0
    """Of the order in which texts are taken, and of the prompts."""
    json: Annotated[Path | None, arg(metavar="FILE", help_behavior_hint="")] = None
    """Where the figures are written as JSON."""


def run(arguments: Arguments) -> int:
    """Measure, and print a table."""
    from fornax.evaluate.quantized import measure_quantized
    from fornax.mesh import initialize

    initialize()
    found = measure_quantized(
        arguments.models,
        data=arguments.data,
        schemes=arguments.schemes,
        peers=arguments.peers,
        dtype=arguments.dtype,
        batches=arguments.batches,
        prompt=arguments.prompt,
        new=arguments.new,
        rounds=arguments.rounds,
        samples=arguments.samples,
        length=arguments.length,
        seed=arguments.seed,
        progress=lambda line: print(line, file=sys.stderr, flush=True),  # noqa: T201
    )
    for line in lines(found, arguments):
        print(line)  # noqa: T201
    if arguments.json is not None:
        values = [dataclasses.asdict(each) for each in found]
        arguments.json.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
    return 0


def lines(found: Sequence["Measured"], arguments: Arguments) -> Iterator[str]:
    """The table, and what it was measured on."""
    from fornax.config import environment
    from fornax.mesh.hardware.cpu import processor_name

    head = ("", "bits/byte", "KL", "disk MB", "weights MB", "process MB", "load s")
    rows = [(*head, *(f"tokens/s, {batch}" for batch in arguments.batches))]
    rows += [_row(each, arguments.batches) for each in found]
    widths = [max(len(row[place]) for row in rows) for place in range(len(rows[0]))]
    for row in rows:
        rest = (cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))
        yield "  ".join([row[0].ljust(widths[0]), *rest])
    yield from (each.failed for each in found if each.failed)
    floats = found[0].quality
    assert floats is not None
    yield (
        f"on {floats.held_out.tokens:,} held-out tokens; {arguments.prompt} prompt and "
        f"{arguments.new} greedy tokens, medians of {arguments.rounds} rounds; "
        f"{processor_name()}, {environment.usable_cores()} threads, {platform.system()}"
    )


def _row(each: "Measured", batches: Sequence[int]) -> tuple[str, ...]:
    """What was measured of it; a dash for the rest."""
    quality, speed = each.quality, each.speed
    return (
        each.name,
        *(
            (_NONE, _NONE)
            if quality is None
            else (f"{quality.bits_per_byte:.4f}", f"{quality.held_out.kl:.5f}")
        ),
        _megabytes(each.disk_bytes, 1),
        _megabytes(None if speed is None else speed.weight_bytes, 1),
        _megabytes(None if speed is None else speed.resident_bytes, 0),
        _NONE if speed is None else f"{speed.load_s:.1f}",
        *(_NONE if speed is None else f"{speed.rates[batch]:,.0f}" for batch in batches),
    )


def _megabytes(count: int | None, digits: int) -> str:
    return _NONE if count is None else f"{count / 1e6:,.{digits}f}"
