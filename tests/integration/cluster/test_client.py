"""`Cluster` on the small run: other numbers of hosts while it trains, stops, errors."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.integration.cluster.conftest import CHANGES
from tests.integration.train.conftest import COMMAND

from fornax.checkpoint.records import read_records
from fornax.config import worker_record

pytestmark = [pytest.mark.slow]

TOLERANCE = 1e-6
"""Of losses on other numbers of hosts: float32 sums over tokens in another order."""

PROGRAM = """
import sys, time
from pathlib import Path
from fornax.cluster import Cluster

config, run_dir = sys.argv[1], Path(sys.argv[2])

first, *others = map(int, sys.argv[3:])
with Cluster(hosts=first, spares=False) as cluster:
    run = cluster.train(config, run_dir=run_dir)
    print("first loss", run.loss(), flush=True)
    for hosts in others:
        run.resize(hosts)
        assert len(run.status().ranks) == hosts, run.status()
        begun = len(run.metrics())
        while len(run.metrics()) < min(begun + 3, 150):
            time.sleep(0.02)
    print("totals", cluster.map(lambda shard: sum(shard), [[1, 2], [3], []]), flush=True)
    print("code", run.wait(), flush=True)
"""


def run_python(program: str, words: list[str], env: dict[str, str]) -> str:
    ended = subprocess.run(
        [sys.executable, "-c", program, *words],
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=580,
    )
    assert ended.returncode == 0, ended.stdout
    return ended.stdout


STEPS = 150
LARGER = {"batch_size": 24, "seq_len": 128}
"""Steps that take long enough, all together, for a host to be made ready meanwhile."""


@pytest.mark.fault
@pytest.mark.exhaustive
@pytest.mark.parametrize("hosts", [(3, 2, 3), (4, 3, 5)], ids=str)
def test_other_numbers_of_hosts_train_as_one_process(
    environment: dict[str, str], settings: dict[str, Any], tmp_path: Path, hosts: tuple[int, ...]
):
    """Tokens and data position are exact: every record once. Losses differ by rounding only."""
    config = tmp_path / "run.yaml"
    config.write_text(
        yaml.safe_dump({**settings, **CHANGES, **LARGER, "steps": STEPS, "save_every": None})
    )
    env = {**environment, "JAX_PLATFORMS": "cpu"}
    said = run_python(PROGRAM, [str(config), str(tmp_path / "many"), *map(str, hosts)], env)
    assert "totals [3, 3, 0]" in said
    assert "code 0" in said
    run_python(COMMAND, ["train", "--config", str(config), "--run-dir", str(tmp_path / "one")], env)
    many, one = (
        [json.loads(x) for x in (tmp_path / name / "metrics.jsonl").read_text().splitlines()]
        for name in ("many", "one")
    )
    assert [r["step"] for r in many] == list(range(1, STEPS + 1))
    assert [r["tokens"] for r in many] == [r["tokens"] for r in one]
    for name in ("loss", "grad_norm"):
        found = [r[name] for r in many]
        assert found == pytest.approx([r[name] for r in one], rel=TOLERANCE), name
    events = [json.loads(x) for x in (tmp_path / "many" / "events.jsonl").read_text().splitlines()]
    formed = [e["why"].split(",")[0] for e in events if e.get("state") == "forming"]
    assert formed == [f"{count} hosts" for count in hosts]
    assert not [e for e in events if e.get("state") in ("suspect", "teardown")]
    saved = [p.name for p in (tmp_path / "many" / "checkpoints").iterdir() if p.name.isdigit()]
    assert saved == [str(STEPS)]
    assert position(tmp_path / "many", STEPS) == position(tmp_path / "one", STEPS)


def position(run_dir: Path, step: int) -> dict[int, Any]:
    """The data position of a checkpoint, a part per virtual shard, of all processes."""
    records = read_records(run_dir / "checkpoints" / str(step))
    return {shard: part for record in records for shard, part in record.data.items()}


STOPPED = """
import sys, time
from pathlib import Path
from fornax.cluster import Cluster
from fornax.config import ClusterError, ConfigError
try:
    Cluster(local_checkpoints="/dev/null/x")
except ConfigError as error:
    print("no disk:", error)
disk = Path(sys.argv[2] + "-disk")
with Cluster(hosts=2, mtbf="0.01s", local_checkpoints=disk) as cluster:
    run = cluster.train(sys.argv[1], run_dir=sys.argv[2], flags=["--steps", "5000"])
    run.loss()
    while not all([*disk.glob(f"*/host-{host}/{host}-*")] for host in (0, 1)):
        time.sleep(0.02)
    try:
        cluster.train(sys.argv[1], run_dir=sys.argv[2])
    except ClusterError as error:
        print("refused:", error)
print("code", run.wait())
with Cluster(hosts=1) as cluster:
    bad = cluster.train(sys.argv[1], run_dir=sys.argv[2] + "-bad", flags=["--batch-size", "0"])
    try:
        bad.loss()
    except ClusterError as error:
        print("no loss:", error)
"""


@pytest.mark.exhaustive
def test_leaving_the_block_saves_and_stops(
    environment: dict[str, str], settings: dict[str, Any], tmp_path: Path
):
    config, folder = tmp_path / "run.yaml", tmp_path / "run"
    config.write_text(yaml.safe_dump({**settings, **CHANGES, "save_every": None}))
    env = {**environment, "JAX_PLATFORMS": "cpu", "FORNAX_TEST_RUN": str(folder)}
    said = run_python(STOPPED, [str(config), str(folder)], env)
    assert "no disk: --local-checkpoints /dev/null/x cannot be written" in said
    assert "is in use by another fornax launch" in said
    assert "code 143" in said
    assert "ended before it had a loss, with exit code 2" in said
    last = json.loads((folder / "metrics.jsonl").read_text().splitlines()[-1])["step"]
    assert [path.name for path in (folder / "checkpoints").glob("[0-9]*")] == [str(last)]
    assert not [worker_record.read(p) for p in (folder / "cluster").glob("*.record")]
