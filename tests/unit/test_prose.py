"""The check of words finds a phrase where a reader sees it, and only there."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def prose() -> ModuleType:
    spec = importlib.util.spec_from_file_location("prose", ROOT / "tools" / "prose.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["prose"] = module
    spec.loader.exec_module(module)
    return module


def lines(prose: ModuleType, path: str, text: str) -> list[int]:
    rule = prose.Rule(find=prose.pattern("goes on"), write="continues", allow=("docs/old/*",))
    return [f.line for f in prose.check(path, text, [rule])]


def test_markdown_is_read_across_line_breaks(prose: ModuleType) -> None:
    assert lines(prose, "docs/a.md", "# Title\n\nThe run Goes\non. It goes only.\n") == [3]


def test_a_path_that_a_rule_allows_is_left_out(prose: ModuleType) -> None:
    assert lines(prose, "docs/old/a.md", "it goes on") == []
    assert lines(prose, "docs/new/a.md", "it goes on") == [1]


def test_python_is_read_in_docstrings_comments_and_strings(prose: ModuleType) -> None:
    text = '''"""It goes
on."""

# it goes
# on
goes = on = x = 1
message = (
    f"the run {x} goes "
    f"on at {x:>4}"
)
error = rf'{", ".join(str(y) for y in [x])} goes on'
'''
    assert lines(prose, "a.py", text) == [1, 4, 8, 11]


@pytest.mark.parametrize(
    "text",
    [
        'names = ["it goes", "on"]',
        "goes, on = 1, 2",
        'goes = "on"',
        '"one goes"  + other(x) + " on"',
        '"it goes once"',
        'f"it goes{on}" f" {x} on"',
        'f"{goes on}"',
    ],
)
def test_code_between_words_parts_them(prose: ModuleType, text: str) -> None:
    assert lines(prose, "a.py", text + "\n") == []


def test_a_line_break_in_a_message_is_a_space(prose: ModuleType) -> None:
    assert lines(prose, "a.py", r'"it goes\non"' + "\n") == [1]


def test_a_rule_with_an_unknown_key_is_refused(prose: ModuleType, tmp_path: Path) -> None:
    file = tmp_path / "rules.toml"
    file.write_text('paths = []\nskip = []\n[[rule]]\nfind = "a"\nwrite = "b"\nexcept = []\n')
    with pytest.raises(ValueError, match="except"):
        prose.read_rules(file)


def test_the_rules_are_read_and_no_rule_finds_its_replacement(prose: ModuleType) -> None:
    config = prose.read_rules()
    assert len(config.rules) > 20
    for rule in config.rules:
        assert not rule.find.search(rule.write), rule.write


def test_named_files_are_checked_and_decide_the_exit_code(
    prose: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(prose, "ROOT", tmp_path)
    (tmp_path / "good.md").write_text("The run continues.\n")
    (tmp_path / "bad.md").write_text("Fine.\nWe mend it.\n")
    assert prose.main([str(tmp_path / "good.md")]) == 0
    assert prose.main([str(tmp_path / "bad.md")]) == 1
    assert 'bad.md:2: "mend": write "fix" or "correct"' in capsys.readouterr().out
    with pytest.raises(SystemExit):
        prose.main([str(tmp_path / "nothing.md")])
    assert "nothing.md is not a file of this repository" in capsys.readouterr().err
