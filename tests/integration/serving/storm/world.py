"""Models whose versions compute different known things, and the answer that each must give."""

import random
import shutil
from collections.abc import Mapping
from pathlib import Path

import jax.numpy as jnp
import numpy as np

from fornax import export
from fornax.export import Spec

VERSIONS = (1, 2, 3)
BATCH = 8
LONGEST = 16
WIDE = 16384
"""Numbers in a row of `multi:wide`."""

Arrays = dict[str, np.ndarray]


def _rank(params, ids, weight, lengths):
    own_BT = jnp.arange(ids.shape[1]) < lengths[:, None]
    values_BT = jnp.where(own_BT, params["table"][ids, 0], 0)
    score_B = values_BT.sum(1) * weight * params["scale"] + lengths
    return {"score": score_B, "scaled": (values_BT * params["scale"]).astype(jnp.int32)}


def _affine(params, x):
    return {"y": x * params["scale"] + params["table"][1, 0]}


def _letters(params, text, lengths):
    own_BN = jnp.arange(text.shape[1]) < lengths[:, None]
    found_B = jnp.sum(own_BN & (text == ord("a")), axis=1)
    return {"count": found_B + params["scale"].astype(jnp.int32)}


def _wide(params, x):
    return {"x": x + params["scale"]}


def _turned(params, x):
    return {"y": x.T * params["scale"]}


_AFFINE = {"x": Spec(("b", 4), "float32")}
_MODELS = {
    "rank": (
        {"predict": _rank},
        {
            "predict": {
                "ids": Spec(("b", "t"), "int32", lengths="lengths", low=0, high=64),
                "weight": Spec(("b",), "float32"),
            }
        },
    ),
    "multi": (
        {"affine": _affine, "letters": _letters, "wide": _wide, "turned": _turned},
        {
            "affine": _AFFINE,
            "letters": {"text": Spec(("b", "n"), "bytes", lengths="lengths")},
            "wide": {"x": Spec(("b", WIDE), "float32")},
            "turned": {"x": Spec((3, 2), "float32")},
        },
    ),
    "guest": ({"affine": _affine}, {"affine": _AFFINE}),
}
SHADE = "shade"
"""The model whose version 2 is a shadow; its bundles are those of `guest`."""
_BUCKETS = {"b": [1, BATCH], "t": [4, LONGEST], "n": [8]}
MODELS = (*_MODELS, SHADE)
SETTINGS = {
    "rank": "batching: {queue_limit: 16}\ndevices: {type: replicas, count: 2}\n",
    "multi": "versions: {type: latest, count: 2}\nlabels: {first: 1}\n"
    "batching: {queue_limit: 32}\n",
    "guest": "versions: {type: all}\n",
    SHADE: "shadow: {version: 2, share: 0.5}\nbatching: {queue_limit: 16}\n",
}
DEVICES = 2


def stock(root: Path) -> Path:
    """Every version of every model, to be copied from. A megabyte each, to see what is kept."""
    table = np.repeat(np.arange(64, dtype=np.float32)[:, None], 4096, axis=1)
    for model, (functions, inputs) in _MODELS.items():
        for version in VERSIONS:
            export.save(
                root / model / str(version),
                functions,
                {"table": table, "scale": np.float32(version)},
                inputs=inputs,
                buckets={dim: _BUCKETS[dim] for dim in _dims(inputs)},
                platforms=("cpu",),
                check=version < 3,
            )
    shutil.copytree(root / "guest", root / SHADE)
    return root


def _dims(inputs: Mapping[str, Mapping[str, Spec]]) -> set[str]:
    specs = [spec for each in inputs.values() for spec in each.values()]
    return {size for spec in specs for size in spec.shape if isinstance(size, str)}


def settle(root: Path, source: Path) -> None:
    """Put a repository into the state in which it begins and ends: versions 1 and 2, no pin."""
    for model in MODELS:
        folder = root / model
        folder.mkdir(parents=True, exist_ok=True)
        for path in folder.iterdir():
            if path.is_dir():
                remove(path)
        for version in ("1", "2"):
            deploy(source / model / version, folder / version)
        (folder / "pin.json").unlink(missing_ok=True)
        write(folder / "serving.yaml", SETTINGS[model])


