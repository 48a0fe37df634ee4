"""Records read by other processes: the same batches and positions bit for bit, whatever dies."""

import contextlib
import itertools
import json
import os
import signal
import socket
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.ports import held_port

from fornax.config.credentials import Credentials
from fornax.config.errors import ConfigError, DataError
from fornax.config.frames import Frame, Kind, LinkError, receive, send
from fornax.config.worker_process import WorkerProcess
from fornax.data import DataConfig, Jsonl, Mixture, Part, Prefetch, Python, Tokenize, open_batches
from fornax.data.batches import Batches
from fornax.data.remote import DataWorkers, pack_tokens, unpack_tokens
from fornax.data.worker import DataServer

RUN = Credentials.make(tls=True)
BATCHES = 12
RECORDS = 400


def noisy(record: dict[str, Any], rng: np.random.Generator, log: str) -> dict[str, Any] | None:
    """Change a record at random, drop some, and say which process did it."""
    with Path(log).open("a") as file:
        file.write(f"{os.getpid()}\n")
    if rng.random() < 0.2:
        return None
    words = record["text"].split()
    return {**record, "text": " ".join(rng.permutation(words))}


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> DataConfig:
    """A mixture of two files whose records are shuffled inside, thinned out and tokenized."""
    folder = tmp_path_factory.mktemp("data")
    from fornax.data import train_bpe

    rng = np.random.default_rng(0)
    for name in ("one", "two"):
        lines = [
            {"text": " ".join(f"{name}{n}" for n in rng.integers(0, 50, rng.integers(3, 60)))}
            for _ in range(RECORDS)
        ]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(x) + "\n" for x in lines))
    text = (folder / "one.jsonl").read_text() + (folder / "two.jsonl").read_text()
    train_bpe([text], 320).save(folder / "tokenizer")
    return DataConfig(
        source=Mixture(
            parts=tuple(
                Part(name=name, weight=weight, source=Jsonl(path=str(folder / f"{name}.jsonl")))
                for name, weight in (("one", 2.0), ("two", 1.0))
            )
        ),
        transforms=(
            Python(
                target="tests.integration.data.test_workers:noisy",
                arguments={"log": str(folder / "pids")},
            ),
            Tokenize(tokenizer=folder / "tokenizer"),
        ),
        virtual_shards=4,
        seed=3,
    )


class Workers:
    """Data workers in processes of their own, on sockets of this one."""

    def __init__(self, folder: Path) -> None:
        self._log = (folder / "workers.log").open("ab")
        self._listeners: list[socket.socket] = []
        self.processes: list[WorkerProcess] = []

    def start(self, count: int) -> DataWorkers:
        for _ in range(count):
            self._listeners.append(socket.create_server(("127.0.0.1", 0)))
            self.processes.append(self._process(len(self.processes)))
        ports = [listener.getsockname()[1] for listener in self._listeners]
        return DataWorkers(tuple(f"127.0.0.1:{port}" for port in ports), RUN)

    def again(self, number: int) -> None:
        """Start one again at its address."""
        self.processes[number] = self._process(number)

    def _process(self, number: int) -> WorkerProcess:
        listener = self._listeners[number].fileno()
        process = WorkerProcess("fornax.data.worker:run", log=self._log, inherit=[listener])
        process.send({"listener": listener, "credentials": RUN.fields()})
        assert process.receive(300) == "ready"
        return process

    def close(self) -> None:
        for process in self.processes:
            process.kill()
        for listener in self._listeners:
            listener.close()
        self._log.close()


@pytest.fixture
def workers(tmp_path: Path) -> Iterator[Workers]:
    made = Workers(tmp_path)
    yield made
    made.close()


def opened(config: DataConfig, workers: DataWorkers | None, **changes: Any) -> Batches:
    given = {"batch_size": 8, "seq_len": 64, "workers": workers, **changes}
    return open_batches(config, **given)


Seen = list[tuple[dict[str, np.ndarray], dict[int, dict]]]


def take(batches: Batches, count: int) -> Seen:
    return [(next(batches), batches.state()) for _ in range(count)]


