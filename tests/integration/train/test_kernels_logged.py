"""A run says which implementation each kernel got, and why no faster one; so does its plan."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from fornax.config import from_mapping
from fornax.config.progress import Quiet
from fornax.plan.closed_form import kernel_choices
from fornax.plan.topology import named_or_local
from fornax.train import TrainConfig, train


class Lines(Quiet):
    def __init__(self) -> None:
        self.said: list[str] = []

    def log(self, text: str) -> None:
        self.said.append(text)


def _kernels_said(settings: Mapping[str, Any], folder: Path, **changes: Any) -> list[str]:
    config = from_mapping(TrainConfig, {**settings, "steps": 2, "eval": {}, **changes})
    lines = Lines()
    train(config, folder, progress=lines)
    planned = [f"kernel {choice}" for choice in kernel_choices(config, named_or_local("cpu:8"))]
    said = [line for line in lines.said if line.startswith("kernel ")]
    assert said == planned
    return said


@pytest.mark.exhaustive
def test_a_length_divided_over_the_mesh_says_why_the_native_kernel_declines(
    settings: dict[str, Any], tmp_path: Path
) -> None:
    mesh = {"fsdp": 1, "context": 8}
    assert _kernels_said(settings, tmp_path / "run", mesh=mesh) == [
        "kernel attention: ring (native: the mesh divides the length over 8 devices, and over "
        "those 2 key heads, 32 queries and 32 keys of a device do not all divide)"
    ]


@pytest.mark.exhaustive
def test_a_geometry_that_the_fastest_can_run_says_only_its_name(
    settings: dict[str, Any], tmp_path: Path
) -> None:
    assert _kernels_said(settings, tmp_path / "run") == ["kernel attention: native"]
