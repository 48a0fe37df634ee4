"""Students come closer to their teachers, whatever says what the teacher thinks.

Legend: B rows, T tokens of a row, V vocabulary.
"""

import dataclasses
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from tests.unit.tune.preference.toy import Toy

from fornax.adapters import LoRA
from fornax.config.errors import ConfigError, DataError
from fornax.data import load_tokenizer, train_bpe
from fornax.mesh import MeshConfig
from fornax.models import DecoderConfig, create_decoder, load_pretrained, save_pretrained
from fornax.optim import AdamW, Constant, OptimConfig
from fornax.train.task import Hosts
from fornax.tune.config import DistillConfig, OnPolicy, TopLogits
from fornax.tune.data import Encoded, Loaded, LoaderOptions, Summary
from fornax.tune.policy import read_origin
from fornax.tune.rollout import Completion, SampleSettings
from fornax.tune.tasks import distill
from fornax.tune.tasks.teacher import OnPolicyStream, numbered_rows

OPTIM = OptimConfig(
    optimizer=AdamW(weight_decay=0.0), learning_rate=1e-2, schedule=Constant(), clip=()
)


@pytest.fixture(scope="module")
def teacher_dir(tokenizer_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Wider and deeper than the student, its vocabulary padded to another size."""
    path = tmp_path_factory.mktemp("models") / "teacher"
    config = DecoderConfig(
        vocab_size=load_tokenizer(tokenizer_dir).vocab_size + 6,
        hidden_size=48,
        intermediate_size=64,
        num_layers=3,
        num_heads=4,
        num_kv_heads=4,
    )
    teacher = create_decoder(config, seed=5)
    head: Any = teacher.lm_head or teacher.embed
    weights = head.embedding if teacher.lm_head is None else head.kernel
    weights.set_value(weights.get_value() * 5)  # one that has made up its mind
    save_pretrained(teacher, path, tokenizer_dir)
    return path


@pytest.fixture(scope="module")
def answers_file(tmp_path_factory: pytest.TempPathFactory) -> str:
    from tests.unit.tune.preference.conftest import WORDS, write_lines

    lines = [
        {"prompt": f"{a} {b} is", "completion": f" {c}"}
        for a in WORDS[4:]
        for b in WORDS[4:]
        for c in WORDS[:2]
    ]
    return write_lines(tmp_path_factory.mktemp("data") / "answers.jsonl", lines)


@pytest.fixture(scope="module")
def config(model_dir: Path, teacher_dir: Path, answers_file: str) -> DistillConfig:
    return DistillConfig(
        model=str(model_dir),
        teacher=str(teacher_dir),
        data=answers_file,
        max_length=24,
        batch_size=8,
        steps=24,
        remat="none",
        optim=OPTIM,
        packing="none",
    )


def toy_of(config: DistillConfig, out: Path, devices: int = 1) -> Toy:
    return Toy(config, distill.make(config, read_origin(config), out), devices)


@pytest.fixture(scope="module")
def whole(config: DistillConfig, tmp_path_factory: pytest.TempPathFactory) -> Toy:
    return toy_of(config, tmp_path_factory.mktemp("run"))


@pytest.mark.exhaustive
def test_a_student_of_another_shape_learns_from_five_seeds(whole: Toy):
    for seed in range(5):
        _, found = whole.run(24, seed=seed)
        assert found[-1]["loss"] < 0.8 * found[0]["loss"]
        assert found[-1]["agreement"] >= found[0]["agreement"]
    assert whole.programs.compilations == 1


@pytest.mark.exhaustive
def test_the_loss_is_the_divergence_of_the_two_models_logits(
    whole: Toy, model_dir: Path, teacher_dir: Path
):
    rows = next(whole.task.batches("train", Hosts()))
    _, metrics = whole.programs.step(whole.start(), rows)
    given = (rows["tokens"], None, rows["segment_ids"])
    student = np.asarray(jax.nn.log_softmax(load_pretrained(model_dir)(*given)))
    words = student.shape[-1]
    logits = load_pretrained(teacher_dir)(*given)[..., :words]
    teacher = np.asarray(jax.nn.log_softmax(logits))
    apart = (np.exp(teacher) * (teacher - student)).sum(-1)
    weights = rows["loss_weights"]
    assert float(metrics["loss"]) == pytest.approx(
        (apart * weights).sum() / weights.sum(), rel=1e-4
    )


@pytest.mark.exhaustive
def test_the_teachers_projection_is_neither_trained_nor_kept(whole: Toy):
    state = whole.start()
    paths = {str(path) for path, _ in jax.tree_util.tree_leaves_with_path(state.params)}
    assert not any("teacher_head" in path for path in paths)
    assert "teacher_head" in whole.programs.frozen


@pytest.mark.exhaustive
def test_stored_logits_teach_without_the_teacher(config: DistillConfig, tmp_path: Path):
    stored = dataclasses.replace(
        config,
        packing=None,
        lora=LoRA(rank=4),
        logits=TopLogits(k=24, path=str(tmp_path / "logits")),
    )
    toy = toy_of(stored, tmp_path)
    alone = dataclasses.replace(stored, teacher=None)
    toy.task.batches("train", Hosts())  # the teacher writes them
    without = distill.make(alone, read_origin(alone), tmp_path)
    _, found = toy.run(24, stream=without.batches("train", Hosts()))
    assert found[-1]["loss"] < found[0]["loss"]
    fewer = dataclasses.replace(alone, logits=TopLogits(k=8, path=str(tmp_path / "logits")))
    task = distill.make(fewer, read_origin(fewer), tmp_path)
    with pytest.raises(ConfigError, match=r"k=24, and this run has k=8"):
        task.batches("train", Hosts())


@pytest.mark.exhaustive
def test_the_teacher_may_lie_on_another_mesh(whole: Toy, config: DistillConfig, tmp_path: Path):
    spread = dataclasses.replace(config, teacher_mesh=MeshConfig(fsdp=4, tensor=2))
    toy = toy_of(spread, tmp_path, devices=8)
    state, expected = whole.run(3, seed=1)
    same, found = toy.run(3, seed=1)
    for ours, theirs in zip(found, expected, strict=True):
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=2e-4)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=2e-4),
        jax.device_get(same.params),
        jax.device_get(state.params),
    )


def test_a_teacher_of_another_vocabulary_is_refused(
    answers_file: str, tmp_path: Path, model_dir: Path
):
    train_bpe(["other words entirely " * 20], 280).save(tmp_path / "other")
    shutil.copyfile(model_dir / "config.json", tmp_path / "other" / "config.json")
    teacher = str(tmp_path / "other")
    wrong = DistillConfig(model=str(model_dir), teacher=teacher, data=answers_file, max_length=24)
    with pytest.raises(ConfigError, match=r"vocabularies of teacher=.*share a tokenizer"):
        distill.make(wrong, read_origin(wrong), tmp_path)


class Echo:
    """Answers with the seed's last digits and the end token 2."""

    def sample(
        self, prompts: Sequence[Sequence[int]], settings: SampleSettings, seeds: Sequence[int]
    ) -> list[list[Completion]]:
        self.asked = [list(prompt) for prompt in prompts]
        return [[self._answer(seed)] for seed in seeds]

    def _answer(self, seed: int) -> Completion:
        tokens = np.array([10 + seed % 7, 10 + seed % 5, 2], np.int32)
        return Completion(
            tokens=tokens,
            logprobs=np.zeros(3, np.float32),
            versions=np.zeros(3, np.int32),
            mask=np.ones(3, np.int8),
            finish_reason="stop",
            text="",
            seed=seed,
        )


def examples(prompt: int = 3) -> Loaded[Encoded]:
    items = [
        Encoded(
            tokens=np.arange(20 + n, 20 + n + prompt + 2, dtype=np.int32),
            mask=np.arange(prompt + 2) >= prompt,
            prompt=prompt,
        )
        for n in range(4)
    ]
    return Loaded(items=items, summary=Summary(name="x"))


def drawn(share: float, sampler: Any = None, hosts: Hosts | None = None) -> OnPolicyStream:
    loaded = examples()
    return OnPolicyStream(
        numbered_rows(loaded, LoaderOptions(batch_size=4, shuffle=False), 16),
        loaded.items,
        OnPolicy(share=share, max_tokens=4),
        max_length=16,
        seed=0,
        hosts=hosts or Hosts(),
        student=sampler or Echo(),
    )


def test_drawn_rows_are_the_prompts_with_the_students_answers():
    sampler = Echo()
    stream = drawn(1.0, sampler)
    rows = next(stream)
    assert stream.drawn
    assert sampler.asked == [list(range(20 + n, 23 + n)) for n in range(4)]
    np.testing.assert_array_equal(rows["tokens"][:, :3], sampler.asked)
    assert (rows["tokens"][:, 5] == 2).all()  # the end is there, and learned
    np.testing.assert_array_equal(
        rows["loss_weights"][0], np.isin(np.arange(16), [2, 3, 4]).astype(np.float32)
    )
    assert rows["targets"][0, 4] == 2


def test_which_steps_draw_and_what_follows_from_step_and_seed():
    once, again = drawn(0.5), drawn(0.5)
    kinds = []
    for step in range(20):
        once.step = step
        rows = next(once)
        kinds.append(once.drawn)
        if step >= 10:  # a run that goes on at step 10
            again.restore({0: {**once.state()[0], "batch": once.state()[0]["batch"] - 1}})
            again.step = step
            same = next(again)
            assert again.drawn == once.drawn
            np.testing.assert_array_equal(same["tokens"], rows["tokens"])
    assert 4 < sum(kinds) < 16


def test_hosts_hold_parts_of_the_batch_that_one_would_hold():
    for share in (1.0, 1e-9):
        whole = next(drawn(share))
        parts = [drawn(share, hosts=Hosts(index=i, count=3)) for i in range(3)]
        rows = [next(part) for part in parts]
        assert [len(each["tokens"]) for each in rows] == [2, 2, 2]
        for name, column in whole.items():
            joined = np.concatenate([each[name] for each in rows])
            np.testing.assert_array_equal(joined[:4], column)
            assert (joined[4:] == (-1 if name == "example" else 0)).all()
        assert parts[0].state() == {shard: parts[0].state()[0] for shard in range(4)}
        assert parts[1].state() == {}


def test_text_without_prompts_cannot_be_answered():
    loaded = examples(prompt=1)
    with pytest.raises(DataError, match="4 of 4 examples have none"):
        OnPolicyStream(
            numbered_rows(loaded, LoaderOptions(batch_size=4), 16),
            loaded.items,
            OnPolicy(),
            max_length=16,
            seed=0,
            hosts=Hosts(),
            student=Echo(),
        )


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({}, "needs a teacher"),
        ({"teacher": "t", "beta": 1.0}, "forward_kl"),
        ({"teacher": "t", "logits": TopLogits(), "on_policy": OnPolicy()}, "logits.type=full"),
        ({"teacher": "t", "logits": TopLogits(), "packing": "best_fit"}, "leave packing out"),
    ],
)
def test_settings_that_cannot_be_meant_are_refused(settings: dict[str, Any], message: str):
    with pytest.raises(ConfigError, match=message):
        DistillConfig(model="m", data="d", **settings)
