"""What happens to a server meanwhile: versions come, go and break, models leave, disks lie."""

import asyncio
import contextlib
import hashlib
import json
import os
import random
import shutil
from pathlib import Path

from tests.integration.serving.storm import world
from tests.integration.serving.storm.clients import Storm

from fornax.export import manifest

_REFUSALS = (400, 404, 409, 503)


class Faults:
    """Operators, good and bad, of one repository."""

    def __init__(self, storm: Storm, root: Path, stock: Path):
        self.storm, self.root, self.stock = storm, root, stock
        self._bad = 100
        self.steps = [self.rollout, self.pinned, self.guest, self.poisoned, self.rotten]
        self.steps += [self.rollout, self.confused]

    async def rollout(self, rng: random.Random) -> None:
        """A good version comes whole, or slowly, or goes; version 1 stays."""
        model = rng.choice(["rank", "multi", world.SHADE])
        version = str(rng.choice(world.VERSIONS[1:]))
        source, target = self.stock / model / version, self.root / model / version
        try:
            await self._change(rng, source, target)
        except OSError:
            self.storm.counts["clashed"] += 1  # with another operator
        await asyncio.sleep(rng.random() * 0.6)

    async def _change(self, rng: random.Random, source: Path, target: Path) -> None:
        if target.exists():
            await asyncio.to_thread(world.remove, target)
            self.storm.counts["removed"] += 1
        elif rng.random() < 0.6:
            await asyncio.to_thread(world.deploy, source, target)
            self.storm.counts["deployed"] += 1
        else:
            await self._trickle(rng, source, target)
            self.storm.counts["deployed slowly"] += 1

    async def _trickle(self, rng: random.Random, source: Path, target: Path) -> None:
        """Copy in place, in any order and in halves, as rsync or a network disk would."""
        files = [path for path in source.rglob("*") if path.is_file()]
        rng.shuffle(files)
        for path in files:
            data, place = path.read_bytes(), target / path.relative_to(source)
            place.parent.mkdir(parents=True, exist_ok=True)
            with place.open("wb") as file:
                file.write(data[: len(data) // 2])
                file.flush()
                await asyncio.sleep(rng.random() * 0.05)
                file.write(data[len(data) // 2 :])

    async def pinned(self, rng: random.Random) -> None:
        """A rollback, and later its end."""
        model = rng.choice(["rank", "multi", world.SHADE])
        base = f"/v2/repository/models/{model}"
        status, found = await self.storm.call("POST", f"{base}/rollback", {})
        self._seen("rollback", status, found)
        if status == 200:
            await asyncio.sleep(rng.random() * 0.5)
            status, found = await self.storm.call("POST", f"{base}/release", {})
            self._seen("release", status, found)
        await asyncio.sleep(rng.random())

    async def guest(self, rng: random.Random) -> None:
        """A model leaves and comes back; what is said of it is true at once."""
        base = "/v2/repository/models/guest"
        self.storm.away = True
        status, found = await self.storm.call("POST", f"{base}/unload", {})
        self._seen("unload", status, found)
        ready, _ = await self.storm.call("GET", "/v2/models/guest/ready")
        if status == 200 and ready == 200:
            self.storm.problem("guest is ready after it was unloaded")
        await asyncio.sleep(rng.random() * 0.2)
        version = {"parameters": {"version": "2"}} if rng.random() < 0.3 else {}
        status, found = await self.storm.call("POST", f"{base}/load", version)
        self._seen("load", status, found)
        ready, _ = await self.storm.call("GET", "/v2/models/guest/ready")
        if status == 200 and ready != 200:
            self.storm.problem(f"guest is not ready ({ready}) after it was loaded")
        self.storm.away = status != 200
        await asyncio.sleep(rng.random() * 0.5)

    def _seen(self, what: str, status: int, found: object) -> None:
        self.storm.counts[f"{what} {status}"] += 1
        error = found.get("error", "") if isinstance(found, dict) else ""
        if status != 200 and (status not in _REFUSALS or len(error) < 10):
            self.storm.problem(f"{what} got {status} {found}")

    async def poisoned(self, rng: random.Random) -> None:
        """A version that is damaged comes: it is refused with a reason, and never serves."""
        model = rng.choice(["rank", "multi", world.SHADE])
        self._bad += 1
        target = self.root / model / str(self._bad)
        kind = rng.choice([*DAMAGES, "half", "off"])
        work = target.parent / f".bad-{self._bad}"
        shutil.copytree(self.stock / model / "2", work)
        if kind == "off":
            _off(self.stock / model / "1", work)
        else:
            DAMAGES.get(kind, _half)(rng, work)
        work.rename(target)
        try:
            reason = await self._reason(model, self._bad)
            self.storm.counts[f"refused {kind}"] += 1
            waits = kind in ("half", "truncated", "missing")
            may_wait = waits or kind in ("linked", "piped")  # a link is shorter, a pipe empty
            waiting, withheld = "waiting" in reason, "withheld" in reason
            if not withheld and not (may_wait if waiting else not waits):
                self.storm.problem(f"{kind} of {model}: {reason}")
        finally:
            shutil.rmtree(target)

    async def _reason(self, model: str, version: int) -> str:
        """Why a version is not served; waits until the server has looked."""
        async with asyncio.timeout(240):
            while True:
                _, index = await self.storm.call("POST", "/v2/repository/index", {})
                mine = [e for e in index if e["name"] == model and e.get("version") == str(version)]
                if mine and mine[0]["state"] == "READY":
                    self.storm.problem(f"a damaged version of {model} is ready")
                if mine and mine[0]["state"] == "UNAVAILABLE" and mine[0].get("reason"):
                    return mine[0]["reason"]
                await asyncio.sleep(0.1)

    async def rotten(self, rng: random.Random) -> None:
        """The files of a version that serves rot on the disk, and are corrected later."""
        model = rng.choice(world.MODELS)
        version = rng.choice(["1", "2"])
        target = self.root / model / version
        if not target.exists():
            return
        kind = rng.choice(list(DAMAGES))
        try:
            DAMAGES[kind](rng, target)
        except (OSError, ValueError, IndexError):
            return  # taken away meanwhile, or not whole yet
        self.storm.counts["rotten"] += 1
        try:
            await asyncio.sleep(rng.random())
        finally:
            await asyncio.to_thread(self._mend, model, version)

    def _mend(self, model: str, version: str) -> None:
        """File by file, as rsync does: the folder is there at all times."""
        target, source = self.root / model / version, self.stock / model / version
        with contextlib.suppress(FileNotFoundError):  # taken away meanwhile
            for path in target.rglob("*"):
                if not path.is_dir() and not (source / path.relative_to(target)).exists():
                    path.unlink()
            for path in source.rglob("*"):
                if path.is_file():
                    place = target / path.relative_to(source)
                    shutil.copyfile(path, place.with_name(f".{path.name}"))
                    place.with_name(f".{path.name}").replace(place)

    async def confused(self, rng: random.Random) -> None:
        """serving.yaml becomes what cannot be read, or says something else, and is corrected."""
        model = rng.choice(world.MODELS)
        path = self.root / model / "serving.yaml"
        good = world.SETTINGS[model]
        other = [
            "batching: {queue_limit: none}",
            "{[",
            "\0",
            "x: 1",
            good + "nan: {inputs: pass}\n",
            good.replace("queue_limit: 16", "queue_limit: 12, max_delay_ms: 1"),
        ]
        world.write(path, rng.choice(other))
        try:
            await asyncio.sleep(0.3 + rng.random())
        finally:
            world.write(path, good)
        self.storm.counts["confused"] += 1
        await asyncio.sleep(rng.random())


def _any(rng: random.Random, root: Path, pattern: str = "*") -> Path:
    files = (p for p in root.rglob(pattern) if p.is_file() and p.name != "manifest.json")
    return rng.choice(sorted(files))


def _flip(rng: random.Random, root: Path) -> None:
    path = _any(rng, root)
    with path.open("r+b") as file:
        at = rng.randrange(path.stat().st_size)
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 1 << rng.randrange(8)]))


def _truncated(rng: random.Random, root: Path) -> None:
    path = _any(rng, root)
    os.truncate(path, rng.randrange(path.stat().st_size))


def _grown(rng: random.Random, root: Path) -> None:
    with _any(rng, root).open("ab") as file:
        file.write(b"more")


def _missing(rng: random.Random, root: Path) -> None:
    _any(rng, root).unlink()


def _more(rng: random.Random, root: Path) -> None:
    (root / "setup.py").write_text("raise SystemExit")


def _linked(rng: random.Random, root: Path) -> None:
    path = _any(rng, root)
    path.unlink()
    path.symlink_to("/dev/zero")


def _piped(rng: random.Random, root: Path) -> None:
    path = _any(rng, root)
    path.unlink()
    os.mkfifo(path)


def _half(rng: random.Random, root: Path) -> None:
    for path in sorted(root.rglob("*")):
        if path.is_file() and rng.random() < 0.5:
            path.unlink()
    (root / "manifest.json").unlink(missing_ok=True)


def _edit(root: Path, *, sealed: bool, **changes: object) -> None:
    path = root / "manifest.json"
    body = json.loads(path.read_text()) | changes
    if sealed:
        body["seal"] = manifest.seal(body)
    path.write_text(json.dumps(body))


def _format(rng: random.Random, root: Path) -> None:
    _edit(root, sealed=True, version=2)


def _unsealed(rng: random.Random, root: Path) -> None:
    _edit(root, sealed=False, metadata={"edited": True})


def _off(source: Path, root: Path) -> None:
    """Another version's golden outputs under right hashes: the golden run alone can tell."""
    body = json.loads((root / "manifest.json").read_text())
    for path in (source / "golden").iterdir():
        data = path.read_bytes()
        (root / "golden" / path.name).write_bytes(data)
        file = {"size": len(data), "sha256": hashlib.sha256(data).hexdigest()}
        body["files"][f"golden/{path.name}"] = file
    _edit(root, sealed=True, files=body["files"])


DAMAGES = {
    "flip": _flip,
    "truncated": _truncated,
    "grown": _grown,
    "missing": _missing,
    "more": _more,
    "linked": _linked,
    "piped": _piped,
    "format": _format,
    "unsealed": _unsealed,
}
