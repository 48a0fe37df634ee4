"""A capture of the engine at work: numbered calls, their batches, what becomes of requests."""

import operator
from pathlib import Path
from typing import Any

import pytest
from tests.integration.llm.helpers import engine_of, prompts_of

from fornax import profile
from fornax.cli.main import main
from fornax.llm import SamplingParams

GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)


def test_calls_batches_and_requests_are_in_a_capture(tmp_path: Path) -> None:
    llm = engine_of("windowed")
    with profile.capture(tmp_path):
        llm.generate(prompts_of(3, 9), GREEDY)
    found = profile.read(tmp_path)
    numbers = [step.number for step in found.steps]
    assert {step.name for step in found.steps} == {"engine"}
    assert numbers == list(range(numbers[0], numbers[0] + len(numbers)))
    assert {
        "engine/schedule", "engine/wait", "engine/forward", "request/queued", "request/started",
        "request/first token", "request/finished",
    } <= set(found.names)  # fmt: skip
    batches, requests = found.serving.batches, found.serving.requests
    # Both prompts, and every later token but the last of each, which nothing follows.
    computed = sum(map(operator.mul, *zip(*((b.rows, b.steps) for b in batches), strict=True)))
    assert computed >= 3 + 9 + 2 * 5
    assert all(0 < each.rows <= each.places for each in batches)
    assert {(each.most_sequences, each.most_rows) for each in batches} == {(4, 8)}
    assert all(each.step in numbers for each in batches)
    assert sorted(each.prompt_tokens for each in requests) == [3, 9]
    for each in requests:
        assert (each.ending, each.tokens) == ("finished", 6)
        assert [*each.phases] == ["queued", "prefill", "decode"]
        assert each.queued <= each.started <= each.first_token <= each.ended


@pytest.mark.slow
def test_a_server_is_captured_by_a_command(
    serve: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: Any
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    server = serve(profile_dir=str(tmp_path / "there"), api_key=["secret"])
    words = ["--url", server.url, "--seconds", "0.3"]
    assert main(["profile", "serve", *words, "--out", str(tmp_path / "here")]) == 0
    said = capsys.readouterr().out
    assert f"the capture is in {tmp_path / 'here'}" in said
    assert profile.captures(tmp_path / "there") != []
    monkeypatch.setenv("OPENAI_API_KEY", "wrong")
    assert main(["profile", "serve", *words]) == 2
    assert "API key" in capsys.readouterr().err
    without = serve()
    assert main(["profile", "serve", "--url", without.url, "--seconds", "0.3"]) == 2
    assert "start it with --profile-dir" in capsys.readouterr().err
