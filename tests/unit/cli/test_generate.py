"""`fornax generate`: where the tokenizer comes from, text as it comes, what is refused."""

import io

import jax.numpy as jnp
import pytest

from fornax.cli.commands import generate
from fornax.cli.main import main
from fornax.config import dump_yaml, from_mapping
from fornax.data import BuildConfig, Text, TrainBpe, build, load_tokenizer, train_bpe
from fornax.models import DecoderConfig, create_decoder, load_pretrained, save_pretrained
from fornax.models import generate as complete
from fornax.train import TrainConfig, tokenizer_folder

CONFIG = {
    "vocab_size": 300,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_layers": 1,
    "num_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    folder = tmp_path_factory.mktemp("dataset") / "tokenizer"
    train_bpe(["some text to learn from, é and more text"] * 4, 300).save(folder)
    return folder


@pytest.fixture(scope="module")
def model(tmp_path_factory, tokenizer):
    """A Hugging Face directory of a random model, its tokenizer inside."""
    folder = tmp_path_factory.mktemp("model") / "hf"
    save_pretrained(create_decoder(from_mapping(DecoderConfig, CONFIG)), folder, tokenizer)
    return folder


@pytest.fixture
def stdin(monkeypatch):
    def give(text: str, *, terminal: bool = False) -> None:
        stream = io.StringIO(text)
        monkeypatch.setattr(stream, "isatty", lambda: terminal)
        monkeypatch.setattr("sys.stdin", stream)

    return give


@pytest.mark.slow
def test_the_prompt_and_what_the_model_makes_of_it_are_printed(model, tokenizer, capsys):
    words = [str(model), "--prompt", "some text", "--max-tokens", "6", "--temperature=1"]
    assert main(["generate", *words]) == 0
    first = capsys.readouterr()
    assert first.out.startswith("some text")
    assert first.err.startswith("6 tokens, ")
    known = load_tokenizer(tokenizer)
    ids = known.encode("some text").tolist()
    decoder = load_pretrained(model, dtype=jnp.float32)
    sampling = generate.Sampling(temperature=1.0)
    [new] = complete(decoder, [ids], max_tokens=6, sampling=sampling, stop_tokens=())
    assert first.out == known.decode([*ids, *new]) + "\n"
    main(["generate", *words, "--seed", "5"])
    assert capsys.readouterr().out != first.out


def test_the_prompt_may_come_on_standard_input(model, tokenizer, capsys, stdin):
    """Without --max-tokens the text ends where the model's 64 positions do, or before."""
    stdin("more text")
    assert main(["generate", str(model)]) == 0
    said = capsys.readouterr()
    assert said.out.startswith("more text")
    room = CONFIG["max_position_embeddings"] - len(load_tokenizer(tokenizer).encode("more text"))
    assert 1 <= int(said.err.split()[0]) <= room


def test_no_prompt_on_a_terminal_is_refused(model, capsys, stdin):
    stdin("", terminal=True)
    assert main(["generate", str(model)]) == 2
    assert capsys.readouterr().err.startswith("error: there is no prompt; give --prompt TEXT")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "fornax generate needs MODEL; see fornax generate --help"),
        (["nowhere", "--prompt", "x"], "nowhere is neither a run directory"),
        (["nowhere", "--top-p", "2"], "top_p=2.0 must be above 0 and at most 1"),
        (["nowhere", "--top-k", "3"], "top_k and top_p change nothing at temperature 0"),
        (["nowhere", "--dtype", "float16"], "dtype=float16 (--dtype on the command line)"),
    ],
)
def test_what_cannot_be_is_refused(words, message, capsys):
    assert main(["generate", *words]) == 2
    assert capsys.readouterr().err.startswith(f"error: {message}")


def test_the_tokenizer_of_a_run_is_that_of_its_dataset(tmp_path):
    (tmp_path / "a.txt").write_text("some text to learn from, é and more text")
    dataset = tmp_path / "data"
    build(
        BuildConfig(
            source=Text(path=str(tmp_path / "a.txt")),
            output=dataset,
            tokenizer=TrainBpe(vocab_size=300),
            holdout=0.0,
        )
    )
    run = {"model": CONFIG, "data": {"source": {"type": "dataset", "path": str(dataset)}}}
    config = from_mapping(TrainConfig, run)
    (tmp_path / "config.yaml").write_text(dump_yaml(config), encoding="utf-8")
    assert tokenizer_folder(tmp_path) == dataset / "tokenizer"


def test_a_model_without_a_tokenizer_asks_for_one(tmp_path, capsys):
    assert tokenizer_folder(tmp_path) is None
    save_pretrained(create_decoder(from_mapping(DecoderConfig, CONFIG)), tmp_path / "model")
    assert main(["generate", str(tmp_path / "model"), "--prompt", "x"]) == 2
    assert "there is no tokenizer in" in capsys.readouterr().err


def test_a_character_is_shown_when_all_its_parts_have_come(tokenizer):
    known = load_tokenizer(tokenizer)
    prompt = known.encode("text ").tolist()
    new = known.encode("é 漢!").tolist()
    pieces = list(generate._text(list(prompt), iter(new), known))
    assert "".join(pieces) == "é 漢!"
    assert not any("\ufffd" in piece for piece in pieces)


def test_a_character_that_stays_in_parts_is_shown_at_the_end(tokenizer):
    known = load_tokenizer(tokenizer)
    new = known.encode("漢").tolist()[:1]
    assert "".join(generate._text([], iter(new), known)) == "\ufffd"


def test_the_end_token_of_the_tokenizer_serves_a_model_that_names_none(tokenizer):
    known = load_tokenizer(tokenizer)
    assert generate._stops((7, 8), known) == (7, 8)
    assert generate._stops((), known) == (known.eos_id,)
