"""The numerics of every native kernel once more, with instructions of this processor masked."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from fornax.kernels._native import build, units

HERE = Path(__file__).parent
FILES = (
    "attention",
    "blocks",
    "convolution",
    "experts",
    "few_rows",
    "group_norm",
    "grouped_matmul",
    "layer",
    "matmul",
    "norm",
    "packed",
    "packed_experts",
    "paged_attention",
    "ragged_convolution",
    "ragged_delta_rule",
    "sampling",
)


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", units.PREBUILT)
def test_kernels_are_right_with_features_masked(name: str) -> None:
    if not units.PREBUILT[name][1] <= build._features():
        pytest.skip(f"this processor cannot run code compiled for {name}")
    command = [sys.executable, "-m", "pytest", "-p", "tests.masked", "-m", "not exhaustive"]
    done = subprocess.run(
        [*command, "-p", "no:cacheprovider", *(str(HERE / f"test_{file}.py") for file in FILES)],
        cwd=HERE.parents[2],
        env={**os.environ, "INSTRUCTION_SET": name},
        capture_output=True,
        text=True,
        timeout=1800,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    assert f"native kernels: {' '.join(units.PREBUILT[name][0])}" in done.stdout
