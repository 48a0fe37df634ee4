"""The one exception tree of Fornax: catch `FornaxError` for all, a subclass for one package.

Every message is one paragraph: what was wrong, what is allowed, how to fix it.

- FornaxError
  - ConfigError      a key, type, value or combination in a configuration or on the command line
  - DataError        a source, record, transform or tokenizer
  - CheckpointError  a checkpoint or a weight file: missing, damaged, of another shape
    - DiskFullError    a checkpoint for which there was no room
  - ShardingError    a mesh, an axis rule, or an array that does not divide
  - KernelError      an operation that no implementation can run as asked
  - EngineError      inference
  - ClusterError     several processes: joining, stopping
    - GroupLostError   another process of the run is gone, and with it the step
  - PlanError        compiling ahead of time for hardware that is not here
  - ProfileError     a capture: one too many, empty, truncated, or without what was asked of it
  - BundleError      an exported bundle: what goes in, what is altered, what this machine cannot run
  - ServingError     a request, or a model of the model server; it carries a code of the protocol
"""

import enum

__all__ = [
    "BundleError",
    "CheckpointError",
    "ClusterError",
    "ConfigError",
    "DataError",
    "DiskFullError",
    "EngineError",
    "FornaxError",
    "GroupLostError",
    "KernelError",
    "PlanError",
    "ProfileError",
    "ServingCode",
    "ServingError",
    "ShardingError",
]


class FornaxError(Exception):
    """Something the user can fix; the command line prints it as one paragraph and exits 2."""


class ConfigError(FornaxError):
    """A key, type, value or combination in a configuration or on the command line."""


class DataError(FornaxError):
    """A data source, record, transform or tokenizer."""


class CheckpointError(FornaxError):
    """A checkpoint or a weight file that is missing, damaged, or of another shape."""


class DiskFullError(CheckpointError):
    """A checkpoint for which the disk had no room; those before it are whole."""


class ShardingError(FornaxError):
    """A mesh, a sharding rule, or an array that does not divide over it."""


class KernelError(FornaxError):
    """An operation that no implementation can run as asked."""


class EngineError(FornaxError):
    """An inference engine that does not support a request."""


class ClusterError(FornaxError):
    """Several processes that fail to join, stay together, or stop together."""


class GroupLostError(ClusterError):
    """Another process of the run is gone; the command line exits with `exit_code` (EX_TEMPFAIL).

    Not this process's fault, and the same command resumes from what is saved: `fornax launch`
    forms a new group, another scheduler may start all processes again.
    """

    exit_code = 75


class PlanError(FornaxError):
    """A program that cannot be compiled ahead of time for the hardware asked for."""


class ProfileError(FornaxError):
    """A capture that cannot be made or read, or that does not hold what was asked of it."""


class BundleError(FornaxError):
    """An exported bundle: what cannot be exported, what was altered, what cannot run here."""


class ServingCode(enum.Enum):
    """What became of a request that got no answer, in gRPC's names: (HTTP status, gRPC number)."""

    INVALID_ARGUMENT = (400, 3)
    UNAUTHENTICATED = (401, 16)
    PERMISSION_DENIED = (403, 7)
    NOT_FOUND = (404, 5)
    CANCELLED = (499, 1)
    FAILED_PRECONDITION = (409, 9)
    TOO_LARGE = (413, 8)
    RESOURCE_EXHAUSTED = (429, 8)
    INTERNAL = (500, 13)
    UNIMPLEMENTED = (501, 12)
    UNAVAILABLE = (503, 14)
    DEADLINE_EXCEEDED = (504, 4)

    @property
    def http(self) -> int:
        """The HTTP status."""
        return self.value[0]

    @property
    def grpc(self) -> int:
        """The number of the gRPC status."""
        return self.value[1]


class ServingError(FornaxError):
    """A request that the model server refuses or cannot answer, or a model it cannot serve."""

    def __init__(self, code: ServingCode, message: str):
        super().__init__(message)
        self.code = code
