"""A plan beside a capture of the same program: each class and operation, planned and measured.

An operation's measured time is the least over the captured steps, as in
`fornax.profile.compare`; figures are of one chip and one step. From the two the shares of the
chip's rates that programs reach are fitted, and kept in a file that plans take.
"""

import dataclasses
import json
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from fornax.config.errors import ConfigError
from fornax.config.files import write_whole
from fornax.hlo import Calibration, Rates, Timed, calibration_of
from fornax.mesh.hardware import Chip
from fornax.plan.facts import Plan
from fornax.profile import Operation, Profile
from fornax.profile.compare import Sampled, least_seconds, sample

__all__ = [
    "Beside",
    "BesideRow",
    "beside",
    "calibrated",
    "fit",
    "read_calibration",
    "write_calibration",
]

_FORMAT = 1
_KERNELS = ("attention", "kernel")
_PRODUCT_CLASSES = ("mlp", "attention_projections", "experts", "logits_loss", "matmul")
_TINY = 1e-7
"""Seconds: an operation whose roofline is below takes the least time that any takes."""
_LEAST_FITTED = 3
"""Operations that a share is fitted from."""
_ALIKE = 0.1
"""Share by which the FLOPs of one program may differ between plan and capture."""

_FILES = (
    ("optimizer", ("fornax/optim/", "fornax/train/step.py", "fornax/train/guard.py")),
    ("embedding", ("fornax/models/embed",)),
    ("logits_loss", ("fornax/train/tasks/", "fornax/tune/", "cross_entropy")),
    ("experts", ("fornax/models/experts", "fornax/models/moe")),
    ("mlp", ("fornax/models/mlp",)),
    ("linear_attention", ("gated_delta", "mamba")),
    ("attention_projections", ("fornax/models/attention", "fornax/models/latent")),
)
"""Class of closed forms to where its products are asked for."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class BesideRow:
    """A class or an operation; seconds are of a step."""

    name: str
    source: str
    planned_seconds: float | None
    """None for what the plan does not have."""
    measured_seconds: float | None
    """None for what did not run."""
    flops: float
    """Of a step as it ran; of the plan where it did not run."""
    bytes: float

    @property
    def ratio(self) -> float | None:
        """Measured over planned."""
        if not self.planned_seconds or self.measured_seconds is None:
            return None
        return self.measured_seconds / self.planned_seconds


@dataclasses.dataclass(frozen=True, kw_only=True)
class Beside:
    """A plan and a capture."""

    capture: str
    steps: int
    planned_seconds: float
    """Of a step."""
    measured_seconds: float
    """Median wall time of the captured steps after warm-up."""
    busy_seconds: float
    """Of those, operations of one chip: the sum of `classes`."""
    planned_flops: float
    measured_flops: float
    classes: tuple[BesideRow, ...]
    operations: tuple[BesideRow, ...]
    """Each operation that ran, beside its roofline at the shares that the plan assumes."""
    notes: tuple[str, ...]


def beside(plan: Plan, profile: Profile, chip: Chip) -> Beside:
    """Join a plan with a capture.

    Args:
      plan: of the run that was captured.
      profile: of some steps of it.
      chip: that the plan is for.

    Raises:
      ConfigError: the capture is of another kind of device.
      ProfileError: it has too few steps.
    """
    if profile.info.platform != chip.platform:
        raise ConfigError(
            f"the capture {profile.info.folder} is of a {profile.info.platform.upper()} and the "
            f"plan is for {plan.hardware.topology}; plan for the chips that ran it: --topology"
        )
    samples = sample(profile)
    chips = max(1.0, profile.info.devices / chip.devices)
    classes = _classes(plan, samples.operations, chips)
    operations = _operations(samples.operations, chip, chips)
    walls = [step.seconds for step in profile.steps][samples.warm_up :]
    main = plan.main
    flops = sum(row.flops for row in operations)
    notes = []
    if abs(flops / main.flops - 1) > _ALIKE if main.flops else False:
        notes.append(
            f"the plan has {main.flops:.3g} FLOPs of products a step and the program that ran "
            f"{flops:.3g}: is the plan of the config that was captured?"
        )
    return Beside(
        capture=profile.info.folder,
        steps=samples.steps,
        planned_seconds=main.step_seconds,
        measured_seconds=statistics.median(walls),
        busy_seconds=math.fsum(row.measured_seconds or 0.0 for row in classes),
        planned_flops=main.flops,
        measured_flops=flops,
        classes=classes,
        operations=operations,
        notes=tuple(notes),
    )


def _classes(plan: Plan, sampled: Sequence[Sampled], chips: float) -> tuple[BesideRow, ...]:
    """Classes of the plan, then those that it has not."""
    known = [row.name for row in plan.main.work]
    of_compiler = plan.origin == "compiled"
    measured: dict[str, list[Sampled]] = {}
    for one in sampled:
        name = one.operation.category if of_compiler else _class_of(one.operation)
        if name not in known and name != "exchange" and not of_compiler:
            name = "norms_elementwise"
        measured.setdefault(name, []).append(one)
    planned = {row.name: (row.seconds, row.flops, row.bytes) for row in plan.main.work}
    if plan.main.collectives:
        seconds = math.fsum(one.seconds for one in plan.main.collectives)
        planned["exchange"] = (seconds, 0.0, float(sum(c.moved for c in plan.main.collectives)))
    rows = []
    for name in dict.fromkeys((*planned, *measured)):
        ran = measured.get(name, ())
        expected = planned.get(name)
        rows.append(
            BesideRow(
                name=name,
                source="",
                planned_seconds=expected[0] if expected else None,
                measured_seconds=_seconds(ran) / chips if ran else None,
                flops=_work(ran, "flops") / chips if ran else planned[name][1],
                bytes=_work(ran, "bytes") / chips if ran else planned[name][2],
            )
        )
    return tuple(sorted(rows, key=lambda row: -(row.measured_seconds or 0.0)))


def _class_of(operation: Operation) -> str:
    """The class of closed forms that an operation of a training step belongs to."""
    where = operation.source
    place = next((name for name, files in _FILES if any(file in where for file in files)), "")
    if operation.category == "exchange":
        return "exchange"
    if operation.category == "attention":
        return "attention"
    if place in ("optimizer", "embedding", "logits_loss", "linear_attention"):
        return place
    return place if operation.category in ("matmul", "kernel") and place else "norms_elementwise"


def _seconds(sampled: Iterable[Sampled]) -> float:
    return math.fsum(least_seconds(one) for one in sampled)


def _work(sampled: Iterable[Sampled], figure: str) -> float:
    return math.fsum(
        getattr(one.operation, figure) * one.runs
        for one in sampled
        if figure == "bytes" or one.operation.category in ("matmul", *_KERNELS)
    )


def _operations(sampled: Sequence[Sampled], chip: Chip, chips: float) -> tuple[BesideRow, ...]:
    rates = Rates(chip=chip, calibration=calibration_of(chip))
    rows = [
        BesideRow(
            name=one.operation.name,
            source=one.operation.source,
            planned_seconds=expected.seconds * one.runs / chips if expected else None,
            measured_seconds=least_seconds(one) / chips,
            flops=_work([one], "flops") / chips,
            bytes=_work([one], "bytes") / chips,
        )
        for one, expected in ((one, _expected(one.operation, rates)) for one in sampled)
    ]
    return tuple(sorted(rows, key=lambda row: -(row.measured_seconds or 0.0)))


def _expected(operation: Operation, rates: Rates) -> Timed | None:
    """The roofline of one run at the shares that the plan assumes; None for an exchange."""
    if operation.category == "exchange":
        return None
    compute, memory = _roofline(operation, rates.chip)
    kernel = operation.category in _KERNELS
    share = rates.calibration.attention if kernel else rates.calibration.matmul
    return Timed(compute / share, memory / rates.calibration.memory, rates.calibration.overhead)


def _roofline(operation: Operation, chip: Chip) -> tuple[float, float]:
    """Seconds of one run's products, and of its traffic, at the chip's rates."""
    product = operation.category in ("matmul", *_KERNELS)
    peak, memory = chip.peak(operation.dtype) / chip.devices, chip.memory_bandwidth / chip.devices
    return (operation.flops / peak if product else 0.0), operation.bytes / memory


def fit(plan: Plan, profile: Profile, chip: Chip) -> Calibration:
    """The shares of the chip's rates that the captured program reached.

    Closed forms see less work than the compiler made, so a plan of theirs is fitted class by class
    on its own figures: `matmul_estimated`, `attention` and `memory`. A compiled plan is fitted on
    operations: `matmul` and `attention` on those that arithmetic bounds, `memory` on the others. In
    both, operations that do almost nothing give `overhead`. A share that nothing measured stays
    as it is; the source names those that were fitted.

    Raises:
      ConfigError: the capture is of another kind of device, or no share can be fitted from it.
      ProfileError: it has too few steps.
    """
    joined = beside(plan, profile, chip)
    pairs, least = _pairs(profile, chip)
    if plan.origin == "predicted":
        pairs = {"matmul": pairs.get("matmul", []), **_class_pairs(plan, joined)}
    found = {
        name: math.fsum(ideal for ideal, _ in of) / math.fsum(took for _, took in of)
        for name, of in pairs.items()
        if of
    }
    if len(least) >= _LEAST_FITTED:
        found["overhead"] = statistics.median(least)
    if not found:
        raise ConfigError(
            f"no operation of the capture {profile.info.folder} has work that a share could be "
            "fitted from; capture a step of a model with products"
        )
    rounded = {name: float(f"{value:.4g}") for name, value in found.items()}
    source = (
        f"{', '.join(sorted(found))}: {joined.steps} steps of {plan.name} on "
        f"{plan.hardware.topology}, capture {joined.capture}"
    )
    return dataclasses.replace(calibration_of(chip), **rounded, source=source)


_Pairs = dict[str, list[tuple[float, float]]]
"""Share -> (seconds at the chip's own rates, seconds measured) of what it is fitted on."""


def _pairs(profile: Profile, chip: Chip) -> tuple[_Pairs, list[float]]:
    """Of operations; and what those take that do almost nothing."""
    found: _Pairs = {}
    least = []
    for one in sample(profile).operations:
        if not one.runs or one.operation.category == "exchange":
            continue
        took = least_seconds(one)
        compute, memory = _roofline(one.operation, chip)
        if max(compute, memory) < _TINY:
            least.append(took / one.runs)
        elif compute >= memory:
            name = "attention" if one.operation.category in _KERNELS else "matmul"
            found.setdefault(name, []).append((compute * one.runs, took))
        else:
            found.setdefault("memory", []).append((memory * one.runs, took))
    return found, least


def _class_pairs(plan: Plan, joined: Beside) -> _Pairs:
    """Of the plan's classes, by its own FLOPs and bytes of one chip."""
    took = {row.name: row.measured_seconds for row in joined.classes}
    found: _Pairs = {}
    for row in plan.main.work:
        seconds = took.get(row.name)
        if not seconds:
            continue
        compute = row.flops / plan.hardware.peak_flops
        memory = row.bytes / plan.hardware.memory_bandwidth
        if row.name in _PRODUCT_CLASSES:
            found.setdefault("matmul_estimated", []).append((compute, seconds))
        elif row.name == "attention":
            found.setdefault("attention", []).append((compute, seconds))
        else:
            found.setdefault("memory", []).append((memory, seconds))
    return found


def write_calibration(calibration: Calibration, chip: Chip, path: Path) -> Path:
    """Write the shares as a file that `read_calibration` takes.

    Raises:
      ConfigError: it cannot be written.
    """
    values = {k: v for k, v in dataclasses.asdict(calibration).items() if v is not None}
    source = values.pop("source")
    found = {"format": _FORMAT, "chip": chip.name, "source": source, "shares": values}
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, json.dumps(found, indent=1) + "\n")
    except OSError as error:
        raise ConfigError(
            f"cannot write the calibration to {path}: {error.strerror or error}; name another file"
        ) from error
    return path


