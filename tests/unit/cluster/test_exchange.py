"""Where slices meet: real connections; who takes part, is left out, comes back."""

import contextlib
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest

from fornax.cluster.exchange import Exchange
from fornax.config import ClusterError
from fornax.config.frames import Frame, Kind, LinkError, receive, send
from fornax.train.diloco.link import Link, SlicePlace

SECONDS = 300


class Slices:
    """An exchange, and links to it, each used by a thread of its own."""

    def __init__(self, count: int, timeout: float = 60.0, join_timeout: float = 60.0) -> None:
        self.said: list[str] = []
        self.heard = threading.Condition()
        self.exchange = Exchange(slices=count, token="secret", announce=self._hear)
        self.exchange.start()
        self.count, self.timeouts = count, {"timeout": timeout, "join_timeout": join_timeout}
        self.pool = ThreadPoolExecutor(16)
        self.links: list[Link] = []

    def _hear(self, text: str, **_: Any) -> None:
        with self.heard:
            self.said.append(text)
            self.heard.notify_all()

    def wait_said(self, part: str) -> None:
        """Until the exchange has announced something."""
        with self.heard:
            assert self.heard.wait_for(lambda: any(part in text for text in self.said), SECONDS)

    def link(self, index: int, rank: int = 0, ranks: int = 1, token: str = "secret") -> Link:
        place = SlicePlace(
            index=index, count=self.count, address=self.exchange.address, token=token
        )
        self.links.append(Link(place, rank=rank, ranks=ranks, **self.timeouts))
        return self.links[-1]

    def do(self, call: Callable[..., Any], *words: Any) -> Future[Any]:
        return self.pool.submit(call, *words)

    def join(self, link: Link, steps: list[int], **same: str) -> Future[Any]:
        return self.do(link.join, steps, same)

    def training(self, *links: Link) -> None:
        """Have them begin together."""
        joins = [self.join(link, [0]) for link in links]
        assert [each.result(SECONDS) for each in joins] == [0] * len(links)
        ready = [self.do(link.ready, "same") for link in links]
        assert {each.result(SECONDS).kind for each in ready} == {Kind.GO}

    def close(self) -> None:
        for link in self.links:
            link.close()
        self.exchange.close()
        self.pool.shutdown()


@pytest.fixture
def slices() -> Iterator[Callable[..., Slices]]:
    made: list[Slices] = []

    def make(*args: Any, **kwargs: Any) -> Slices:
        made.append(Slices(*args, **kwargs))
        return made[-1]

    yield make
    for each in made:
        each.close()


def test_all_begin_at_the_newest_checkpoint_that_all_have(slices: Any):
    group = slices(3)
    links = [group.link(n) for n in range(3)]
    joins = [group.join(links[0], [0, 5, 10]), group.join(links[1], [0, 5, 10, 15])]
    assert not joins[0].done()
    joins.append(group.join(links[2], [0, 5, 12]))
    assert [each.result(SECONDS) for each in joins] == [5, 5, 5]


def test_a_round_gives_everybodys_bytes_to_all_ranks_of_all(slices: Any):
    group = slices(2)
    links = {(s, r): group.link(s, r, 2) for s in range(2) for r in range(2)}
    group.training(*links.values())
    for number in (7, 8):
        rounds = {
            key: group.do(link.exchange, number, f"slice {key[0]} rank {key[1]}".encode())
            for key, link in links.items()
        }
        for (_, rank), each in rounds.items():
            result = each.result(SECONDS)
            assert result.facts == {"members": [0, 1], "donor": None, "stop": False}
            assert bytes(result.body) == f"slice 0 rank {rank}slice 1 rank {rank}".encode()


def test_one_that_is_lost_stops_nobody_and_catches_up(slices: Any):
    group = slices(3)
    links = [group.link(n) for n in range(3)]
    group.training(*links)
    rounds = [group.do(links[n].exchange, 1, b"%d" % n) for n in (0, 1)]
    links[2].close()
    assert [each.result(SECONDS).facts["members"] for each in rounds] == [[0, 1]] * 2
    back = group.link(2)
    assert group.join(back, [0]).result(SECONDS) is None
    taken = group.do(back.ready, "older")
    group.wait_said("slice 2 is back, and waits for the next exchange")
    rounds = [group.do(links[n].exchange, 2, b"%d" % n) for n in (0, 1)]
    assert [each.result(SECONDS).facts["donor"] for each in rounds] == [0, 0]
    rounds = [group.do(links[1].exchange, 99, b"1")]
    links[0].send(Kind.STATE, facts={"step": 42}, body=b"all of it")
    rounds.append(group.do(links[0].exchange, 99, b"0"))
    state = taken.result(SECONDS)
    assert (state.kind, state.facts, bytes(state.body)) == (Kind.STATE, {"step": 42}, b"all of it")
    assert not rounds[1].done()  # the round waits for the one that is back
    rounds.append(group.do(back.exchange, 99, b"2"))
    assert [bytes(each.result(SECONDS).body) for each in rounds] == [b"012"] * 3
    assert any("slice 2 is gone; 0, 1 continues" in text for text in group.said)
    assert any("slice 2 resumes at step 42" in text for text in group.said)


def test_one_of_whose_ranks_one_is_lost_takes_no_part(slices: Any):
    group = slices(2)
    whole = [group.link(0, rank, 2) for rank in range(2)]
    half = [group.link(1, rank, 2) for rank in range(2)]
    group.training(*whole, *half)
    rest = group.do(half[0].exchange, 1, b"half a change")
    rounds = [group.do(link.exchange, 1, b"0") for link in whole]
    half[1].close()
    assert [each.result(SECONDS).facts["members"] for each in rounds] == [[0], [0]]
    with pytest.raises(LinkError):
        rest.result(SECONDS)


