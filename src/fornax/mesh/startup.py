"""Process start-up: joins the processes of a run, checks that all came, sets up the caches."""

import functools
import gc
import sys
import urllib.request
import weakref
from dataclasses import dataclass

import jax
import jax.extend

from fornax.config import environment
from fornax.config.errors import ClusterError, ConfigError
from fornax.mesh.launchers import Launched, discover, fornax_variables
from fornax.mesh.rendezvous import meet

__all__ = [
    "ProcessConfig",
    "clear_caches",
    "find_processes",
    "initialize",
    "leave",
    "use_compilation_cache",
]


@dataclass(frozen=True, kw_only=True)
class ProcessConfig:
    """The processes of a run; FORNAX_ variables, then the launcher's, fill what is None."""

    coordinator: str | None = None
    """host:port of process 0; None for one process, or FORNAX_COORDINATOR."""
    num_processes: int | None = None
    """How many processes must join; None: FORNAX_NUM_PROCESSES, else 1."""
    process_id: int | None = None
    """This process's number, from 0; None: FORNAX_PROCESS_ID."""
    join_timeout: int = 300
    """Seconds to wait for the others before giving up."""
    heartbeat_timeout: int = 100
    """Seconds without a sign of life after which a process counts as lost."""

    def __post_init__(self) -> None:
        """Check the numbers."""
        if self.num_processes is not None and self.num_processes < 1:
            raise ConfigError(f"num_processes={self.num_processes} must be 1 or more")
        if self.join_timeout < 1 or self.heartbeat_timeout < 1:
            raise ConfigError("join_timeout and heartbeat_timeout are seconds, 1 or more")


def find_processes(config: ProcessConfig | None) -> Launched:
    """The processes of a run: what `config` says, then FORNAX_ variables, then a launcher's.

    Raises:
      ConfigError: for an environment variable that is not a number.
      ClusterError: when a Cloud TPU virtual machine does not say which host of its slice it is.
    """
    given = fornax_variables(environment.coordinator())
    if config is None:
        return given
    given = Launched(
        coordinator=config.coordinator,
        num_processes=config.num_processes,
        process_id=config.process_id,
    ).filled_from(given)
    if given.num_processes == 1:
        return given
    server = environment.gce_metadata_server()
    metadata = None if server is None else functools.partial(_metadata, server)
    return discover(environment.launcher_variables(), given, metadata)


def _metadata(server: str, attribute: str) -> str:
    """An attribute of this virtual machine, of Google Cloud's metadata server."""
    request = urllib.request.Request(
        f"http://{server}/computeMetadata/v1/instance/attributes/{attribute}",
        headers={"Metadata-Flavor": "Google"},
    )
    try:
        with urllib.request.urlopen(request, timeout=10) as answer:
            return answer.read().decode()
    except OSError as error:
        raise ClusterError(
            f"this machine has a TPU, and its metadata server {server} does not say which of the "
            f"slice's hosts it is ({error}); set FORNAX_NUM_PROCESSES to 1, or the three FORNAX_ "
            "variables"
        ) from error


def _way_out(found: Launched) -> str:
    """What to do where a launcher's variables are there and no run of several was meant."""
    if found.launcher in ("", "FORNAX_ variables"):
        return ""
    return (
        f". {found.launcher} asked for {found.num_processes} processes; for one alone set "
        "FORNAX_NUM_PROCESSES=1"
    )


