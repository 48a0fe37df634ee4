"""What a launcher tells its processes: how many there are, which this is, where process 0 listens.

Read from the variables that launchers set (and, on a Cloud TPU virtual machine that has none, from
its metadata server), as `jax.distributed.initialize` does; here the answer is known before jax
joins, so that processes can meet first and `fornax doctor` can show it.
"""

import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from fornax.config.errors import ConfigError

__all__ = ["Launched", "Metadata", "discover", "first_host", "fornax_variables"]

Metadata = Callable[[str], str]
"""The value of an attribute of a Cloud virtual machine."""

Variables = Mapping[str, str]

_PORT = "8476"
# The dynamic ports of RFC 6335 begin above; a job's own number keeps two jobs on one host apart.
_FIRST_PORT, _PORTS = 61440, 4096


@dataclass(frozen=True, kw_only=True)
class Launched:
    """What was found; None where nothing says."""

    launcher: str = ""
    """Who said so, for messages."""
    coordinator: str | None = None
    """host:port of process 0."""
    num_processes: int | None = None
    process_id: int | None = None
    alone_on_host: bool = False
    """Whether this process is known to have its host's devices to itself."""

    def filled_from(self, other: "Launched") -> "Launched":
        """This, and what it lacks from another."""
        names = ("coordinator", "num_processes", "process_id")
        new = {
            name: getattr(other, name)
            for name in names
            if getattr(self, name) is None and getattr(other, name) is not None
        }
        if not new:
            return self
        return replace(
            self,
            **new,
            launcher=" and ".join(filter(None, (self.launcher, other.launcher))),
            alone_on_host=self.alone_on_host or other.alone_on_host,
        )


def discover(
    variables: Variables,
    given: Launched | None = None,
    metadata: Metadata | None = None,
    hostname: Callable[[], str] = socket.getfqdn,
) -> Launched:
    """Fill what is not given from the launchers whose variables are there, most explicit first.

    Args:
      variables: environment variables by name.
      given: what is known already.
      metadata: reads an attribute of this Cloud TPU virtual machine; None: it is none.
      hostname: to this host's name in the network.

    Raises:
      ConfigError: for a variable that should be a number and is none.
    """
    found = given or Launched()
    for look in (_jax, _torchrun, _slurm):
        found = found.filled_from(look(variables))
    found = found.filled_from(_tpu(variables, metadata))
    if found.num_processes is not None:
        found = found.filled_from(_kubernetes(variables, hostname()))
    return found


def _number(variables: Variables, name: str) -> int | None:
    text = variables.get(name)
    if text is None:
        return None
    try:
        return int(text)
    except ValueError:
        raise ConfigError(f"{name}={text!r} is not a whole number; unset it or fix it") from None


def fornax_variables(variables: Variables) -> Launched:
    """Of our own, set by hand.

    Raises:
      ConfigError: see `discover`.
    """
    return Launched().filled_from(
        Launched(
            launcher="FORNAX_ variables",
            coordinator=variables.get("FORNAX_COORDINATOR"),
            num_processes=_number(variables, "FORNAX_NUM_PROCESSES"),
            process_id=_number(variables, "FORNAX_PROCESS_ID"),
        )
    )


def _jax(variables: Variables) -> Launched:
    return Launched(
        launcher="JAX_ variables",
        coordinator=variables.get("JAX_COORDINATOR_ADDRESS"),
        num_processes=_number(variables, "JAX_NUM_PROCESSES"),
        process_id=_number(variables, "JAX_PROCESS_ID"),
    )


def _torchrun(variables: Variables) -> Launched:
    """Of torchrun; Ray Train, Kubeflow and SkyPilot set the same."""
    address, port = variables.get("MASTER_ADDR"), variables.get("MASTER_PORT")
    count, number = _number(variables, "WORLD_SIZE"), _number(variables, "RANK")
    if not address or not port or number is None or (count or 1) < 2:
        return Launched()
    return Launched(
        launcher="MASTER_ADDR, WORLD_SIZE and RANK",
        coordinator=f"{address}:{port}",
        num_processes=count,
        process_id=number,
    )


