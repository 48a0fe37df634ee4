"""The quickstart's stages of post-training: functions, sft, grpo, tuned, gain."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fornax.quickstart.functions import write_pairs
from fornax.quickstart.gain import AFTER, BEFORE, beyond_spread, measure
from fornax.quickstart.job import Job
from fornax.quickstart.serving import CHAT_TEMPLATE
from fornax.quickstart.stages import Interrupted
from fornax.train import TrainResult, convert
from fornax.tune import tune

__all__ = ["STAGES"]

Result = dict[str, Any]


def _functions(job: Job) -> Result:
    tuning = job.size.tuning
    return write_pairs(
        job.dataset,
        job.pairs,
        max_tokens=tuning.max_tokens,
        limits={"train": None, "eval": tuning.eval_prompts},
        seed=job.config.seed,
    )


def _functions_line(result: Result) -> str:
    return (
        f"{result['train']:,} functions with a docstring to tune on; {result['eval']} from the "
        "held-out files"
    )


def _sft(job: Job) -> Result:
    config = job.size.tuning.sft_config(
        job.portable.resolve(), job.pairs.resolve(), seed=job.config.seed
    )
    result = _finished(tune(config, job.sft))
    return {"steps": result.step, "evaluation": result.evaluation}


def _sft_line(result: Result) -> str:
    loss = (result["evaluation"] or {}).get("loss")
    held = f", {loss:.3f} nats per token of held-out bodies" if loss is not None else ""
    return f"{result['steps']} steps on adapters{held}"


def _grpo(job: Job) -> Result:
    config = job.size.tuning.grpo_config(
        job.sft.resolve(), job.pairs.resolve(), seed=job.config.seed
    )
    result = _finished(tune(config, job.grpo))
    return {
        "steps": result.step,
        "completions": result.step * config.batch_size,
        "group_size": config.group_size,
    }


def _grpo_line(result: Result) -> str:
    return f"{result['steps']} steps, {result['completions']:,} completions drawn and judged"


def _tuned(job: Job) -> Result:
    convert(job.sft, job.adapter, overwrite=True)
    parity = convert(job.grpo, job.tuned, merge_lora=True, overwrite=True)
    (job.tuned / "chat_template.jinja").write_text(CHAT_TEMPLATE, encoding="utf-8")
    return {
        "directory": str(job.tuned),
        "adapter": str(job.adapter),
        "adapter_bytes": sum(path.stat().st_size for path in job.adapter.iterdir()),
        **dataclasses.asdict(parity),
    }


def _tuned_line(result: Result) -> str:
    return (
        f"{result['directory']}: largest logit difference {result['max_abs_difference']:.1e}; the "
        f"supervised adapter in PEFT's format in {result['adapter']}"
    )


def _gain(job: Job) -> Result:
    tuning = job.size.tuning
    places: dict[str, Path] = {"base": job.portable, "sft": job.sft, "grpo": job.tuned}
    return measure(
        places,
        job.pairs / "eval.jsonl",
        repeats=tuning.repeats,
        temperature=tuning.temperature,
        max_tokens=tuning.max_tokens,
        seed=job.config.seed,
        log=job.run_dir / "rewards.log",
    )


def _gain_line(result: Result) -> str:
    def said(name: str) -> str:
        reward = result["models"][name]["reward"]
        return f"{reward['mean']:.3f} ± {reward['deviation']:.3f}"

    clear = "" if beyond_spread(result, BEFORE, AFTER) else "; not beyond the spread of repeats"
    return (
        f"reward on {result['prompts']} held-out functions: pretrained {said('base')}, after SFT "
        f"{said('sft')}, after GRPO {said('grpo')}{clear}"
    )


def _finished(result: TrainResult) -> TrainResult:
    if result.reason == "signal":
        raise Interrupted(result.exit_code)
    return result


STAGES: list[tuple[str, str, Callable[[Job], Result], Callable[[Result], str]]] = [
    ("functions", "Functions to tune on", _functions, _functions_line),
    ("sft", "Supervised tuning with adapters", _sft, _sft_line),
    ("grpo", "Reinforcement learning, judged by a parser", _grpo, _grpo_line),
    ("tuned", "The tuned model, merged, and its adapter", _tuned, _tuned_line),
    ("gain", "What that gained, on held-out functions", _gain, _gain_line),
]
"""Name, title, function and line of each stage, in order."""
