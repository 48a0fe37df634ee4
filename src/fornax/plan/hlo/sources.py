"""Where in the source an instruction comes from."""

import re

from fornax.plan.hlo.module import Frame, Instruction, Module

_LIBRARIES = ("site-packages/", "dist-packages/", "/lib/python3", "<frozen", "<string>")
_PACKAGE = re.compile(r"/(?:src|site-packages|dist-packages)/(fornax/.*\.py)$")


def sources(module: Module, instruction: Instruction) -> tuple[str, str]:
    """Return the innermost line outside of installed libraries, and the innermost in fornax.

    Fornax's lines count as outside of libraries wherever it is installed; its paths begin at the
    package. Empty where there is none.
    """
    frames = list(module.stack(instruction))
    own = next((frame for frame in frames if _ours(frame) or not _installed(frame)), None)
    fornax = next((frame for frame in frames if _ours(frame)), None)
    return _text(own), _text(fornax)


def _ours(frame: Frame) -> bool:
    return _PACKAGE.search(frame.file) is not None


def _installed(frame: Frame) -> bool:
    return not frame.file or any(part in frame.file for part in _LIBRARIES)


def _text(frame: Frame | None) -> str:
    if frame is None:
        return ""
    package = _PACKAGE.search(frame.file)
    file = package.group(1) if package else frame.file
    function = frame.function.rpartition("<locals>.")[2] or frame.function
    return f"{file}:{frame.line}" + (f" ({function})" if function else "")
