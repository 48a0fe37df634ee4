"""Processes of engines that Fornax is compared with: found, given a model, asked.

What is said to them is at the head of `engines.py`.
"""

import contextlib
import dataclasses
import json
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from textwrap import shorten
from typing import IO, Any, Literal

import numpy as np

from fornax.config.errors import ConfigError, EngineError
from fornax.quant import GGUF_SCHEMES, quantize_gguf

__all__ = ["Peer", "Running", "Settings", "find_peers", "started", "write_model"]

_SCRIPT = Path(__file__).with_name("engines.py")
_KINDS = {
    "llama.cpp": ("q8_0", "q4_k_m"),
    "OpenVINO": ("int8", "int4"),
    "CTranslate2": ("int8",),
}
"""What each engine runs the model in."""
_SHOWN = 200
"""Letters of an engine's own words."""
_CONVERT_CT2 = "from ctranslate2.converters.transformers import main; main()"


@dataclass(frozen=True, kw_only=True)
class Peer:
    """An engine with weights of one kind."""

    engine: str
    kind: str
    python: Path

    @property
    def name(self) -> str:
        """In a table."""
        return f"{self.engine} {self.kind}"


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What an engine makes room for."""

    threads: int
    dtype: str | None
    """float32 or bfloat16, of activations; None: as the engine has it. llama.cpp has no choice."""
    rows: int
    """That are generated together, at most."""
    length: int
    """Tokens of a row, at most."""


def find_peers(pythons: Sequence[Path]) -> list[Peer]:
    """The engines that interpreters have.

    Args:
      pythons: of environments with llama-cpp-python, OpenVINO GenAI with optimum-intel and nncf,
        or CTranslate2 with transformers and torch.

    Raises:
      ConfigError: one that cannot be run, or has none of them.
    """
    found = []
    for python in pythons:
        try:
            done = subprocess.run(
                [python, "-E", _SCRIPT], capture_output=True, text=True, check=True
            )
            names = json.loads(done.stdout)["engines"]
        except (OSError, subprocess.CalledProcessError, ValueError) as error:
            said = getattr(error, "stderr", None) or getattr(error, "strerror", None) or str(error)
            raise ConfigError(
                f"peers: {python} is not a Python interpreter with NumPy "
                f"({said.splitlines()[-1]}); "
                "give the interpreter of an environment, such as .venv-peers/openvino/bin/python"
            ) from error
        if not names:
            raise ConfigError(
                f"peers: {python} has none of llama-cpp-python, OpenVINO GenAI (with optimum-intel "
                "and nncf) and CTranslate2 (with transformers and torch); install one there, or "
                "leave it out"
            )
        found += [Peer(engine=name, kind=x, python=python) for name in names for x in _KINDS[name]]
    return found


def write_model(peer: Peer, model: Path, folder: Path) -> Path:
    """Quantize a Hugging Face directory as the engine takes it, by the engine's own converter;
    a GGUF file by `quantize_gguf`.

    Args:
      peer: the engine.
      model: the directory.
      folder: an empty one.

    Returns:
      What to hand to `started`.

    Raises:
      EngineError: the converter does not take the model; its last line of output says why.
      ConfigError, CheckpointError: see `quantize_gguf`.
    """
    if peer.engine == "llama.cpp":
        quantize_gguf(model, folder / "model.gguf", GGUF_SCHEMES[peer.kind])
        return folder / "model.gguf"
    if peer.engine == "OpenVINO":
        words = ["-m", "optimum.commands.optimum_cli", "export", "openvino", "--model", model]
        words += ["--task", "text-generation-with-past", "--library", "transformers"]
        words += ["--weight-format", peer.kind, folder]
    else:
        words = ["-c", _CONVERT_CT2, "--model", model, "--output_dir", folder]
        words += ["--quantization", peer.kind, "--force"]
    with tempfile.TemporaryFile("w+") as output:
        done = subprocess.run([peer.python, "-E", *words], stdout=output, stderr=output)
        if done.returncode:
            raise EngineError(f"{peer.name} does not convert the model: {_last(output)}")
    return folder


@dataclass
class Running:
    """An engine's process with a model loaded."""

    peer: Peer
    load_s: float
    _process: "subprocess.Popen[str]"
    _errors: IO[str]

    def score(self, tokens_T: np.ndarray) -> np.ndarray:
        """Logits [T, V] of int32 tokens, float32.

        Raises:
          EngineError: where the engine fails.
        """
        with tempfile.TemporaryDirectory(prefix="fornax-bench-quant-") as place:
            file = Path(place) / "logits.npy"
            self.ask({"tokens": tokens_T.tolist(), "file": str(file)})
            return np.load(file)

    def generate(self, rows_BT: np.ndarray, new: int) -> tuple[float, int]:
        """Seconds, and generated tokens: greedy, of prompts of one length.

        Raises:
          EngineError: where the engine fails, or makes another number of tokens.
        """
        said = self.ask({"prompts": rows_BT.tolist(), "new": new})
        if said["tokens"] != len(rows_BT) * new:
            raise EngineError(
                f"{self.peer.name} made {said['tokens']} tokens where {len(rows_BT) * new} were "
                "asked"
            )
        return said["seconds"], said["tokens"]

    def resident_bytes(self) -> int | None:
        """Of the process, that no file is behind; None where Linux does not say."""
        return self.ask({"memory": True})["bytes"]

    def ask(self, asked: dict[str, Any]) -> dict[str, Any]:
        """What the process answers to a line of JSON.

        Raises:
          EngineError: where it ends instead.
        """
        process = self._process
        assert process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            process.stdin.write(json.dumps(asked) + "\n")
            process.stdin.flush()
        return self.hear()

    def hear(self) -> dict[str, Any]:
        """Its next line of JSON.

        Raises:
          EngineError: where it ends instead.
        """
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            code = self._process.wait()
            raise EngineError(f"{self.peer.name} ended with {code}: {_last(self._errors)}")
        return json.loads(line)


@contextlib.contextmanager
def started(
    peer: Peer, model: Path, task: Literal["score", "generate"], settings: Settings
) -> Iterator[Running]:
    """A process that has loaded what `write_model` made, ended with the context.

    Raises:
      EngineError: where it cannot load it.
    """
    said = json.dumps(dataclasses.asdict(settings))
    command = [peer.python, "-E", _SCRIPT, peer.engine, task, model, said]
    with (
        tempfile.TemporaryFile("w+") as errors,
        subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True
        ) as process,
    ):
        assert process.stdin is not None
        try:
            running = Running(peer, 0.0, process, errors)
            running.load_s = running.hear()["load_s"]
            yield running
        finally:
            process.kill()
            with contextlib.suppress(BrokenPipeError):  # what it did not read before it ended
                process.stdin.close()


def _last(output: IO[str]) -> str:
    """The last line of what a process printed, as far as it is useful."""
    output.seek(0)
    lines = [line.strip() for line in output if line.strip()]
    return shorten(lines[-1], _SHOWN) if lines else "without a word"
