"""What `serving.yaml` in a model's folder can say: versions, labels, batching, devices, limits."""

import math
import re
from dataclasses import dataclass, field
from typing import Literal

from fornax.config import ConfigError
from fornax.mesh import MeshConfig

__all__ = [
    "All",
    "Batching",
    "Latest",
    "ModelSettings",
    "Named",
    "NanPolicy",
    "OnMesh",
    "Replicas",
    "Shadow",
    "Timeouts",
]

_LABEL = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]{0,63}\Z")
LARGEST_VERSION = 2**63 - 1


@dataclass(frozen=True, kw_only=True)
class Latest:
    """The newest versions that load."""

    type: Literal["latest"] = "latest"
    count: int = 1
    """How many of them; all but the newest answer only to those who name them."""

    def __post_init__(self):
        _at_least("count", self.count, 1)


@dataclass(frozen=True, kw_only=True)
class All:
    """Every version in the folder."""

    type: Literal["all"] = "all"


@dataclass(frozen=True, kw_only=True)
class Named:
    """The versions listed, and no others."""

    type: Literal["named"] = "named"
    versions: tuple[int, ...]
    """Their numbers; the highest that loads is the default."""

    def __post_init__(self):
        if not self.versions:
            raise ConfigError("versions=[] names no version; list one, or use type: latest")
        for version in self.versions:
            _version("versions", version)
        if len(set(self.versions)) < len(self.versions):
            raise ConfigError(f"versions={list(self.versions)} names one twice; name each once")


@dataclass(frozen=True, kw_only=True)
class Batching:
    """How requests to a function are put together into batches."""

    max_delay_ms: float = 0.0
    """How long the first request of a batch may wait for others while a device is free."""
    preferred_sizes: tuple[int, ...] = ()
    """Rows at which a batch goes out before its delay is over; each must be a batch bucket."""
    max_rows: int | None = None
    """Most rows in a batch (default: the largest batch bucket)."""
    queue_limit: int = 4096
    """Requests that may wait; one more is refused with status 429."""
    priority_levels: int = 3
    """How many priorities there are; 1 goes first."""
    default_priority: int = 2
    """The priority of a request that names none."""

    def __post_init__(self):
        _finite("max_delay_ms", self.max_delay_ms, 0.0)
        _at_least("queue_limit", self.queue_limit, 1)
        _at_least("priority_levels", self.priority_levels, 1)
        if self.max_rows is not None:
            _at_least("max_rows", self.max_rows, 1)
        for size in self.preferred_sizes:
            _at_least("preferred_sizes", size, 1)
            if self.max_rows is not None and size > self.max_rows:
                raise ConfigError(
                    f"preferred_sizes has {size}, more than max_rows={self.max_rows}; "
                    "leave it out or raise max_rows"
                )
        if not 1 <= self.default_priority <= self.priority_levels:
            raise ConfigError(
                f"default_priority={self.default_priority} is not one of the "
                f"{self.priority_levels} priority_levels; choose 1 to {self.priority_levels}"
            )


@dataclass(frozen=True, kw_only=True)
class Replicas:
    """A whole copy of the model on each of some devices."""

    type: Literal["replicas"] = "replicas"
    count: int = 1
    """How many devices get a copy, those with most free memory first; 0: all devices."""
    devices: tuple[int, ...] = ()
    """Numbers of the devices to take, in place of count."""

    def __post_init__(self):
        _at_least("count", self.count, 0)
        if len(set(self.devices)) < len(self.devices) or min(self.devices, default=0) < 0:
            raise ConfigError(
                f"devices={list(self.devices)} is not a list of different device numbers; "
                "write such as [0, 1]"
            )


@dataclass(frozen=True, kw_only=True)
class OnMesh:
    """One copy of the model, laid over a mesh of devices by the axes stored in the bundle."""

    type: Literal["mesh"] = "mesh"
    mesh: MeshConfig = field(default_factory=MeshConfig)
    """Sizes of the mesh's axes, and rules from logical to mesh axes."""
    devices: tuple[int, ...] = ()
    """Numbers of the devices of the mesh (default: all)."""


@dataclass(frozen=True, kw_only=True)
class NanPolicy:
    """What becomes of NaN and infinity in float tensors."""

    inputs: Literal["allow", "refuse"] = "allow"
    """refuse: a request with such a value gets status 400."""
    outputs: Literal["allow", "refuse"] = "allow"
    """refuse: an answer with such a value becomes status 500, for the rows it came of only."""