@pytest.fixture(scope="module")
def local(config: DataConfig) -> Seen:
    with opened(config, None) as batches:
        return take(batches, BATCHES)


def assert_same(found: Seen, expected: Seen) -> None:
    assert len(found) == len(expected)
    for (batch, state), (other, position) in zip(found, expected, strict=True):
        assert state == position
        assert batch.keys() == other.keys()
        for name in batch:
            assert batch[name].dtype == other[name].dtype
            np.testing.assert_array_equal(batch[name], other[name])


def pids(config: DataConfig) -> set[int]:
    """The processes that transformed records since this was asked last."""
    transform = config.transforms[0]
    assert isinstance(transform, Python)
    log = Path(str(transform.arguments["log"]))
    found = {int(line) for line in log.read_text().split()}
    log.write_text("")
    return found


@pytest.mark.slow
def test_batches_and_positions_are_those_of_one_process_also_with_another_number_of_workers(
    config: DataConfig, local: Seen, workers: Workers, monkeypatch: pytest.MonkeyPatch
):
    for name in ("_PATIENCE_SECONDS", "_ALONE_SECONDS"):  # it reads nothing itself, however late
        monkeypatch.setattr(f"fornax.data.remote.{name}", 300.0)
    given = workers.start(1)
    pids(config)
    with opened(config, given) as batches:
        found = take(batches, 5)
    assert pids(config) == {workers.processes[0].pid}
    more = workers.start(2)
    with opened(config, more) as batches:
        batches.restore(found[-1][1])
        assert_same(found + take(batches, BATCHES - 5), local)
        assert {process.pid for process in workers.processes} & pids(config)
    with opened(config, more, process_index=1, process_count=2) as batches:
        half = [next(batches) for _ in range(3)]
    for batch, (whole, _) in zip(half, local, strict=False):
        np.testing.assert_array_equal(batch["tokens"], whole["tokens"][4:])


@pytest.mark.slow
@pytest.mark.fault
def test_a_worker_that_dies_or_is_held_costs_no_record(
    config: DataConfig, local: Seen, workers: Workers, monkeypatch: pytest.MonkeyPatch
):
    """A killed one's spans go to the other, a held one's come from here; a new one takes part."""
    monkeypatch.setattr("fornax.data.remote._PATIENCE_SECONDS", 1.0)
    given = workers.start(2)
    with opened(config, given) as batches:
        found = take(batches, 2)
        workers.processes[0].kill()
        found += take(batches, 3)
        workers.again(0)
        os.kill(workers.processes[1].pid, signal.SIGSTOP)
        found += take(batches, BATCHES - 5)
    assert_same(found, local)


@pytest.mark.slow
def test_without_any_worker_this_process_reads(config: DataConfig, local: Seen):
    pids(config)
    with opened(config, DataWorkers((f"127.0.0.1:{held_port()}",), RUN)) as batches:
        assert_same(take(batches, 3), local[:3])
    assert pids(config) == {os.getpid()}


@pytest.fixture
def server() -> Iterator[DataServer]:
    made = DataServer(socket.create_server(("127.0.0.1", 0)), RUN)
    threading.Thread(target=made.run, daemon=True).start()
    yield made
    made.close()


def server_address(server: DataServer) -> str:
    return f"127.0.0.1:{server._listener.getsockname()[1]}"


def test_a_stranger_gets_nothing(config: DataConfig, server: DataServer):
    """The server may have closed before it writes."""
    host, _, port = server_address(server).rpartition(":")
    with socket.create_connection((host, int(port)), 60) as stranger:
        with contextlib.suppress(LinkError):
            send(stranger, Frame(kind=Kind.JOIN, facts={"token": RUN.token}))  # in the clear
        with pytest.raises(LinkError):
            receive(stranger)
    guess = replace(RUN, token="a guess")
    with guess.dial(socket.create_connection((host, int(port)), 60)) as stranger:
        with contextlib.suppress(LinkError):
            send(stranger, Frame(kind=Kind.JOIN, facts={"token": guess.token}))
        with pytest.raises(LinkError):
            receive(stranger)
    with socket.create_connection((host, int(port)), 60) as stranger:
        stranger.sendall(b"GET / HTTP/1.1\r\n\r\n" + b"x" * 100)
        with pytest.raises(LinkError):
            receive(stranger)


