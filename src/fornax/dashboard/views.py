"""What the files of one run say besides its curves: an answer of the interface each."""

import dataclasses
import json
import math
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import orjson

from fornax.config.goodput import Span, attribute, summarise
from fornax.dashboard.captures import list_captures
from fornax.dashboard.folder import Folder
from fornax.dashboard.lines import last_lines
from fornax.dashboard.runs import Found, Summary
from fornax.dashboard.series import Table
from fornax.dashboard.store import RunStore, checkpoint_steps

__all__ = ["PAGES", "PICTURE_TYPES", "data", "details", "events", "goodput", "images", "memory",
           "quantization", "server"]  # fmt: skip

PAGES = (".html",)
PICTURE_TYPES = {
    "png": "image/png",
    "jpg": "image/jpeg",
    "jpeg": "image/jpeg",
    "webp": "image/webp",
    "gif": "image/gif",
}
"""By the ending of a file's name."""
_MOST_FILES, _MOST_PICTURES = 500, 5000
_MOST_JSON, _MOST_LEDGER, _MOST_SERVER = 16 << 20, 64 << 20, 32 << 20
_MOST_SPANS, _MOST_ROWS = 2000, 1000
_MOST_TENSORS = 5000
_NUMBER = re.compile(r"\d+")

Json = dict[str, Any]


def details(store: RunStore, run: Found, summary: Summary) -> Json:
    """All that is known of a run but its curves."""
    folder = store.folder
    plan = _json(folder, run.path / "plan.json")
    return {
        "config_text": folder.text(run.path / "config.yaml", 1 << 20) or "",
        "files": [_file(path, found) for path, found in _files(folder, run.path)][:_MOST_FILES],
        "folders": [path.name for path in _folders(folder, run.path)][:_MOST_FILES],
        "checkpoints": store.checkpoints(run)[::-1],
        "profiles": _profiles(folder, run),
        "requests": _requests(folder, run),
        "pages": _pages(folder, run),
        "plan": plan,
        "measured": measured(summary),
    }


def measured(summary: Summary) -> Json:
    """What the run measured of what `fornax plan` predicts."""
    metrics = summary.metrics
    rate = next((name for name in metrics if name.endswith("tokens_per_second")), "")
    return {
        "step_seconds": metrics.get("step_seconds"),
        "tokens_per_second": metrics.get(rate),
        "mfu": metrics.get("mfu"),
    }


def _json(folder: Folder, path: Path) -> Json | None:
    try:
        found = orjson.loads(folder.read(path, _MOST_JSON))
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None


def _files(folder: Folder, path: Path) -> Iterator[tuple[Path, os.stat_result]]:
    try:
        names = sorted(os.listdir(path))
    except OSError:
        return
    for name in names:
        found = folder.stat(path / name)
        if found is not None and not name.startswith(".") and name.isprintable():
            yield path / name, found


def _file(path: Path, found: os.stat_result) -> Json:
    return {"name": path.name, "bytes": found.st_size, "modified": found.st_mtime}


def _folders(folder: Folder, path: Path) -> Iterator[Path]:
    try:
        names = sorted(os.listdir(path))
    except OSError:
        return
    for name in names:
        real = folder.resolve(path / name)
        if real is not None and name.isprintable() and os.path.isdir(real):
            yield path / name


def _profiles(folder: Folder, run: Found) -> list[Json]:
    """Captures below `profile/`, the newest first."""
    return [
        {"name": one.name, "bytes": one.bytes, "modified": one.modified, "ranks": one.ranks}
        for one in list_captures(folder, run)
    ]


def _pages(folder: Folder, run: Found) -> list[str]:
    found = [*_files(folder, run.path), *_files(folder, run.path / "profile")]
    return [str(p.relative_to(run.path)) for p, _ in found if p.suffix in PAGES]


def _requests(folder: Folder, run: Found) -> list[Json]:
    rows = []
    for path, _ in _files(folder, run.path / "requests"):
        said = _json(folder, path)
        if said is not None and path.suffix == ".json":
            done = path.name.endswith(".done.json")
            result = said.get("result", said.get("error")) if done else None
            kind = str(said.get("kind") or path.stem.partition("-")[2].partition(".")[0])
            rows.append({"name": path.name, "kind": kind, "done": done, "result": result})
    return rows[-100:]


