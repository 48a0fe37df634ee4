"""The real Ray as launcher: faults change no number, hosts come and go, nothing is left."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.integration.cluster.conftest import CHANGES
from tests.integration.cluster.test_client import PROGRAM, TOLERANCE, position, run_python
from tests.integration.cluster.test_client_serving import SERVED, small_model
from tests.integration.cluster.test_launch import text_data
from tests.integration.cluster.test_samplers import begin as begin_tuning
from tests.integration.cluster.test_samplers import samples, wait_for_sampler
from tests.integration.cluster.test_samplers import words as grpo_words
from tests.integration.train.conftest import COMMAND
from tests.unit.tune.tiny import save_grpo

from fornax.cluster import drill
from fornax.cluster.drill import drill_beside
from fornax.cluster.ray_nodes import address_for
from fornax.cluster.status import read_status
from fornax.config import ClusterError, worker_record
from fornax.config.environment import for_child
from fornax.config.jsonl import read_json_lines

pytest.importorskip("ray", reason="Ray is not installed: pip install 'fornax-ai[cluster]'")

pytestmark = [pytest.mark.slow, pytest.mark.fault]


@pytest.mark.exhaustive
def test_a_killed_rank_changes_no_number_and_ray_leaves_nothing(
    launch: Any, undisturbed: list[tuple], places: dict[str, str]
):
    run = launch(flags=["--engine", "ray", "--no-spares"], env=places)
    run.wait_for_step(1, 6)
    drill(run.run_dir, "kill", 1)
    code, output = run.finish()
    assert code == 0, output
    assert run.faults() == [("killed", 1)], output
    assert run.exact() == undisturbed
    assert not run.descendants()


@pytest.mark.exhaustive
def test_a_killed_controller_takes_ray_with_it_and_the_run_goes_on_from_memory(
    launch: Any, undisturbed: list[tuple], places: dict[str, str]
):
    flags = ["--engine", "ray", "--no-spares", "--mtbf", "0.01s"]
    run = launch(flags=flags, env=places, save_every=None)
    run.wait_for_step(1, 12)
    drill(run.run_dir, "controller")
    code, output = run.finish()
    assert code == 0, output
    assert run.faults() == [("controller", None)], output
    assert run.exact() == undisturbed
    started = [e["step"] for e in run.events() if e.get("state") == "running" and "step" in e]
    kept = [e for e in run.events() if "kept" in e]
    assert {e["rank"] for e in kept} == {0, 1}
    assert started[-1] >= 7, output
    assert not run.descendants()


@pytest.mark.exhaustive
def test_a_stopped_actor_is_replaced_and_a_killed_launch_leaves_nothing(
    launch: Any, places: dict[str, str]
):
    """All that a host consists of is stopped: actor, agent and worker."""
    run = launch(flags=["--engine", "ray", "--no-spares"], env=places, steps=5000)
    worker = run.wait_for_step(1, 2)
    agent = parent(worker)
    host = {worker, agent, parent(agent)}
    for pid in host:
        os.kill(pid, signal.SIGSTOP)
    run.wait_for_epoch(2)
    assert [(kind, rank) for kind, rank in run.faults() if rank == 1], run.events()
    survivor = run.wait_for_step(1, 2)
    until_gone(lambda: host & run.descendants())
    for pid in (parent(parent(survivor)), run.process.pid):
        os.kill(pid, signal.SIGSTOP)
    run.process.kill()
    run.process.wait()
    until_gone(run.descendants)


def until_gone(left: Callable[[], set[int]]) -> None:
    deadline = time.monotonic() + 240
    while found := left():
        assert time.monotonic() < deadline, found
        time.sleep(0.1)


def parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


@pytest.mark.exhaustive
def test_a_cluster_of_rays_trains_resizes_and_calls(
    environment: dict[str, str], settings: dict[str, Any], tmp_path: Path, places: dict[str, str]
):
    config = tmp_path / "run.yaml"
    config.write_text(yaml.safe_dump({**settings, **CHANGES, "steps": 200, "save_every": None}))
    program = PROGRAM.replace("spares=False", 'spares=False, engine="ray"')
    env = {**environment, **places, "JAX_PLATFORMS": "cpu"}
    said = run_python(program, [str(config), str(tmp_path / "run"), "2", "3"], env)
    assert "totals [3, 3, 0]" in said
    assert "code 0" in said
    events = read_json_lines(tmp_path / "run" / "events.jsonl")
    assert [e["hosts"] for e in events if "free" in e] == [2, 3]


ELASTIC = """
import os, sys, threading, time
from pathlib import Path
from ray.cluster_utils import Cluster as Nodes

from fornax.cluster import Job, Limits
from fornax.cluster.controller import Controller
from fornax.cluster.files import ClusterFiles
from fornax.cluster.ray_engine import RayEngine, RayLauncher

