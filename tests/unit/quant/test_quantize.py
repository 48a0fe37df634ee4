"""A quantized directory: what it holds, what is refused, and what the report says."""

import json
from dataclasses import replace
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from tests.unit.quant.conftest import CONFIG

from fornax.checkpoint.safetensors_file import find_tensors
from fornax.cli.main import main
from fornax.config.errors import CheckpointError, ConfigError, DataError
from fornax.llm import LLM, SamplingParams
from fornax.models import (
    create_decoder,
    load_pretrained,
    open_pretrained,
    read_config,
    save_pretrained,
)
from fornax.quant import SCHEMES, quantize
from fornax.quant.rounding import dequantize, round_matrix, spread
from fornax.quant.schemes import scheme_named
from fornax.quant.verify import weight_error
from fornax.quant.work import Work

DOWN = "model.layers.1.mlp.down_proj.weight"


PLAIN = [x for x in SCHEMES if not SCHEMES[x].needs_text and not SCHEMES[x].rotates]


@pytest.mark.parametrize("scheme", PLAIN)
def test_the_reader_finds_what_codes_stand_for(scheme: str, model: Path, tmp_path: Path) -> None:
    quantize(model, tmp_path / "out", scheme=scheme)
    w = find_tensors(model)[DOWN].view()
    own = scheme_named(scheme)
    codes = round_matrix(w, own, w.dtype)
    wanted = dequantize(codes.values_OI, *spread(codes.grid, own, w.shape))
    if own.codes.name == "float4_e2m1fn":
        wanted = wanted.astype(jnp.bfloat16)  # what the format's library multiplies in
    found = load_pretrained(tmp_path / "out").layers.mlp.down.kernel[...][1]
    np.testing.assert_array_equal(np.asarray(found).T, wanted)


@pytest.mark.parametrize("size", [32, 64])
def test_smaller_groups_lose_less(size: int, model: Path, texts: Path, tmp_path: Path) -> None:
    options = {"data": str(texts), "length": 64, "samples": 8, "scheme": "w4a16"}
    wide = quantize(model, tmp_path / "wide", **options)
    small = quantize(model, tmp_path / "small", group_size=size, **options)
    config = read_config(tmp_path / "small")["quantization_config"]
    assert config["config_groups"]["group_0"]["weights"]["group_size"] == size
    assert small.held_out.kl < wide.held_out.kl
    assert small.bytes_after > wide.bytes_after


@pytest.mark.parametrize(
    ("scheme", "size", "said"),
    [("w4a16", 48, "must be one of 32, 64, 128"), ("fp8", 64, "fp8 has no groups of a size")],
)
def test_group_sizes_that_do_not_fit_are_refused(
    scheme: str, size: int, said: str, model: Path, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=said):
        quantize(model, tmp_path / "out", scheme=scheme, group_size=size)


