"""A hub on 127.0.0.1: as much of the Hugging Face Hub's routes as fetching needs, and faults."""

import hashlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from urllib.parse import parse_qs

import pytest
from tests.caches import fresh_cache
from tests.integration.local_http import Handler, serving
from tests.unit.tune.tiny import save_chats, save_model
from tests.xla_flags import xla_flags

COMMAND = "import sys; from fornax.cli.main import main; sys.exit(main(sys.argv[1:]))"
_ROUTE = re.compile(
    r"/api/(?P<kind>models|datasets)/(?P<name>[^/]+/[^/]+?)"
    r"(/(?P<what>revision|tree|paths-info)/(?P<rev>[^/?]+)(/(?P<folder>[^?]+))?)?(\?.*)?$"
    r"|(?P<data>/datasets)?/(?P<repo>[^/]+/[^/]+)/resolve/(?P<at>[^/]+)/(?P<file>[^?]+)"
)


class Hub:
    """Repositories by kind and name: files by name, of each of their commits."""

    def __init__(self) -> None:
        self.repositories: dict[tuple[str, str], dict[str, dict[str, bytes]]] = {}
        self.private: set[str] = set()
        self.cut: set[str] = set()
        """Files whose next download ends half way."""
        self.requests: list[str] = []
        self.address = ""

    def push(self, kind: str, name: str, files: dict[str, bytes]) -> str:
        """A new commit, which `main` then names."""
        commits = self.repositories.setdefault((kind, name), {})
        text = repr((name, len(commits), sorted(files)))
        commit = hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest()
        commits[commit] = files
        return commit

    def fetched(self, since: int = 0) -> list[str]:
        """Files whose contents were sent, in order."""
        got = (r.partition("/resolve/")[2] for r in self.requests[since:] if r.startswith("GET "))
        return [each.partition("/")[2] for each in got if each]


