"""The search for rules: which matrices bear fewer bits, measured, as far as the loss may rise.

Each group of matrices (`mixes`) is quantized alone by each scheme, the rest in floats,
and the divergence (KL) of the predictions is measured. From these figures come mixes of all sizes
(`frontier`); some are then written and measured as they are, and the smallest whose loss rises by
no more than allowed is kept. Text for this is neither that of calibration nor that of the
verification at the end.
"""

import dataclasses
import logging
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from safetensors.numpy import save_file

from fornax.config.errors import ConfigError
from fornax.models import Activations, LayerByLayer, read_config
from fornax.models.layers import DecoderLayer
from fornax.quant.frontier import Mix, Option, frontier
from fornax.quant.inputs import RoundedInputs, find_roundings
from fornax.quant.layers import (
    convert,
    enough,
    find_largest,
    find_layer_folds,
    folded,
    read_back,
    see,
)
from fornax.quant.leaves import Leaf, check_group_size
from fornax.quant.mixes import Group, find_groups, rules_of
from fornax.quant.run import (
    Report,
    Source,
    find_all_roundings,
    make,
    open_source,
    open_work,
    parse_share,
    target_of,
    write,
)
from fornax.quant.schemes import scheme_named
from fornax.quant.statistics import Found
from fornax.quant.tensors import config_of
from fornax.quant.verify import HeldOut, Run, batches, compare, run_rows
from fornax.quant.work import Folder

__all__ = ["CANDIDATES", "Point", "Search", "search"]

CANDIDATES = ("w8a16", "w4a16-gptq", "w3a16-gptq")
"""Schemes that are tried where none are named."""
_MEASURED = 4
"""Equal parts of the frontier at whose ends a mix is measured, beside those that the choice asks
for."""
_log = logging.getLogger("fornax.quant")


@dataclass(frozen=True, kw_only=True)
class Point:
    """A mix of schemes."""

    step: int | None
    """Its place on the frontier, 0 the float model; None: one scheme everywhere."""
    bytes: int
    """Of all tensors; of a mix that was not written by the sizes of its groups."""
    expected_kl: float
    """The sum of what its groups cost alone, nats per token."""
    scheme: str | None = None
    """With `rules` what makes it; None where all stays floats."""
    rules: tuple[str, ...] = ()
    measured: HeldOut | None = None
    """On the rows to choose by; None where it was not."""


@dataclass(frozen=True, kw_only=True)
class Search:
    """What was measured, and what was chosen."""

    max_loss: str
    schemes: tuple[str, ...]
    options: tuple[Option, ...]
    """Each group by each scheme, alone."""
    frontier: tuple[Point, ...]
    """From the float model to the smallest mix."""
    uniform: tuple[Point, ...]
    """Each scheme for all groups."""
    chosen: int
    """Step of the frontier."""
    gone_back: tuple[tuple[int, float], ...]
    """Steps whose loss rose too far on the rows of the verification, and by what share."""


@dataclass(frozen=True, kw_only=True)
class _Job:
    """What a search measures with."""

    source: Source
    groups: Mapping[str, Group]
    rules: tuple[str, ...]
    """The user's."""
    reference: Run
    """The float model on the rows to choose by."""
    folder: Folder


