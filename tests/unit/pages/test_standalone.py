"""Interactive pages in one file."""

import json
import re
from pathlib import Path

import pytest

from fornax.pages import standalone, to_json


def test_data_cannot_leave_its_element(tmp_path: Path) -> None:
    module = tmp_path / "a.js"
    module.write_text("export const a = 1;")
    data = {"name": "</script><script>alert(1)</script>", "loss": [1.0, float("nan")]}
    page = standalone(title="<b>", modules={"a.js": module}, entry="a.js", styles=[], data=data)
    held = re.search(r'<script type="application/json" id="data">(.*?)</script>', page)
    assert held is not None
    assert json.loads(held.group(1)) == {"name": data["name"], "loss": [1.0, None]}
    assert "<title>&lt;b&gt;</title>" in page
    assert "http" not in page.replace("http-equiv", "")


def test_what_is_no_json_is_refused() -> None:
    with pytest.raises(ValueError, match="not JSON"):
        to_json({"path": Path("x")})
