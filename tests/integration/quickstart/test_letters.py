"""`fornax diffusion quickstart`: every stage, the report, and a second call."""

import json
from pathlib import Path

import pytest
from rich.console import Console

from fornax.config.errors import ConfigError
from fornax.quickstart.letters.config import LettersQuickstartConfig
from fornax.quickstart.letters.pipeline import run


@pytest.mark.exhaustive
def test_every_stage_runs_and_is_kept(tmp_path: Path) -> None:
    config = LettersQuickstartConfig(size="tiny", steps=10, run_dir=tmp_path / "letters")
    console = Console(quiet=True)
    assert run(config, console=console) == 0
    stages = {
        path.stem: json.loads(path.read_text()) for path in config.run_dir.glob("stages/*.json")
    }
    host = stages["host"]["result"]
    assert host["exit_code"] == 0
    assert host["largest_difference"] < 1e-3
    assert len(stages["training"]["result"]["rows"]) == 5
    for row in stages["judged"]["result"]["rows"]:
        assert 0 <= row["held_out_both"] <= row["held_out_letter"] <= 1
    page = (config.run_dir / "report.html").read_text()
    assert "data:image/webp;base64," in page
    assert run(config, console=console) == 0
    again = {
        path.stem: json.loads(path.read_text()) for path in config.run_dir.glob("stages/*.json")
    }
    assert again == stages
    other = LettersQuickstartConfig(size="tiny", steps=12, run_dir=config.run_dir)
    with pytest.raises(ConfigError, match="other settings"):
        run(other, console=console)
