"""SLURM's batch script and SkyPilot's task, in which a shell starts one process per host."""

import math
import shlex

from fornax.cluster.manifest.job import ManifestJob, yaml_documents
from fornax.config.errors import ConfigError
from fornax.plan.topology import topology_shapes

__all__ = ["skypilot", "slurm"]

_COORDINATOR_PORT = 8476
_SAVED, _USER_ERROR = 143, 2
_SKYPILOT_GPUS = {"a100-40": "A100", "a100-80": "A100-80GB"}
_SKYPILOT_TPUS = ("v4", "v5e", "v5p", "v6e")


def slurm(job: ManifestJob) -> str:
    """A batch script: one task per node, requeued when it was preempted, out of time or failed."""
    if job.image is not None:
        raise ConfigError(
            "--image is for Kubernetes; in SLURM's script Fornax is what PATH finds, so load "
            "its environment there"
        )
    gpus = [] if job.is_tpu else [f"#SBATCH --gpus-per-node={job.host_chips}"]
    config = None if job.config is None else str(job.config)
    return "\n".join(
        [
            "#!/bin/bash",
            f"# {job.name} on {job.topology.name}, {job.hosts} nodes: sbatch --partition=NAME FILE",
            "# in a directory that all nodes share.",
            f"#SBATCH --job-name={job.name}",
            f"#SBATCH --nodes={job.hosts}",
            "#SBATCH --ntasks-per-node=1",
            *gpus,
            "#SBATCH --exclusive",
            f"#SBATCH --output={job.name}-%j.log",
            "#SBATCH --open-mode=append",
            "#SBATCH --requeue",
            f"#SBATCH --signal=TERM@{job.grace}",
            "",
            "set -u",
            f"export JAX_PLATFORMS={job.platforms}",
            "# The nodes find each other by SLURM's own variables. SIGTERM, before the time limit",
            f"# and at preemption, saves the run, which then ends with {_SAVED}.",
            f"srun --kill-on-bad-exit=1 --label {job.line(config)}",
            "code=$?",
            'case "$code" in',
            "  0) exit 0 ;;",
            f"  {_SAVED}) ;;",
            f'  {_USER_ERROR}) [ "${{SLURM_RESTART_COUNT:-0}}" -lt {min(2, job.restarts)} ] '
            '|| exit "$code" ;;',
            f'  *) [ "${{SLURM_RESTART_COUNT:-0}}" -lt {job.restarts} ] || exit "$code" ;;',
            "esac",
            'scontrol requeue "$SLURM_JOB_ID"',
            "",
        ]
    )


def skypilot(job: ManifestJob) -> str:
    """A task for `sky jobs launch`, which recovers it when it is preempted."""
    if job.image is not None:
        raise ConfigError("--image is for Kubernetes; SkyPilot's task installs Fornax in its setup")
    config = None if job.config is None else f"/tmp/fornax/{job.config.name}"
    mounts: dict[str, object] = {"/workspace": {"name": job.storage, "mode": "MOUNT"}}
    if job.config is not None:
        mounts[f"/tmp/fornax/{job.config.name}"] = str(job.config)
    task = {
        "name": job.name,
        "num_nodes": 1 if job.is_tpu else job.hosts,
        "resources": {
            "accelerators": _tpu_name(job) if job.is_tpu else _gpu_name(job),
            "use_spot": True,
            "job_recovery": {
                "max_restarts_on_errors": job.restarts,
                "recover_on_exit_codes": [_SAVED],
            },
        },
        "file_mounts": mounts,
        "envs": {"JAX_PLATFORMS": job.platforms},
        "setup": f"pip install {shlex.quote(f'fornax-ai[{job.extra},gcs,s3]')}\n",
        "run": _skypilot_run(job, config),
    }
    head = (
        f"# {job.name} on {job.topology.name}, {job.hosts} hosts: sky jobs launch FILE\n"
        f"# The bucket {job.storage} holds data and run directory; name one of yours with "
        "--storage.\n"
    )
    return head + yaml_documents(task)


def _skypilot_run(job: ManifestJob, config: str | None) -> str:
    lines = ["set -e", "cd /workspace"]
    if not job.is_tpu:  # the hosts of a TPU slice find each other through its metadata server
        lines += [
            'first="$(head -n 1 <<< "$SKYPILOT_NODE_IPS")"',
            f'export FORNAX_COORDINATOR="$first:{_COORDINATOR_PORT}"',
            'export FORNAX_NUM_PROCESSES="$SKYPILOT_NUM_NODES"',
            'export FORNAX_PROCESS_ID="$SKYPILOT_NODE_RANK"',
        ]
    return "\n".join([*lines, f"exec {job.line(config)}", ""])


def _gpu_name(job: ManifestJob) -> str:
    chip = job.topology.chip.name
    return f"{_SKYPILOT_GPUS.get(chip, chip.upper())}:{job.host_chips}"


def _tpu_name(job: ManifestJob) -> str:
    """SkyPilot asks for TPUs by their count; Cloud then chooses the most compact shape."""
    topology = job.topology
    if topology.chip.name not in _SKYPILOT_TPUS or topology.slices > 1:
        raise ConfigError(
            f"SkyPilot has no {topology.name}: it starts one slice of "
            f"{', '.join(_SKYPILOT_TPUS)}; use the manifest of jobset"
        )
    same = [s for s in topology_shapes(topology.chip) if math.prod(s) == math.prod(topology.shape)]
    compact = min(same, key=sum)
    if topology.shape != compact:
        wanted = "x".join(map(str, compact))
        raise ConfigError(
            f"SkyPilot asks for TPUs by their count, and {topology.num_chips} chips of "
            f"{topology.chip.name} come as {wanted}; use --topology {topology.chip.name}:{wanted}, "
            "or the manifest of jobset"
        )
    return f"tpu-{topology.accelerator}"