def goodput(folder: Folder, run: Found) -> Json:
    """Where the time went, as `fornax.config.goodput` accounts for it."""
    empty: Json = {"spans": [], "ranks": {}, "seconds": {}, "goodput": None, "wall_seconds": 0.0,
                   "down_seconds": 0.0, "attempts": 0, "steps": 0, "faults": [],
                   "spikes": []}  # fmt: skip
    ledgers = [run.path / "goodput.jsonl", *_rank_ledgers(run)]
    files = [*ledgers, run.path / "events.jsonl"]
    sizes = [None if (found := folder.stat(path)) is None else found.st_size for path in files]
    outside = any(size is None and os.path.lexists(p) for p, size in zip(files, sizes, strict=True))
    if outside or sum(size or 0 for size in sizes) > _MOST_LEDGER:
        return empty
    try:
        account, total = attribute(run.path), summarise(run.path / "goodput.jsonl")
        ranks = {
            path.name.split(".")[0].removeprefix("rank-"): _spans(
                attribute(run.path, str(path.relative_to(run.path))).spans
            )
            for path in ledgers[1:]
        }
    except (OSError, KeyError, TypeError, ValueError, AttributeError):  # lines of somebody else's
        return empty
    return {
        "spans": _spans(account.spans),
        "ranks": ranks,
        "seconds": {cause: s for cause, s in total.seconds.items() if s > 0},
        "goodput": total.goodput,
        "wall_seconds": total.wall_seconds,
        "down_seconds": total.down_seconds,
        "attempts": account.attempts,
        "steps": account.steps,
        "faults": [dataclasses.asdict(fault) for fault in account.faults],
        "spikes": last_lines(folder, run.path / "spikes.jsonl", 1 << 20),
    }


def _rank_ledgers(run: Found) -> list[Path]:
    try:
        names = sorted(os.listdir(run.path / "cluster"))
    except OSError:
        return []
    return [run.path / "cluster" / name for name in names if name.endswith(".goodput.jsonl")]


def _spans(spans: Sequence[Span]) -> list[Json]:
    """Neighbours of one cause as one; then the shortest join theirs until there are few."""
    found = _merged([dataclasses.asdict(span) for span in spans], 0.0)
    least = 0.0
    while len(found) > _MOST_SPANS:
        lengths = sorted(span["end"] - span["begin"] for span in found)
        least = max(lengths[len(lengths) - _MOST_SPANS], 2 * least, 1e-6)
        found = _merged(found, least)
    return found


def _merged(spans: Sequence[Json], least: float) -> list[Json]:
    found: list[Json] = []
    for span in spans:
        last = found[-1] if found else None
        short = span["end"] - span["begin"] < least
        if last is not None and (last["cause"] == span["cause"] or short):
            waited = last["waited"] * (last["end"] - last["begin"])
            waited += span["waited"] * (span["end"] - span["begin"]) * (not short)
            last["end"] = span["end"]
            last["waited"] = waited / (last["end"] - last["begin"] or 1.0)
        else:
            found.append(dict(span))
    return found


def events(folder: Folder, run: Found, limit: int) -> Json:
    """The last events of a launched run."""
    found = last_lines(folder, run.path / "events.jsonl", 4 << 20)
    return {"events": found[-limit:], "total": len(found)}


def server(folder: Folder, run: Found) -> Json:
    """What a server wrote of itself, as columns over time."""
    records = last_lines(folder, run.path / "server.jsonl", _MOST_SERVER)
    first: Json = records[-1] if records else {}
    table = Table()
    table.append(records)
    every = max(1, math.ceil(table.rows / _MOST_ROWS))
    keep = [n for n in range(table.rows) if (table.rows - 1 - n) % every == 0]
    columns: Json = {}
    for name in table.names():
        column = table.dense(name)
        columns[name] = [_finite(float(column[n])) for n in keep]
    times = table.dense("time")
    return {
        "kind": first.get("kind"),
        "model": first.get("model"),
        "names": list(columns),
        "time": [_finite(float(times[n])) for n in keep] if len(times) else [],
        "columns": columns,
        "last": {name: _finite(value) for name, value in table.last()},
        "models": next((r["models"] for r in records[::-1] if "models" in r), {}),
    }


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def data(folder: Folder, run: Found, summary: Summary) -> Json:
    """The data under a run: what it is, how it is packed, how far the run is with it."""
    config = summary.config
    own = {key: value for key, value in config.items() if key.split(".")[0] in _OF_DATA}
    found = _json(folder, run.path / "data.json")
    step, positions, metadata = _position(folder, run)
    batch = config.get("batch_size")
    rows = metadata.get("batches", summary.step)
    seen = rows * batch if isinstance(rows, int) and isinstance(batch, int) else None
    passes = _passes(found or {}, seen, rows)
    packing = config.get("data.packing.type", config.get("packing"))
    return {
        "config": own or None,
        "dataset": found,
        "packing": packing if isinstance(packing, str) else None,
        "seq_len": config.get("seq_len", config.get("max_length")),
        "batch_size": batch,
        "rows": seen,
        "epoch": passes,
        "positions": positions,
        "step": step,
        "names": [name for name in summary.metrics if name.startswith("data/")],
    }


