"""Check that a config computes on its mesh what one device computes, before renting the mesh.

python examples/51_preflight.py

It runs on any machine, whatever devices it has: eight virtual CPU devices stand for the mesh.
"""

from fornax.mesh import MeshConfig
from fornax.models import DecoderConfig
from fornax.preflight import format_check, preflight
from fornax.train import TrainConfig

config = TrainConfig(
    model=DecoderConfig(
        vocab_size=32_000,
        hidden_size=2048,
        intermediate_size=5632,
        num_layers=24,
        num_heads=32,
        num_kv_heads=4,
    ),
    seq_len=2048,
    batch_size=256,
    accumulate=2,
    mesh=MeshConfig(fsdp=-1, tensor=4),
)

report = preflight(
    config,
    quick=True,
    only=("rules", "data", "mesh"),
    progress=lambda check: print(format_check(check)),
)
print(report.paragraph())
assert report.ok

# An override of the rules that divides nothing is an error that says so.
mesh = MeshConfig(fsdp=1, tensor=4, context=2, rules={"length": ()})
report = preflight(
    TrainConfig(model=config.model, batch_size=256, mesh=mesh), quick=True, only=("rules",)
)
assert report.first_failure is not None
print(report.first_failure.detail)