folder, files = Path(sys.argv[1]), ClusterFiles(Path(sys.argv[1]) / "run")
files.directory.mkdir(parents=True)
nodes = Nodes(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
first = nodes.add_node(num_cpus=1)
nodes.add_node(num_cpus=1)
nodes.wait_for_nodes()

engine = RayEngine(1, nodes.address)
print("map", sorted(set(engine.map(lambda n: n + 1, range(4)))))
launcher = RayLauncher(engine.ray, files, spare=False, imports=("ranks",))
job = Job(
    hosts=3,
    least=2,
    program="ranks:main",
    words=(str(folder), "2000"),
    limits=Limits(frozen=20, stall=20),
)
controller = Controller(job, files, launcher, announce=lambda line: print(line, flush=True))

def at_work(hosts):
    deadline = time.monotonic() + 240
    while controller.hosts_at_work != hosts:
        assert time.monotonic() < deadline, hosts
        time.sleep(0.05)

# Ray's nodes are added in the main thread only.
beside = threading.Thread(target=lambda: print("code", controller.run()))
beside.start()
try:
    at_work(2)
    nodes.add_node(num_cpus=1)
    at_work(3)
    nodes.remove_node(first, allow_graceful=False)
    at_work(2)
    time.sleep(1)
finally:
    controller.stop()
    beside.join()
    engine.close()
    nodes.shutdown()
"""


@pytest.mark.exhaustive
def test_nodes_of_a_cluster_come_and_go(tmp_path: Path):
    """Two nodes, a third is added, one dies; the workers compute nothing."""
    modules = Path(__file__).parents[2] / "unit" / "cluster"
    env = {
        **os.environ,
        "PYTHONPATH": str(modules),
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": "5e" * 32,
        "HOME": str(tmp_path),
    }
    said = run_python(ELASTIC, [str(tmp_path)], env)
    assert "map [1, 2, 3, 4]" in said
    assert "code 143" in said
    events = [json.loads(x) for x in (tmp_path / "run" / "events.jsonl").read_text().splitlines()]
    formed = [e["why"].split(",")[0] for e in events if e.get("state") == "forming"]
    assert [why for why in formed if not why.startswith("waits")] == [
        "2 hosts",
        "3 hosts",
        "2 hosts",
    ]
    (fault,) = [e for e in events if e.get("state") == "teardown"]
    assert fault["kind"] == "agent"
    done = {int(step) for p in tmp_path.glob("*.steps") for step in p.read_text().split()}
    assert done == set(range(1, max(done) + 1))


@pytest.mark.parametrize("address", ["127.0.0.1:9", "ray://127.0.0.1:9", "nowhere"])
def test_an_address_without_a_cluster_is_refused(tmp_path: Path, address: str):
    words = ["launch", "--engine", "ray", "--address", address, "--hosts", "2"]
    ended = subprocess.run(
        [sys.executable, "-m", "fornax", *words, "--", "train", "--run-dir", str(tmp_path)],
        capture_output=True,
        text=True,
        env={**os.environ, "HOME": str(tmp_path)},
        timeout=400,
    )
    assert ended.returncode == 2
    assert f"no Ray cluster at {address}" in ended.stderr
    assert "Traceback" not in ended.stderr


def test_nodes_on_other_machines_are_refused_but_on_a_private_network():
    one, two = ["127.0.0.1", "10.0.0.5"], ["10.0.0.5", "10.0.0.6"]
    assert address_for(one, "10.0.0.5", private_network=True) == "127.0.0.1"
    assert address_for(two, "10.0.0.5", private_network=True) == "10.0.0.5"
    with pytest.raises(ClusterError, match=r"nodes on other machines \(10\.0\.0\.6\)"):
        address_for(two, "10.0.0.5", private_network=False)


@pytest.mark.exhaustive
def test_eight_three_five_and_four_hosts_train_as_one_process(
    launch: Any, environment: dict[str, str], settings: dict[str, Any], tmp_path: Path
):
    """One command: resized from another terminal, and a kill at the end.

    Every record is read once; losses differ from one process's by rounding only.
    """
    changes = {"steps": 100, "save_every": None}
    run = launch(hosts="3..8", flags=["--engine", "ray", "--no-spares"], **changes)
    formed = []
    for hosts in (8, 3, 5, 4):
        if formed:
            assert resize(run.run_dir, hosts) == 0
        else:
            run.wait_for_epoch(1)
        formed.append(hosts)
        run.wait_for_step(hosts - 1, len(run.exact()) + 3)
    drill(run.run_dir, "kill", 2)
    code, output = run.finish()
    assert code == 0, output
    assert run.faults() == [("killed", 2)], output
    assert [e["hosts"] for e in run.events() if "free" in e] == [8, 3, 5, 4, 4]
    assert not run.descendants()
    config = tmp_path / "one.yaml"
    config.write_text(yaml.safe_dump({**settings, **CHANGES, **changes}))
    words = ["train", "--config", str(config), "--run-dir", str(tmp_path / "one")]
    run_python(COMMAND, words, {**environment, "JAX_PLATFORMS": "cpu"})
    many, one = (
        read_json_lines(path / "metrics.jsonl") for path in (run.run_dir, tmp_path / "one")
    )
    assert [(r["step"], r["tokens"]) for r in many] == [(r["step"], r["tokens"]) for r in one]
    assert [r["loss"] for r in many] == pytest.approx([r["loss"] for r in one], rel=TOLERANCE)
    assert position(run.run_dir, 100) == position(tmp_path / "one", 100)


def resize(run_dir: Path, hosts: int) -> int:
    words = ["launch", "resize", str(run_dir), "--hosts", str(hosts)]
    return subprocess.run([sys.executable, "-m", "fornax", *words], timeout=600).returncode


@pytest.mark.exhaustive
def test_a_server_on_ray_restarts_in_turn_replaces_what_dies_and_leaves_nothing(
    environment: dict[str, str], tmp_path: Path, places: dict[str, str]
):
    run_dir = tmp_path / "served"
    env = {**environment, **places, "JAX_PLATFORMS": "cpu", "FORNAX_TEST_RUN": str(run_dir)}
    said = run_python(SERVED, [str(small_model(tmp_path)), str(run_dir), "ray"], env)
    assert "answers True 1 []" in said
    assert "code 0" in said
    events = read_json_lines(run_dir / "events.jsonl")
    assert [each["kind"] for each in events if "kind" in each] == ["killed"]


NODES = """
import dataclasses, sys, time
from ray.cluster_utils import Cluster as Nodes

import httpx

from fornax.cluster import Cluster
from fornax.llm.server import ServeConfig

nodes = Nodes(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
second = [nodes.add_node(num_cpus=1) for _ in range(2)][1]
nodes.wait_for_nodes()
config = ServeConfig(
    port=0, max_model_len=64, max_num_seqs=2, block_size=4, max_num_batched_tokens=16,
    step_sizes="coarse", served_model_name=("m",), disable_access_log=True,
)
try:
    with Cluster(engine="ray", address=nodes.address, private_network=True) as cluster:
        server = cluster.serve(sys.argv[1], config, replicas=2, run_dir=sys.argv[2])
        server.wait_ready(seconds=400)
        print("starts", [each.starts for each in server.status().replicas], flush=True)
        nodes.remove_node(second, allow_graceful=False)
        body = {"model": "m", "prompt": "the cat and the dog", "max_tokens": 4}
        url = server.address + "/v1/completions"
        print("asked", {httpx.post(url, json=body, timeout=300).status_code for _ in range(8)})
        nodes.add_node(num_cpus=1)
        while sorted(each.starts for each in server.status().replicas) != [1, 2]:
            time.sleep(0.1)
        server.wait_ready(seconds=400)
        print("code", server.stop())
        config = dataclasses.replace(config, tensor_parallel_size=2)
        pair = cluster.serve(sys.argv[1], config, replicas=1, hosts=2, run_dir=sys.argv[2] + "-2")
        pair.wait_ready(seconds=400)
        found = httpx.post(pair.address + "/v1/completions", json=body, timeout=300).json()
        print("tokens", found["usage"]["completion_tokens"])
finally:
    nodes.shutdown()
"""


@pytest.mark.exhaustive
def test_a_replica_whose_node_dies_is_replaced_on_another(tmp_path: Path):
    """Each node has room for one replica: the new one waits for a node that comes later.

    As on a private network, everything has the certificate: also the two processes of a replica.
    """
    env = for_child(
        {
            "JAX_PLATFORMS": "cpu",
            "XLA_FLAGS": None,
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": "5e" * 32,
            "HOME": str(tmp_path),
        }
    )
    run_dir = tmp_path / "served"
    said = run_python(NODES, [str(small_model(tmp_path)), str(run_dir)], env)
    assert "starts [1, 1]" in said
    assert "asked {200}" in said
    assert "code 0" in said
    assert "tokens 4" in said
    events = read_json_lines(run_dir / "events.jsonl")
    assert [e["kind"] for e in events if "kind" in e] == ["lost"]
    assert {e["url"][:8] for e in events if "url" in e and "replica" in e} == {"https://"}


@pytest.mark.fault
@pytest.mark.exhaustive
def test_samplers_on_nodes_of_their_own_draw_what_one_process_does(
    environment: dict[str, str], tmp_path: Path, places: dict[str, str]
):
    """One is killed, and its node's actor: another place, another address, the same bits."""
    folder, out = save_grpo(tmp_path), tmp_path / "run"
    one = begin_tuning(environment, folder, tmp_path / "one", [])
    assert one.finish()[0] == 0, one.output()
    hosts = ["--engine", "ray", "--hosts", "1", "--samplers", "2", "--no-spares"]
    run = begin_tuning({**environment, **places}, folder, out, hosts)
    wait_for_sampler(run, 1, 1)
    sampler = drill_beside(out, "kill", "sampler", 1)
    run.wait_for_event(lambda event: event.get("sampler") == 1 and "why" in event)
    before = addresses(out)
    wait_for_sampler(run, 0, 2)
    os.kill(parent(worker_record.read(out / "cluster" / "sampler-0.record").pid), signal.SIGKILL)
    until_gone(lambda: addresses(out)[0] == before[0])
    assert addresses(out)[1] == before[1]
    code, output = run.finish()
    assert code == 0, output
    told = [
        event["why"].split(" (")[0] for event in run.events() if "sampler" in event.get("why", "")
    ]
    assert told[0] == "sampler 1 ended with SIGKILL; another takes its place"
    assert told[1].startswith("sampler 0 on ")
    assert told[1].endswith(" was lost")
    assert len(told) == 2
    assert samples(out) == samples(tmp_path / "one")
    assert sampler not in run.descendants()
    assert not run.descendants()
    assert not list((out / "cluster").glob("*.addresses"))


def addresses(out: Path) -> list[str]:
    return (out / "cluster" / "sampler.addresses").read_text().split()


@pytest.mark.exhaustive
def test_data_workers_that_ray_places_make_the_batches_of_the_hosts_themselves(
    launch: Any, settings: dict[str, Any], tmp_path: Path, places: dict[str, str]
):
    data = text_data(settings, tmp_path)
    plain = launch("plain", flags=("--no-spares",), data=data)
    assert plain.finish()[0] == 0
    flags = ["--engine", "ray", "--data-workers", "2", "--no-spares"]
    run = launch(flags=flags, env=places, data=data)
    run.wait_for_step(1, 4)
    assert sum(each.records for each in read_status(run.run_dir).data_workers) > 0
    drill_beside(run.run_dir, "stop", "data", 1)
    run.wait_for_event(lambda e: e.get("data") == 1 and "is stopped" in e.get("why", ""))
    code, output = run.finish()
    assert code == 0, output
    assert run.exact() == plain.exact()
    assert not run.descendants()


SAMPLED = """
import subprocess, sys, time
from pathlib import Path
from ray.cluster_utils import Cluster as Nodes

from fornax.config import worker_record

out, words = Path(sys.argv[1]), sys.argv[2:]
nodes = Nodes(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
made = [nodes.add_node(num_cpus=1) for _ in range(2)]
nodes.wait_for_nodes()
hosts = ["--engine", "ray", "--address", nodes.address, "--hosts", "1", "--samplers", "1"]
hosts.append("--private-network")  # the run has a certificate
given = [sys.executable, "-m", "fornax", "launch", *hosts, "--no-spares", "--", *words]
run = subprocess.Popen(given)

def raylet(pid):
    "The node of a process, by its ancestors."
    while pid > 1:
        for node in made:
            if node.all_processes["raylet"][0].process.pid == pid:
                return node
        pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])

try:
    record = out / "cluster" / "sampler-0.record"
    while (state := worker_record.read(record)) is None or state.step < 2:
        assert run.poll() is None
        time.sleep(0.05)
    lost = raylet(state.pid)
    nodes.remove_node(lost, allow_graceful=False)
    while "waits for a place" not in (out / "events.jsonl").read_text():
        assert run.poll() is None
        time.sleep(0.05)
    nodes.add_node(num_cpus=1)
    print("code", run.wait(400))
finally:
    run.kill()
    nodes.shutdown()
"""


@pytest.mark.exhaustive
def test_a_sampler_whose_node_dies_goes_on_at_one_that_comes_later(
    environment: dict[str, str], tmp_path: Path
):
    """The only sampler: the trainer waits, and learns the new address."""
    folder = save_grpo(tmp_path)
    one = begin_tuning(environment, folder, tmp_path / "one", [])
    assert one.finish()[0] == 0, one.output()
    env = {
        **environment,
        "JAX_PLATFORMS": "cpu",
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": "5e" * 32,
        "HOME": str(tmp_path),
    }
    out = tmp_path / "run"
    said = run_python(SAMPLED, [str(out), *grpo_words(folder, out)], env)
    assert "code 0" in said
    assert samples(out) == samples(tmp_path / "one")
    assert "was lost" in (out / "events.jsonl").read_text()