@dataclass(frozen=True, kw_only=True)
class Timeouts:
    """How long things may take, in seconds; null: no limit."""

    request_seconds: float | None = None
    """The deadline of a request that brings none, and the longest that one may ask for."""
    drain_seconds: float = 60.0
    """How long a version that was replaced may take to answer what it has accepted."""

    def __post_init__(self):
        if self.request_seconds is not None:
            _finite("request_seconds", self.request_seconds, 1e-6)
        _finite("drain_seconds", self.drain_seconds, 0.0)


@dataclass(frozen=True, kw_only=True)
class Shadow:
    """A version that gets copies of requests, and whose answers are compared and dropped."""

    version: int
    """Its number; while it stands here the version policy passes it over, so that another answers.

    Where none can, one that answers already keeps doing so, and status and log say it; a server
    that starts so has no version of the model that answers."""
    share: float = 0.1
    """Which part of the requests to the default version is copied, 0 to 1."""
    queue_limit: int = 64
    """Copies under way; while this many are, no more are made, and the report counts them."""
    absolute: float = 1e-5
    """An output differs when it is off by more than absolute + relative * |main answer|."""
    relative: float = 1e-5
    """See absolute."""

    def __post_init__(self):
        _version("version", self.version)
        _at_least("queue_limit", self.queue_limit, 1)
        _finite("share", self.share, 0.0)
        if self.share > 1:
            raise ConfigError(f"share={self.share} is over 1; write a part such as 0.1")
        _finite("absolute", self.absolute, 0.0)
        _finite("relative", self.relative, 0.0)


@dataclass(frozen=True, kw_only=True)
class ModelSettings:
    """A model of the repository: the file `models/<name>/serving.yaml`."""

    type: Literal["bundle"] = "bundle"
    """What the model is: versions that are exported bundles."""
    versions: Latest | All | Named = field(default_factory=Latest)
    """Which versions are served."""
    labels: dict[str, int] = field(default_factory=dict)
    """Names that stand for a version in requests; a version with a label is served too."""
    batching: Batching = field(default_factory=Batching)
    """How requests are put together, for every function."""
    functions: dict[str, Batching] = field(default_factory=dict)
    """The same for single functions by name, in place of batching."""
    devices: Replicas | OnMesh = field(default_factory=Replicas)
    """Which devices hold the model."""
    concurrency: int = 2
    """Batches of the model under way on a device at once: one moves while another computes."""
    weight: float = 1.0
    """Its share of a device that several models keep busy, relative to theirs."""
    compiler_options: dict[str, bool | int | float | str] = field(default_factory=dict)
    """Options of XLA for this model's programs; they may change the last bits of answers."""
    nan: NanPolicy = field(default_factory=NanPolicy)
    """What becomes of NaN and infinity."""
    timeouts: Timeouts = field(default_factory=Timeouts)
    """How long things may take."""
    shadow: Shadow | None = None
    """A version to try on copies of the traffic."""

    def __post_init__(self):
        _at_least("concurrency", self.concurrency, 1)
        _finite("weight", self.weight, 1e-6)
        alone = self.versions.versions if isinstance(self.versions, Named) else ()
        if self.shadow is not None and alone == (self.shadow.version,):
            raise ConfigError(
                f"versions names {self.shadow.version} alone, the version under shadow, whose "
                "answers are not sent; name one that serves too, or remove the shadow"
            )
        for label, version in self.labels.items():
            _version(f"labels.{label}", version)
            if not _LABEL.match(label):
                raise ConfigError(
                    f"labels has {label!r}, which is not a label; use letters, digits, _ . - and "
                    "begin with a letter, so that none is taken for a version"
                )
            if self.shadow is not None and self.shadow.version == version:
                raise ConfigError(
                    f"labels.{label}={version} names the version under shadow, which answers no "
                    "one; remove the label or the shadow"
                )

    def batching_of(self, function: str) -> Batching:
        """The batching of one function."""
        return self.functions.get(function, self.batching)

    def wants_reload(self, other: "ModelSettings") -> bool:
        """Whether a version loaded under these settings must be reloaded for the others."""
        return any(getattr(self, name) != getattr(other, name) for name in _AT_LOAD)


_AT_LOAD = (
    "batching", "functions", "devices", "concurrency", "weight", "compiler_options", "nan",
    "timeouts",
)  # fmt: skip


def _at_least(name: str, value: int, least: int) -> None:
    if value < least:
        raise ConfigError(f"{name}={value} is too small; it is at least {least}")


def _finite(name: str, value: float, least: float) -> None:
    if not math.isfinite(value) or value < least:
        raise ConfigError(f"{name}={value} is not a finite number of at least {least:g}")


def _version(name: str, value: int) -> None:
    if not 1 <= value <= LARGEST_VERSION:
        raise ConfigError(f"{name}={value} is not a version; versions are numbered from 1")
