"""The whole command on a small model, and what the harness asks of the engine."""

import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

from fornax.cli.main import main
from fornax.data.tokenizer import train_bpe
from fornax.evaluate.model import open_model
from fornax.models import DecoderConfig, create_decoder, save_pretrained


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    tokenizer = train_bpe(["def f(x):\n    return x\n" * 20], 270)
    tokenizer.save(folder / "tokenizer")
    assert tokenizer.eos_id is not None
    config = DecoderConfig(
        vocab_size=270,
        hidden_size=16,
        intermediate_size=32,
        num_layers=1,
        num_heads=2,
        max_position_embeddings=64,
        initializer_range=0.2,
        eos_token_ids=(tokenizer.eos_id,),
    )
    for seed in (0, 1):
        save_pretrained(
            create_decoder(config, seed=seed), folder / f"hf{seed}", folder / "tokenizer"
        )
    return folder / "hf0"


def test_mistakes_are_told_before_weights_are_read(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bare = tmp_path / "no-weights"
    bare.mkdir()
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        (bare / name).write_bytes((model / name).read_bytes())
    prompts = tmp_path / "p.jsonl"
    prompts.write_text('{"prompt": "1 + 1 =", "answer": "2"}\n{"prompt": "2 + 2 ="}\n')
    asked = ["eval", "--model", str(bare), "--prompts", str(prompts), "--sampling.max-tokens", "8"]
    for words, message in [
        (["--reward", "regex"], "p.jsonl:1: the reward regex needs the column pattern"),
        (["--reward", "none.py:score"], "there is no file none.py"),
        (["--reward", "python_parses", "--sampling.n", "2"], "raise the temperature"),
    ]:
        assert main([*asked, *words]) == 2
        assert message in capsys.readouterr().err


@pytest.mark.slow
def test_completions_are_judged_and_models_compared(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts = tmp_path / "p.jsonl"
    lines = [{"prompt": f"def f{n}(x):\n", "want": "x"} for n in range(3)]
    prompts.write_text("".join(json.dumps(line) + "\n" for line in lines))
    rewards = tmp_path / "r.py"
    rewards.write_text(
        "def length(completion, want):\n    return len(completion) * (want == 'x')\n"
    )
    words = f"""eval --model {model} --against {model.parent / "hf1"} --prompts {prompts}
        --reward {rewards}:length --sampling.n 2 --sampling.temperature 1 --sampling.max-tokens 6
        --max-num-seqs 2 --k 1 2 --out {tmp_path / "out"} --json"""
    assert main(words.split()) == 0
    found = json.loads(capsys.readouterr().out)
    samples = [json.loads(x) for x in (tmp_path / "out/samples.jsonl").read_text().splitlines()]
    assert len(samples) == 12
    assert {s["reward"] for s in samples} == {float(len(s["completion"])) for s in samples}
    mine = [s["reward"] for s in samples if s["model"] == str(model)]
    figures = found["generative"][str(model)]
    assert figures["reward"]["value"] == pytest.approx(np.mean(mine))
    assert figures["passes"]["2"]["value"] == np.mean(
        [max(mine[i : i + 2]) >= 1 for i in (0, 2, 4)]
    )
    assert 0 <= found["comparison"]["win_rate"]["value"] <= 1
    assert (tmp_path / "out" / "report.html").is_file()


@pytest.mark.slow
def test_the_engine_answers_what_the_harness_asks(model: Path) -> None:
    from fornax.evaluate.harness import HarnessModel

    subject = open_model(str(model))
    asked = HarnessModel(subject, context=32, max_num_seqs=2)
    encode = subject.origin.tokenizer.backend.encode
    prefix = subject.origin.tokenizer.bos_id
    assert prefix is not None

    def direct(tokens: list[int], first: int) -> tuple[float, bool]:
        logits = subject.decoder(np.array([tokens], np.int32))[0]
        logprobs = np.asarray(jax.nn.log_softmax(logits.astype(np.float32)))
        picks = [(logprobs[i - 1], tokens[i]) for i in range(first, len(tokens))]
        return sum(float(p[t]) for p, t in picks), all(int(p.argmax()) == t for p, t in picks)

    context, more = encode("def f(x):").ids, encode("\n    return").ids
    whole = encode("def f(x):\n    return").ids
    greedy = int(np.asarray(subject.decoder(np.array([context], np.int32)))[0, -1].argmax())
    greedy_text = subject.origin.tokenizer.decode([greedy])
    requests = [("def f(x):", "\n    return"), ("def f(x):\n    ", "return"), ("", "def")]
    found = asked.loglikelihood(requests)
    assert whole == context + more
    wanted = [direct(whole, len(context)), direct(whole, len(context))]
    wanted.append(direct([prefix, *encode("def").ids], 1))
    for (value, is_greedy), (expected, expected_greedy) in zip(found, wanted, strict=True):
        assert value == pytest.approx(expected, abs=1e-4)
        assert is_greedy == expected_greedy
    if encode("def f(x):" + greedy_text).ids == [*context, greedy]:
        assert asked.loglikelihood([("def f(x):", greedy_text)])[0][1]
    [rolled] = asked.rolling(["def f(x):\n    return"])
    assert rolled == pytest.approx(direct([prefix, *whole], 1)[0], abs=1e-4)
    assert asked.rolling(["def f(x): " * 20])[0] < rolled
    settings = {"until": ["\n"], "max_gen_toks": 5, "do_sample": False}
    texts = asked.generate([("def f(x):", settings), ("one " * 60, settings)])
    assert len(texts) == 2
    assert not any("\n" in text for text in texts)


def test_without_the_harness_there_is_a_clear_error(
    model: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    assert main(["eval", "--model", str(model), "--tasks", "arc_easy"]) == 2
    assert "pip install lm-eval" in capsys.readouterr().err


def test_help_needs_no_jax() -> None:
    program = """
import sys
from fornax.cli.main import main
assert main(["eval", "--help-config"]) == 0
assert "jax" not in sys.modules
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, env={**os.environ}
    )
    assert done.returncode == 0, done.stderr
    assert "--sampling.temperature" in done.stdout
