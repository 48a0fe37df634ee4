"""Recovery: from a fault to the next step, by kind of fault; what being able to costs; the tiers.

`faults`: every drill of docs/guides/recovery.md on a launched run of four processes of this
machine, a small decoder (`_drills.py`). Times are wall time from the fault to the verdict, and to
the first step that all ranks made after it: what else runs on the machine is in them. `overhead`:
processor time of a step with the record, agent, snapshots and replicas, beside the same step
without. `tiers`: bytes/s of the agent's memory, a peer's, local disk, checkpoint and mirror, each
beside its limit in the same round. `peers`: some of the faults on two processes, beside Ray Train's
JaxTrainer with a careful loop (`_recovery_peers.py`, `make bench-recovery`):

    python benchmarks/recovery.py [--parts faults overhead tiers] [--drills "kill 1"] [--guide]
    python benchmarks/recovery.py --parts peers --peers .venv-peers [--rounds 1]
"""

import argparse
import json
import os
import shutil
import socket
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import fsspec
import jax
import jax.numpy as jnp
import numpy as np
import yaml
from scipy.stats.mstats import trimmed_mean, trimmed_mean_ci

import _drills
import _recovery_peers
from _harness import machine, table, versions, write_guide, write_results
from fornax.checkpoint import CheckpointConfig, Checkpointer
from fornax.checkpoint.mirror import Mirror
from fornax.cluster import Job, Limits, launch
from fornax.config import environment, from_mapping, worker_record
from fornax.config.snapshot_file import Snapshot, SnapshotFile
from fornax.data import BuildConfig, Hosts, Jsonl, TrainBpe, build
from fornax.train import Ledger, TrainConfig, pretrain_task
from fornax.train.interval import young
from fornax.train.memory_tier import MemoryTier
from fornax.train.session import first_state, prepare
from fornax.train.state import TrainState, as_tree

SECONDS = 900
SAVE_EVERY = 200
TURNS = 200
STEPS = 16
"""A turn, half of them with the record: single steps differ by a tenth on a shared machine."""
SNAPSHOTS = 30
MEGABYTES = 240
RATE_ROUNDS = 5


def dataset(folder: Path) -> Path:
    """Some text, tokenized."""
    lines = [{"text": " ".join(f"word{(i * j) % 97}" for j in range(60))} for i in range(400)]
    (folder / "text.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    config = BuildConfig(
        source=Jsonl(path=str(folder / "text.jsonl")),
        output=folder / "data" / "built",
        tokenizer=TrainBpe(vocab_size=320),
    )
    return build(config).path


def settings(data: Path, width: int, save_every: int | None = None) -> dict[str, Any]:
    """The config of the run."""
    return {
        "steps": 100_000,
        "batch_size": 8,
        "seq_len": 64,
        "save_every": save_every,
        "mesh": {"data": -1, "fsdp": 1},
        "model": {
            "vocab_size": 320,
            "hidden_size": width,
            "intermediate_size": 2 * width,
            "num_layers": 2,
            "num_heads": 4,
            "num_kv_heads": 2,
        },
        "data": {"source": {"type": "dataset", "path": str(data)}},
        "log": {"tensorboard": False, "every": 1},
    }


def until(condition: Callable[[], Any]) -> None:
    """Wait for something of a run."""
    deadline = time.monotonic() + SECONDS
    while not condition():
        if time.monotonic() > deadline:
            raise SystemExit("the run makes no progress")
        time.sleep(0.002)


def measured(words: list[str]) -> int:
    """The program of the ranks of `in_a_launch`: rank 0 measures, the other one is there."""
    kind, folder, width = words[0], Path(words[1]), int(words[2])
    record = worker_record.current()
    assert record is not None
    if os.environ["FORNAX_PROCESS_ID"] != "0":
        until((folder / "done").exists)
        return 0
    found = overhead(folder, width) if kind == "overhead" else rates(folder)
    (folder / "found.json").write_text(json.dumps(found))
    (folder / "done").touch()
    return 0


def in_a_launch(kind: str, folder: Path, width: int) -> list[list[object]]:
    """Rows measured in rank 0 of a launch of two, with real agents and replicas beside it."""
    os.environ["PYTHONPATH"] = str(Path(__file__).parent)
    job = Job(
        hosts=2,
        program="recovery:measured",
        words=(kind, str(folder), str(width)),
        limits=Limits(stall=SECONDS),
        local_checkpoints=str(folder / "local") if kind == "tiers" else None,
    )
    launch(job, folder / "run", spare=False)
    return json.loads((folder / "found.json").read_text())


