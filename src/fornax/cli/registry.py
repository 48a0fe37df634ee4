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
    """Whether that command takes words without a flag: then any word that is not a command is
    its."""


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
    summary="Build, inspect and visualize training data",
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
            summary="Count records and tokens, and how full the rows are",
            module="data_inspect",
            config=reads("fornax.data:DataConfig"),
        ),
        Command(
            name="data visualize",
            summary="Draw the pipeline with the measured time of each stage",
            module="data_visualize",
            config=reads("fornax.data:DataConfig"),
        ),
    ),
)

TUNE_DOCTOR = Group(
    name="tune doctor",
    summary="Check a post-training run without starting it",
    example=f"fornax tune doctor {METHODS['sft'].example}".rpartition(" --out")[0],
    commands=_table(
        *(
            Command(
                name=f"tune doctor {name}",
                summary=f"Check a run of: {method.within}",
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
    summary="Post-training: SFT, preferences, reinforcement learning, distillation",
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

DIFFUSION = Group(
    name="diffusion",
    summary="Diffusion and flow models: train, tune, sample, serve",
    example="fornax diffusion train --data images/ --run-dir runs/mine",
    commands=_table(
        Command(
            name="diffusion quickstart",
            summary="Train, score and serve a small model of letters from this machine's fonts",
            module="diffusion_quickstart",
            trains=True,
        ),
        Command(
            name="diffusion train",
            summary="Train a denoiser on images with captions, or resume a run",
            module="diffusion_train",
            config=reads("fornax.diffusion.config:DiffusionConfig"),
            trains=True,
        ),
        Command(
            name="diffusion tune",
            summary="Fine-tune a diffusion model, or train adapters for it",
            module="diffusion_tune",
            config=reads("fornax.diffusion.config:DiffusionTuneConfig"),
            trains=True,
        ),
        Command(
            name="diffusion sample",
            summary="Generate images or videos from prompts, or from images and prompts",
            module="diffusion_sample",
        ),
        Command(
            name="diffusion calibrate",
            summary="Calibrate step caches for a model, and measure their error",
            module="diffusion_calibrate",
        ),
        Command(
            name="diffusion serve",
            summary="Serve a diffusion model behind OpenAI's images API",
            module="diffusion_serve",
            config=reads(
                "fornax.diffusion.server.launch:ServeImagesConfig", needs=("serve", "serving")
            ),
        ),
    ),
)

BENCH = Group(
    name="bench",
    summary="Measure a running server, or quantized models",
    example="fornax bench serve --port 8000 --request-rate 8",
    commands=_table(
        Command(
            name="bench serve",
            summary="Benchmark an OpenAI-compatible server: latencies, throughput, goodput",
            module="bench_serve",
            config=reads("fornax.bench:BenchConfig", needs=("serve", "bench serve")),
        ),
        Command(
            name="bench host",
            summary="Benchmark a model server: latencies, rates, where its time goes",
            module="bench_host",
            config=reads("fornax.bench:HostBenchConfig", needs=("serve", "bench host")),
        ),
        Command(
            name="bench quant",
            summary="Float and quantized models: bits per byte, memory, tokens/s",
            module="bench_quant",
        ),
    ),
)

HOST = Group(
    name="host",
    summary="Serve exported models by the V2 protocol: HTTP and gRPC",
    example="fornax host models/ --http 8080 --grpc 8081",
    command=Command(
        name="host",
        summary="Serve exported models by the V2 protocol: HTTP and gRPC",
        module="host",
        config=reads("fornax.serving.config:HostConfig"),
    ),
    takes_words=True,
    commands=_table(
        *(
            Command(name=f"host {name}", summary=summary, module="host_control", of=name)
            for name, summary in (
                ("status", "Show what a running server serves, and its state"),
                ("load", "Load a model or a version into a running server"),
                ("unload", "Unload a model or a version from it"),
                ("rollback", "Go back to the version before"),
                ("release", "End a rollback"),
                ("shadow", "Show how a shadow version's answers differ"),
                ("profile", "Profile a running server"),
            )
        ),
        Command(
            name="host convert-config",
            summary="Convert a model's Triton config.pbtxt to serving.yaml",
            module="host_convert_config",
        ),
    ),
)

PLAN_TUNE = Group(
    name="plan tune",
    summary="Predict memory, FLOPs and time of a post-training run",
    example=f"fornax plan tune {METHODS['sft'].example}".rpartition(" --out")[0],
    commands=_table(
        *(
            Command(
                name=f"plan tune {name}",
                summary=f"Plan a run of: {method.within}",
                module="plan_tune",
                of=name,
                config=method.config_class,
            )
            for name, method in METHODS.items()
            if name != "distill"
        )
    ),
)

PLAN = Group(
    name="plan",
    summary="Predict whether a run compiles and fits, how fast, on which chips",
    example="fornax plan serve --model DIR --topology v6e:2x2",
    command=Command(
        name="plan",
        summary="Predict whether a run compiles and fits, how fast, on which chips",
        module="plan",
        config=reads("fornax.train:TrainConfig"),
    ),
    commands=_table(
        Command(
            name="plan serve",
            summary="Predict whether a model can be served, for how many sequences, how fast",
            module="plan_serve",
            config=reads("fornax.plan.serving.engine:ServingConfig"),
        ),
        Command(
            name="plan goodput",
            summary="Simulate a long run with failures: tiers, snapshot intervals, spares",
            module="plan_goodput",
        ),
        PLAN_TUNE,
    ),
)

PROFILE_TUNE = Group(
    name="profile tune",
    summary="Capture some steps of a post-training run",
    example=f"fornax profile tune {METHODS['sft'].example}".rpartition(" --out")[0],
    commands=_table(
        *(
            Command(
                name=f"profile tune {name}",
                summary=f"Capture steps of: {method.within}",
                module="profile_train",
                of=name,
                config=method.config_class,
                trains=True,
            )
            for name, method in METHODS.items()
        )
    ),
)

PROFILE = Group(
    name="profile",
    summary="Profile a run: where its time and memory go",
    example="fornax profile show prof/",
    commands=_table(
        Command(
            name="profile train",
            summary="Capture some steps of a training run",
            module="profile_train",
            config=reads("fornax.train:TrainConfig"),
            trains=True,
        ),
        PROFILE_TUNE,
        Command(
            name="profile serve",
            summary="Capture a running server for some seconds",
            module="profile_serve",
        ),
        Command(
            name="profile show",
            summary="Show a capture: steps by cause, operations, memory, threads",
            module="profile_show",
        ),
        Command(
            name="profile compare",
            summary="Compare two captures: what got slower, by how much, from which line",
            module="profile_compare",
        ),
        Command(
            name="profile export",
            summary="Export a capture to XProf (of a CPU too) or Perfetto",
            module="profile_export",
        ),
    ),
)

KERNELS = Group(
    name="kernels",
    summary="List, benchmark and tune kernel implementations",
    example="fornax kernels tune --config run.yaml",
    commands=_table(
        Command(
            name="kernels list",
            summary="List every implementation, and where it is supported",
            module="kernels",
            of="list",
        ),
        Command(
            name="kernels show",
            summary="Show one operation, and what was measured of it on this machine",
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
            summary="Time the kernels of a run against this machine's limit",
            module="kernels_tune",
            of="bench",
            config=reads("fornax.train:TrainConfig"),
        ),
    ),
)

LAUNCH = Group(
    name="launch",
    summary="Train or serve with several processes that recover from faults",
    example="fornax launch --hosts 4 -- train --config run.yaml --run-dir runs/four",
    command=Command(
        name="launch",
        summary="Train or serve with several processes that recover from faults",
        module="launch",
        wraps=True,
    ),
    commands=_table(
        *(
            Command(name=f"launch {name}", summary=summary, module="launch_control", of=name)
            for name, summary in (
                ("status", "Show what each rank of a run is doing"),
                ("events", "List the faults and recoveries of a run"),
                ("timeline", "Draw a run, its faults and its goodput"),
                ("drill", "Kill or stop a rank, to see the run recover"),
                ("resize", "Continue with another number of hosts"),
                ("rolling-restart", "Restart a server's replicas in turn"),
            )
        ),
        Command(
            name="launch manifest",
            summary="Write the run as a job of KubeRay, JobSet, SLURM or SkyPilot",
            module="launch_manifest",
            wraps=True,
        ),
    ),
)

ROOT = Group(
    name="",
    summary="The whole model lifecycle on JAX: data, training, tuning, quantization, serving.",
    example="fornax quickstart --size tiny",
    commands=_table(
        Command(
            name="quickstart",
            summary="Train, tune, export and serve a small model from text on this machine",
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
        DIFFUSION,
        DATA,
        Command(
            name="eval",
            summary="Evaluate a model: perplexity, verified answers, pass@k, comparisons, tasks",
            module="eval",
            config=reads("fornax.evaluate:EvaluateConfig"),
        ),
        Command(
            name="convert",
            summary="Convert between Hugging Face directories and Fornax checkpoints",
            module="convert",
        ),
        Command(
            name="quantize",
            summary="Quantize a model's linear layers, and measure the result",
            module="quantize",
            config=reads("fornax.quant:QuantizeConfig"),
        ),
        Command(
            name="export",
            summary="Export functions and weights as a self-contained bundle",
            module="export",
        ),
        Command(
            name="generate",
            summary="Complete a prompt with a model",
            module="generate",
        ),
        Command(
            name="serve",
            summary="Serve a model with an OpenAI-compatible HTTP API",
            module="serve",
            config=reads("fornax.llm.server.launch:ServeConfig", needs=("serve", "serving")),
        ),
        HOST,
        BENCH,
        PLAN,
        PROFILE,
        KERNELS,
        Command(
            name="ui",
            summary="Local web page of runs: curves, samples, time, memory, live",
            module="ui",
        ),
        Command(
            name="preflight",
            summary="Check every parallel setting of a config on virtual devices",
            module="preflight",
            config=reads("fornax.train:TrainConfig"),
        ),
        Command(
            name="init",
            summary="Write a commented config file that runs",
            module="init",
        ),
        Command(
            name="schema",
            summary="Print the JSON Schema of a command's config, for editors",
            module="schema",
        ),
        Command(
            name="completion",
            summary="Print a completion script for bash, zsh or fish",
            module="completion",
        ),
        Command(
            name="doctor",
            summary="Check versions, devices, memory and disk",
            module="doctor",
        ),
    ),
)


def commands(group: Group = ROOT) -> Iterator[Command]:
    """Every command below a group, in the order of the help."""
    if group.command:
        yield group.command
    for entry in group.commands.values():
        if isinstance(entry, Group):
            yield from commands(entry)
        else:
            yield entry
