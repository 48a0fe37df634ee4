"""Bundles that were altered, truncated, lengthened, linked or written otherwise are refused."""

import contextlib
import dataclasses
import hashlib
import json
import os
import threading
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path

import jax
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from jax.interpreters import mlir
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import stablehlo

from fornax import export
from fornax.config.errors import BundleError
from fornax.export import files, manifest, reading, weights
from fornax.export.fields import safe_path


def some_file(root: Path, below: str, pattern: str = "*") -> Path:
    files = (p for p in (root / below).rglob(pattern) if p.is_file())
    return max(files, key=lambda p: p.stat().st_size)


def rewrite(root: Path, change) -> None:
    """Change the manifest and seal it again, as one who means harm would."""
    path = root / "manifest.json"
    body = json.loads(path.read_text())
    change(body)
    body["seal"] = manifest.seal(body)
    path.write_text(json.dumps(body))


@pytest.mark.parametrize("below", ["functions", "weights", "golden"])
def test_a_changed_byte_is_refused_with_the_files_name(copy, below):
    file = some_file(copy, below)
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    with pytest.raises(BundleError, match=f"{file.name} was altered: its SHA-256"):
        export.open_bundle(copy)


@pytest.mark.parametrize("below", ["functions", "weights", "golden"])
def test_load_refuses_what_open_leaves_for_later(copy, below):
    file = some_file(copy, below, "*cpu*" if below == "functions" else "*")
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    with pytest.raises(BundleError, match=file.name):
        export.load(copy)


def test_weights_of_several_placements_are_hashed_once(copy, monkeypatch):
    hashed, together, verify = [], threading.Barrier(3), files.verify

    def counted(root, known, names):
        hashed.append(names := list(names))
        verify(root, known, names)

    def load(placement):
        together.wait(120)
        return bundle.load_weights(placement)

    monkeypatch.setattr(files, "verify", counted)
    bundle = export.open_bundle(copy, verify="as-read")
    placements = [export.OneDevice(device) for device in jax.devices()[:3]]
    with ThreadPoolExecutor(3) as pool:
        list(pool.map(load, placements))
    assert len(hashed) == 1
    assert hashed[0]
    bundle.load_weights()
    assert len(hashed) == 1
    file = some_file(copy, "weights")
    good = file.read_bytes()
    file.write_bytes(good[:-1] + bytes([good[-1] ^ 1]))
    bundle = export.open_bundle(copy, verify="as-read")
    for _ in range(2):
        with (
            ThreadPoolExecutor(3) as pool,
            pytest.raises(BundleError, match=f"{file.name} was altered"),
        ):
            list(pool.map(load, placements))
    file.write_bytes(good)
    bundle.load_weights()


def test_a_file_that_goes_while_the_bundle_is_listed_is_named(copy, monkeypatch):
    class Leaving:
        def __init__(self, entry):
            self.name, self.path, self.stat = entry.name, entry.path, entry.stat
            if entry.name == "manifest.json":
                os.unlink(entry.path)

    listed = os.scandir
    monkeypatch.setattr(files.os, "scandir", lambda path: map(Leaving, listed(path)))
    with pytest.raises(BundleError, match=r"manifest\.json cannot be read \(No such file"):
        export.open_bundle(copy)


