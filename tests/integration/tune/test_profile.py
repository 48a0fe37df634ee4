"""Steps of post-training, captured by a command."""

from pathlib import Path

import pytest

from fornax import profile
from fornax.cli.main import main

pytestmark = [pytest.mark.slow]


@pytest.mark.parametrize(
    "adapted", [True, pytest.param(False, marks=pytest.mark.exhaustive)], ids=["lora", "full"]
)
def test_steps_of_tuning_are_captured_and_nothing_else_is_kept(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, adapted: bool
) -> None:
    monkeypatch.chdir(tmp_path)
    words = ["--model", str(tiny / "model"), "--data", str(tiny / "chats.jsonl")]
    lora = ["--lora.rank", "4"] if adapted else []
    small = ["--batch-size", "4", "--max-length", "64", "--no-doctor"]
    assert main(["profile", "tune", "sft", *words, *small, *lora, "--steps", "2..3"]) == 0
    found = profile.read(tmp_path / "prof")
    assert [step.number for step in found.steps] == [2, 3]
    modules = {row.key for row in found.ops(by="module").rows}
    assert {"loss", "optimizer", "layers/attention/q"} <= modules
    assert ("layers/attention/q/adapter" in modules) == adapted
    assert [path.name for path in tmp_path.iterdir()] == ["prof"]
