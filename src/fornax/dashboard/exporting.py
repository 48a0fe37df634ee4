"""The page as one file: its modules, and the answers that it would ask for."""

import base64
import time
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import quote, urlencode

import orjson

from fornax.dashboard import views
from fornax.dashboard.answers import Answers, RefusedError
from fornax.dashboard.encoding import encode
from fornax.dashboard.series import Axis
from fornax.dashboard.shell import document, linked, modules
from fornax.pages import standalone

__all__ = ["export_page"]

_MOST_WHOLE, _MOST_LISTED = 20, 1000
_POINTS, _LISTED_POINTS = 500, 200
_MOST_NAMES, _MOST_STEPS, _MOST_SAMPLES = 100, 24, 50
_MOST_PICTURES, _PICTURE_BYTES = 24, 512 << 10
_LISTED = ("loss", "eval/loss", "reward")
_DEFAULTS: dict[str, Any] = {
    "step": None,
    "prompt": None,
    "search": "",
    "order": "drawn",
    "offset": 0,
}


def export_page(answers: Answers, runs: Sequence[str]) -> str:
    """An HTML document that holds runs as they are now; of none, the list of all.

    Raises:
      NotFoundError: one of the runs is not there.
      RefusedError: for more runs than a file is made of.
    """
    if len(runs) > _MOST_WHOLE:
        raise RefusedError(f"a file holds at most {_MOST_WHOLE} runs; name fewer")
    listed = answers.runs()
    if runs:
        for name in runs:
            answers.run(name)
        listed["runs"] = [line for line in listed["runs"] if line["id"] in set(runs)]
    listed["runs"] = listed["runs"][:_MOST_LISTED]
    held: dict[str, Any] = {
        "/api/about": answers.about(control=False, token=False),
        "/api/runs": listed,
    }
    if len(runs) > 1:
        held["/api/diff?" + _query([("run", name) for name in runs])] = answers.diff(runs)
    for name in runs:
        _run(answers, name, held)
    if not runs:
        for line in listed["runs"]:
            for metric in _LISTED:
                if metric in line["metrics"]:
                    _curve(answers, line["id"], metric, "step", _LISTED_POINTS, held)
    title = ", ".join(runs[:3]) or answers.about(control=False, token=False)["folder"]
    styles, scripts, entry = linked(document())
    return standalone(
        title=f"{title} · Fornax",
        modules=modules(),
        entry=entry,
        styles=styles,
        scripts=scripts,
        data={"exported": time.time(), "answers": orjson.loads(encode(held))},
    )


def _run(answers: Answers, name: str, held: dict[str, Any]) -> None:
    path = "/api/runs/" + "/".join(quote(part, safe="-_.!~*'()") for part in name.split("/"))
    held[path] = answers.part(name, {})
    for part, limit in (("names", 0), ("goodput", 0), ("events", 500), ("server", 0), ("data", 0),
                        ("memory", 0), ("quantization", 0)):  # fmt: skip
        held[f"{path}/{part}"] = answers.part(f"{name}/{part}", {**_DEFAULTS, "limit": limit})
    asked = {**_DEFAULTS, "limit": _MOST_SAMPLES}
    newest = answers.part(f"{name}/samples", asked)
    steps: list[int] = newest["steps"]
    every = -(-len(steps) // _MOST_STEPS) if steps else 1
    newest["steps"] = steps = steps[::-1][::every][::-1]
    held[f"{path}/samples"] = newest
    for step in steps:
        found = answers.part(f"{name}/samples", {**asked, "step": step})
        held[f"{path}/samples?" + _query([("step", str(step))])] = {**found, "steps": steps}
    held[f"{path}/images"] = _images(answers, name)
    axes: list[Axis] = held[f"{path}/names"]["x"]
    for row in held[f"{path}/names"]["names"][:_MOST_NAMES]:
        for axis in axes:
            _curve(answers, name, row["name"], axis, _POINTS, held)


def _curve(
    answers: Answers, run: str, name: str, axis: Axis, points: int, held: dict[str, Any]
) -> None:
    found = orjson.loads(answers.series([run], [name], axis, points, None, None))
    held["/api/series?" + _query([("run", run), ("name", name), ("x", axis)])] = found


def _images(answers: Answers, name: str) -> Mapping[str, Any]:
    asked = {**_DEFAULTS, "limit": _MOST_PICTURES}
    found = answers.part(f"{name}/images", asked)
    for image in found["images"]:
        kind = views.PICTURE_TYPES[image["path"].rpartition(".")[2].lower()]
        path = answers.run(name).path / image["path"]
        try:
            picture = answers.store.folder.read(path, _PICTURE_BYTES + 1)
        except OSError:
            continue
        if len(picture) <= _PICTURE_BYTES:
            image["data"] = f"data:{kind};base64,{base64.b64encode(picture).decode()}"
    return found


def _query(pairs: Sequence[tuple[str, str]]) -> str:
    """A query as a browser's URLSearchParams writes it."""
    return urlencode(pairs).replace("~", "%7E").replace("%2A", "*")
