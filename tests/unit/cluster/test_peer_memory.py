"""Snapshots in the memory of other hosts: real connections between agents' memories."""

import contextlib
import os
import socket
import time
import zlib
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import pytest

from fornax.cluster.kept_memory import memory_files
from fornax.cluster.peer_memory import PeerMemory
from fornax.config.addresses import own_address
from fornax.config.credentials import Credentials
from fornax.config.frames import Frame, Kind, LinkError, receive, send
from fornax.config.snapshot_file import FIRST, SnapshotFile

SECONDS = 300
PLAIN = Credentials(token="secret")


class Host:
    """An agent's memory, and what it told its controller."""

    all: ClassVar[list["Host"]] = []

    def __init__(self, rank: int, credentials: Credentials = PLAIN) -> None:
        self.files = memory_files("test")
        self.slots = [SnapshotFile(each) for each in self.files]
        self.said: list[dict[str, Any]] = []
        self.memory = PeerMemory(rank, self.files, credentials=credentials, report=self.said.append)
        self.all.append(self)

    def write(self, slot: int, step: int, body: bytes, peer: int | None) -> None:
        """As a worker does."""
        file = self.slots[slot]
        file.begin(FIRST + len(body))
        os.pwrite(file.descriptor, body, FIRST)
        file.finish(b'{"crc": %d}' % zlib.crc32(body), FIRST + len(body), step, peer)

    def held(self) -> dict[int, bytes]:
        """Step to parts of the whole snapshots in its own memory."""
        found = {}
        for file in self.slots:
            if (each := file.found()) is not None and file.header(each) is not None:
                found[each.step] = os.pread(file.descriptor, each.at - FIRST, FIRST)
        return found

    def is_replicated(self, slot: int) -> bool:
        file = self.slots[slot]
        found = file.found()
        return found is not None and file.is_replicated(found)

    def close(self) -> None:
        if self in self.all:
            self.all.remove(self)
        self.memory.close()


def until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)
        for each in Host.all:
            each.memory.look()  # as its agent does


@pytest.fixture
def hosts() -> Iterator[Callable[..., Host]]:
    made: list[Host] = []

    def make(*args: Any, **kwargs: Any) -> Host:
        made.append(Host(*args, **kwargs))
        return made[-1]

    yield make
    for each in made:
        each.close()
        for file in each.files:
            os.close(file)


def test_a_newcomer_gets_the_two_newest_from_the_peer_of_the_one_that_is_lost(hosts: Any):
    lost, peer = hosts(1), hosts(2)
    lost.memory.connect({2: peer.memory.address}, 3)
    bodies = {step: os.urandom(9_000_000 + step) for step in (3, 5, 8)}
    for number, (step, body) in enumerate(bodies.items()):
        lost.write(number % 2, step, body, peer=2)
        until(lambda slot=number % 2: lost.is_replicated(slot))
    assert {"kind": "holds", "ranks": [1]} in peer.said
    lost.close()
    new = hosts(1)
    new.memory.fetch([lost.memory.address, peer.memory.address])  # the first is there no more
    until(lambda: not new.memory.fetching)
    assert new.held() == {5: bodies[5], 8: bodies[8]}
    (fetched,) = (each for each in new.said if each["kind"] == "fetched")
    assert fetched["steps"] == [5, 8]


def test_one_that_is_cut_off_is_not_waited_for_once_another_has_its_place(hosts: Any):
    """It took the connection and says nothing, as a host that no packet reaches any more."""
    host, new = hosts(1), hosts(2)
    with socket.create_server(("127.0.0.1", 0)) as cut:
        host.memory.connect({2: f"127.0.0.1:{cut.getsockname()[1]}"}, 3)
        host.write(0, 3, b"state", peer=2)
        host.memory.look()
        connection, _ = cut.accept()
        with connection:
            until(lambda: receive(connection, longest=0).kind is Kind.OFFER)
            began = time.monotonic()
            host.memory.connect({2: new.memory.address}, 3)
            until(lambda: host.is_replicated(0))
            assert time.monotonic() - began < 50  # of the 60 s that a connection may be silent
    until(lambda: {"kind": "holds", "ranks": [1]} in new.said)


def test_those_that_stay_hold_what_the_leaving_have_until_they_have_snapshots_of_their_own(
    hosts: Any,
):
    stays, leave = hosts(0), {rank: hosts(rank) for rank in (2, 3, 4)}
    stays.write(0, 7, b"own", peer=None)
    for rank, host in leave.items():
        host.write(0, 7, b"of %d" % rank, peer=None)
    leave[4].close()
    stays.memory.fetch([], {rank: host.memory.address for rank, host in leave.items()})
    until(lambda: not stays.memory.fetching)

    def held() -> set[bytes]:
        files = [SnapshotFile(each) for each in stays.memory.replicas()]
        whole = [(file, found) for file in files if (found := file.found()) is not None]
        return {os.pread(file.descriptor, each.at - FIRST, FIRST) for file, each in whole}

    assert held() == {b"of 2", b"of 3"}
    assert [(x["of"], x["steps"]) for x in stays.said if x["kind"] == "fetched"] == [
        (2, [7]),
        (3, [7]),
    ]
    stays.write(1, 9, b"newer", peer=None)
    stays.memory.look()
    assert not stays.memory.replicas()


