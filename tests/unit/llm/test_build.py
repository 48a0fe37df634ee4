"""Putting an engine together leaves what it was given as it was."""

from fornax.data import train_bpe
from fornax.llm.build import build_engine
from fornax.llm.config import EngineConfig
from fornax.models import DecoderConfig, create_decoder


def test_a_tokenizer_in_memory_stays_as_it_was():
    tokenizer = train_bpe(["to be or not to be"] * 4, vocab_size=280)
    config = DecoderConfig(
        vocab_size=280, hidden_size=16, intermediate_size=16, num_layers=1, num_heads=2,
        max_position_embeddings=32,
    )  # fmt: skip
    limits = EngineConfig(max_num_seqs=2, max_num_batched_tokens=4)
    parts = build_engine(create_decoder(config), limits, tokenizer=tokenizer)
    assert parts.tokenizer is not None
    [special] = parts.tokenizer.backend.encode("<|endoftext|>").ids
    assert special == tokenizer.eos_id
    assert len(tokenizer.encode("<|endoftext|>")) > 1, "data that spells a special token became one"
