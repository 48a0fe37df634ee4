"""Manifests: every field is one that the system publishes, and its hosts find each other.

schemas/jobset.json and rayjob.json are the published CustomResourceDefinitions (JobSet v1alpha2,
KubeRay 1.7 ray.io/v1) without descriptions, cut below what no manifest uses; unknown fields fail.
"""

import json
import re
import shlex
import subprocess
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from fornax.cli.main import main
from fornax.mesh.launchers import discover

SCHEMAS = Path(__file__).parent / "schemas"
CONFIG = "steps: 20\nmesh: {fsdp: -1}\n"
TOPOLOGIES = [(16, "v5p:4x4x4"), (8, "2*v6e:4x4"), (1, "v5e:2x4"), (4, "h100:4x8")]

# The fields that manifests use, with their names and types in SkyPilot 0.14.1's schemas of tasks,
# resources and storage (sky/utils/schemas.py), which take more types for some of them.
SKYPILOT: dict[str, Any] = {
    "type": "object",
    "additionalProperties": False,
    "required": ["run"],
    "properties": {
        "name": {"type": "string", "pattern": "^[a-zA-Z0-9]+(?:[._-]{1,2}[a-zA-Z0-9]+)*$"},
        "num_nodes": {"type": "integer", "minimum": 1},
        "resources": {
            "type": "object",
            "additionalProperties": False,
            "properties": {
                "accelerators": {"type": "string"},
                "use_spot": {"type": "boolean"},
                "job_recovery": {
                    "type": "object",
                    "additionalProperties": False,
                    "properties": {
                        "strategy": {"type": ["string", "null"]},
                        "max_restarts_on_errors": {"type": "integer", "minimum": 0},
                        "recover_on_exit_codes": {
                            "type": "array",
                            "items": {"type": "integer", "minimum": 0, "maximum": 255},
                            "uniqueItems": True,
                        },
                    },
                },
            },
        },
        "file_mounts": {
            "type": "object",
            "additionalProperties": {
                "anyOf": [
                    {"type": "string"},
                    {
                        "type": "object",
                        "additionalProperties": False,
                        "properties": {
                            "name": {"type": "string"},
                            "source": {"type": "string"},
                            "mode": {"enum": ["MOUNT", "COPY", "MOUNT_CACHED"]},
                        },
                    },
                ]
            },
        },
        "envs": {
            "type": "object",
            "patternProperties": {"^[a-zA-Z_][a-zA-Z0-9_]*$": {"type": ["string", "null"]}},
            "additionalProperties": False,
        },
        "setup": {"type": "string"},
        "run": {"type": "string"},
    },
}
SBATCH = {
    *("job-name", "nodes", "ntasks-per-node", "gpus-per-node", "exclusive", "output"),
    *("open-mode", "requeue", "signal"),
}


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "run.yaml"
    path.write_text(CONFIG)
    return path


@pytest.fixture
def manifest(config: Path, capsys: pytest.CaptureFixture[str]) -> Any:
    """The command's output, or the paragraph with which it refuses."""

    def call(system: str, hosts: int, topology: str, *words: str, flags: tuple = ()) -> str:
        command = ["launch", "manifest", system, "--hosts", str(hosts), "--topology", topology]
        command += [*flags, "--", "train", "--config", str(config)]
        if "*" in topology and "--mesh.slice" not in words:
            command += ["--mesh.slice", topology.partition("*")[0]]
        code = main([*command, *words])
        said = capsys.readouterr()
        assert "\n" not in said.err.strip()
        assert (code, bool(said.out)) == ((2, False) if said.err else (0, True)), said
        return said.err or said.out

    return call


def one(text: str, kind: str) -> dict[str, Any]:
    found = [d for d in yaml.safe_load_all(text) if d["kind"] == kind]
    assert len(found) == 1
    return found[0]


def check(document: dict[str, Any], schema: str) -> None:
    validator = jsonschema.Draft202012Validator(json.loads((SCHEMAS / schema).read_text()))
    assert not [error.message for error in validator.iter_errors(document)]


def environment(container: dict[str, Any]) -> dict[str, str]:
    return {each["name"]: each["value"] for each in container["env"]}


