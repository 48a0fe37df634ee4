"""Process start-up: joins the processes of a run, checks that all came, sets up the caches."""

from dataclasses import dataclass

import jax

from fornax.config import environment
from fornax.config.errors import ClusterError, ConfigError
from fornax.mesh.rendezvous import meet

__all__ = ["ProcessConfig", "initialize"]


@dataclass(frozen=True, kw_only=True)
class ProcessConfig:
    """The processes of a run; the launcher's environment variables fill what is None."""

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


def _integer(name: str, text: str | None) -> int | None:
    if text is None:
        return None
    try:
        return int(text)
    except ValueError:
        raise ConfigError(f"{name}={text!r} is not a whole number; unset it or fix it") from None


def _resolve(config: ProcessConfig) -> ProcessConfig:
    found = environment.coordinator()
    count = config.num_processes
    if count is None:
        count = _integer("FORNAX_NUM_PROCESSES", found["num_processes"])
    number = config.process_id
    if number is None:
        number = _integer("FORNAX_PROCESS_ID", found["process_id"])
    return ProcessConfig(
        coordinator=config.coordinator or found["address"],
        num_processes=count,
        process_id=number,
        join_timeout=config.join_timeout,
        heartbeat_timeout=config.heartbeat_timeout,
    )


def _join(config: ProcessConfig) -> None:
    """Initialise jax.distributed and refuse to go on alone."""
    count = config.num_processes
    if config.coordinator is None or config.process_id is None or count is None:
        raise ClusterError(
            f"a run of several processes needs an address, a count and a number, and has "
            f"coordinator={config.coordinator}, num_processes={count}, "
            f"process_id={config.process_id}; set FORNAX_COORDINATOR, FORNAX_NUM_PROCESSES and "
            "FORNAX_PROCESS_ID in every process"
        )
    if not 0 <= config.process_id < count:
        raise ClusterError(
            f"process_id={config.process_id} is not below num_processes={count}; number the "
            f"processes 0 to {count - 1}"
        )
    meet(config.coordinator, count, config.process_id, config.join_timeout)
    jax.distributed.initialize(
        coordinator_address=config.coordinator,
        num_processes=count,
        process_id=config.process_id,
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

    Raises:
      ClusterError: when the processes asked for do not all join.
      ConfigError: for an environment variable that is not a number.
    """
    environment.set_default_platform_quiet()
    environment.prepare_virtual_devices()
    resolved = _resolve(config or ProcessConfig())
    if jax.distributed.is_initialized():
        return
    already = jax.config.jax_compilation_cache_dir  # pyrefly: ignore[missing-attribute]
    if environment.compilation_cache_enabled() and already is None:
        jax.config.update("jax_compilation_cache_dir", str(environment.cache_dir() / "xla"))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)
    if (resolved.num_processes or 1) > 1 or resolved.coordinator is not None:
        _join(resolved)
