"""What a cache of steps knows of a model: measured on it and kept beside it, or published.

Legend: B rows, M evaluations of a run.
"""

import dataclasses
import json
import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

import jax
import numpy as np
from scipy.optimize import nnls

from fornax.config import did_you_mean
from fornax.config.errors import CheckpointError, ConfigError
from fornax.config.files import write_whole
from fornax.diffusion.lora import ByRow
from fornax.diffusion.models.transformer import Transformer, TransformerConfig
from fornax.diffusion.pipelines.pipeline import Job, Pipeline
from fornax.diffusion.pipelines.step_cache import ALWAYS, Recorder, StepCache

__all__ = [
    "CALIBRATION",
    "CacheName",
    "Calibration",
    "CountedScan",
    "Measured",
    "calibrate",
    "parse_cache",
    "with_cache",
]

CacheName = Literal["teacache", "magcache"]
CALIBRATION = "step_cache.json"
"""The file beside a model."""
THRESHOLDS: dict[CacheName, tuple[float, ...]] = {
    "teacache": (0.1, 0.2, 0.4),
    "magcache": (0.03, 0.06, 0.12),
}
"""What a calibration tries; the second is the default."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Calibration:
    """Of a model: `StepCache`'s numbers; empty where they are not known."""

    coefficients: tuple[float, ...] = ()
    magnitudes: tuple[float, ...] = ()

    def save(self, path: Path) -> None:
        """Write it as JSON.

        Raises:
          ConfigError: where nothing can be written.
        """
        try:
            write_whole(path, json.dumps(dataclasses.asdict(self), indent=1) + "\n")
        except OSError as error:
            raise ConfigError(
                f"cannot write {path}: {error.strerror or error}; give a folder that can be written"
            ) from None

    @classmethod
    def load(cls, path: Path) -> "Calibration":
        """Read what `save` wrote.

        Raises:
          CheckpointError: a damaged file.
        """
        try:
            said = json.loads(path.read_text(encoding="utf-8"))
            names = [field.name for field in dataclasses.fields(cls)]
            found = {name: tuple(float(number) for number in said[name]) for name in names}
            if not all(math.isfinite(number) for numbers in found.values() for number in numbers):
                raise ValueError("a number is not finite")
            return cls(**found)
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise CheckpointError(
                f"{path} cannot be read: {error}; make it again with fornax diffusion calibrate"
            ) from None


_PUBLISHED: Mapping[tuple[str, int, tuple[int, ...]], Calibration] = {
    # TeaCache's repository (Liu et al. 2024); MagCache's (Ma et al. 2025), of 28 steps.
    ("FluxTransformer2DModel", 3072, (19, 38)): Calibration(
        coefficients=(498.651651, -283.781631, 55.8554382, -3.82021401, 0.264230861),
        magnitudes=(
            *(1.0, 1.21094, 1.11719, 1.07812, 1.0625, 1.03906, 1.03125, 1.03906, 1.02344, 1.03125),
            *(1.02344, 0.98047, 1.01562, 1.00781, 1.0, 1.00781, 1.0, 1.00781, 1.0, 1.0, 0.99609),
            *(0.99609, 0.98047, 0.98828, 0.96484, 0.95703, 0.93359, 0.89062),
        ),
    ),
    # TeaCache's repository.
    ("HunyuanVideoTransformer3DModel", 3072, (20, 40)): Calibration(
        coefficients=(733.226126, -401.131952, 67.5869174, -3.149878, 0.096123789)
    ),
    # vLLM-Omni's (2026).
    ("QwenImageTransformer2DModel", 3072, (60,)): Calibration(
        coefficients=(-450.0, 280.0, -45.0, 3.2, -0.02)
    ),
}
"""By class, width and numbers of blocks. Those of Wan are of another signal, the embedding of the
time, and so not here."""


def _published(config: TransformerConfig) -> Calibration:
    key = (config.class_name, config.width, tuple(run.count for run in config.blocks))
    return _PUBLISHED.get(key, Calibration())