@pytest.mark.parametrize(("hosts", "topology"), TOPOLOGIES)
def test_a_jobset_is_one_and_its_pods_find_each_other(manifest: Any, hosts: int, topology: str):
    text = manifest("jobset", hosts, topology)
    jobset = one(text, "JobSet")
    check(jobset, "jobset.json")
    spec = jobset["spec"]
    (replicated,) = spec["replicatedJobs"]
    job = replicated["template"]["spec"]
    slices, each = replicated["replicas"], job["completions"]
    assert slices * each == hosts
    assert job["parallelism"] == each
    pod = job["template"]["spec"]
    (container,) = pod["containers"]
    assert job["podFailurePolicy"]["rules"][1]["onExitCodes"]["containerName"] == container["name"]
    assert pod["restartPolicy"] == "Never"  # which a podFailurePolicy demands
    volumes = {volume["name"] for volume in pod["volumes"]}
    assert {mount["name"] for mount in container["volumeMounts"]} == volumes
    found = set()
    for number in range(hosts):
        job_index, index = divmod(number, each)
        # What JobSet, and for TPUs GKE's webhook, set in the pod of this number.
        host = f"run-slice-{job_index}-{index}.run.ns.svc.cluster.local"
        injected = {"KUBERNETES_SERVICE_HOST": "10.0.0.1", "JOB_COMPLETION_INDEX": str(index)}
        if "google.com/tpu" in container["resources"]["limits"]:
            names = [f"run-slice-{job_index}-{n}.run" for n in range(each)]
            injected |= {"TPU_WORKER_ID": str(index), "TPU_WORKER_HOSTNAMES": ",".join(names)}
        if slices > 1:
            injected |= {
                "MEGASCALE_COORDINATOR_ADDRESS": "run-slice-0-0.run",
                "MEGASCALE_NUM_SLICES": str(slices),
                "MEGASCALE_SLICE_ID": str(job_index),
            }
        variables = injected | environment(container)
        launched = discover(variables, hostname=lambda host=host: host)
        assert launched.num_processes == hosts
        if hosts > 1:
            assert launched.coordinator is not None
            assert launched.coordinator.startswith("run-slice-0-0.run")
            found.add(launched.process_id)
    assert found == (set(range(hosts)) if hosts > 1 else set())


def test_tpus_gpus_and_images_are_named_as_the_cluster_names_them(manifest: Any):
    def pod(hosts: int, topology: str, **keywords: Any) -> dict[str, Any]:
        document = one(manifest("jobset", hosts, topology, **keywords), "JobSet")
        job = document["spec"]["replicatedJobs"][0]["template"]["spec"]
        return job["template"]["spec"]

    tpu = pod(16, "v5p:4x4x4")
    assert tpu["nodeSelector"] == {
        "cloud.google.com/gke-tpu-accelerator": "tpu-v5p-slice",
        "cloud.google.com/gke-tpu-topology": "4x4x4",
    }
    assert tpu["containers"][0]["resources"]["limits"] == {"google.com/tpu": "4"}
    assert pod(1, "v5e:2x4")["containers"][0]["resources"]["limits"] == {"google.com/tpu": "8"}
    gpu = pod(4, "h100:4x8", flags=("--image", "eu.example/fornax:7", "--grace", "45"))
    assert gpu["containers"][0]["resources"]["limits"] == {"nvidia.com/gpu": "8"}
    assert gpu["containers"][0]["image"] == "eu.example/fornax:7"
    assert environment(gpu["containers"][0])["JAX_PLATFORMS"] == "cuda,cpu"
    assert gpu["terminationGracePeriodSeconds"] == 45


def test_only_the_runs_own_pods_reach_its_ports(manifest: Any):
    policy = one(manifest("jobset", 16, "v5p:4x4x4"), "NetworkPolicy")["spec"]
    mine = {"matchLabels": {"jobset.sigs.k8s.io/jobset-name": "run"}}
    assert policy == {
        "podSelector": mine,
        "policyTypes": ["Ingress"],
        "ingress": [{"from": [{"podSelector": mine}]}],
    }


def test_the_config_travels_with_the_job(manifest: Any):
    text = manifest("jobset", 16, "v5p:4x4x4", "--run-dir", "runs/big one", "--steps=7")
    assert one(text, "ConfigMap")["data"] == {"run.yaml": CONFIG}
    assert one(text, "ConfigMap")["metadata"]["name"] == "big-one-config"
    job = one(text, "JobSet")["spec"]["replicatedJobs"][0]["template"]["spec"]
    command = job["template"]["spec"]["containers"][0]["command"]
    run_dir = ["--run-dir", "runs/big one"]
    assert command[:6] == ["fornax", "train", "--config", "/etc/fornax/run.yaml", *run_dir]
    assert "--steps=7" in command


