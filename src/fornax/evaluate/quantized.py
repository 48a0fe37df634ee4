"""Directories of one model in floats and quantized: how each predicts, its memory, its speed.

Each engine runs in a process of its own, one after the other, on the same prompts.
"""

import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np

from fornax.checkpoint.safetensors_file import DTYPES, find_tensors
from fornax.config import environment, from_mapping
from fornax.config.errors import ConfigError, EngineError, FornaxError
from fornax.config.hub import find_model
from fornax.evaluate.peers import Peer, Settings, find_peers, started, write_model
from fornax.llm import LLM, EngineConfig, SamplingParams
from fornax.mesh import initialize
from fornax.models import config_from_hf, read_config, stored_dtypes
from fornax.quant import HeldOutText, Quality, quantize

__all__ = ["Measured", "Speed", "measure_quantized"]

_WARM_UPS = 1
"""Rounds thrown away at each batch size."""


@dataclass(frozen=True, kw_only=True)
class Speed:
    """Of an engine in a process of its own."""

    load_s: float
    """Until its steps are compiled, or taken from the compilation cache."""
    weight_bytes: int | None
    """That the weights take as the engine holds them; None where a peer does not say."""
    resident_bytes: int | None
    """Most memory of the process that no file is behind; None where Linux does not say."""
    rates: Mapping[int, float]
    """Generated tokens per second by batch size, prompts included: medians over rounds."""


@dataclass(frozen=True, kw_only=True)
class Measured:
    """One directory, or a peer."""

    name: str
    disk_bytes: int | None
    """Of safetensors files, of the GGUF file, or of all files that a peer's converter made."""
    quality: Quality | None
    speed: Speed | None
    failed: str | None = None
    """Why a peer has no figures where they are None."""


def measure_quantized(
    models: Sequence[Path],
    *,
    data: str,
    schemes: Sequence[str] = (),
    peers: Sequence[Path] = (),
    dtype: str | None = None,
    batches: Sequence[int] = (1, 8),
    prompt: int = 128,
    new: int = 64,
    rounds: int = 5,
    samples: int = 128,
    length: int = 512,
    seed: int = 0,
    progress: Callable[[str], None] = lambda _: None,
) -> list[Measured]:
    """Measure directories.

    Args:
      models: the float model's directory first, then others of the same model.
      data: JSON lines with a column `text`, see `quantize`, as are `samples`, `length` and `seed`.
      schemes: the float model is quantized by each into a folder that is deleted afterwards.
      peers: interpreters that have other engines, see `find_peers`: each quantizes the float model
        by its own converter, predicts the rows and generates, with its own rounding of activations
        and its own cache. What one cannot do is left out, and `failed` says why.
      dtype: of activations and of weights that are floats; None: as in the files, and as a peer has
        it.
      batches: sequences generated together.
      prompt: tokens of a prompt, random ones by the seed.
      new: greedy tokens to generate for each.
      rounds: of each batch size, whose median counts; one before them does not.
      progress: told of each step.

    Raises:
      ConfigError: nothing to compare, numbers that cannot be; see `quantize` for more.
      CheckpointError, DataError, EngineError: from loading and running.
    """
    if not batches or min(prompt, new, rounds, *batches) < 1:
        raise ConfigError(
            f"batches={list(batches)}, prompt={prompt}, new={new}, rounds={rounds}: each must be "
            "1 or more"
        )
    if not models or len(models) + len(schemes) + len(peers) < 2:
        raise ConfigError(
            f"{models[0] if models else 'nothing'} is a single model, with nothing to compare; "
            "name more directories, --schemes to quantize it by, or --peers"
        )
    turns = _Turns(
        dtype=dtype, batches=tuple(batches), prompt=prompt, new=new, rounds=rounds, seed=seed
    )
    from_mapping(EngineConfig, turns.options())
    folders = [find_model(model).expanduser() for model in models]
    positions = config_from_hf(read_config(folders[0])).max_position_embeddings
    if prompt + new > positions:
        raise ConfigError(
            f"prompt={prompt} and new={new} are {prompt + new} tokens, and the model in "
            f"{folders[0]} has {positions} positions; give fewer"
        )
    for folder in folders[1:]:
        stored_dtypes(folder)  # what cannot be read is said before the others are run
    others = find_peers(peers)
    with tempfile.TemporaryDirectory(prefix="fornax-bench-quant-") as place:
        names = [str(model) for model in models]
        for scheme in dict.fromkeys(schemes):
            progress(f"quantizing by {scheme}")
            quantize(
                folders[0],
                Path(place) / scheme,
                scheme=scheme,
                data=data,
                samples=samples,
                length=length,
                seed=seed,
            )
            folders.append(Path(place) / scheme)
            names.append(scheme)
        progress("comparing what they predict")
        text = HeldOutText(folders[0], data=data, samples=samples, length=length, seed=seed)
        quality = [text.measure(), *map(text.measure, folders[1:])]
        found = []
        for name, folder, own in zip(names, folders, quality, strict=True):
            progress(f"running {name}")
            speed = _in_a_process(folder, turns)
            disk = _disk_bytes(folder)
            found.append(Measured(name=name, disk_bytes=disk, quality=own, speed=speed))
        for peer in others:
            progress(f"running {peer.name}")
            found.append(_measure_peer(peer, folders[0], turns, text))
    return found


