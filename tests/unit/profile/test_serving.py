"""What servers say in a capture: the way of requests, and how full batches were."""

import pytest
from tests.unit.profile.spaces import MS, Event, space, write

from fornax import profile
from fornax.profile import Serving


def said(event: str, request: object, at: int, **facts: int) -> Event:
    return Event(f"request/{event}", at * MS, 1000, {"request": request, **facts})


def read(tmp_path, *events: Event) -> Serving:
    write(space({"/host:CPU": {"python": list(events)}}), tmp_path)
    return profile.read(tmp_path).serving


def test_a_request_goes_through_queue_prefill_and_decode(tmp_path):
    (one,) = read(
        tmp_path,
        said("queued", "chat-7", 1, tokens=40),
        said("started", "chat-7", 4),
        said("preempted", "chat-7", 5),
        said("started", "chat-7", 6),
        said("first token", "chat-7", 9),
        said("finished", "chat-7", 29, tokens=11),
    ).requests
    assert (one.id, one.ending, one.preempted) == ("chat-7", "finished", 1)
    assert (one.prompt_tokens, one.tokens) == (40, 11)
    assert {name: one.seconds(name) for name in one.phases} == {
        "queued": pytest.approx(3e-3),
        "prefill": pytest.approx(5e-3),
        "decode": pytest.approx(20e-3),
    }
    assert one.token_seconds == pytest.approx(2e-3)


def test_what_lies_outside_of_the_capture_is_not_made_up(tmp_path):
    found = read(
        tmp_path,
        said("first token", 1, 2),  # came before; numbers are ids too
        said("finished", 1, 8, tokens=5),
        said("queued", 2, 3, tokens=4),
        said("started", 2, 4),
        said("finished", 3, 5, tokens=9),
        said("queued", 4, 6, tokens=4),
        said("aborted", 4, 7),
    ).requests
    ways = {each.id: (each.ending, set(each.phases)) for each in found}
    assert ways == {
        "1": ("finished", {"decode"}),
        "2": ("open", {"queued"}),
        "3": ("finished", set()),
        "4": ("aborted", set()),
    }
    assert [each.id for each in found] == ["1", "2", "3", "4"]


def test_an_embedding_has_no_first_token(tmp_path):
    (one,) = read(
        tmp_path,
        said("queued", "e", 1, tokens=4),
        said("started", "e", 2),
        said("finished", "e", 6, tokens=0),
    ).requests
    assert {name: one.seconds(name) for name in one.phases} == {
        "queued": pytest.approx(1e-3),
        "prefill": pytest.approx(4e-3),
    }
    assert one.token_seconds is None


def test_an_id_that_comes_again_is_another_request(tmp_path):
    found = read(
        tmp_path,
        said("queued", "a", 1, tokens=4),
        said("finished", "a", 2, tokens=1),
        said("queued", "a", 3, tokens=5),
        said("queued", "a", 5, tokens=6),
    ).requests
    assert [(each.prompt_tokens, each.ending) for each in found] == [
        (4, "finished"),
        (5, "open"),
        (6, "open"),
    ]


def call(name: str, at: int, **facts: int) -> Event:
    return Event(f"engine/{name}", at * MS, MS, facts)


def test_a_batch_stands_beside_its_limits_and_its_step(tmp_path):
    limits = {"most_sequences": 8, "most_tokens": 256}
    steps = [Event("engine", at * MS, 9 * MS, {"step_num": at, "_r": 1}) for at in (10, 20)]
    found = read(
        tmp_path,
        *steps,
        call("forward", 11, sequences=2, tokens=60, bucket=64, steps=1, **limits),
        call("decode", 21, sequences=4, tokens=4, bucket=8, steps=3, **limits),
        call("decode", 41, sequences=1, tokens=1, bucket=8, steps=1),  # of an older server
    )
    assert [(each.kind, each.step, each.steps) for each in found.batches] == [
        ("forward", 10, 1),
        ("decode", 20, 3),
        ("decode", None, 1),
    ]
    first, _, last = found.batches
    assert (first.sequences, first.most_sequences) == (2, 8)
    assert (first.rows, first.most_rows, first.fill) == (60, 256, 60 / 64)
    assert (last.most_sequences, last.most_rows) == (None, None)


def batch(model: str, at: int, requests: str, waited: str, **facts: int) -> Event:
    return Event(f"batch/{model}", at * MS, 2 * MS, {"requests": requests, "waited_us": waited})


def test_a_model_servers_requests_come_from_its_batches(tmp_path):
    found = read(
        tmp_path,
        batch("m/predict", 10, "0 1", "4000 500"),
        batch("n/predict", 11, "0", "1000"),
        batch("m/predict", 14, "1", "4500"),  # again, alone: the batch before failed
        batch("m/predict", 30, "0", "100"),  # of a version that has just been loaded
    ).requests
    ways = [(each.model, each.id, each.queued, each.phases["batch"]) for each in found]
    assert ways == [
        ("m/predict", "0", 6 * MS, (10 * MS, 12 * MS)),
        ("m/predict", "1", 9_500_000, (10 * MS, 16 * MS)),
        ("n/predict", "0", 10 * MS, (11 * MS, 13 * MS)),
        ("m/predict", "0", 30 * MS - 100_000, (30 * MS, 32 * MS)),
    ]


def test_annotations_of_others_by_these_names_are_let_be(tmp_path):
    found = read(
        tmp_path,
        Event("request/", 1, 1, {"request": ""}),
        Event("request/queued", 1, 1),
        Event("batch/3", 2, 5, {"epoch": 3}),
        Event("batch/4", 2, 5, {"requests": "a b", "waited_us": "x y", "rows": "z"}),
        Event("engine/forward", 3, 5, {"tokens": "many", "bucket": "x"}),
    )
    assert found == Serving()
