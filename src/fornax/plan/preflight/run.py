"""All questions of a preflight, asked in this process: it needs eight virtual CPU devices."""

import contextlib
import dataclasses
import time
from collections.abc import Callable, Collection, Iterator

import jax

from fornax.config.errors import ConfigError
from fornax.plan.preflight.checks.checkpoint import checkpoint
from fornax.plan.preflight.checks.data import data
from fornax.plan.preflight.checks.numerics import numerics
from fornax.plan.preflight.checks.rules import rules
from fornax.plan.preflight.lab import Lab
from fornax.plan.preflight.question import Question, answer
from fornax.plan.preflight.result import Check, Group, Report
from fornax.plan.preflight.shrink import DEVICES, Shrunk, shrink
from fornax.train import TrainConfig

__all__ = ["check", "summary"]


def check(
    config: TrainConfig,
    *,
    quick: bool = False,
    only: Collection[Group] = (),
    progress: Callable[[Check], None] = lambda check: None,
) -> Report:
    """Ask everything about a config, or some groups of questions.

    Args:
      config: the user's, its model resolved.
      quick: ask about the choices together; one by one only if something fails.
      only: groups to ask; none asks all.
      progress: called with each answer.

    Raises:
      ConfigError: where jax shows fewer CPU devices than it takes.
    """
    if jax.default_backend() != "cpu" or jax.device_count() < DEVICES:
        raise ConfigError(
            f"a preflight runs on {DEVICES} virtual CPU devices and jax shows "
            f"{jax.device_count()} of {jax.default_backend()}; call `preflight`, which starts a "
            "process of its own, or set XLA_FLAGS=--xla_force_host_platform_device_count=8"
        )
    began = time.monotonic()
    shrunk = shrink(config, depth="quick" if quick else "whole")
    lab = Lab(shrunk)
    questions = [q for q in _questions(lab, config, quick=quick) if not only or q.group in only]
    together = [q for q in questions if not (quick and q.alone)]
    checks = _ask(together, progress)
    if not all(each.ok for each in checks):
        found = _ask([q for q in questions if q not in together], progress)
        checks = [*(each for each in found if not each.ok), *checks]
        checks += [each for each in found if each.ok]
    return Report(
        shrunk=summary(shrunk),
        checks=tuple(checks),
        quick=quick,
        seconds=round(time.monotonic() - began, 1),
    )


def _ask(questions: list[Question], progress: Callable[[Check], None]) -> list[Check]:
    checks = []
    with _quick_compilation():
        for question in questions:
            checks.append(answer(question))
            progress(checks[-1])
    return checks


@contextlib.contextmanager
def _quick_compilation() -> Iterator[None]:
    """Let LLVM leave machine code as it comes: half the compilation, and the programs are small.

    What XLA makes of a program, its partition among devices above all, stays as it is.
    """
    name = "jax_disable_most_optimizations"
    before = jax.config.values[name]
    jax.config.update(name, True)
    try:
        yield
    finally:
        jax.config.update(name, before)


def _questions(lab: Lab, config: TrainConfig, *, quick: bool) -> Iterator[Question]:
    yield from rules(lab, config)
    yield from data(lab)
    yield from numerics(lab, config, quick=quick)
    yield from checkpoint(lab)


def summary(shrunk: Shrunk) -> dict[str, object]:
    """The sizes that ran, by name."""
    model, config = shrunk.config.model, shrunk.config
    assert model is not None
    names = ("num_layers", "hidden_size", "intermediate_size", "num_heads", "head_width")
    sizes = {name: getattr(model, name) for name in names}
    mesh = {a: s for a, s in config.mesh.axis_sizes().items() if s != 1}
    return {
        **sizes,
        "kv_heads": model.kv_heads,
        "vocab_size": model.vocab_size,
        "layers": [dataclasses.asdict(kind) for kind in model.layer_kinds()],
        "seq_len": config.seq_len,
        "batch_size": config.batch_size,
        "mesh": mesh,
    }
