"""Each method of preference learns its toy task from any seed, however its batch is divided.

Legend: P pairs, T tokens of a row.
"""

import dataclasses
import math
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tests.unit.tune.preference.toy import Toy

from fornax.adapters import LoRA
from fornax.config.errors import ConfigError
from fornax.optim import AdamW, Constant, OptimConfig
from fornax.train.task import Hosts, Loss, Task
from fornax.tune.config import (
    CPO,
    DPO,
    IPO,
    ORPO,
    KTOConfig,
    PreferenceConfig,
    RewardModelConfig,
    RobustDPO,
    SimPO,
)
from fornax.tune.data import Encoded, LabelledTokens
from fornax.tune.policy import read_origin
from fornax.tune.tasks import kto, preference, reward_model
from fornax.tune.tasks.pairs import completion_logprobs, mean_over

LOSSES = (
    DPO(),
    DPO(label_smoothing=0.1, nll_weight=0.5),
    RobustDPO(),
    IPO(),
    SimPO(),
    ORPO(),
    CPO(),
)
LIKE = (1, 2, 6)  # each near one that is not: DPO, DPO, SimPO
SEEDS = range(5)
OPTIM = OptimConfig(
    optimizer=AdamW(weight_decay=0.0), learning_rate=1e-2, schedule=Constant(), clip=()
)
COMMON: dict[str, Any] = {
    "max_length": 24,
    "batch_size": 8,
    "steps": 12,
    "remat": "none",
    "optim": OPTIM,
}


@pytest.fixture(scope="module")
def config(model_dir: Path, pairs_file: str) -> PreferenceConfig:
    return PreferenceConfig(model=str(model_dir), data=pairs_file, lora=LoRA(rank=4), **COMMON)


def any_loss(task: Task) -> Task:
    """The task with every loss in one program: `which` int32 [P] says which one counts."""

    def loss(model: Any, batch: Any, key: jax.Array) -> Loss:
        del key
        policy = completion_logprobs(model, batch)
        answers = preference.Answers(policy=policy, reference_P2=batch["ref_logps"])
        names = ("reward_margin", "accuracy", "reward_chosen", "drift")

        def one(config: Any) -> Any:
            loss_P, metrics = preference.pair_loss(config, answers)
            return loss_P, {name: metrics[name] for name in names}

        branches = [lambda config=config: one(config) for config in LOSSES]
        loss_P, metrics = jax.lax.switch(batch["which"][0], branches)
        real_P = jnp.all(policy.lengths > 0, axis=-1)  # rows that fill up have none
        return mean_over(loss_P, metrics, real_P.astype(jnp.float32))

    return dataclasses.replace(task, loss=loss, evaluate=None)


def late(found: list[dict[str, float]], name: str) -> float:
    """The mean over the last steps."""
    return float(np.mean([metrics[name] for metrics in found[-6:]]))


def which(number: int) -> Any:
    def edit(rows: dict[str, Any]) -> dict[str, Any]:
        count = len(rows["tokens"])
        return {**rows, "which": np.full(count, number, np.int32)}

    return edit


@pytest.fixture(scope="module")
def pairs(config: PreferenceConfig, tmp_path_factory: pytest.TempPathFactory) -> Toy:
    out = tmp_path_factory.mktemp("run")
    return Toy(config, any_loss(preference.make(config, read_origin(config), out)))


@pytest.mark.parametrize(
    "number",
    [
        pytest.param(number, marks=pytest.mark.exhaustive) if number in LIKE else number
        for number in range(len(LOSSES))
    ],
)
@pytest.mark.slow
def test_every_loss_learns_the_preference_from_five_seeds(pairs: Toy, number: int):
    for seed in SEEDS:
        _, found = pairs.run(24, seed=seed, edit=which(number))
        assert late(found, "loss") < found[0]["loss"]
        assert late(found, "reward_margin") > found[0]["reward_margin"]
        assert late(found, "accuracy") > 0.75
    assert pairs.programs.compilations == 1


def test_the_policy_starts_as_its_reference(pairs: Toy):
    _, (first,) = pairs.run(1, edit=which(0))
    assert first["loss"] == pytest.approx(math.log(2), abs=1e-6)
    assert first["reward_margin"] == pytest.approx(0, abs=1e-5)
    assert first["drift"] == pytest.approx(0, abs=1e-5)


def test_the_reference_is_stored_with_the_run_and_read_by_number(pairs: Toy):
    stream = pairs.task.batches("train", Hosts())
    rows = next(stream)
    reference: Any = pairs.task.batches
    stored = np.load(reference.reference.out / "reference" / "train.npy")
    np.testing.assert_array_equal(rows["ref_logps"], stored[rows["example"]])
    assert rows["keep"].shape[-1] < rows["tokens"].shape[-1]


@pytest.mark.slow
def test_adapters_switched_off_are_the_same_reference(pairs: Toy, config: PreferenceConfig):
    switched = dataclasses.replace(config, reference="adapter")
    task = preference.make(switched, read_origin(switched), Path("/nowhere"))
    toy = Toy(switched, task)
    _, expected = pairs.run(3, seed=3, edit=which(0))
    _, found = toy.run(3, seed=3)
    for ours, theirs in zip(found, expected, strict=True):
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-4)


@pytest.fixture(scope="module")
def labelled_file(tmp_path_factory: pytest.TempPathFactory) -> str:
    from tests.unit.tune.preference.conftest import WORDS, write_lines

    rng = np.random.default_rng(0)
    lines = []
    for number in range(40):
        good = number % 3 == 0
        word = WORDS[int(rng.integers(2)) + (0 if good else 2)]
        first, second = (WORDS[4 + int(n)] for n in rng.integers(0, 4, 2))
        prompt = f"{first} {second} is"
        lines.append({"prompt": prompt, "completion": f" {word}", "label": good})
    return write_lines(tmp_path_factory.mktemp("data") / "labelled.jsonl", lines)


