"""Noise schedules: which noise levels a sampler visits, as float64 tables on the host.

A noised example is `alpha * data + sigma * noise`. Three paths from noise to data are in use:

- `vp` (variance preserving): alpha**2 + sigma**2 = 1, the discrete chains of DDPM and its variants;
- `flow` (rectified flow): alpha = 1 - sigma;
- `ve` (variance exploding): alpha = 1, as EDM has it.

Samplers that work in k-diffusion's coordinates (`x / alpha` at noise level `sigma / alpha`) are the
same numbers in these; nothing here scales a network's input.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, Literal, TypeVar, cast

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fornax.config.errors import ConfigError

__all__ = [
    "SPACINGS",
    "Discrete",
    "Path",
    "Schedule",
    "Spacing",
    "cosine_betas",
    "distilled_timesteps",
    "edm",
    "flow",
    "linear_betas",
    "resolution_shift",
    "scaled_linear_betas",
    "shifted",
    "zero_terminal_snr",
]

Path = Literal["vp", "flow", "ve"]
Spacing = Literal["leading", "trailing", "linspace", "simple", "karras", "exponential", "beta"]
Float = NDArray[np.float64]
Value = TypeVar("Value")


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Schedule:
    """The noise levels of a run of N steps, from noise to data.

    Attributes:
      path: how alpha and sigma go together; Heun's method and `flow` predictions read it.
      t: (N + 1,) float64, what the network receives, a timestep of the chain, 1000 sigma for flows,
        log(sigma) / 4 for EDM. The last is never asked for.
      alpha: (N + 1,) float64, the data's coefficient.
      sigma: (N + 1,) float64, the noise's coefficient; the last is 0 unless the run stops early.

    Raises:
      ConfigError: no step, or noise that does not fall at every step.
    """

    path: Path
    t: Float
    alpha: Float
    sigma: Float

    def __post_init__(self) -> None:
        shape = self.t.shape
        if len(shape) != 1 or shape[0] < 2 or not shape == self.alpha.shape == self.sigma.shape:
            raise ConfigError(
                f"a schedule has t, alpha and sigma of shapes {shape}, {self.alpha.shape} and "
                f"{self.sigma.shape}; it needs one row of steps + 1 values for each, steps >= 1"
            )
        # Compared without a division: alpha is 0 at the start of a chain with zero terminal SNR.
        falls = self.sigma[1:] * self.alpha[:-1] < self.sigma[:-1] * self.alpha[1:]
        if not falls.all():
            step = int(np.argmin(falls))
            raise ConfigError(
                f"noise does not fall between steps {step} and {step + 1} (sigma "
                f"{self.sigma[step]:g} and {self.sigma[step + 1]:g}); take fewer steps, or give "
                "sigmas in falling order"
            )

    @property
    def steps(self) -> int:
        """The number of steps, N."""
        return len(self.t) - 1

    def from_strength(self, strength: float) -> "Schedule":
        """The last `strength` of the steps, for a start from an image (see `sampling.noised`).

        A part of a step is left out, but of a flow it is run whole, as diffusers has it.

        Args:
          strength: in (0, 1]; 1 keeps every step, and so nothing of the image but its mean.

        Raises:
          ConfigError: `strength` outside (0, 1], or so small that no step is left.
        """
        share = self.steps * strength if 0 < strength <= 1 else 0
        kept = self.steps - int(self.steps - share) if self.path == "flow" else int(share)
        if kept < 1:
            raise ConfigError(
                f"strength={strength:g} keeps no step of {self.steps}; it must lie in "
                f"[{1 / self.steps:.3g}, 1]"
            )
        first = self.steps - kept
        return dataclasses.replace(
            self, t=self.t[first:], alpha=self.alpha[first:], sigma=self.sigma[first:]
        )


def linear_betas(start: float = 1e-4, end: float = 0.02, timesteps: int = 1000) -> Float:
    """(timesteps,) variances of DDPM's chain (Ho et al. 2020), evenly spaced."""
    return np.linspace(start, end, timesteps)


