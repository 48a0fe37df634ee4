"""Models on meshes that share devices: programs that communicate never wait for each other."""

import asyncio
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fornax import export
from fornax.export import Spec
from fornax.mesh import MeshConfig
from fornax.serving.events import Events
from fornax.serving.execution.devices import DevicePool
from fornax.serving.execution.servable import Servable
from fornax.serving.settings import ModelSettings, OnMesh, Replicas
from fornax.serving.types import InferRequest

RANDOM = np.random.default_rng(0)
PARAMS = {
    "up": RANDOM.standard_normal((8, 64)).astype("f"),
    "down": RANDOM.standard_normal((64, 4)).astype("f"),
}


def hidden(params, x):
    return {"y": jnp.tanh(x @ params["up"]) @ params["down"]}


@pytest.mark.slow
def test_models_on_a_ring_of_meshes_serve_side_by_side(tmp_path):
    export.save(
        tmp_path / "m",
        {"hidden": hidden},
        PARAMS,
        inputs={"hidden": {"x": Spec(("b", 8), "float32")}},
        buckets={"b": [1, 8]},
        platforms=("cpu",),
        check=False,
        axes={"up": (None, "mlp"), "down": ("mlp", None)},
    )
    pool = DevicePool(numbers=range(4))
    pair = MeshConfig(tensor=2, fsdp=1)
    layouts = [
        OnMesh(mesh=MeshConfig(tensor=4, fsdp=1)),
        OnMesh(mesh=pair, devices=(0, 1)),
        OnMesh(mesh=pair, devices=(1, 2)),
        OnMesh(mesh=pair, devices=(2, 0)),
        Replicas(count=0),
    ]
    x = RANDOM.standard_normal((3, 8)).astype("f")
    expected = np.tanh(x @ PARAMS["up"]) @ PARAMS["down"]

    async def client(model: Servable, until: float) -> None:
        count = 0
        while not count or time.monotonic() < until:
            result = await model.submit(InferRequest("m", {"x": x}))
            np.testing.assert_allclose(result.outputs["y"], expected, rtol=1e-4, atol=1e-4)
            count += 1

    async def run() -> None:
        models = [
            await Servable.create(
                export.open_bundle(tmp_path / "m"), ModelSettings(devices=layout), pool, Events()
            )
            for layout in layouts
        ]
        until = time.monotonic() + 2
        clients = [client(model, until) for model in models for _ in range(8)]
        await asyncio.wait_for(asyncio.gather(*clients), 600)
        for model in models:
            await model.close()

    arrays = len(jax.live_arrays())
    asyncio.run(run())
    assert pool.memory.used("cpu") == 0
    assert len(jax.live_arrays()) <= arrays