def piped(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def test_a_pipe_in_the_place_of_a_listed_file_holds_nobody(copy):
    bundle = export.open_bundle(copy, verify="as-read")
    file = some_file(copy, "weights")
    piped(file)
    name = str(file.relative_to(copy))
    for load in (
        bundle.load_weights,
        lambda: files.verify(copy, bundle.manifest.files, [name]),
    ):
        with ThreadPoolExecutor(1) as pool:
            done = pool.submit(load)
            held = not wait([done], timeout=120).done
            _release(file)
            with pytest.raises(BundleError, match=f"{file.name} is not a regular file"):
                done.result()
            assert not held


def _release(pipe: Path) -> None:
    """Release who waits at a pipe, so that a test that fails ends."""
    with contextlib.suppress(OSError):
        os.close(os.open(pipe, os.O_WRONLY | os.O_NONBLOCK))


@pytest.mark.parametrize("pattern", ["*", "manifest.ocdbt"])
def test_a_pipe_that_comes_and_goes_while_weights_are_read_holds_nobody(copy, monkeypatch, pattern):
    bundle = export.open_bundle(copy, verify=False)
    file, aside, read = some_file(copy, "weights", pattern), copy.parent / "pipe", weights.read
    good = file.read_bytes()

    fixed, delays = threading.Event(), iter((0.2, 2.0, 20.0))

    def replaced(*args):
        fixed.clear()
        piped(file)
        threading.Timer(next(delays), fix).start()
        *others, still = args
        return read(*others, lambda: still() if fixed.is_set() else None)

    def fix():
        file.rename(aside)
        file.write_bytes(good)
        fixed.set()

    monkeypatch.setattr(weights, "read", replaced)
    monkeypatch.setattr(weights, "_LOOK", 0.3)
    error = None
    while error is None:  # a busy machine may come to the file when it is good again
        with ThreadPoolExecutor(1) as pool:
            done = pool.submit(bundle.load_weights)
            held = not wait([done], timeout=120).done
            _release(aside)
            error = done.exception()
        assert not held
    assert isinstance(error, BundleError)
    assert f"{file.name} was replaced while it was read" in str(error)


def test_a_truncated_file_is_refused_without_reading_it(copy):
    file = some_file(copy, "weights")
    os.truncate(file, file.stat().st_size - 1)
    with pytest.raises(BundleError, match=rf"{file.name} has \d+ bytes instead of"):
        export.open_bundle(copy, verify=False)


def test_a_missing_file_is_refused(copy):
    (copy / "functions/letters.tpu.mlir").unlink()
    with pytest.raises(BundleError, match=r"letters\.tpu\.mlir is missing"):
        export.open_bundle(copy)


def test_an_extra_file_or_directory_is_refused(copy):
    (copy / "golden/more").mkdir()
    with pytest.raises(BundleError, match="golden/more is not part of the bundle"):
        export.open_bundle(copy)
    (copy / "golden/more").rmdir()
    (copy / "setup.py").write_text("")
    with pytest.raises(BundleError, match=r"setup\.py is not part of the bundle"):
        export.open_bundle(copy)


def test_links_are_refused_even_to_the_same_bytes(copy, tmp_path):
    file = copy / "functions/predict.cpu.mlir"
    elsewhere = tmp_path / "elsewhere"
    file.rename(elsewhere)
    file.symlink_to(elsewhere)
    with pytest.raises(BundleError, match=r"predict\.cpu\.mlir is a link"):
        export.open_bundle(copy)


def test_a_linked_directory_is_refused(copy, tmp_path):
    (copy / "golden").rename(tmp_path / "golden")
    (copy / "golden").symlink_to(tmp_path / "golden")
    with pytest.raises(BundleError, match="golden is a link"):
        export.open_bundle(copy)


def test_a_manifest_that_is_a_link_or_a_pipe_is_refused(copy, tmp_path):
    (copy / "manifest.json").rename(tmp_path / "m")
    (copy / "manifest.json").symlink_to(tmp_path / "m")
    with pytest.raises(BundleError, match=r"manifest\.json"):
        export.open_bundle(copy)
    (copy / "manifest.json").unlink()
    os.mkfifo(copy / "manifest.json")
    with pytest.raises(BundleError, match="not a regular file"):
        export.open_bundle(copy)


def test_an_edited_manifest_breaks_its_seal(copy):
    path = copy / "manifest.json"
    path.write_text(path.read_text().replace('"pad": 0', '"pad": 1', 1))
    with pytest.raises(BundleError, match=r"manifest\.json was altered"):
        export.open_bundle(copy)


def test_another_format_version_is_refused_before_anything_else(copy):
    path = copy / "manifest.json"
    path.write_text(path.read_text().replace('"version": 1', '"version": 2', 1))
    with pytest.raises(BundleError, match="has format version 2 and this Fornax reads 1"):
        export.open_bundle(copy)


def test_what_is_no_bundle_is_said_to_be_none(copy, tmp_path):
    with pytest.raises(BundleError, match="is not a directory"):
        export.open_bundle(tmp_path / "nothing")
    (copy / "manifest.json").write_text("[]")
    with pytest.raises(BundleError, match="is not a manifest of a bundle"):
        export.open_bundle(copy)
    (copy / "manifest.json").write_text((copy / "manifest.json").read_text()[:-1])
    with pytest.raises(BundleError, match="is not JSON"):
        export.open_bundle(copy)
    (copy / "manifest.json").unlink()
    with pytest.raises(BundleError, match=r"manifest\.json is missing"):
        export.open_bundle(copy)


@pytest.mark.parametrize(
    "name",
    [
        "../x",
        "/etc/passwd",
        "a/../../b",
        "./a",
        "a//b",
        "",
        "manifest.json",
        ".hidden",
        "a\\b",
        "a\0b",
    ],
)
def test_paths_that_leave_the_bundle_are_refused(copy, name):
    rewrite(copy, lambda body: body["files"].update({name: {"size": 0, "sha256": "0" * 64}}))
    with pytest.raises(BundleError, match="not a path inside the bundle"):
        export.open_bundle(copy)


@pytest.mark.parametrize(
    "change",
    [
        lambda b: b["files"]["weights/manifest.ocdbt"].update(size=1),
        lambda b: b["files"].pop("functions/predict.cpu.mlir"),
        lambda b: b["weights"][0].update(shape=[10**9, 10**9]),
        lambda b: b["weights"][0].update(shape=[1]),
        lambda b: b["weights"][0].update(name="other"),
        lambda b: b["weights"][0].update(dtype="object"),
        lambda b: b["weights"][0].update(chunks=[0, 0]),
        lambda b: b["weights"].append(dict(b["weights"][0])),
        lambda b: b["functions"][0].update(weights=["nothing"]),
        lambda b: b["functions"][0].update(x64="yes"),
        lambda b: b["functions"][0].update(buckets=[]),
        lambda b: b["functions"][0]["buckets"][0].update(b=-1),
        lambda b: b["functions"][0]["buckets"][0].update(z=1),
        lambda b: b["functions"][0].update(batch="z"),
        lambda b: b["functions"][0]["inputs"][0].update(shape=["b", "__import__('os')"]),
        lambda b: b["functions"][0]["outputs"][0].update(shape=["open('/etc/passwd')"]),
        lambda b: b["functions"][0]["outputs"][0].update(shape=["b**999"]),
        lambda b: b["functions"][0]["outputs"][0].update(dtype="O"),
        lambda b: b["functions"][0]["programs"]["cpu"].update(kept=[99]),
        lambda b: b["functions"][0]["programs"]["cpu"].update(kept=[1, 0]),
        lambda b: b["functions"][0]["programs"]["cpu"].update(file="golden/../x"),
        lambda b: b["functions"][0]["programs"].pop("cpu"),
        lambda b: b["functions"][0]["golden"]["dims"].update(b=3),
        lambda b: b["functions"][0]["golden"].update(rows=99),
        lambda b: b["functions"][0]["golden"]["sizes"].update(t=[99] * 4),
        lambda b: b["functions"][0]["outputs"][0]["tolerance"].update(absolute=float("nan")),
        lambda b: b.update(surprise=1),
        lambda b: b.pop("platforms"),
        lambda b: b.update(platforms=["abacus"]),
        lambda b: b.update(functions={}),
        lambda b: b.update(metadata=[]),
    ],
)  # fmt: skip
def test_a_manifest_that_lies_is_refused(copy, change):
    rewrite(copy, change)
    with pytest.raises(BundleError):
        export.load(copy)


@pytest.mark.parametrize("depth", [*range(900, 1000, 7), 5000, 200_000])
def test_a_manifest_of_any_depth_is_read_or_refused(sealed, depth):
    """Somewhere below Python's limit reading succeeds and what comes after it no longer does."""
    body = json.loads((sealed / "manifest.json").read_text())
    text = json.dumps(body | {"metadata": "deep"}).replace('"deep"', "[" * depth + "]" * depth)
    with pytest.raises(BundleError):
        reading.from_json(text.encode(), "manifest.json")


def test_half_a_surrogate_which_no_protocol_carries_is_refused(copy):
    rewrite(copy, lambda body: body["functions"][0]["outputs"][0].update(name="\ud800"))
    with pytest.raises(BundleError, match="surrogates not allowed"):
        export.open_bundle(copy)


def test_calling_conventions_this_jax_does_not_know_are_refused(copy):
    rewrite(copy, lambda b: b["functions"][0]["programs"]["cpu"].update(calling_convention=99))
    with pytest.raises(BundleError, match="calling convention 99"):
        export.load(copy)


def test_a_module_that_is_no_stablehlo_is_refused(copy):
    name = "functions/predict.cpu.mlir"
    data = b"ML\xefRnothing of the kind"
    (copy / name).write_bytes(data)
    file = {"size": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    rewrite(copy, lambda b: b["files"].update({name: file}))
    with pytest.raises(BundleError, match=r"predict\.cpu\.mlir: it is not a portable artifact"):
        export.load(copy)


def test_a_graph_that_calls_python_is_refused_before_it_is_compiled(copy):
    """A callback is a pointer in the graph; jax would follow it."""

    text = """func.func public @main(%x: tensor<4xf32>) -> tensor<4xf32> {
      %y = stablehlo.custom_call @xla_ffi_python_cpu_callback(%x)
        : (tensor<4xf32>) -> tensor<4xf32>
      return %y : tensor<4xf32> }"""
    with mlir.make_ir_context():
        module = ir.Module.parse(text)
        data = stablehlo.serialize_portable_artifact(module, stablehlo.get_current_version())
    (copy / "functions/predict.cpu.mlir").write_bytes(data)
    file = {"size": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    rewrite(copy, lambda b: b["files"].update({"functions/predict.cpu.mlir": file}))
    with pytest.raises(BundleError, match=r"predict\.cpu\.mlir: it calls \w*callback"):
        export.load(copy)


@settings(
    max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture], database=None
)
@given(data=st.data())
def test_any_edited_manifest_is_read_whole_or_refused(sealed, data):
    """Whatever is at one place of a manifest, reading ends with a manifest or BundleError."""
    body = json.loads((sealed / "manifest.json").read_text())
    at, parent, key = body, None, None
    while isinstance(at, dict | list) and at and (parent is None or data.draw(st.booleans())):
        keys = sorted(at) if isinstance(at, dict) else range(len(at))
        parent, key = at, data.draw(st.sampled_from(keys))
        at = at[key]
    junk = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20)
    parent[key] = data.draw(
        junk | st.lists(junk, max_size=3) | st.dictionaries(st.text(), junk, max_size=2)
    )
    body["seal"] = manifest.seal(body)
    try:
        found = reading.from_json(json.dumps(body).encode(), "manifest.json")
    except BundleError:
        return
    assert dataclasses.is_dataclass(found)
    assert all(safe_path(name) for name in found.files)


@settings(max_examples=50, database=None)
@given(st.binary(max_size=200))
def test_any_bytes_for_a_manifest_are_refused(data):
    with pytest.raises(BundleError):
        reading.from_json(data, "manifest.json")