def scaled_linear_betas(start: float = 0.00085, end: float = 0.012, timesteps: int = 1000) -> Float:
    """(timesteps,) variances of latent diffusion's chain: their square roots evenly spaced."""
    return np.linspace(start**0.5, end**0.5, timesteps) ** 2


def cosine_betas(timesteps: int = 1000, max_beta: float = 0.999) -> Float:
    """(timesteps,) variances of the squared-cosine chain (Nichol and Dhariwal 2021)."""
    bar = np.cos((np.arange(timesteps + 1) / timesteps + 0.008) / 1.008 * np.pi / 2) ** 2
    return np.minimum(1 - bar[1:] / bar[:-1], max_beta)


def zero_terminal_snr(betas: Float) -> Float:
    """The chain shifted and scaled so that its last step is pure noise (Lin et al. 2024, alg. 1).

    It needs v-prediction and trailing spacing: of pure noise, the noise says nothing.
    """
    root = np.sqrt(np.cumprod(1 - betas))
    root = (root - root[-1]) * root[0] / (root[0] - root[-1])
    bar = root**2
    return 1 - np.concatenate([bar[:1], bar[1:] / bar[:-1]])


def karras(steps: int, low: float, high: float, rho: float = 7.0) -> Float:
    """Falling sigmas evenly spaced in sigma**(1/rho) (Karras et al. 2022, eq. 5)."""
    return np.linspace(high ** (1 / rho), low ** (1 / rho), steps) ** rho


def exponential(steps: int, low: float, high: float) -> Float:
    """Falling sigmas evenly spaced in log sigma."""
    return np.exp(np.linspace(np.log(high), np.log(low), steps))


def beta(steps: int, low: float, high: float, a: float = 0.6, b: float = 0.6) -> Float:
    """Falling sigmas at even quantiles of a beta distribution (Lee et al. 2024)."""
    from scipy.special import betaincinv

    return low + (high - low) * betaincinv(a, b, 1 - np.linspace(0, 1, steps))


SPACINGS: dict[str, Callable[[int, float, float], Float]] = {
    "karras": karras,
    "exponential": exponential,
    "beta": beta,
}
"""Spacings of sigmas between two ends: (steps, low, high) to (steps,), falling."""