def memory_tier(mtbf: float = 86400.0 / 2) -> MemoryTier:
    """The memory that this rank's agent holds, with a replica in that of rank 1's."""
    return MemoryTier(environment.snapshot_memory(), mtbf, "", peer=1)


def newest(what: Callable[[SnapshotFile, Snapshot], Any]) -> Any:
    """What the first bytes of the newest snapshot say."""
    whole = []
    for path in environment.snapshot_memory():
        with path.open("rb") as file:
            slot = SnapshotFile(file.fileno())
            if (snapshot := slot.found()) is not None:
                whole.append((snapshot.step, what(slot, snapshot)))
    return max(whole)[1]


def replicated() -> bool:
    """Whether the agent of rank 1 has the newest snapshot."""
    return newest(SnapshotFile.is_replicated)


def processor_seconds(pids: Iterable[int]) -> float:
    """Processor time of other processes so far, all their threads."""
    return sum(_ran(task) for pid in pids for task in Path(f"/proc/{pid}/task").iterdir())


def heartbeat_seconds() -> float:
    """Processor time so far of the thread that stamps this process's record."""
    beats = [each for each in threading.enumerate() if each.name == "worker-record"]
    return sum(_ran(Path(f"/proc/self/task/{each.native_id}")) for each in beats)


def _ran(task: Path) -> float:
    return int((task / "schedstat").read_text().split()[0]) / 1e9


def bounded(values: list[float]) -> tuple[float, float]:
    """The mean without the outer fifths, and the upper end of its 95 % interval (Tukey and
    McLaughlin 1963): a processor whose rate changes within a turn is an outlier."""
    inner = (0.2, 0.2)
    return float(trimmed_mean(values, inner)), float(trimmed_mean_ci(values, inner)[1])


