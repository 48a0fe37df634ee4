"""Kubernetes: a JobSet of one pod per host, or a RayJob with a worker per host.

Fields as in the CustomResourceDefinitions jobset.x-k8s.io/v1alpha2 and ray.io/v1 (KubeRay 1.7);
labels and resource names of TPUs as GKE documents them, of GPUs as NVIDIA's device plugin does.
"""

import shlex
from typing import Any

from fornax.cluster.manifest.job import ManifestJob, yaml_documents
from fornax.config.errors import ConfigError

__all__ = ["jobset", "kuberay"]

_GKE_ACCELERATORS = {
    "v4": "tpu-v4-podslice",
    "v5e": "tpu-v5-lite-podslice",
    "v5p": "tpu-v5p-slice",
    "v6e": "tpu-v6e-slice",
    "tpu7x": "tpu7x",
}
_COORDINATOR_PORT, _LIBTPU_PORT, _MEGASCALE_PORT = 8476, 8471, 8080
_WORKSPACE = "/workspace"
_CONFIG = "/etc/fornax"
_USER = 1000  # of the Dockerfile
_SAVED = 143
_RAY_VERSION = "2.60.0"
_RAY_DASHBOARD_PORT = 8265


def jobset(job: ManifestJob) -> str:
    """A JobSet: one Job per slice, one pod per host; all start again together."""
    slices = job.topology.slices
    annotations = (
        {"alpha.jobset.sigs.k8s.io/exclusive-topology": "cloud.google.com/gke-nodepool"}
        if job.is_tpu
        else {}
    )
    spec = {
        "parallelism": job.hosts // slices,
        "completions": job.hosts // slices,
        "completionMode": "Indexed",
        "backoffLimit": 0,
        "podFailurePolicy": {
            "rules": [
                {
                    "action": "FailJob",
                    "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}],
                },
                {
                    "action": "FailJob",
                    "onExitCodes": {
                        "containerName": "fornax",
                        "operator": "In",
                        "values": [_SAVED],
                    },
                },
            ]
        },
        "template": {"spec": {"restartPolicy": "Never", **_own_pod(job)}},
    }
    document = {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": {"name": job.name, **({"annotations": annotations} if annotations else {})},
        "spec": {
            "network": {"enableDNSHostnames": True, "publishNotReadyAddresses": True},
            "failurePolicy": {
                "maxRestarts": job.restarts,
                "restartStrategy": "BlockingRecreate",
                "rules": [
                    {
                        "name": "preempted",
                        "action": "RestartJobSetAndIgnoreMaxRestarts",
                        "onJobFailureReasons": ["PodFailurePolicy"],
                    }
                ],
            },
            "replicatedJobs": [{"name": "slice", "replicas": slices, "template": {"spec": spec}}],
        },
    }
    head = (
        f"# {job.name} on {job.topology.name}, {job.hosts} hosts. Needs JobSet 0.10 or newer and "
        f"the claim {job.storage},\n# ReadWriteMany, for data and run directory. The policy lets "
        "only the run's own pods reach its ports.\n# kubectl apply -f FILE; kubectl logs -f -l "
        f"jobset.sigs.k8s.io/jobset-name={job.name}\n"
    )
    policy = _policy(job, {"jobset.sigs.k8s.io/jobset-name": job.name})
    return head + yaml_documents(_config_map(job), policy, document)


def kuberay(job: ManifestJob) -> str:
    """A RayJob: `fornax launch --engine ray` on the head, which recovers; one worker per host.

    Raises:
      ConfigError: for several slices of TPUs, whose variables nothing sets on Ray's pods.
    """
    if job.is_tpu and job.topology.slices > 1:
        raise ConfigError(
            f"{job.topology.name} has {job.topology.slices} slices, and nothing tells the pods of "
            "KubeRay how slices find each other; use the manifest of jobset"
        )
    launch = ["fornax", "launch", "--engine", "ray", "--address", "auto", "--private-network"]
    words = [*launch, "--hosts", str(job.hosts), "--", *job.words(_config_path(job))]
    labels = {"fornax-run": job.name}
    groups, hosts_each = (1, job.hosts) if job.is_tpu else (job.hosts, 1)
    ray: dict[str, Any] = {
        "rayVersion": _RAY_VERSION,
        "authOptions": {"mode": "token"},
        "headGroupSpec": {
            "rayStartParams": {"num-cpus": "0"},
            "template": {"metadata": {"labels": labels}, "spec": _ray_head(job)},
        },
        "workerGroupSpecs": [
            {
                "groupName": "hosts",
                "replicas": groups,
                "minReplicas": groups,
                "maxReplicas": groups,
                "numOfHosts": hosts_each,
                "rayStartParams": {},
                "template": {"metadata": {"labels": labels}, "spec": _ray_worker(job)},
            }
        ],
    }
    document = {
        "apiVersion": "ray.io/v1",
        "kind": "RayJob",
        "metadata": {"name": job.name},
        "spec": {
            "entrypoint": shlex.join(words),
            "shutdownAfterJobFinishes": True,
            "ttlSecondsAfterFinished": 300,
            "backoffLimit": job.restarts,
            "rayClusterSpec": ray,
        },
    }
    head = (
        f"# {job.name} on {job.topology.name}, {job.hosts} hosts. Needs KubeRay 1.7 or newer, "
        f"{'GKE with its Ray addon, ' if job.is_tpu else ''}the claim {job.storage},\n"
        "# ReadWriteMany, for data and run directory. The policy lets only the run's own pods "
        "reach its ports,\n# all others only the one that takes jobs, which needs Ray's token.\n"
        f"# kubectl apply -f FILE; kubectl logs -f job/{job.name}\n"
    )
    anybody = {"ports": [{"protocol": "TCP", "port": _RAY_DASHBOARD_PORT}]}
    return head + yaml_documents(_config_map(job), _policy(job, labels, anybody), document)


