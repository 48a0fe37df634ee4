"""The whole plan: what it says, what it writes, what it refuses."""

import dataclasses
import importlib.util
import json
from pathlib import Path

import pytest
from tests.unit.plan.serving.conftest import MODELS, write_config

from fornax.cli.commands import plan_serve as command
from fornax.config import ConfigError, from_mapping
from fornax.config.errors import EngineError, PlanError
from fornax.llm import MTP, DraftModel, NGram
from fornax.models import DecoderConfig, num_parameters
from fornax.plan.report import render_table, write_page
from fornax.plan.serving import ServePlan, ServingConfig, plan_serve
from fornax.plan.topology import parse_topology

LARGE = DecoderConfig(
    vocab_size=128_256,
    hidden_size=4096,
    intermediate_size=14_336,
    num_layers=32,
    num_heads=32,
    num_kv_heads=8,
    max_position_embeddings=131_072,
)

GLM = {
    "vocab_size": 384,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_layers": 3,
    "num_heads": 8,
    "num_kv_heads": 4,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "family": "glm4_moe",
}


@pytest.fixture
def large(tmp_path: Path) -> Path:
    """Llama 3.1 8B's sizes."""
    return write_config(tmp_path / "large", LARGE, torch_dtype="bfloat16")


def predicted(model: Path, topology: str, config: ServingConfig | None = None, **options):
    return plan_serve(model, parse_topology(topology), config, predicted=True, **options)


def test_an_8b_on_four_chips(large: Path) -> None:
    plan = predicted(large, "v6e:2x2", ServingConfig(max_model_len=8192), itl_seconds=0.02)
    assert plan.engine.tensor_parallel_size == 4
    assert plan.origin == "predicted"
    assert plan.memory.weights == pytest.approx(8.03e9 * 2 / 4, rel=1e-3)
    assert plan.memory.bytes_per_token == 2 * 8 * 128 * 2 * 32 // 4
    assert plan.memory.fits
    one = plan.decode[0]
    assert one.bound == "weights"
    # the published rate is a bound: weights but the embedding table over 1638 GB/s
    read = (plan.parameters - 128_256 * 4096) * 2 / 4 / 1638e9
    assert read < one.least_seconds < 1.1 * read
    assert all(p.least_seconds <= p.seconds for p in plan.decode)
    busy = [p for p in plan.decode if p.context == 8192][-1]
    assert busy.bound == "cache"
    assert busy.tokens_per_second_per_chip > 5 * one.tokens_per_second_per_chip
    times = [p.seconds for p in plan.prompts]
    assert times == sorted(times)
    assert all(found.seconds <= 0.02 for found in plan.largest)
    text = render_table(plan)
    assert "--tensor-parallel-size 4" in text
    assert "The largest batch within 20.0 ms" in text


def test_two_engines_side_by_side_beat_heads_kept_twice(large: Path) -> None:
    plan = predicted(large, "v6e:4x4", ServingConfig(max_model_len=8192))
    assert (plan.engine.tensor_parallel_size, plan.engine.engines) == (8, 2)
    plan = predicted(large, "v6e:4x4", ServingConfig(max_model_len=8192, tensor_parallel_size=16))
    assert any("the cache keeps each 2 times" in note for note in plan.notes)
    assert plan.engine.attention == "paged_attention: pallas_tpu"


def test_gpus_are_predicted(large: Path) -> None:
    plan = predicted(large, "h100:8", ServingConfig(max_model_len=8192))
    assert plan.engine.attention == "paged_attention: pallas_gpu"
    assert plan.origin == "predicted"
    # Three quarters of a GPU's memory are jax's, nine tenths of those the engine's.
    assert plan.memory.usable == int(0.75 * 80e9)
    assert plan.memory.weights + plan.memory.cache <= 0.9 * plan.memory.usable


def test_says_by_how_much_it_does_not_fit_and_what_would(large: Path) -> None:
    with pytest.raises(PlanError) as raised:
        predicted(large, "v5e:1x1", ServingConfig(max_model_len=8192))
    said = str(raised.value)
    assert "14.96 GiB of weights" in said
    assert "too little" in said
    assert "--topology v5e:2x2 --tensor-parallel-size 4" in said
    with pytest.raises(PlanError, match=r"--max-model-len 65536 \(sequences of at most 65,536"):
        predicted(large, "v6e:1x1", ServingConfig(max_model_len=131_072))
    with pytest.raises(PlanError, match=r"--tensor-parallel-size 2 \(divided over 2"):
        predicted(large, "v5e:2x2", ServingConfig(max_model_len=8192, tensor_parallel_size=1))
    with pytest.raises(PlanError, match=r"--dtype bfloat16 \(half"):
        predicted(large, "v6e:1x1", ServingConfig(max_model_len=8192, dtype="float32"))


