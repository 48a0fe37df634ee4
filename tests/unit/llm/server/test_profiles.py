"""`/start_profile` and `/stop_profile`: there with a folder, guarded by the key, one at a time."""

import time
from pathlib import Path
from typing import Any

import pytest

from fornax import profile
from fornax.config import ConfigError
from fornax.llm.server import ServerConfig


def test_a_profile_is_started_and_stopped_and_never_two_at_once(
    make_app: Any, tmp_path: Path
) -> None:
    app = make_app(profile_dir=tmp_path)
    begun = app.post("/start_profile?seconds=30")
    assert begun.status_code == 200, begun.text
    folder = Path(begun.json()["directory"])
    assert folder.parent == tmp_path / "plugins" / "profile"
    assert begun.json()["running"] is True
    second = app.post("/start_profile")
    assert second.status_code == 400
    assert "runs already" in second.json()["error"]["message"]
    done = app.post("/stop_profile")
    assert (done.status_code, done.json()) == (200, {"directory": str(folder), "running": False})
    assert profile.captures(folder)
    again = app.post("/stop_profile")
    assert again.status_code == 400
    assert "no profile runs" in again.json()["error"]["message"]


def test_a_profile_ends_by_itself(make_app: Any, tmp_path: Path) -> None:
    app = make_app(profile_dir=tmp_path, profile_max_seconds=0.1)
    folder = Path(app.post("/start_profile").json()["directory"])
    until = time.monotonic() + 240
    while not list(folder.glob("*.xplane.pb")):
        assert time.monotonic() < until
        time.sleep(0.02)
    assert app.post("/stop_profile").json()["directory"] == str(folder)


@pytest.mark.parametrize("seconds", ["0", "-1", "61", "nan", "inf", "x", ""])
def test_a_time_that_no_profile_may_take_is_refused(
    make_app: Any, tmp_path: Path, seconds: str
) -> None:
    answer = make_app(profile_dir=tmp_path).post(f"/start_profile?seconds={seconds}")
    assert answer.status_code == 400, answer.text
    assert "seconds" in str(answer.json()["error"])
    assert not list(tmp_path.iterdir())


def test_there_is_no_such_path_without_a_folder_nor_without_the_key(
    make_app: Any, tmp_path: Path
) -> None:
    assert make_app().post("/start_profile").status_code == 404
    guarded = make_app(profile_dir=tmp_path, api_key=("secret",))
    assert guarded.post("/start_profile").status_code == 401
    assert guarded.post("/stop_profile").status_code == 401
    assert not list(tmp_path.iterdir())


def test_the_longest_time_is_checked() -> None:
    with pytest.raises(ConfigError, match="profile_max_seconds=0 must be above 0"):
        ServerConfig(profile_max_seconds=0)
