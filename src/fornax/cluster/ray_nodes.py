"""The nodes of a Ray cluster: which there are, where they are, how an actor on one is ended.

All of Fornax meets Ray here and by the module that `import_ray` returns.
"""

import contextlib
import functools
import os
import secrets
import signal
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from fornax.config import environment
from fornax.config.addresses import is_loopback
from fornax.config.errors import ClusterError, ConfigError

__all__ = [
    "HOST",
    "Node",
    "address_for",
    "end_actor",
    "host_nodes",
    "import_ray",
    "on",
    "own_address",
    "own_node",
    "room",
]

HOST = "fornax_host"
"""The resource of a Ray that was started here, of which each host takes one."""
_ACCELERATORS = ("TPU", "GPU")


@dataclass(frozen=True)
class Node:
    """A node of a Ray cluster that can be hosts."""

    id: str
    address: str
    slots: int
    """How many hosts it is: one, but more where this machine plays several."""
    accelerators: dict[str, float]
    """All it has, which its agent takes: Ray hides from an actor what that does not ask for."""


def host_nodes(ray: Any) -> list[Node]:
    """The living nodes that train, in the order of ranks: slice and worker of TPUs, address.

    Nodes with accelerators where there are any, else those with CPUs to give (not a head that only
    coordinates).
    """
    alive = [node for node in ray.nodes() if node["Alive"]]
    for wanted in (HOST, *_ACCELERATORS, "CPU"):
        if found := [node for node in alive if node["Resources"].get(wanted, 0) >= 1]:
            break
    else:
        found = []

    def order(node: dict[str, Any]) -> tuple[object, ...]:
        labels = node.get("Labels") or {}
        worker = int(labels.get("ray.io/tpu-worker-id", 0))
        slice_name = labels.get("ray.io/tpu-slice-name", "")
        return (slice_name, worker, node["NodeManagerAddress"], node["NodeID"])

    return [
        Node(
            id=node["NodeID"],
            address=node["NodeManagerAddress"],
            slots=int(node["Resources"].get(HOST, 1)),
            accelerators={
                name: node["Resources"][name] for name in _ACCELERATORS if name in node["Resources"]
            },
        )
        for node in sorted(found, key=order)
    ]


def address_for(addresses: Iterable[str], own: str, *, private_network: bool) -> str:
    """Where nodes of these addresses reach this machine, whose address is `own`.

    Between machines jax's traffic, its coordination service and Gloo, has neither token nor
    encryption; on one it stays on loopback.

    Raises:
      ClusterError: for an address that is not this machine's, where the network is not private.
    """
    others = sorted({each for each in addresses if each != own and not is_loopback(each)})
    if not others:
        return "127.0.0.1"
    if not private_network:
        raise ClusterError(
            f"the Ray cluster has nodes on other machines ({', '.join(others[:3])}), and between "
            "machines jax's traffic is not encrypted, nor Ray's without RAY_USE_TLS=1; if "
            "that network is private, pass --private-network, else use Ray on one machine"
        )
    return own


def end_actor(ray: Any, actor: Any, pid: int, node: str, address: str) -> None:
    """End an actor, and what its process holds.

    `ray.kill` asks an actor; one that is stopped (SIGSTOP) does not react, so that the kernel of
    its machine ends it.
    """
    ray.kill(actor, no_restart=True)
    if address == own_address():
        end_process(pid)
    else:
        task = ray.remote(end_process)
        task.options(num_cpus=0, scheduling_strategy=on(node)).remote(pid)


def end_process(pid: int) -> None:
    """End a process of this machine, if it is there."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def import_ray(*, own: bool) -> Any:
    """The module, its environment prepared.

    Args:
      own: whether a cluster is to be started, with a token of its own.

    Raises:
      ConfigError: when Ray is not installed.
    """
    environment.prepare_ray(_token() if own else None)
    try:
        import ray
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"{error.name} is not installed; the engine ray needs pip install 'fornax-ai[cluster]'"
        ) from error
    return ray


@functools.cache
def _token() -> str:
    """One per process: Ray reads it once."""
    return secrets.token_hex(32)


def own_address() -> str:
    """This machine's address, as Ray knows it."""
    import ray

    return ray.util.get_node_ip_address()


def on(node: str) -> Any:
    """The strategy of an actor that is to be on a node."""
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    return NodeAffinitySchedulingStrategy(node_id=node, soft=False)


def own_node() -> str:
    """In an actor: the node that it is on."""
    import ray

    return ray.get_runtime_context().get_node_id()


def room(ray: Any, share: Mapping[str, float], count: int) -> tuple[Any, Callable[[int], Any]]:
    """Room for this many actors near each other, all or none; and the strategy of each.

    Args:
      share: the resources that each of them takes.
    """
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    group = ray.util.placement_group([dict(share)] * count, strategy="PACK")
    return group, lambda rank: PlacementGroupSchedulingStrategy(
        group, placement_group_bundle_index=rank
    )
