"""Run a language model in your own program: batches, seeds, constraints, new weights.

python examples/40_llm.py
"""

import tempfile
from pathlib import Path

from fornax.data import train_bpe
from fornax.llm import LLM, SamplingParams, StructuredOutputsParams
from fornax.models import DecoderConfig, create_decoder, save_pretrained

with tempfile.TemporaryDirectory() as scratch:
    folder = Path(scratch) / "model"
    # A model directory as Hugging Face writes it. Its weights are random: it talks nonsense.
    sources = (path.read_text() for path in sorted(Path(__file__).parent.glob("*.py")))
    tokenizer = train_bpe(sources, vocab_size=512)
    config = DecoderConfig(
        vocab_size=512, hidden_size=64, intermediate_size=128, num_layers=2, num_heads=4,
        max_position_embeddings=256, eos_token_ids=(tokenizer.eos_id or 0,),
    )  # fmt: skip
    save_pretrained(create_decoder(config, seed=1), folder)
    tokenizer.save(folder)

    llm = LLM(folder, max_num_seqs=4, max_num_batched_tokens=16)

    # A seeded request returns the same tokens alone and in company.
    seeded = SamplingParams(temperature=1.0, seed=7, max_tokens=12)
    [alone] = llm.generate("def main(", seeded)
    others = SamplingParams(temperature=1.0, max_tokens=5)
    together = llm.generate(["import", "def main(", "class"], [others, seeded, others])
    assert together[1].outputs[0].token_ids == alone.outputs[0].token_ids

    # Even a random model keeps to a schema.
    schema = {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"]}
    constraint = StructuredOutputsParams(json=schema, disable_any_whitespace=True)
    [answer] = llm.generate(
        "Answer: ", SamplingParams(structured_outputs=constraint, max_tokens=64, seed=1)
    )
    print("within the schema:", answer.outputs[0].text)

    # New weights, as a trainer would hand them over: tokens say which version made them.
    llm.update_weights(create_decoder(config, seed=2), version=1)
    [after] = llm.generate("def main(", seeded)
    print("versions:", alone.outputs[0].versions[:3], "then", after.outputs[0].versions[:3])
    assert after.outputs[0].token_ids != alone.outputs[0].token_ids
