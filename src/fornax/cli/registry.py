"""The table of commands, each with one line of help and the module that has the rest."""

import contextlib
import dataclasses
import importlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from fornax.config import ConfigError
from fornax.tune.methods import METHODS


@dataclasses.dataclass(frozen=True, kw_only=True)
class Command:
    """A command: its words after `fornax`, its line in the list, its module."""

    name: str
    summary: str
    module: str
    of: str | None = None
    """What the module's `command` makes this command of; None: the module is the command."""
    config: Callable[[], type] | None = None
    """Imports the config whose keys are flags of the command too."""
    wraps: bool = False
    """Whether the words after `--` are another command, which `run` gets as a second argument."""
    trains: bool = False
    """Whether it trains in its own process."""

    def load(self) -> Any:
        """Import the module of the command.

        It has `Arguments`, a dataclass whose docstring is the help, and `run(arguments)`. Where
        the command reads a config, `run` takes the flags that change it as a second argument.
        """
        module = importlib.import_module(f"fornax.cli.commands.{self.module}")
        return module if self.of is None else module.command(self.of)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Group:
    """A command with commands of its own."""

    name: str
    summary: str
    commands: Mapping[str, "Command | Group"]
    example: str
    command: Command | None = None
    """What the group's own name does when no command of it follows; None lists them."""
    takes_words: bool = False
    """Whether that command takes words without a flag: then any word that is no command is its."""


def reads(config: str, *, needs: tuple[str, str] | None = None) -> Callable[[], type]:
    """A function that imports a config class, `package.module:NAME`.

    `needs` is the extra of Fornax that the import needs, and for what.
    """
    module, _, name = config.partition(":")

    def load() -> type:
        with extra(*needs) if needs else contextlib.nullcontext():
            return getattr(importlib.import_module(module), name)

    return load


