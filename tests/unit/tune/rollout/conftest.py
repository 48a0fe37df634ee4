"""One tiny model and one engine for all of these tests: its compilation is what costs."""

import json
from collections.abc import Iterator

import pytest
from flax import nnx

from fornax.data import Tokenizer, train_bpe
from fornax.llm import EngineConfig
from fornax.models import Decoder, DecoderConfig
from fornax.tune.rollout import LLMSampler

WORDS = "the number is higher lower correct guess calculator result plus times yes no"


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    return train_bpe([f"{WORDS} {n} {json.dumps({'a': n})}" for n in range(50)], vocab_size=290)


@pytest.fixture(scope="session")
def model(tokenizer: Tokenizer) -> Decoder:
    config = DecoderConfig(
        vocab_size=290,
        hidden_size=32,
        intermediate_size=64,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=8,
        max_position_embeddings=256,
        eos_token_ids=(tokenizer.eos_id,),
    )
    made = Decoder(config, rngs=nnx.Rngs(0))
    # Logits worth calling so: drawn tokens are then not all equally likely.
    made.embed.embedding.set_value(made.embed.embedding.get_value() * 8)
    return made


@pytest.fixture(scope="session")
def engine() -> EngineConfig:
    return EngineConfig(
        max_num_seqs=8,
        max_num_batched_tokens=16,
        max_model_len=192,
        block_size=8,
        step_sizes="coarse",
    )


@pytest.fixture(scope="session")
def sampler(model: Decoder, tokenizer: Tokenizer, engine: EngineConfig) -> Iterator[LLMSampler]:
    made = LLMSampler(model, tokenizer=tokenizer, engine=engine)
    yield made
    assert made.stats().compilations == 0
    made.close()


@pytest.fixture(autouse=True)
def fresh(request: pytest.FixtureRequest) -> Iterator[None]:
    """The shared engine starts and ends each test with the model's own weights, awake and idle."""
    yield
    if "sampler" in request.fixturenames:
        shared = request.getfixturevalue("sampler")
        assert not shared.busy
        if shared.version:
            shared.update(request.getfixturevalue("model"), 0)
