"""The pool scores in order, survives what functions do to it, and refuses what cannot work."""

import os
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from multiprocessing import connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fornax.config.errors import ConfigError, DataError
from fornax.rewards import RewardPool, RewardSpec, Sample, Score


def _samples(*completions: str, **record: str) -> list[Sample]:
    return [Sample("p", completion, record) for completion in completions]


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("log") / "rewards.log"


@pytest.fixture(scope="module")
def pool(reward_file: Path, log: Path) -> Iterator[RewardPool]:
    with RewardPool([_spec(reward_file, 120.0)], workers=2, log=log) as made:
        yield made


def _spec(reward_file: Path, seconds: float) -> RewardSpec:
    return RewardSpec(
        function=f"{reward_file}:score", timeout_seconds=seconds, failure_score=-1.0, weight=2.0
    )


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        ("exit", "ended its process with exit status 3"),
        ("segfault", "ended its process with SIGSEGV"),
        ("raise", "raised ValueError: not this one"),
        ("nan", "gave nan"),
        ("text", "gave a str, not a number"),
    ],
)
def test_a_fault_is_one_failed_sample_and_one_line_in_the_log(
    pool: RewardPool, log: Path, fault: str, reason: str
) -> None:
    _check_one_failure(pool, log, fault, reason)


def test_a_function_that_hangs_is_one_failed_sample(reward_file: Path, tmp_path: Path) -> None:
    with RewardPool([_spec(reward_file, 2.5)], workers=2, log=tmp_path / "log") as pool:
        _check_one_failure(pool, tmp_path / "log", "hang", "took over 2.5 s")


def _check_one_failure(pool: RewardPool, log: Path, fault: str, reason: str) -> None:
    before = len(log.read_text().splitlines())
    scores = pool.score(_samples("a", "bb", fault, "cccc", "a"))
    assert [score.total for score in scores] == [2.0, 4.0, -2.0, 8.0, 2.0]
    assert scores[2].parts["score"] != scores[2].parts["score"]
    assert [score.notes for score in scores] == [{}, {}, {"score": reason}, {}, {}]
    [line] = log.read_text().splitlines()[before:]
    assert line.endswith(f"score: sample 2: {reason}")