def _timesteps(spacing: str, steps: int, total: int, offset: int) -> Float:
    match spacing:
        case "linspace":  # "normal" elsewhere
            found = np.linspace(0, total - 1, steps)[::-1]
        case "leading":
            found = np.arange(steps)[::-1] * (total // steps) + offset
        case "trailing":
            found = np.arange(total, 0, -total / steps)[:steps] - 1
        case "simple":
            found = total - 1 - np.floor(np.arange(steps) * total / steps)
        case _:
            known = ", ".join(["linspace", "leading", "trailing", "simple", *SPACINGS])
            raise ConfigError(f"spacing={spacing!r} is not known; use one of {known}")
    return np.round(found).astype(np.float64)


@dataclasses.dataclass(frozen=True, eq=False)
class Discrete:
    """A chain of T noise levels, from which samplers take some.

    Attributes:
      betas: (T,) float64 variances in (0, 1]; the last may be 1 (zero terminal SNR).
    """

    betas: Float

    def __post_init__(self) -> None:
        if self.betas.ndim != 1 or not ((self.betas > 0) & (self.betas <= 1)).all():
            raise ConfigError(
                f"betas of shape {self.betas.shape} lie in [{self.betas.min():g}, "
                f"{self.betas.max():g}]; they are one row of variances in (0, 1]"
            )

    @property
    def cumulative(self) -> Float:
        """(T,) float64 products of 1 - beta: the squares of alpha."""
        return np.asarray(np.cumprod(1 - self.betas), np.float64)

    def levels(self, t: ArrayLike) -> tuple[Float, Float]:
        """Alpha and sigma at timesteps, which are rounded to whole ones and start at 0."""
        bar = self.cumulative[np.round(np.asarray(t)).astype(int)]
        return np.sqrt(bar), np.sqrt(1 - bar)

    def at(self, t: ArrayLike, last: Literal["zero", "smallest"] = "zero") -> Schedule:
        """The schedule through given timesteps, falling.

        Args:
          t: (N,) whole timesteps in [0, T).
          last: where the run ends: without noise, or at the chain's smallest noise, which
            leaves that noise in the result and is there for models trained to end so. A last step
            that begins there would change nothing and is left out.
        """
        t = np.asarray(t, np.float64)
        if t.size == 0 or t.min() < 0 or t.max() >= len(self.betas):
            raise ConfigError(
                f"timesteps {t.tolist()} are not all in [0, {len(self.betas)}); "
                "use fewer steps or a smaller offset"
            )
        return self._ending(t, *self.levels(t), last)

    def schedule(
        self,
        steps: int,
        spacing: Spacing = "trailing",
        *,
        offset: int = 0,
        last: Literal["zero", "smallest"] = "zero",
    ) -> Schedule:
        """A schedule of `steps` steps.

        Args:
          steps: from 1 to T.
          spacing: timesteps by a rule (`linspace`, which other programs call normal, `leading`,
            `trailing`, `simple`), or sigmas by a rule between the chain's ends (`karras`,
            `exponential`, `beta`), whose timesteps are interpolated in log sigma.
          offset: added to the timesteps of `leading`.
          last: see `at`.

        Raises:
          ConfigError: steps out of range; or sigmas by a rule for a chain that starts at
            infinite noise.
        """
        total = len(self.betas)
        if not 1 <= steps <= total:
            raise ConfigError(f"steps={steps} of a chain of {total}; use 1 to {total}")
        if spacing not in SPACINGS:
            return self.at(_timesteps(spacing, steps, total, offset), last)
        bar = self.cumulative
        if bar[-1] <= 0:
            raise ConfigError(
                f"spacing={spacing!r} lies between the chain's smallest and greatest sigma, and a "
                "chain with zero terminal SNR has no greatest; use spacing='trailing'"
            )
        ratios = np.sqrt((1 - bar) / bar)
        ratio = SPACINGS[spacing](steps, ratios[0], ratios[-1])
        alpha = 1 / np.sqrt(1 + ratio**2)
        t = np.interp(np.log(ratio), np.log(ratios), np.arange(total))
        return self._ending(t, alpha, ratio * alpha, last)

    def _ending(self, t: Float, alpha: Float, sigma: Float, last: str) -> Schedule:
        end = (1.0, 0.0) if last == "zero" else tuple(float(v[0]) for v in self.levels([0]))
        if last == "smallest" and t[-1] == 0:
            t, alpha, sigma = t[:-1], alpha[:-1], sigma[:-1]
        return Schedule(
            path="vp",
            t=np.append(t, 0.0),
            alpha=np.append(alpha, end[0]),
            sigma=np.append(sigma, end[1]),
        )


def distilled_timesteps(steps: int, original: int = 50, timesteps: int = 1000) -> Float:
    """(steps,) timesteps of a consistency model distilled on `original` of them (LCM, TCD).

    Raises:
      ConfigError: more steps than were distilled.
    """
    if not 1 <= steps <= original <= timesteps:
        raise ConfigError(
            f"steps={steps} of original={original} of timesteps={timesteps}; each must be at most "
            "the next, and at least 1"
        )
    trained = (np.arange(1, original + 1) * (timesteps // original) - 1)[::-1]
    chosen = np.floor(np.linspace(0, original, steps, endpoint=False)).astype(int)
    return np.asarray(trained[chosen], np.float64)


def shifted(sigma: Value, shift: float) -> Value:
    """A flow's noise level moved towards noise, shift s: s sigma / (1 + (s - 1) sigma).

    Esser et al. 2024, eq. 23. Also for traced arrays. Flux's `mu` is log(shift).
    """
    level = cast("Any", sigma)
    return shift * level / (1 + (shift - 1) * level)


def resolution_shift(
    tokens: int,
    *,
    base_tokens: int = 256,
    max_tokens: int = 4096,
    base: float = 0.5,
    top: float = 1.15,
) -> float:
    """Shift for an image of `tokens` patches: exp of a line through (base_tokens, base) and on.

    The defaults are Flux's; the logarithm of what is returned is what its files call mu.
    """
    return float(np.exp(base + (top - base) * (tokens - base_tokens) / (max_tokens - base_tokens)))


def flow(
    steps: int,
    *,
    shift: float = 1.0,
    first: float = 1.0,
    last: float | None = None,
    terminal: float | None = None,
    spacing: Literal["linspace", "karras", "exponential", "beta"] = "linspace",
    timesteps: int = 1000,
) -> Schedule:
    """A rectified flow's schedule: sigmas 1, 1 - 1/N, ... 1/N of `first`, shifted, then 0.

    Args:
      steps: N.
      shift: a constant, or `resolution_shift` of the image; 1 for none.
      first: the greatest sigma before the shift; solvers in log(alpha / sigma) begin below 1.
      last: the least sigma before the shift and before 0; None for 1/N.
      terminal: stretches the shifted sigmas so that the last before 0 is this (LTX); at least two
        steps, since one has nothing to stretch.
      spacing: of the shifted sigmas between their ends.
      timesteps: t is sigma times this.

    Raises:
      ConfigError: a value out of its range.
    """
    if steps < 1 or shift <= 0 or not 0 < first <= 1:
        raise ConfigError(
            f"steps={steps}, shift={shift:g}, first={first:g}; use steps >= 1, shift > 0 and first "
            "in (0, 1]"
        )
    sigma = shifted(np.linspace(first, first / steps if last is None else last, steps), shift)
    if terminal is not None:
        if not 0 < terminal < 1 or steps < 2:
            raise ConfigError(
                f"terminal={terminal:g} with steps={steps}; terminal lies in (0, 1) and stretches "
                "two steps or more; leave it out for one step"
            )
        sigma = 1 - (1 - sigma) * (1 - terminal) / (1 - sigma[-1])
    if spacing in SPACINGS:
        sigma = SPACINGS[spacing](steps, sigma[-1], sigma[0])
    elif spacing != "linspace":
        known = ", ".join(["linspace", *SPACINGS])
        raise ConfigError(f"spacing={spacing!r} is not known for a flow; use one of {known}")
    sigma = np.append(sigma, 0.0)
    return Schedule(path="flow", t=timesteps * sigma, alpha=1 - sigma, sigma=sigma)


def edm(
    steps: int,
    *,
    low: float = 0.002,
    high: float = 80.0,
    spacing: Literal["karras", "exponential", "beta"] = "karras",
) -> Schedule:
    """EDM's schedule (Karras et al. 2022): alpha 1, sigmas from `high` to `low`, then 0.

    Raises:
      ConfigError: `low` and `high` out of order, or an unknown spacing.
    """
    if steps < 1 or not 0 < low < high or spacing not in SPACINGS:
        raise ConfigError(
            f"steps={steps}, low={low:g}, high={high:g}, spacing={spacing!r}; use steps >= 1, "
            f"0 < low < high and one of {', '.join(SPACINGS)}"
        )
    sigma = SPACINGS[spacing](steps, low, high)
    return Schedule(
        path="ve",
        t=np.append(np.log(sigma) / 4, 0.0),
        alpha=np.ones(steps + 1),
        sigma=np.append(sigma, 0.0),
    )
