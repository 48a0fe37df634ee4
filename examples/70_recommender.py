"""A recommender from training to a rollout: seal two versions, host them, switch, roll back.

python examples/70_recommender.py
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

from fornax import export
from fornax.export import Spec
from fornax.serving.client import V2Client
from fornax.serving.grpc.client import Client

USERS, ITEMS, WIDTH, CANDIDATES = 50, 100, 8, 8


def scores(params, user_B, items_BC):
    """How much each user may like each candidate: a product of embeddings plus what is popular."""
    user_BD = params["user"][user_B]
    item_BCD = params["item"][items_BC]
    return jnp.einsum("bd,bcd->bc", user_BD, item_BCD) + params["popular"][items_BC]


def predict(params, user, items):
    """What is exported: dictionaries of arrays out, one row a user."""
    score = scores(params, user, items)
    return {"score": score, "order": jnp.argsort(-score, axis=-1).astype(jnp.int32)}


# 1. Train on clicks that follow hidden tastes.
rng = np.random.default_rng(0)
taste, trait = rng.normal(size=(USERS, 4)), rng.normal(size=(ITEMS, 4))
users = rng.integers(0, USERS, 20_000).astype(np.int32)
shown = rng.integers(0, ITEMS, (20_000, CANDIDATES)).astype(np.int32)
clicked = np.einsum("bk,bck->bc", taste[users], trait[shown]).argmax(-1)

keys = jax.random.split(jax.random.key(0), 2)
params = {
    "user": 0.1 * jax.random.normal(keys[0], (USERS, WIDTH)),
    "item": 0.1 * jax.random.normal(keys[1], (ITEMS, WIDTH)),
    "popular": jnp.zeros(ITEMS),
}
untrained = params
optimizer = optax.adam(0.02)


@jax.jit
def step(params, state, user, items, label):
    def loss(p):
        logits = scores(p, user, items)
        return optax.softmax_cross_entropy_with_integer_labels(logits, label).mean()

    value, gradients = jax.value_and_grad(loss)(params)
    updates, state = optimizer.update(gradients, state)
    return optax.apply_updates(params, updates), state, value


state = optimizer.init(params)
for start in np.tile(np.arange(0, 19_000, 500), 6):
    rows = slice(start, start + 500)
    params, state, loss = step(params, state, users[rows], shown[rows], clicked[rows])
print(f"loss of the last batch {loss:.3f}; guessing has {np.log(CANDIDATES):.3f}")

scratch = tempfile.TemporaryDirectory()
models = Path(scratch.name) / "models"


# 2. Seal a version: any number of users at once, in batches of these sizes.
def seal(params, version):
    export.save(
        models / "ranker" / str(version),
        {"predict": predict},
        params,
        inputs={
            "predict": {
                "user": Spec(("b",), "int32", low=0, high=USERS),
                "items": Spec(("b", CANDIDATES), "int32", low=0, high=ITEMS),
            }
        },
        buckets={"b": [1, 8, 64]},
        platforms=["cpu"],
    )


seal(untrained, 1)

# 3. Loaded anywhere, it needs none of the code above.
loaded = export.load(models / "ranker" / "1")["predict"]
print("in this process:", loaded(user=users[:1], items=shown[:1])["order"])

# 4. Host it. A free port each: 0. (In a shell: fornax host models/ --http 8080 --grpc 8081)
command = [sys.executable, "-m", "fornax", "host", str(models), "--http", "0", "--grpc", "0"]
server = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
try:
    for line in server.stderr:
        if found := re.search(r"http://([\d.:]+) and grpc://([\d.:]+)", line):
            break
    host, _, port = found[1].rpartition(":")
    http, grpc = V2Client(address=(host, int(port))), Client(found[2])
    while not grpc.ready():  # until every model is
        time.sleep(0.1)

    def hit_rate():
        """How often the clicked item comes first, on clicks not trained on."""
        rows = slice(19_000, 20_000)
        answer = grpc.infer("ranker", {"user": users[rows], "items": shown[rows]})
        return float(np.mean(answer["order"][:, 0] == clicked[rows]))

    print(f"version 1 (untrained): {hit_rate():.0%}")

    # 5. Deploy version 2 next to it: it is loaded, checked and warmed, and then switched to.
    seal(params, 2)
    http.post("/v2/repository/models/ranker/load", {})
    print(f"version 2 (trained):   {hit_rate():.0%}")

    # 6. Roll back, with one call. (In a shell: fornax host rollback ranker)
    print(http.post("/v2/repository/models/ranker/rollback", {}))
    print(f"after the rollback:    {hit_rate():.0%}")
finally:
    server.terminate()
    server.wait(timeout=30)
    server.stderr.close()
    scratch.cleanup()
