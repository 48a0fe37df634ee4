"""Where in the source an instruction comes from."""

import re

from fornax.plan.hlo.module import Frame, Instruction, Module

_LIBRARIES = ("site-packages/", "dist-packages/", "/lib/python3", "<frozen", "<string>")
_PACKAGE = re.compile(r"/(?:src|site-packages|dist-packages)/(fornax/.*\.py)$")
_SERVANTS = ("fornax/kernels/",)
_SERVING_FUNCTIONS = frozenset(["Projection", "project"])
"""What every layer calls: its line says less than the caller's."""


def sources(module: Module, instruction: Instruction) -> tuple[str, str]:
    """Return the line that asked for an instruction, and the innermost line in fornax.

    The first is the innermost outside of installed libraries and of what serves all layers
    (kernels, projections), so that it tells an attention's product from an MLP's. Fornax counts as
    outside of libraries wherever it is installed; its paths begin at the package. Empty where
    there is none.
    """
    if instruction.frame and instruction.frame in module.lines:
        return module.lines[instruction.frame]
    frames = [frame for frame in module.stack(instruction) if _ours(frame) or not _installed(frame)]
    asking = next((frame for frame in frames if not _serves(frame)), None)
    inner = next((frame for frame in frames if _ours(frame)), None)
    found = _text(asking or (frames[0] if frames else None)), _text(inner)
    if instruction.frame:
        module.lines[instruction.frame] = found
    return found


def _ours(frame: Frame) -> bool:
    return _PACKAGE.search(frame.file) is not None


def _installed(frame: Frame) -> bool:
    return not frame.file or any(part in frame.file for part in _LIBRARIES)


def _serves(frame: Frame) -> bool:
    package = _PACKAGE.search(frame.file)
    if package is None:
        return False
    owner = frame.function.partition(".")[0]
    return package.group(1).startswith(_SERVANTS) or owner in _SERVING_FUNCTIONS


def _text(frame: Frame | None) -> str:
    if frame is None:
        return ""
    package = _PACKAGE.search(frame.file)
    file = package.group(1) if package else frame.file
    function = frame.function.rpartition("<locals>.")[2] or frame.function
    return f"{file}:{frame.line}" + (f" ({function})" if function else "")