def kto_toy(
    model_dir: Path, labelled_file: str, out: Path, *, accumulate: int = 1, devices: int = 1
) -> Toy:
    config = KTOConfig(
        model=str(model_dir),
        data=labelled_file,
        lora=LoRA(rank=4),
        accumulate=accumulate,
        undesirable_weight=0.5,
        beta=0.5,
        **COMMON,
    )
    return Toy(config, kto.make(config, read_origin(config), out), devices)


@pytest.fixture(scope="module")
def labelled(
    model_dir: Path, labelled_file: str, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Toy, Path]:
    out = tmp_path_factory.mktemp("run")
    return kto_toy(model_dir, labelled_file, out), out


@pytest.mark.slow
def test_kto_tells_the_labels_apart_from_five_seeds(labelled: tuple[Toy, Path]):
    toy, _ = labelled
    for seed in SEEDS:
        _, found = toy.run(24, seed=seed)
        assert late(found, "reward_desirable") > late(found, "reward_undesirable") + 0.5
        assert late(found, "accuracy") > 0.8
        assert late(found, "loss") < found[0]["loss"]
        assert found[-1]["kl"] >= 0
    assert toy.programs.compilations == 1


@pytest.mark.slow
def test_kto_starts_at_the_reference(labelled: tuple[Toy, Path]):
    _, (first,) = labelled[0].run(1)
    assert first["kl"] == pytest.approx(0, abs=1e-5)
    assert first["reward_desirable"] == pytest.approx(0, abs=1e-5)


@pytest.mark.parametrize(
    ("accumulate", "devices"),
    [
        pytest.param(4, 1, marks=pytest.mark.exhaustive),
        pytest.param(2, 3, marks=pytest.mark.slow),
    ],
)
def test_kto_does_not_depend_on_how_its_batch_is_divided(
    labelled: tuple[Toy, Path], model_dir: Path, labelled_file: str, accumulate: int, devices: int
):
    whole, out = labelled
    parts = kto_toy(model_dir, labelled_file, out, accumulate=accumulate, devices=devices)
    state, expected = whole.run(4, seed=1)
    same, found = parts.run(4, seed=1)
    for ours, theirs in zip(found, expected, strict=True):
        for name in ("loss", "kl", "reward_desirable", "grad_norm"):
            assert ours[name] == pytest.approx(theirs[name], rel=2e-4, abs=1e-5, nan_ok=True)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=2e-4),
        jax.device_get(same.params),
        jax.device_get(state.params),
    )


@pytest.mark.exhaustive
@pytest.mark.parametrize(("accumulate", "devices"), [(4, 1), (1, 8), (2, 3)])
def test_pairs_do_not_depend_on_how_their_batch_is_divided(
    pairs: Toy, config: PreferenceConfig, accumulate: int, devices: int
):
    divided = dataclasses.replace(config, accumulate=accumulate)
    task: Any = pairs.task.batches
    parts = Toy(
        divided,
        any_loss(preference.make(divided, read_origin(divided), task.reference.out)),
        devices,
    )
    for number in (1, 5):
        state, expected = pairs.run(4, seed=1, edit=which(number))
        same, found = parts.run(4, seed=1, edit=which(number))
        for ours, theirs in zip(found, expected, strict=True):
            for name in ("loss", "reward_margin", "grad_norm"):
                assert ours[name] == pytest.approx(theirs[name], rel=2e-4, abs=1e-5, nan_ok=True)
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=2e-4),
            jax.device_get(same.params),
            jax.device_get(state.params),
        )


@pytest.mark.slow
def test_a_reward_model_ranks_the_pairs_from_five_seeds(
    config: PreferenceConfig, pairs_file: str, tmp_path: Path
):
    reward = RewardModelConfig(
        model=config.model, data=pairs_file, lora=LoRA(rank=4), centre=0.01, **COMMON
    )
    toy = Toy(reward, reward_model.make(reward, read_origin(reward), tmp_path))
    for seed in SEEDS:
        _, found = toy.run(24, seed=seed)
        assert late(found, "accuracy") > 0.95
        assert late(found, "loss") < 0.7 * found[0]["loss"]


def sequence(prompt: list[int], completion: list[int]) -> LabelledTokens:
    tokens = np.array([*prompt, *completion], np.int32)
    mask = np.arange(len(tokens)) >= len(prompt)
    return LabelledTokens(
        sequence=Encoded(tokens=tokens, mask=mask, prompt=len(prompt)), label=True
    )


def test_a_mismatched_completion_is_of_the_next_other_prompt():
    items = [
        sequence([1, 2], [10, 11]),
        sequence([1, 2], [20]),
        sequence([3], [30, 31, 32]),
        sequence([1, 2], [40]),
    ]
    found = [pair.rejected.tokens.tolist() for pair in kto.mismatched(items, 4)]
    assert found == [[1, 2, 30, 31], [1, 2, 30, 31], [3, 40], [1, 2, 30, 31]]
    one_prompt = kto.mismatched(items[:2], 8)
    assert [pair.rejected.tokens.tolist() for pair in one_prompt] == [[1, 2, 20], [1, 2, 10, 11]]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"reference": "adapter"}, "set lora.rank"),
        ({"loss": SimPO(), "reference_model": "other"}, "has no reference"),
        ({"reference": "adapter", "lora": LoRA(), "reference_model": "x"}, "reference=stored"),
    ],
)
def test_settings_that_would_not_count_are_refused(settings: dict[str, Any], message: str):
    with pytest.raises(ConfigError, match=message):
        PreferenceConfig(model="m", data="d", **settings)
