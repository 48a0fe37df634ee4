"""Quantizing a Hugging Face directory, leaf by leaf, into another.

Legend: O outputs, I inputs.
"""

import dataclasses
import functools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fornax.checkpoint.safetensors_file import DTYPES, find_tensors
from fornax.config.errors import ConfigError
from fornax.config.host_memory import available_memory
from fornax.config.hub import find_model
from fornax.models import StoredModel, open_pretrained, read_config
from fornax.quant.inputs import find_roundings
from fornax.quant.layers import convert, find_largest, write_layers
from fornax.quant.leaves import Leaf, assign, check_group_size, find_leaves, parse_rule
from fornax.quant.rotation import find_rotations
from fornax.quant.schemes import scheme_named
from fornax.quant.tensors import config_of
from fornax.quant.texts import Rows, read_rows
from fornax.quant.verify import HeldOut, Roundings, compare, run_rows, weight_error
from fornax.quant.work import Work

__all__ = [
    "Report",
    "Source",
    "find_all_roundings",
    "make",
    "open_source",
    "open_work",
    "parse_share",
    "quantize",
    "target_of",
    "write",
]

_LEAST_FILE = 2**26
"""Bytes of tensors that are held before they are written, at least."""
_COPIES = 3
"""Of the largest tensor, that exist at once."""
_FLOAT32 = np.dtype(np.float32)
_COPIED = (".json", ".jinja", ".txt", ".model", ".md")
"""Endings of files that are copied: the tokenizer's, and what is said of the model."""
_MADE = ("config.json", "model.safetensors.index.json", "parity.json", "quantization_report.json")


@dataclass(frozen=True, kw_only=True)
class Report:
    """What was done, measured on what was written: the content of quantization_report.json."""

    source: str
    scheme: str
    rules: tuple[str, ...]
    group_size: int | None
    """Inputs that share a scale in `pack-quantized` tensors; None where there are none."""
    data: str | None
    """As it was given."""
    samples: int | None
    """Rows of `data` to calibrate with; None without text."""
    length: int | None
    """Tokens of a row."""
    seed: int
    quantized: dict[str, dict[str, Any]]
    """By tensor: scheme, how it was rounded, and the squared error as a share of its squares (None
    where scales on its inputs or outputs make it another matrix)."""
    kept: dict[str, str]
    """Tensors that stay as they are, and why."""
    bytes_before: int
    """Of tensors."""
    bytes_after: int
    text_sha256: str | None
    """Of the text that the held-out rows are of; None without text."""
    held_out: HeldOut | None
    """On the held-out rows, inputs of products rounded as the schemes say; None without text."""
    search: Mapping[str, Any] | None = None
    """How the rules were found, as `Search`; None where they were given."""


@dataclass(frozen=True, kw_only=True)
class Source:
    """A float model's directory, opened."""

    name: str
    """As it was given."""
    folder: Path
    stored: StoredModel
    leaves: list[Leaf]
    data: str | None
    """As it was given."""
    rows: Rows | None
    """None without text."""
    seed: int
    group_size: int | None
    """As `scheme_named` takes it."""

    def plan(self) -> dict[str, Any]:
        """What depends on nothing else depends on this, as JSON."""
        files = sorted({leaf.tensor.file for leaf in self.leaves})
        shape = None if self.rows is None else self.rows.calibration_NT.shape
        return {
            "source": str(self.folder.resolve()),
            "files": [_identity(file) for file in files],
            "text": None if self.rows is None or shape is None else [self.rows.sha256, *shape],
            "seed": self.seed,
            "group_size": self.group_size,
        }

    def assigned(self, scheme: str, rules: Sequence[str]) -> list[Leaf]:
        """The leaves with their schemes; see `assign`.

        Raises:
          ConfigError: see there; a scheme that needs text where there is none.
        """
        own = [parse_rule(rule, self.group_size) for rule in rules]
        chosen, config = scheme_named(scheme, self.group_size), self.stored.model.config
        leaves = assign(self.leaves, chosen, own, config)
        by_text = [x.scheme.name for x in leaves if x.scheme and x.scheme.needs_text]
        if by_text and self.rows is None:
            raise ConfigError(
                f"the scheme {by_text[0]} needs text to calibrate with; give data (--data)"
            )
        return leaves


def open_source(
    source: str | Path,
    data: str | None,
    *,
    samples: int,
    length: int,
    seed: int,
    group_size: int | None = None,
    choice: bool = False,
) -> Source:
    """Open a directory and read the text; arguments and errors are those of `quantize`.

    Args:
      choice: see `read_rows`.
    """
    folder = find_model(source).expanduser()
    stored = open_pretrained(folder, dtype=_FLOAT32)
    config, rows = stored.model.config, None
    leaves = find_leaves(stored, find_tensors(folder, DTYPES))
    if data is not None:
        rows = read_rows(
            folder,
            data,
            samples=samples,
            length=min(length, config.max_position_embeddings),
            seed=seed,
            vocab_size=config.vocab_size,
            choice=choice,
        )
    return Source(
        name=str(source),
        folder=folder,
        stored=stored,
        leaves=leaves,
        data=data,
        rows=rows,
        seed=seed,
        group_size=group_size,
    )