@pytest.mark.slow
@pytest.mark.parametrize("serves", [RUN, Credentials.make()])
def test_another_runs_worker_is_refused_and_gets_no_token(config: DataConfig, serves: Credentials):
    """Its certificate is another, or it has none."""
    made = DataServer(socket.create_server(("127.0.0.1", 0)), serves)
    threading.Thread(target=made.run, daemon=True).start()
    other = Credentials.make(tls=True)
    with (
        contextlib.closing(made),
        opened(config, DataWorkers((server_address(made),), other)) as batches,
    ):
        if serves.key:
            with pytest.raises(DataError, match=r"this run's certificate, .*same fornax launch"):
                take(batches, BATCHES)
        else:  # it speaks no TLS: nobody's worker, as one that is not there
            take(batches, 1)
            assert pids(config) == {os.getpid()}


def test_a_worker_with_other_data_is_refused(config: DataConfig, server: DataServer):
    assert isinstance(config.source, Mixture)
    file = Path(str(config.source.parts[0].source.path))  # pyrefly: ignore[missing-attribute]
    batches = opened(config, DataWorkers((server_address(server),), RUN))
    text = file.read_text()
    try:
        file.write_text(text + json.dumps({"text": "one more"}) + "\n")
        with pytest.raises(DataError, match="reads other data than this process"):
            take(batches, BATCHES)
    finally:
        file.write_text(text)
        batches.close()


def broken(record: dict[str, Any]) -> dict[str, Any]:
    """Fails at some record."""
    if "one7 " in record["text"]:
        raise ValueError("a record that nobody likes")
    return record


def test_an_error_names_the_record_as_it_does_here(config: DataConfig, server: DataServer):
    bad = Python(target="tests.integration.data.test_workers:broken")
    failing = replace(config, transforms=(bad, config.transforms[1]))
    said = []
    for given in (None, DataWorkers((server_address(server),), RUN)):
        with opened(failing, given) as batches, pytest.raises(DataError) as error:
            take(batches, BATCHES)
        said.append(str(error.value))
    assert "a record that nobody likes" in said[0]
    assert said[1] == said[0]


@pytest.mark.parametrize("change", [{"prefetch": Prefetch(workers=2)}, {"debug": True}])
def test_two_places_to_read_are_refused(config: DataConfig, change: dict[str, Any]):
    with pytest.raises(ConfigError, match="leave one of them out"):
        opened(replace(config, **change), DataWorkers(("127.0.0.1:1",), RUN))


def test_no_more_is_asked_for_than_the_window(config: DataConfig, server: DataServer):
    """A trainer that takes nothing stops the workers: the buffer and the spans ahead are all."""
    asked = 0

    def count(phase: str, records: int) -> None:
        nonlocal asked
        asked = records

    server._change = count
    small = DataConfig(**{**vars(config), "prefetch": Prefetch(buffer=1), "read_batch": 8})
    with opened(small, DataWorkers((server_address(server),), RUN)) as batches:
        next(batches)
        settled = threading.Event()
        before = -1
        while before != asked:
            before = asked
            settled.wait(1.0)
        # Rows of three batches at most, and two spans ahead of each of four shards.
        assert asked <= 3 * 8 * 8 + 4 * 2 * 8


def test_tokens_survive_the_way_and_lies_do_not():
    tokens = [np.arange(5, dtype=np.uint16), None, np.zeros(0, np.int64), np.array([7], np.uint32)]
    arrays, body = pack_tokens(tokens)
    back = unpack_tokens(json.loads(json.dumps(arrays)), body)
    for one, other in itertools.zip_longest(tokens, back):
        if one is None or other is None:
            assert one is other
        else:
            assert one.dtype == other.dtype
            np.testing.assert_array_equal(one, other)
    for lie in ([["<u2", 6]], [["<u2", 2]], [["|O", 1]], [["<f4", 1]]):
        with pytest.raises((ValueError, TypeError)):
            unpack_tokens(lie, b"\0" * 10)
