"""Samplers behind sockets: versions, shards, samplers that are lost, bytes that are wrong."""

import contextlib
import dataclasses
import mmap
import os
import random
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from flax import nnx

from fornax.config import ClusterError, ConfigError, EngineError, credentials
from fornax.config.addresses import write_addresses
from fornax.config.credentials import Credentials
from fornax.config.frames import Frame, Kind, LinkError, receive, send
from fornax.data import Tokenizer
from fornax.models import Decoder
from fornax.tune.data import Codec
from fornax.tune.rl.ranks import find_samplers
from fornax.tune.rollout import (
    Completion,
    Limits,
    LLMSampler,
    Message,
    PartSampler,
    RemoteSampler,
    SamplerServer,
    SamplerStats,
    SampleSettings,
    TextFraming,
    Trajectory,
    Turn,
    run_in_parts,
    split_shards,
)
from fornax.tune.rollout.segments import HostWeights, SegmentPool, map_segment
from fornax.tune.rollout.shards import array_frames

PLAIN, SECURED = Credentials.make(), Credentials.make(tls=True)
SETTINGS = SampleSettings(n=2, max_tokens=5, stop=("x",))
PROMPTS = [[n, n + 1, *range(n)] for n in range(1, 12)]
SEEDS = [10**15 + n for n in range(len(PROMPTS))]


def weights(value: float) -> HostWeights:
    return {("layers", 0, "kernel"): np.full((3, 5), value, np.float32), ("bias",): np.arange(4)}


class Drawer:
    """What it draws depends on the weights, the prompt, the seed and the shard's size, as the bits
    of an engine do; it waits where `held` says."""

    def __init__(self) -> None:
        self.value, self.version, self.asked = np.nan, -1, 0
        self.held = threading.Event()
        self.held.set()
        self.begun = threading.Event()
        self.stopped = False

    def update(self, params: object, version: int) -> None:
        assert isinstance(params, dict)
        self.value = float(params["layers"][0]["kernel"][2, 4])
        self.version, self.stopped = version, False

    def sample_part(
        self,
        prompts: Sequence[Sequence[int]],
        settings: Sequence[SampleSettings],
        seeds: Sequence[int],
    ) -> list[list[Completion]]:
        self.begun.set()
        while not self.held.wait(0.01):
            if self.stopped:
                break
        if self.stopped:
            raise EngineError("interrupted")
        if any(token < 0 for prompt in prompts for token in prompt):
            raise EngineError("a token below 0")
        self.asked += len(prompts)
        assert set(settings) == {SETTINGS}
        found = []
        for prompt, seed in zip(prompts, seeds, strict=True):
            group = []
            for i in range(SETTINGS.n):
                draw = np.random.default_rng([seed, i, int(self.value * 16), *prompt])
                logprobs = draw.random(5, np.float32) * np.float32(1 + 1e-7 * len(prompts))
                group.append(
                    Completion(
                        tokens=draw.integers(0, 99, 5).astype(np.int32),
                        logprobs=logprobs.astype(np.float32),
                        versions=np.full(5, self.version, np.int32),
                        mask=np.ones(5, np.int8),
                        finish_reason="length",
                        text=f"{prompt[0]}é",
                        seed=seed + i,
                    )
                )
            found.append(group)
        return found

    def interrupt(self) -> None:
        self.stopped = True

    def stats(self) -> SamplerStats:
        return SamplerStats(tokens=10 * self.asked)

    def close(self) -> None:
        """Nothing is held."""


class Served:
    """A drawer behind a server on a thread."""

    def __init__(
        self, listener: socket.socket | None = None, *, share: bool = True, run: Credentials = PLAIN
    ) -> None:
        self.listener = listener or socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self.listener.getsockname()[1]}"
        self.drawer = Drawer()
        self.server = SamplerServer(self.listener.dup(), run, share=share)
        self.versions: list[int] = []
        threading.Thread(target=self.run, daemon=True).start()

    def run(self) -> None:
        self.server.run(self.drawer, lambda phase, version: self.versions.append(version))


Serve = Callable[..., Served]


@pytest.fixture
def serve() -> Iterator[Serve]:
    """Begin servers, which end with the test."""
    made: list[Served] = []

    def begin(listener: socket.socket | None = None, **options: Any) -> Served:
        made.append(Served(listener, **options))
        return made[-1]

    yield begin
    for each in made:
        each.server.close()
        each.listener.close()