def test_seconds_for_which_the_machine_stood_still_are_not_counted(
    reward_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    passed = [0.0]

    def stops_once(wait: Callable[..., Any]) -> Callable[..., Any]:
        stops = iter([1000.0])

        def stopped(*given: Any) -> Any:
            if not (seconds := next(stops, 0.0)):
                return wait(*given)
            passed[0] += seconds
            return []

        return stopped

    clock = SimpleNamespace(monotonic=lambda: time.monotonic() + passed[0])
    monkeypatch.setattr("fornax.rewards.pool.time", clock)
    monkeypatch.setattr("fornax.rewards.slots.time", clock)
    monkeypatch.setattr("fornax.rewards.pool.wait", stops_once(connection.wait))
    monkeypatch.setattr(connection.Connection, "poll", stops_once(connection.Connection.poll))
    spec = RewardSpec(function=f"{reward_file}:later", timeout_seconds=100.0)
    with RewardPool([spec], workers=1, log=tmp_path / "log") as pool:
        [score] = pool.score(_samples("abc"))
    assert (score.total, score.notes) == (3.0, {})


def test_none_means_the_reward_does_not_apply(pool: RewardPool) -> None:
    [score] = pool.score(_samples("none"))
    assert (score.total, score.notes) == (0.0, {})
    assert score.parts["score"] != score.parts["score"]


def test_cheap_rewards_share_messages_to_their_workers(pool: RewardPool) -> None:
    """Alone, each costs this process six times as much of the processor's time."""
    samples = _samples(*("x" * (n % 7) for n in range(1000)))
    pool.score(samples[:8])
    together = []
    for _ in range(3):
        began = time.process_time()
        scores = pool.score(samples)
        together.append(time.process_time() - began)
        assert [score.total for score in scores] == [2.0 * (n % 7) for n in range(1000)]
    began = time.process_time()
    for sample in samples:
        pool.score([sample])
    assert min(together) < 0.5 * (time.process_time() - began)


def test_nothing_to_score_is_no_scores(pool: RewardPool) -> None:
    assert pool.score([]) == []


def test_several_functions_of_every_form_add_up_with_their_weights(reward_file: Path) -> None:
    specs = [
        RewardSpec(function=f"{reward_file}:batch", weight=3.0),
        RewardSpec(function=f"{reward_file}:later", weight=0.5, timeout_seconds=120.0),
        RewardSpec(function=f"{reward_file}:later_batch", name="again"),
        RewardSpec(function=f"{reward_file}:modules"),
        RewardSpec(function=f"{reward_file}:drawn", weight=0.0),
    ]
    with RewardPool(specs, workers=1) as pool:
        began = time.monotonic()
        scores = pool.score(_samples("yes", "no", *["no"] * 500, answer="yes"))
        assert time.monotonic() - began < 100, "async calls wait for one another"
        again = pool.score(_samples("no", "yes", answer="yes"))
    parts = {"batch": 1.0, "later": 3.0, "again": 3.0, "modules": 0.0}
    drawn = scores[0].parts["drawn"]
    assert scores[0] == Score(3.0 + 1.5 + 3.0, {**parts, "drawn": drawn})
    assert scores[1].total == 1.0 + 2.0
    assert [s.parts["drawn"] for s in again] == [scores[1].parts["drawn"], drawn]


@pytest.mark.slow
def test_only_the_culprit_of_a_batch_fails(reward_file: Path, tmp_path: Path) -> None:
    specs = [
        RewardSpec(function=f"{reward_file}:batch", weight=1.0),
        RewardSpec(function=f"{reward_file}:later", weight=1.0, timeout_seconds=2.5),
    ]
    with RewardPool(specs, workers=2, log=tmp_path / "log") as pool:
        scores = pool.score(_samples("yes", "exit", "no", "short", "hang", answer="yes"))
        blocked = pool.score(_samples("block", "a", answer="a"))
    assert [set(score.notes) for score in scores] == [set(), {"batch"}, set(), set(), {"later"}]
    assert scores[3].parts["batch"] == 1.0, "alone, a list of one score is right"
    assert "ended its process" in scores[1].notes["batch"]
    assert scores[4].notes["later"] == "took over 2.5 s"
    assert [set(score.notes) for score in blocked] == [{"later"}, set()]


def test_a_chat_gives_batched_functions_messages(reward_file: Path) -> None:
    chat = [{"role": "user", "content": "q"}]
    with RewardPool([RewardSpec(function=f"{reward_file}:chats")], workers=1) as pool:
        assert [s.total for s in pool.score([Sample(chat, "abc"), Sample(chat, "d")])] == [4.0, 2.0]


def test_state_is_kept_through_a_crash_and_a_new_pool(stateful_file: Path, tmp_path: Path) -> None:
    specs = [RewardSpec(function=f"{stateful_file}:novel")]
    with RewardPool(specs, workers=2, log=tmp_path / "log") as pool:
        assert pool.state() == {"novel": []}
        assert [s.total for s in pool.score(_samples("a", "b", "a"))] == [1.0, 1.0, 0.0]
        assert [s.total for s in pool.score(_samples("exit", "a", "c"))] == [0.0, 0.0, 1.0]
        state = pool.state()
    assert state == {"novel": ["a", "b", "a", "a", "c"]}
    with RewardPool(specs, workers=1, log=tmp_path / "log") as pool:
        pool.restore(state)
        assert [s.total for s in pool.score(_samples("c", "d"))] == [0.0, 1.0]
        with pytest.raises(ConfigError, match="other, which is not here"):
            pool.restore({"other": 1})


def test_a_line_without_a_needed_column_is_told_before_and_scored_as_failure(
    reward_file: Path, tmp_path: Path
) -> None:
    spec = RewardSpec(function=f"{reward_file}:needs")
    with RewardPool([spec], workers=1, log=tmp_path / "log") as pool:
        pool.check({"answer": "x"})
        with pytest.raises(DataError, match=r"data.jsonl:3: .*needs the column answer.*has label"):
            pool.check({"label": "x"}, "data.jsonl:3")
        [score] = pool.score(_samples("x", label="x"))
    assert "needs the column answer" in score.notes["needs"]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("my_reward.py:score", r"no file .*did you mean my_rewards.py\?"),
        ("my_rewards.py:scores", r"no function scores; did you mean score\? It has score, batch"),
        ("my_rewards.py:not_a_function", "is a int, not a function; use score"),
        ("my_rewards.py:wrong", r"wrong\(text, answer\) takes no argument named completion"),
        ("my_rewards.py:positional", "takes completion by position only"),
        ("broken.py:score", r"broken.py raises SyntaxError.*broken.py, line 2"),
        ("raising.py:score", r"raises ModuleNotFoundError at .*raising.py:1"),
    ],
)
def test_a_reward_file_is_checked_at_the_start(reward_file: Path, name: str, message: str) -> None:
    (reward_file.parent / "broken.py").write_text("x = 1\ndef score(\n")
    (reward_file.parent / "raising.py").write_text("import no_such_module_here\n")
    with pytest.raises(ConfigError, match=message):
        RewardPool([RewardSpec(function=str(reward_file.parent / name))], workers=1)


@pytest.mark.parametrize(
    ("specs", "message"),
    [
        ([], "there is no reward"),
        ([RewardSpec(function="maths")], "did you mean math"),
        ([RewardSpec(function="regex"), RewardSpec(function="regex")], "two rewards have one name"),
        ([RewardSpec(function="regex", options={"patern": "x"})], "pattern"),
        ([RewardSpec(function="regex", options={"pattern": "("})], "not a regular expression"),
    ],
)
def test_rewards_that_make_no_sense_are_refused(specs: list[RewardSpec], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        RewardPool(specs, workers=1)


def test_numbers_that_make_no_sense_are_refused() -> None:
    with pytest.raises(ConfigError, match="weight=nan"):
        RewardSpec(function="math", weight=float("nan"))
    with pytest.raises(ConfigError, match="timeout_seconds=0"):
        RewardSpec(function="math", timeout_seconds=0.0)
    with pytest.raises(ConfigError, match="names no function"):
        RewardSpec(function="")


def test_workers_end_when_their_parent_is_killed_even_inside_a_call(
    reward_file: Path, tmp_path: Path
) -> None:
    program = f"""
    import threading, time
    from fornax.rewards import RewardPool, RewardSpec, Sample
    pool = RewardPool([RewardSpec(function="{reward_file}:score")], workers=1)
    print(pool._slots.workers[0].pid, flush=True)
    pool.score([Sample("p", "hang")])
    """
    parent = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(program)],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "TMPDIR": str(tmp_path)},
    )
    assert parent.stdout is not None
    worker = int(parent.stdout.readline())
    time.sleep(0.3)
    os.kill(worker, 0)
    parent.kill()
    parent.wait()
    parent.stdout.close()
    deadline = time.monotonic() + 120
    while Path(f"/proc/{worker}").exists() and "Z" not in _state(worker):
        assert time.monotonic() < deadline, "the worker outlived its parent"
        time.sleep(0.02)


def _state(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().split()[2]
    except FileNotFoundError:
        return "Z"
