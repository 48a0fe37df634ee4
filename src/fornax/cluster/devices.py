"""Which accelerators of this machine each process gets, as changes to its environment."""

from pathlib import Path

from fornax.config import environment
from fornax.config.errors import ClusterError

__all__ = ["device_variables", "host_variables", "require_cpu"]

_TPUS = ("/dev/accel0", "/dev/vfio/0")


def host_variables(hosts: int, what: str = "hosts") -> list[dict[str, str | None]]:
    """What each host of a run needs in its environment, so that they divide this machine's GPUs.

    Args:
      hosts: how many, or how many slices.
      what: they are, in errors.

    Returns:
      Of each host, by rank; nothing where there is nothing to divide: all share the cores.

    Raises:
      ClusterError: when the GPUs do not divide, or the accelerators are TPUs and the hosts several.
    """
    gpus = environment.visible_gpus()
    if environment.only_cpu() or not (gpus or any(Path(path).exists() for path in _TPUS)):
        return []
    if len(gpus) % hosts:
        fits = ", ".join(str(n) for n in range(1, len(gpus) + 1) if len(gpus) % n == 0)
        fewer = len(gpus) // hosts * hosts
        leave = f"name {fewer} of them in CUDA_VISIBLE_DEVICES, " if fewer else ""
        raise ClusterError(
            f"{hosts} {what} cannot divide the {len(gpus)} GPUs of this machine "
            f"({', '.join(gpus)}) evenly; use as many {what} as divide them ({fits}), {leave}or "
            f"set JAX_PLATFORMS=cpu to run the {what} on its cores"
        )
    return device_variables(1, 0, hosts)[0]


def device_variables(replicas: int, each: int, hosts: int = 1) -> list[list[dict[str, str | None]]]:
    """What each process of each replica needs in its environment to have GPUs of its own.

    Args:
      each: GPUs of a replica; 0: an equal share of all.
      hosts: processes of a replica, which divide its GPUs evenly.

    Raises:
      ClusterError: when there are too few, or the accelerators are TPUs.
    """
    plain: list[list[dict[str, str | None]]] = [[{} for _ in range(hosts)] for _ in range(replicas)]
    if environment.only_cpu():
        return plain
    for path in _TPUS:
        if Path(path).exists() and replicas * hosts > 1:
            raise ClusterError(
                f"this machine has TPUs ({path}), of which one process takes all; start one "
                "process per machine, or set JAX_PLATFORMS=cpu to run them on its cores"
            )
    gpus = environment.visible_gpus()
    if not gpus:
        return plain
    each = each or max(1, len(gpus) // replicas)
    if replicas * each > len(gpus):
        raise ClusterError(
            f"{replicas} replicas of {each} GPUs need {replicas * each}, and this machine has "
            f"{len(gpus)} ({', '.join(gpus)}); launch fewer replicas, divide each over fewer GPUs, "
            "or set JAX_PLATFORMS=cpu to run them on its cores"
        )
    if each % hosts:
        raise ClusterError(
            f"{each} GPUs of a replica cannot be divided over {hosts} processes; give it a number "
            "of GPUs that --hosts divides: of serve, --tensor-parallel-size"
        )
    part = each // hosts
    shares = [gpus[first * part : (first + 1) * part] for first in range(replicas * hosts)]
    found: list[dict[str, str | None]] = [
        {"CUDA_VISIBLE_DEVICES": ",".join(share)} for share in shares
    ]
    return [found[number * hosts : (number + 1) * hosts] for number in range(replicas)]


def require_cpu() -> None:
    """Refuse to start a Ray on a machine with accelerators, which would give them to no host.

    Raises:
      ClusterError: when there is one and JAX_PLATFORMS does not say cpu.
    """
    found = [path for path in ("/dev/nvidia0", *_TPUS) if Path(path).exists()]
    if found and not environment.only_cpu():
        raise ClusterError(
            f"this machine has an accelerator ({found[0]}), and the hosts of a Ray that is started "
            "here are processes without one; leave --engine ray out, start Ray with ray start "
            "--head and name it with --address auto, or set JAX_PLATFORMS=cpu to run the hosts on "
            "its cores"
        )
