"""The metadata of a GGUF file under its architecture's name, each key to be taken once."""

from typing import Any

import numpy as np

from fornax.gguf import GGUFFile, Value, dequantize
from fornax.models.families.reader import ConfigReader

__all__ = ["Metadata", "llama3_divisors"]

_LLAMA3: dict[str, float] = {
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
"""Of all released models with Llama 3's scaling."""
_UNUSED = ("tensor_data_layout", "use_parallel_residual", "rope.scaling.finetuned")
"""Keys that change nothing."""


class Metadata:
    """Keys such as `llama.block_count`, called by what is behind the architecture's name."""

    def __init__(self, file: GGUFFile, name: str):
        """Read those of `file` that begin with `name` and a dot."""
        self.file = file
        values = {
            key.removeprefix(f"{name}."): _plain(value)
            for key, value in file.metadata.items()
            if key.startswith(f"{name}.")
        }
        self._reader = ConfigReader(values, f"{file.path}: {name}")
        for key in _UNUSED:
            self.take(key, None)
        self.theta = self.real("rope.freq_base", 10_000.0) or 10_000.0

    def take(self, key: str, default: Any) -> Any:
        """A value that may be missing."""
        return self._reader.take(key, default)

    def expect(self, key: str, *allowed: object) -> None:
        """Accept a key when it is absent or has one of these values.

        Raises:
          ConfigError: for another one.
        """
        self._reader.expect(key, *allowed)

    def number(self, key: str, default: int | None = None) -> int:
        """A count or a size; of what is said layer by layer the value that all have.

        Raises:
          CheckpointError: it is missing and has no default, is none, or layers differ.
        """
        value = self._reader.take(key, default)
        if isinstance(value, tuple) and len(set(value)) == 1:
            value = value[0]
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            self.file.refuse(
                f"{key}={value!r} must be a whole number, one for all layers; models whose "
                "layers differ in it are not read"
            )
        return value

    def real(self, key: str, default: float | None) -> float | None:
        """A positive number that may be missing.

        Raises:
          CheckpointError: another value.
        """
        value = self._reader.take(key, default)
        if value is not None and (not isinstance(value, float) or not 0 < value < np.inf):
            self.file.refuse(f"{key}={value!r} must be a positive number; write the file again")
        return value

    def finish(self) -> None:
        """Check that nothing was left unread.

        Raises:
          ConfigError: naming the keys that Fornax does not know.
        """
        self._reader.finish()

    @property
    def head_dim(self) -> int:
        """Width of a head.

        Raises:
          CheckpointError: values of another width.
        """
        heads = max(1, self.number("attention.head_count"))
        width = self.number("attention.key_length", self.number("embedding_length") // heads)
        for key in (
            "attention.value_length",
            "attention.key_length_swa",
            "attention.value_length_swa",
        ):
            if self.number(key, width) != width:
                self.file.refuse(
                    f"{key}={self.number(key)} is not supported; only heads of one width, {width}, "
                    "are"
                )
        return max(1, width)

    def whole_heads(self) -> None:
        """Check that heads are rotated whole.

        Raises:
          ConfigError: when a part of each is.
        """
        for key in ("rope.dimension_count", "rope.dimension_count_swa"):
            self.expect(key, self.head_dim)

    def has(self, part: str) -> bool:
        """Whether the first layer has a tensor, such as attn_q.bias."""
        return f"blk.0.{part}" in self.file.tensors

    def factors(self, name: str) -> list[float] | None:
        """The numbers of a tensor of divisors of frequencies; None where there is none.

        Raises:
          CheckpointError: when they are not one for each rotated frequency.
        """
        tensor = self.file.tensors.get(name)
        if tensor is None:
            return None
        rotated = self.number("rope.dimension_count", self.head_dim)
        if tensor.type.name != "F32" or tensor.shape != (rotated // 2,):
            self.file.refuse(
                f"{name} has shape {list(tensor.shape)} and type {tensor.type.name}, and must be "
                f"F32 [{rotated // 2}]"
            )
        values = dequantize(self.file.raw(tensor), tensor.type)[0]
        if not (np.isfinite(values) & (values > 0)).all():
            self.file.refuse(f"{name} holds divisors of frequencies that are not positive numbers")
        return [shortest(value) for value in values]

    def rope_scaling(self) -> dict[str, Any] | None:
        """What config.json says under `rope_scaling`.

        Raises:
          ConfigError: for a scaling that is not supported.
        """
        self.expect("rope.scaling.type", "none", "linear", "yarn")
        self.expect("rope.scaling.attn_factor", 1.0)
        kind = self.take("rope.scaling.type", None)
        original = self.number("rope.scaling.original_context_length", 0)
        divisors = self.factors("rope_freqs.weight")
        limit = self.number("context_length")
        factor = self._scaling_factor()
        if divisors is not None and (kind == "yarn" or factor is not None):
            self.file.refuse(
                f"rope_freqs.weight beside rope.scaling.type={kind!r} with a factor of {factor} is "
                "not supported; only one of them is"
            )
        if divisors is not None:
            return self._divisors(divisors, limit)
        if kind == "yarn":
            names = {"yarn_beta_fast": "beta_fast", "yarn_beta_slow": "beta_slow"}
            betas = {
                theirs: value
                for ours, theirs in names.items()
                if (value := self.real(f"rope.scaling.{ours}", None)) is not None
            }
            scaling = {"rope_type": "yarn", "original_max_position_embeddings": original or limit}
            return {**scaling, "factor": factor, **betas}
        return None if factor is None else {"rope_type": "linear", "factor": factor}

    def _scaling_factor(self) -> float | None:
        """How many times longer the context becomes; None where it does not."""
        for key in ("rope.scaling.factor", "rope.scale_linear"):  # the second in files of 2023
            if self.take(key, None) in (0.0, 1.0):  # zero says that there is none
                continue
            if (factor := self.real(key, None)) is not None:
                return factor
        return None

    def _divisors(self, factors: list[float], limit: int) -> dict[str, Any]:
        """Llama 3's scaling where the divisors are those it makes, else each as it is."""
        largest = max(factors)
        rotated = 2 * len(factors)
        if largest > 1:
            made = llama3_divisors(self.theta, rotated, largest, **_LLAMA3)
            if np.allclose(made, factors, rtol=1e-5, atol=0):
                return {"rope_type": "llama3", "factor": largest, **_LLAMA3}
        return {
            "rope_type": "longrope",
            "short_factor": factors,
            "long_factor": factors,
            "original_max_position_embeddings": limit,
            "attention_factor": 1.0,
        }


def llama3_divisors(
    theta: float,
    width: int,
    factor: float,
    *,
    low_freq_factor: float,
    high_freq_factor: float,
    original_max_position_embeddings: float,
) -> np.ndarray:
    """Divisors of frequencies [width / 2] as Llama 3.1 scales them: wavelengths above the original
    length are divided, those below a quarter of it are kept, and between the step is linear in
    the frequency (transformers' `_compute_llama3_parameters`)."""
    powers = theta ** -(np.arange(0, width, 2) / width)
    turns = original_max_position_embeddings * powers / (2 * np.pi)
    kept = np.clip((turns - low_freq_factor) / (high_freq_factor - low_freq_factor), 0, 1)
    return 1 / ((1 - kept) / factor + kept)


def _plain(value: Value) -> Any:
    """A value as JSON would have it; a list of layers' values as a tuple."""
    if isinstance(value, np.ndarray):
        return tuple(value.tolist())
    return shortest(value) if isinstance(value, float) else value


def shortest(value: float | np.floating) -> float:
    """The shortest decimal that float32 rounds to the same number, as config.json had it."""
    return float(str(np.float32(value)))