def test_too_little_memory_is_said_before_the_start(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fornax.quant.run.available_memory", lambda: 2**26)
    with pytest.raises(
        ConfigError, match=r"embed_tokens.*needs about 0\.1 GiB.*0\.1 GiB of memory"
    ):
        quantize(model, tmp_path / "out", scheme="w4a16")
    assert list(tmp_path.iterdir()) == []


def test_tokenizer_and_config_come_along(model: Path, tmp_path: Path) -> None:
    quantize(model, tmp_path / "out", scheme="w4a16")
    assert (tmp_path / "out/tokenizer.json").read_bytes() == (model / "tokenizer.json").read_bytes()
    config = read_config(tmp_path / "out")
    assert config.pop("quantization_config")["format"] == "pack-quantized"
    assert config == read_config(model)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out"]


def test_the_command_says_what_it_cost(
    model: Path, texts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--data", str(texts), "--length", "64", "--samples", "8"]
    out = tmp_path / "out"
    assert main(["quantize", str(model), "--scheme", "w4a16", "--out", str(out), *words]) == 0
    said = capsys.readouterr().out
    report = json.loads((out / "quantization_report.json").read_text())
    assert f"KL {report['held_out']['kl']:.5f} nats per token" in said
    assert 0 < report["held_out"]["kl"] < 0.3
    assert abs(report["held_out"]["loss"] - report["held_out"]["float_loss"]) < 0.1
    assert len(report["text_sha256"]) == 64
    assert 0.001 < report["quantized"][DOWN]["error"] < 0.02
    assert report["bytes_after"] < 0.4 * report["bytes_before"]
    assert "kept 1: a table of embeddings" in said


def test_more_bits_lose_less(model: Path, texts: Path, tmp_path: Path) -> None:
    options = {"data": str(texts), "length": 64, "samples": 8}
    kl = {
        scheme: quantize(model, tmp_path / scheme, scheme=scheme, **options).held_out.kl
        for scheme in ("w4a16", "fp8", "w8a16")
    }
    assert kl["w4a16"] > 5 * kl["fp8"] > 25 * kl["w8a16"] > 0


@pytest.mark.slow
def test_rotations_lose_less_where_some_inputs_are_large(
    model: Path, texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoder = create_decoder(replace(CONFIG, tie_embeddings=False), seed=1)
    for norm in (decoder.layers.attention_norm, decoder.layers.mlp_norm):
        norm.scale.set_value(norm.scale.get_value().at[:, 5:100:31].multiply(12.0))
    save_pretrained(decoder, tmp_path / "m", model)
    monkeypatch.setitem(SCHEMES, "still", replace(SCHEMES["w4a4"], name="still", rotates=False))
    options = {"data": str(texts), "length": 64, "samples": 8}
    reports = {
        name: quantize(tmp_path / "m", tmp_path / name, scheme=name, **options)
        for name in ("w4a4", "still")
    }
    kl = {name: report.held_out.kl for name, report in reports.items()}
    assert kl["w4a4"] < 0.7 * kl["still"]
    kept = reports["w4a4"].kept["model.norm.weight"]
    assert kept == "no matrix of a linear layer; scaled or rotated with the weights"
    assert (
        read_config(tmp_path / "w4a4").keys() - {"quantization_config"}
        == read_config(tmp_path / "m").keys()
    )


def test_a_model_that_cannot_be_rotated_is_refused(model: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="embeddings is the output projection too; take a scheme"):
        quantize(model, tmp_path / "out", scheme="w4a4")


@pytest.mark.slow
def test_gptq_may_move_weights_beside_outliers_far(
    outliers: Path, texts: Path, tmp_path: Path
) -> None:
    rules = ["layers/0/attention=keep", "layers/1/=keep"]
    options = {"data": str(texts), "length": 64, "samples": 16, "rules": rules}
    near, far = (
        quantize(outliers, tmp_path / scheme, scheme=scheme, **options)
        for scheme in ("w3a16", "w3a16-gptq")
    )
    name = "model.layers.0.mlp.down_proj.weight"
    assert far.quantized[name]["error"] > 2 * near.quantized[name]["error"]
    assert far.held_out.kl < near.held_out.kl
    leaf = find_tensors(outliers)[name]
    pairs = [(leaf.view(), -leaf.view())]
    assert weight_error(leaf, pairs, nearest=False) == pytest.approx(4)
    with pytest.raises(CheckpointError, match="squared error of 4 of its squares"):
        weight_error(leaf, pairs, nearest=True)


@pytest.mark.exhaustive
def test_the_engine_serves_the_directory(model: Path, tmp_path: Path) -> None:
    quantize(model, tmp_path / "out", scheme="w4a16")
    engine = LLM(tmp_path / "out")
    params = SamplingParams(max_tokens=4, temperature=0)
    (found,) = engine.generate(["import "], params)
    assert len(found.outputs[0].token_ids) == 4


def test_weights_that_are_no_numbers_are_refused_by_name(model: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    copy.mkdir()
    for file in model.iterdir():
        (copy / file.name).write_bytes(file.read_bytes())
    tensors = load_file(copy / "model.safetensors")
    tensors[DOWN][3, 5] = np.nan
    save_file(tensors, copy / "model.safetensors")
    with pytest.raises(CheckpointError, match=DOWN):
        quantize(copy, tmp_path / "out", scheme="w8a8")
    assert not (tmp_path / "out").exists()


def test_a_group_of_zeros_stays_zeros() -> None:
    w = np.ones((2, 256), np.float32)
    w[0, :128] = 0
    for scheme in SCHEMES.values():
        for dtype in (np.float32, np.float16):
            codes = round_matrix(w, scheme, np.dtype(dtype))
            found = dequantize(codes.values_OI, *spread(codes.grid, scheme, w.shape))
            assert np.isfinite(found).all()
            assert not found[0, :128].any()


def test_what_exists_is_not_touched(model: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    with pytest.raises(CheckpointError, match="exists"):
        quantize(model, tmp_path / "out", scheme="w8a8")


def test_arrays_are_written_whatever_their_strides(tmp_path: Path) -> None:
    w = np.arange(6.0).reshape(2, 3)
    with Work(tmp_path / "out", {}, 1) as work:
        work.add("a", {"a": w.T}, {})
        work.commit([])
    found = load_file(tmp_path / "out/model-00001.safetensors")["a"]
    np.testing.assert_array_equal(found, w.T)


def test_two_runs_do_not_write_one_directory(tmp_path: Path) -> None:
    with Work(tmp_path / "out", {}, 1) as first:
        with pytest.raises(CheckpointError, match="another process writes"):
            Work(tmp_path / "out", {}, 1)
        first.add("a", {"a": np.zeros(3)}, {})
        first.commit([])
    assert [file.name for file in (tmp_path / "out").iterdir()] == ["model-00001.safetensors"]


def test_a_quantized_model_is_not_quantized_again(model: Path, tmp_path: Path) -> None:
    quantize(model, tmp_path / "once", scheme="w8a8")
    with pytest.raises(ConfigError, match="quantized already"):
        quantize(tmp_path / "once", tmp_path / "twice", scheme="w8a8")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"text": "a"}\n', "needs two rows of 64"),
        ('{"content": "a"}\n', "no column text; it has content"),
        ("", "needs two rows"),
    ],
)
def test_text_that_is_too_short_or_none_is_refused(
    line: str, message: str, model: Path, tmp_path: Path
) -> None:
    (tmp_path / "few.jsonl").write_text(line)
    data = str(tmp_path / "few.jsonl")
    with pytest.raises(DataError, match=message):
        quantize(model, tmp_path / "out", scheme="w8a8", data=data, length=64)


def test_the_float_model_is_read_one_layer_at_a_time(model: Path) -> None:
    stored = open_pretrained(model)
    whole = load_pretrained(model).layers.mlp.down.kernel[...]
    np.testing.assert_array_equal(stored.read_layer("layers/mlp/down/kernel", 1), whole[1])