def _join(found: Launched, config: ProcessConfig) -> None:
    """Initialise jax.distributed and refuse to continue alone."""
    count = found.num_processes
    source = f" (from {found.launcher})" if found.launcher else ""
    if found.coordinator is None or found.process_id is None or count is None:
        raise ClusterError(
            f"a run of several processes needs an address, a count and a number, and has "
            f"coordinator={found.coordinator}, num_processes={count}, "
            f"process_id={found.process_id}{source}; set FORNAX_COORDINATOR, FORNAX_NUM_PROCESSES "
            "and FORNAX_PROCESS_ID in every process, or FORNAX_NUM_PROCESSES=1 for one alone"
        )
    if not 0 <= found.process_id < count:
        raise ClusterError(
            f"process_id={found.process_id} is not below num_processes={count}{source}; number the "
            f"processes 0 to {count - 1}"
        )
    launched = environment.worker_record() is not None
    if not launched:  # the launcher sees at once when one of its processes does not come
        try:
            meet(found.coordinator, count, found.process_id, config.join_timeout)
        except ClusterError as error:
            raise ClusterError(f"{error}{_way_out(found)}") from error
    if launched:  # what another thread began to do after this process left its last group
        jax.extend.backend.clear_backends()
    jax.distributed.initialize(
        coordinator_address=found.coordinator,
        num_processes=count,
        process_id=found.process_id,
        # Under SLURM jax would give each process one GPU, also where it has the host to itself.
        cluster_detection_method="deactivate" if found.alone_on_host or launched else None,
        # Process 0 starts a coordination service in any case. Under `fornax launch` the one at the
        # coordinator's address is the launcher's, so that process 0 may die; this one is not used.
        coordinator_bind_address="127.0.0.1:0" if launched else None,
        initialization_timeout=config.join_timeout,
        heartbeat_timeout_seconds=config.heartbeat_timeout,
    )
    if jax.process_count() != count:
        raise ClusterError(
            f"{count} processes were asked for and jax sees {jax.process_count()}; each would "
            "train alone, so none does. Check that every process uses the same backend and address"
        )


def initialize(config: ProcessConfig | None = None) -> None:
    """Start the process: several join (or refuse to run), and the compilation cache is set.

    Call once, before anything asks jax for its devices.

    Args:
      config: the processes of a run; what it leaves open, a launcher may say. None: a command that
        works alone, unless FORNAX_ variables say otherwise.

    Raises:
      ClusterError: when the processes asked for do not all join.
      ConfigError: for an environment variable that is not a number.
    """
    environment.set_default_platform_quiet()
    environment.prepare_virtual_devices()
    found = find_processes(config)
    if jax.distributed.is_initialized():
        return
    use_compilation_cache()
    if (found.num_processes or 1) > 1 or found.coordinator is not None:
        _join(found, config or ProcessConfig())


def use_compilation_cache(least_seconds: float = 0.5) -> None:
    """Keep compiled programs between processes, unless a place is set or the user turns it off.

    Args:
      least_seconds: of compilation, of a program that is kept.
    """
    already = jax.config.jax_compilation_cache_dir  # pyrefly: ignore[missing-attribute]
    if environment.compilation_cache_enabled() and already is None:
        jax.config.update("jax_compilation_cache_dir", str(environment.compiled_dir()))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", least_seconds)


def clear_caches(prefix: str) -> None:
    """Empty the `functools` caches of the modules whose names begin so: their keys hold devices."""
    for name, module in sys.modules.copy().items():
        if name.startswith(prefix):
            for value in list(vars(module).values()):
                if isinstance(value, functools._lru_cache_wrapper):
                    value.cache_clear()


def leave() -> bool:
    """Leave the group of processes and give up its devices; `initialize` may join another.

    The sockets between processes close with the devices, and a process that still waits in a
    collective is free then. Arrays that are held keep the devices, and the sockets, alive.

    Returns:
      Whether the devices are gone. A process whose devices are not cannot join again.
    """
    clients = [weakref.ref(client) for client in {d.client for d in jax.local_devices()}]
    jax.distributed.shutdown()
    jax.extend.backend.clear_backends()
    clear_caches("jax.experimental.multihost_utils")
    for _ in range(_COLLECTIONS):
        gc.collect()  # the first frees what refers to the cycle of a client and its devices
        if all(client() is None for client in clients):
            return True
    return False


_COLLECTIONS = 4
