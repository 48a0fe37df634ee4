"""`fornax tune METHOD`: a command for each method, the keys of its config as flags."""

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import yaml
from tyro.conf import arg

from fornax.cli.configured import read_config
from fornax.cli.training import TrainingArguments, run_to_end, saved_config
from fornax.config import ConfigError
from fornax.config.run_paths import default_run_dir
from fornax.tune.methods import METHODS, Method

if TYPE_CHECKING:
    from fornax.tune.config import TuneConfig

_HELP = """{summary}.

Every key of the config is a flag too, such as --epochs 3, --batch-size 16, --max-length 2048,
--optim.learning-rate 1e-5 or --lora.rank 16; --help-config lists them all. The data is checked
before any weight is loaded. The same command resumes a run that was stopped.

examples:
  fornax tune {example}
  fornax tune {name} --out runs/{name} --epochs 4 --accept-changes epochs steps
  fornax tune {name} --help-config lora
"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Arguments(TrainingArguments):
    """The flags of every method in addition to the keys of its config."""

    out: Annotated[Path | None, arg(metavar="DIR", help_behavior_hint="")] = None
    """The run directory: where everything is written (default: runs/ and the method's name)."""


@dataclasses.dataclass(frozen=True)
class Tune:
    """The command of one method."""

    method: Method
    Arguments: type[Arguments]

    def run(self, arguments: Arguments, overrides: Sequence[str]) -> int:
        """Tune; 0 when the run is done, 128 + signal when it was asked to stop."""
        from fornax.tune import tune

        config, out = self.read(arguments, overrides)
        return 0 if config is None else run_to_end(tune, config, out, arguments)

    def read(
        self, arguments: Arguments, overrides: Sequence[str]
    ) -> "tuple[TuneConfig | None, Path]":
        """The config and the run directory; None where the config was only printed."""
        out = arguments.out or default_run_dir(self.method.name)
        begin = (
            "begin one with --model DIR --data FILE, or name the directory of a run with --out DIR"
        )
        known = saved_config(out, arguments, overrides, begin=begin)
        words = renamed(overrides, self.method.aliases)
        words += _one_length(words, _mapping(known or arguments.config))
        if known:
            self._check_own(known)
        return read_config(self.method.config_class(), arguments, words, file=known), out

    def _check_own(self, saved: Path) -> None:
        """Raise `ConfigError` where the run directory is that of another method."""
        keys = _mapping(saved).keys()
        strange = keys - _keys(self.method)
        if not strange:
            return
        others = [name for name, method in METHODS.items() if keys <= _keys(method)]
        kind = f"of fornax tune {others[0]}" if others else "of another kind"
        raise ConfigError(
            f"{saved.parent} holds a run {kind} (its config.yaml has {min(strange)}), which fornax "
            f"tune {self.method.name} cannot resume; give another directory with --out"
        )


def command(name: str) -> Tune:
    """The command of the method called `name`."""
    method = METHODS[name]
    text = _HELP.format(summary=method.summary, example=method.example, name=name)
    return Tune(method, type("Arguments", (Arguments,), {"__doc__": text}))


def renamed(words: Sequence[str], aliases: Mapping[str, str]) -> list[str]:
    """The words with flags under the names of their keys."""
    found = []
    for word in words:
        flag, equals, value = word.partition("=")
        key = aliases.get(flag[2:]) if flag.startswith("--") else None
        found.append(word if key is None else f"--{key}{equals}{value}")
    return found


def _keys(method: Method) -> set[str]:
    """The keys that the config of a method has at its top."""
    return {field.name for field in dataclasses.fields(method.config_class())}


def _one_length(words: Sequence[str], before: Mapping[str, object]) -> list[str]:
    """Flags that make a length given now replace the one of the file, however that is written.

    A run's own config has the steps that its epochs came to; they are counted again.
    """
    given = {word[2:].partition("=")[0] for word in words if word.startswith("--")}
    if "steps" in given and "epochs" not in given:
        return ["--epochs=null"]
    counted = before.get("epochs") is not None or "epochs" in given
    return ["--steps=null"] if counted and "steps" not in given else []


def _mapping(file: Path | None) -> Mapping[str, object]:
    """What a config file holds, where it can be read; reading it properly comes later."""
    try:
        value = None if file is None else yaml.safe_load(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError):
        return {}
    return value if isinstance(value, dict) else {}