@pytest.fixture
def remote() -> Iterator[Callable[..., RemoteSampler]]:
    """Connect to servers, until the test ends."""
    made: list[RemoteSampler] = []

    def begin(
        *served: "Served | Proxy", run: Credentials = PLAIN, shards: int = 4, **options: float
    ):
        addresses = [each.address for each in served]
        made.append(RemoteSampler(addresses, run, shards=shards, max_model_len=192, **options))  # pyrefly: ignore
        return made[-1]

    yield begin
    for each in made:
        each.close()


def bits(groups: Sequence[Sequence[Completion]]) -> list[tuple]:
    return [
        (
            *(c.tokens.tolist(), c.logprobs.tobytes(), c.versions.tolist(), c.mask.tolist()),
            *(c.text, c.finish_reason, c.seed),
        )
        for group in groups
        for c in group
    ]


def alone(value: float, version: int, shards: int = 4) -> list[tuple]:
    """What one drawer, asked shard by shard, answers."""
    drawer = Drawer()
    drawer.update({"layers": {0: {"kernel": np.full((3, 5), value)}}}, version)
    found = []
    for part in split_shards(len(PROMPTS), shards):
        same = [SETTINGS] * len(PROMPTS[part])
        found += drawer.sample_part(PROMPTS[part], same, SEEDS[part])
    return bits(found)


def until(true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 120
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.005)


@pytest.mark.parametrize("shares", [(True,), (False, True), (True, True, False)])
def test_bits_do_not_depend_on_how_many_samplers_there_are_or_how_weights_come(
    serve: Serve, remote: Callable[..., RemoteSampler], shares: Sequence[bool]
) -> None:
    served = [serve(share=share) for share in shares]
    sampler = remote(*served)
    for version in (0, 3):
        sampler.update(weights(0.5 + version), version)
        assert bits(sampler.sample(PROMPTS, SETTINGS, SEEDS)) == alone(0.5 + version, version)
    assert sum(each.drawer.asked for each in served) == 2 * len(PROMPTS)
    assert sampler.stats().tokens == 2 * 10 * len(PROMPTS)
    assert sampler.stats().updates == 2


def test_other_shards_are_other_bits() -> None:
    assert alone(0.5, 0, shards=4) != alone(0.5, 0, shards=2)  # else the tests here show nothing


@pytest.mark.parametrize("share", [True, False])
def test_memory_is_written_again_only_when_all_have_done_with_it(
    serve: Serve, remote: Callable[..., RemoteSampler], share: bool
) -> None:
    drawing, idle = serve(share=share), serve(share=share)
    sampler = remote(drawing, idle, shards=1)
    idle.drawer.held.clear()
    segments = set()
    for version in range(12):
        sampler.update(weights(version), version)
        segments.add(id(sampler.weights[version].memory))
        until(lambda n=version: sampler.bytes == 2 * (n + 1) * (3 * 5 * 4 + 4 * 8))
        if version % 4 == 0:
            idle.drawer.held.set()
        assert bits(sampler.sample(PROMPTS, SETTINGS, SEEDS)) == alone(version, version, 1)
    assert len(segments) <= 4


@pytest.mark.skipif(sys.platform != "linux", reason="memory is passed on by Linux alone")
def test_memory_of_a_sampler_that_is_lost_is_not_written_to_again(
    serve: Serve, remote: Callable[..., RemoteSampler]
) -> None:
    each = serve()
    sampler = remote(each, versions=1)
    sampler.update(weights(1.0), 1)
    until(lambda: sampler.bytes > 0)
    first = sampler.weights[1]
    assert first.users == 2
    each.server.close()
    for version in (2, 3):
        sampler.update(weights(version), version)
        assert sampler.weights[version] is not first
        until(lambda: first.lost)
    assert first.users == 0
    assert first.descriptor is None


