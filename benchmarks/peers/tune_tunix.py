"""Tunix: its own trainers on the CPU, stopped between steps. Runs in an environment of its own.

    tune_tunix.py JOB      JOB: what benchmarks/_tuning.py writes

Its supervised trainer takes arrays: they are padded to one length, the longest of the file, so that
its step compiles once. Its preference trainer computes the reference in each step; it has no other
way. Its rollouts are those of its own sampler (`vanilla`).
"""

import functools
import json
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import _harness
import _tuning

_ENDLESS = 1_000_000


def _model(job: _tuning.Job) -> Any:
    import jax
    import jax.numpy as jnp
    from tunix.models.llama3 import model, params

    said = json.loads((Path(job.model) / "config.json").read_text())
    config = model.ModelConfig(
        num_layers=said["num_hidden_layers"],
        vocab_size=said["vocab_size"],
        embed_dim=said["hidden_size"],
        hidden_dim=said["intermediate_size"],
        num_heads=said["num_attention_heads"],
        head_dim=said["head_dim"],
        num_kv_heads=said["num_key_value_heads"],
        rope_theta=int(said["rope_theta"]),
        norm_eps=said["rms_norm_eps"],
    )
    automatic = (jax.sharding.AxisType.Auto,) * 2
    mesh = jax.make_mesh((1, 1), ("fsdp", "tp"), axis_types=automatic)
    return params.create_model_from_safe_tensors(job.model, config, mesh, jnp.float32), mesh


def _lines(job: _tuning.Job) -> list[dict[str, str]]:
    return [json.loads(line) for line in Path(job.data).read_text().splitlines()]


def _batches(job: _tuning.Job, lines: list[Any]) -> Iterator[list[Any]]:
    at = 0
    while True:
        yield [lines[(at + i) % len(lines)] for i in range(job.batch)]
        at += job.batch


def _sft(job: _tuning.Job, gate: _tuning.Gate, words: Any) -> Callable[[], None]:
    import numpy as np
    import optax
    from tunix.sft import peft_trainer, utils

    model, mesh = _model(job)
    if job.name == "sft-lora":
        import qwix
        from flax import nnx

        provider = qwix.LoraProvider(
            module_path=".*(q_proj|k_proj|v_proj|o_proj|gate_proj|up_proj|down_proj)",
            rank=16,
            alpha=32,
        )
        given = model.get_model_input()
        model = qwix.apply_lora_to_model(model, provider, rngs=nnx.Rngs(0), **given)
    examples = []
    for line in _lines(job):
        prompt, completion = words(line["prompt"]), [*words(line["completion"]), words.eos]
        examples.append((prompt + completion, [0] * len(prompt) + [1] * len(completion)))
    longest = max(len(ids) for ids, _ in examples)

    def rows() -> Iterator[Any]:
        for batch in _batches(job, examples):
            gate.step()
            tokens = np.zeros((job.batch, longest), np.int32)
            masks = np.zeros((2, job.batch, longest), np.int32)  # of tokens, of what is trained
            for row, (ids, trained) in enumerate(batch):
                tokens[row, : len(ids)] = ids
                masks[:, row, : len(ids)] = np.ones(len(ids)), trained
            yield {"tokens": tokens, "mask": masks[0], "trained": masks[1]}

    def inputs(batch: Any) -> dict[str, Any]:
        return {
            "input_tokens": batch["tokens"],
            "input_mask": batch["trained"],
            "positions": utils.build_positions_from_mask(batch["mask"]),
            "attention_mask": utils.make_causal_attn_mask(batch["mask"] > 0),
        }

    config = peft_trainer.TrainingConfig(
        eval_every_n_steps=_ENDLESS, max_steps=_ENDLESS, max_inflight_computations=1
    )
    trainer = peft_trainer.PeftTrainer(model, optax.adamw(1e-6), config)
    trainer = trainer.with_gen_model_input_fn(inputs)
    return functools.partial(_train, mesh, trainer, rows())


