"""A teacher on a mesh of its own says what its decoder says; what is stored of it comes back."""

import dataclasses
import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import scipy.special
from flax import nnx

from fornax.config.errors import ConfigError, DataError
from fornax.data import Tokenizer, train_bpe
from fornax.mesh import DEFAULT_RULES, MeshConfig, make_mesh, tree_shardings
from fornax.models import Decoder
from fornax.train.task import Hosts
from fornax.tune.data.tokenizer import check_same_tokens, shared_vocabulary
from fornax.tune.stores import TopKey, TopStore, write_top
from fornax.tune.tasks.teacher import Teacher

K = 5


@pytest.fixture(scope="module")
def teacher(decoder: Decoder) -> Teacher:
    """On eight devices, four of which share rows."""
    mesh = make_mesh(MeshConfig(fsdp=4, tensor=2))
    graphdef, state = nnx.split(decoder)
    state = jax.device_put(state, tree_shardings(state, mesh, DEFAULT_RULES))
    laid_out = nnx.merge(graphdef, state)
    return Teacher(laid_out, mesh=mesh, rules=DEFAULT_RULES, hosts=Hosts())


def batches(rows: Any) -> Iterator[dict[str, np.ndarray]]:
    """Seven examples and one row that fills, in two batches."""
    whole = rows((8,), seed=3)
    for begin in (0, 4):
        part = {name: x[begin : begin + 4] for name, x in whole.items()}
        example = np.arange(begin, begin + 4, dtype=np.int32)
        yield {**part, "example": np.where(example < 7, example, -1)}


@pytest.fixture(scope="module")
def positions(rows: Any) -> list[int]:
    return [int(n) for n in rows((8,), seed=3)["loss_weights"][:7].sum(-1)]


WORDS = 40  # of 48 outputs
KEY = TopKey(data="d", vocabulary=WORDS, k=K, temperature=2.0, teacher="t")


def top_of(teacher: Teacher) -> Callable[..., Any]:
    return functools.partial(teacher.top, k=K, temperature=2.0, vocabulary=WORDS)


@pytest.fixture(scope="module")
def store(
    teacher: Teacher, rows: Any, positions: list[int], tmp_path_factory: pytest.TempPathFactory
) -> Path:
    path = tmp_path_factory.mktemp("logits")
    write_top(path, KEY, top_of(teacher), batches(rows), positions)
    return path


def test_hidden_states_are_the_decoders(teacher: Teacher, decoder: Decoder, rows: Any):
    batch = next(batches(rows))
    alone = jax.jit(type(decoder).hidden, static_argnames="consecutive")(
        decoder, batch["tokens"], batch["positions"], batch["segment_ids"], consecutive=True
    )
    np.testing.assert_allclose(teacher.hidden(batch), alone, rtol=1e-4, atol=1e-5)
    np.testing.assert_array_equal(teacher.output_weights(), decoder.output_weights())


def test_stored_tokens_are_the_likeliest_at_the_trained_positions(
    store: Path, decoder: Decoder, rows: Any
):
    logits_of = jax.jit(type(decoder).__call__)
    for batch in batches(rows):
        found = TopStore(store, KEY).columns(batch)
        logits = logits_of(decoder, batch["tokens"], segment_ids_BT=batch["segment_ids"])
        logps = scipy.special.log_softmax(np.asarray(logits)[..., :WORDS] / 2.0, axis=-1)
        trained = (batch["loss_weights"] > 0) & (batch["example"][:, None] >= 0)
        best = np.sort(logps, axis=-1)[..., ::-1][..., :K]
        np.testing.assert_allclose(
            found["teacher_logprobs"][trained], best[trained], rtol=1e-4, atol=1e-5
        )
        picked = np.take_along_axis(logps, found["teacher_ids"], axis=-1)
        np.testing.assert_allclose(
            found["teacher_logprobs"][trained], picked[trained], rtol=1e-4, atol=1e-5
        )
        assert not found["teacher_logprobs"][~trained].any()


def test_an_example_that_the_teacher_never_saw_is_an_error(
    teacher: Teacher, rows: Any, positions: list[int], tmp_path: Path
):
    first = next(batches(rows))
    with pytest.raises(DataError, match="3 of 7 examples were in no batch"):
        write_top(tmp_path, KEY, top_of(teacher), iter([first]), positions)
    assert not TopStore.exists(tmp_path)


@pytest.mark.parametrize("part", ["data", "vocabulary", "k", "temperature", "teacher"])
def test_logits_of_something_else_are_refused(store: Path, part: str):
    change: Any = {part: "other" if part in ("data", "teacher") else 3}
    with pytest.raises(ConfigError, match=rf"{part}="):
        TopStore(store, dataclasses.replace(KEY, **change))


def test_a_teacher_that_is_gone_need_not_be_named(store: Path):
    TopStore(store, dataclasses.replace(KEY, teacher=None))


def test_a_folder_without_logits_says_who_can_write_them(tmp_path: Path):
    with pytest.raises(DataError, match="--teacher"):
        TopStore(tmp_path, KEY)


@pytest.fixture(scope="module")
def tokenizers() -> tuple[Tokenizer, Tokenizer]:
    return train_bpe(["abc abd abe " * 9], 270), train_bpe(["xyz xyw xyv " * 9], 270)


def test_vocabularies_that_differ_are_an_error_naming_tokens(
    tokenizers: tuple[Tokenizer, Tokenizer],
):
    one, other = tokenizers
    names, others = ("teacher", "big"), ("model", "small")
    check_same_tokens(one, one, names=names, others=others)
    with pytest.raises(ConfigError, match=r"teacher=big .* model=small .*missing"):
        check_same_tokens(one, other, names=names, others=others)


def test_padded_vocabularies_compare_what_both_have():
    assert shared_vocabulary(152, 160, 150) == 152
    with pytest.raises(ConfigError, match="only 152 outputs"):
        shared_vocabulary(152, 160, 155)
