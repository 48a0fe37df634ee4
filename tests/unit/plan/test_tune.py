"""Plans of post-training: beside the compiled step, the rows of real runs, rounds, refusals."""

import dataclasses
import json
import math
from pathlib import Path

import jax
import pytest
from flax import nnx
from tests.unit.tune.tiny import save_chats, save_model

from fornax.adapters import LoRA
from fornax.cli.main import main
from fornax.config import ConfigError
from fornax.data import Hosts
from fornax.hlo import analyse, parse
from fornax.llm.config import EngineConfig
from fornax.models import DecoderConfig, config_to_hf
from fornax.optim import Muon, OptimConfig
from fornax.plan.facts import Plan
from fornax.plan.serving.engine import describe_engine
from fornax.plan.serving.model import ServedModel
from fornax.plan.serving.rounds import Drawing, draw_round
from fornax.plan.topology import parse_topology
from fornax.plan.tune import plan_tune
from fornax.quant import QuantConfig
from fornax.train import Ledger
from fornax.train.session import Programs, prepare
from fornax.tune import read_origin
from fornax.tune.config import (
    GRPO,
    AsyncConfig,
    ConversationConfig,
    DistillConfig,
    GRPOConfig,
    Importance,
    KTOConfig,
    PPOConfig,
    PreferenceConfig,
    RewardModelConfig,
    RolloutConfig,
    SFTConfig,
    TuneConfig,
)
from fornax.tune.methods import method_of
from fornax.tune.policy import read_model_origin
from fornax.tune.shapes import RunShapes, run_shapes

ONE = parse_topology("h100:1")
LORA = LoRA(rank=8)
REINFORCED = {
    "batch_size": 8,
    "group_size": 4,
    "reward": ("math",),
    "rollout": RolloutConfig(max_tokens=96),
}


