"""Samplers behind sockets: versions, shards, samplers that are lost, bytes that are wrong."""

import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence

import jax
import numpy as np
import pytest
from flax import nnx

from fornax.config import EngineError
from fornax.config.frames import Frame, Kind, LinkError, receive, send
from fornax.models import Decoder
from fornax.tune.rollout import Completion, LLMSampler, RemoteSampler, SamplerServer, SampleSettings
from fornax.tune.rollout.sampler import SamplerStats, split_shards
from fornax.tune.rollout.shards import HostWeights, array_frames

TOKEN = "a token"
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

    def sample(
        self, prompts: Sequence[Sequence[int]], settings: SampleSettings, seeds: Sequence[int]
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
        assert settings == SETTINGS
        found = []
        for prompt, seed in zip(prompts, seeds, strict=True):
            group = []
            for i in range(settings.n):
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

    def reset_prefix_cache(self) -> None:
        """Nothing is kept."""

    def stats(self) -> SamplerStats:
        return SamplerStats(tokens=10 * self.asked)

    def close(self) -> None:
        """Nothing is held."""


class Served:
    """A drawer behind a server on a thread."""

    def __init__(self, listener: socket.socket | None = None) -> None:
        self.listener = listener or socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self.listener.getsockname()[1]}"
        self.drawer = Drawer()
        self.server = SamplerServer(self.listener.dup(), TOKEN)
        self.versions: list[int] = []
        threading.Thread(target=self.run, daemon=True).start()

    def run(self) -> None:
        self.server.run(self.drawer, lambda phase, version: self.versions.append(version))


Serve = Callable[..., Served]


@pytest.fixture
def serve() -> Iterator[Serve]:
    """Begin servers, which end with the test."""
    made: list[Served] = []

    def begin(listener: socket.socket | None = None) -> Served:
        made.append(Served(listener))
        return made[-1]

    yield begin
    for each in made:
        each.server.close()
        each.listener.close()


@pytest.fixture
def remote() -> Iterator[Callable[..., RemoteSampler]]:
    """Connect to servers, until the test ends."""
    made: list[RemoteSampler] = []

    def begin(*served: Served, token: str = TOKEN, shards: int = 4, **options: float):
        addresses = [each.address for each in served]
        made.append(RemoteSampler(addresses, token, shards=shards, **options))  # pyrefly: ignore
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
        found += drawer.sample(PROMPTS[part], SETTINGS, SEEDS[part])
    return bits(found)


def until(true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.005)


@pytest.mark.parametrize("count", [1, 2, 3])
def test_bits_do_not_depend_on_how_many_samplers_there_are(
    serve: Serve, remote: Callable[..., RemoteSampler], count: int
) -> None:
    served = [serve() for _ in range(count)]
    sampler = remote(*served)
    for version in (0, 3):
        sampler.update(weights(0.5 + version), version)
        assert bits(sampler.sample(PROMPTS, SETTINGS, SEEDS)) == alone(0.5 + version, version)
    assert sum(each.drawer.asked for each in served) == 2 * len(PROMPTS)
    assert sampler.stats().tokens == 2 * 10 * len(PROMPTS)
    assert sampler.stats().updates == 2


def test_other_shards_are_other_bits() -> None:
    assert alone(0.5, 0, shards=4) != alone(0.5, 0, shards=2)  # else the tests here show nothing


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
    each.drawer.begun.wait(60)
    sampler.update(weights(2.0), 2)
    until(lambda: sampler.bytes == 2 * (3 * 5 * 4 + 4 * 8))  # whole, by the sampler's own word
    assert each.drawer.version == 1
    each.drawer.held.set()
    first.join(60)
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
    lost.drawer.begun.wait(60)
    other.drawer.begun.wait(60)
    lost.server.close()
    other.drawer.held.set()
    thread.join(60)
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
    before.drawer.begun.wait(60)
    address = before.listener.getsockname()
    before.server.close()
    before.listener.close()
    after = serve(socket.create_server(address))
    thread.join(60)
    assert bits(drawn[0]) == alone(1.0, 0)
    assert after.drawer.asked == len(PROMPTS)


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
    each.drawer.begun.wait(60)
    first.close()
    thread.join(60)
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
    threading.Thread(target=lambda: (each.drawer.begun.wait(60), sampler.interrupt())).start()
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


def test_a_version_that_is_not_whole_is_not_taken(serve: Serve) -> None:
    each = serve()
    good = list(array_frames(5, weights(1.0)))
    with socket.create_connection(each.listener.getsockname()) as trainer:
        facts = {"token": TOKEN, "role": "weights", "session": "x"}
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


def test_an_engine_behind_a_socket_draws_what_it_draws_by_shards(
    model: Decoder, sampler: LLMSampler, remote: Callable[..., RemoteSampler]
) -> None:
    settings, seeds = SampleSettings(n=3, max_tokens=6), list(range(50, 57))
    prompts = [[3 + n, 7, 9][: 1 + n % 3] for n in range(7)]
    arrays = {
        path: np.array(leaf.get_value())
        for path, leaf in nnx.to_flat_state(nnx.state(model, nnx.Param))
    }
    changed = {path: array * np.float32(1.25) for path, array in arrays.items()}
    listener = socket.create_server(("127.0.0.1", 0))
    server = SamplerServer(listener, TOKEN)
    thread = threading.Thread(target=server.run, args=(sampler,), daemon=True)
    thread.start()
    far = RemoteSampler([f"127.0.0.1:{listener.getsockname()[1]}"], TOKEN, shards=3)
    far.update(changed, 4)
    found = bits(far.sample(prompts, settings, seeds))
    far.close()
    server.close()
    thread.join(60)
    state = nnx.state(model, nnx.Param)
    sampler.update(jax.tree.map(lambda x: x * np.float32(1.25), state), 4)
    expected = []
    for part in split_shards(7, 3):
        sampler.reset_prefix_cache()
        expected += sampler.sample(prompts[part], settings, seeds[part])
    assert found == bits(expected)
