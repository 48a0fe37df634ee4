"""`fornax plan` from a config to a report, through a real compiler: XLA's own, and the TPU's."""

import importlib.util
import json
from pathlib import Path

import pytest
from tests.caches import fresh_cache

from fornax.cli.main import main
from fornax.config import dump_yaml, from_mapping
from fornax.plan.compile import compile_train
from fornax.plan.cost.compiled import compiled_programs
from fornax.plan.cost.estimate import estimate
from fornax.plan.facts import ProgramReport
from fornax.plan.recipes import compiled_recipes, find_recipes
from fornax.plan.topology import parse_topology
from fornax.train import TrainConfig

RECIPES = Path(__file__).parents[3] / "recipes"
SMALL = [
    pytest.param(recipe, name, marks=pytest.mark.exhaustive if name.startswith("tpu7x") else ())
    for recipe in find_recipes()
    if recipe.name == "qwen3-0.6b"
    for name in recipe.topologies
    if name in ("v5e:2x4", "tpu7x:2x2x1")  # one device a chip, and two
]
TOY = {
    "model": {"vocab_size": 65536, "hidden_size": 256, "num_layers": 2, "num_heads": 4},
    "seq_len": 64,
    "batch_size": 8,
    "mesh": {"fsdp": 2, "tensor": 2, "rules": {"vocab": []}},
    "remat": "full",
}


@pytest.fixture(scope="module")
def toy(tmp_path_factory) -> ProgramReport:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FORNAX_CACHE_DIR", fresh_cache(tmp_path_factory.mktemp("cache")))
        config, topology = from_mapping(TrainConfig, TOY), parse_topology("cpu:4")
        [report] = compiled_programs(config, topology, ("train_step",))
        [artifact] = compile_train(config, topology, programs=("train_step",))
        assert report.memory.total == artifact.memory.total
        return report


@pytest.mark.slow
class TestToy:
    """A decoder on four virtual CPU devices, its vocabulary left whole on purpose."""

    def test_memory_has_owners(self, toy):
        parts = {part.owner: part.bytes for part in toy.memory.parts}
        assert parts["optimizer"] == pytest.approx(2 * parts["parameters"], rel=0.01)
        assert all(buffer.owner for buffer in toy.memory.buffers)

    def test_the_peaks_buffers_have_lines_of_the_source(self, toy):
        lines = [buffer.source for buffer in toy.memory.buffers if buffer.source]
        assert lines
        assert any("models/" in line or "train/" in line for line in lines)

    def test_what_is_whole_is_named_with_its_rule(self, toy):
        whole = [finding for finding in toy.findings if finding.kind == "replicated"]
        assert {finding.what.split()[0] for finding in whole} >= {"params/embed/embedding"}
        assert all("mesh.rules.vocab, now []" in finding.fix for finding in whole)

    def test_work_and_exchanges_were_read(self, toy):
        config, topology = from_mapping(TrainConfig, TOY), parse_topology("cpu:4")
        guess = estimate(config, topology)
        assert toy.flops == pytest.approx(guess.step.flops, rel=0.1)
        kinds = {(one.kind, one.axes) for one in toy.collectives}
        assert ("all-gather", ("fsdp",)) in kinds
        assert any(axes == ("tensor",) for _, axes in kinds)
        assert toy.step_seconds > 0


@pytest.mark.tpu
@pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None, reason="libtpu, the TPU compiler, is not installed"
)
@pytest.mark.parametrize(("recipe", "name"), SMALL, ids=lambda one: getattr(one, "name", one))
def test_a_small_recipe_is_compiled_and_a_second_plan_is_immediate(recipe, name, tmp_path, capsys):
    """What the page of recipes says of it is what the installed compiler makes."""
    words = ["plan", "--config", str(recipe.path), "--topology", name, "--programs", "train"]
    assert main([*words, "--json", str(tmp_path / "plan.json")]) == 0
    out = capsys.readouterr().out
    assert "Compiled by the TPU compiler" in out
    found = json.loads((tmp_path / "plan.json").read_text())
    assert found["summary"]["fits"] is True
    assert found["origin"] == "compiled"
    [program] = found["programs"]
    owners = {part["owner"]: part["bytes"] for part in program["memory"]["parts"]}
    guess = estimate(recipe.config(), parse_topology(name))
    assert owners["parameters"] == pytest.approx(guess.memory.owned("parameters"), rel=0.01)
    kept = compiled_recipes()[recipe.name, name]
    assert sum(owners.values()) == pytest.approx(kept.memory_bytes, rel=0.05)
    assert program["step_seconds"] == pytest.approx(kept.step_seconds, rel=0.05)
    assert main(words) == 0
    assert "kept from an earlier plan" in capsys.readouterr().out


