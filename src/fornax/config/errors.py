"""The one exception tree of Fornax: catch `FornaxError` for all, a subclass for one room.

Every message is one paragraph: what was wrong, what is allowed, how to fix it.

- FornaxError
  - ConfigError      a key, type, value or combination in a configuration or on the command line
  - DataError        a source, record, transform or tokenizer
  - CheckpointError  a checkpoint or a weight file: missing, damaged, of another shape
  - ShardingError    a mesh, an axis rule, or an array that does not divide
  - KernelError      an operation that no implementation can run as asked
  - EngineError      inference
  - ClusterError     several processes: joining, losing, stopping
  - PlanError        compiling ahead of time for hardware that is not here
"""

__all__ = [
    "CheckpointError",
    "ClusterError",
    "ConfigError",
    "DataError",
    "EngineError",
    "FornaxError",
    "KernelError",
    "PlanError",
    "ShardingError",
]


class FornaxError(Exception):
    """Something the user can mend; the command line prints it as one paragraph and exits 2."""


class ConfigError(FornaxError):
    """A key, type, value or combination in a configuration or on the command line."""


class DataError(FornaxError):
    """A data source, record, transform or tokenizer."""


class CheckpointError(FornaxError):
    """A checkpoint or a weight file that is missing, damaged, or of another shape."""


class ShardingError(FornaxError):
    """A mesh, a sharding rule, or an array that does not divide over it."""


class KernelError(FornaxError):
    """An operation that no implementation can run as asked."""


class EngineError(FornaxError):
    """An inference engine that cannot honour a request."""


class ClusterError(FornaxError):
    """Several processes that fail to join, stay together, or stop together."""


class PlanError(FornaxError):
    """A program that cannot be compiled ahead of time for the hardware asked for."""