def search(
    source: str | Path,
    out: str | Path,
    *,
    max_loss: str,
    data: str,
    schemes: Sequence[str] = CANDIDATES,
    rules: Sequence[str] = (),
    group_size: int | None = None,
    samples: int = 128,
    length: int = 512,
    seed: int = 0,
    finish: Callable[[Report, Path], None] | None = None,
) -> Report:
    """Find rules, and write the directory that they make.

    A killed search resumes with what it has measured when it is called again with the same
    arguments. Beside what `quantize` takes, memory is that of the rows between two layers, for each
    scheme and group of a layer.

    Args:
      source: see `quantize`, as are `out`, `data`, `group_size`, `samples`, `length` and `seed`.
      max_loss: what the loss may rise by at most, such as "0.5%" of the float model's in nats per
        token.
      schemes: to choose from; groups may stay floats too.
      rules: for matrices whose scheme is not searched.
      finish: given the report and the folder before it takes its place, to add files.

    Returns:
      The report of what was written; `report.search` is `Search` as JSON.

    Raises:
      ConfigError: beside `quantize`'s, a `max_loss` that no mix keeps within.
      CheckpointError, DataError: see `quantize`.
    """
    limit, schemes, rules = parse_share(max_loss), tuple(dict.fromkeys(schemes)), tuple(rules)
    target = target_of(out)
    check_group_size(group_size, schemes, rules)
    rotating = [name for name in schemes if scheme_named(name).rotates]
    if rotating:
        raise ConfigError(
            f"{rotating[0]} rotates the whole model, so that groups of matrices cannot be tried "
            "alone; leave it out of the schemes to choose from"
        )
    opened = open_source(
        source,
        data,
        samples=samples,
        length=length,
        seed=seed,
        group_size=group_size,
        choice=True,
    )
    assert opened.rows is not None
    groups = find_groups(opened, schemes, rules)
    plan = {**opened.plan(), "rules": rules, "choice": len(opened.rows.choice_NT)}
    folder = Folder(target, "searching", plan)
    try:
        reference = run_rows(opened.stored, opened.rows.choice_NT)
        job = _Job(source=opened, groups=groups, rules=rules, reference=reference, folder=folder)
        options = _measure_options(job)
        path = frontier(options)
        if len(path) == 1:
            raise ConfigError(
                f"the schemes {', '.join(schemes)} make none of the model's matrices smaller than "
                "it is; name others"
            )
        measured: dict[int, Point] = {}

        def at(step: int) -> Point:
            if step not in measured:
                measured[step] = _measure(job, path[step], step)
            return measured[step]

        chosen = _furthest(len(path) - 1, lambda step: _rise(at(step)) <= limit)
        for part in range(1, _MEASURED + 1):
            if (step := (len(path) - 1) * part // _MEASURED) > 0:
                at(step)
        mixes = [_uniform([each for each in options if each.scheme == name]) for name in schemes]
        uniform = tuple(_measure(job, mix) for mix in mixes)
        total = sum(leaf.bytes for leaf in opened.leaves)

        def found(step: int, gone_back: tuple[tuple[int, float], ...]) -> Search:
            points = (
                measured.get(number) or Point(step=number, bytes=total - x.saved, expected_kl=x.kl)
                for number, x in enumerate(path)
            )
            return Search(
                max_loss=max_loss,
                schemes=schemes,
                options=tuple(options),
                frontier=tuple(points),
                uniform=uniform,
                chosen=step,
                gone_back=gone_back,
            )

        report = _write(job, target, chosen, limit, at, found, finish)
        shutil.rmtree(folder.path)
    finally:
        folder.close()
    return report


def _rise(point: Point) -> float:
    """By what share the loss rises: as measured, or as it would where text is as the float model
    has it. Of a thousand tokens that is the steadier figure: it has no noise of single tokens."""
    held = point.measured
    assert held is not None
    return max(held.increase, held.kl / held.float_loss)


def _furthest(last: int, within: Callable[[int], bool]) -> int:
    """The last step within the limit, where each step before one within it is too; 0 for none."""
    if within(last):
        return last
    low, high = 0, last
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if within(middle) else (low, middle)
    return low


def _uniform(options: Sequence[Option]) -> Mix:
    """The mix of these options, one of each group."""
    return Mix(
        schemes={each.group: each.scheme for each in options},
        saved=sum(each.saved for each in options),
        kl=sum(each.kl for each in options),
    )


def _write(
    job: _Job,
    target: Path,
    step: int,
    limit: float,
    at: Callable[[int], Point],
    found: Callable[[int, tuple[tuple[int, float], ...]], Search],
    finish: Callable[[Report, Path], None] | None,
) -> Report:
    """Write the chosen mix, or where its loss rises too far one before it, at first the nearest.

    Raises:
      ConfigError: when none keeps within the limit.
    """
    back, gone_back = 1, ()
    while step > 0:
        point = at(step)
        assert point.scheme is not None
        search = found(step, gone_back)
        report, kept = make(
            job.source,
            target,
            point.scheme,
            point.rules,
            limit=limit,
            search=dataclasses.asdict(search),
            finish=finish,
        )
        if kept:
            return report
        assert report.held_out is not None
        rise = report.held_out.increase
        gone_back = (*gone_back, (step, rise))
        before = 0 if step == 1 else max(1, step - back)
        _log.warning(
            "on the rows of the verification step %d raises the loss by %.3f%%, more than %s; "
            "going back to step %d",
            step,
            100 * rise,
            search.max_loss,
            before,
        )
        step, back = before, 2 * back
    if gone_back:
        number, least = min(gone_back, key=lambda each: each[1])
        point = at(number)
    else:
        point = min((at(1), *found(1, ()).uniform), key=_rise)
        least = _rise(point)
    rules = " ".join(f"'{rule}'" for rule in point.rules) or "none"
    raise ConfigError(
        f"max_loss={found(0, ()).max_loss} cannot be reached: the least that was found is "
        f"{least:.4%}, in {point.bytes / 1e6:,.2f} MB, by scheme {point.scheme} with rules "
        f"{rules}; allow more, or add schemes of more bits"
    )


def _measure(job: _Job, mix: Mix, step: int | None = None) -> Point:
    """Write a mix into the folder, compare it on the rows to choose by, and delete it."""
    source = job.source
    assert source.rows is not None
    scheme, rules = rules_of(source, job.groups, mix.schemes, job.rules)
    name = [scheme, *rules]
    known = next((each for each in job.folder.records if each.get("mix") == name), None)
    if known is not None:
        size, held = known["bytes"], HeldOut(**known["measured"])
    else:
        leaves = source.assigned(scheme, rules)
        with open_work(source, job.folder.path / "mix", scheme, rules, leaves) as work:
            read = write(work, source, leaves, config_of(read_config(source.folder), leaves))
            roundings = find_all_roundings(leaves, work.notes)
            run = run_rows(read, source.rows.choice_NT, roundings)
            size, held = work.bytes, compare(job.reference, run)
        shutil.rmtree(work.folder)
        job.folder.note({"mix": name, "bytes": size, "measured": dataclasses.asdict(held)})
        _log.info(
            "%s: %.2f MB, KL %.5f, loss %+.3f%%",
            scheme if step is None else f"step {step}",
            size / 1e6,
            held.kl,
            100 * held.increase,
        )
    return Point(
        step=step, bytes=size, expected_kl=mix.kl, scheme=scheme, rules=rules, measured=held
    )


def _measure_options(job: _Job) -> list[Option]:
    """Each group by each of its schemes alone, layer by layer."""
    rows, fields = job.source.rows, ("group", "scheme", "saved", "kl")
    assert rows is not None
    done = {
        (each["group"], each["scheme"]): Option(**{name: each[name] for name in fields})
        for each in job.folder.records
        if "group" in each
    }
    wanted = [(group, scheme) for group in job.groups.values() for scheme in group.leaves]
    left = [(group, scheme) for group, scheme in wanted if (group.name, scheme) not in done]
    model = LayerByLayer(job.source.stored)
    before = [model.embed(tokens_BT) for tokens_BT in job.reference.tokens]
    by_text = any(
        leaf.scheme and leaf.scheme.needs_text
        for group, scheme in left
        for leaf in group.leaves[scheme]
    )
    text = [model.embed(x) for x in batches(rows.calibration_NT)] if by_text else []
    for index in range(max((group.layer + 1 for group, _ in left), default=0)):
        own = [(group, scheme) for group, scheme in left if group.layer == index]
        for option in _measure_layer(job, model, index, own, before, text) if own else ():
            done[option.group, option.scheme] = option
            job.folder.note(dataclasses.asdict(option))
            _log.info("%s in %s alone: KL %.6f", option.group, option.scheme, option.kl)
        layer = model.layer(index)
        before, text = ([model.run(layer, index, x) for x in each] for each in (before, text))
    return [done[group.name, scheme] for group, scheme in wanted]


def _measure_layer(
    job: _Job,
    model: LayerByLayer,
    index: int,
    wanted: Sequence[tuple[Group, str]],
    before: Sequence[Activations],
    text: Sequence[Activations],
) -> list[Option]:
    """Groups of one layer; the layers behind it are read once for all of them."""
    leaves = [leaf for group, scheme in wanted for leaf in group.leaves[scheme]]
    seen = see(model, index, leaves, text)
    saved, runs = [], []
    for group, scheme in wanted:
        layer, roundings, bytes_saved = _quantized(job, model, index, group.leaves[scheme], seen)
        saved.append(bytes_saved)
        runs.append([model.run(layer, index, each, roundings) for each in before])
    for later in range(index + 1, len(model.kinds)):
        layer = model.layer(later)
        runs = [[model.run(layer, later, each) for each in run] for run in runs]
    reference = job.reference
    return [
        Option(
            group=group.name,
            scheme=scheme,
            saved=own,
            kl=compare(reference, Run(reference.model, reference.tokens, run)).kl,
        )
        for (group, scheme), own, run in zip(wanted, saved, runs, strict=True)
    ]


def _quantized(
    job: _Job, model: LayerByLayer, index: int, leaves: Sequence[Leaf], seen: Found
) -> tuple[DecoderLayer, Mapping[str, RoundedInputs], int]:
    """A layer with some leaves quantized, through a file as the reader finds it, how inputs are
    rounded, and the bytes that they save."""
    chosen = {leaf.tensor.name: leaf for leaf in leaves}
    own = [chosen.get(x.tensor.name, x) for x in job.source.leaves if x.layer == index]
    folds = find_layer_folds(model, index, own, enough(seen))
    largest, tensors, notes, saved = find_largest(own), {}, {}, 0
    for leaf in own:
        if leaf.scheme is not None or folded(leaf, leaf.tensor.view(), folds) is not None:
            made, notes[leaf.tensor.name] = convert(leaf, seen, folds, largest)
            saved += leaf.bytes - sum(tensor.nbytes for tensor in made.values())
            tensors |= made
    config = config_of(read_config(job.source.folder), own)
    with tempfile.TemporaryDirectory(dir=job.folder.path) as place:
        file = Path(place) / "layer.safetensors"
        save_file(tensors, file)
        layer = model.layer(index, read_back([file], job.source.stored, own, config))
    return layer, find_roundings(own, notes), saved
