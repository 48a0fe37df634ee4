"""`launch`: a command as many ranks, in one run directory, to its end."""

import contextlib
import os
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from multiprocessing.connection import Connection
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal

from fornax.cluster.beside import Beside
from fornax.cluster.beside_process import DATA_WORKER, SAMPLER
from fornax.cluster.controller import Controller, Job
from fornax.cluster.controller_process import ControllerProcesses, ToLaunch
from fornax.cluster.files import ClusterFiles
from fornax.cluster.local import Engine, LocalEngine
from fornax.cluster.signals import signals_to
from fornax.cluster.terminal import Bar, Terminal
from fornax.cluster.verdict import Limits
from fornax.config.errors import ConfigError, FornaxError
from fornax.config.worker_process import receive

if TYPE_CHECKING:
    from fornax.cluster.ray_engine import RayEngine

__all__ = [
    "SAMPLED",
    "EngineName",
    "check_local_checkpoints",
    "check_sampled",
    "control",
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
    _check_engine(name, address, private_network=private_network)
    return LocalEngine(hosts)


def open_ray(hosts: int, address: str | None, *, private_network: bool) -> "RayEngine":
    """The engine `ray`; see `open_engine`."""
    from fornax.cluster.ray_engine import RayEngine

    _check_engine("ray", address, private_network=private_network)
    return RayEngine(hosts, address, private_network=private_network)


def _check_engine(name: EngineName, address: str | None, *, private_network: bool) -> None:
    """Refuse an address without Ray, or a network without an address."""
    if name == "local" and (address is not None or private_network):
        raise ConfigError(
            "an address, and what network it is on, is of a Ray cluster; add --engine ray, or "
            "leave --address and --private-network out"
        )
    if private_network and address is None:
        raise ConfigError("a Ray that is started here has one machine; name one by --address")


def launch(
    job: Job,
    run_dir: str | Path,
    *,
    engine: EngineName = "local",
    address: str | None = None,
    private_network: bool = False,
    spare: bool = True,
    bar: Bar | None = None,
    samplers: int = 0,
    sampler_program: str = "",
    data_workers: int = 0,
) -> int:
    """Run a command as `job.hosts` processes, one per host; after a fault they continue.

    The controller is a process of its own: when it is lost another takes over, on this machine from
    the snapshots that this process holds in memory besides the agents. Every rank prints into
    `cluster/rank-R.log` of the run directory, and rank 0 to standard error too. Nothing that was
    started is left when this returns, or when its process is killed.

    Args:
      job: the command, which must train in `run_dir`.
      run_dir: the run directory, which all hosts share.
      engine: see `open_engine`.
      address: see `open_engine`.
      private_network: see `open_engine`.
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
      when a worker ended with an error that the user can fix.

    Raises:
      ClusterError: for accelerators that the hosts cannot divide, or a run that fails, or whose
        controller is lost, again and again without getting further.
      ConfigError: when the directory cannot be written or is in use; see `open_engine`.
    """
    _check_engine(engine, address, private_network=private_network)
    if engine == "local":
        open_engine(engine, job.hosts).close()  # what it refuses is refused before all else
    files = ClusterFiles(Path(run_dir).expanduser())
    order = {
        "run_dir": str(files.run_dir),
        "job": asdict(job),
        "engine": {"name": engine, "address": address, "private_network": private_network},
        "opened": {
            "spare": spare,
            "samplers": samplers,
            "sampler_program": sampler_program,
            "data_workers": data_workers,
        },
    }
    with files.held(), contextlib.closing(Terminal(files, bar)) as terminal:
        return ControllerProcesses(order, files, terminal).run()


def control(launch: Connection) -> None:
    """The process of a controller: one run, until it ends or is to continue in another process."""
    order = receive(launch)
    fields = order["job"]
    fields |= {"words": tuple(fields["words"]), "limits": Limits(**fields["limits"])}
    job = Job(**fields)
    kept = {int(rank): place for rank, place in order["kept"].items()}
    files, towards = ClusterFiles(Path(order["run_dir"])), ToLaunch(launch)
    try:
        with (
            signals_to([]),  # the launch passes its own on, also where all processes get one
            contextlib.closing(open_engine(hosts=job.hosts, **order["engine"])) as engine,
            opened_run(
                job,
                files,
                engine,
                announce=towards.say,
                tick=towards.tick,
                tell=towards.tell,
                kept=kept,
                **order["opened"],
            ) as controller,
        ):
            towards.tell({"kind": "ready"})
            threading.Thread(target=_obey, args=(launch, controller), daemon=True).start()
            code = controller.run()
    except FornaxError as error:
        towards.end({"kind": "error", "error": type(error).__name__, "text": str(error)})
    else:
        towards.end({"kind": "ended", "code": code})


def _obey(launch: Connection, controller: Controller) -> None:
    """Stop as signals to the launch say."""
    with contextlib.suppress(EOFError, OSError):
        while True:
            controller.stop(receive(launch)["number"])


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
    tell: Callable[[Mapping[str, Any]], None] = lambda message: None,
    kept: Mapping[int, Mapping[str, Any]] = MappingProxyType({}),
) -> Iterator[Controller]:
    """The controller of a run, and the processes beside its hosts while it is there; see `launch`.

    Args:
      files: of the run, which the caller holds.
      announce: shows a line per event.
      tick: called many times a second with the newest step that all ranks have entered.
      tell: see `Controller`.
      kept: see `Controller`.
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

        yield Controller(job, files, launcher, announce=announce, tick=ticked, tell=tell, kept=kept)


def check_local_checkpoints(directory: str | Path | None, engine: EngineName) -> str | None:
    """The directory of local checkpoints as all hosts name it; one of this machine's is made.

    Raises:
      ConfigError: when it cannot be written here, or nothing is kept in memory.
    """
    if directory is None:
        return None
    if not hasattr(os, "memfd_create"):
        raise ConfigError(
            "local checkpoints are copies of snapshots in memory (memfd), which this system does "
            "not have; leave --local-checkpoints out"
        )
    path = Path(directory).expanduser().absolute()
    if engine == "local":
        try:
            path.mkdir(parents=True, exist_ok=True)
            tempfile.TemporaryFile(dir=path).close()
        except OSError as error:
            raise ConfigError(
                f"--local-checkpoints {path} cannot be written ({error.strerror or error}); name "
                "a directory on this machine's disk that can, or leave it out"
            ) from error
    return str(path)


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
