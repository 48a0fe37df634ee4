"""What a run says of its compiled programs."""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from fornax.mesh.hardware import CHIPS, cpu
from fornax.train.program_facts import ProgramFile, describe, device_bytes

ROWS, WIDTH, OUT = 64, 256, 128


def compiled() -> jax.stages.Compiled:
    a = jax.ShapeDtypeStruct((ROWS, WIDTH), jnp.float32)
    b = jax.ShapeDtypeStruct((WIDTH, OUT), jnp.float32)
    return jax.jit(lambda a, b: jnp.sin(a @ b)).lower(a, b).compile()


def test_work_and_memory_of_a_product() -> None:
    owners = {"parameters": WIDTH * OUT * 4, "batch": ROWS * WIDTH * 4}
    text = compiled().as_text()
    assert text is not None
    found = describe("step", text, {}, owners, None)
    assert found["flops"] == 2 * ROWS * WIDTH * OUT
    assert found["peak_bytes"] >= 4 * (ROWS * WIDTH + WIDTH * OUT + ROWS * OUT)
    assert sum(found["owners"].values()) == found["peak_bytes"]
    assert found["roofline"] is None
    assert max(each["bytes"] for each in found["buffers"]) == WIDTH * OUT * 4


def test_a_small_product_waits_for_memory_on_a_fast_chip() -> None:
    text = compiled().as_text()
    assert text is not None
    chip = CHIPS["v5p"]
    roofline = describe("step", text, {}, {}, chip)["roofline"]
    assert roofline["bound"] == "memory"
    assert roofline["seconds"] == pytest.approx(sum(row["seconds"] for row in roofline["classes"]))
    moved = sum(row["bytes"] for row in roofline["classes"])
    assert roofline["seconds"] >= moved / (chip.memory_bandwidth / chip.devices)


def test_the_file_holds_every_program_once(tmp_path: Path) -> None:
    where = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    batch = {"x": jax.ShapeDtypeStruct((ROWS, WIDTH), jnp.float32, sharding=where)}
    file = ProgramFile(tmp_path / "program.json", {"parameters": (), "frozen": ()}, {})
    for name in ("step", "evaluate", "step"):
        file.add(name, compiled(), batch)
    written = json.loads((tmp_path / "program.json").read_text())
    assert [program["name"] for program in written["programs"]] == ["step", "evaluate"]
    assert written["programs"][0]["owners"]["batch"] == device_bytes(batch) == ROWS * WIDTH * 4


def test_a_cpu_has_the_roofline_of_what_was_measured_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORNAX_CACHE_DIR", str(tmp_path / "cache"))
    path = tmp_path / "program.json"
    file = ProgramFile(path, {"parameters": (), "frozen": ()}, {})
    file.add("step", compiled(), {})
    (program,) = json.loads(path.read_text())["programs"]
    assert program["roofline"] is None
    assert "not measured yet" in program["notes"][-1]
    assert not (tmp_path / "cache").exists()

    rates = {"flops": {"float32": 1e11, "bfloat16": 4e10}, "bandwidth": 1e10, "key": cpu._key()}
    (tmp_path / "cache" / "plans").mkdir(parents=True)
    (tmp_path / "cache" / "plans" / "cpu.json").write_text(json.dumps(rates))
    file.add("step", compiled(), {})
    found = json.loads(path.read_text())
    devices = jax.device_count()
    assert found["peak_flops"] == pytest.approx(1e11 / devices)
    assert found["bandwidth"] == pytest.approx(1e10 / devices)
    (program,) = found["programs"]
    assert program["notes"] == []
    product = 2 * ROWS * WIDTH * OUT / (1e11 / devices)
    assert product <= program["roofline"]["seconds"] < 4 * product


def test_a_disk_that_refuses_does_not_stop_the_run(tmp_path: Path) -> None:
    file = ProgramFile(tmp_path / "file" / "program.json", {"parameters": (), "frozen": ()}, {})
    (tmp_path / "file").write_text("no folder")
    file.add("step", compiled(), {})
