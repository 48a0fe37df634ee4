"""`fornax init`: every file that it writes is read by its command, and runs."""

import json
from pathlib import Path

import pytest
from tests.memory import let_programs_go

from fornax.cli.main import main
from fornax.cli.starters import DEFAULT, STARTERS
from fornax.config import load, to_mapping
from fornax.data import train_bpe
from fornax.models import DecoderConfig, create_decoder, save_pretrained

CHAT = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}{{ eos_token }}\n{% endfor %}"


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    yield
    let_programs_go(1200)


def _config_class(kind):
    from fornax.cli.commands.schema import configs

    return configs()[STARTERS[kind].command][1]()


@pytest.mark.parametrize("kind", sorted(STARTERS))
def test_the_file_is_its_commands(kind, capsys):
    assert main(["init", kind]) == 0
    said = capsys.readouterr().out
    text = Path(f"{kind}.yaml").read_text()
    cls = _config_class(kind)
    config = load(cls, file=f"{kind}.yaml")
    plain = to_mapping(config)
    for path, value in STARTERS[kind].keys.items():
        assert f"{path.rpartition('.')[2]}: " in text
        if value is not DEFAULT:
            held = plain
            for part in path.split("."):
                held = held[part]
            assert held == value
    assert f"fornax {STARTERS[kind].command} " in said
    for file in STARTERS[kind].files:
        assert Path(file).is_file()


def test_files_that_exist_are_kept(capsys):
    Path("chats.jsonl").write_text("mine\n")
    assert main(["init", "sft", "--out", "deep/run.yaml"]) == 0
    assert "chats.jsonl exists and is kept" in capsys.readouterr().out
    assert Path("chats.jsonl").read_text() == "mine\n"
    assert main(["init", "sft", "--out", "deep/run.yaml"]) == 2
    assert "is kept" in capsys.readouterr().err
    assert main(["init", "stf"]) == 2
    assert "sft" in capsys.readouterr().err


@pytest.fixture
def model(tmp_path):
    """A random decoder with a tokenizer and a chat template, where the files say that it is."""
    folder = tmp_path / "models" / "mine"
    texts = [path.read_text() for path in sorted(Path(json.__file__).parent.glob("*.py"))]
    train_bpe(texts[:1], 384).save(tmp_path / "tokenizer")
    config = DecoderConfig(
        vocab_size=384, hidden_size=32, intermediate_size=64, num_layers=1, num_heads=2
    )
    save_pretrained(create_decoder(config), folder, tmp_path / "tokenizer")
    (folder / "chat_template.jinja").write_text(CHAT)


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind",
    [
        "sft",
        "grpo",
        *(pytest.param(k, marks=pytest.mark.exhaustive) for k in ("dpo", "kto", "distill")),
    ],
)
def test_a_run_of_post_training(kind, model):
    assert main(["init", kind]) == 0
    words = ["--steps", "2", "--out", "run", "--progress", "none", "--max-length", "64"]
    words += ["--teacher", "models/mine"] if kind == "distill" else []
    words += ["--batch-size", "16", "--no-doctor"] if kind == "grpo" else []  # it answers at random
    assert main([*f"tune {kind} --config {kind}.yaml".split(), *words]) == 0
    lines = [json.loads(line) for line in Path("run/metrics.jsonl").read_text().splitlines()]
    assert max(line.get("step", 0) for line in lines) == 2


@pytest.mark.slow
def test_a_quantization(model, capsys):
    assert main(["init", "quantize"]) == 0
    # The inputs of the small model's maps are 32, and a scale is for 128 unless told otherwise.
    command = "quantize --config quantize.yaml models/mine --out models/w4"
    assert main([*command.split(), "--group-size", "32", "--samples", "8"]) == 0
    report = json.loads(Path("models/w4/quantization_report.json").read_text())
    assert report["scheme"] == "w4a16-gptq"
    assert report["samples"] == 8
    assert report["length"] == 128
    assert len(report["quantized"]) == 7
    assert " held-out tokens: KL " in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["diffusion", "train"])
def test_a_run_of_pretraining(kind):
    assert main(["init", kind]) == 0
    words = ["--steps", "2", "--batch-size", "8", "--run-dir", "run", "--progress", "none"]
    if kind == "train":
        lines = [f'{{"text": "words and more words, {n}"}}\n' for n in range(2000)]
        Path("text.jsonl").write_text("".join(lines))
        build = "--source.type jsonl --source.path text.jsonl --tokenizer.vocab-size 280"
        build += " --output data/first --holdout 0.1"
        assert main(["data", "build", *build.split()]) == 0
        words += [
            "--model.vocab-size",
            "280",
            "--eval.batches",
            "1",
            "--optim.schedule.warmup-steps",
            "1",
        ]
    else:
        words += ["--data.count", "64", "--sample.count", "1"]
    assert main([*f"{STARTERS[kind].command} --config {kind}.yaml".split(), *words]) == 0
    assert Path("run/checkpoints").is_dir()