@pytest.mark.skipif(sys.platform != "linux", reason="memory is passed on by Linux alone")
def test_memory_that_is_wrong_or_could_shrink_is_refused() -> None:
    pool = SegmentPool()
    given = weights(1.0) | {("none",): np.zeros((0, 3), np.float32), ("one",): np.array(7)}
    segment, layout = pool.take(given)
    segment.write(given, layout)
    assert segment.descriptor is not None

    def mapped(descriptor: int, **changes: object) -> HostWeights:
        facts = {"size": len(segment.memory), "layout": segment.layout, "known": {}}
        return map_segment(os.dup(descriptor), **(facts | changes))  # pyrefly: ignore

    found = mapped(segment.descriptor)
    assert found.keys() == given.keys()
    for path, array in given.items():
        np.testing.assert_array_equal(found[path], array)
        assert found[path].dtype == array.dtype
        assert not found[path].flags.writeable
    with pytest.raises(EngineError, match="other than"):
        mapped(segment.descriptor, size=4096 + len(segment.memory))
    wrong = [{**segment.layout[0], "crc32": segment.layout[0]["crc32"] ^ 1}]
    with pytest.raises(EngineError, match="checksum"):
        mapped(segment.descriptor, layout=wrong)
    wrong = [{**layout[0], "shape": [10**6]}]
    with pytest.raises(EngineError, match="do not fit"):
        mapped(segment.descriptor, layout=wrong)
    bare = os.memfd_create("bare")
    os.ftruncate(bare, len(segment.memory))
    with pytest.raises(EngineError, match="sealed"):
        mapped(bare)
    os.close(bare)
    with pytest.raises(OSError, match="not permitted"):
        os.ftruncate(segment.descriptor, 1)
    pool.leave(segment)
    known: dict[int, mmap.mmap] = {}
    mapped(segment.descriptor, known=known)
    before = dict(known)
    assert pool.take(given)[0] is segment
    changed = {path: array + 1 for path, array in given.items()}
    segment.write(changed, layout)
    again = mapped(segment.descriptor, known=known)
    assert known == before
    np.testing.assert_array_equal(again["bias",], given["bias",] + 1)
    pool.leave(segment)
    pool.close()


def test_weights_come_while_a_shard_is_drawn(
    serve: Serve, remote: Callable[..., RemoteSampler]
) -> None:
    each = serve()
    sampler = remote(each, versions=3)
    sampler.update(weights(1.0), 1)
    each.drawer.held.clear()
    drawn: list[list[list[Completion]]] = []
    first = threading.Thread(
        target=lambda: drawn.append(sampler.at(1).sample(PROMPTS, SETTINGS, SEEDS))
    )
    first.start()
    each.drawer.begun.wait(120)
    sampler.update(weights(2.0), 2)
    until(lambda: sampler.bytes == 2 * (3 * 5 * 4 + 4 * 8))  # whole, by the sampler's own word
    assert each.drawer.version == 1
    each.drawer.held.set()
    first.join(120)
    assert bits(drawn[0]) == alone(1.0, 1)
    assert bits(sampler.sample(PROMPTS, SETTINGS, SEEDS)) == alone(2.0, 2)
    with pytest.raises(EngineError, match="version 1"):
        sampler.at(1).sample(PROMPTS, SETTINGS, SEEDS)


def test_what_a_lost_sampler_had_is_drawn_by_another_once(
    serve: Serve, remote: Callable[..., RemoteSampler]
) -> None:
    lost, other = serve(), serve()
    sampler = remote(lost, other)
    sampler.update(weights(1.0), 0)
    lost.drawer.held.clear()
    other.drawer.held.clear()
    drawn: list[list[list[Completion]]] = []
    thread = threading.Thread(target=lambda: drawn.append(sampler.sample(PROMPTS, SETTINGS, SEEDS)))
    thread.start()
    lost.drawer.begun.wait(120)
    other.drawer.begun.wait(120)
    lost.server.close()
    other.drawer.held.set()
    thread.join(120)
    assert bits(drawn[0]) == alone(1.0, 0)
    assert (lost.drawer.asked, other.drawer.asked) == (0, len(PROMPTS))


def test_a_sampler_that_takes_the_place_of_another_gets_the_weights(
    serve: Serve, remote: Callable[..., RemoteSampler]
) -> None:
    before = serve()
    sampler = remote(before)
    sampler.update(weights(1.0), 0)
    before.drawer.held.clear()
    drawn: list[list[list[Completion]]] = []
    thread = threading.Thread(target=lambda: drawn.append(sampler.sample(PROMPTS, SETTINGS, SEEDS)))
    thread.start()
    before.drawer.begun.wait(120)
    address = before.listener.getsockname()
    before.server.close()
    before.listener.close()
    after = serve(socket.create_server(address))
    thread.join(120)
    assert bits(drawn[0]) == alone(1.0, 0)
    assert after.drawer.asked == len(PROMPTS)


