"""Tools for the tests, good and bad."""

import os
import sys
import time
from typing import Literal


def add(a: int, b: int = 1, how: Literal["plain", "twice"] = "plain") -> int:
    """Add two numbers.

    What follows the first paragraph is not for the model.
    """
    sys.stdout.write("printed, and in nobody's way\n")
    return (a + b) * (2 if how == "twice" else 1)


def lists(values: list[float], scale: float | None = None) -> dict:
    return {"sum": sum(values) * (scale or 1)}


def hang(pid_file: str) -> str:
    """Never come back, with a child process."""
    child = os.fork()
    with open(pid_file, "a", encoding="utf-8") as file:
        file.write(f"{os.getpid()}\n")
    while True:
        time.sleep(0.01 if child else 0.02)


def crash() -> None:
    os._exit(3)


def leave() -> None:
    sys.exit("no")


def talk() -> str:
    return "x" * 5000


def untyped(a):
    return a
