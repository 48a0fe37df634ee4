"""`fornax data`: the three commands on a small corpus, and what each refuses."""

import json

import pytest

from fornax.cli.main import main


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    """Forty documents as JSON lines."""
    file = tmp_path_factory.mktemp("corpus") / "a.jsonl"
    texts = [f"document {number} says: {'word ' * number}" for number in range(40)]
    file.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return file


@pytest.fixture(scope="module")
def dataset(corpus):
    """The corpus, built by the command."""
    output = corpus.parent / "built"
    assert main(["data", "build", *_build(corpus, output)]) == 0
    return output


def _build(corpus, output) -> list[str]:
    source = ["--source.type", "jsonl", "--source.path", str(corpus), "--holdout=0.2"]
    return [*source, "--tokenizer.vocab-size", "300", "--output", str(output)]


def test_build_says_what_it_made_and_keeps_it(corpus, dataset, capsys):
    assert main(["data", "build", *_build(corpus, dataset)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"{dataset}: already built"
    assert lines[1].startswith("  train: ")
    assert lines[2].startswith("  eval: ")


def test_build_replaces_another_dataset_only_when_told(corpus, dataset, capsys, tmp_path):
    output = tmp_path / "other"
    assert main(["data", "build", *_build(corpus, output)]) == 0
    changed = [*_build(corpus, output), "--append-eos=false"]
    capsys.readouterr()
    assert main(["data", "build", *changed]) == 2
    assert "append_eos" in capsys.readouterr().err
    assert main(["data", "build", *changed, "--overwrite"]) == 0
    captured = capsys.readouterr()
    assert captured.out.startswith(f"{output}: built")
    assert "write: 40 of 40 records" in captured.err


def test_inspect_describes_a_dataset(dataset, capsys):
    words = [str(dataset), "--seq-len", "64", "--samples", "1", "--packing.type", "first_fit"]
    assert main(["data", "inspect", *words]) == 0
    out = capsys.readouterr().out
    assert "split      train" in out
    assert "of 64 tokens" in out
    assert "sample 1\n  'document " in out
    assert "sample 2" not in out


def test_inspect_reads_what_a_config_describes(corpus, dataset, capsys, tmp_path):
    config = tmp_path / "data.yaml"
    config.write_text(
        f"source: {{type: jsonl, path: {corpus}}}\n"
        f"transforms: [{{type: tokenize, tokenizer: {dataset}/tokenizer}}]\n"
    )
    assert main(["data", "inspect", "--config", str(config)]) == 0
    assert "records    40 " in capsys.readouterr().out


def test_inspect_in_debug_names_the_record_and_the_transform(dataset, capsys, tmp_path):
    broken = tmp_path / "broken.jsonl"
    broken.write_text('{"text": "fine"}\n{"txt": "not"}\n')
    tokenize = f"[{{type: tokenize, tokenizer: {dataset}/tokenizer}}]"
    words = ["--source.type", "jsonl", "--source.path", str(broken), "--transforms", tokenize]
    assert main(["data", "inspect", *words, "--debug"]) == 2
    err = capsys.readouterr().err
    assert "tokenize" in err
    assert f"{broken} line 2" in err


def test_a_dataset_and_a_source_are_not_both_taken(dataset, capsys):
    assert main(["data", "inspect", str(dataset), "--source.type", "jsonl"]) == 2
    assert "source and source.type are both given" in capsys.readouterr().err


def test_visualize_draws_and_prints_the_stages(dataset, capsys, tmp_path):
    picture = tmp_path / "p.svg"
    words = ["--output", str(picture), "--batches", "2", "--seq-len", "32"]
    assert main(["data", "visualize", str(dataset), *words]) == 0
    assert picture.read_text().startswith("<svg")
    out = capsys.readouterr().out
    assert "2 batches in " in out
    assert "concat_then_split" in out


@pytest.mark.parametrize("command", ["inspect", "visualize"])
def test_a_folder_that_is_no_dataset_is_refused(command, capsys, tmp_path):
    assert main(["data", command, str(tmp_path)]) == 2
    assert "is not a finished dataset" in capsys.readouterr().err