def test_a_cache_that_leaves_no_room_is_a_plan_with_advice(large: Path) -> None:
    config = ServingConfig(max_model_len=8192, gpu_memory_utilization=1.0)
    plan = predicted(large, "v6e:2x2", config)
    assert not plan.memory.fits
    assert plan.advice[0].flags == "--gpu-memory-utilization 0.85"
    assert "DOES NOT FIT" in render_table(plan)


def test_refuses_what_the_engine_refuses(llama: Path) -> None:
    config = ServingConfig(quantization="int8", tensor_parallel_size=1)
    with pytest.raises(EngineError, match="CPU only"):
        predicted(llama, "v6e:2x2", config)
    with pytest.raises(ConfigError, match="512 positions"):
        predicted(llama, "v6e:2x2", ServingConfig(max_model_len=1024))
    with pytest.raises(ConfigError, match="among 1 to max_model_len=512"):
        predicted(llama, "v6e:2x2", contexts=[600])
    with pytest.raises(ConfigError, match="tensor_parallel_size=-1 must be 1 or more"):
        ServingConfig(tensor_parallel_size=-1)
    with pytest.raises(ConfigError, match="below max_num_seqs"):
        ServingConfig(max_num_seqs=8, max_num_batched_tokens=4)


def test_adapters_and_a_draft_model_are_counted(llama: Path) -> None:
    plain = predicted(llama, "v6e:2x2", ServingConfig()).memory
    adapted = predicted(llama, "v6e:2x2", ServingConfig(enable_lora=True)).memory
    assert adapted.weights > plain.weights
    assert adapted.cache == plain.cache
    speculation = DraftModel(model=llama)
    found = predicted(llama, "v6e:2x2", ServingConfig(speculative_config=speculation)).memory
    assert found.weights == 2 * plain.weights
    # a page more, page 0, in each cache; the others as many for the draft model's tokens
    assert found.cache == 2 * plain.cache
    assert found.bytes_per_sequence == 2 * plain.bytes_per_sequence
    assert found.sampler > plain.sampler


def test_the_models_own_module_is_counted(tmp_path: Path) -> None:
    """Its weights and its layer's cache, and no part of it in steps of one token."""
    experts = dataclasses.replace(
        MODELS["latent"].experts, selection_bias=True, num_groups=1, groups_per_token=1
    )
    model = DecoderConfig(
        **GLM, mlp_pattern=("mlp", "experts", "experts"), experts=experts, num_mtp_modules=1
    )
    path = write_config(tmp_path / "glm", model, torch_dtype="bfloat16")
    plain = predicted(path, "v6e:1x1", ServingConfig())
    plan = predicted(path, "v6e:1x1", ServingConfig(speculative_config=MTP()))
    alone = dataclasses.replace(model, num_mtp_modules=0)
    assert plan.parameters == num_parameters(model)
    assert plain.parameters == num_parameters(alone)
    more = num_parameters(model) - num_parameters(alone)
    assert plan.memory.weights - plain.memory.weights == pytest.approx(2 * more, rel=1e-3)
    layers = model.num_layers
    each = plain.memory.bytes_per_token // layers
    assert plan.memory.bytes_per_token == (layers + 1) * each
    assert [p.seconds for p in plan.decode] == [p.seconds for p in plain.decode]
    assert any("speculation counts in memory only" in note for note in plan.notes)


def test_speculation_needs_larger_choices(llama: Path) -> None:
    plain = predicted(llama, "v6e:2x2", ServingConfig(max_num_seqs=8))
    config = ServingConfig(max_num_seqs=8, speculative_config=NGram(num_speculative_tokens=3))
    plan = predicted(llama, "v6e:2x2", config)
    assert plan.memory.sampler > plain.memory.sampler  # masks for four tokens a sequence
    assert any("speculation" in note for note in plan.notes)


@pytest.mark.skipif(importlib.util.find_spec("libtpu") is not None, reason="libtpu is installed")
def test_without_the_compiler_says_how_to_do_without(llama: Path) -> None:
    with pytest.raises(PlanError, match=r"fornax-ai\[tpu\].*--predicted"):
        plan_serve(llama, parse_topology("v6e:2x2"), cache=False)


def test_the_command_writes_json_and_a_page(llama: Path, tmp_path: Path, capsys) -> None:
    arguments = command.Arguments(
        model=llama,
        topology="v6e:2x2",
        itl_ms=5.0,
        prompts=(100,),
        predicted=True,
        json=tmp_path / "out" / "plan.json",
        html=tmp_path / "out" / "plan.html",
    )
    assert command.run(arguments, ["--max-model-len", "256"]) == 0
    assert "Serving llama on v6e:2x2" in capsys.readouterr().out
    told = json.loads((tmp_path / "out" / "plan.json").read_text())
    assert told.pop("format") == 1
    plan = from_mapping(ServePlan, told)
    assert [p.tokens for p in plan.prompts] == [100]
    assert plan.itl_seconds == 0.005
    page = (tmp_path / "out" / "plan.html").read_text()
    assert page.count("<svg") == 2
    assert "http-equiv" not in page
    assert "src=" not in page


