"""README and the page of status say of devices what the results files say, and no more."""

import importlib.util
import json
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def status() -> ModuleType:
    spec = importlib.util.spec_from_file_location("status", ROOT / "benchmarks" / "status.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_readme_has_the_generated_sentence_on_devices(status: ModuleType) -> None:
    sentence = status.sentence(status.read(status.RESULTS))
    assert sentence in (ROOT / "README.md").read_text()


def test_the_page_is_the_generated_one(status: ModuleType) -> None:
    told = status.page(status.read(status.RESULTS))
    assert status.PAGE.read_text() == told, "run: python benchmarks/status.py"


def test_the_guide_and_the_doctor_have_the_generated_table(status: ModuleType) -> None:
    results = status.read(status.RESULTS)
    text = status.INSTALL.read_text()
    assert status.with_table(text, results) == text, "run: python benchmarks/status.py"
    assert status.shipped(results) == status.SHIPPED.read_text(), "run: python benchmarks/status.py"
    assert status.table(results) in status.PAGE.read_text()


def test_a_run_on_a_gpu_changes_the_sentence_and_names_what_failed(
    status: ModuleType, tmp_path: Path
) -> None:
    for name in ("2026-01-01-cpu-train_step.md", "2026-01-01-cpu-plan_published.md"):
        (tmp_path / name).write_text("")
    (tmp_path / "notes.txt").write_text("no results file")
    before = "Measured on CPU; programs compiled for TPU; not yet run on GPU or TPU."
    assert status.sentence(status.read(tmp_path)) == before
    outcomes = {"test_kernels.py::test_a": "passed", "test_kernels.py::test_b": "failed"}
    told = json.dumps({"tests": outcomes})
    (tmp_path / "2026-01-02-nvidia_h200-device_test.json").write_text(told)
    after = "Measured on CPU and GPU; programs compiled for TPU; not yet run on TPU."
    assert status.sentence(status.read(tmp_path)) == after
    assert "device tests on nvidia_h200, 2026-01-02: 1 failed" in status.table(
        status.read(tmp_path)
    )
    page = status.page(status.read(tmp_path))
    assert "tested on nvidia_h200" in page
    assert "failed: test_kernels.py::test_b" in page
    assert page.count("- never run") == 1
