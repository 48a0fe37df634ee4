"""The guide's own example runs as it is printed."""

import re
from pathlib import Path

GUIDE = Path(__file__).parents[3] / "docs" / "guides" / "configuration.md"


def test_the_example_of_the_guide_runs(tmp_path, capsys, monkeypatch):
    [code] = re.findall(r"```python\n(.*?)```", GUIDE.read_text(encoding="utf-8"), re.DOTALL)
    (tmp_path / "guide_example.py").write_text(code, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    __import__("guide_example")
    out = capsys.readouterr().out
    assert "  floor: 0.2\n" in out
    assert "schedule.floor: 0.1 -> 0.2\n" in out