def with_cache(
    pipeline: Pipeline, folder: str | Path, kind: CacheName, threshold: float
) -> Pipeline:
    """A pipeline with a cache of steps: calibrated beside the model, or with published numbers.

    Args:
      pipeline: of a transformer.
      folder: where the model is, and perhaps `CALIBRATION`.
      kind: how it decides.
      threshold: see `StepCache`.

    Raises:
      ConfigError: a denoiser that is not a transformer, or no numbers for the model.
      CheckpointError: a damaged calibration.
    """
    check_cacheable(pipeline)
    found = _published(_without_adapters(pipeline).config)
    if (Path(folder) / CALIBRATION).exists():
        found = Calibration.load(Path(folder) / CALIBRATION)
    numbers = found.coefficients if kind == "teacache" else found.magnitudes
    if not numbers:
        raise ConfigError(
            f"{kind} has no numbers for this model: none are published for its sizes, and there is "
            f"no {Path(folder) / CALIBRATION}; measure them with fornax diffusion calibrate "
            f"{folder} --prompt TEXT"
        )
    return dataclasses.replace(pipeline, cache=_cache(found, kind, threshold))


def parse_cache(said: str) -> tuple[CacheName, float]:
    """A cache's kind and threshold: `teacache`, `magcache:0.1`; 0.2 and 0.06 where none is said.

    Raises:
      ConfigError: another name, or a threshold below 0.
    """
    name, colon, number = said.partition(":")
    for kind, usual in THRESHOLDS.items():
        if name != kind:
            continue
        try:
            threshold = float(number) if colon else usual[1]
        except ValueError:
            threshold = math.nan
        if not (math.isfinite(threshold) and threshold >= 0):
            raise ConfigError(
                f"cache {said!r}: the threshold must be a number of at least 0, where nothing is "
                f"left out; {kind}:{usual[1]:g} is usual"
            )
        return kind, threshold
    raise ConfigError(
        f"cache {said!r} is not known; {did_you_mean(name, THRESHOLDS)}, perhaps with a "
        "threshold, such as teacache:0.3"
    )


def check_cacheable(pipeline: Pipeline) -> None:
    """Refuse a denoiser without blocks that a cache may leave out.

    Raises:
      ConfigError: it is not a transformer.
    """
    denoiser = _without_adapters(pipeline)
    if not isinstance(denoiser, Transformer):
        raise ConfigError(
            f"{pipeline.name} is drawn by a {type(denoiser).__name__}, and caches of steps are for "
            "transformers; leave the cache out"
        )


def _without_adapters(pipeline: Pipeline) -> Any:
    denoiser = pipeline.denoiser
    return denoiser.denoiser if isinstance(denoiser, ByRow) else denoiser


