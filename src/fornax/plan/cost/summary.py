"""What a plan says of its chips, of a program whose facts are known, and of a training step."""

from fornax.plan.cost.step import predict_step
from fornax.plan.facts import Hardware, ProgramReport, Run, Speed, StepFacts
from fornax.plan.topology import Topology


def report_facts(name: str, facts: StepFacts, topology: Topology) -> ProgramReport:
    """The program `name` with its predicted time."""
    time = predict_step(facts, topology)
    return ProgramReport(
        name=name,
        memory=facts.memory,
        flops=sum(row.flops for row in time.work),
        bytes=sum(row.bytes for row in time.work),
        step_seconds=time.step_seconds,
        compute_seconds=time.compute_seconds,
        exposed_seconds=time.exposed_seconds,
        optimistic_seconds=time.optimistic_seconds,
        pessimistic_seconds=time.pessimistic_seconds,
        bound=time.bound,
        work=time.work,
        collectives=time.collectives,
        notes=time.notes,
    )


def describe_hardware(topology: Topology, dtype: str) -> Hardware:
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


def describe_speed(program: ProgramReport, run: Run, hardware: Hardware) -> Speed:
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