@contextlib.contextmanager
def extra(name: str, purpose: str) -> Iterator[None]:
    """Import what an extra of Fornax installs.

    Raises:
      ConfigError: a package is missing; names it, what it is for, and how to install it.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] == "fornax":
            raise
        raise ConfigError(
            f"{error.name} is not installed; {purpose} needs pip install 'fornax-ai[{name}]'"
        ) from error


def _table(*entries: "Command | Group") -> dict[str, "Command | Group"]:
    return {entry.name.rpartition(" ")[2]: entry for entry in entries}


DATA = Group(
    name="data",
    summary="Build, inspect and picture training data",
    example="fornax data build --source.type stdlib --output data/stdlib",
    commands=_table(
        Command(
            name="data build",
            summary="Text to a tokenizer and shards of tokens",
            module="data_build",
            config=reads("fornax.data:BuildConfig"),
        ),
        Command(
            name="data inspect",
            summary="Records, token counts, how full the rows are",
            module="data_inspect",
            config=reads("fornax.data:DataConfig"),
        ),
        Command(
            name="data visualize",
            summary="A picture of the pipeline with the measured time of each stage",
            module="data_visualize",
            config=reads("fornax.data:DataConfig"),
        ),
    ),
)

TUNE_DOCTOR = Group(
    name="tune doctor",
    summary="Is a run of post-training sound? Its checks, without starting it",
    example=f"fornax tune doctor {METHODS['sft'].example}".rpartition(" --out")[0],
    commands=_table(
        *(
            Command(
                name=f"tune doctor {name}",
                summary=f"Check a run of: {method.summary[:1].lower()}{method.summary[1:]}",
                module="tune_doctor",
                of=name,
                config=method.config_class,
            )
            for name, method in METHODS.items()
        )
    ),
)

TUNE = Group(
    name="tune",
    summary="Post-training: imitation, preferences, reinforcement, distillation",
    example=f"fornax tune {METHODS['sft'].example}",
    commands=_table(
        *(
            Command(
                name=f"tune {name}",
                summary=method.summary,
                module="tune",
                of=name,
                config=method.config_class,
                trains=True,
            )
            for name, method in METHODS.items()
        ),
        TUNE_DOCTOR,
    ),
)

BENCH = Group(
    name="bench",
    summary="Measure a running server",
    example="fornax bench serve --port 8000 --request-rate 8",
    commands=_table(
        Command(
            name="bench serve",
            summary="Load on an OpenAI-compatible server: latencies, throughput, goodput",
            module="bench_serve",
            config=reads("fornax.bench:BenchConfig", needs=("serve", "bench serve")),
        ),
        Command(
            name="bench host",
            summary="Load on a model server: latencies, rates, where its time goes",
            module="bench_host",
            config=reads("fornax.bench:HostBenchConfig", needs=("serve", "bench host")),
        ),
    ),
)

HOST = Group(
    name="host",
    summary="Exported models behind the V2 protocol: HTTP and gRPC",
    example="fornax host models/ --http 8080 --grpc 8081",
    command=Command(
        name="host",
        summary="Exported models behind the V2 protocol: HTTP and gRPC",
        module="host",
        config=reads("fornax.serving.config:HostConfig"),
    ),
    takes_words=True,
    commands=_table(
        *(
            Command(name=f"host {name}", summary=summary, module="host_control", of=name)
            for name, summary in (
                ("status", "What a running server serves, and how it fares"),
                ("load", "Load a model or a version into a running server"),
                ("unload", "Unload a model or a version from it"),
                ("rollback", "Go back to the version before"),
                ("release", "End a rollback"),
                ("shadow", "How a shadow version's answers differ"),
                ("profile", "Profile a running server"),
            )
        )
    ),
)

PLAN = Group(
    name="plan",
    summary="Does a run compile and fit, how fast would it be, on which chips",
    example="fornax plan serve --model DIR --topology v6e:2x2",
    command=Command(
        name="plan",
        summary="Does a run compile and fit, how fast would it be, on which chips",
        module="plan",
        config=reads("fornax.train:TrainConfig"),
    ),
    commands=_table(
        Command(
            name="plan serve",
            summary="Can a model be served on chips, for how many sequences, how fast",
            module="plan_serve",
            config=reads("fornax.plan.serving.engine:ServingConfig"),
        ),
        Command(
            name="plan goodput",
            summary="Tiers, snapshot intervals and spares of a long run with failures, simulated",
            module="plan_goodput",
        ),
    ),
)

KERNELS = Group(
    name="kernels",
    summary="Operations with several implementations: what there is, how fast, tuned for a run",
    example="fornax kernels tune --config run.yaml",
    commands=_table(
        Command(
            name="kernels list",
            summary="Every implementation, and where it is supported",
            module="kernels",
            of="list",
        ),
        Command(
            name="kernels show",
            summary="One operation, and what was measured of it on this machine",
            module="kernels",
            of="show",
        ),
        Command(
            name="kernels tune",
            summary="Time the kernels of a run, and keep which is fastest",
            module="kernels_tune",
            of="tune",
            config=reads("fornax.train:TrainConfig"),
        ),
        Command(
            name="kernels bench",
            summary="Time the kernels of a run beside this machine's limit",
            module="kernels_tune",
            of="bench",
            config=reads("fornax.train:TrainConfig"),
        ),
    ),
)

LAUNCH = Group(
    name="launch",
    summary="Train or serve as several processes that recover from faults",
    example="fornax launch --hosts 4 -- train --config run.yaml --run-dir runs/four",
    command=Command(
        name="launch",
        summary="Train or serve as several processes that recover from faults",
        module="launch",
        wraps=True,
    ),
    commands=_table(
        *(
            Command(name=f"launch {name}", summary=summary, module="launch_control", of=name)
            for name, summary in (
                ("status", "What each rank of a run does now"),
                ("events", "Faults and recoveries of a run"),
                ("timeline", "A run, its faults and its goodput as a picture"),
                ("drill", "Kill or stop a rank, to see the run recover"),
                ("resize", "Go on with another number of hosts"),
                ("rolling-restart", "Restart a server's replicas in turn"),
            )
        ),
        Command(
            name="launch manifest",
            summary="The run as a job of KubeRay, JobSet, SLURM or SkyPilot",
            module="launch_manifest",
            wraps=True,
        ),
    ),
)

ROOT = Group(
    name="",
    summary="The whole life of a model on JAX, in one stack.",
    example="fornax quickstart --size tiny",
    commands=_table(
        Command(
            name="quickstart",
            summary="From text on this machine to a trained, portable model",
            module="quickstart",
            trains=True,
        ),
        Command(
            name="train",
            summary="Train a model from a config, or resume a run",
            module="train",
            config=reads("fornax.train:TrainConfig"),
            trains=True,
        ),
        LAUNCH,
        TUNE,
        DATA,
        Command(
            name="eval",
            summary="How good is a model: text, verified answers, pass@k, comparisons, tasks",
            module="eval",
            config=reads("fornax.evaluate:EvaluateConfig"),
        ),
        Command(
            name="convert",
            summary="Between Hugging Face directories and Fornax checkpoints",
            module="convert",
        ),
        Command(
            name="export",
            summary="Functions and weights sealed in a bundle that needs none of their code",
            module="export",
        ),
        Command(
            name="generate",
            summary="Complete a prompt with a model",
            module="generate",
        ),
        Command(
            name="serve",
            summary="A model behind OpenAI's HTTP interface",
            module="serve",
            config=reads("fornax.llm.server.launch:ServeConfig", needs=("serve", "serving")),
        ),
        HOST,
        BENCH,
        PLAN,
        KERNELS,
        Command(
            name="preflight",
            summary="Is every parallel choice of a config right? On virtual devices",
            module="preflight",
            config=reads("fornax.train:TrainConfig"),
        ),
        Command(
            name="doctor",
            summary="Versions, devices, memory and disk, and what to mend",
            module="doctor",
        ),
    ),
)
