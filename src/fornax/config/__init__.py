"""Config: frozen dataclasses from YAML and the command line and back, and the exception tree.

Strict: an unknown key, a wrong type or a wrong combination is one paragraph that names the key's
full path, what is allowed, the nearest match, and the line or flag it came from.
"""

from fornax.config.describe import Field, describe
from fornax.config.editor_schema import json_schema
from fornax.config.errors import (
    BundleError,
    CheckpointError,
    ClusterError,
    ConfigError,
    DataError,
    DiskFullError,
    EngineError,
    FornaxError,
    KernelError,
    ServingCode,
    ServingError,
    ShardingError,
)
from fornax.config.load import from_arguments, from_mapping, from_yaml, load
from fornax.config.overrides import split_arguments
from fornax.config.suggest import did_you_mean, nearest
from fornax.config.user_code import load_module, load_name, load_object, user_errors
from fornax.config.write import Change, diff, dump_yaml, to_mapping

__all__ = [
    "BundleError",
    "Change",
    "CheckpointError",
    "ClusterError",
    "ConfigError",
    "DataError",
    "DiskFullError",
    "EngineError",
    "Field",
    "FornaxError",
    "KernelError",
    "ServingCode",
    "ServingError",
    "ShardingError",
    "describe",
    "did_you_mean",
    "diff",
    "dump_yaml",
    "from_arguments",
    "from_mapping",
    "from_yaml",
    "json_schema",
    "load",
    "load_module",
    "load_name",
    "load_object",
    "nearest",
    "split_arguments",
    "to_mapping",
    "user_errors",
]