def read_calibration(path: Path) -> tuple[str, Mapping[str, float], str]:
    """The chip of a file that `write_calibration` wrote, its shares, and what it was fitted on.

    Raises:
      ConfigError: it is none.
    """
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        if found["format"] != _FORMAT:
            raise ValueError(f"format {found['format']}")
        shares = {str(name): value for name, value in found["shares"].items()}
        chip, source = str(found["chip"]), str(found["source"])
    except OSError as error:
        raise ConfigError(
            f"cannot read the calibration {path}: {error.strerror or error}; name a file that "
            "fornax plan --fit wrote"
        ) from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"{path} is not a calibration of format {_FORMAT} ({error}); name a file that fornax "
            "plan --fit wrote"
        ) from error
    known = {field.name for field in dataclasses.fields(Calibration)} - {"source"}
    wrong = [
        name
        for name, value in shares.items()
        if name not in known or not (isinstance(value, (int, float)) and 0 < value < math.inf)
    ]
    if wrong:
        raise ConfigError(
            f"{path}: shares.{wrong[0]} is {shares[wrong[0]]!r}; use a number above 0 for one of "
            f"{', '.join(sorted(known))}"
        )
    return chip, shares, source


def calibrated(chip: Chip, path: Path) -> Chip:
    """The chip with the shares of a file.

    Raises:
      ConfigError: the file is not a calibration, or one of another chip.
    """
    name, shares, source = read_calibration(path)
    if name != chip.name:
        raise ConfigError(
            f"{path} was fitted on {name} and the plan is for {chip.name}; name a calibration of "
            f"{chip.name}, or another --topology"
        )
    return dataclasses.replace(
        chip, shares=shares, sources={**chip.sources, "shares": f"{source} ({path})"}
    )
