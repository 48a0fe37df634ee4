"""The host over real bundles: answers, descriptions, rollouts, memory, shadow, damage."""

import asyncio
import shutil
from collections.abc import Iterator

import numpy as np
import pytest
from tests.unit.serving.fakes import FakeConfig

from fornax import export
from fornax.config import ServingCode, ServingError
from fornax.export import Spec
from fornax.serving.events import Events
from fornax.serving.execution.servable import DevicePool
from fornax.serving.host import Host
from fornax.serving.types import InferRequest

W = np.arange(12, dtype=np.float32).reshape(4, 3)


def predict(params, x):
    return {"y": x @ params["w"]}


def size(params, text):
    return {"n": (text != 0).sum(-1)}


@pytest.fixture(scope="module")
def bundles(tmp_path_factory):
    """Versions 1 and 2 of a model, of which 2 answers ten times as much."""
    folder = tmp_path_factory.mktemp("bundles")
    for version, scale in ((1, 1), (2, 10)):
        export.save(
            folder / str(version),
            {"predict": predict, "size": size},
            {"w": W * np.float32(scale)},
            inputs={
                "predict": {"x": Spec(("b", 4), "float32")},
                "size": {"text": Spec(("b", "n"), "bytes")},
            },
            buckets={"b": [1, 2], "n": [4]},
            platforms=("cpu",),
            check=False,
        )
    return folder


@pytest.fixture(scope="module")
def pool() -> DevicePool:
    return DevicePool(numbers=[0])


@pytest.fixture
def root(tmp_path, bundles):
    shutil.copytree(bundles / "1", tmp_path / "m" / "1")
    return tmp_path


@pytest.fixture
def host(root, loop, pool) -> Iterator[Host]:
    host = Host(FakeConfig(root), devices=pool)
    loop.run_until_complete(host.start())
    yield host
    loop.run_until_complete(host.stop(5.0))


def ask(host, loop, name="m", version="", **inputs):
    async def answer():
        return await host.submit(InferRequest(name, inputs, version=version))

    return loop.run_until_complete(asyncio.wait_for(answer(), 120))


def used(pool):
    return {account: pool.memory.used(account) for account in pool.memory.limits}


X = np.array([[1, 0, 0, 2]], np.float32)


def test_a_model_and_its_functions_answer_and_describe_themselves(host, loop):
    result = ask(host, loop, x=X)
    assert (result.model, result.version, result.function) == ("m", "1", "predict")
    np.testing.assert_array_equal(result.outputs["y"], X @ W)
    text = np.array([b"ab", b"", b"abcd"], object)
    result = ask(host, loop, "m:size", text=text)
    assert result.outputs["n"].tolist() == [2, 0, 4]

    metadata = host.metadata("m")
    assert (metadata.name, metadata.versions) == ("m", ("1",))
    tensors = [(t.name, t.datatype, t.shape) for t in (*metadata.inputs, *metadata.outputs)]
    assert tensors == [("x", "FP32", (-1, 4)), ("y", "FP32", (-1, 3))]
    tensors = [(t.datatype, t.shape) for t in host.metadata("m:size", "1").inputs]
    assert tensors == [("BYTES", (-1,))]

    config = host.config("m")
    assert config["max_batch_size"] == 2
    assert config["input"] == [{"name": "x", "data_type": "TYPE_FP32", "dims": [4]}]
    assert config["version_policy"] == {"latest": {"num_versions": 1}}
    assert host.config("m:size")["input"][0]["data_type"] == "TYPE_STRING"

    [statistics] = host.statistics("m")
    assert (statistics.name, statistics.version, statistics.success) == ("m", "1", 2)
    assert host.statistics("m", "1")[0].success == 2
    assert host.model_ready("m:size")
    assert not host.model_ready("m:nothing")


@pytest.mark.parametrize(
    ("name", "version", "code", "said"),
    [
        ("n", "", ServingCode.NOT_FOUND, "no model 'n'; GET"),
        ("m", "3", ServingCode.NOT_FOUND, "no version '3' served; it has 1"),
        ("m", "../1", ServingCode.NOT_FOUND, "no version '../1'"),
        ("m:sise", "", ServingCode.NOT_FOUND, "sise"),
        ("m:predict:x", "", ServingCode.NOT_FOUND, "predict:x"),
        ("", "", ServingCode.NOT_FOUND, "no model ''"),
    ],
)
def test_what_is_not_there_is_refused_and_told(host, loop, name, version, code, said):
    told = []
    host.events.finished.append(lambda request, outcome: told.append(outcome))
    with pytest.raises(ServingError, match=said) as raised:
        ask(host, loop, name, version, x=X)
    assert raised.value.code is code
    assert len(told) == 1
    with pytest.raises(ServingError, match=said):
        host.metadata(name, version)


def test_a_function_asked_for_twice_must_be_the_same(host, loop):
    async def answer(function):
        return await host.submit(InferRequest("m:predict", {"x": X}, function=function))

    assert loop.run_until_complete(answer("predict")).function == "predict"
    with pytest.raises(ServingError, match="leave one out"):
        loop.run_until_complete(answer("size"))