def test_one_that_does_not_come_is_left_out_after_the_timeout(slices: Any):
    group = slices(2, timeout=0.5)
    links = [group.link(n) for n in range(2)]
    group.training(*links)
    assert group.do(links[0].exchange, 1, b"0").result(SECONDS).facts["members"] == [0]
    with pytest.raises(LinkError):
        links[1].exchange(1, b"1")
    assert any("slice 1 did not exchange within 0.5 s; 0 continues" in text for text in group.said)


@pytest.mark.slow
def test_those_that_are_there_begin_without_the_others_after_a_while(slices: Any):
    group = slices(3, join_timeout=5.0)  # a busy machine takes a while for two
    links = [group.link(n) for n in (0, 2)]
    group.training(*links)
    rounds = [group.do(link.exchange, 1, b"x") for link in links]
    assert [each.result(SECONDS).facts["members"] for each in rounds] == [[0, 2]] * 2


def test_when_all_that_train_are_gone_those_that_wait_begin_anew(slices: Any):
    group = slices(2)
    links = [group.link(n) for n in range(2)]
    group.training(*links)
    links[1].close()
    back = group.link(1)
    assert group.join(back, [0, 5]).result(SECONDS) is None
    waiting = group.do(back.ready, "mine")
    links[0].close()
    with pytest.raises(LinkError):
        waiting.result(SECONDS)
    joins = [group.join(back, [0, 5]), group.join(group.link(0), [0, 5, 10])]
    assert [each.result(SECONDS) for each in joins] == [5, 5]


def test_the_last_one_goes_on_when_the_others_have_finished(slices: Any):
    group = slices(2)
    links = [group.link(n) for n in range(2)]
    group.training(*links)
    links[1].close()
    links[0].send(Kind.BYE, facts={"done": True})
    back = group.link(1)
    assert group.join(back, [0, 5]).result(SECONDS) in (5, None)


def test_a_stop_is_part_of_a_round(slices: Any):
    group = slices(2)
    links = [group.link(n) for n in range(2)]
    group.training(*links)
    group.exchange.stop_slices()
    rounds = [group.do(link.exchange, 1, b"x") for link in links]
    assert [each.result(SECONDS).facts["stop"] for each in rounds] == [True, True]


def test_another_config_is_refused(slices: Any):
    group = slices(2, join_timeout=0.1)
    group.training(group.link(0))
    with pytest.raises(ClusterError, match=r"slice 1 differs from .*: code is b and missing$"):
        group.join(group.link(1), [0], code="b").result(SECONDS)


def test_other_parameters_are_refused(slices: Any):
    group = slices(2)
    links = [group.link(n) for n in range(2)]
    joins = [group.join(link, [0]) for link in links]
    assert [each.result(SECONDS) for each in joins] == [0, 0]
    ready = [group.do(link.ready, digest) for link, digest in zip(links, "ab", strict=True)]
    with pytest.raises(ClusterError, match="slice 1 begins with other parameters than slice 0"):
        ready[1].result(SECONDS)
    assert ready[0].result(SECONDS).kind is Kind.GO


def test_strangers_are_not_heard(slices: Any):
    group = slices(1)
    with pytest.raises(LinkError):
        group.link(0, token="guess").join([0], {})
    host, _, port = group.exchange.address.rpartition(":")
    for noise in (
        b"GET / HTTP/1.1\r\n\r\n" + bytes(64),
        struct.pack("!4sBxHHxxQIQI", b"FXO1", *[9] * 7),
    ):
        with socket.create_connection((host, int(port))) as stranger:
            stranger.settimeout(SECONDS)
            stranger.sendall(noise)
            with contextlib.suppress(ConnectionResetError):
                assert stranger.recv(1) == b""
    group.training(group.link(0))


def test_a_frame_that_lacks_something_ends_its_own_connection_only(slices: Any):
    group = slices(2, join_timeout=0.1)
    group.training(group.link(0))
    host, _, port = group.exchange.address.rpartition(":")
    with socket.create_connection((host, int(port))) as stranger:
        stranger.settimeout(SECONDS)
        send(stranger, Frame(kind=Kind.JOIN, slice=1, facts={"token": "secret"}))
        assert stranger.recv(1) == b""
    assert group.do(group.links[0].exchange, 1, b"0").result(SECONDS).facts["members"] == [0]


def test_a_damaged_frame_is_noticed():
    ours, theirs = socket.socketpair()
    with ours, theirs:
        send(ours, Frame(kind=Kind.STATE, slice=3, rank=2, round=9, facts={"a": 1}, body=b"xyz"))
        found = receive(theirs)
        assert (found.kind, found.slice, found.rank, found.round) == (Kind.STATE, 3, 2, 9)
        assert (found.facts, bytes(found.body)) == ({"a": 1}, b"xyz")
        send(ours, Frame(kind=Kind.STATE, body=b"xyz"))
        whole = bytearray(theirs.recv(4096))
        for at in range(len(whole)):
            damaged = bytearray(whole)
            damaged[at] ^= 1
            left, right = socket.socketpair()
            with left, right:
                left.sendall(damaged)
                left.shutdown(socket.SHUT_WR)
                with pytest.raises(LinkError):
                    receive(right)
