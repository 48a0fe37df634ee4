"""Compiles the native kernels into a wheel, a library for each unit and instruction set, and the
caching allocator.

Hatchling runs this where HATCH_BUILD_HOOK_ENABLE_CUSTOM is set (`make wheel`); without it a wheel
is pure Python and compiles on first use.
"""

import os
import platform
import runpy
import shutil
import subprocess
from pathlib import Path
from typing import Any

import jax
from hatchling.builders.hooks.plugin.interface import BuildHookInterface

_PLACE = "fornax/kernels/_native"
_ALLOCATOR = "fornax/config/allocator_library.py"


class NativeKernels(BuildHookInterface):
    """Adds the compiled units to the wheel and tags it for the platform that they run on."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile each unit for each instruction set; editable installs compile on first use."""
        if version == "editable":
            return
        if platform.system() != "Linux" or platform.machine() != "x86_64":
            raise SystemExit(
                f"libraries are compiled for x86-64 Linux, and this is {platform.system()} on "
                f"{platform.machine()}; unset HATCH_BUILD_HOOK_ENABLE_CUSTOM for a wheel that "
                "compiles them on first use"
            )
        cxx = shutil.which(os.environ.get("CXX", "c++"))
        if cxx is None:
            raise SystemExit("no C++ compiler was found; install g++ or clang++, or set CXX")
        units = runpy.run_path(str(Path(self.root, "src", _PLACE, "units.py")))
        out = Path(self.directory, "native")
        for name, (march, _) in units["PREBUILT"].items():
            (out / name).mkdir(parents=True, exist_ok=True)
            for unit in units["UNITS"]:
                library = out / name / f"{unit}.so"
                include = jax.ffi.include_dir()
                command = units["compile_command"](cxx, unit, library, include=include, march=march)
                subprocess.run(command, check=True)
                place = f"{_PLACE}/prebuilt/{name}/{unit}.so"
                build_data["force_include"][str(library)] = place
        build = runpy.run_path(str(Path(self.root, "src", _ALLOCATOR)))
        library = out / build["SHIPPED"].name
        subprocess.run(build["compile_command"](cxx, library), check=True)
        place = str(Path(_ALLOCATOR).with_name(library.name))
        build_data["force_include"][str(library)] = place
        build_data["pure_python"] = False
        build_data["tag"] = "py3-none-linux_x86_64"
