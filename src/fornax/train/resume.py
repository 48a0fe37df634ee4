"""What may change when a run is resumed, and differ between its processes: all else is refused."""

import fnmatch
import json
from collections.abc import Iterable, Sequence
from typing import Any

import jax

from fornax.config import (
    Change,
    ClusterError,
    ConfigError,
    FornaxError,
    diff,
    dump_yaml,
    from_yaml,
    to_mapping,
)
from fornax.config.suggest import nearest
from fornax.mesh import hosts

__all__ = ["HARMLESS", "check_changes", "check_same", "fixed_keys", "known_keys", "matches"]

HARMLESS: dict[str, str] = {
    "log.*": "what is recorded does not change what is learned",
    "eval.*": "evaluation reads the state and leaves it",
    "checkpoint.*": "which states are kept does not change them",
    "save_every": "nor does how often they are",
    "profile.*": "a profile only watches",
    "spikes": "what a rewind leaves out is recorded, and stays out whatever the limits become",
    "processes.*": "the same global batches reach any number of processes",
    "mesh.*": "the same numbers up to rounding on any devices",
    "model.context_exchange": "the same numbers up to rounding, however devices attend to a row",
    "model.experts.exchange": "the same numbers up to rounding, whichever way tokens travel",
    "pipeline.*": "the same numbers up to rounding, however stages share them",
    "remat": "the same numbers up to rounding, computed again instead of kept",
    "quant.allow_slow": "how long a step takes does not change it",
    "init_from": "a run that is resumed has its own weights",
    "data.prefetch.*": "batches made ahead are the same batches",
    "data.read_batch": "so are batches read in other portions",
    "data.cache_dir": "where remote files are kept does not change them",
    "data.cache_gib": "nor how many of them",
    "data.storage_options.*": "how remote files are reached does not change them",
    "data.debug": "it checks the same records",
}
"""Patterns of keys that may change without being accepted, and why; a task has its own besides."""


_OF_ONE_HOST = ("processes.*", "data.cache_dir", "data.cache_gib", "data.storage_options.*")


def check_same(config: object) -> None:
    """Refuse processes that were given other configs: they would part ways at some step.

    Raises:
      ClusterError: in every process, naming those that differ from process 0, and the keys.
    """
    if jax.process_count() == 1:
        return
    text = hosts.decide(lambda: dump_yaml(config))
    first = from_yaml(type(config), text, source="process 0's config")
    changes = [str(c) for c in diff(first, config) if not matches(c.path, _OF_ONE_HOST)]
    named = [
        f"process {number} has {', '.join(found)}"
        for number, found in enumerate(hosts.gather(changes))
        if found
    ]
    if named:
        raise ClusterError(
            f"the processes were given different configs: {'; '.join(named)} (process 0's value "
            "first). Start all of them with the same file and flags"
        )


def check_changes(saved: str, config: Any, accept: Sequence[str] = ()) -> list[Change]:
    """Compare the config saved with a checkpoint with the one to continue with.

    Args:
      saved: YAML of the config that the run was started with.
      config: the config dataclass of now.
      accept: patterns (`optim.schedule.*`) of keys that may differ.

    Returns:
      The changes that were accepted or are harmless.

    Raises:
      ConfigError: listing every change that is neither, or a pattern that is not a pattern of a
          key.
    """
    try:
        before = from_yaml(type(config), saved, source="the checkpoint's config")
    except FornaxError as error:
        raise ConfigError(
            "the checkpoint's config does not load with this version of Fornax, so nothing says "
            f"whether the run may continue: {error}. Start a new run directory, with init_from set "
            "to this one to keep its weights"
        ) from error
    _check_patterns(accept, [*known_keys(before), *known_keys(config)])
    changes = diff(before, config)
    refused = [c for c in changes if not matches(c.path, [*HARMLESS, *config.harmless, *accept])]
    if refused:
        listed = ", ".join(str(change) for change in refused)
        flags = " ".join(change.path for change in refused)
        raise ConfigError(
            f"this run directory has checkpoints of another config: {listed}. Use the old values, "
            f"another run directory, or accept the change with --accept-changes {flags}"
        )
    return changes


def matches(path: str, patterns: Iterable[str]) -> bool:
    """Whether a pattern finds the key, or a section above it."""
    parts = path.split(".")
    above = [".".join(parts[: n + 1]) for n in range(len(parts))]
    return any(fnmatch.fnmatchcase(name, p) for p in patterns for name in above)


def _check_patterns(patterns: Sequence[str], keys: Sequence[str]) -> None:
    for pattern in patterns:
        if not any(matches(key, [pattern]) for key in keys):
            near = nearest(pattern, keys)
            hint = f"; did you mean {near}?" if near else ""
            raise ConfigError(f"--accept-changes {pattern} is not a key of the config{hint}")


def fixed_keys(config: object) -> dict[str, str]:
    """The keys that decide what is learned, and the mesh, each with its value as JSON."""
    found = {}
    for path in known_keys(config):
        if not matches(path, HARMLESS) or path.startswith("mesh."):
            value: Any = to_mapping(config)
            for name in path.split("."):
                value = value[name]
            found[path] = json.dumps(value, sort_keys=True, default=str)
    return found


def known_keys(config: object) -> list[str]:
    """The dotted paths of a config's keys."""
    return _keys(to_mapping(config), "")


def _keys(value: object, path: str) -> list[str]:
    if not isinstance(value, dict) or not value:
        return [path]
    return [k for name, v in value.items() for k in _keys(v, f"{path}.{name}" if path else name)]
