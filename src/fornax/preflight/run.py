"""Run a preflight: in this process, which needs eight virtual CPU devices, or in one of its own.

A process of its own receives a request, and sends each check as it ends and the report.
"""

import contextlib
import dataclasses
import tempfile
import time
from collections.abc import Callable, Collection, Iterator
from multiprocessing.connection import Connection
from typing import IO

import jax

from fornax import config as config_room
from fornax.config import ConfigError, FornaxError, dump_yaml, environment, from_mapping, from_yaml
from fornax.config.worker_process import WorkerProcess, ending, receive, send
from fornax.diffusion.config import DiffusionConfig
from fornax.mesh import check_use, initialize
from fornax.models import check_model
from fornax.preflight.checkpoint import checkpoint
from fornax.preflight.data import data
from fornax.preflight.decoder import DECODER
from fornax.preflight.denoiser import DENOISER
from fornax.preflight.harness import Case, CheckSkipped, Harness, run_case
from fornax.preflight.numerics import numerics
from fornax.preflight.report import GROUPS, Check, Group, Report
from fornax.preflight.rules import rules
from fornax.preflight.shrink import DEVICES
from fornax.preflight.subject import Subject
from fornax.quant import check_training
from fornax.train import TrainConfig, TrainerConfig, with_model

__all__ = ["check", "preflight"]


def preflight(
    config: TrainConfig | DiffusionConfig,
    *,
    quick: bool = False,
    only: Collection[Group] = (),
    progress: Callable[[Check], None] = lambda check: None,
) -> Report:
    """Check every parallel choice of a config on eight virtual CPU devices.

    Runs in a process of its own, so that it does not matter which devices this one has.

    Args:
      config: any config of pretraining, or of training a denoiser; its data is not read.
      quick: check the choices together; one by one only if something fails.
      only: groups of checks to run (`GROUPS`); none runs all.
      progress: called with each check as it ends.

    Raises:
      ConfigError: for a group that does not exist, or a config without a model.
      ShardingError: when the config cannot be laid out at all.
      RuntimeError: when the process dies.
    """
    unknown = [name for name in only if name not in GROUPS]
    if unknown:
        raise ConfigError(f"there is no group of checks {unknown[0]!r}; use {', '.join(GROUPS)}")
    kind = type(config).__name__
    request = {"kind": kind, "config": dump_yaml(config), "quick": quick, "only": list(only)}
    with (
        tempfile.TemporaryFile() as log,
        WorkerProcess(
            "fornax.preflight.run:main", log=log, environment=environment.virtual_cpus(DEVICES)
        ) as child,
    ):
        child.send(request)
        return _follow(child, progress, log)


def _follow(child: WorkerProcess, progress: Callable[[Check], None], log: IO[bytes]) -> Report:
    while True:
        try:
            event, content = child.receive()
        except EOFError:
            code = child.wait()
            log.seek(0)
            said = log.read().decode(errors="replace").strip()[-2000:]
            raise RuntimeError(
                f"the process of the preflight ended with {ending(code)}: {said}"
            ) from None
        match event:
            case "check":
                progress(from_mapping(Check, content))
            case "report":
                checks = tuple(from_mapping(Check, each) for each in content.pop("checks"))
                return Report(checks=checks, **content)
            case "error":
                kind = getattr(config_room, content["type"], FornaxError)
                raise kind(content["message"])


def main(parent: Connection) -> None:
    """The child: receive a request; send each check as it ends, then the report, or the error."""
    request = receive(parent)
    try:
        config = from_yaml(_KINDS[request["kind"]], request["config"], source="the config")
        initialize()
        report = check(
            with_model(config, None) if isinstance(config, TrainConfig) else config,
            quick=request["quick"],
            only=request["only"],
            progress=lambda check: send(parent, ("check", dataclasses.asdict(check))),
        )
    except FornaxError as error:
        send(parent, ("error", {"type": type(error).__name__, "message": str(error)}))
    else:
        send(parent, ("report", dataclasses.asdict(report)))


_KINDS: dict[str, type[TrainConfig] | type[DiffusionConfig]] = {
    kind.__name__: kind for kind in (TrainConfig, DiffusionConfig)
}


def check(
    config: TrainConfig | DiffusionConfig,
    *,
    quick: bool = False,
    only: Collection[Group] = (),
    progress: Callable[[Check], None] = lambda check: None,
) -> Report:
    """Run all checks of a config, or some groups of them, in this process.

    Args:
      config: the user's, its model resolved.
      quick: check the choices together; one by one only if something fails.
      only: groups to run; none runs all.
      progress: called with each check.

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
    if isinstance(config, TrainConfig):
        _check_decoder(config)
    subject = DECODER if isinstance(config, TrainConfig) else DENOISER
    shrunk = subject.shrink(config, quick)
    cases = [*_cases(Harness(shrunk, subject), config, quick=quick), *_left_out(config, subject)]
    cases = [case for case in cases if not only or case.group in only]
    together = [case for case in cases if not (quick and case.isolated)]
    checks = _run(together, progress)
    if not all(each.ok for each in checks):
        found = _run([case for case in cases if case not in together], progress)
        checks = [*(each for each in found if not each.ok), *checks]
        checks += [each for each in found if each.ok]
    mesh = {a: s for a, s in shrunk.config.mesh.axis_sizes().items() if s != 1}
    return Report(
        shrunk={**subject.sizes(shrunk.config), "mesh": mesh},
        checks=tuple(checks),
        quick=quick,
        seconds=round(time.monotonic() - began, 1),
    )


def _check_decoder(config: TrainConfig) -> None:
    """Refuse what a preflight of decoders does not have.

    Raises:
      ConfigError: naming it.
    """
    check_use(config.mesh, "preflight")
    if config.model is not None:
        check_model(config.model, "preflight")
        check_training(config.quant, config.model, config.mesh)
        if config.mesh.context != 1:
            check_model(config.model, "context axis")
        if config.mesh.num_stages() != 1:
            check_model(config.model, "stage axis")


def _run(cases: list[Case], progress: Callable[[Check], None]) -> list[Check]:
    checks = []
    with _quick_compilation():
        for case in cases:
            checks.append(run_case(case))
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


def _cases(harness: Harness, config: TrainerConfig, *, quick: bool) -> list[Case]:
    return [
        *rules(harness, config),
        *data(harness),
        *numerics(harness, config, quick=quick),
        *checkpoint(harness),
    ]


def _left_out(config: TrainerConfig, subject: Subject) -> Iterator[Case]:
    """What no check looks at, as a line of its own."""
    reason = subject.left_out(config)
    if reason is None:
        return
    name, _, why = reason.partition(": ")

    def skip() -> str:
        raise CheckSkipped(why)

    yield Case(group="precision", name=name, run=skip)
