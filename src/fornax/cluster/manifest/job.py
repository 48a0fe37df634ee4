"""What all manifests are made from: a command, the chips it runs on, and where it may write."""

import math
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import yaml

from fornax.config.errors import ConfigError
from fornax.mesh import MeshConfig
from fornax.plan.topology import Topology, parse_topology, topology_shapes

__all__ = ["SYSTEMS", "ManifestJob", "System", "manifest_job", "yaml_documents"]

System = Literal["kuberay", "jobset", "slurm", "skypilot"]
SYSTEMS: tuple[str, ...] = get_args(System)

_JOIN_SECONDS = 1800
_LONGEST_NAME = 40  # Kubernetes appends the numbers of job and pod, and allows 63


@dataclass(frozen=True, kw_only=True)
class ManifestJob:
    """A training command on the hosts of a topology."""

    name: str
    """A DNS label, at most 40 characters."""
    topology: Topology
    command: tuple[str, ...]
    """Words after `fornax`, without --config and --run-dir."""
    config: Path | None
    """The config file on this machine."""
    run_dir: str
    """Relative to the shared directory, or absolute."""
    image: str | None
    """Container image; None: the target of the Dockerfile for these chips."""
    storage: str
    """The claim (Kubernetes) or bucket (SkyPilot) that all hosts mount as working directory."""
    grace: int
    """Seconds from SIGTERM to SIGKILL: a step and a checkpoint must fit."""
    restarts: int
    """How often a job that failed is started again; preemptions do not count where the system
    tells them apart."""

    @property
    def hosts(self) -> int:
        """Processes, one per host."""
        return self.topology.num_hosts

    @property
    def host_chips(self) -> int:
        """Chips of one host."""
        return math.prod(self.topology.host_shape)

    @property
    def is_tpu(self) -> bool:
        """Whether the chips are TPUs, else GPUs."""
        return self.topology.chip.platform == "tpu"

    @property
    def extra(self) -> str:
        """The extra of Fornax for these chips, which is also the Dockerfile's target."""
        return "tpu" if self.is_tpu else "cuda"

    @property
    def platforms(self) -> str:
        """JAX_PLATFORMS: without its accelerators a host must fail, not train on its cores."""
        return f"{self.extra},cpu"

    def words(self, config: str | None) -> list[str]:
        """The whole command on a host; `config` is the path of the config there.

        Hosts that start minutes apart wait for each other.
        """
        where = [] if config is None else ["--config", config]
        late = "--processes.join-timeout"
        patience = [late, str(_JOIN_SECONDS)] if late not in self.command else []
        verb, *rest = self.command
        return [verb, *where, "--run-dir", self.run_dir, *rest, *patience]

    def line(self, config: str | None) -> str:
        """`words` for a shell."""
        return shlex.join(["fornax", *self.words(config)])


def manifest_job(
    words: Sequence[str],
    *,
    hosts: int,
    topology: str,
    mesh: MeshConfig,
    config: Path | None,
    run_dir: Path | None,
    name: str | None = None,
    image: str | None = None,
    storage: str = "fornax-runs",
    grace: int = 120,
    restarts: int = 10,
) -> ManifestJob:
    """Check that command, hosts and topology fit each other.

    Args:
      words: the command, such as `train --config run.yaml --steps 100`.
      hosts: processes, one per host.
      topology: chips, as `fornax plan` reads them: `v5p:4x4x4`, `2*v6e:16x16`, `h100:4x8`.
      mesh: that of the command's config.
      config: the config file that the command names.
      run_dir: the run directory that it names; None: `runs/` and the name.
      name: of the job; None: that of run directory or config.
      image, storage, grace, restarts: see `ManifestJob`.

    Raises:
      ConfigError: for a topology that does not exist or has another number of hosts, and for
        what is not a number or name.
      ShardingError: for a mesh that does not fit the devices.
    """
    chips = parse_topology(topology)
    _check_hosts(chips, hosts)
    if grace < 1 or restarts < 0:
        raise ConfigError(f"--grace {grace} must be 1 second or more, and --restarts 0 or more")
    sizes = mesh.resolved_sizes(chips.num_devices)
    if chips.chip.platform == "tpu" and sizes["slice"] != chips.slices:
        raise ConfigError(
            f"the topology {chips.name} has {chips.slices} slices and the config has mesh.slice="
            f"{sizes['slice']}; add --mesh.slice {chips.slices} to the command"
        )
    named = name or (run_dir or config or Path("train")).stem
    label = re.sub(r"[^a-z0-9]+", "-", named.lower()).strip("-")[:_LONGEST_NAME].strip("-")
    if not label or not label[0].isalpha():
        raise ConfigError(
            f"{named!r} is not a name for a job; give it one with letters: --name NAME"
        )
    return ManifestJob(
        name=label,
        topology=chips,
        command=tuple(_without(_without(words, "--config"), "--run-dir")),
        config=config,
        run_dir=str(run_dir or f"runs/{label}"),
        image=image,
        storage=storage,
        grace=grace,
        restarts=restarts,
    )


def _check_hosts(topology: Topology, hosts: int) -> None:
    chip = topology.chip
    if chip.platform == "cpu":
        raise ConfigError(
            f"topology {topology.name}: manifests are for TPU slices and nodes of GPUs, such as "
            "v5p:4x4x4 or h100:4x8; on the cores of one machine use fornax launch --hosts N"
        )
    if topology.num_hosts == hosts:
        return
    block = math.prod(topology.host_shape)
    have = (
        f"{topology.name} has {topology.num_chips} chips on {topology.num_hosts} "
        f"host{'s' if topology.num_hosts > 1 else ''} of {block}"
    )
    if chip.platform == "gpu":
        other = f"{chip.name}:{hosts}x{block}"
    else:
        per_slice = [
            Topology(chip=chip, shape=shape, slices=topology.slices)
            for shape in topology_shapes(chip)
        ]
        other = " or ".join(t.name for t in per_slice if t.num_hosts == hosts)
    fix = f", or name {hosts} hosts' chips: {other}" if other and hosts > 0 else ""
    raise ConfigError(
        f"--hosts {hosts} does not fit: {have}; use --hosts {topology.num_hosts}{fix}"
    )


def _without(words: Sequence[str], flag: str) -> list[str]:
    """The words without a flag and its value."""
    kept: list[str] = []
    skips = False
    for word in words:
        name, inline, _ = word.partition("=")
        if skips:
            skips = False
        elif name.replace("_", "-") == flag:
            skips = not inline
        else:
            kept.append(word)
    return kept


class _Dumper(yaml.SafeDumper):
    """YAML 1.1, which Kubernetes reads: texts such as `yes` and `1` are quoted."""

    def ignore_aliases(self, data: object) -> bool:
        return True


def _represent_str(dumper: yaml.SafeDumper, value: str) -> yaml.ScalarNode:
    return dumper.represent_scalar(
        "tag:yaml.org,2002:str", value, style="|" if "\n" in value else None
    )


_Dumper.add_representer(str, _represent_str)


def yaml_documents(*documents: dict[str, Any] | None) -> str:
    """YAML documents of those that are not None."""
    return yaml.dump_all(
        [document for document in documents if document is not None],
        Dumper=_Dumper,
        sort_keys=False,
        allow_unicode=True,
        explicit_start=len(documents) > 1,
        width=100,
    )
