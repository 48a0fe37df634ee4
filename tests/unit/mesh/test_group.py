"""Operations that one process tells others, over real connections."""

import contextlib
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import ml_dtypes
import numpy as np
import pytest

from fornax.config import frames
from fornax.config.credentials import Credentials
from fornax.config.errors import ClusterError
from fornax.config.frames import Frame, Kind, LinkError
from fornax.mesh.group import Leader, Member, Operation

TOKEN = "secret"
PLAIN = Credentials(token="")


@pytest.fixture(params=[False, True], ids=["loopback", "TLS"])
def group(request: pytest.FixtureRequest) -> Iterator[tuple[Leader, list[Member]]]:
    """A leader, and the two members that it tells."""
    run, other = Credentials.make(tls=request.param), Credentials.make(tls=True)
    strangers = [(run, "another"), *([(other, TOKEN), (PLAIN, TOKEN)] if request.param else [])]
    with socket.create_server(("127.0.0.1", 0)) as listener, ThreadPoolExecutor() as pool:

        def join(known: Credentials, token: str) -> socket.socket:
            link = known.dial(socket.create_connection(listener.getsockname(), timeout=60))
            with contextlib.suppress(LinkError):  # it was sent away during the handshake
                frames.send(link, Frame(kind=Kind.JOIN, facts={"token": token}))
            return link

        leading = pool.submit(Leader, listener, TOKEN, 2, run)
        for stranger in strangers:
            with join(*stranger) as link, pytest.raises(LinkError):
                frames.receive(link)  # who does not know the secret is sent away
        own = [join(run, TOKEN) for _ in range(2)]
        leader = leading.result()
    with own[0], own[1]:
        yield leader, [Member(each) for each in own]
        leader.close()


def test_all_members_get_each_operation_with_its_arrays(group: tuple[Leader, list[Member]]):
    leader, members = group
    arrays = [
        np.arange(6, dtype=np.int32).reshape(2, 3).T,
        np.array([1.5, -2.0], ml_dtypes.bfloat16),
        np.array([True, False]),
        np.float64(0.1),
        np.zeros((0, 3), np.float16),
    ]
    leader.tell("run", *arrays, model=3)
    leader.tell("rest")
    leader.close()
    for member in members:
        run, rest = member.operations()
        assert (run.name, run.facts["model"], len(run.arrays)) == ("run", 3, 5)
        for sent, got in zip(arrays, run.arrays, strict=True):
            assert (got.dtype, got.shape) == (sent.dtype, sent.shape)
            assert got.tobytes() == sent.tobytes()
        assert (rest.name, rest.arrays) == ("rest", [])


def test_the_leader_waits_for_all_and_names_who_refused(group: tuple[Leader, list[Member]]):
    leader, (first, second) = group
    leader.watch(lambda error: None)
    first.report("load 1")
    assert not leader.done("load 1")
    second.report("load 1", refused="there is no such file")
    with pytest.raises(ClusterError, match=r"process \d: there is no such file"):
        leader.wait("load 1")
    first.report()
    second.report()
    leader.wait()
    assert leader.done()


def test_a_member_that_ends_fails_what_is_told_and_waited_for(group: tuple[Leader, list[Member]]):
    leader, (first, _) = group
    lost: list[LinkError] = []
    told = threading.Event()
    leader.watch(lambda error: (lost.append(error), told.set()))
    first._connection.close()
    assert told.wait(60)
    with pytest.raises(LinkError, match="a process of this group ended"):
        leader.wait("anything")
    with pytest.raises(LinkError, match="a process of this group ended"):
        leader.tell("run")
    assert len(lost) == 1


def test_a_member_hears_that_the_leader_is_gone(group: tuple[Leader, list[Member]]):
    leader, (member, _) = group
    found: list[Operation] = []
    leader.tell("run")
    leader._close_all()
    with pytest.raises(LinkError, match="the connection ended"):
        found.extend(member.operations())
