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
from fornax.tune.config import RLConfig, TuneConfig
from fornax.tune.doctor import data_checks, model_checks, rollout_checks
from fornax.tune.doctor.model_checks import Gradients
from fornax.tune.doctor.results import CheckResult, Outcome
from fornax.tune.doctor.rollout_checks import MakeComponents, Rollouts, with_old
from fornax.tune.doctor.trial_run import Rows, TrialRun, small_config
from fornax.tune.methods import method_of
from fornax.tune.policy import Origin, fit_to_model, read_origin
from fornax.tune.rl.components import make_components
from fornax.tune.splits import with_steps

__all__ = ["check_config", "require_sound", "run_checks"]


Check = tuple[str, Callable[[], Outcome]]


def run_checks(
    config: TuneConfig,
    origin: Origin,
    *,
    components: MakeComponents = make_components,
    only: Sequence[str] | None = None,
) -> list[CheckResult]:
    """Look at a run before it starts, by a trial run of its config over its first records.

    Nothing of the run's directory is read or written.

    Args:
      config: the run; `steps` may be null.
      origin: its model.
      components: what a run of reinforcement works with.
      only: names of checks; None: all.

    Raises:
      FornaxError: what keeps even the trial run from being made.
    """
    with tempfile.TemporaryDirectory(prefix="fornax-doctor-") as folder:
        with _of(config, origin, components, Path(folder)) as checks:
            found = [_timed(*check) for check in checks if only is None or check[0] in only]
        del checks
    gc.collect()  # the trial run's weights, before the run loads its own
    return found


def require_sound(
    config: TuneConfig, origin: Origin, log: Callable[[str], None]
) -> list[CheckResult]:
    """Check a run; log what was found.

    Raises:
      ConfigError: a paragraph for each check that failed.
    """
    results = run_checks(config, origin)
    wrong = [result for result in results if result.outcome.verdict == "fail"]
    if wrong:
        listed = "\n\n".join(
            f"({number}) {result.check}: {result.outcome.text}."
            for number, result in enumerate(wrong, 1)
        )
        raise ConfigError(
            f"the doctor refuses to start this run, for {len(wrong)} of its {len(results)} checks "
            f"failed.\n\n{listed}\n\n`fornax tune doctor {method_of(config).name}` with the same "
            "flags lists what passed; --no-doctor starts the run anyway"
        )
    seconds = sum(result.seconds for result in results)
    looked = sum(result.outcome.verdict == "pass" for result in results)
    log(f"the doctor found nothing wrong: {looked} checks in {seconds:.1f} s")
    return results


def _timed(name: str, check: Callable[[], Outcome]) -> CheckResult:
    began = time.monotonic()
    outcome = check()
    return CheckResult(check=name, outcome=outcome, seconds=time.monotonic() - began)


@contextmanager
def _of(
    config: TuneConfig, origin: Origin, components: MakeComponents, folder: Path
) -> Iterator[list[Check]]:
    """The checks of a method, the most expensive last."""
    small = small_config(config, folder)
    trial = TrialRun(
        run=config, config=small, origin=origin, make=method_of(config).make(), folder=folder
    )
    data: list[Check] = [
        ("template", lambda: data_checks.template(trial)),
        ("one beginning", lambda: data_checks.beginnings(trial)),
    ]
    if not isinstance(small, RLConfig):
        yield data + _of_rows(trial)
        return
    rollouts = Rollouts(trial=trial, make_components=components)
    trial.make = rollouts.task
    try:
        yield data + _of_rollouts(trial, rollouts, small.rollout.temperature)
    finally:
        rollouts.close()


def _of_rows(trial: TrialRun) -> list[Check]:
    return [
        ("end is learned", lambda: data_checks.end_is_learned(trial)),
        *_of_model(
            trial,
            lambda: trial.rows,
            lambda: model_checks.reference(trial, trial.rows, {}),
        ),
    ]


def _of_rollouts(trial: TrialRun, rollouts: Rollouts, temperature: float) -> list[Check]:
    other = 0.6 if temperature >= 0.8 else 1.2

    def reference() -> Outcome:
        drawn = rollouts.rounds[0]
        return model_checks.reference(trial, with_old(drawn.steps[0]), drawn.numbers)

    return [
        ("truncation", lambda: rollout_checks.not_all_truncated(rollouts)),
        ("rewards vary", lambda: rollout_checks.rewards_vary(rollouts)),
        ("groups differ", lambda: rollout_checks.groups_differ(rollouts)),
        ("steps differ", lambda: rollout_checks.steps_differ(rollouts)),
        ("seeds repeat", lambda: rollout_checks.repeats_per_seed(rollouts)),
        (
            "end is learned",
            lambda: rollout_checks.drawn_end_is_learned(rollouts, trial.origin.eos_ids),
        ),
        ("ratio", lambda: rollout_checks.ratio_to_sampler(rollouts, temperature)),
        ("ratio, temperature", lambda: rollout_checks.ratio_to_sampler(rollouts, other)),
        ("ratio, epochs", lambda: rollout_checks.ratio_over_epochs(rollouts)),
        *_of_model(trial, rollouts.teaching_rows, reference),
    ]


def _of_model(
    trial: TrialRun, rows: Callable[[], Rows], reference: Callable[[], Outcome]
) -> list[Check]:
    """What is asked of every model and its step, whatever its rows come from."""

    @functools.cache
    def gradients() -> Gradients:
        return Gradients(trial=trial, rows=rows())

    return [
        ("adapters at start", lambda: model_checks.adapters_at_start(trial, rows())),
        ("packing", lambda: model_checks.packing(trial, rows())),
        ("reference", reference),
        ("gradients", lambda: model_checks.every_gradient(gradients())),
        ("accumulation", lambda: model_checks.accumulation(gradients())),
    ]


def check_config(config: TuneConfig) -> list[CheckResult]:
    """Read a run's model and data as the run would, and run_checks it.

    Raises:
      FornaxError: what `tune` would raise before its doctor.
    """
    initialize(config.processes)
    origin = read_origin(config)
    config = fit_to_model(config, origin)
    with tempfile.TemporaryDirectory(prefix="fornax-doctor-") as folder:
        task: Task = method_of(config).make()(config, origin, Path(folder))
        config = with_steps(config, task)
        if isinstance(config, RLConfig):
            task.batches("train", Hosts()).close()  # its reward functions run in processes
    return run_checks(config, origin)
