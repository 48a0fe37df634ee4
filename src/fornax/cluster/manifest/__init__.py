"""Manifests: a run as another system's job, for KubeRay, JobSet, SLURM and SkyPilot."""

from fornax.cluster.manifest.job import SYSTEMS, ManifestJob, System, manifest_job
from fornax.cluster.manifest.kubernetes import jobset, kuberay
from fornax.cluster.manifest.scripts import skypilot, slurm

__all__ = ["SYSTEMS", "ManifestJob", "System", "manifest_job", "render"]

_RENDERERS = {"kuberay": kuberay, "jobset": jobset, "slurm": slurm, "skypilot": skypilot}


def render(system: System, job: ManifestJob) -> str:
    """The manifest of a job for a system: YAML documents, or a batch script for SLURM.

    Raises:
      ConfigError: for what the system cannot run.
    """
    return _RENDERERS[system](job)