def _passes(found: Json, rows: int | None, batches: object) -> float | None:
    """Passes over the data that were made."""
    each, steps = found.get("rows"), found.get("steps_per_epoch")
    if isinstance(steps, float | int) and steps > 0 and isinstance(batches, int):
        return batches / steps
    return rows / each if rows is not None and isinstance(each, int) and each > 0 else None


_OF_DATA = ("data", "eval_data", "eval_share", "columns", "packing", "max_length", "too_long",
            "shuffle", "virtual_shards", "seq_len", "epochs", "template")  # fmt: skip


def _position(folder: Folder, run: Found) -> tuple[int | None, list[Json], Json]:
    """Step, position of each virtual shard, and metadata of the newest checkpoint."""
    for name in sorted(checkpoint_steps(run), key=int, reverse=True):
        path = run.path / "checkpoints" / name
        first = _record(folder, path / "fornax.0.json")
        if first is None:
            continue
        shards: Json = {}
        for number in range(min(int(first.get("processes", 1)), 4096)):
            record = first if number == 0 else _record(folder, path / f"fornax.{number}.json")
            positions = (record or {}).get("data")
            shards |= positions if isinstance(positions, dict) else {}
        rows = [{"shard": int(k), "position": v} for k, v in shards.items() if k.isdecimal()]
        metadata = first.get("metadata")
        return int(name), rows, metadata if isinstance(metadata, dict) else {}
    return None, [], {}


def _record(folder: Folder, path: Path) -> Json | None:
    """The record of a process of a checkpoint, as `fornax.checkpoint` wrote it."""
    whole = _json(folder, path)
    try:
        body = json.loads((whole or {})["body"])
    except (KeyError, TypeError, ValueError):
        return None
    return body if isinstance(body, dict) else None


def memory(folder: Folder, run: Found, summary: Summary) -> Json:
    """The run's programs as they were compiled, beside the plan and what was measured."""
    found = _json(folder, run.path / "program.json") or {}
    programs = found.get("programs")
    return {
        **{name: found.get(name) for name in ("device", "devices", "peak_flops", "bandwidth")},
        "programs": programs if isinstance(programs, list) else [],
        "plan": _json(folder, run.path / "plan.json"),
        "measured": measured(summary),
    }


def images(folder: Folder, run: Found, offset: int, limit: int) -> Json:
    """Pictures of a run, by step, the newest first."""
    rows: list[tuple[int, Json]] = []
    for top in ("images", "samples"):
        waiting = [run.path / top]
        while waiting and len(rows) < _MOST_PICTURES:
            path = waiting.pop()
            waiting += [] if len(path.parts) - len(run.path.parts) > 3 else _folders(folder, path)
            for file, found in _files(folder, path):
                if file.suffix.lower().removeprefix(".") in PICTURE_TYPES:
                    relative = str(file.relative_to(run.path))
                    step = next((int(n) for n in _NUMBER.findall(relative) if len(n) < 16), None)
                    row = {"path": relative, "step": step, "bytes": found.st_size,
                           "modified": found.st_mtime}  # fmt: skip
                    rows.append((-1 if step is None else step, row))
    rows.sort(key=lambda row: (-row[0], row[1]["path"]))
    return {"total": len(rows), "images": [row for _, row in rows[offset : offset + limit]]}


def quantization(folder: Folder, run: Found) -> Json | None:
    """What `fornax quantize` did, tensor by tensor."""
    report = _json(folder, run.path / "quantization_report.json")
    if report is None:
        return None
    quantized, kept = report.pop("quantized", None), report.pop("kept", None)
    tensors = quantized.items() if isinstance(quantized, dict) else ()
    reasons = kept.items() if isinstance(kept, dict) else ()
    return {
        "report": report,
        "tensors": [_tensor(name, each) for name, each in tensors][:_MOST_TENSORS],
        "kept": [{"name": name, "why": str(why)} for name, why in reasons][:_MOST_TENSORS],
    }


def _tensor(name: str, found: object) -> Json:
    facts: Mapping[str, Any] = found if isinstance(found, dict) else {}
    return {"name": name, **facts}
