"""scheduler_config.json of diffusers as a schedule, a sampler and what the network predicts."""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, cast, get_args

import numpy as np

from fornax.config import did_you_mean
from fornax.config.errors import ConfigError
from fornax.config.json_files import read_json_object
from fornax.diffusion.objectives import BETAS, Betas, Chain, Objective
from fornax.diffusion.predictions import Prediction
from fornax.diffusion.samplers import SAMPLERS, Table, dpmpp, lcm, tcd, unipc
from fornax.diffusion.schedules import (
    Discrete,
    Schedule,
    Spacing,
    distilled_timesteps,
    flow,
    resolution_shift,
    zero_terminal_snr,
)

__all__ = ["Scheduler", "read_scheduler"]

_PREDICTIONS: Mapping[str, Prediction] = {
    "epsilon": "noise",
    "sample": "data",
    "v_prediction": "v",
    "flow_prediction": "flow",
}
_BETAS: Mapping[str, Betas] = {
    "linear": "linear",
    "scaled_linear": "scaled_linear",
    "squaredcos_cap_v2": "cosine",
}
_LEADING = {"DDIMScheduler", "DDPMScheduler", "PNDMScheduler", "LCMScheduler", "TCDScheduler"}
"""Classes whose timesteps are `leading` where the file does not say."""

