"""TRL on PyTorch: its own trainers on the CPU, stopped between steps.

    tune_trl.py JOB        JOB: what benchmarks/_tuning.py writes

The faster of what TRL offers is chosen: reference log-probabilities computed once (its
`precompute_ref_log_probs`), no recomputation of activations, no evaluation, logging or saving.
"""

import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import _harness
import _tuning


def _common(job: _tuning.Job) -> dict[str, Any]:
    return {
        "output_dir": tempfile.mkdtemp(),
        "use_cpu": True,
        "bf16": False,
        "max_steps": 1_000_000,
        "learning_rate": 1e-6,
        "lr_scheduler_type": "constant",
        "logging_strategy": "no",
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "gradient_checkpointing": False,
        "per_device_train_batch_size": job.batch,
        "seed": 0,
    }


def _trainer(job: _tuning.Job, gate: _tuning.Gate) -> Any:
    import datasets
    import torch
    import transformers
    import trl

    class Stop(transformers.TrainerCallback):
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            gate.step()

    torch.set_num_threads(job.threads)
    transformers.set_seed(0)
    model = transformers.AutoModelForCausalLM.from_pretrained(job.model, dtype=torch.float32)
    given = {
        "model": model,
        "processing_class": transformers.AutoTokenizer.from_pretrained(job.model),
        "train_dataset": datasets.Dataset.from_json(job.data, cache_dir=tempfile.mkdtemp()),
        "callbacks": [Stop()],
    }
    common = _common(job)
    if job.name == "grpo":
        common["per_device_train_batch_size"] = _tuning.GROUPS * _tuning.GENERATIONS
        config = trl.GRPOConfig(
            **common,
            num_generations=_tuning.GENERATIONS,
            max_completion_length=job.new,
            temperature=1.0,
            beta=0.0,
        )
        return trl.GRPOTrainer(reward_funcs=_rewards, args=config, **given)
    if job.name == "dpo":
        config = trl.DPOConfig(**common, max_length=job.length, precompute_ref_log_probs=True)
        return trl.DPOTrainer(args=config, **given)
    if job.name == "sft-lora":
        import peft

        given["peft_config"] = peft.LoraConfig(
            r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM"
        )
    return trl.SFTTrainer(args=trl.SFTConfig(**common, max_length=job.length), **given)


def _rewards(completions: list[str], **_: Any) -> list[float]:
    return [_tuning.reward(text) for text in completions]


def _make(job: _tuning.Job) -> tuple[Callable[[], None], dict[str, Any]]:
    gate = _tuning.Gate(job.steps)
    trainer = _trainer(job, gate)
    return gate.run(trainer.train), {"versions": _harness.versions("torch", "trl")}


if __name__ == "__main__":
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    job = _tuning.read_job(sys.argv[1])
    os.environ["OMP_NUM_THREADS"] = str(job.threads)
    _harness.serve(lambda: _make(job))