def overhead(folder: Path, width: int) -> list[list[object]]:
    """What recovery costs a step, as a share of its processor time.

    Steps with and without the record and the look at the snapshots' clock take turns, in one
    process; the record's heartbeat runs beside both. The agent's processor time is that of all
    these seconds; that of snapshots, their replicas at both agents included, is spread over the
    interval at which they are made.
    """
    config = from_mapping(TrainConfig, settings(folder / "data" / "built", width), "benchmark")
    task, plain = pretrain_task(config), Ledger()
    programs = prepare(config, task, plain)
    batches = task.batches("train", Hosts())
    rows = next(batches)
    batches.close()
    state, memory = first_state(config, programs), memory_tier()
    state, _ = jax.block_until_ready(programs.step(state, rows))
    memory.begin(10 * TURNS)
    ledgers = {True: Ledger(record=worker_record.current()), False: plain}
    spent: dict[bool, list[float]] = {True: [], False: []}
    agents = [_parent(os.getpid())]
    wall, before, beats = time.monotonic(), processor_seconds(agents), heartbeat_seconds()
    for turn in range(TURNS):
        taken = {True: 0.0, False: 0.0}
        for kept in (True, False, False, True) * (STEPS // 4):
            programs.ledger = ledger = ledgers[kept]
            began = time.process_time()
            ledger.begin(turn)
            ledger.enter("step")
            with ledger.phase("wait_for_data"):
                pass
            state, _ = jax.block_until_ready(programs.step(state, rows))
            if kept:
                memory.is_due(turn)
            taken[kept] += time.process_time() - began
        for kept, seconds in taken.items():
            spent[kept].append(seconds / (STEPS // 2))
    wall = time.monotonic() - wall
    agent = (processor_seconds(agents) - before) / wall
    beat = (heartbeat_seconds() - beats) / wall
    step = statistics.mean(spent[False])
    rate = sum(map(sum, spent.values())) * STEPS / 2 / wall
    differences = [a - b for a, b in zip(spent[True], spent[False], strict=True)]
    mean, upper = bounded(differences)
    rows_of = [("record, beside the same step", 100 * mean / step, 100 * upper / step)]
    for name, each in (("its heartbeat", beat), ("agent", agent)):
        rows_of.append((name, 100 * each / rate, 100 * each / rate))
    agents = [int(p.name) for p in Path("/proc").glob("[0-9]*") if _is_agent(p)]
    costs, walls = [], []
    for number in range(SNAPSHOTS):
        began, theirs, at = time.process_time(), processor_seconds(agents), time.monotonic()
        memory.write_now(state, number, {}, {"skipped_batches": []})
        mine, stood = time.process_time() - began, time.monotonic() - at
        until(replicated)
        idle = agent * len(agents) * (time.monotonic() - at)
        costs.append(mine + max(0.0, processor_seconds(agents) - theirs - idle))
        walls.append(stood)
    every = young(statistics.median(walls), 86400.0 / 2)
    share = [100 * cost / every / rate for cost in costs]
    rows_of.append((f"a snapshot and its replica, each {every:.1f} s", *bounded(share)))
    rows_of.append(("all", sum(row[1] for row in rows_of), sum(row[2] for row in rows_of)))
    return [[name, f"{a:.3f} %", f"{b:.3f} %"] for name, a, b in rows_of]


def _parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def _is_agent(entry: Path) -> bool:
    """Whether a process is an agent of this launch."""
    try:
        ours = _parent(int(entry.name)) == _parent(_parent(os.getpid()))
        return ours and b"fornax.cluster.agent" in (entry / "cmdline").read_bytes()
    except OSError:
        return False


def rates(folder: Path) -> list[list[object]]:
    """Bytes/s of each tier, each beside its limit in the same round; medians."""
    state = _state(MEGABYTES * 10**6 // 12)
    size = sum(x.nbytes for x in jax.tree.leaves(state))
    source, target = np.ones(size, np.uint8), np.zeros(size, np.uint8)
    memory, seen = memory_tier(), {}
    copied = MemoryTier(
        environment.snapshot_memory(), 0.0, "", disk=environment.local_checkpoints()
    )
    abstract = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state
    )
    fsspec.config.conf["file"] = {"auto_mkdir": True}  # as stores do
    mirror = CheckpointConfig(keep_last=1, mirror=f"file://{folder}/mirror")
    tree, put = as_tree(state), Mirror(f"file://{folder}/mirror", folder / "disk")
    with Checkpointer(folder / "disk", CheckpointConfig(keep_last=1)) as disk:
        for number in range(RATE_ROUNDS + 2):

            def timed(name: str, call: Callable[[], Any], keep: bool = number > 1) -> Any:
                began = time.perf_counter()
                result = call()
                if keep:
                    seen.setdefault(name, []).append(time.perf_counter() - began)
                return result

            timed("memcpy", lambda: np.copyto(target, source))
            timed("memory", lambda n=number: memory.write_now(state, n, {}, METADATA))
            timed("peer", lambda: until(replicated))
            timed("from memory", lambda: memory.newest(abstract))
            timed("tcp", lambda: _through_loopback(source))
            timed("file", lambda: _written(folder / "raw", source))
            copied.write_now(state, number, {}, METADATA)
            until(lambda: newest(SnapshotFile.copied) is not None)
            if number > 1:  # what the agent measures, which looks seven times a second
                seen.setdefault("local", []).append(newest(SnapshotFile.copied))
            timed("disk", lambda n=number: disk.save(n, state=tree, force=True))
            timed("raw read", lambda: (folder / "raw").read_bytes())
            timed("restore", lambda n=number: disk.restore(as_tree(abstract), n).state)
            timed("mirror", lambda n=number: put.put(n, mirror))
            (folder / "raw2").unlink(missing_ok=True)
            timed("copy", lambda: shutil.copyfile(folder / "raw", folder / "raw2"))
    rate = {name: size / statistics.median(found) / 1e6 for name, found in seen.items()}
    return [
        [
            label,
            f"{rate[name]:.0f} MB/s",
            limit,
            f"{rate[at]:.0f} MB/s",
            f"{rate[name] / rate[at]:.2f}",
        ]
        for label, name, limit, at in (
            ("agent's memory, with CRC-32", "memory", "memcpy", "memcpy"),
            ("found there again, CRC-32 compared", "from memory", "memcpy", "memcpy"),
            ("replica in a peer's memory", "peer", "TCP on loopback", "tcp"),
            ("local disk, from the agent's memory", "local", "a file, written and synced", "file"),
            ("checkpoint, with CRC-32", "disk", "a file, written and synced", "file"),
            ("restored from it, CRC-32 compared", "restore", "a file, read", "raw read"),
            ("mirror, in a folder", "mirror", "a file, copied", "copy"),
        )
    ]


METADATA = {"total": 0.0, "batches": 0, "skipped_batches": []}


def _state(size: int) -> TrainState:
    arrays = [jax.random.normal(jax.random.key(n), (size,)) for n in range(3)]
    small = jnp.zeros((), jnp.int32)
    return TrainState(
        step=small,
        updates=small,
        params={"w": arrays[0]},
        other={},
        optimizer={"mu": arrays[1], "nu": arrays[2]},
        guard=small,  # pyrefly: ignore[bad-argument-type]
        rng=jnp.zeros(2, jnp.uint32),
    )


def _through_loopback(source: np.ndarray) -> None:
    """The bytes through one TCP connection to a thread that takes them into a buffer."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        taken = threading.Thread(target=_take_all, args=(listener, source.nbytes))
        taken.start()
        with socket.create_connection(listener.getsockname()) as connection:
            connection.sendall(source.data)
            taken.join()


def _take_all(listener: socket.socket, size: int) -> None:
    connection, _ = listener.accept()
    room = memoryview(bytearray(8 << 20))
    with connection:
        while size > 0:
            size -= connection.recv_into(room)


def _written(path: Path, source: np.ndarray) -> None:
    with path.open("wb", buffering=0) as file:
        view = source.data
        while view:
            view = view[file.write(view[: 1 << 24]) :]
        os.fsync(file.fileno())


HEADERS = {
    "faults": _drills.HEAD,
    "overhead": ("of a step's processor time", "trimmed mean", "95 % interval, upper end"),
    "tiers": ("tier", "rate", "limit", "its rate", "ratio"),
    "peers": _recovery_peers.HEADER,
}


def main() -> None:
    """Measure and write the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    names = [row.name for row in (*_drills.ROWS, _drills.FULL)]
    parser.add_argument("--drills", nargs="+", choices=names, default=())
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--guide", action="store_true", help="write the guide's drills too")
    parser.add_argument("--parts", nargs="+", choices=[*HEADERS], default=[*HEADERS][:3])
    parser.add_argument("--peers", type=Path, help="where make bench-peers-recovery installs them")
    parser.add_argument("--rounds", type=int, default=1)
    given = parser.parse_args()
    if "peers" in given.parts and given.peers is None:
        parser.error("the part peers needs --peers, where make bench-peers-recovery installs them")
    for part in given.parts:
        said: list[str] = []
        with tempfile.TemporaryDirectory(prefix="recovery-") as name:
            folder = Path(name)
            if part != "tiers":
                dataset(folder)
            if part == "faults":
                file = folder / "run.yaml"
                saved = settings(folder / "data" / "built", given.width, SAVE_EVERY)
                file.write_text(yaml.safe_dump(saved))
                rows = _drills.table_of_faults(folder, file, given.drills)
            elif part == "peers":
                python = (given.peers / "raytrain" / "bin" / "python").absolute()
                model = settings(folder / "data" / "built", given.width, _recovery_peers.SAVE_EVERY)
                found = _recovery_peers.measure(folder, model, given.rounds, python)
                rows, said = _recovery_peers.rows(*found), ["", _recovery_peers.steps(*found)]
            else:
                rows = in_a_launch(part, folder, given.width)
        title = {
            "faults": f"Recovery of {_drills.HOSTS} processes",
            "overhead": f"What recovery costs a step, {TURNS} turns of {STEPS} steps",
            "tiers": f"Tiers of checkpoints, a state of {MEGABYTES} MB, medians of {RATE_ROUNDS}",
            "peers": f"Recovery of {_recovery_peers.HOSTS} processes beside Ray Train's",
        }[part]
        text = "\n".join(
            [
                f"# {title}",
                "",
                f"{machine()}; {versions('jax', 'orbax-checkpoint', 'ray')}; "
                f"load {os.getloadavg()[0]:.1f}",
                "",
                table(HEADERS[part], rows),
                *said,
                "",
            ]
        )
        print(text)
        write_results("recovery" if part == "faults" else f"recovery-{part}", text)
        if given.guide and part == "faults":
            write_guide("recovery.md", "drills", table(HEADERS[part], rows))


if __name__ == "__main__":
    main()
