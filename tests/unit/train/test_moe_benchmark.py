"""What the benchmarks of experts say of their models is what the library counts."""

import importlib
from pathlib import Path
from types import ModuleType

import pytest

from fornax.models import config_from_hf, flops_per_token, num_parameters

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("moe_step")


@pytest.mark.parametrize("name", ["small", "large", "tiny"])
def test_parameters_and_flops_are_those_of_the_library(bench: ModuleType, name: str) -> None:
    shape = bench.SHAPES[name]
    config = config_from_hf(shape.model.config())
    assert shape.model.parameters == num_parameters(config)
    table = config.vocab_size * config.hidden_size
    assert shape.model.active == num_parameters(config, active=True) - table
    # The library counts pairs that are masked too, the benchmark norms as well.
    tokens, width, head = shape.batch * shape.length, config.hidden_size, shape.model.head_dim
    masked = 6 * tokens * config.num_layers * config.num_heads * head * shape.length
    norms = 6 * tokens * (config.num_layers * (2 * width + 2 * head) + width)
    full = tokens * flops_per_token(config, shape.length)
    assert shape.flops() == full - masked + norms


def test_a_contestant_that_trains_another_model_is_refused(bench: ModuleType) -> None:
    def said(*losses: float) -> object:
        return bench._harness.Result(details={"losses": list(losses)})

    results = {"fornax": said(9.0, 8.5, 8.0), "fornax-dense": said(7.0, 6.0, 5.0)}
    bench.check_losses(results | {"jax-blocks": said(9.001, 8.49, 8.01)})
    with pytest.raises(bench._harness.FailedError, match=r"jax-blocks.*another model"):
        bench.check_losses(results | {"jax-blocks": said(9.01, 8.5, 8.0)})
