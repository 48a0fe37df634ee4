"""All checks that a run's method needs, in order, each with its verdict and its time."""

import functools
import gc
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from fornax.config.errors import ConfigError
from fornax.mesh import initialize
from fornax.train.task import Hosts, Task
from fornax.tune.config import TuneConfig
from fornax.tune.doctor import data_checks, model_checks, rollout_checks
from fornax.tune.doctor.findings import Finding, Outcome
from fornax.tune.doctor.gradients import Gradients
from fornax.tune.doctor.patient import Patient, Rows
from fornax.tune.doctor.rollouts import MakeParts, Rollouts, with_old
from fornax.tune.doctor.small import small_config
from fornax.tune.methods import method_of
from fornax.tune.policy import Origin, read_origin
from fornax.tune.rl.config import RLConfig
from fornax.tune.rl.parts import make_parts

__all__ = ["admit", "consult", "examine"]

Check = tuple[str, Callable[[], Outcome]]


def examine(
    config: TuneConfig,
    origin: Origin,
    *,
    parts: MakeParts = make_parts,
    only: Sequence[str] | None = None,
) -> list[Finding]:
    """Look at a run before it starts, by a small run of its config over its first records.

    Nothing of the run's directory is read or written.

    Args:
      config: the run; `steps` may be null.
      origin: its model.
      parts: what a run of reinforcement works with.
      only: names of checks; None: all.

    Raises:
      FornaxError: what keeps even the small run from being made.
    """
    with tempfile.TemporaryDirectory(prefix="fornax-doctor-") as folder:
        with _of(config, origin, parts, Path(folder)) as checks:
            found = [_timed(*check) for check in checks if only is None or check[0] in only]
        del checks
    gc.collect()  # the small run's weights, before the run loads its own
    return found


def admit(config: TuneConfig, origin: Origin, say: Callable[[str], None]) -> list[Finding]:
    """Examine a run; say what was found.

    Raises:
      ConfigError: a paragraph for each check that failed.
    """
    findings = examine(config, origin)
    wrong = [finding for finding in findings if finding.outcome.verdict == "fail"]
    if wrong:
        listed = "\n\n".join(
            f"({number}) {finding.check}: {finding.outcome.text}."
            for number, finding in enumerate(wrong, 1)
        )
        raise ConfigError(
            f"the doctor refuses to start this run, for {len(wrong)} of its {len(findings)} checks "
            f"failed.\n\n{listed}\n\n`fornax tune doctor {method_of(config).name}` with the same "
            "flags lists what passed; --no-doctor starts the run anyway"
        )
    seconds = sum(finding.seconds for finding in findings)
    looked = sum(finding.outcome.verdict == "pass" for finding in findings)
    say(f"the doctor found nothing wrong: {looked} checks in {seconds:.1f} s")
    return findings


def _timed(name: str, check: Callable[[], Outcome]) -> Finding:
    began = time.monotonic()
    outcome = check()
    return Finding(check=name, outcome=outcome, seconds=time.monotonic() - began)


@contextmanager
def _of(
    config: TuneConfig, origin: Origin, parts: MakeParts, folder: Path
) -> Iterator[list[Check]]:
    """The checks of a method, in an order that asks for the dearest parts last."""
    small = small_config(config, folder)
    patient = Patient(
        run=config, config=small, origin=origin, make=method_of(config).make(), folder=folder
    )
    data: list[Check] = [
        ("template", lambda: data_checks.template(patient)),
        ("one beginning", lambda: data_checks.beginnings(patient)),
    ]
    if not isinstance(small, RLConfig):
        yield data + _of_rows(patient)
        return
    rollouts = Rollouts(patient=patient, make_parts=parts)
    patient.make = rollouts.task
    try:
        yield data + _of_rollouts(patient, rollouts, small.rollout.temperature)
    finally:
        rollouts.close()


def _of_rows(patient: Patient) -> list[Check]:
    return [
        ("end is learned", lambda: data_checks.end_is_learned(patient)),
        *_of_model(
            patient,
            lambda: patient.rows,
            lambda: model_checks.reference(patient, patient.rows, {}),
        ),
    ]


def _of_rollouts(patient: Patient, rollouts: Rollouts, temperature: float) -> list[Check]:
    other = 0.6 if temperature >= 0.8 else 1.2

    def reference() -> Outcome:
        drawn = rollouts.rounds[0]
        return model_checks.reference(patient, with_old(drawn.steps[0]), drawn.numbers)

    return [
        ("truncation", lambda: rollout_checks.not_all_truncated(rollouts)),
        ("rewards vary", lambda: rollout_checks.rewards_vary(rollouts)),
        ("groups differ", lambda: rollout_checks.groups_differ(rollouts)),
        ("steps differ", lambda: rollout_checks.steps_differ(rollouts)),
        ("seeds repeat", lambda: rollout_checks.repeats_per_seed(rollouts)),
        (
            "end is learned",
            lambda: rollout_checks.drawn_end_is_learned(rollouts, patient.origin.eos_ids),
        ),
        ("ratio", lambda: rollout_checks.ratio_to_sampler(rollouts, temperature)),
        ("ratio, temperature", lambda: rollout_checks.ratio_to_sampler(rollouts, other)),
        ("ratio, epochs", lambda: rollout_checks.ratio_over_epochs(rollouts)),
        *_of_model(patient, rollouts.teaching_rows, reference),
    ]


def _of_model(
    patient: Patient, rows: Callable[[], Rows], reference: Callable[[], Outcome]
) -> list[Check]:
    """What is asked of every model and its step, whatever its rows come from."""

    @functools.cache
    def gradients() -> Gradients:
        return Gradients(patient=patient, rows=rows())

    return [
        ("adapters at start", lambda: model_checks.adapters_at_start(patient, rows())),
        ("packing", lambda: model_checks.packing(patient, rows())),
        ("reference", reference),
        ("gradients", lambda: model_checks.every_gradient(gradients())),
        ("accumulation", lambda: model_checks.accumulation(gradients())),
    ]


def consult(config: TuneConfig) -> list[Finding]:
    """Read a run's model and data as the run would, and examine it.

    Raises:
      FornaxError: what `tune` would raise before its doctor.
    """
    from fornax.tune.run import resolve, settle

    initialize(config.processes)
    origin = read_origin(config)
    config = settle(config, origin)
    with tempfile.TemporaryDirectory(prefix="fornax-doctor-") as folder:
        task: Task = method_of(config).make()(config, origin, Path(folder))
        config = resolve(config, task)
        if isinstance(config, RLConfig):
            task.batches("train", Hosts()).close()  # its reward functions run in processes
    return examine(config, origin)