def _slurm(variables: Variables) -> Launched:
    """Of a step that `srun` started."""
    hosts, number = variables.get("SLURM_STEP_NODELIST"), _number(variables, "SLURM_PROCID")
    count = _number(variables, "SLURM_STEP_NUM_TASKS") or _number(variables, "SLURM_NTASKS")
    if not hosts or number is None or (count or 1) < 2:
        return Launched()
    job = _number(variables, "SLURM_JOB_ID") or 0
    step = _number(variables, "SLURM_STEP_ID") or 0
    port = variables.get("JAX_COORDINATOR_PORT") or _FIRST_PORT + (job + step) % _PORTS
    return Launched(
        launcher="SLURM",
        coordinator=f"{first_host(hosts)}:{port}",
        num_processes=count,
        process_id=number,
        alone_on_host=count == _number(variables, "SLURM_STEP_NUM_NODES"),
    )


def first_host(hosts: str) -> str:
    """The first of SLURM's list of hosts, such as `gpu[007,009-012],login1`."""
    name, bracket, rest = hosts.partition("[")
    if not bracket or "," in name:
        return name.partition(",")[0]
    inside, _, after = rest.partition("]")
    first = inside.replace("-", ",").partition(",")[0]
    suffix = first_host(after) if after and not after.startswith(",") else ""
    return name + first + suffix


def _tpu(variables: Variables, metadata: Metadata | None) -> Launched:
    """Of the hosts of a TPU slice, or of several slices: by variables (GKE), else by metadata."""
    named = variables.get("TPU_PROCESS_ADDRESSES") or variables.get("TPU_WORKER_HOSTNAMES")
    number = _number(variables, "TPU_WORKER_ID")
    slices = variables
    if (not named or number is None) and metadata is not None:
        named, number = metadata("worker-network-endpoints"), int(metadata("agent-worker-number"))
        slices = {**_tpu_env(metadata("tpu-env")), **variables}
    if not named or number is None:
        return Launched()
    hosts = [_tpu_host(each) for each in named.split(",")]
    count = len(hosts) * (_number(slices, "MEGASCALE_NUM_SLICES") or 1)
    if count < 2:
        return Launched()
    first = slices.get("MEGASCALE_COORDINATOR_ADDRESS", hosts[0]).partition(":")[0]
    port = variables.get("JAX_COORDINATOR_PORT") or _PORT
    return Launched(
        launcher="Cloud TPU",
        coordinator=f"{first}:{port}",
        num_processes=count,
        process_id=number + len(hosts) * (_number(slices, "MEGASCALE_SLICE_ID") or 0),
        alone_on_host=True,
    )


def _tpu_host(endpoint: str) -> str:
    """The host of `host`, `host:port` or the metadata server's `name:number:address`."""
    parts = endpoint.strip().split(":")
    return parts[2] if len(parts) == 3 else parts[0]


def _tpu_env(text: str) -> dict[str, str]:
    """The lines `NAME: 'value'` of the metadata attribute `tpu-env`."""
    pairs = (line.split(":", 1) for line in text.splitlines() if ":" in line)
    return {name.strip(): value.strip().strip("'") for name, value in pairs}


def _kubernetes(variables: Variables, hostname: str) -> Launched:
    """Of an indexed Job or a JobSet with a headless service: pod k is called NAME-k.SUBDOMAIN…

    How many pods there are is in no variable of theirs; the manifest must say it.
    """
    number = _number(variables, "JOB_COMPLETION_INDEX")
    if number is None or "KUBERNETES_SERVICE_HOST" not in variables:
        return Launched()
    name, _, domain = hostname.partition(".")
    stem, dash, index = name.rpartition("-")
    if not domain or not dash or index != str(number):
        return Launched(launcher="Kubernetes", process_id=number)
    port = variables.get("JAX_COORDINATOR_PORT") or _PORT
    return Launched(
        launcher="Kubernetes", coordinator=f"{stem}-0.{domain}:{port}", process_id=number
    )
