"""`fornax launch manifest`: a training command as a job of another system."""

import dataclasses
from collections.abc import Sequence
from typing import Annotated, Literal

from tyro.conf import Positional, arg

from fornax.cli import arguments as reading
from fornax.cli.commands import train
from fornax.config import ConfigError, load


@dataclasses.dataclass(frozen=True, kw_only=True)
class Arguments:
    """Print a training command as a job of KubeRay, JobSet, SLURM or SkyPilot.

    The command's config is read and checked against the topology, and travels with the job
    (SLURM: it is read where the script runs). One process runs on each host; SIGTERM saves, and
    the job starts again from the newest checkpoint. On KubeRay fornax launch recovers inside it.

    examples:
      fornax launch manifest jobset --hosts 16 --topology v5p:4x4x4 -- train --config run.yaml
      fornax launch manifest slurm --hosts 4 --topology h100:4x8 -- train --config run.yaml
    """

    system: Annotated[
        Positional[Literal["kuberay", "jobset", "slurm", "skypilot"] | None],
        arg(help_behavior_hint=""),
    ] = None
    """Whose job."""
    hosts: Annotated[int | None, arg(metavar="N", help_behavior_hint="")] = None
    """How many hosts: those of the topology."""
    topology: Annotated[str | None, arg(metavar="CHIPS", help_behavior_hint="")] = None
    """TPUs or GPUs, such as v5p:4x4x4, 2*v6e:16x16 (two slices), h100:4x8 (nodes x GPUs)."""
    name: Annotated[str | None, arg(help_behavior_hint="")] = None
    """Of the job (default: that of run directory or config)."""
    image: Annotated[str | None, arg(help_behavior_hint="")] = None
    """Container image on Kubernetes (default: fornax:tpu or fornax:cuda, the Dockerfile's)."""
    storage: str = "fornax-runs"
    """What all hosts mount as working directory: a claim on Kubernetes, a bucket on SkyPilot."""
    grace: Annotated[int, arg(metavar="SECONDS")] = 120
    """From SIGTERM to SIGKILL: a step and a checkpoint must fit."""
    restarts: Annotated[int, arg(metavar="N")] = 10
    """How often a job that failed is started again."""


def run(arguments: Arguments, words: Sequence[str]) -> int:
    """Print the manifest."""
    from fornax.cluster.manifest import manifest_job, render
    from fornax.train import TrainConfig

    if not arguments.system or not arguments.hosts or not arguments.topology:
        raise ConfigError(
            "a manifest needs a system, hosts and a topology: fornax launch manifest jobset "
            "--hosts 16 --topology v5p:4x4x4 -- train --config run.yaml"
        )
    if not words or words[0] != "train":
        what = f"{words[0]} has no manifest" if words else "no command is named"
        raise ConfigError(f"{what}; write -- train --config run.yaml after the flags")
    own, overrides = reading.split(train.Arguments, TrainConfig, words[1:])
    command = reading.parse(train.Arguments, own, "fornax train")
    if command.config is None and not overrides:
        raise ConfigError("the command names no config; add --config FILE to it")
    config = load(TrainConfig, file=command.config, overrides=overrides)
    job = manifest_job(
        words,
        hosts=arguments.hosts,
        topology=arguments.topology,
        mesh=config.mesh,
        config=command.config,
        run_dir=command.run_dir,
        name=arguments.name,
        image=arguments.image,
        storage=arguments.storage,
        grace=arguments.grace,
        restarts=arguments.restarts,
    )
    print(render(arguments.system, job), end="")  # noqa: T201
    return 0
