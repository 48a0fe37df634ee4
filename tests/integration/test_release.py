"""`make release` refuses what is not ready, and its dry run builds what a release would upload."""

import importlib.util
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

import fornax

ROOT = Path(__file__).resolve().parents[2]
VERSION = fornax.__version__
DATED = f"# Changelog\n\n## Unreleased\n\n## {VERSION} (2026-12-01)\n\n### Added\n\n- All of it.\n"


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A repository that is ready to be released: the parts of this one that a release reads."""
    root = tmp_path / "checkout"
    for name in (
        ".ci/release.py",
        ".gitignore",
        "CITATION.cff",
        "LICENSE",
        "README.md",
        "docs/reference/stable-names.txt",
        "pyproject.toml",
        "src/fornax/__init__.py",
        "src/fornax/py.typed",
        "wheel_build.py",
    ):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, root / name)
    shutil.copytree(ROOT / "recipes", root / "recipes")
    (root / "tests/data/releases").mkdir(parents=True)
    (root / f"tests/data/releases/{VERSION}.tar.xz").write_bytes(b"")
    (root / "CHANGELOG.md").write_text(DATED)
    git(root, "init", "-q")
    commit(root)
    return root


def git(root: Path, *words: str) -> str:
    own = ["-c", "user.name=t", "-c", "user.email=t@localhost", "-c", "commit.gpgsign=false"]
    command = ["git", "-C", str(root), *own, *words]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def commit(root: Path) -> None:
    git(root, "add", "--all")
    git(root, "commit", "-q", "-m", "ready")


def release(root: Path, *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, ".ci/release.py", *words]
    return subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)


def replace(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


@pytest.mark.slow
def test_a_dry_run_builds_both_distributions_and_tags_nothing(checkout: Path) -> None:
    done = release(checkout, "--dry")
    assert done.returncode == 0, done.stderr
    assert f"would tag v{VERSION}; nothing was uploaded" in done.stdout
    names = [path.name for path in sorted((checkout / "build/dry").iterdir())]
    assert names == [f"fornax_ai-{VERSION}-py3-none-any.whl", f"fornax_ai-{VERSION}.tar.gz"]
    with tarfile.open(checkout / "build/dry" / names[1]) as archive:
        assert f"fornax_ai-{VERSION}/CHANGELOG.md" in archive.getnames()
    assert git(checkout, "tag") == ""
    assert git(checkout, "status", "--porcelain") == ""


def test_what_is_not_ready_is_named_and_nothing_is_built(checkout: Path) -> None:
    def refused(*words: str) -> str:
        done = release(checkout, "--dry", *words)
        assert done.returncode == 2
        assert "Traceback" not in done.stderr
        assert not (checkout / "build").exists()
        return done.stderr

    (checkout / "new.py").write_text("")
    assert "the tree has changes: ?? new.py" in refused()
    (checkout / "new.py").unlink()

    said = refused("--version", "9.9.9")
    assert f"pyproject.toml has version {VERSION}, and the release is 9.9.9" in said
    assert "no section `## 9.9.9 (YYYY-MM-DD)`" in said
    assert "9.9.9.tar.xz is missing" in said

    git(checkout, "tag", f"v{VERSION}")
    assert f"the tag v{VERSION} is there" in refused()
    git(checkout, "tag", "-d", f"v{VERSION}")

    replace(checkout / "CITATION.cff", f"version: {VERSION}", "version: 0.0.1")
    commit(checkout)
    assert "CITATION.cff has version 0.0.1" in refused()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("# Changelog\n\n## Unreleased\n\n- One.\n", "no section"),
        (DATED.replace("2026-12-01", "soon"), "no section"),
        (DATED.replace(" (2026-12-01)", ""), "no section"),
        (DATED.replace("### Added\n\n- All of it.\n", ""), "says nothing"),
        (DATED.replace("## Unreleased\n", "## Unreleased\n\n- Late.\n"), "under `## Unreleased`"),
    ],
)
def test_the_changelog_must_have_a_dated_section(checkout: Path, text: str, said: str) -> None:
    (checkout / "CHANGELOG.md").write_text(text)
    commit(checkout)
    done = release(checkout, "--dry")
    assert done.returncode == 2
    assert [line for line in done.stderr.splitlines() if said in line]


def test_versions_of_this_tree_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    spec = importlib.util.spec_from_file_location("release", ROOT / ".ci" / "release.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert set(module.versions().values()) == {VERSION}