def _cache(found: Calibration, kind: CacheName, threshold: float) -> StepCache:
    return StepCache(
        kind=kind,
        threshold=threshold,
        coefficients=found.coefficients,
        magnitudes=found.magnitudes,
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Measured:
    """What a cache of steps did."""

    kind: CacheName
    threshold: float
    ran: int
    """Evaluations at which the blocks ran."""
    evaluations: int
    """All of them."""
    error: float | None
    """Root of the mean squared difference of the latents from those without a cache, over the root
    of their mean square; None where nothing was drawn without."""

    def __str__(self) -> str:
        """A line about it."""
        left_out = self.evaluations - self.ran
        said = (
            f"{self.kind} at {self.threshold:g} left out {left_out} of {self.evaluations} "
            f"evaluations ({left_out / self.evaluations:.0%})"
        )
        return said if self.error is None else f"{said}, error {self.error:.2%}"


class CountedScan:
    """`Pipeline.scan` with its cache, and what that did."""

    def __init__(
        self, pipeline: Pipeline, job: Job, plain: Callable[[Job], jax.Array] | None = None
    ):
        """Nothing is drawn yet.

        Args:
          pipeline: with a cache.
          job: all that is to be drawn.
          plain: draws without a cache, to compare with.
        """
        assert pipeline.cache is not None, "a pipeline of `with_cache`"
        assert job.asks is not None, "a job of `plan` with that pipeline"
        self._cache, self._plain, self._evaluations = pipeline.cache, plain, len(job.asks)
        self._draw = pipeline.keeping_scan(job.table, pipeline.cache, job.asks)
        self._calls = self._ran = 0
        self._squares = np.zeros(2)

    def __call__(self, job: Job) -> jax.Array:
        """Draw some of the rows -> latents float32 [B, *X]."""
        latents_BX, kept = self._draw(job)
        self._calls, self._ran = self._calls + 1, self._ran + int(np.max(kept.ran_B))
        if self._plain is not None:
            wanted_BX = np.asarray(self._plain(job), np.float64)
            difference_BX = np.asarray(latents_BX, np.float64) - wanted_BX
            self._squares += np.sum(difference_BX**2), np.sum(wanted_BX**2)
        return latents_BX

    def measured(self) -> Measured:
        """What the cache did so far."""
        difference, whole = self._squares
        return Measured(
            kind=self._cache.kind,
            threshold=self._cache.threshold,
            ran=self._ran,
            evaluations=self._calls * self._evaluations,
            error=None if self._plain is None else float(np.sqrt(difference / whole)),
        )


def calibrate(pipeline: Pipeline, job: Job) -> tuple[Calibration, Iterator[Measured]]:
    """Measure a model's numbers in a run without a cache, and then what caches do with them.

    Magnitudes are means over tokens and rows, as diffusers measures MagCache's. TeaCache's
    polynomial is of degree 4, fitted by least squares with no coefficient below 0, so that it rises
    beyond what was measured; it predicts the residual's relative change, which is what a cache
    that uses the residual again is wrong by.

    Args:
      pipeline: of a transformer.
      job: whole, from noise; of several prompts it says more.

    Raises:
      ConfigError: a denoiser that is not a transformer, fewer than 4 evaluations, values that are
          not
        finite.
    """
    check_cacheable(pipeline)
    evaluations = job.table.evaluations
    if evaluations < 4:
        raise ConfigError(
            f"a run of {evaluations} evaluations leaves a cache nothing to leave out; calibrate "
            "with at least 4 steps"
        )
    always = np.full(evaluations, ALWAYS, np.int8)
    latents_BX, notes = pipeline.keeping_scan(job.table, Recorder(evaluations), always)(job)
    ratios_BM, changes_BM, moves_BM = (
        np.asarray(each, np.float64)[:, 1:]
        for each in (notes.ratios_BM, notes.changes_BM, notes.moves_BM)
    )
    if not all(np.isfinite(each).all() for each in (ratios_BM, changes_BM, moves_BM)):
        raise ConfigError(
            "the run has values that are not finite: the weights are damaged or were never "
            "trained, or overflow in their dtype; try --dtype float32, and check the files"
        )
    coefficients, _ = nnls(np.vander(changes_BM.ravel(), 5), moves_BM.ravel())
    found = Calibration(
        coefficients=tuple(map(float, coefficients)),
        magnitudes=(1.0, *map(float, ratios_BM.mean(0))),
    )

    def measured() -> Iterator[Measured]:
        for kind, thresholds in THRESHOLDS.items():
            for threshold in thresholds:
                cache = _cache(found, kind, threshold)
                asks = cache.asks(evaluations, evaluations)
                wanted = iter(latents_BX[:, None])
                draw = CountedScan(
                    dataclasses.replace(pipeline, cache=cache),
                    dataclasses.replace(job, asks=asks),
                    lambda job, wanted=wanted: next(wanted),
                )
                # One by one: blocks that one image of a batch needs run for all of it.
                for row in range(len(latents_BX)):
                    draw(job.rows(row, row + 1))
                yield draw.measured()

    return found, measured()