def deploy(source: Path, target: Path) -> None:
    """Copy a version so that it appears whole, as the guide says."""
    work = target.parent / f".incoming-{target.name}-{random.getrandbits(40)}"
    shutil.copytree(source, work)
    try:
        work.rename(target)
    except OSError:
        shutil.rmtree(work)
        raise


def remove(target: Path) -> None:
    """Take a version away in one step."""
    gone = target.parent / f".gone-{target.name}-{random.getrandbits(40)}"
    target.rename(gone)
    shutil.rmtree(gone)


def write(path: Path, text: str) -> None:
    """Replace a small file in one step."""
    work = path.with_name(f".{path.name}.new")
    work.write_text(text)
    work.rename(path)


def draw(rng: random.Random) -> tuple[str, str, Arrays]:
    """A request: model, function and inputs, all numbers small enough to be exact."""
    kinds = ["rank", "rank", "affine", "guest", SHADE, SHADE, "letters", "wide", "turned"]
    kind = rng.choice(kinds)
    rows = rng.choice([1, 1, 2, 5, BATCH, BATCH + 3])
    numbers = np.random.default_rng(rng.getrandbits(60))
    if kind == "rank":
        ids = numbers.integers(0, 64, (rows, rng.randint(1, LONGEST)), np.int32)
        return "rank", "predict", {"ids": ids, "weight": _whole(numbers, (rows,))}
    if kind == "letters":
        words = ["".join(rng.choices("abc", k=rng.randint(0, 8))).encode() for _ in range(rows)]
        return "multi", "letters", {"text": np.array(words, object)}
    if kind == "wide":
        return "multi", "wide", {"x": _whole(numbers, (rng.choice([1, 2]), WIDE))}
    if kind == "turned":
        return "multi", "turned", {"x": _whole(numbers, (3, 2))}
    model = "multi" if kind == "affine" else kind
    return model, "affine", {"x": _whole(numbers, (rows, 4))}


def numbers(rng: random.Random, shape: tuple[int, ...]) -> np.ndarray:
    """Whole numbers, as float32."""
    return _whole(np.random.default_rng(rng.getrandbits(60)), shape)


def _whole(numbers: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    return numbers.integers(-99, 100, shape).astype(np.float32)


def expected(function: str, version: int, inputs: Mapping[str, np.ndarray]) -> Arrays:
    """What a version answers."""
    if function == "predict":
        ids, weight = inputs["ids"], inputs["weight"]
        total = ids.sum(1).astype(np.float32)
        score = total * weight * np.float32(version) + np.float32(ids.shape[1])
        return {"score": score, "scaled": ids * np.int32(version)}
    if function == "letters":
        count = [word.count(b"a") + version for word in inputs["text"].tolist()]
        return {"count": np.array(count, np.int32)}
    x = inputs["x"]
    if function == "wide":
        return {"x": x + np.float32(version)}
    if function == "turned":
        return {"y": x.T * np.float32(version)}
    return {"y": x * np.float32(version) + 1}


def fault(function: str, version: str, inputs: Arrays, outputs: Mapping[str, np.ndarray]) -> str:
    """What is wrong with an answer; empty: nothing."""
    if not version.isdigit() or int(version) not in VERSIONS:
        return f"version {version!r} answered, which must never serve"
    wanted = expected(function, int(version), inputs)
    if wanted.keys() != outputs.keys():
        return f"outputs are {sorted(outputs)}"
    for name, array in wanted.items():
        found = outputs[name]
        if found.dtype != array.dtype or found.shape != array.shape:
            return f"{name} is {found.dtype}{found.shape}, not {array.dtype}{array.shape}"
        if not (found == array).all():
            return f"{name} of version {version} is {found.ravel()[:5]}, not {array.ravel()[:5]}"
    return ""
