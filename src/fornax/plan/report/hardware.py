"""The chips and the run of a plan, from a topology and a config."""

from fornax.mesh import MeshConfig
from fornax.models import flops_per_token, num_parameters
from fornax.plan.report.data import Hardware, Run, Speed
from fornax.plan.report.program import ProgramReport
from fornax.plan.topology import Topology
from fornax.train import TrainConfig

__all__ = ["hardware_of", "run_of", "speed_of"]


def hardware_of(topology: Topology, dtype: str) -> Hardware:
    """What is known of the chips; the peak is that of products of `dtype`."""
    chip = topology.chip
    return Hardware(
        topology=topology.name,
        chip=chip.name,
        platform=chip.platform,
        chips=topology.num_chips,
        devices=topology.num_devices,
        hosts=topology.num_hosts,
        slices=topology.slices,
        peak_flops=chip.peak(dtype),
        peak_dtype=dtype,
        memory_bandwidth=chip.memory_bandwidth,
        memory_bytes=int(chip.memory_bytes),
        sources=dict(chip.sources),
    )


def run_of(config: TrainConfig, topology: Topology) -> Run:
    """What would run.

    Raises:
      ShardingError: when the mesh does not cover the devices.
    """
    model = config.model
    if model is None:
        raise ValueError("resolve config.model from init_from before planning")
    tokens = config.batch_size * config.seq_len
    return Run(
        parameters=num_parameters(model),
        batch_size=config.batch_size,
        seq_len=config.seq_len,
        accumulate=config.accumulate,
        steps=config.steps,
        remat=_remat(config),
        params_dtype=config.dtypes.params,
        compute_dtype=config.dtypes.compute,
        mesh=_large(config.mesh, topology),
        model_flops=float(flops_per_token(model, config.seq_len)) * tokens,
    )


def _large(mesh: MeshConfig, topology: Topology) -> dict[str, int]:
    sizes = mesh.resolved_sizes(topology.num_devices)
    return {axis: size for axis, size in sizes.items() if size > 1}


def _remat(config: TrainConfig) -> str:
    kept = [f"{', '.join(config.remat_save)} kept"] if config.remat_save else []
    kept += [f"{', '.join(config.remat_offload)} offloaded"] if config.remat_offload else []
    return f"{config.remat} ({'; '.join(kept)})" if kept else config.remat


def speed_of(program: ProgramReport, run: Run, hardware: Hardware) -> Speed:
    """Utilisation and throughput of a training step."""
    step, chips = program.step_seconds, hardware.chips
    peak = hardware.peak_flops * step
    return Speed(
        step_seconds=step,
        mfu=run.model_flops / chips / peak,
        hfu=program.flops / peak,
        tokens_per_second_per_chip=run.tokens / step / chips,
        tokens_per_day=run.tokens / step * 86_400,
        bound=program.bound,
    )
