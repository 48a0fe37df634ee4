"""The programs that a run would need on another number of hosts, compiled before it has them.

A process of its own, at the lowest priority, stands in for all of the hosts: it gives jax as many
CPU clients as there would be processes, none of which ever computes. The executables go into the
memory of the host's agent (`fornax.train.program_memory`), where the group that forms finds them.
"""

import os
import threading
import time
from multiprocessing.connection import Connection
from pathlib import Path

from fornax.cluster.coordination import cpu_client, listen
from fornax.config.worker_process import receive, send

__all__ = ["run"]

_JOIN_SECONDS = 60
_HEARTBEAT_SECONDS = 600


def run(agent: Connection) -> None:
    """The process: makes the programs of the run whose plan is in a memory, and says which.

    It is given `memory`, the path of the file, and `hosts`, for how many; and answers with the
    names of the programs and the seconds that they took.
    """
    os.nice(19)
    order = receive(agent)
    began = time.monotonic()
    made = precompile(Path(order["memory"]), order["hosts"])
    send(agent, [made, time.monotonic() - began])
    os._exit(0)  # the clients of the other hosts have nobody to say goodbye to


def precompile(memory: Path, hosts: int) -> list[str]:
    """Compile step and evaluation of a run for this many hosts of CPU devices; returns their names.

    jax must not have its devices yet. None are made while the run has not said how its step is.
    """
    from fornax.config import from_yaml
    from fornax.mesh.compilation import compile_as, program_key
    from fornax.train import Ledger, TrainConfig, pretrain_task
    from fornax.train.program_memory import ProgramMemory
    from fornax.train.session import prepare
    from fornax.train.tasks.pretrain import row_shapes

    kept = ProgramMemory(memory)
    plan = kept.plan()
    if plan is None:
        return []
    config = from_yaml(TrainConfig, plan["config"])
    clients = _impersonate(hosts)
    programs = prepare(config, pretrain_task(config, read_data=False), Ledger())
    batch = programs.shapes_of(row_shapes(config, programs.hosts))
    wanted = {"step": programs.lower_step}
    if config.eval.every is not None:
        wanted["evaluate"] = programs.lower_evaluation
    made = []
    for name, lower in wanted.items():
        lowered = lower(batch)
        key = program_key(lowered, programs.parts.mesh.devices)
        _, result = compile_as(lowered, None)
        if result.image is not None:
            kept.keep(key, result.image)
            made.append(name)
    del clients
    return made


def _impersonate(hosts: int) -> list[object]:
    """Be process 0 of a group whose other processes are clients in threads of this one."""
    import jax

    from fornax.mesh.startup import use_compilation_cache

    address, service = listen(hosts, "127.0.0.1")
    held: list[object] = [service]

    def join(number: int) -> None:
        held.append(cpu_client(address, number, hosts, _JOIN_SECONDS))

    threads = [threading.Thread(target=join, args=(n,), daemon=True) for n in range(1, hosts)]
    for thread in threads:
        thread.start()
    use_compilation_cache()
    jax.distributed.initialize(
        coordinator_address=address,
        num_processes=hosts,
        process_id=0,
        cluster_detection_method="deactivate",
        coordinator_bind_address="127.0.0.1:0",
        initialization_timeout=_JOIN_SECONDS,
        heartbeat_timeout_seconds=_HEARTBEAT_SECONDS,
    )
    jax.devices()
    for thread in threads:
        thread.join()
    return held