@dataclass(frozen=True, kw_only=True)
class _Turns:
    """What an engine is asked for; see `measure_quantized`."""

    dtype: str | None
    batches: tuple[int, ...]
    prompt: int
    new: int
    rounds: int
    seed: int

    def options(self) -> dict[str, Any]:
        """Fields of `EngineConfig`."""
        options = {} if self.dtype is None else {"dtype": self.dtype}
        length = self.prompt + self.new
        sizes = {"max_num_seqs": max(self.batches), "max_model_len": length}
        return {**sizes, "step_sizes": "coarse", **options}

    def rates(
        self, vocabulary: int, generate: Callable[[np.ndarray], tuple[float, int]]
    ) -> dict[int, float]:
        """Generated tokens per second by batch size.

        Args:
          vocabulary: ids to draw prompts from.
          generate: prompts [B, T] -> seconds, and how many tokens were generated.
        """
        draw, rates = np.random.default_rng(self.seed), {}
        for batch in self.batches:
            shape = (self.rounds + _WARM_UPS, batch, self.prompt)
            turns = [generate(rows_BT) for rows_BT in draw.integers(0, vocabulary, shape)]
            rates[batch] = statistics.median(count / spent for spent, count in turns[_WARM_UPS:])
        return rates


def _disk_bytes(folder: Path) -> int:
    if folder.is_file():
        return folder.stat().st_size
    files = {tensor.file for tensor in find_tensors(folder, DTYPES).values()}
    return sum(file.stat().st_size for file in files)


def _in_a_process(folder: Path, turns: _Turns) -> Speed:
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        try:
            return pool.submit(_run, folder, turns).result()
        except BrokenProcessPool as error:
            raise EngineError(
                f"the process that ran {folder} was killed, as the kernel does where memory ends; "
                "measure fewer sequences (--batches), or with --dtype bfloat16"
            ) from error


def _run(folder: Path, turns: _Turns) -> Speed:
    initialize()
    began = time.perf_counter()
    engine = LLM(folder, **turns.options())
    load_s = time.perf_counter() - began
    params = SamplingParams(max_tokens=turns.new, temperature=0.0, ignore_eos=True)

    def generate(rows_BT: np.ndarray) -> tuple[float, int]:
        began = time.perf_counter()
        done = engine.generate(rows_BT.tolist(), params)
        seconds = time.perf_counter() - began
        return seconds, sum(len(each.outputs[0].token_ids) for each in done)

    rates = turns.rates(read_config(folder)["vocab_size"], generate)
    return Speed(
        load_s=load_s,
        weight_bytes=engine.weights.nbytes,
        resident_bytes=_resident(),
        rates=rates,
    )


def _measure_peer(peer: Peer, source: Path, turns: _Turns, text: HeldOutText) -> Measured:
    """What a peer can do of it all, each in a process of its own."""
    disk = quality = speed = failed = None
    settings = Settings(
        threads=environment.usable_cores(),
        dtype=turns.dtype,
        rows=max(turns.batches),
        length=max(turns.prompt + turns.new, text.rows_NT.shape[1]),
    )
    with tempfile.TemporaryDirectory(prefix="fornax-bench-quant-") as place:
        try:
            model = write_model(peer, source, Path(place))
            disk = sum(file.stat().st_size for file in Path(place).rglob("*") if file.is_file())
            with started(peer, model, "generate", settings) as running:
                rates = turns.rates(
                    read_config(source)["vocab_size"],
                    lambda rows_BT: running.generate(rows_BT, turns.new),
                )
                speed = Speed(
                    load_s=running.load_s,
                    weight_bytes=None,
                    resident_bytes=running.resident_bytes(),
                    rates=rates,
                )
            with started(peer, model, "score", settings) as running:
                quality = text.measure_logits(running.score)
        except FornaxError as error:
            failed = str(error)
    return Measured(name=peer.name, disk_bytes=disk, quality=quality, speed=speed, failed=failed)


def _resident() -> int | None:
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return None
    return next((int(x.split()[1]) * 1024 for x in lines if x.startswith("RssAnon")), None)