def test_the_agent_that_takes_a_lost_ones_place_is_sent_what_that_one_held(hosts: Any):
    host, peer = hosts(0), hosts(1)
    host.memory.connect({1: peer.memory.address}, 2)
    host.write(0, 3, b"three", peer=1)
    until(lambda: host.is_replicated(0))
    host.write(1, 5, b"five", peer=1)
    until(lambda: host.is_replicated(1))
    peer.close()
    other = hosts(1)
    host.memory.connect({1: other.memory.address}, 2)
    until(lambda: {"kind": "holds", "ranks": [0]} in other.said)
    new = hosts(0)

    def fetched() -> dict[int, bytes]:
        new.memory.fetch([other.memory.address])
        until(lambda: not new.memory.fetching)
        return new.held()

    until(lambda: fetched() == {3: b"three", 5: b"five"})


def test_a_host_that_is_to_go_gives_its_own(hosts: Any):
    old, new = hosts(0), hosts(0)
    old.write(0, 4, b"four", peer=None)
    new.memory.fetch([old.memory.address])
    until(lambda: not new.memory.fetching)
    assert new.held() == {4: b"four"}


def test_its_descriptors_may_be_closed_while_threads_still_read_the_files(hosts: Any):
    old, new = hosts(0), hosts(0)
    old.write(0, 4, b"four", peer=None)
    while old.files:
        os.close(old.files.pop())
    new.memory.fetch([old.memory.address])
    until(lambda: not new.memory.fetching)
    assert new.held() == {4: b"four"}


def test_a_snapshot_of_a_step_that_is_made_again_replaces_that_of_before(hosts: Any):
    host, peer = hosts(0), hosts(1)
    host.memory.connect({1: peer.memory.address}, 2)
    for slot, step in ((0, 20), (1, 30)):
        host.write(slot, step, b"before", peer=1)
        until(lambda slot=slot: host.is_replicated(slot))
    host.slots[0].erase()
    host.slots[1].erase()
    for slot, step in ((0, 30), (1, 32)):
        host.write(slot, step, b"again", peer=1)
        until(lambda slot=slot: host.is_replicated(slot))
    new = hosts(0)
    new.memory.fetch([peer.memory.address])
    until(lambda: not new.memory.fetching)
    assert new.held() == {30: b"again", 32: b"again"}


def test_a_replica_that_was_cut_short_or_damaged_is_not_used(hosts: Any):
    host, peer = hosts(0), hosts(1)
    host.memory.connect({1: peer.memory.address}, 2)
    host.write(0, 3, b"whole", peer=1)
    until(lambda: host.is_replicated(0))
    name, _, port = peer.memory.address.rpartition(":")
    for damage in (False, True):
        with socket.create_connection((name, int(port))) as agent:
            agent.settimeout(SECONDS)
            send(agent, Frame(kind=Kind.JOIN, facts={"token": "secret"}))
            facts = {"at": FIRST + 4, "length": 2, "crc": 7, "peer": 1, "to_disk": True}
            send(agent, Frame(kind=Kind.OFFER, rank=0, round=9, facts=facts))
            assert receive(agent).facts["wanted"]
            if damage:  # whole, and not what was offered
                send(agent, Frame(kind=Kind.PIECE, rank=0, round=FIRST, body=b"abcd{}"))
                with pytest.raises(LinkError):
                    receive(agent)
    new = hosts(0)
    new.memory.fetch([peer.memory.address])
    until(lambda: not new.memory.fetching)
    assert new.held() == {3: b"whole"}


def test_strangers_get_and_give_nothing(hosts: Any):
    host = hosts(0)
    host.write(0, 4, b"mine", peer=None)
    thief = hosts(0, Credentials(token="guess"))
    thief.memory.fetch([host.memory.address])
    until(lambda: not thief.memory.fetching)
    assert thief.held() == {}
    name, _, port = host.memory.address.rpartition(":")
    for first in (Frame(kind=Kind.FETCH), Frame(kind=Kind.JOIN, facts={"token": ""})):
        with socket.create_connection((name, int(port))) as stranger:
            stranger.settimeout(SECONDS)
            send(stranger, first)
            with contextlib.suppress(LinkError):
                send(stranger, Frame(kind=Kind.FETCH))
            with pytest.raises(LinkError):
                receive(stranger)
    assert host.held() == {4: b"mine"}


def test_beyond_loopback_only_those_with_the_runs_certificate_are_heard(hosts: Any):
    run, other = Credentials.make(tls=True), Credentials.make(tls=True)
    assert run.token not in repr(run)
    assert run.key not in repr(run)
    lost, peer = hosts(1, run), hosts(2, run)
    body = os.urandom(20_000_000)
    lost.write(0, 7, body, peer=2)
    lost.memory.connect({2: peer.memory.address}, 3)
    until(lambda: lost.is_replicated(0))
    known = Credentials(token=run.token, certificate=other.certificate, key=other.key)
    for stranger in (known, Credentials(token=run.token)):  # another certificate, none
        thief = hosts(1, stranger)
        thief.memory.fetch([peer.memory.address])
        until(lambda thief=thief: not thief.memory.fetching)
        assert thief.held() == {}
    without = Credentials(token="guess", certificate=run.certificate, key=run.key)
    for credentials, expected in ((without, {}), (run, {7: body})):
        new = hosts(1, credentials)
        new.memory.fetch([peer.memory.address])
        until(lambda new=new: not new.memory.fetching)
        assert new.held() == expected


def test_on_one_machine_all_listen_on_loopback():
    assert own_address("127.0.0.1") == "127.0.0.1"
    assert not Credentials.make().key
