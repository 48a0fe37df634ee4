"""What a program prints where it may use one core, and where it may use all."""

import subprocess
import sys

__all__ = ["printed_on_one_core_and_all"]


def printed_on_one_core_and_all(program: str) -> tuple[str, str]:
    """Standard output of two processes that run the program's text."""
    held = "import os; os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})"
    one, all_ = (
        subprocess.run(
            [sys.executable, "-c", text], capture_output=True, text=True, timeout=400, check=True
        ).stdout
        for text in (held + program, program)
    )
    return one, all_
