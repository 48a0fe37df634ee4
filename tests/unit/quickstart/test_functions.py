"""Functions are cut into prompts and bodies, and held-out ones stay unseen."""

import json

from fornax.data import BuildConfig, Text, TrainBpe, build
from fornax.quickstart.functions import pairs_of, write_pairs

SOURCE = '''
class Shape:
    """A class is not a function."""

    @property
    def name(self):
        """No parameter to use."""
        return "shape"

    def scale(self, factor):
        """Return it scaled.

        By a factor.
        """
        grown = self.size * factor
        return grown

    def bare(self, factor):
        return factor


def double(x):  # twice
    "Return twice x."
    return 2 * x


def only(x):
    """A docstring and nothing more."""


def quoting(x):
    """Such as

    def example(y):
    """
    return x


def margin(x):
    """A docstring
that returns to the margin."""
    return x
'''


def test_functions_are_cut_after_their_docstring() -> None:
    pairs = dict(pairs_of(SOURCE))
    assert set(pairs.values()) == {
        "    grown = self.size * factor\n    return grown\n",
        "    return 2 * x\n",
        "    return x\n",
    }
    assert 'def double(x):  # twice\n    "Return twice x."\n' in pairs
    for head, body in pairs.items():
        compile(head + body, "pair", "exec")


def test_files_that_do_not_parse_have_none() -> None:
    assert list(pairs_of("def f(:\n")) == []
    assert list(pairs_of("")) == []


def test_what_training_files_have_is_not_held_out(tmp_path) -> None:
    (tmp_path / "files").mkdir()
    for number in range(12):
        own = f'def own_{number}(x):\n    "Add {number}."\n    return x + {number}\n'
        (tmp_path / "files" / f"{number}.txt").write_text(own + SOURCE)
    build(
        BuildConfig(
            source=Text(path=str(tmp_path / "files/*.txt")),
            output=tmp_path / "data",
            tokenizer=TrainBpe(vocab_size=280),
            holdout=0.4,
        )
    )
    counts = write_pairs(
        tmp_path / "data",
        tmp_path / "pairs",
        max_tokens=40,
        seed=0,
        limits={"train": None, "eval": 2},
    )
    read = {
        split: [
            json.loads(line)
            for line in (tmp_path / f"pairs/{split}.jsonl").read_text().splitlines()
        ]
        for split in ("train", "eval")
    }
    assert counts == {split: len(pairs) for split, pairs in read.items()}
    assert len(read["eval"]) == 2, "the limit"
    assert all("own_" in pair["prompt"] for pair in read["eval"]), "shared functions were seen"
    assert sum("def double" in pair["prompt"] for pair in read["train"]) == 1, "each counts once"
    assert not any("factor" in pair["prompt"] for pair in read["train"]), "too long"
