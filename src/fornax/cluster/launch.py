"""`launch`: a command as many ranks, in one run directory, to its end."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from fornax.cluster.beside import Beside
from fornax.cluster.beside_process import DATA_WORKER, SAMPLER
from fornax.cluster.controller import Controller, Job
from fornax.cluster.files import ClusterFiles
from fornax.cluster.local import Engine, LocalEngine
from fornax.cluster.terminal import Bar, Terminal
from fornax.config.errors import ConfigError

if TYPE_CHECKING:
    from fornax.cluster.ray_engine import RayEngine

__all__ = [
    "SAMPLED",
    "EngineName",
    "check_sampled",
    "launch",
    "open_engine",
    "open_ray",
    "opened_run",
]

SAMPLED = ("grpo", "ppo", "distill")
"""Methods of `fornax tune` that draw completions by samplers of their own."""


EngineName = Literal["local", "ray"]


def open_engine(
    name: EngineName,
    hosts: int,
    address: str | None = None,
    *,
    private_network: bool = False,
) -> Engine:
    """An engine by name: `local` or `ray`.

    Args:
      name: which one.
      hosts: how many hosts this machine plays, where no other machines are asked for.
      address: of a Ray cluster, `auto`, host:port or ray://host:port; None starts one here.
      private_network: that nobody but its machines reaches that cluster's network, over which
        jax's own traffic goes without token and encryption.

    Raises:
      ConfigError: for an address without Ray, or when Ray is not installed.
      ClusterError: when Ray does not start or is not there, or nodes on other machines; for
        accelerators that the hosts cannot divide.
    """
    if name == "ray":
        return open_ray(hosts, address, private_network=private_network)
    if address is not None or private_network:
        raise ConfigError(
            "an address, and what network it is on, is of a Ray cluster; add --engine ray, or "
            "leave --address and --private-network out"
        )
    return LocalEngine(hosts)


def open_ray(hosts: int, address: str | None, *, private_network: bool) -> "RayEngine":
    """The engine `ray`; see `open_engine`."""
    from fornax.cluster.ray_engine import RayEngine

    if private_network and address is None:
        raise ConfigError("a Ray that is started here has one machine; name one by --address")
    return RayEngine(hosts, address, private_network=private_network)


def launch(
    job: Job,
    run_dir: str | Path,
    *,
    engine: Engine | None = None,
    spare: bool = True,
    bar: Bar | None = None,
    samplers: int = 0,
    sampler_program: str = "",
    data_workers: int = 0,
) -> int:
    """Run a command as `job.hosts` processes, one a host; after a fault they go on.

    Every rank prints into `cluster/rank-R.log` of the run directory, and rank 0 to standard error
    too. Nothing that was started is left when this returns, or when its process is killed.

    Args:
      job: the command, which must train in `run_dir`.
      run_dir: the run directory, which all hosts share.
      engine: the hosts; None: processes of this machine.
      spare: whether every host keeps a process with jax imported, which takes over after a fault
        two to three seconds earlier; it holds about 250 MB.
      bar: shows the progress; None: lines.
      samplers: processes that draw completions for the command: on this machine, or each on a
        host of Ray's that trains nothing.
      sampler_program: what such a process runs; `package.module:NAME`, see
        `beside.run_program`.
      data_workers: processes that read and transform the input of all hosts.

    Returns:
      0 when the run is done; 130 or 143 after Ctrl-C or SIGTERM, when it is saved and not done; 2
      when a worker ended with an error that the user can mend.

    Raises:
      ClusterError: for accelerators that the hosts cannot divide, or a run that fails again and
        again without getting further.
      ConfigError: when the directory cannot be written or is in use.
    """
    engine = engine or LocalEngine(job.hosts)
    files = ClusterFiles(Path(run_dir).expanduser())
    with files.held(), contextlib.ExitStack() as stack:
        terminal = Terminal(files, bar)
        stack.callback(terminal.close)
        controller = stack.enter_context(
            opened_run(
                job,
                files,
                engine,
                spare=spare,
                announce=terminal.announce,
                tick=terminal.tick,
                samplers=samplers,
                sampler_program=sampler_program,
                data_workers=data_workers,
            )
        )
        return controller.run()


@contextlib.contextmanager
def opened_run(
    job: Job,
    files: ClusterFiles,
    engine: Engine,
    *,
    spare: bool,
    announce: Callable[[str], None],
    tick: Callable[[int], None] = lambda step: None,
    samplers: int = 0,
    sampler_program: str = "",
    data_workers: int = 0,
) -> Iterator[Controller]:
    """The controller of a run, and the processes beside its hosts while it is there; see `launch`.

    Args:
      files: of the run, which the caller holds.
      announce: shows a line an event.
      tick: called many times a second with the newest step that all ranks have entered.
    """
    with contextlib.ExitStack() as stack:
        launcher = engine.launcher(files, spare=spare)
        program = {"program": sampler_program, "words": list(job.words)}
        beside: list[Beside] = []
        for role, count, order in ((SAMPLER, samplers, program), (DATA_WORKER, data_workers, {})):
            if not count:
                continue
            each = Beside(
                files=files,
                role=role,
                count=count,
                launcher=launcher,
                order=order,
                announce=announce,
                stall=job.limits.stall,
            )
            stack.callback(each.close)
            beside.append(each)
            job = replace(job, environment={**job.environment, **each.environment})

        def ticked(step: int) -> None:
            tick(step)
            for each in beside:
                each.check()

        yield Controller(job, files, launcher, announce=announce, tick=ticked)


def check_sampled(words: Sequence[str]) -> None:
    """Refuse samplers for a command that draws nothing by them.

    Raises:
      ConfigError: naming what has samplers.
    """
    if len(words) < 2 or words[0] != "tune" or words[1] not in SAMPLED:
        raise ConfigError(
            f"{' '.join(words[:2]) or 'no command'} has no use for --samplers, which draw "
            "completions for reinforcement learning and on-policy distillation; they are for tune "
            "grpo, tune ppo and tune distill: fornax launch --hosts 2 --samplers 2 -- tune grpo "
            "--model DIR --data p.jsonl --reward r.py:score"
        )
