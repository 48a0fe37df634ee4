"""Float and quantized directories: what is measured of each, and what is refused."""

import json
import math
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file

from fornax.cli.main import main
from fornax.config.errors import ConfigError, EngineError
from fornax.data import load_tokenizer, train_bpe
from fornax.evaluate.peers import Peer, Settings, started, write_model
from fornax.evaluate.quantized import measure_quantized
from fornax.models import DecoderConfig, create_decoder, load_pretrained, save_pretrained
from fornax.quant import HeldOutText, quantize
from fornax.quant.texts import read_rows

TEXT = {"samples": 4, "length": 32}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A float model beside texts.jsonl."""
    folder = tmp_path_factory.mktemp("model")
    texts = [path.read_text() for path in sorted(Path(json.__file__).parent.glob("*.py"))]
    train_bpe(texts[:2], 384).save(folder / "tokenizer")
    config = DecoderConfig(
        vocab_size=384, hidden_size=128, intermediate_size=256, num_layers=1, num_heads=2
    )
    save_pretrained(create_decoder(config), folder / "float", folder / "tokenizer")
    lines = (json.dumps({"text": text}) + "\n" for text in texts)
    (folder / "texts.jsonl").write_text("".join(lines))
    return folder / "float"


def test_bits_are_those_of_the_held_out_bytes(model: Path, tmp_path: Path) -> None:
    data = str(model.parent / "texts.jsonl")
    quantize(model, tmp_path / "w4", scheme="w4a16")
    text = HeldOutText(model, data=data, **TEXT)
    floats, few = text.measure(), text.measure(tmp_path / "w4")
    rows = read_rows(model, data, **TEXT, seed=0, vocab_size=384).held_out_NT
    tokenizer = load_tokenizer(model)
    size = sum(len(tokenizer.decode(row[1:].tolist()).encode()) for row in rows)
    for found, folder in ((floats, model), (few, tmp_path / "w4")):
        logits = np.asarray(load_pretrained(folder)(rows[:, :-1]), np.float64)
        logp = jax.nn.log_softmax(logits)
        nats = -np.take_along_axis(np.asarray(logp), rows[:, 1:, None], axis=2).sum()
        assert found.bits_per_byte == pytest.approx(nats / math.log(2) / size, rel=1e-5)
    assert floats.held_out.kl == 0
    assert few.held_out.kl > 1e-6


@pytest.mark.slow
def test_the_command_measures_each_directory(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    quantize(model, tmp_path / "w8", scheme="w8a16")
    words = [str(model), str(tmp_path / "w8"), "--data", str(model.parent / "texts.jsonl")]
    flags = {**TEXT, "prompt": 8, "new": 4, "rounds": 1, "json": tmp_path / "found.json"}
    words += [word for key, value in flags.items() for word in (f"--{key}", str(value))]
    assert main(["bench", "quant", *words, "--batches", "1", "2"]) == 0
    said = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in said[1:3]] == [str(model), str(tmp_path / "w8")]
    assert "threads" in said[-1]
    floats, few = json.loads((tmp_path / "found.json").read_text())
    tensors = load_file(model / "model.safetensors").values()
    assert floats["disk_bytes"] == (model / "model.safetensors").stat().st_size
    assert floats["speed"]["weight_bytes"] == sum(tensor.nbytes for tensor in tensors)
    assert few["disk_bytes"] < 0.7 * floats["disk_bytes"]
    assert floats["quality"]["held_out"]["kl"] == 0 < few["quality"]["held_out"]["kl"]
    for each in (floats, few):
        assert all(rate > 0 for rate in each["speed"]["rates"].values())
        assert each["speed"]["load_s"] > 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "is a single model, with nothing to compare"),
        ({"schemes": ["w8a16"], "rounds": 0}, "rounds=0: each must be 1 or more"),
        ({"schemes": ["w8a16"], "batches": []}, "each must be 1 or more"),
        ({"schemes": ["w9"]}, "there is no scheme 'w9'"),
        ({"schemes": ["w8a16"], "dtype": "float12"}, "dtype=float12 is not one of"),
    ],
)
def test_what_cannot_be_is_refused(
    options: dict[str, object], message: str, model: Path, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=message):
        measure_quantized([model], data=str(model.parent / "texts.jsonl"), **options)


def test_logits_of_another_engine_count_as_a_directory_does(model: Path, tmp_path: Path) -> None:
    quantize(model, tmp_path / "w4", scheme="w4a16")
    text = HeldOutText(model, data=str(model.parent / "texts.jsonl"), **TEXT)
    wanted, few = text.measure(tmp_path / "w4"), load_pretrained(tmp_path / "w4")
    found = text.measure_logits(lambda tokens_T: np.asarray(few(tokens_T[None])[0]))
    assert found.bits_per_byte == pytest.approx(wanted.bits_per_byte, rel=1e-6)
    assert found.held_out.kl == pytest.approx(wanted.held_out.kl, rel=1e-4)
    with pytest.raises(EngineError, match=r"logits \(31, 383\) .* where \(31, 384\)"):
        text.measure_logits(lambda tokens_T: np.asarray(few(tokens_T[None])[0, :, 1:]))


@pytest.mark.parametrize(
    ("python", "message"),
    [
        ("nothing/bin/python", r"nothing/bin/python is not a Python interpreter .*No such file"),
        (".", "is not a Python interpreter .*Permission denied"),
        ("/bin/false", "is not a Python interpreter .*exit status 1"),
        (sys.executable, "has none of llama-cpp-python, OpenVINO GenAI"),
    ],
)
def test_an_interpreter_without_engines_is_refused(python: str, message: str, model: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        measure_quantized([model], data=str(model.parent / "texts.jsonl"), peers=[Path(python)])


def test_a_peer_that_fails_is_named_with_its_last_words(model: Path, tmp_path: Path) -> None:
    settings = Settings(threads=1, dtype=None, rows=1, length=8)
    for engine, kind, module in (
        ("CTranslate2", "int8", "ctranslate2"),
        ("OpenVINO", "int4", "optimum"),
    ):
        peer = Peer(engine=engine, kind=kind, python=Path(sys.executable))
        with pytest.raises(EngineError, match=f"does not convert the model: .*'{module}"):
            write_model(peer, model, tmp_path)
    peer = Peer(engine="llama.cpp", kind="q8_0", python=Path(sys.executable))
    file = write_model(peer, model, tmp_path)
    assert file.stat().st_size < 0.5 * (model / "model.safetensors").stat().st_size
    with (
        pytest.raises(EngineError, match=r"llama.cpp q8_0 ended with 1: .*'llama_cpp'"),
        started(peer, file, "score", settings),
    ):
        pass


def test_another_model_is_refused(model: Path, tmp_path: Path) -> None:
    config = DecoderConfig(vocab_size=97, hidden_size=128, num_layers=1, num_heads=2)
    save_pretrained(create_decoder(config), tmp_path / "other")
    data = str(model.parent / "texts.jsonl")
    with pytest.raises(ConfigError, match="vocabulary of 97"):
        HeldOutText(model, data=data, **TEXT).measure(tmp_path / "other")