@pytest.mark.parametrize(("hosts", "topology"), [(16, "v5p:4x4x4"), (4, "h100:4x8")])
def test_a_rayjob_is_one_and_launches_on_all_hosts(manifest: Any, hosts: int, topology: str):
    text = manifest("kuberay", hosts, topology, "--run-dir", "runs/big one")
    job = one(text, "RayJob")
    check(job, "rayjob.json")
    cluster = job["spec"]["rayClusterSpec"]
    (group,) = cluster["workerGroupSpecs"]
    assert group["replicas"] * group["numOfHosts"] == hosts
    assert cluster["authOptions"] == {"mode": "token"}
    words = shlex.split(job["spec"]["entrypoint"])
    assert words[: words.index("--")] == [
        *("fornax", "launch", "--engine", "ray", "--address", "auto", "--private-network"),
        *("--hosts", str(hosts)),
    ]
    assert words[words.index("--run-dir") + 1] == "runs/big one"
    policy = one(text, "NetworkPolicy")["spec"]
    assert policy["ingress"][0] == {"from": [{"podSelector": policy["podSelector"]}]}
    mine = policy["podSelector"]["matchLabels"]
    for part in (cluster["headGroupSpec"], group):
        assert part["template"]["metadata"]["labels"] == mine
        (container,) = part["template"]["spec"]["containers"]
        volumes = {volume["name"] for volume in part["template"]["spec"]["volumes"]}
        assert {mount["name"] for mount in container["volumeMounts"]} == volumes
    assert "JAX_PLATFORMS" not in environment(
        cluster["headGroupSpec"]["template"]["spec"]["containers"][0]
    )  # the launch hands its own to the hosts


def test_slices_that_ray_does_not_tell_of_each_other_are_refused(manifest: Any):
    assert "use the manifest of jobset" in manifest("kuberay", 8, "2*v6e:4x4")


@pytest.mark.parametrize(("hosts", "topology"), [(16, "v5p:4x4x4"), (4, "h100:4x8")])
def test_a_batch_script_is_read_by_bash_and_has_slurms_directives(
    manifest: Any, tmp_path: Path, hosts: int, topology: str
):
    text = manifest("slurm", hosts, topology, "--data.source.path", "it's here")
    script = tmp_path / "job.sh"
    script.write_text(text)
    subprocess.run(["bash", "-n", script], check=True)
    directives = dict(
        (line.removeprefix("#SBATCH --") + "=").split("=")[:2]
        for line in text.splitlines()
        if line.startswith("#SBATCH")
    )
    assert set(directives) <= SBATCH
    assert directives["nodes"] == str(hosts)
    assert directives["signal"] == "TERM@120"
    assert ("gpus-per-node" in directives) == topology.startswith("h100")
    assert text.index("#SBATCH") < text.index("\n\n") < text.index("srun")


@pytest.mark.parametrize(
    ("code", "restarts", "requeued"),
    [(0, 0, False), (143, 50, True), (1, 3, True), (1, 10, False), (2, 1, True), (2, 2, False)],
)
def test_a_batch_script_requeues_what_can_go_on(
    manifest: Any, tmp_path: Path, code: int, restarts: int, requeued: bool
):
    """Run with an `srun` that ends so and a `scontrol` that says what it is asked."""
    script = tmp_path / "job.sh"
    script.write_text(manifest("slurm", 4, "h100:4x8"))
    for name, body in (("srun", f"exit {code}"), ("scontrol", 'echo "$@"')):
        (tmp_path / name).write_text(f"#!/bin/sh\n{body}\n")
        (tmp_path / name).chmod(0o755)
    ended = subprocess.run(
        ["bash", script],
        env={
            "PATH": f"{tmp_path}:/usr/bin:/bin",
            "SLURM_JOB_ID": "77",
            "SLURM_RESTART_COUNT": str(restarts),
        },
        capture_output=True,
        text=True,
    )
    assert ended.stdout.strip() == ("requeue 77" if requeued else "")
    assert ended.returncode == (0 if requeued else code), ended.stderr


