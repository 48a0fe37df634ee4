"""Devices, named meshes, sharding rules, dtypes and process start-up."""

from fornax.mesh.capabilities import MESH_AXES, USES, axes_table
from fornax.mesh.dtypes import DtypePolicy, parse_dtype
from fornax.mesh.mesh import MeshConfig, make_mesh
from fornax.mesh.rules import (
    DEFAULT_RULES,
    Rules,
    batch_sharding,
    constrain,
    current_mesh,
    current_rules,
    merge_rules,
    named_sharding,
    partition_spec,
    use_mesh,
)
from fornax.mesh.startup import (
    ProcessConfig,
    find_processes,
    initialize,
    keep_freed_memory,
)
from fornax.mesh.tree import path_name, tree_shardings

__all__ = [
    "DEFAULT_RULES",
    "MESH_AXES",
    "USES",
    "DtypePolicy",
    "MeshConfig",
    "ProcessConfig",
    "Rules",
    "axes_table",
    "batch_sharding",
    "constrain",
    "current_mesh",
    "current_rules",
    "find_processes",
    "initialize",
    "keep_freed_memory",
    "make_mesh",
    "merge_rules",
    "named_sharding",
    "parse_dtype",
    "partition_spec",
    "path_name",
    "tree_shardings",
    "use_mesh",
]