def _dpo(job: _tuning.Job, gate: _tuning.Gate, words: Any) -> Callable[[], None]:
    import numpy as np
    import optax
    from tunix.sft.dpo import dpo_trainer

    policy, mesh = _model(job)
    reference, _ = _model(job)
    lines = [
        {k: words(v) + ([] if k == "prompt" else [words.eos]) for k, v in line.items()}
        for line in _lines(job)
    ]
    longest = {
        "prompt": max(len(line["prompt"]) for line in lines),
        "chosen": (of_both := max(len(line[k]) for line in lines for k in ("chosen", "rejected"))),
        "rejected": of_both,
    }

    def rows() -> Iterator[Any]:
        for batch in _batches(job, lines):
            gate.step()
            made = {}
            for name, width in longest.items():
                ids = np.zeros((job.batch, width), np.int32)
                mask = np.zeros((job.batch, width), bool)
                for row, line in enumerate(batch):
                    size = len(line[name])
                    where = slice(width - size, width) if name == "prompt" else slice(0, size)
                    ids[row, where], mask[row, where] = line[name], True
                made |= {f"{name}_ids": ids, f"{name}_mask": mask}
            yield dpo_trainer.TrainingInput(**made)

    config = dpo_trainer.DPOTrainingConfig(
        eval_every_n_steps=_ENDLESS, max_steps=_ENDLESS, max_inflight_computations=1, beta=0.1
    )
    trainer = dpo_trainer.DPOTrainer(policy, reference, optax.adamw(1e-6), config)
    return functools.partial(_train, mesh, trainer, rows())


def _grpo(job: _tuning.Job, gate: _tuning.Gate, words: Any) -> Callable[[], None]:
    import numpy as np
    import optax
    from tunix.rl import rl_cluster
    from tunix.rl.grpo import grpo_learner
    from tunix.rl.rollout import base_rollout

    policy, mesh = _model(job)
    lines = _lines(job)

    def rows() -> Iterator[Any]:
        at = 0
        while True:
            gate.step()
            taken = [lines[(at + i) % len(lines)]["prompt"] for i in range(_tuning.GROUPS)]
            yield {"prompts": np.array(taken)}
            at += _tuning.GROUPS

    longest = max(len(words(line["prompt"])) for line in lines)
    width = 1 << (longest - 1).bit_length()
    roles = (rl_cluster.Role.ACTOR, rl_cluster.Role.REFERENCE, rl_cluster.Role.ROLLOUT)
    cluster = rl_cluster.RLCluster(
        actor=policy,
        tokenizer=words.tokenizer,
        cluster_config=rl_cluster.ClusterConfig(
            role_to_mesh=dict.fromkeys(roles, mesh),
            rollout_engine="vanilla",
            training_config=rl_cluster.RLTrainingConfig(
                actor_optimizer=optax.adamw(1e-6),
                eval_every_n_steps=_ENDLESS,
                max_steps=_ENDLESS,
                max_inflight_computations=1,
            ),
            rollout_config=base_rollout.RolloutConfig(
                max_tokens_to_generate=job.new,
                max_prompt_length=width,
                kv_cache_size=width + job.new + 8,
                temperature=1.0,
                top_p=1.0,
            ),
        ),
    )
    learner = grpo_learner.GRPOLearner(
        rl_cluster=cluster,
        reward_fns=_rewards,
        algo_config=grpo_learner.GRPOConfig(num_generations=_tuning.GENERATIONS, beta=0.0),
    )
    return functools.partial(_train, mesh, learner, rows())


def _rewards(prompts: list[str], completions: list[str], **_: Any) -> list[float]:
    del prompts
    return [_tuning.reward(text) for text in completions]


def _train(mesh: Any, trainer: Any, rows: Iterator[Any]) -> None:
    with mesh:
        trainer.train(rows)


class _Words:
    """Texts to token ids."""

    def __init__(self, model: str) -> None:
        from transformers import AutoTokenizer

        self.tokenizer = AutoTokenizer.from_pretrained(model)
        self.eos = self.tokenizer.eos_token_id

    def __call__(self, text: str) -> list[int]:
        return self.tokenizer(text, add_special_tokens=False)["input_ids"]


def _make(job: _tuning.Job) -> tuple[Callable[[], None], dict[str, Any]]:
    import jax

    gate = _tuning.Gate(job.steps, lambda: jax.block_until_ready(jax.live_arrays()))
    kinds = {"sft": _sft, "sft-lora": _sft, "dpo": _dpo, "grpo": _grpo}
    train = kinds[job.name](job, gate, _Words(job.model))
    return gate.run(train), {"versions": _harness.versions("jax", "google-tunix")}


if __name__ == "__main__":
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    job = _tuning.read_job(sys.argv[1])
    _harness.serve(lambda: _make(job))
