"""Check, test, build and tag a release: `make release`, or `make release DRY=1` for a dry run.

A dry run makes every check and builds both distributions in build/dry/; it runs no tests, compiles
no kernels and sets no tag. Nothing is ever uploaded. docs/reference/versioning.md says what to
prepare and how to publish.
"""

import argparse
import datetime
import os
import re
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

NAMES = Path("docs/reference/stable-names.txt")
FILES = Path("tests/data/releases")


def git(*words: str) -> str:
    """What git says, stripped."""
    done = subprocess.run(["git", *words], capture_output=True, text=True, check=True)
    return done.stdout.strip()


def versions() -> dict[str, str]:
    """The version that each file states."""
    found = {
        "pyproject.toml": tomllib.loads(Path("pyproject.toml").read_text())["project"]["version"]
    }
    for name, pattern in {
        "src/fornax/__init__.py": r'^__version__ = "(.+)"$',
        "CITATION.cff": r"^version: (.+)$",
        str(NAMES): r"^# Stable names of ([^\s,]+)",
    }.items():
        path = Path(name)
        match = re.search(pattern, path.read_text(), re.MULTILINE) if path.exists() else None
        found[name] = match[1] if match else "none"
    return found


def section(version: str) -> tuple[str | None, str]:
    """The date and the text of a version's section of the changelog."""
    text = Path("CHANGELOG.md").read_text()
    match = re.search(
        rf"^## {re.escape(version)}(?: \((.*)\))?\n(.*?)(?=^## |\Z)", text, re.MULTILINE | re.DOTALL
    )
    return (match[1], match[2].strip()) if match else (None, "")


def problems(version: str) -> list[str]:
    """What keeps this tree from being released as `version`, each with its fix."""
    said = []
    changed = git("status", "--porcelain")
    if changed:
        said.append(f"the tree has changes: {', '.join(changed.splitlines())}; commit them first")
    for name, other in versions().items():
        if other != version:
            fix = "run `python docs/stability.py --release`" if name == str(NAMES) else "correct it"
            said.append(f"{name} has version {other}, and the release is {version}; {fix}")
    if git("tag", "--list", f"v{version}"):
        said.append(f"the tag v{version} is there; choose the next version")
    date, text = section(version)
    try:
        datetime.date.fromisoformat(date or "")
    except ValueError:
        said.append(
            f"CHANGELOG.md has no section `## {version} (YYYY-MM-DD)`; rename `## Unreleased`"
        )
    else:
        if not text:
            said.append(f"CHANGELOG.md says nothing about {version}; list its changes")
        if section("Unreleased")[1]:
            said.append(
                "CHANGELOG.md has changes under `## Unreleased`; they are part of this release: "
                f"move them to `## {version}`"
            )
    if not (FILES / f"{version}.tar.xz").exists():
        said.append(
            f"{FILES}/{version}.tar.xz is missing, which tests that later versions read the files "
            f"of this one; run `python {FILES}/write.py`"
        )
    return said


def build(version: str, out: Path, *, dry: bool) -> list[Path]:
    """Build the version's two distributions in `out`; a dry run compiles no kernels."""
    command = [sys.executable, "-m", "hatchling", "build", "-d", str(out), "-t", "sdist"]
    subprocess.run([*command, *(["-t", "wheel"] if dry else [])], check=True)
    if not dry:
        subprocess.run(["make", "wheel"], check=True)
    return sorted(out.glob(f"fornax_ai-{version}[-.]*"))


def missing(version: str, made: list[Path]) -> list[str]:
    """What the distributions should hold and do not."""
    said = []
    head = f"fornax_ai-{version}"
    sources = [path for path in made if path.name == f"{head}.tar.gz"]
    wheels = [path for path in made if path.match(f"{head}-*.whl")]
    for kind, found in (("source distribution", sources), ("wheel", wheels)):
        if len(found) != 1:
            said.append(f"{len(found)} of a {kind} of {version} were built; remove the others")
    for path in sources:
        with tarfile.open(path) as archive:
            names = set(archive.getnames())
        for name in ("CHANGELOG.md", "LICENSE", "src/fornax/__init__.py", "wheel_build.py"):
            if f"{head}/{name}" not in names:
                said.append(f"{path.name} lacks {name}")
    for path in wheels:
        with zipfile.ZipFile(path) as archive:
            names = set(archive.namelist())
        for name in ("fornax/py.typed", "fornax/recipes/qwen3-8b.yaml"):
            if name not in names:
                said.append(f"{path.name} lacks {name}")
    return said


def main(words: list[str]) -> int:
    """Release, or say in a line each what is in the way; the exit status."""
    parser = argparse.ArgumentParser(prog="make release", description=__doc__.split("\n")[0])
    parser.add_argument("--version", help="the version to release; default: pyproject.toml's")
    parser.add_argument("--dry", action="store_true", help="no tests, no compiled kernels, no tag")
    options = parser.parse_args(words)
    os.chdir(Path(__file__).resolve().parents[1])
    version = options.version or versions()["pyproject.toml"]

    def refuse(said: list[str]) -> int:
        print(*(f"release: {line}" for line in said), sep="\n", file=sys.stderr)  # noqa: T201
        return 2

    if said := problems(version):
        return refuse(said)
    if not options.dry:
        subprocess.run(["make", "lint", "test", "docs"], check=True)
    out = Path("build/dry" if options.dry else "dist")
    made = build(version, out, dry=options.dry)
    if said := missing(version, made):
        return refuse(said)
    tag = f"v{version}"
    if not options.dry:
        message = f"Fornax {version}\n\n{section(version)[1]}"
        # Headings of the changelog begin with what git takes for a comment.
        git("tag", "--annotate", "--cleanup=verbatim", tag, "-m", message)
    done = f"would tag {tag}" if options.dry else f"tagged {tag}"
    print(f"built {', '.join(str(path) for path in made)}; {done}; nothing was uploaded")  # noqa: T201
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except subprocess.CalledProcessError as error:
        detail = (error.stderr or "").strip()
        sys.exit(f"release: `{' '.join(map(str, error.cmd))}` failed; nothing was tagged. {detail}")