def _policy(job: ManifestJob, labels: dict[str, str], *further: dict[str, Any]) -> dict[str, Any]:
    """Only the run's own pods reach its ports, and whom `further` rules allow."""
    mine = {"matchLabels": labels}
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": {"name": job.name},
        "spec": {
            "podSelector": mine,
            "policyTypes": ["Ingress"],
            "ingress": [{"from": [{"podSelector": mine}]}, *further],
        },
    }


def _selector(job: ManifestJob) -> dict[str, str]:
    chip = job.topology.chip
    if not job.is_tpu:
        return {"nvidia.com/gpu.product": chip.kinds[0].replace(" ", "-")}
    if chip.name not in _GKE_ACCELERATORS:
        raise ConfigError(
            f"GKE's name for {chip.name} is not known here; it has {', '.join(_GKE_ACCELERATORS)}"
        )
    return {
        "cloud.google.com/gke-tpu-accelerator": _GKE_ACCELERATORS[chip.name],
        "cloud.google.com/gke-tpu-topology": "x".join(map(str, job.topology.shape)),
    }


def _own_pod(job: ManifestJob) -> dict[str, Any]:
    """The pod of a host, which runs the command."""
    container = {
        "name": "fornax",
        "command": ["fornax", *job.words(_config_path(job))],
        # The number of pods is in no variable of Kubernetes; the rest is discovered.
        "env": _environment({"JAX_NUM_PROCESSES": str(job.hosts), "JAX_PLATFORMS": job.platforms}),
        **_chips(job),
    }
    return _pod(job, container, _selector(job))


def _ray_head(job: ManifestJob) -> dict[str, Any]:
    """The pod that runs the launch; it trains nothing."""
    size = {"cpu": "4", "memory": "16Gi"}
    resources = {"limits": size, "requests": dict(size)}
    container = {"name": "ray-head", "env": _environment({}), "resources": resources}
    return {"restartPolicy": "Never", **_pod(job, container, {})}


def _ray_worker(job: ManifestJob) -> dict[str, Any]:
    """The pod of a host, in which Ray starts what the launch asks for."""
    variables = _environment({"JAX_PLATFORMS": job.platforms})
    container = {"name": "ray-worker", "env": variables, **_chips(job)}
    return {"restartPolicy": "Never", **_pod(job, container, _selector(job))}


def _environment(variables: dict[str, str]) -> list[dict[str, str]]:
    named = {"FORNAX_CACHE_DIR": f"{_WORKSPACE}/.cache/fornax", **variables}
    return [{"name": name, "value": value} for name, value in named.items()]


def _chips(job: ManifestJob) -> dict[str, Any]:
    """Of a container: a host's chips, and the ports over which they are used."""
    ports = {"coordinator": _COORDINATOR_PORT}
    if job.is_tpu:
        ports["libtpu"] = _LIBTPU_PORT
    if job.topology.slices > 1:
        ports["megascale"] = _MEGASCALE_PORT
    chips = {"google.com/tpu" if job.is_tpu else "nvidia.com/gpu": str(job.host_chips)}
    return {
        "ports": [{"name": name, "containerPort": port} for name, port in ports.items()],
        "resources": {"limits": chips, "requests": dict(chips)},
    }


def _pod(job: ManifestJob, container: dict[str, Any], selector: dict[str, str]) -> dict[str, Any]:
    """A pod with the run's volumes in its one container."""
    mounts = [
        {"name": "workspace", "mountPath": _WORKSPACE},
        {"name": "memory", "mountPath": "/dev/shm"},
    ]
    volumes: list[dict[str, Any]] = [
        {"name": "workspace", "persistentVolumeClaim": {"claimName": job.storage}},
        {"name": "memory", "emptyDir": {"medium": "Memory"}},  # 64 MB are too few for data workers
    ]
    if job.config is not None:
        mounts.append({"name": "config", "mountPath": _CONFIG})
        volumes.append({"name": "config", "configMap": {"name": f"{job.name}-config"}})
    common = {
        "image": job.image or f"fornax:{job.extra}",
        "workingDir": _WORKSPACE,
        "volumeMounts": mounts,
    }
    return {
        "terminationGracePeriodSeconds": job.grace,
        "securityContext": {"fsGroup": _USER},
        **({"nodeSelector": selector} if selector else {}),
        "containers": [container | common],
        "volumes": volumes,
    }


def _config_path(job: ManifestJob) -> str | None:
    return None if job.config is None else f"{_CONFIG}/{job.config.name}"


def _config_map(job: ManifestJob) -> dict[str, Any] | None:
    if job.config is None:
        return None
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": f"{job.name}-config"},
        "data": {job.config.name: job.config.read_text(encoding="utf-8")},
    }
