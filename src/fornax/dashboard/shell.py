"""The page itself: its document, the modules and styles that it loads, and the page as one file."""

import base64
import hashlib
import re
from pathlib import Path

from fornax.pages import STATIC

__all__ = ["document", "linked", "modules", "script_hashes", "static_file"]

_OWN = Path(__file__).parent / "static"
"""The modules of this page alone."""

_ROOTS = {"fornax": STATIC, "dashboard": _OWN}
"""By the first part of the path under `/static`, which is the first of a module's name too."""
_TYPES = {
    ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".svg": "image/svg+xml",
    ".woff2": "font/woff2",
    ".html": "text/html; charset=utf-8",
}
_INLINE = re.compile(r"<script(?![^>]*\ssrc=)[^>]*>(.*?)</script>", re.S)


def document() -> str:
    """The document that `/` gives."""
    return (_OWN / "index.html").read_text(encoding="utf-8")


def script_hashes(html: str) -> list[str]:
    """What a content policy says of each script that is in a document: the import map."""
    found = []
    for text in _INLINE.findall(html):
        digest = hashlib.sha256(text.encode()).digest()
        found.append("sha256-" + base64.b64encode(digest).decode())
    return found


def _table() -> dict[str, Path]:
    return {
        f"{name}/{path.relative_to(root).as_posix()}": path
        for name, root in _ROOTS.items()
        for path in sorted(root.rglob("*"))
        if path.is_file() and path.suffix in _TYPES
    }


def static_file(path: str) -> tuple[Path, str] | None:
    """A file under `/static` and its content type; None for what is none of ours."""
    found = _table().get(path)
    return None if found is None else (found, _TYPES[found.suffix])


def modules() -> dict[str, Path]:
    """All modules by the names under which they import each other."""
    return {
        name: path
        for name, path in _table().items()
        if path.suffix == ".js" and "/vendor/" not in name
    }


def linked(html: str) -> tuple[list[Path], list[Path], str]:
    """What a document loads, in order: style sheets, classic scripts, and the module's name."""
    table = _table()
    styles = re.findall(r'<link rel="stylesheet" href="/static/([^"]+)"', html)
    scripts = re.findall(r'<script src="/static/([^"]+)"', html)
    entry = re.findall(r'<script type="module" src="/static/([^"]+)"', html)
    return [table[each] for each in styles], [table[each] for each in scripts], entry[0]
