"""A host that comes for one that was lost, with other code: nobody trains on beside it."""

import shutil
from pathlib import Path
from typing import Any

import pytest

import fornax
from fornax.cluster import drill

pytestmark = [pytest.mark.fault, pytest.mark.slow]

LAUNCH = """
import sys
from pathlib import Path
from fornax.cluster import Job
from fornax.cluster.files import ClusterFiles
from fornax.cluster.launch import opened_run
from fornax.cluster.local import LocalEngine, LocalLauncher
from fornax.config.worker_process import WorkerProcess

hosts, run_dir, other = int(sys.argv[1]), Path(sys.argv[2]), sys.argv[4]

class Launcher(LocalLauncher):
    def start(self, ranks):
        if not (run_dir / "lost").exists():
            return super().start(ranks)
        return {rank: self.other(rank) for rank in ranks}

    def other(self, rank):
        with self.files.services.open("ab") as log:
            changed = {"PYTHONPATH": other}
            agent = WorkerProcess("fornax.cluster.agent:run", log=log, environment=changed)
        setup = {"run_dir": str(run_dir), "rank": rank, "place": rank}
        agent.send({**setup, "spare": False, "imports": []})
        return agent

class Engine(LocalEngine):
    def launcher(self, files, *, spare):
        return Launcher(files=files, spare=spare)

words = ("train", "--config", sys.argv[3], "--run-dir", str(run_dir))
job = Job(hosts=hosts, words=words)
files, engine = ClusterFiles(run_dir), Engine(hosts)
announce = lambda line: print(line, flush=True)
with files.held(), opened_run(job, files, engine, spare=True, announce=announce) as controller:
    sys.exit(controller.run())
"""


def test_a_newcomer_with_other_code_is_named_and_refused(launch: Any, tmp_path: Path):
    """One byte more in one file."""
    root = Path(fornax.__file__).parent
    ignore = shutil.ignore_patterns("__pycache__")
    shutil.copytree(root, tmp_path / "other" / "fornax", ignore=ignore)
    with (tmp_path / "other" / "fornax" / "optim" / "__init__.py").open("a") as file:
        file.write("\n")
    run = launch(script=LAUNCH, words=[str(tmp_path / "other")], steps=100_000)
    run.wait_for_step(1, 6)
    (run.run_dir / "lost").touch()
    drill(run.run_dir, "lose", 1)
    code, output = run.finish()
    assert code == 2, output
    assert [kind for kind, _ in run.faults()] == ["agent", "failed"], output
    said = run.events()[-2]["last_line"]
    assert "the processes do not agree, so none trains: process 1 differs from process 0 in" in said
    assert "the code (" in said
    assert len([e for e in run.events() if e.get("state") == "running" and "step" in e]) == 1
    assert not run.descendants()
