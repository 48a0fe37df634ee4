"""A text encoder behind strings: bytes in, embeddings out, ragged lengths padded and masked.

python examples/71_text_encoder.py
"""

import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from fornax import export
from fornax.export import Spec
from fornax.serving.grpc.client import Client

WIDTH, HEADS, LAYERS, LONGEST = 64, 4, 2, 64


class Block(nnx.Module):
    """Attention and an MLP, each after a norm; padded keys are not seen."""

    def __init__(self, rngs):
        self.norm1, self.norm2 = nnx.LayerNorm(WIDTH, rngs=rngs), nnx.LayerNorm(WIDTH, rngs=rngs)
        self.qkv = nnx.LinearGeneral(WIDTH, (3, HEADS, WIDTH // HEADS), rngs=rngs)
        self.out = nnx.LinearGeneral((HEADS, WIDTH // HEADS), WIDTH, axis=(-2, -1), rngs=rngs)
        self.up, self.down = (
            nnx.Linear(WIDTH, 4 * WIDTH, rngs=rngs),
            nnx.Linear(4 * WIDTH, WIDTH, rngs=rngs),
        )

    def __call__(self, x_BTD, mask_BT):
        q, k, v = jnp.moveaxis(self.qkv(self.norm1(x_BTD)), 2, 0)
        seen_B1T = mask_BT[:, None, None, :]
        x_BTD += self.out(jax.nn.dot_product_attention(q, k, v, mask=seen_B1T))
        return x_BTD + self.down(nnx.gelu(self.up(self.norm2(x_BTD))))


class Encoder(nnx.Module):
    """Bytes to a unit vector: the mean over a text's own bytes, whatever it was padded to."""

    def __init__(self, rngs):
        self.bytes = nnx.Embed(256, WIDTH, rngs=rngs)
        self.places = nnx.Embed(LONGEST, WIDTH, rngs=rngs)
        self.blocks = nnx.List([Block(rngs) for _ in range(LAYERS)])

    def __call__(self, text_BT, length_B):
        places_T = jnp.arange(text_BT.shape[1])
        mask_BT = places_T < length_B[:, None]
        x_BTD = self.bytes(text_BT) + self.places(places_T)
        for block in self.blocks:
            x_BTD = block(x_BTD, mask_BT)
        mean_BD = jnp.sum(x_BTD * mask_BT[..., None], 1) / jnp.maximum(length_B, 1)[:, None]
        return mean_BD / jnp.linalg.norm(mean_BD, axis=-1, keepdims=True)


# 1. Train on the standard library's own words: a line and the line with slips of the pen belong
# together.
def sentences():
    """Lines of docstrings."""
    lines = []
    for path in sorted(Path(subprocess.__file__).parent.glob("*.py")):
        lines += re.findall(r'"""([A-Z][\w ,]{20,60})\.', path.read_text(errors="ignore"))
    return sorted(set(lines))


def with_slips(text):
    """The text in lower case, without every sixth letter or so."""
    return "".join(letter for letter in text.lower() if rng.random() > 0.17)


def padded(texts):
    """uint8 [B, LONGEST] and the lengths, as the exported function takes them."""
    kept = [text.encode()[:LONGEST] for text in texts]
    rows = [np.frombuffer(text.ljust(LONGEST, b"\0"), np.uint8) for text in kept]
    return np.stack(rows), np.array([len(text) for text in kept], np.int32)


encoder = Encoder(nnx.Rngs(0))
graph, weights = nnx.split(encoder, nnx.Param)
optimizer = optax.adam(2e-3)
state = optimizer.init(weights)


@jax.jit
def step(weights, state, first, second):
    def loss(weights):
        model = nnx.merge(graph, weights)
        likeness_BB = 20.0 * model(*first) @ model(*second).T
        labels = jnp.arange(likeness_BB.shape[0])
        return optax.softmax_cross_entropy_with_integer_labels(likeness_BB, labels).mean()

    value, gradients = jax.value_and_grad(loss)(weights)
    updates, state = optimizer.update(gradients, state)
    return optax.apply_updates(weights, updates), state, value


rng = np.random.default_rng(0)
library = sentences()
for number in range(80):
    chosen = [library[i] for i in rng.choice(len(library), 32, replace=False)]
    first, second = padded(chosen), padded([with_slips(text) for text in chosen])
    weights, state, value = step(weights, state, first, second)
    if number % 20 == 19:
        print(f"step {number + 1}: loss {value:.2f}")
nnx.update(encoder, weights)

# 2. Seal it. "bytes": clients send strings; the function sees uint8 [b, t] and each row's length.
scratch = tempfile.TemporaryDirectory()
models = Path(scratch.name) / "models"
export.save(
    models / "encoder" / "1",
    {"embed": lambda model, text, length: {"embedding": model(text, length)}},
    encoder,
    inputs={"embed": {"text": Spec(("b", "t"), "bytes", lengths="length")}},
    buckets={"b": [1, 4, 16], "t": [16, 32, LONGEST]},
    platforms=["cpu"],
)
(models / "encoder" / "serving.yaml").write_text("batching: {max_delay_ms: 2}\n")

# 3. Host it and ask for the nearest of some texts.
command = [sys.executable, "-m", "fornax", "host", str(models), "--http", "none", "--grpc", "0"]
server = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
try:
    for line in server.stderr:
        if found := re.search(r"grpc://([\d.:]+)", line):
            break
    client = Client(found[1])
    while not client.ready():
        time.sleep(0.1)

    def embed(texts):
        kept = np.array([text.encode()[:LONGEST] for text in texts], object)
        return client.infer("encoder", {"text": kept})["embedding"]

    vectors = embed(library)  # more rows than the largest batch: the server splits and joins
    found = 0
    for number in range(0, len(library), 8):
        question = with_slips(library[number])
        [vector] = embed([question])
        nearest = int(np.argmax(vectors @ vector))
        found += nearest == number
        if number < 24:
            print(f"{question!r}: nearest is {library[nearest]!r}")
    print(f"found {found} of {len(range(0, len(library), 8))} among {len(library)} texts")
finally:
    server.terminate()
    server.wait(timeout=30)
    server.stderr.close()
    scratch.cleanup()
