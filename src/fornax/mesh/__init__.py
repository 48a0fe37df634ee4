"""Devices, named meshes, sharding rules, dtypes and process start-up."""

from fornax.mesh.capabilities import (
    MESH_AXES,
    USES,
    axes_table,
    check_processes,
    check_use,
    processes_table,
)
from fornax.mesh.dtypes import DtypePolicy, parse_dtype
from fornax.mesh.mesh import MeshConfig, make_mesh
from fornax.mesh.rules import (
    DEFAULT_RULES,
    Rules,
    axes_in_use,
    constrain,
    current_mesh,
    current_rules,
    dividing,
    merge_rules,
    mesh_in_use,
    named_sharding,
    partition_spec,
    shards,
    use_mesh,
)
from fornax.mesh.startup import (
    ProcessConfig,
    clear_caches,
    find_processes,
    initialize,
    keep_freed_memory,
    leave,
)
from fornax.mesh.tree import fit_mesh, path_name, tree_shardings

__all__ = [
    "DEFAULT_RULES",
    "MESH_AXES",
    "USES",
    "DtypePolicy",
    "MeshConfig",
    "ProcessConfig",
    "Rules",
    "axes_in_use",
    "axes_table",
    "check_processes",
    "check_use",
    "clear_caches",
    "constrain",
    "current_mesh",
    "current_rules",
    "dividing",
    "find_processes",
    "fit_mesh",
    "initialize",
    "keep_freed_memory",
    "leave",
    "make_mesh",
    "merge_rules",
    "mesh_in_use",
    "named_sharding",
    "parse_dtype",
    "partition_spec",
    "path_name",
    "processes_table",
    "shards",
    "tree_shardings",
    "use_mesh",
]
