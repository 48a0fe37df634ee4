"""jax's coordination service outside the workers: the private call, and what rests on it."""

import inspect
import os
import socket
import subprocess
import sys
from pathlib import Path

import jax
import pytest

from fornax.cluster.coordination import CoordinationService

RANK = """
import os, sys
import jax
rank, action = int(sys.argv[2]), sys.argv[3]
jax.distributed.initialize(sys.argv[1], 2, rank, coordinator_bind_address="127.0.0.1:0")
from jax.experimental.multihost_utils import process_allgather
import numpy as np
print(process_allgather(np.int32(rank)).tolist(), flush=True)
if action == "die":
    os._exit(9)
from jax._src import distributed
client = distributed.global_state.client
client.key_value_set("after", "alive")
print(client.blocking_key_value_get("after", 5000), flush=True)
os._exit(0)
"""


@pytest.mark.slow
def test_it_outlives_process_0(tmp_path: Path):
    """jax's own service is in process 0; this one still answers process 1 when that is dead."""
    with (tmp_path / "log").open("ab") as log, CoordinationService(2, log) as service:
        ranks = [
            subprocess.Popen(
                [sys.executable, "-c", RANK, service.address, str(rank), action],
                env={**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": ""},
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            for rank, action in ((0, "die"), (1, "live"))
        ]
        outputs = [process.communicate(timeout=400) for process in ranks]
        assert service.alive()
    assert [process.returncode for process in ranks] == [9, 0], outputs
    assert "[0, 1]" in outputs[0][0]
    assert "[0, 1]\nalive" in outputs[1][0]
    assert not service.alive()
    host, _, port = service.address.partition(":")
    with pytest.raises(OSError, match="refused"):
        socket.create_connection((host, int(port)), timeout=5)


def test_jax_has_the_private_call_and_the_public_argument_that_this_rests_on():
    """A jax that lacks either must fail here and not in a run."""
    from jaxlib import _jax

    said = _jax.get_distributed_runtime_service.__doc__ or ""
    for part in ("address: str", "num_nodes: int", "heartbeat_timeout", "shutdown_timeout"):
        assert part in said, f"jax {jax.__version__}: {said}"
    parameters = inspect.signature(jax.distributed.initialize).parameters
    assert "coordinator_bind_address" in parameters
