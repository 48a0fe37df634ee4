"""Answers in pieces over a stream, read by Triton's client: the words of `talk`."""

import queue
import time

import numpy as np
import pytest
import tritonclient.grpc as triton


@pytest.fixture(scope="module")
def client(served):
    with triton.InferenceServerClient(served.address) as client:
        yield client


@pytest.fixture
def stream(client):
    """A stream's answers: id, text, whether it is the last, and the error if there is one."""
    answers = queue.Queue()

    def took(result, error):
        if result is None:
            answers.put(("", "", None, error))
            return
        response = result.get_response()
        text = result.as_numpy("text_output")
        last = response.parameters["triton_final_response"].bool_param
        answers.put((response.id, None if text is None else text[0].decode(), last, error))

    client.start_stream(took)
    yield answers
    client.stop_stream()


def _tensor(name, value, datatype):
    tensor = triton.InferInput(name, [1], datatype)
    dtype = np.bool_ if datatype == "BOOL" else np.object_
    tensor.set_data_from_numpy(np.array([value], dtype))
    return tensor


def _ask(client, text, name, *, stream=True, **options):
    inputs = [_tensor("text_input", text.encode(), "BYTES"), _tensor("stream", stream, "BOOL")]
    client.async_stream_infer("talk", inputs, request_id=name, **options)


def _take(stream, count):
    return [stream.get(timeout=120) for _ in range(count)]


def test_pieces_have_the_requests_id_and_the_last_says_so(client, stream):
    _ask(client, "a b c", "1", enable_empty_final_response=True)
    found = _take(stream, 4)
    assert found == [(("1"), word, word == "", None) for word in ("a", "b", "c", "")]
    _ask(client, "a b c", "2", stream=False)
    assert _take(stream, 1) == [("2", "a b c", True, None)]


def test_pieces_of_several_requests_do_not_wait_for_one_another(client, stream, served):
    _ask(client, "a wait", "first")
    assert _take(stream, 1) == [("first", "a", False, None)]
    _ask(client, "b", "second")
    assert _take(stream, 2) == [("second", "b", False, None), ("second", "", True, None)]
    x = np.zeros((1, 4), np.float32)
    tensor = triton.InferInput("x", [1, 4], "FP32")
    tensor.set_data_from_numpy(x)
    client.async_stream_infer("echo", [tensor], request_id="third")
    name, _, last, _ = stream.get(timeout=120)
    assert (name, last) == ("third", True)
    _leave(client, served)


def test_an_error_after_pieces_ends_its_request_alone(client, stream):
    _ask(client, "a fail", "1")
    assert _take(stream, 1) == [("1", "a", False, None)]
    assert "the engine ended" in stream.get(timeout=120)[3].message()
    _ask(client, "b", "2")
    assert _take(stream, 2) == [("2", "b", False, None), ("2", "", True, None)]


def test_a_request_in_pieces_has_its_time(client, stream, served):
    before = served.host.talk.given_up
    _ask(client, "wait", "1", timeout=50_000)
    assert "time" in stream.get(timeout=120)[3].message()
    _until(lambda: served.host.talk.given_up == before + 1 and served.server.running == 0)


def test_a_client_that_leaves_ends_what_is_being_said(client, stream, served):
    before = served.host.talk.given_up
    for name in range(3):
        _ask(client, "a wait", str(name))
    assert {text for _, text, _, _ in _take(stream, 3)} == {"a"}
    _leave(client, served)
    assert served.host.talk.given_up == before + 3


def _leave(client, served):
    client.stop_stream(cancel_requests=True)
    _until(lambda: served.server.running == 0)


def _until(condition):
    end = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.005)
