"""Data that ends whichever process gets it: the run stops, names it, and continues without it."""

import os
import re
import shlex
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fornax.checkpoint import Checkpointer
from fornax.config import from_mapping
from fornax.data import DataConfig
from fornax.data.pipeline import open_pipeline

pytestmark = [pytest.mark.fault, pytest.mark.slow]

TRANSFORM = """
import os, signal
import numpy as np

BAD = np.load({path!r})

def check(record):
    if np.array_equal(record["tokens"], BAD):
        os.kill(os.getpid(), signal.SIGKILL)  # as a crash of a library does
    return record
"""

PROGRAM = """
import os, signal
from fornax.cli.main import main
from fornax.train.skip_list import NumberedBatches

given = NumberedBatches.__next__

def give(batches):
    rows = given(batches)
    if batches.position - 1 == 11 and os.environ["FORNAX_PROCESS_ID"] == "1":
        os.kill(os.getpid(), signal.SIGKILL)
    return rows

NumberedBatches.__next__ = give
"""

LAUNCH = """
import sys
from pathlib import Path
from fornax.cluster import Job, launch
from fornax.config import ClusterError

hosts, run_dir = int(sys.argv[1]), Path(sys.argv[2])
words = ("train", "--config", sys.argv[3], "--run-dir", str(run_dir), *sys.argv[4:])
job = Job(hosts=hosts, words=words, program="program:main")
try:
    sys.exit(launch(job, run_dir))
except ClusterError as error:
    print("error:", error)
    sys.exit(2)
"""


def flags_of(output: str, name: str) -> list[str]:
    """The flags that an error tells to give."""
    found = re.search(rf"(--data\.{name} '.*?' --accept-changes data\.\w+)", output)
    assert found is not None, output
    return shlex.split(found[1])


@pytest.mark.exhaustive
def test_a_batch_that_ends_its_process_on_every_host(launch: Any, tmp_path: Path):
    (tmp_path / "program.py").write_text(PROGRAM)

    program = {"script": LAUNCH, "env": {"PYTHONPATH": pythonpath(tmp_path)}}
    run = launch(**program)
    code, output = run.finish()
    assert code == 2, output
    assert run.faults() == [("killed", 1)] * 3, output
    ended = [e for e in run.events() if e.get("state") == "teardown"]
    assert [(e["step"], e["batch"]) for e in ended] == [(12, 11)] * 3
    assert "step 12 failed 3 times, on " in output
    assert "(agent " in output.partition("failed 3 times")[2]
    assert "with batch 11" in output
    again = launch(**program, words=flags_of(output, "skip-steps"))
    code, output = again.finish()
    assert code == 0, output
    assert len(again.faults()) == 3
    assert [step for step, *_ in again.exact()] == list(range(1, 25))
    assert Checkpointer(run.run_dir / "checkpoints").read_metadata(24)["batches"] == 25
    assert not again.descendants()


@pytest.mark.exhaustive
def test_a_record_that_ends_its_process_in_a_transform(
    launch: Any, settings: dict[str, Any], tmp_path: Path
):
    """It is read ahead, before the first step."""
    data = settings["data"]
    pipeline = open_pipeline(
        from_mapping(DataConfig, data), batch_size=8, seq_len=32, split="train"
    )
    part = pipeline.parts[0]
    index = part.source_index(int(pipeline.order.places(7, 3, 1).index[0]))
    np.save(tmp_path / "bad.npy", part.source.__getitems__([index])[0]["tokens"])
    file = tmp_path / "transform.py"
    file.write_text(TRANSFORM.format(path=str(tmp_path / "bad.npy")))
    data = {**data, "transforms": [{"type": "python", "target": f"{file}:check"}]}
    run = launch(data=data, steps=8)
    code, output = run.finish()
    assert code == 2, output
    assert len(run.faults()) == 3, output
    assert f"each time while a transform had record {index} of the data's part main" in output
    flags = flags_of(output, "skip-records")
    again = launch(data=data, steps=8, words=flags)
    code, output = again.finish()
    assert code == 0, output
    assert len(again.faults()) == 3
    assert [step for step, *_ in again.exact()] == list(range(1, 9))


def pythonpath(*folders: Path) -> str:
    return os.pathsep.join([*map(str, folders), os.environ.get("PYTHONPATH", "")])
