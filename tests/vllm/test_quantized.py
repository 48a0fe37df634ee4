"""Quantized directories: vLLM over Fornax's worker serves what Fornax's own engine serves."""

from pathlib import Path

import numpy as np
import pytest
from tests.unit.models.quantized_models import SCHEMES, quantize_folder
from tests.vllm.conftest import SIZES, Pair, prompts_of, start, stop
from tests.vllm.models import make

import fornax.llm

GREEDY = {"temperature": 0.0, "max_tokens": 12, "ignore_eos": True}
PROMPTS = prompts_of(3, 33, 17, 25, 1, 9)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make("llama", tmp_path_factory.mktemp("model"))


@pytest.mark.parametrize("scheme", SCHEMES)
def test_tokens_are_those_of_the_own_engine(scheme: str, source: Path, tmp_path: Path) -> None:
    folder = quantize_folder(source, tmp_path / scheme, scheme)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_bytes((source / name).read_bytes())
    pair = Pair(scheme, folder, start(folder), fornax.llm.LLM(folder, **SIZES))
    try:
        found = pair.tokens(PROMPTS, GREEDY)
        assert found == pair.our_tokens(PROMPTS, GREEDY)
        assert len(np.unique(np.concatenate(found))) > 10, "too uniform to tell"
    finally:
        stop(pair.theirs)


def test_floats_are_not_rounded_on_the_way(source: Path) -> None:
    with pytest.raises(ValueError, match="make such files with `fornax quantize`"):
        start(source, quantization="fp8", dtype="bfloat16")