class _Handler(Handler):
    hub: Hub

    def answer(self, body: bytes) -> None:
        text = body.decode()
        fields = json.loads(text) if text[:1] == "{" else parse_qs(text)
        paths: Sequence[str] = fields.get("paths", ())
        self.hub.requests.append(f"{self.command} {self.path}")
        match = _ROUTE.match(self.path)
        if match is None:
            return self._refuse(404, "EntryNotFound")
        kind = match["kind"] or ("datasets" if match["data"] else "models")
        name, revision = match["name"] or match["repo"], match["rev"] or match["at"] or "main"
        if name in self.hub.private and self.headers.get("Authorization") != "Bearer let-me-in":
            return self._refuse(403, "GatedRepo")
        commits = self.hub.repositories.get((kind, name))
        if commits is None:
            return self._refuse(401, "RepoNotFound")
        commit = list(commits)[-1] if revision == "main" else revision
        if commit not in commits:
            return self._refuse(404, "RevisionNotFound")
        files = commits[commit]
        if match["name"] and match["what"] in (None, "revision"):
            siblings = [{"rfilename": each} for each in files]
            return self._json({"id": name, "sha": commit, "siblings": siblings, "tags": []})
        if match["what"] == "paths-info":
            return self._json([_entry(each, files[each]) for each in paths if each in files])
        if match["what"] == "tree":
            return self._json(_tree(files, match["folder"] or "", "recursive=true" in self.path))
        if match["file"] not in files:
            return self._refuse(404, "EntryNotFound")
        return self._file(match["file"], files[match["file"]], commit)

    def _file(self, name: str, data: bytes, commit: str) -> None:
        start = 0
        wanted = self.headers.get("Range")
        if wanted and self.command == "GET":
            start = int(wanted.removeprefix("bytes=").partition("-")[0])
        self.send_response(206 if start else 200)
        if start:
            self.send_header("Content-Range", f"bytes {start}-{len(data) - 1}/{len(data)}")
        self.send_header("Content-Length", str(len(data) - start))
        self.send_header("ETag", f'"{_digest(data)}"')
        self.send_header("X-Repo-Commit", commit)
        self.send_header("Accept-Ranges", "bytes")
        self.end_headers()
        if self.command == "GET":
            if name in self.hub.cut:
                self.hub.cut.remove(name)
                self.wfile.write(data[start : start + (len(data) - start) // 2])
                self.close_connection = True
            else:
                self.wfile.write(data[start:])

    def _json(self, content: object) -> None:
        self.send(200, json.dumps(content).encode(), "application/json")

    def _refuse(self, code: int, kind: str) -> None:
        error = {"X_Error_Code": kind, "X_Error_Message": kind}
        self.send(code, b'{"error": "no"}', "application/json", **error)


def _tree(files: dict[str, bytes], folder: str, recursive: bool) -> list[dict[str, object]]:
    start = f"{folder.strip('/')}/".lstrip("/")
    entries = {}
    for name, data in files.items():
        if name.startswith(start):
            head, deeper, _ = name.removeprefix(start).partition("/")
            if deeper and not recursive:
                path = start + head
                entries[path] = {"type": "directory", "path": path, "oid": _digest(path.encode())}
            else:
                entries[name] = _entry(name, data)
    return list(entries.values())


def _entry(name: str, data: bytes) -> dict[str, object]:
    return {"type": "file", "path": name, "size": len(data), "oid": _digest(data)}


def _digest(data: bytes) -> str:
    return hashlib.sha1(data, usedforsecurity=False).hexdigest()


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with `model/` (two layers) and `chats.jsonl`."""
    folder = tmp_path_factory.mktemp("tiny")
    save_model(folder)
    save_chats(folder / "chats.jsonl", 24)
    return folder


@pytest.fixture
def hub(tiny: Path) -> Iterator[Hub]:
    """A running hub with the model `org/tiny` and the dataset `org/chats`."""
    hub = Hub()
    model = {
        str(p.relative_to(tiny / "model")): p.read_bytes()
        for p in (tiny / "model").rglob("*")
        if p.is_file()
    }
    unwanted = ("pytorch_model.bin", "handler.py", "original/model.safetensors", "README.md")
    hub.push("models", "org/tiny", model | dict.fromkeys(unwanted, b"never fetched"))
    chats = (tiny / "chats.jsonl").read_bytes()
    splits = {"data/train.jsonl": chats, "data/test.jsonl": b"{}\n", "load.py": b"import os"}
    hub.push("datasets", "org/chats", splits)
    hub.push("datasets", "org/texts", {"texts.jsonl": b'{"text": "a b c a b c a b c"}\n' * 200})

    with serving(type("Handler", (_Handler,), {"hub": hub})) as hub.address:
        yield hub


Fornax = Callable[..., tuple[int, str]]


@pytest.fixture(scope="session")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> str:
    """One compilation cache for all processes."""
    return fresh_cache(tmp_path_factory.mktemp("cache"))


@pytest.fixture
def begin(hub: Hub, tmp_path: Path, compiled: str) -> Callable[..., subprocess.Popen]:
    """Start `fornax` with these words and variables."""

    def start(*words: str | Path, **variables: str) -> subprocess.Popen:
        kept = {k: v for k, v in os.environ.items() if k != "NPROC"} | {"XLA_FLAGS": xla_flags()}
        told = {
            "HF_ENDPOINT": hub.address,
            "HF_HOME": str(tmp_path / "hub"),
            "HF_HUB_OFFLINE": "0",
            "FORNAX_CACHE_DIR": compiled,
            "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",
        }
        return subprocess.Popen(
            [sys.executable, "-c", COMMAND, *map(str, words)],
            env=kept | told | variables,
            cwd=tmp_path,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    return start


@pytest.fixture
def fornax(begin: Callable[..., subprocess.Popen]) -> Fornax:
    """Run `fornax` with these words and variables; its exit code and what it printed."""

    def run(*words: str | Path, **variables: str) -> tuple[int, str]:
        process = begin(*words, **variables)
        output, _ = process.communicate(timeout=400)
        return process.returncode, output

    return run