@pytest.mark.tpu
@pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None, reason="libtpu, the TPU compiler, is not installed"
)
def test_between_two_slices_go_shards_of_gradients_and_little_else(tmp_path, capsys):
    model = {"vocab_size": 512, "hidden_size": 256, "intermediate_size": 512, "num_layers": 2}
    mesh = {"slice": 2, "fsdp": 2, "tensor": 2}
    model |= {"num_heads": 4, "num_kv_heads": 2}
    run = {"model": model, "batch_size": 16, "seq_len": 256, "mesh": mesh}
    run["dtypes"] = {"compute": "bfloat16"}
    (tmp_path / "run.yaml").write_text(dump_yaml(from_mapping(TrainConfig, run)))
    words = ["--topology", "2*v5e:2x2", "--programs", "train", "--json", str(tmp_path / "plan")]
    assert main(["plan", "--config", str(tmp_path / "run.yaml"), *words]) == 0
    capsys.readouterr()
    found = json.loads((tmp_path / "plan").read_text())
    assert found["origin"] == "compiled"
    collectives = found["programs"][0]["collectives"]
    assert all((one["link"] == "dcn") == ("slice" in one["axes"]) for one in collectives)
    assert {"fsdp", "tensor"} <= {axis for one in collectives for axis in one["axes"]}
    crossing = [one for one in collectives if one["link"] == "dcn"]
    summed = sum(one["bytes"] * one["count"] for one in crossing if one["kind"] == "all-reduce")
    tables = 2 * 512 * 256  # embeddings and output projection, whose gradients are float32
    layers = found["run"]["parameters"] - tables  # bfloat16
    # A shard is a fourth, over FSDP and tensor parallelism.
    assert summed == pytest.approx((4 * tables + 2 * layers) / 4, rel=0.01)
    # And no more than a table of embeddings, where the stream is whole (`mesh.safe_rules`).
    table = 4 * 512 * 256
    assert sum(one["bytes"] * one["count"] for one in crossing) <= summed + 1.01 * table


@pytest.mark.tpu
@pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None, reason="libtpu, the TPU compiler, is not installed"
)
def test_between_stages_of_two_slices_go_microbatches_and_what_all_slices_hold(tmp_path, capsys):
    """Four stages, two in each slice. Gradients of layers are added up over `fsdp`, in a slice;
    of embeddings, final norm and output projection between slices too, and so are the loss's
    sums."""
    model = {"vocab_size": 512, "hidden_size": 256, "intermediate_size": 1024, "num_layers": 4}
    model |= {"num_heads": 4, "num_kv_heads": 2}
    mesh = {"slice": 2, "stage": 2, "fsdp": 2, "across": "stage"}
    run = {"model": model, "batch_size": 32, "seq_len": 256, "mesh": mesh}
    run["dtypes"] = {"compute": "bfloat16"}
    config, topology = from_mapping(TrainConfig, run), parse_topology("2*v5e:2x2")
    (tmp_path / "run.yaml").write_text(dump_yaml(config))
    words = ["--topology", topology.name, "--programs", "train", "--json", str(tmp_path / "plan")]
    assert main(["plan", "--config", str(tmp_path / "run.yaml"), *words]) == 0
    capsys.readouterr()
    found = json.loads((tmp_path / "plan").read_text())
    assert found["origin"] == "compiled"
    collectives = found["programs"][0]["collectives"]
    crossing = [one for one in collectives if one["link"] == "dcn"]
    assert all((one["link"] == "dcn") == ("slice" in one["axes"]) for one in collectives)
    assert {one["kind"] for one in crossing} == {"send-recv", "all-reduce"}

    def moved(rows, kind):
        return sum(round(one["bytes"] * one["count"]) for one in rows if one["kind"] == kind)

    guess = [row for row in estimate(config, topology).step.collectives if row.link == "dcn"]
    assert {row.axes for row in guess if row.kind == "collective-permute"} == {("slice", "stage")}
    passed = sum(row.bytes * row.count for row in guess if row.kind == "collective-permute")
    assert moved(crossing, "send-recv") == pytest.approx(passed, rel=0.02)
    outside = (2 * model["vocab_size"] + 1) * model["hidden_size"]
    layers = found["run"]["parameters"] - outside
    assert layers > 10 * outside
    # Shares of one device of four in float32; XLA adds up the embedding's in halves.
    assert outside * 4 / 4 < moved(crossing, "all-reduce") < 1.6 * outside * 4 / 4
    inside = [one for one in collectives if "fsdp" in one["axes"] and one["link"] != "dcn"]
    assert moved(inside, "all-reduce") + moved(inside, "reduce-scatter") > layers * 2 / 4


def test_without_libtpu_the_extra_is_named(capsys):
    import importlib.util

    if importlib.util.find_spec("libtpu") is not None:
        pytest.skip("libtpu is installed here")
    recipe = RECIPES / "qwen3-0.6b.yaml"
    assert main(["plan", "--config", str(recipe), "--topology", "v5e:2x4"]) == 2
    err = capsys.readouterr().err
    assert "pip install 'fornax-ai[tpu]'" in err
    assert "--predicted" in err
