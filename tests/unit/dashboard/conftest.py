"""A run of the trainer, and a server of the page over a folder of runs."""

import contextlib
import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest


@dataclasses.dataclass
class Site:
    """A running `fornax ui`."""

    folder: Path
    base: str
    token: str
    client: httpx.Client
    process: subprocess.Popen[str]

    def get(self, path: str, status: int = 200, **options: Any) -> httpx.Response:
        """An answer that must have a status."""
        response = self.client.get(path, **options)
        assert response.status_code == status, response.text[:500]
        return response

    def json(self, path: str, **options: Any) -> Any:
        """The JSON of an answer."""
        return self.get(path, **options).json()


@contextlib.contextmanager
def served(folder: Path, *flags: str, port: int = 0) -> Iterator[Site]:
    """`fornax ui FOLDER`, on a free port unless one is given."""
    words = [sys.executable, "-m", "fornax", "ui", str(folder), "--port", str(port), *flags]
    process = subprocess.Popen(
        words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=dict(os.environ)
    )
    try:
        assert process.stdout is not None
        said = process.stdout.readline()
        assert "http://" in said, process.communicate(timeout=20)[1]
        address = said.split()[-1]
        base, _, token = address.partition("/#token=")
        with httpx.Client(base_url=base.rstrip("/"), timeout=120) as client:
            yield Site(folder, base.rstrip("/"), token, client, process)
    finally:
        process.kill()
        process.communicate()


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A pretraining run of twelve steps, as the trainer leaves it."""
    from tests.unit.dashboard.tiny import train_tiny

    return train_tiny(tmp_path_factory.mktemp("real"))


@pytest.fixture(scope="module")
def site(trained: Path) -> Iterator[Site]:
    """The page over that run and others."""
    with served(trained.parent) as found:
        yield found


@pytest.fixture
def write() -> Callable[..., None]:
    """Write records as a run does, a JSON line each."""

    def lines(path: Path, *records: dict[str, Any], mode: str = "a") -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open(mode) as file:
            file.write("".join(json.dumps(record) + "\n" for record in records))

    return lines