@functools.singledispatch
def quantize(
    source: str | Path,
    out: str | Path,
    *,
    scheme: str,
    rules: Sequence[str] = (),
    group_size: int | None = None,
    data: str | None = None,
    max_loss: str | None = None,
    samples: int = 128,
    length: int = 512,
    seed: int = 0,
) -> Report:
    """Write a Hugging Face directory with quantized linear layers (compressed-tensors).

    One tensor is read, rounded and written at a time. What was written is read back before the
    directory takes its place. A killed run leaves nothing at `out`, and resumes where it was when
    it is called again with the same arguments.

    Args:
      source: a Hugging Face directory of a float model, or a name on the Hub.
      out: the directory to make.
      scheme: one of `SCHEMES`.
      rules: `PATTERN=SCHEME` or `PATTERN=keep`, for the leaves whose path the regular expression
        finds; see `leaves`.
      group_size: inputs that share a scale in w8a16, w4a16 and w3a16; None: 128.
      data: JSON lines with a column `text`: part of it is held out, to compare the models on.
      max_loss: what the loss on the held-out text may rise by at most, such as "0.5%" of it.
      samples: rows to calibrate with, at most.
      length: tokens of a row.
      seed: of the order in which texts are taken, and of rotations.

    Raises:
      ConfigError: an unknown scheme, rules that do not fit, a model quantized already, a loss that
        rises by more than `max_loss`, too little memory.
      CheckpointError: weights that are missing, damaged or no numbers; `out` exists or cannot be
        written.
      DataError: text that is missing or too short.
    """
    check_group_size(group_size, [scheme], rules)
    limit = None if max_loss is None else parse_share(max_loss)
    if limit is not None and data is None:
        raise ConfigError(f"max_loss={max_loss} needs text to measure the loss on; give data")
    opened = open_source(
        source, data, samples=samples, length=length, seed=seed, group_size=group_size
    )
    report, kept = make(opened, target_of(out), scheme, rules, limit=limit)
    if not kept:
        assert report.held_out is not None
        raise ConfigError(
            f"{scheme} raises the loss on held-out text by {report.held_out.increase:.3%}, to "
            f"{report.held_out.loss:.4f} nats per token, and max_loss={max_loss}; nothing was "
            "written: allow more, take more bits, or have them chosen (--search)"
        )
    return report


