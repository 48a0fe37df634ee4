"""A GGUF file serves as the directory that it is converted to."""

from pathlib import Path

import numpy as np
import pytest
from tests.gguf_blocks import gguf_file
from tests.integration.llm.helpers import SIZES, prompts_of
from tests.unit.gguf.files import TINY, tiny_tensors, tiny_tokenizer, write

from fornax.llm import LLM, SamplingParams
from fornax.models import load_pretrained, open_pretrained
from fornax.train import convert

CHAT = [{"role": "user", "content": "in the ring"}]


@pytest.mark.slow
def test_a_file_and_its_directory_answer_alike(tmp_path: Path) -> None:
    """Tokenizer, chat template and the tokens that end an answer are the file's."""
    metadata = {**TINY, **tiny_tokenizer(), "llama.context_length": 512}
    codes = np.random.default_rng(0).integers(-2, 3, (64, 32), dtype=np.int8)
    tensors = {**tiny_tensors(), "blk.1.ffn_up.weight": codes}
    path = write(tmp_path / "model.gguf", metadata, tensors)
    assert convert(path, tmp_path / "bf16").dtype == "bfloat16"
    parity = convert(path, tmp_path / "hf", dtype="float32")
    assert (parity.prompts, parity.max_abs_difference) == ("text", 0.0)
    kernel = open_pretrained(tmp_path / "hf").read("layers/mlp/up/kernel")
    np.testing.assert_array_equal(kernel[1].T, codes * np.float32(0.5))
    answers = []
    for model in (path, tmp_path / "hf"):
        llm = LLM(model, dtype="float32", **SIZES)
        params = SamplingParams(temperature=0.0, max_tokens=12)
        answers += [(x.prompt_token_ids, x.outputs[0].token_ids) for x in llm.chat(CHAT, params)]
    assert answers[0] == answers[1]
    assert answers[0][0][-1] == 298  # <|im_end|>


@pytest.mark.slow
def test_an_engine_computes_with_the_blocks_of_its_file(tmp_path: Path) -> None:
    """The same file dequantized differs by the rounding of rows to 8 bits."""
    path = gguf_file(tmp_path / "model.gguf", tied=True)
    params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0)
    scores, sizes = [], []
    for model in (path, load_pretrained(path, "float32")):
        llm = LLM(model, dtype="float32", **SIZES, step_sizes="coarse")
        sizes.append(llm.weights.nbytes)
        for output in llm.generate(prompts_of(30, 41), params):
            assert output.prompt_logprobs is not None
            places = output.prompt_logprobs[1:]
            scores.append(np.array([next(iter(place.values())).logprob for place in places]))
    assert sizes[0] < 0.7 * sizes[1]
    for served, wide in zip(scores[:2], scores[2:], strict=True):
        assert wide.std() > 0.1
        np.testing.assert_allclose(served, wide, atol=0.05 * wide.std())
