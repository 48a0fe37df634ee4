"""The parts of a report that post-training adds: its curves, and samples to look through."""

import json
from pathlib import Path

from fornax.train.report.samples import samples_section
from fornax.train.report.tuning import tuning_figures, tuning_section

RECORDS = [
    {
        "step": step,
        "loss": 0.1,
        "reward": step / 10,
        "reward_max": 1.0,
        "reward_std": 0.2,
        "reward/mine": step / 5,
        "reward/length": -0.1,
        "kl": 0.01,
        "clip_fraction": 0.0,
        "reward_failures": 0.0,
        "truncated": 0.5,
    }
    for step in range(1, 6)
]


def test_a_run_of_rewards_shows_them_by_source() -> None:
    section = tuning_section(RECORDS)
    assert section is not None
    for name in ("Reward by source", "mine 1", "length -0.1", "Divergence", "truncated"):
        assert name in section.body, name
    assert "Failed calls" not in section.body, "none failed"
    assert "Entropy" not in section.body, "it was not recorded"
    assert tuning_figures(RECORDS) == [("reward at the start", "0.1"), ("reward at the end", "0.5")]


def test_failures_of_reward_functions_are_shown_where_there_are_some() -> None:
    section = tuning_section([record | {"reward_failures": 2.0} for record in RECORDS])
    assert section is not None
    assert "Failed calls of reward functions" in section.body


def test_preferences_show_margins_and_held_out_accuracy() -> None:
    records = [
        {"step": s, "reward_margin": s / 2, "accuracy": 0.75, "reward_chosen": 0.1} for s in (1, 2)
    ]
    records[-1] |= {"eval/reward_margin": 0.7, "eval/accuracy": 0.9}
    section = tuning_section(records)
    assert section is not None
    assert "held out 0.7" in section.body
    assert tuning_figures(records) == [
        ("margin of rewards", "1"),
        ("accuracy", "75%"),
        ("held-out margin of rewards", "0.7"),
        ("held-out accuracy", "90%"),
    ]


def test_pretraining_has_no_such_section() -> None:
    assert tuning_section([{"step": 1, "loss": 2.0, "accuracy": 0.1, "grad_norm": 1.0}]) is None


def sample(step: int, **changes: object) -> dict:
    return {
        "step": step,
        "prompt": "2 + 2?",
        "completion": "4",
        "reward": 1.0,
        "rewards": {"exact": 1.0},
        "advantage": 0.5,
        "tokens": 3,
        "finish_reason": "stop",
        "where": "prompts.jsonl:7",
        **changes,
    }


def write(file: Path, records: list[dict]) -> Path:
    file.write_text("".join(json.dumps(record) + "\n" for record in records))
    return file


def test_samples_are_text_whatever_a_model_writes(tmp_path: Path) -> None:
    evil = '</span></pre><script>alert("x")</script><!-- & -->'
    file = write(
        tmp_path / "samples.jsonl",
        [
            sample(1, completion=evil, prompt=evil),
            sample(3, finish_reason="length", rewards={"<b>": None}),
        ],
    )
    section = samples_section(file)
    assert section is not None
    assert "alert(&#34;x&#34;)" in section.body
    assert "<script>alert" not in section.body
    assert section.body.count("<script>") == 1
    assert "&lt;b&gt; <b>none</b>" in section.body
    assert "<b>3, truncated</b>" in section.body
    assert '<option value="">all</option><option>1</option><option selected>3</option>' in (
        section.body
    )
    assert 'data-reward="1.0"' in section.body
    assert "prompts.jsonl:7" in section.body


def test_a_long_run_shows_rounds_from_its_first_to_its_last(tmp_path: Path) -> None:
    records = [sample(step) for step in range(1, 301) for _ in range(64)]
    section = samples_section(write(tmp_path / "samples.jsonl", records))
    assert section is not None
    shown = section.body.count('class="sample"')
    assert 300 <= shown <= 400
    assert "<option>1</option>" in section.body
    assert "<option selected>300</option>" in section.body
    assert "of 19,200 in samples.jsonl" in section.lead


def test_no_samples_no_section(tmp_path: Path) -> None:
    assert samples_section(tmp_path / "samples.jsonl") is None
    (tmp_path / "samples.jsonl").write_text("")
    assert samples_section(tmp_path / "samples.jsonl") is None