def test_a_price_says_what_tokens_cost(llama: Path, tmp_path: Path, capsys) -> None:
    """A chip-second costs 0.001 at 3.60 an hour: a million tokens at R tokens/s/chip 1000/R."""
    path = tmp_path / "plan.json"
    arguments = command.Arguments(
        model=llama, topology="v6e:2x2", itl_ms=50.0, predicted=True, price="3.60", json=path
    )
    assert command.run(arguments, ["--max-model-len", "256"]) == 0
    printed = capsys.readouterr().out
    told = json.loads(path.read_text())
    points = [*told["decode"], *told["prompts"], *told["largest"]]
    for point in points:
        rate = point["tokens_per_second_per_chip"]
        assert point["per_million_tokens"] == pytest.approx(1000 / rate)
    assert len(told["largest"]) > 0
    least = min(point["per_million_tokens"] for point in told["decode"])
    assert f"at best {least:,.4g} USD per million output tokens" in " ".join(printed.split())
    assert "USD per 1M tokens" in printed


def test_the_command_fails_after_showing_what_does_not_fit(large: Path, capsys) -> None:
    arguments = command.Arguments(model=large, topology="v6e:2x2", predicted=True)
    flags = ["--max-model-len", "8192", "--gpu-memory-utilization", "1.0"]
    with pytest.raises(ConfigError, match=r"too much; the cheapest changes that would fit: --gpu"):
        command.run(arguments, flags)
    assert "DOES NOT FIT" in capsys.readouterr().out


def test_the_command_asks_for_what_is_missing(llama: Path) -> None:
    with pytest.raises(ConfigError, match="--model DIR"):
        command.run(command.Arguments(topology="v6e:2x2"), [])
    with pytest.raises(ConfigError, match="itl_ms=0"):
        command.run(command.Arguments(model=llama, itl_ms=0.0), [])
    with pytest.raises(ConfigError, match="v6e"):
        command.run(command.Arguments(model=llama, topology="v6e:3x3"), [])


def test_a_page_says_where_it_cannot_be_written(llama: Path, tmp_path: Path) -> None:
    plan = predicted(llama, "v6e:2x2")
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot make the folder"):
        write_page(plan, tmp_path / "file" / "plan.html")


def test_latents_are_counted_once_a_device(tmp_path: Path) -> None:
    """48 numbers a token and layer, which TPUs keep as 128."""
    folder = write_config(tmp_path / "l", MODELS["latent"], torch_dtype="bfloat16")
    one, two = (
        predicted(folder, "v6e:2x2", ServingConfig(tensor_parallel_size=size)) for size in (1, 2)
    )
    assert one.memory.bytes_per_token == two.memory.bytes_per_token == 4 * 128 * 2
    assert any("keeps the latents of all tokens" in note for note in two.notes)
    assert "keys and values apart" in one.engine.attention


@pytest.mark.parametrize("codes", ["int8", "fp8"])
@pytest.mark.parametrize(
    ("target", "implementation", "moved"),
    [("h100:4", "xla", 132 + 2 * 256), ("v6e:2x2", "pallas_tpu", 132)],
)
def test_codes_are_counted_with_their_scales(
    target: str, implementation: str, moved: int, codes: str, large: Path
) -> None:
    """On GPU XLA reads them: each code, and what it gathers, written and read. The kernels for
    bfloat16, and for codes on TPU, read each number once."""
    wide, narrow = (
        predicted(large, target, ServingConfig(tensor_parallel_size=2, kv_cache_dtype=dtype))
        for dtype in ("bfloat16", codes)
    )
    assert wide.memory.bytes_per_token * 132 == narrow.memory.bytes_per_token * 256
    ours, theirs = (
        {(p.batch, p.context): p.cache_seconds for p in plan.decode} for plan in (narrow, wide)
    )
    assert len(ours.keys() & theirs.keys()) > 3
    for cell in ours.keys() & theirs.keys():
        assert ours[cell] == pytest.approx(theirs[cell] * moved / 256, rel=0.01)
    assert narrow.engine.cache_dtype == {"int8": "int8", "fp8": "float8_e4m3fn"}[codes]
    assert f"paged_attention: {implementation}" in narrow.engine.attention


def test_windows_have_groups_of_their_own(tmp_path: Path) -> None:
    plan = predicted(write_config(tmp_path / "w", MODELS["windowed"]), "v6e:2x2")
    assert {group.window for group in plan.memory.groups} == {24, None}
    assert "window 24" in render_table(plan)