_COUNTS = (
    "num_train_timesteps",
    "steps_offset",
    "solver_order",
    "original_inference_steps",
    "base_image_seq_len",
    "max_image_seq_len",
)
_NUMBERS = (
    "beta_start",
    "beta_end",
    "shift",
    "flow_shift",
    "base_shift",
    "max_shift",
    "shift_terminal",
    "clip_sample_range",
)
"""Settings by their type, beside those that begin with `use_`."""
_MULTISTEP = {"DPMSolverMultistepScheduler", "UniPCMultistepScheduler"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Scheduler:
    """What a scheduler's file says.

    Attributes:
      prediction: what the network's output is.
      schedule: steps and the number of patches of a sample to the noise levels.
      sampler: of a schedule.
      objective: the number of patches to what such a network is trained with. Raises ConfigError
        for a chain that `objectives.Chain` does not say.
      clip: bounds of the data that the network claims, or None.
    """

    prediction: Prediction
    schedule: Callable[[int, int], Schedule]
    sampler: Callable[[Schedule], Table]
    objective: Callable[[int], Objective]
    clip: float | None = None


def read_scheduler(
    folder: str | Path, dynamic_shift: Callable[[int, int], float] | None = None
) -> Scheduler:
    """The scheduler of a pipeline's `scheduler` folder.

    Args:
      folder: with scheduler_config.json.
      dynamic_shift: of steps and patches, the shift of a flow whose file asks for one by
        resolution; None for `resolution_shift` with the file's numbers.

    Raises:
      CheckpointError: there is no readable scheduler_config.json.
      ConfigError: a class or a setting that is not known here.
    """
    file = Path(folder) / "scheduler_config.json"
    values = read_json_object(file)
    name = values.get("_class_name", "")
    if name not in _SAMPLERS:
        raise ConfigError(
            f"{file}: scheduler {name!r} is not known; {did_you_mean(str(name), _SAMPLERS)}"
        )
    _check_kinds(values, file)
    if values.get("thresholding"):
        raise ConfigError(f"{file}: thresholding is not supported; set it to false")
    if name == "SCMScheduler":
        return _consistency(values, str(file))
    if name.startswith("FlowMatch") or values.get("use_flow_sigmas"):
        return _flow(name, values, str(file), dynamic_shift)
    return _chain(name, values, str(file))


def _check_kinds(values: Mapping[str, Any], file: Path) -> None:
    """Refuse settings of another type than their own."""
    kinds = dict.fromkeys(_COUNTS, int) | dict.fromkeys(_NUMBERS, float)
    kinds |= dict.fromkeys((key for key in values if key.startswith("use_")), bool)
    for key in sorted(kinds.keys() & values.keys()):
        value, kind = values[key], kinds[key]
        if value is None and (key == "shift_terminal" or kind is bool):
            continue
        whole = isinstance(value, int) and not isinstance(value, bool)
        fits = {bool: isinstance(value, bool), int: whole, float: whole or isinstance(value, float)}
        if not fits[kind]:
            words = {bool: "true or false", int: "a whole number", float: "a number"}[kind]
            raise ConfigError(f"{file}: {key}={value!r} is not {words}; write one, or leave it out")
    spacing = values.get("timestep_spacing")
    if spacing is not None and spacing not in get_args(Spacing):
        raise ConfigError(
            f"{file}: timestep_spacing={spacing!r}; use one of {', '.join(get_args(Spacing))}"
        )


def _chain(name: str, values: Mapping[str, Any], where: str) -> Scheduler:
    """A discrete chain: betas, and the timesteps or sigmas that are taken of it."""
    total = values.get("num_train_timesteps", 1000)
    kind = values.get("beta_schedule", "linear")
    first, last = values.get("beta_start", 1e-4), values.get("beta_end", 0.02)
    if values.get("trained_betas") is not None:
        betas = np.asarray(values["trained_betas"], np.float64)
    elif kind in _BETAS:
        betas = BETAS[_BETAS[kind]](first, last, total)
    else:
        raise ConfigError(f"{where}: beta_schedule={kind!r}; use one of {', '.join(_BETAS)}")
    if values.get("rescale_betas_zero_snr"):
        betas = zero_terminal_snr(betas)
    chain, spacing = Discrete(betas), _spacing(name, values)
    # A last sigma that is not zero leaves noise: only files that ask for it get it.
    ends = values.get("set_alpha_to_one", name != "PNDMScheduler")
    ends = ends and values.get("final_sigmas_type", "zero") == "zero"
    offset = values.get("steps_offset", 0)

    def schedule(steps: int, tokens: int) -> Schedule:
        if name in ("LCMScheduler", "TCDScheduler"):
            original = values.get("original_inference_steps", 50)
            return chain.at(distilled_timesteps(steps, original, total))
        last = "zero" if ends else "smallest"
        if name not in _MULTISTEP or spacing not in ("linspace", "leading"):
            return chain.schedule(steps, spacing, offset=offset, last=last)
        # Of one timestep more they leave out the last.
        more = chain.schedule(steps + 1, spacing, offset=offset, last=last)
        if more.steps == steps:
            return more
        t, alpha, sigma = (np.delete(x, -2) for x in (more.t, more.alpha, more.sigma))
        return dataclasses.replace(more, t=t, alpha=alpha, sigma=sigma)

    def sampler(schedule: Schedule) -> Table:
        if name == "TCDScheduler":
            return tcd(schedule, chain.levels)
        return _SAMPLERS[name](values)(schedule)

    def objective(tokens: int) -> Objective:
        if values.get("trained_betas") is not None:
            raise ConfigError(
                f"{where}: trained_betas are not tuned with; say them as beta_schedule, beta_start "
                "and beta_end"
            )
        zero_snr = bool(values.get("rescale_betas_zero_snr"))
        return Objective(
            path="discrete",
            prediction=_prediction(values, "epsilon", where),
            density="uniform",
            chain=Chain(betas=_BETAS[kind], first=first, last=last, steps=total, zero_snr=zero_snr),
        )

    clips = values.get("clip_sample", name in ("DDPMScheduler", "DDIMScheduler"))
    return Scheduler(
        prediction=_prediction(values, "epsilon", where),
        schedule=schedule,
        sampler=sampler,
        objective=objective,
        clip=float(values.get("clip_sample_range", 1.0)) if clips else None,
    )


def _flow(
    name: str,
    values: Mapping[str, Any],
    where: str,
    dynamic_shift: Callable[[int, int], float] | None,
) -> Scheduler:
    """A rectified flow: sigmas, shifted by a constant or by the number of patches."""
    total = values.get("num_train_timesteps", 1000)
    constant = values.get("shift", values.get("flow_shift", 1.0))
    spacing: Any = _by_rule(values) or "linspace"
    terminal = values.get("shift_terminal")
    below = name == "DPMSolverMultistepScheduler"  # whose sigmas begin there
    first = 1 - 1 / total if below else 1.0
    unipc = name == "UniPCMultistepScheduler"
    if values.get("time_shift_type", "exponential") != "exponential":
        raise ConfigError(f"{where}: time_shift_type must be exponential")
    for key in ("invert_sigmas", "stochastic_sampling"):
        if values.get(key):
            raise ConfigError(f"{where}: {key} is not supported; set it to false")

    def shift_of(tokens: int) -> float:
        if not values.get("use_dynamic_shifting"):
            return constant
        return resolution_shift(
            tokens,
            base_tokens=values.get("base_image_seq_len", 256),
            max_tokens=values.get("max_image_seq_len", 4096),
            base=values.get("base_shift", 0.5),
            top=values.get("max_shift", 1.15),
        )

    def schedule(steps: int, tokens: int) -> Schedule:
        follows = values.get("use_dynamic_shifting") and dynamic_shift is not None
        shift = dynamic_shift(steps, tokens) if follows else shift_of(tokens)
        end = terminal if steps > 1 else None  # one step has nothing to stretch
        # UniPC's would continue to 1 / total.
        last = 1 - (1 - 1 / total) * (steps - 1) / steps if unipc else None
        found = flow(
            steps,
            shift=shift,
            first=first,
            last=last,
            terminal=end,
            spacing=spacing,
            timesteps=total,
        )
        if unipc:  # whose corrector weighs the logarithm of the first alpha
            sigma = np.minimum(found.sigma, 1 - 1e-6)
            found = dataclasses.replace(found, sigma=sigma, alpha=1 - sigma, t=total * sigma)
        # What these classes tell the network are whole timesteps.
        return dataclasses.replace(found, t=np.floor(found.t)) if below or unipc else found

    return Scheduler(
        prediction=_prediction(values, "flow_prediction", where),
        schedule=schedule,
        sampler=lambda schedule: _SAMPLERS[name](values)(schedule),
        objective=lambda tokens: Objective(
            prediction=_prediction(values, "flow_prediction", where), shift=shift_of(tokens)
        ),
    )


_SCM_SECOND = 1.3
"""The angle of the second of two steps (SANA-Sprint, Chen et al. 2025)."""


def _consistency(values: Mapping[str, Any], where: str) -> Scheduler:
    """TrigFlow's angles, from a quarter turn to 0, of a network whose claims are noised again.

    At the angle a the sample is cos(a) data + sin(a) noise (Lu and Song 2024), which over
    cos(a) + sin(a) is a flow's, whose velocity the network predicts (SANA-Sprint, Chen et al.
    2025).
    """
    total = values.get("num_train_timesteps", 1000)
    if values.get("prediction_type", "trigflow") != "trigflow":
        raise ConfigError(f"{where}: prediction_type must be trigflow")

    def schedule(steps: int, tokens: int) -> Schedule:
        angles = np.linspace(np.pi / 2, 0, steps + 1)
        if steps == 2:
            angles[1] = _SCM_SECOND
        sigma = np.sin(angles) / (np.cos(angles) + np.sin(angles))
        sigma[0], sigma[-1] = 1.0, 0.0
        return Schedule(path="flow", t=total * sigma, alpha=1 - sigma, sigma=sigma)

    return Scheduler(
        prediction="flow",
        schedule=schedule,
        sampler=_SAMPLERS["SCMScheduler"](values),
        objective=lambda tokens: Objective(prediction="flow"),
    )


def _prediction(values: Mapping[str, Any], default: str, where: str) -> Prediction:
    said = values.get("prediction_type", default)
    if said not in _PREDICTIONS:
        raise ConfigError(
            f"{where}: prediction_type={said!r}; use one of {', '.join(_PREDICTIONS)}"
        )
    return _PREDICTIONS[said]


def _by_rule(values: Mapping[str, Any]) -> str | None:
    rules = [r for r in ("karras", "exponential", "beta") if values.get(f"use_{r}_sigmas")]
    return rules[0] if rules else None


def _spacing(name: str, values: Mapping[str, Any]) -> Spacing:
    usual = "leading" if name in _LEADING else "linspace"
    return cast("Spacing", _by_rule(values) or values.get("timestep_spacing", usual))


def _dpmpp(values: Mapping[str, Any]) -> Callable[[Schedule], Table]:
    sde = str(values.get("algorithm_type", "dpmsolver++")).startswith("sde-")
    order, solver = values.get("solver_order", 2), values.get("solver_type", "midpoint")
    return lambda schedule: dpmpp(schedule, order, sde=sde, solver=solver)


def _unipc(values: Mapping[str, Any]) -> Callable[[Schedule], Table]:
    order, solver = values.get("solver_order", 2), values.get("solver_type", "bh2")
    return lambda schedule: unipc(schedule, order, solver)


def _named(name: str) -> Callable[[Mapping[str, Any]], Callable[[Schedule], Table]]:
    return lambda values: SAMPLERS[name]


_SAMPLERS: dict[str, Callable[[Mapping[str, Any]], Callable[[Schedule], Table]]] = {
    "DDPMScheduler": _named("ddpm"),
    "DDIMScheduler": _named("ddim"),
    "PNDMScheduler": _named("dpm++2m"),
    "EulerDiscreteScheduler": _named("euler"),
    "EulerAncestralDiscreteScheduler": _named("euler-ancestral"),
    "HeunDiscreteScheduler": _named("heun"),
    "DPMSolverMultistepScheduler": _dpmpp,
    "DPMSolverSDEScheduler": _named("dpm++2m-sde"),
    "UniPCMultistepScheduler": _unipc,
    "LCMScheduler": _named("lcm"),
    "TCDScheduler": _named("ddim"),
    "FlowMatchEulerDiscreteScheduler": _named("euler"),
    "FlowMatchHeunDiscreteScheduler": _named("heun"),
    "SCMScheduler": lambda values: functools.partial(lcm, sigma_data=0.0),
}
"""Samplers of diffusers' schedulers, of what their files say. PNDM's method is not here: its files
run the second-order solver, which is better at the same number of steps."""
