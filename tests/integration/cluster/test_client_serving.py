"""`Cluster` as a server and a tuner: replicas from Python, samplers from Python."""

from pathlib import Path

import pytest
from tests.integration.cluster.test_client import run_python
from tests.integration.llm.streams import model, words
from tests.unit.tune.tiny import save_grpo

from fornax.config.jsonl import read_json_lines
from fornax.models import save_pretrained

__all__ = ["SERVED", "small_model"]

pytestmark = [pytest.mark.slow, pytest.mark.exhaustive, pytest.mark.fault]

SERVED = """
import json, sys, threading, time
from pathlib import Path

import httpx

from fornax.cluster import Cluster
from fornax.cluster.routing import drill_replica, request_rolling_restart
from fornax.config import ClusterError
from fornax.llm.server import ServeConfig

model, run_dir, engine = sys.argv[1:4]
config = ServeConfig(
    port=0, max_model_len=64, max_num_seqs=2, block_size=4, max_num_batched_tokens=16,
    step_sizes="coarse", served_model_name=("m",), disable_access_log=True,
)
body = {"model": "m", "prompt": "the cat and the dog", "max_tokens": 4, "temperature": 0}
answers, wrong, stop = [], [], threading.Event()


def ask(url):
    with httpx.Client(base_url=url, timeout=300) as client:
        while not stop.is_set():
            reply = client.post("/v1/completions", json=body)
            (answers if reply.status_code == 200 else wrong).append(reply.text)


with Cluster(engine=engine) as cluster:
    server = cluster.serve(model, config, replicas=2, run_dir=run_dir)
    server.wait_ready(seconds=400)
    first = {each.pid for each in server.status().replicas}
    client = threading.Thread(target=ask, args=(server.address,))
    client.start()
    try:
        server.rolling_restart()
        assert server.is_ready(2)
        second = {each.pid for each in server.status().replicas}
        assert not first & second, (first, second)
        try:
            request_rolling_restart(run_dir)
        except ClusterError as error:
            print("refused:", error)
        killed = drill_replica(run_dir, "kill", 1)
        while killed in {each.pid for each in server.status().replicas}:
            time.sleep(0.1)
        server.wait_ready(seconds=400)
    finally:
        stop.set()
        client.join()
    texts = {json.loads(each)["choices"][0]["text"] for each in answers}
    print("answers", len(answers) > 0, len(texts), wrong)
    third = {each.pid for each in server.status().replicas}
print("code", server.wait())
assert not [pid for pid in first | second | third if Path(f"/proc/{pid}").exists()]
"""


def small_model(folder: Path) -> Path:
    """A model's directory."""
    words().save(folder / "text")
    save_pretrained(model(), folder / "model", folder / "text")
    return folder / "model"


def test_a_server_of_a_cluster_restarts_in_turn_and_replaces_what_dies(
    environment: dict[str, str], tmp_path: Path
):
    env = {**environment, "JAX_PLATFORMS": "cpu"}
    run_dir = tmp_path / "served"
    given = [str(small_model(tmp_path)), str(run_dir), "local"]
    said = run_python(SERVED, given, env)
    assert "call rolling_restart() there" in said
    assert "answers True 1 []" in said
    assert "code 0" in said
    events = read_json_lines(run_dir / "events.jsonl")
    assert [each["kind"] for each in events if "kind" in each] == ["killed"]
    assert [each["rolling"] for each in events if "rolling" in each] == ["begun", "done"]


TUNED = """
import sys
from fornax.cluster import Cluster
from fornax.config import ConfigError

folder, out, samplers = sys.argv[1], sys.argv[2], int(sys.argv[3])
flags = f"--model {folder}/model --data {folder}/prompts.jsonl"
flags += f" --reward {folder}/my_rewards.py:score"
flags += " --reward-workers 1 --steps 2 --batch-size 8 --group-size 4 --rollout.max-tokens 16"
flags += " --rollout.shards 2 --max-length 64 --lora null --log.no-tensorboard --no-doctor"
with Cluster(hosts=1, spares=False) as cluster:
    for method, more in (("sft", {"samplers": 2}), ("nonsense", {})):
        try:
            cluster.tune(method, run_dir=out, **more)
        except ConfigError as error:
            print("refused:", error)
    run = cluster.tune("grpo", run_dir=out, samplers=samplers, flags=flags.split())
    print("loss", run.loss())
    print("code", run.wait())
"""


def test_a_cluster_tunes_with_samplers_as_without(environment: dict[str, str], tmp_path: Path):
    env = {**environment, "JAX_PLATFORMS": "cpu"}
    folder = save_grpo(tmp_path)
    samples = {}
    for samplers in (0, 2):
        out = tmp_path / f"with-{samplers}"
        said = run_python(TUNED, [str(folder), str(out), str(samplers)], env)
        assert "tune sft has no use for --samplers" in said
        assert "method='nonsense' is none of" in said
        assert "code 0" in said
        lines = read_json_lines(out / "samples.jsonl")
        assert len(lines) == 16
        samples[samplers] = [(x["prompt"], x["completion"], x["rewards"]) for x in lines]
        assert bool(list((out / "cluster").glob("sampler-*.log"))) == bool(samplers)
    assert samples[0] == samples[2]
