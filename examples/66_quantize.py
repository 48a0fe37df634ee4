"""Make a model 4-bit by three schemes, and see what each costs on held-out text.

python examples/66_quantize.py
"""

import json
import tempfile
from pathlib import Path

from fornax.data import train_bpe
from fornax.models import DecoderConfig, create_decoder, save_pretrained
from fornax.quant import quantize

scratch = tempfile.TemporaryDirectory()
folder = Path(scratch.name)

# 1. A float model (of random weights here), its tokenizer, and text to calibrate with.
texts = [path.read_text() for path in sorted(Path(json.__file__).parent.glob("*.py"))]
train_bpe(texts, 512).save(folder / "tokenizer")
config = DecoderConfig(
    vocab_size=512, hidden_size=256, intermediate_size=512, num_layers=2, num_heads=4
)
save_pretrained(create_decoder(config), folder / "float", folder / "tokenizer")
(folder / "texts.jsonl").write_text("".join(json.dumps({"text": t}) + "\n" for t in texts))

# 2. The linear layers in 4 bits, the first layer's in 8; what is written is read back and compared.
for scheme in ("w4a16", "w4a16-gptq", "w4a16-awq"):
    report = quantize(
        folder / "float",
        folder / scheme,
        scheme=scheme,
        rules=["layers/0/=w8a16"],
        data=str(folder / "texts.jsonl"),
        length=64,
        samples=64,
    )
    held_out = report.held_out
    assert held_out is not None
    share = report.bytes_after / report.bytes_before
    print(f"{scheme}: {share:.0%} of the bytes, KL {held_out.kl:.2e} nats per token")