def test_a_skypilot_task_is_one_and_its_nodes_find_each_other(manifest: Any, tmp_path: Path):
    task = yaml.safe_load(manifest("skypilot", 4, "h100:4x8"))
    jsonschema.Draft202012Validator(SKYPILOT).validate(task)
    assert (task["num_nodes"], task["resources"]["accelerators"]) == (4, "H100:8")
    fornax = tmp_path / "fornax"
    fornax.write_text("#!/bin/sh\nenv\n")
    fornax.chmod(0o755)
    run = task["run"].replace("cd /workspace", "cd .")
    ended = subprocess.run(
        ["bash", "-c", run],
        env={
            "PATH": f"{tmp_path}:/usr/bin:/bin",
            "SKYPILOT_NODE_IPS": "10.0.0.5\n10.0.0.6\n10.0.0.7\n10.0.0.8",
            "SKYPILOT_NUM_NODES": "4",
            "SKYPILOT_NODE_RANK": "2",
        },
        capture_output=True,
        text=True,
        check=True,
    )
    found = dict(re.findall(r"^(FORNAX_\w+)=(.*)$", ended.stdout, re.MULTILINE))
    assert found == {
        "FORNAX_COORDINATOR": "10.0.0.5:8476",
        "FORNAX_NUM_PROCESSES": "4",
        "FORNAX_PROCESS_ID": "2",
    }


def test_skypilot_names_a_slice_by_clouds_count(manifest: Any):
    task = yaml.safe_load(manifest("skypilot", 16, "v5p:4x4x4"))
    jsonschema.Draft202012Validator(SKYPILOT).validate(task)
    assert (task["num_nodes"], task["resources"]["accelerators"]) == (1, "tpu-v5p-128")
    task = yaml.safe_load(manifest("skypilot", 4, "v5e:4x4"))
    assert task["resources"]["accelerators"] == "tpu-v5litepod-16"
    assert "come as 4x8x8" in manifest("skypilot", 64, "v5p:4x4x16")
    assert "starts one slice" in manifest("skypilot", 8, "2*v6e:4x4")


@pytest.mark.parametrize(
    ("hosts", "topology", "flags", "said"),
    [
        (8, "v5p:4x4x4", (), "has 64 chips on 16 hosts of 4; use --hosts 16, or name 8 hosts'"),
        (8, "v5p:4x4x4", (), "v5p:2x4x4"),
        (4, "h100:8", (), "use --hosts 1, or name 4 hosts' chips: h100:4x8"),
        (16, "v5p:4x4x5", (), "there is no v5p slice of 4x4x5"),
        (4, "cpu:4", (), "manifests are for TPU slices and nodes of GPUs"),
        (16, "v5p:4x4x4", ("--grace", "0"), "must be 1 second or more"),
        (16, "v5p:4x4x4", ("--name", "77"), "is not a name for a job"),
    ],
)
def test_what_does_not_fit_is_one_paragraph(
    manifest: Any, hosts: int, topology: str, flags: tuple, said: str
):
    assert said in manifest("jobset", hosts, topology, flags=flags)


def test_a_mesh_that_does_not_fit_the_chips_is_refused(manifest: Any):
    assert "multiple of 3 devices" in manifest("jobset", 16, "v5p:4x4x4", "--mesh.tensor", "3")
    said = manifest("jobset", 8, "2*v6e:4x4", "--mesh.slice", "1")
    assert "2 slices and the config has mesh.slice=1" in said


def test_an_incomplete_command_is_refused(capsys: pytest.CaptureFixture[str]):
    for words, said in (
        (["manifest", "jobset", "--", "train"], "needs a system, hosts and a topology"),
        (["manifest", "nomad", "--hosts", "1"], "nomad"),
        (["manifest", "slurm", "--hosts", "1", "--topology", "h100:8"], "no command is named"),
        (
            ["manifest", "slurm", "--hosts", "1", "--topology", "h100:8", "--", "serve", "D"],
            "serve has no manifest",
        ),
        (
            ["manifest", "slurm", "--hosts", "1", "--topology", "h100:8", "--", "train"],
            "names no config",
        ),
    ):
        assert main(["launch", *words]) == 2
        assert said in capsys.readouterr().err
