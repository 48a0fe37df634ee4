"""What is wrong with a file of JSON, and what to do."""

from pathlib import Path

import pytest

from fornax.config.errors import CheckpointError
from fornax.config.json_files import read_json_object


def test_an_object_is_read(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_bytes('{"name": "Gr\u00fcn", "layers": 2}'.encode())
    assert read_json_object(file) == {"name": "Gr\u00fcn", "layers": 2}


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, r"config.json cannot be read \(No such file or directory\); give a folder"),
        (b"", "config.json is not JSON: Expecting value.*; copy it again"),
        (b'{"a": ', "config.json is not JSON: "),
        (b'{"a": "\xff"}', "config.json is not JSON: .*codec can't decode"),
        (b"[1]", "config.json holds a list, not a mapping of keys; copy it again"),
    ],
)
def test_what_is_none_is_said(tmp_path: Path, content: bytes | None, said: str) -> None:
    file = tmp_path / "config.json"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(CheckpointError, match=said):
        read_json_object(file, "give a folder")