def parse_share(max_loss: str) -> float:
    """The share of the loss that `0.5%` is.

    Raises:
      ConfigError: for anything else.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*%", max_loss.strip())
    if match is None:
        raise ConfigError(
            f"max_loss={max_loss!r} must be a share of the float model's loss in nats per token, "
            "such as 0.5%"
        )
    return float(match[1]) / 100


def target_of(out: str | Path) -> Path:
    """The directory to make."""
    return Path(out).expanduser().resolve()


def write(
    work: Work, source: Source, leaves: Sequence[Leaf], values: Mapping[str, Any]
) -> StoredModel:
    """Write all leaves and config.json, and open what was written."""
    largest, rotations = find_largest(leaves), None
    if any(leaf.scheme and leaf.scheme.rotates for leaf in leaves):
        rotations = find_rotations(source.stored.model.config, leaves, source.seed)
    if any(leaf.scheme and leaf.scheme.needs_text for leaf in leaves):
        assert source.rows is not None
        rows_NT = source.rows.calibration_NT
        write_layers(work, source.stored, leaves, rows_NT, values, largest)
    for leaf in leaves:
        if leaf.tensor.name not in work.notes:
            made = convert(leaf, largest=largest, rotations=rotations)
            work.add(leaf.tensor.name, *made)
    work.flush()
    work.write_index()
    work.write_json("config.json", values)
    return open_pretrained(work.folder, dtype=_FLOAT32)


def find_all_roundings(leaves: Sequence[Leaf], notes: Mapping[str, Mapping[str, Any]]) -> Roundings:
    """How inputs of products are rounded, from what was noted of each leaf."""
    return {
        layer: find_roundings([leaf for leaf in leaves if leaf.layer == layer], notes)
        for layer in {leaf.layer for leaf in leaves}
    }


def open_work(
    source: Source, target: Path, scheme: str, rules: Sequence[str], leaves: Sequence[Leaf]
) -> Work:
    """The folder in which `target` is written.

    Raises:
      ConfigError: when the largest tensor needs more memory than the machine has free.
      CheckpointError: see `quantize`.
    """
    largest = max(leaves, key=lambda leaf: leaf.bytes)
    needed, free = _COPIES * largest.bytes + _LEAST_FILE, available_memory()
    if free is not None and needed > free:
        raise ConfigError(
            f"{largest.tensor.name}, the largest tensor, needs about {needed / 2**30:.1f} GiB to "
            f"be quantized, and this machine has {free / 2**30:.1f} GiB of memory free; close "
            "other programs, or take a machine with more"
        )
    plan = {**source.plan(), "scheme": scheme, "rules": list(rules)}
    return Work(target, plan, max(_LEAST_FILE, *(leaf.bytes for leaf in leaves)))


def make(
    source: Source,
    target: Path,
    scheme: str,
    rules: Sequence[str],
    *,
    limit: float | None = None,
    search: Mapping[str, Any] | None = None,
    finish: Callable[[Report, Path], None] | None = None,
) -> tuple[Report, bool]:
    """Write, read back and compare; commit unless the loss on held-out text rises too far.

    Args:
      source: the float model.
      target: the directory to make.
      scheme: see `quantize`.
      rules: see `quantize`.
      limit: what the loss may rise by at most, as a share of it.
      search: what the report says of how the rules were found.
      finish: given the report and the folder before it takes its place.

    Returns:
      The report, and whether it was committed.

    Raises:
      ConfigError, CheckpointError: see `quantize`.
    """
    leaves = source.assigned(scheme, rules)
    rows = source.rows
    groups = (x.scheme.group for x in leaves if x.scheme and x.scheme.layout == "pack-quantized")
    samples, length = (None, None) if rows is None else rows.calibration_NT.shape
    with open_work(source, target, scheme, rules, leaves) as work:
        read = write(work, source, leaves, config_of(read_config(source.folder), leaves))
        errors = _errors(source.stored, read, leaves, work.notes)
        held_out = None
        if rows is not None:
            roundings = find_all_roundings(leaves, work.notes)
            held_out = compare(
                run_rows(source.stored, rows.held_out_NT),
                run_rows(read, rows.held_out_NT, roundings),
            )
        report = Report(
            source=source.name,
            scheme=scheme,
            rules=tuple(rules),
            group_size=next(groups, None),
            data=source.data,
            samples=samples,
            length=length,
            seed=source.seed,
            quantized={
                leaf.tensor.name: {
                    "scheme": leaf.scheme.name,
                    **work.notes[leaf.tensor.name],
                    "error": errors[leaf.tensor.name],
                }
                for leaf in leaves
                if leaf.scheme is not None
            },
            kept={
                leaf.tensor.name: f"{leaf.reason}; scaled or rotated with the weights"
                if work.notes[leaf.tensor.name]["scaled"]
                else leaf.reason
                for leaf in leaves
                if leaf.scheme is None
            },
            bytes_before=sum(leaf.bytes for leaf in leaves),
            bytes_after=work.bytes,
            text_sha256=None if rows is None else rows.sha256,
            held_out=held_out,
            search=search,
        )
        if limit is not None and (held_out is None or held_out.increase > limit):
            return report, False
        work.write_json("quantization_report.json", dataclasses.asdict(report))
        if finish is not None:
            finish(report, work.folder)
        work.commit(_beside(source.folder))
    return report, True


def _errors(
    stored: StoredModel,
    read: StoredModel,
    leaves: Sequence[Leaf],
    notes: Mapping[str, Mapping[str, Any]],
) -> dict[str, float | None]:
    """By name of a quantized tensor; see `weight_error`. None where its inputs or outputs are
    scaled."""
    tensors = {}
    for path, layers in read.blocks.items():
        for index, sources in layers.items():
            names = [tensor.name for tensor, _ in stored.blocks[path][index]]
            names = names * (len(sources) // len(names))  # where one is read as one of each expert
            for name, (tensor, block) in zip(names, sources, strict=True):
                tensors[name, path, block.slot.expert] = tensor

    def pairs(leaf: Leaf) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        name, values = leaf.tensor.name, leaf.tensor.view()
        if leaf.scheme is not None and leaf.scheme.layout == "gpt-oss":
            yield from zip(values, tensors[name, leaf.parameter, None].view(), strict=True)
            return
        for _, path, expert, w_OI in leaf.matrices(values):
            yield w_OI, tensors[name, path, expert].view()

    return {
        leaf.tensor.name: None
        if notes[leaf.tensor.name]["scaled"]
        else weight_error(
            leaf.tensor,
            pairs(leaf),
            nearest=notes[leaf.tensor.name]["method"] == "rounding",
        )
        for leaf in leaves
        if leaf.scheme is not None
    }


def _beside(folder: Path) -> list[Path]:
    """Files to copy: the tokenizer's, and what is said of the model."""
    return [
        file
        for file in sorted(folder.iterdir())
        if file.is_file()
        and (file.suffix in _COPIED or file.name == "LICENSE")
        and file.name not in _MADE
        and not file.name.startswith(".")
    ]


def _identity(file: Path) -> list[object]:
    stat = file.stat()
    return [file.name, stat.st_size, stat.st_mtime_ns]
