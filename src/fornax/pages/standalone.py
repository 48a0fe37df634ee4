"""Interactive pages in one file: modules, styles and data inside, nothing loaded from elsewhere.

A browser opens the file from a disk, without a server and without a network. Modules import each
other by bare names ("fornax/table.js"), which an import map resolves: to `data:` addresses here, to
paths where a server gives the same files out.
"""

import base64
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from markupsafe import Markup

from fornax.pages.page import STATIC, fill

__all__ = ["SCRIPTS", "STYLES", "modules", "standalone", "to_json"]

_UPLOT = STATIC / "vendor" / "uplot"
SCRIPTS = (_UPLOT / "uPlot.iife.min.js",)
"""Classic scripts that the shared modules need."""
STYLES = (_UPLOT / "uPlot.min.css", STATIC / "theme.css", STATIC / "interactive.css")
"""Style sheets of interactive pages; a page's own come after them."""


def modules(folder: Path, prefix: str) -> dict[str, Path]:
    """Shared modules ("fornax/table.js") and a page's own ("<prefix>/<name>.js"), by name."""
    shared = {f"fornax/{path.name}": path for path in sorted(STATIC.glob("*.js"))}
    own = {f"{prefix}/{path.name}": path for path in sorted(folder.glob("*.js"))}
    return shared | own


def standalone(
    *,
    title: str,
    modules: Mapping[str, Path],
    entry: str,
    styles: Sequence[Path],
    data: object,
    scripts: Sequence[Path] = (),
) -> str:
    """An HTML document that holds all that it needs.

    Args:
      title: of the document; plain text.
      modules: JavaScript modules by the names under which they import each other.
      entry: which of them runs; it finds `data` as JSON in the element `data`, and fills `page`.
      styles: style sheets, in order.
      data: what `to_json` takes.
      scripts: classic scripts that run before the modules, such as vendored libraries.

    Raises:
      ValueError: when `data` holds what JSON does not.
    """
    imports = {
        name: "data:text/javascript;base64," + base64.b64encode(path.read_bytes()).decode()
        for name, path in modules.items()
    }
    return fill(
        "standalone.html.j2",
        title=title,
        styles=_raw(styles),
        imports=Markup(to_json({"imports": imports})),
        data=Markup(to_json(data)),
        scripts=[_raw([path]) for path in scripts],
        entry=entry,
    )


def to_json(value: object) -> str:
    """JSON that may stand inside a script element, and that browsers parse: NaN and infinities
    become null.

    Raises:
      ValueError: when the value holds what JSON does not.
    """
    try:
        text = json.dumps(
            _finite(value), ensure_ascii=False, allow_nan=False, separators=(",", ":")
        )
    except TypeError as error:
        raise ValueError(f"a page's data is not JSON: {error}") from error
    return text.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _finite(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(each) for each in value]
    return value


def _raw(paths: Sequence[Path]) -> Markup:
    """Sources of ours as they are; they cannot end the element that they are in."""
    text = "\n".join(path.read_text(encoding="utf-8") for path in paths)
    return Markup(text.replace("</script", "<\\/script").replace("</style", "<\\/style"))