def test_a_rollout_and_a_rollback_give_memory_back(host, root, bundles, loop, pool):
    before = used(pool)
    shutil.copytree(bundles / "2", root / "m" / "2")
    loop.run_until_complete(host.poll())
    np.testing.assert_array_equal(ask(host, loop, x=X).outputs["y"], X @ W * 10)
    assert loop.run_until_complete(host.rollback("m")).version == "1"
    loop.run_until_complete(host.poll())
    np.testing.assert_array_equal(ask(host, loop, x=X).outputs["y"], X @ W)
    with pytest.raises(ServingError, match="withheld"):
        ask(host, loop, version="2", x=X)
    assert used(pool) == before


@pytest.mark.parametrize("damage", ["altered", "truncated", "extra", "linked", "function"])
def test_a_damaged_version_never_serves_and_says_what_is_wrong(
    host, root, bundles, loop, pool, damage
):
    before = used(pool)
    new = root / "m" / ".2.tmp"
    shutil.copytree(bundles / "2", new)
    file = next(p for p in sorted((new / "weights").rglob("*")) if p.is_file())
    if damage == "altered":
        file.write_bytes(bytes(255 - b for b in file.read_bytes()))
    elif damage == "truncated":
        file.write_bytes(file.read_bytes()[:-1])
    elif damage == "extra":
        (new / "run.py").write_text("print()")
    elif damage == "linked":
        content = file.read_bytes()
        (root / "elsewhere").write_bytes(content)
        file.unlink()
        file.symlink_to(root / "elsewhere")
    else:
        file = next(p for p in (new / "functions").iterdir() if p.name.startswith("predict"))
        file.write_bytes(file.read_bytes()[::-1])
    new.rename(root / "m" / "2")
    loop.run_until_complete(host.poll())
    np.testing.assert_array_equal(ask(host, loop, x=X).outputs["y"], X @ W)
    [(state, reason)] = [(e.state, e.reason) for e in host.index() if e.version == "2"]
    assert state == "UNAVAILABLE"
    named = "run.py" if damage == "extra" else file.name
    assert named in reason
    assert used(pool) == before
    with pytest.raises(ServingError, match=named) as raised:
        loop.run_until_complete(host.load("m", "2"))
    assert raised.value.code is ServingCode.FAILED_PRECONDITION
    shutil.rmtree(root / "m" / "2")
    shutil.copytree(bundles / "2", root / "m" / "2")
    loop.run_until_complete(host.poll())
    assert ask(host, loop, x=X).version == "2"


def test_what_does_not_fit_is_refused_with_figures(root, bundles, loop):
    shutil.copytree(bundles / "2", root / "other" / "1")
    pool = DevicePool(numbers=[0])
    host = Host(FakeConfig(root, load=("m",)), devices=pool)
    loop.run_until_complete(host.start())
    one = sum(used(pool).values())
    loop.run_until_complete(host.stop(1.0))

    pool = DevicePool(numbers=[0], memory_limit=one + one // 2)
    host = Host(FakeConfig(root, load=("m",)), devices=pool)
    loop.run_until_complete(host.start())
    with pytest.raises(ServingError, match=r"\d") as raised:
        loop.run_until_complete(host.load("other"))
    assert raised.value.code is ServingCode.RESOURCE_EXHAUSTED
    assert ask(host, loop, x=X).version == "1"
    loop.run_until_complete(host.unload("m"))
    loop.run_until_complete(host.load("other"))
    assert ask(host, loop, "other", x=X).version == "1"
    loop.run_until_complete(host.stop(1.0))
    assert sum(used(pool).values()) == 0


def test_settings_that_the_bundle_cannot_follow_are_refused(host, root, loop):
    (root / "m" / "serving.yaml").write_text("batching: {preferred_sizes: [3]}")
    loop.run_until_complete(host.poll())
    assert ask(host, loop, x=X).version == "1"
    [entry] = host.index()
    assert entry.state == "READY"
    assert "not a batch bucket" in entry.reason


def test_a_shadow_is_compared_on_real_answers(root, bundles, loop, pool):
    shutil.copytree(bundles / "2", root / "m" / "2")
    (root / "m" / "serving.yaml").write_text("shadow: {version: 2, share: 1}")
    host = Host(FakeConfig(root), devices=pool, events=Events())
    loop.run_until_complete(host.start())

    async def some():
        for _ in range(4):
            result = await host.submit(InferRequest("m", {"x": X}))
            np.testing.assert_array_equal(result.outputs["y"], X @ W)
        while host.shadow_report("m")["requests"]["compared"] < 4:
            await asyncio.sleep(0.001)

    loop.run_until_complete(asyncio.wait_for(some(), 120))
    found = host.shadow_report("m")["outputs"]["predict/y"]
    assert found["differing"] == 4
    assert found["max_absolute"] == float(np.abs(X @ W * 9).max())
    assert found["argmax_disagreements"] == 0
    loop.run_until_complete(host.stop(5.0))