def described(folder: Path, **changes) -> str:
    """A directory with a config.json and nothing else."""
    config = DecoderConfig(
        vocab_size=512,
        hidden_size=128,
        intermediate_size=256,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=32,
        max_position_embeddings=256,
        family="llama",
    )
    config = dataclasses.replace(config, **changes)
    (folder / "config.json").write_text(json.dumps(config_to_hf(config)))
    return str(folder)


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    """Of two layers."""
    return described(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def deep(tmp_path_factory) -> str:
    """Of eight layers."""
    return described(tmp_path_factory.mktemp("deep"), num_layers=8)


def given(model: str, method: type, **changes) -> TuneConfig:
    base = {"model": model, "data": "not read", "max_length": 256, "steps": 10, "batch_size": 4}
    return method(**{**base, **changes})


def shapes_of(config: TuneConfig) -> RunShapes:
    return run_shapes(config, read_model_origin(config, Path(config.model)))


def compiled(config: TuneConfig) -> tuple[Programs, jax.stages.Compiled]:
    """The step that the trainer would run, compiled for one CPU device."""
    run = shapes_of(config)
    programs = prepare(config, run.task, Ledger(), jax.devices()[:1])
    return programs, programs.lower_step(programs.shapes_of(run.batch)).compile()


def flops(program: jax.stages.Compiled) -> float:
    """Of products: attention's own kernels run other blocks on each platform."""
    facts = analyse(parse(program.as_text() or ""), {})
    return sum(o.flops * o.count for o in facts.operations if o.category != "attention")


def products(plan: Plan, name: str = "train_step") -> float:
    program = next(one for one in plan.programs if one.name == name)
    return sum(row.flops for row in program.work if row.name == "products")


def held_alone(run: RunShapes) -> int:
    """Bytes of arrays of a reward model's run that are in memory though no step reads them, so
    that the compiled one does not take them."""
    model = nnx.eval_shape(lambda: run.task.build(nnx.Rngs(0)))
    unread = nnx.state(model, nnx.PathContains("lm_head"))
    rows = [run.batch[name] for name in ("targets", "loss_weights")]
    return sum(x.size * x.dtype.itemsize for x in (*jax.tree.leaves(unread), *rows))


CASES = {
    "sft": (SFTConfig, {}),
    "sft, adapters in micro-batches": (SFTConfig, {"lora": LORA, "accumulate": 2}),
    "dpo": (PreferenceConfig, {}),
    "kto": (KTOConfig, {}),
    "reward": (RewardModelConfig, {}),
    "grpo": (GRPOConfig, REINFORCED),
    "ppo": (PPOConfig, {**REINFORCED, "group_size": 1}),
}


@pytest.mark.slow
@pytest.mark.usefixtures("optimized")
@pytest.mark.parametrize("name", CASES)
def test_a_planned_step_is_the_compiled_one(model, name):
    method, changes = CASES[name]
    agrees(given(model, method, **changes))


ADAPTED = {
    "dpo": (PreferenceConfig, {"reference": "adapter", "accumulate": 2}),
    "kto": (KTOConfig, {"reference": "adapter"}),
    "reward": (RewardModelConfig, {}),
}


@pytest.mark.exhaustive
@pytest.mark.usefixtures("optimized")
@pytest.mark.parametrize("name", ADAPTED)
def test_a_planned_step_of_adapters_on_pairs_is_the_compiled_one(deep, name):
    # Of more than one chunk of logits, which the compiler else computes once instead of twice; of
    # eight layers, as what one layer makes is counted beside what all of them keep.
    method, changes = ADAPTED[name]
    agrees(given(deep, method, lora=LORA, batch_size=8, **changes))


def agrees(config: TuneConfig) -> None:
    """Fails where the plan of a step is not the compiled one."""
    plan, (programs, program) = plan_tune(config, ONE), compiled(config)
    assert products(plan) == pytest.approx(flops(program), rel=0.005)
    size, memory = program.memory_analysis(), plan.main.memory
    state = memory.owned("parameters") + memory.owned("optimizer") + memory.owned("batch")
    unread = held_alone(shapes_of(config)) if isinstance(config, RewardModelConfig) else 0
    assert state == pytest.approx(size.argument_size_in_bytes + unread, rel=0.005)
    made = memory.owned("gradients") + memory.owned("activations")
    assert made == pytest.approx(size.temp_size_in_bytes, rel=0.2)
    assert programs.abstract.params  # something is trained


@pytest.mark.slow
@pytest.mark.usefixtures("optimized")
def test_a_planned_pass_before_a_round_is_the_compiled_one(model):
    config = given(model, GRPOConfig, **REINFORCED, rollout_epochs=2)
    run = shapes_of(config)
    forward = run.passes["score"]
    built = nnx.eval_shape(lambda: run.task.build(nnx.Rngs(0)))
    graphdef, state = nnx.split(built)

    def score(state, rows):
        return forward(nnx.merge(graphdef, state), rows)

    rows = {name: run.batch[name] for name in ("tokens", "targets", "segment_ids", "positions")}
    program = jax.jit(score).lower(state, rows).compile()
    assert products(plan_tune(config, ONE), "score") == pytest.approx(flops(program), rel=0.005)


def test_adapters_alone_have_optimizer_state(model):
    whole, adapted = (plan_tune(given(model, SFTConfig, lora=x), ONE) for x in (None, LORA))
    trained = int(adapted.notes[0].split()[0].replace(",", ""))
    moments = adapted.main.memory.owned("optimizer")
    assert 8 * trained <= moments <= 8 * trained + 64  # two float32 a number, and counts
    assert trained < whole.run.parameters / 10
    assert adapted.main.memory.owned("parameters") > whole.main.memory.owned("parameters")
    # No gradients of what is frozen: two thirds of the products, and the adapters' own.
    assert 0.6 < adapted.run.model_flops / whole.run.model_flops < 0.85


@pytest.mark.slow
def test_rows_have_the_arrays_that_a_run_has(tmp_path):
    folder = save_model(tmp_path, max_position_embeddings=256)
    data = save_chats(tmp_path / "chats.jsonl")
    pairs = tmp_path / "pairs.jsonl"
    answers = {"prompt": "a", "chosen": "b", "rejected": "c"}
    pairs.write_text("".join(json.dumps(answers) + "\n" for _ in range(8)))
    labels = tmp_path / "labels.jsonl"
    answer = {"prompt": "a", "completion": "b"}
    labels.write_text("".join(json.dumps({**answer, "label": n % 2 == 0}) + "\n" for n in range(8)))
    for config in (
        given(str(folder), SFTConfig, data=str(data)),
        given(str(folder), PreferenceConfig, data=str(pairs), batch_size=8),
        given(str(folder), RewardModelConfig, data=str(pairs), batch_size=8),
        given(str(folder), KTOConfig, data=str(labels), batch_size=8, lora=LORA),
    ):
        origin = read_origin(config)
        task = method_of(config).make()(config, origin, tmp_path / "out")
        stream = task.batches("train", Hosts())
        real = next(stream)
        stream.close()
        planned = run_shapes(config, origin).batch
        ignored = {"example", "keep"}  # its number, and positions that spare work
        assert planned.keys() == real.keys() - ignored
        assert {k: x.dtype for k, x in planned.items()} == {k: real[k].dtype for k in planned}
        assert all(planned[k].ndim == real[k].ndim for k in planned)


def test_a_round_counts_drawing_scoring_and_all_steps(model):
    algorithm = GRPO(kl_coefficient=0.1)
    changes = {**REINFORCED, "mini_batches": 2, "rollout_epochs": 2, "algorithm": algorithm}
    plan = plan_tune(given(model, GRPOConfig, **changes), ONE)
    step, score, reference, sample = plan.programs
    assert [p.name for p in plan.programs] == ["train_step", "score", "score_reference", "sample"]
    found = plan.round
    assert (found.completions, found.steps) == (16, 4)
    assert found.sample_seconds == sample.step_seconds > 0
    assert found.score_seconds == pytest.approx(2 * (score.step_seconds + reference.step_seconds))
    assert found.train_seconds == pytest.approx(4 * step.step_seconds)
    assert plan.speed.step_seconds == pytest.approx(found.seconds / 4)
    # Weights and cache of the engine, and the reference, are held beside every program.
    weights = step.memory.owned("parameters")
    engine = {program.memory.owned("sampler") for program in plan.programs}
    assert len(engine) == 1
    assert engine.pop() > weights / 2  # bfloat16 weights, and the cache
    assert all(program.memory.owned("reference") == weights for program in plan.programs)
    assert sample.memory.owned("optimizer") == step.memory.owned("optimizer")
    assert not sample.memory.owned("gradients")


def test_drawing_takes_longer_with_more_and_longer_completions(model):
    config = read_model_origin(given(model, SFTConfig), Path(model)).model_config
    served = ServedModel(name="tiny", config=config, dtype="float32", source="")
    limits = EngineConfig(max_model_len=256, max_num_seqs=8, max_num_batched_tokens=64)
    engine = describe_engine(served, limits, ONE)

    def draw(prompts: int, new_tokens: int, prompt_tokens: int = 64) -> Drawing:
        return draw_round(
            engine,
            prompts=prompts,
            group=4,
            prompt_tokens=prompt_tokens,
            new_tokens=new_tokens,
        )

    once, waves, longer = draw(2, 96), draw(4, 96), draw(2, 192)
    assert (once.at_once, once.steps, waves.steps) == (8, 96, 192)
    assert waves.time.seconds == pytest.approx(2 * once.time.seconds)
    assert waves.flops == pytest.approx(2 * once.flops)
    assert longer.time.seconds > 1.9 * once.time.seconds - draw(2, 1).time.seconds
    # Of 8 completions of 96 tokens and 2 prompts of 64: products with all matrices but the
    # embedding, once a token; attention is little here.
    layer = 128 * (128 + 64 + 64 + 128 + 3 * 256)
    products = 2 * (8 * 96 + 2 * 64) * 2 * layer + 2 * (8 * 96 + 2) * 512 * 128
    assert once.flops == pytest.approx(products, rel=0.25)
    assert once.flops > products
    assert draw(2, 96, prompt_tokens=16).flops < once.flops


@pytest.mark.parametrize(
    ("method", "changes", "named"),
    [
        (SFTConfig, {"quant": QuantConfig(scheme="int8")}, r"quant\.scheme=int8"),
        (SFTConfig, {"optim": OptimConfig(optimizer=Muon())}, "type=muon"),
        (DistillConfig, {"teacher": "a"}, "distill"),
        (
            GRPOConfig,
            {**REINFORCED, "conversation": ConversationConfig(environment="a:B")},
            "conversation",
        ),
        (GRPOConfig, {**REINFORCED, "reward_model": "runs/reward"}, "reward_model=runs/reward"),
        (
            GRPOConfig,
            {**REINFORCED, "asynchronous": AsyncConfig(), "importance": Importance()},
            "asynchronous",
        ),
    ],
)
def test_what_is_not_planned_is_refused_by_name(model, method, changes, named):
    with pytest.raises(ConfigError, match=rf"{named}.* not planned"):
        plan_tune(given(model, method, **changes), ONE)


def test_a_mesh_axis_that_is_not_planned_is_refused_by_name(model):
    config = given(model, SFTConfig)
    config = dataclasses.replace(config, mesh=dataclasses.replace(config.mesh, tensor=2))
    with pytest.raises(ConfigError, match=r"mesh\.tensor=2.*plan tune"):
        plan_tune(config, parse_topology("v5p:2x2x1"))


@pytest.mark.slow
def test_a_plan_that_does_not_fit_names_changes_that_do(model):
    chip = dataclasses.replace(ONE.chip, usable_bytes=30 << 20)
    small = dataclasses.replace(ONE, chip=chip)
    config = given(model, SFTConfig, batch_size=32, remat="none")
    plan = plan_tune(config, small)
    assert not plan.fits
    assert plan.advice
    assert all(one.total_bytes <= plan.main.memory.usable for one in plan.advice)
    words = plan.advice[0].flags.split()
    changed = {k.removeprefix("--"): v for k, v in zip(words[::2], words[1::2], strict=True)}
    if "accumulate" in changed:
        changed["accumulate"] = int(changed["accumulate"])
    again = plan_tune(dataclasses.replace(config, **changed), small)
    assert again.fits
    assert again.main.memory.total == plan.advice[0].total_bytes


def test_the_command_needs_a_config_json_alone(model, capsys, tmp_path):
    words = ["--model", model, "--data", "prompts.jsonl", "--reward", "math"]
    words += ["--max-length", "256", "--rollout.max-tokens", "96", "--batch-size", "8"]
    words += ["--topology", "h100:1", "--price", "2.5", "--json", str(tmp_path / "plan.json")]
    assert main(["plan", "tune", "grpo", *words]) == 0
    out = capsys.readouterr().out
    assert "round " in out
    assert "to draw 8 completions" in out
    assert "whole run" not in out  # the data would say how long that is
    stored = json.loads((tmp_path / "plan.json").read_text())
    assert math.isclose(stored["round"]["train_seconds"], stored["programs"][0]["step_seconds"])


@pytest.mark.parametrize("method", ["kto", "reward"])
def test_methods_on_pairs_are_planned_by_the_command(model, capsys, method):
    words = ["--model", model, "--data", "pairs.jsonl", "--max-length", "128", "--batch-size", "2"]
    assert main(["plan", "tune", method, *words, "--topology", "h100:1"]) == 0
    assert f"tune {method} on h100:1" in capsys.readouterr().out