def test_a_sampler_that_begins_again_elsewhere_is_found(
    serve: Serve, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The launch's file has its new address."""
    before, file = serve(), tmp_path / "sampler.addresses"
    monkeypatch.setenv("FORNAX_SAMPLERS", write_addresses(file, [before.address]))
    monkeypatch.setattr(credentials, "_of_run", None)
    with pytest.raises(ConfigError, match="run the command by it"):
        find_samplers()
    credentials.set_of_run(PLAIN)
    found = find_samplers()
    assert found is not None
    with contextlib.closing(RemoteSampler(*found, shards=4, max_model_len=192)) as sampler:
        sampler.update(weights(1.0), 0)
        assert bits(sampler.sample(PROMPTS, SETTINGS, SEEDS)) == alone(1.0, 0)
        after = serve()
        before.server.close()
        before.listener.close()
        write_addresses(file, [after.address])
        sampler.update(weights(2.0), 1)
        assert bits(sampler.sample(PROMPTS, SETTINGS, SEEDS)) == alone(2.0, 1)
        assert after.drawer.asked == len(PROMPTS)
        file.unlink()
        assert list(found[0]) == [after.address]


def test_a_trainer_that_is_gone_stops_its_shard_and_a_new_one_is_served(
    serve: Serve, remote: Callable[..., RemoteSampler]
) -> None:
    each = serve()
    first = remote(each)
    first.update(weights(1.0), 7)
    each.drawer.held.clear()
    failed: list[Exception] = []

    def draw() -> None:
        try:
            first.sample(PROMPTS, SETTINGS, SEEDS)
        except EngineError as error:
            failed.append(error)

    thread = threading.Thread(target=draw)
    thread.start()
    each.drawer.begun.wait(120)
    first.close()
    thread.join(120)
    assert failed
    until(lambda: each.drawer.stopped)
    each.drawer.held.set()
    second = remote(each)
    second.update(weights(2.0), 7)  # the same version of other weights
    assert bits(second.sample(PROMPTS, SETTINGS, SEEDS)) == alone(2.0, 7)
    assert each.drawer.asked == len(PROMPTS)


def test_an_interrupted_round_is_left_and_the_next_one_drawn(
    serve: Serve, remote: Callable[..., RemoteSampler]
) -> None:
    each = serve()
    sampler = remote(each)
    sampler.update(weights(1.0), 0)
    each.drawer.held.clear()
    threading.Thread(target=lambda: (each.drawer.begun.wait(120), sampler.interrupt())).start()
    with pytest.raises(EngineError, match="interrupted"):
        sampler.sample(PROMPTS, SETTINGS, SEEDS)
    until(lambda: each.drawer.stopped)
    each.drawer.held.set()
    sampler.update(weights(1.0), 1)
    assert bits(sampler.sample(PROMPTS, SETTINGS, SEEDS)) == alone(1.0, 1)


def test_what_a_sampler_refuses_is_said(serve: Serve, remote: Callable[..., RemoteSampler]) -> None:
    sampler = remote(serve(), serve())
    sampler.update(weights(1.0), 0)
    with pytest.raises(EngineError, match="a token below 0"):
        sampler.sample([*PROMPTS, [-1]], SETTINGS, [*SEEDS, 1])
    assert bits(sampler.sample(PROMPTS, SETTINGS, SEEDS)) == alone(1.0, 0)


def test_nobody_without_the_token_is_heard(
    serve: Serve, remote: Callable[..., RemoteSampler]
) -> None:
    each = serve()
    with socket.create_connection(each.listener.getsockname()) as stranger:
        facts = {"token": "another", "role": "weights", "session": "x"}
        send(stranger, Frame(kind=Kind.JOIN, facts=facts))
        with pytest.raises(LinkError):
            receive(stranger)
    sampler = remote(each)
    sampler.update(weights(1.0), 0)
    assert bits(sampler.sample(PROMPTS, SETTINGS, SEEDS)) == alone(1.0, 0)


@pytest.mark.parametrize("share", [True, False])
def test_with_a_certificate_bits_are_the_same_and_nothing_is_readable(
    serve: Serve, remote: Callable[..., RemoteSampler], share: bool
) -> None:
    """All that passes is recorded by a proxy; answers come while the next prompts are sent."""
    each = serve(share=share, run=SECURED)
    proxy = Proxy(each.listener.getsockname())
    sampler = remote(proxy, run=SECURED)
    value = float(np.frombuffer(b"visi", np.float32)[0])
    for version in (0, 1):
        sampler.update(weights(value * (1 + version)), version)
        drawn = bits(sampler.sample(PROMPTS, SETTINGS, SEEDS))
        assert drawn == alone(value * (1 + version), version)
    sampler.close()
    proxy.close()
    seen = bytes(proxy.seen)
    assert len(seen) > 1000
    for secret in (SECURED.token.encode(), b"token", b"visivisi", b"FXO1", b"session"):
        assert secret not in seen


@pytest.mark.slow
@pytest.mark.parametrize("trainer", [PLAIN, Credentials.make(tls=True)])
def test_nobody_without_the_certificate_is_heard(
    serve: Serve, remote: Callable[..., RemoteSampler], trainer: Credentials
) -> None:
    """With the token in the clear, or another run's certificate; the run's own trainer is."""
    each = serve(run=SECURED)
    shown = dataclasses.replace(trainer, token=SECURED.token)
    with shown.dial(socket.create_connection(each.listener.getsockname())) as stranger:
        facts = {"token": shown.token, "role": "weights", "session": "x"}
        with contextlib.suppress(LinkError):  # it may be refused with the first bytes already
            send(stranger, Frame(kind=Kind.JOIN, facts=facts))
        with pytest.raises(LinkError):
            receive(stranger)
    sampler = remote(each, run=shown, lost_seconds=3)
    sampler.update(weights(1.0), 0)
    said = (
        "does not have this run's certificate.*same fornax launch" if shown.key else "no sampler at"
    )
    with pytest.raises(ClusterError, match=said):
        sampler.sample(PROMPTS, SETTINGS, SEEDS)
    own = remote(each, run=SECURED)
    own.update(weights(1.0), 0)
    assert bits(own.sample(PROMPTS, SETTINGS, SEEDS)) == alone(1.0, 0)


class Proxy:
    """Passes connections on, and keeps what it sees."""

    def __init__(self, target: tuple[str, int]) -> None:
        self._target = target
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self.seen = bytearray()
        self._sockets = [self._listener]
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        for each in self._sockets:
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                one, _ = self._listener.accept()
                other = socket.create_connection(self._target)
                self._sockets += [one, other]
                for pair in ((one, other), (other, one)):
                    threading.Thread(target=self._pass, args=pair, daemon=True).start()

    def _pass(self, source: socket.socket, target: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while found := source.recv(1 << 16):
                self.seen += found
                target.sendall(found)
            target.shutdown(socket.SHUT_WR)


def test_a_version_that_is_not_whole_is_not_taken(serve: Serve) -> None:
    each = serve()
    good = list(array_frames(5, weights(1.0), 5))
    with socket.create_connection(each.listener.getsockname()) as trainer:
        facts = {"token": PLAIN.token, "role": "weights", "session": "x"}
        send(trainer, Frame(kind=Kind.JOIN, facts=facts))
        assert receive(trainer).facts["versions"] == []
        for frame in (good[0], good[-1]):  # an array is missing
            send(trainer, frame)
        answer = receive(trainer)
        assert answer.kind is Kind.REFUSED
        assert "1 arrays of 60 bytes instead of 2 of 92" in answer.facts["why"]
    ours, theirs = socket.socketpair()
    with ours, theirs, socket.create_connection(each.listener.getsockname()) as trainer:
        send(trainer, Frame(kind=Kind.JOIN, facts=facts))
        receive(trainer)
        send(ours, good[0])
        sent = bytearray(theirs.recv(1 << 16))
        sent[-7] ^= 4  # one bit of the array
        trainer.sendall(sent)
        with pytest.raises(LinkError):  # the sampler ends the connection
            receive(trainer)
    with socket.create_connection(each.listener.getsockname()) as trainer:
        send(trainer, Frame(kind=Kind.JOIN, facts=facts))
        assert receive(trainer).facts["versions"] == []
        for frame in good:
            send(trainer, frame)
        assert receive(trainer).kind is Kind.READY


@pytest.fixture
def far(model: Decoder, sampler: LLMSampler) -> Iterator[RemoteSampler]:
    """The engine of these tests behind a socket, with weights of its own as version 4."""
    listener = socket.create_server(("127.0.0.1", 0))
    server = SamplerServer(listener, SECURED)
    thread = threading.Thread(target=server.run, args=(sampler,), daemon=True)
    thread.start()
    address = f"127.0.0.1:{listener.getsockname()[1]}"
    made = RemoteSampler([address], SECURED, shards=3, max_model_len=192)
    made.update(
        {
            path: np.array(leaf.get_value()) * np.float32(1.25)
            for path, leaf in nnx.to_flat_state(nnx.state(model, nnx.Param))
        },
        4,
    )
    yield made
    made.close()
    server.close()
    thread.join(120)
    assert not thread.is_alive()


def test_an_engine_behind_a_socket_draws_what_it_draws_by_shards(
    model: Decoder, sampler: LLMSampler, far: RemoteSampler
) -> None:
    settings, seeds = SampleSettings(n=3, max_tokens=6), list(range(50, 57))
    prompts = [[3 + n, 7, 9][: 1 + n % 3] for n in range(7)]
    found = bits(far.sample(prompts, settings, seeds))
    state = nnx.state(model, nnx.Param)
    sampler.update(jax.tree.map(lambda x: x * np.float32(1.25), state), 4)
    expected = []
    for part in split_shards(7, 3):
        sampler.reset_prefix_cache()
        expected += sampler.sample(prompts[part], settings, seeds[part])
    assert found == bits(expected)


class Dawdler:
    """Answers after a while that differs from run to run, and asks for more if so made."""

    tools = ()

    def reset(self, record: Mapping[str, object], seed: int) -> list[Message]:
        self.random, self.turns, self.most = random.Random(), 0, 1 + seed % 4
        return [{"role": "user", "content": f"guess {record['number']}"}]

    def step(self, message: Message) -> Turn:
        time.sleep(self.random.random() / 50)
        self.turns += 1
        if self.turns == self.most:
            return Turn(done=True, rewards={"length": float(len(message["content"]))})
        return Turn(messages=[{"role": "user", "content": "higher" * self.turns}])


def talk(drawer: PartSampler, tokenizer: Tokenizer) -> list[Trajectory]:
    """Eight conversations in three parts."""
    seeds = [10**12 + n for n in range(8)]
    return run_in_parts(
        drawer,
        TextFraming(Codec(tokenizer)),
        [Dawdler() for _ in seeds],
        [{"number": n} for n in seeds],
        SampleSettings(max_tokens=9, stop_token_ids=tuple(range(20, 90))),
        seeds,
        Limits(max_turns=3, max_tokens=60),
        parts=split_shards(8, 3),
    )


def test_conversations_behind_a_socket_have_the_bits_of_one_process(
    model: Decoder, sampler: LLMSampler, tokenizer: Tokenizer, far: RemoteSampler
) -> None:
    drawn = [talk(far.at(4), tokenizer), talk(far, tokenizer)]
    state = nnx.state(model, nnx.Param)
    sampler.update(jax.tree.map(lambda x: x * np.float32(1.25), state), 4)
    drawn.append(talk(sampler, tokenizer))
    expected = bits([[each.completion for each in drawn[0]]])
    assert {each.turns for each in drawn[0]} == {1, 2, 3}
    assert {each.completion.finish_reason for each in drawn[0]} >= {"done", "turns"}
    for other in drawn[1:]:
        assert bits([[each.completion for each in other]]) == expected
        assert [each.rewards for each in other] == [each.rewards for each in drawn[0]]


def test_a_part_that_fails_ends_the_others(tokenizer: Tokenizer, far: RemoteSampler) -> None:
    asked = []

    class Refuses:
        shards, max_model_len = 3, 192

        def sample_part(self, prompts: object, settings: object, seeds: Sequence[int]) -> object:
            asked.append(seeds)
            raise EngineError("no more")

    with pytest.raises(EngineError, match=r"no more|another part"):
        talk(Refuses(), tokenizer)  # pyrefly: ignore[bad-argument-type]
    assert 1 <= len(asked) <= 3
    assert len(talk(far, tokenizer)) == 8
