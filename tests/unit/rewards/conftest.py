"""A reward file with every kind of function and every kind of fault."""

import textwrap
from pathlib import Path

import pytest

FILE = """
import asyncio, ctypes, os, sys, time

calls = 0

def score(prompt, completion, **record):
    if completion == "exit":
        os._exit(3)
    if completion == "segfault":
        ctypes.string_at(0)
    if completion == "hang":
        time.sleep(60)
    if completion == "raise":
        raise ValueError("not this one")
    if completion == "nan":
        return float("nan")
    if completion == "text":
        return "1.0"
    if completion == "none":
        return None
    return float(len(completion))

def batch(prompts, completions, answer, **columns):
    if "exit" in completions:
        os._exit(3)
    if "short" in completions:
        return [1.0]
    return [float(c == a) for c, a in zip(completions, answer)]

def chats(completions, **columns):
    return [float(c[0]["role"] == "assistant") + len(c[0]["content"]) for c in completions]

async def later(completion):
    if completion == "hang":
        await asyncio.sleep(60)
    if completion == "block":
        time.sleep(60)
    await asyncio.sleep(0.2)
    return len(completion)

async def later_batch(completions):
    await asyncio.sleep(0.01)
    return [len(c) for c in completions]

def needs(completion, answer):
    return float(completion == answer)

def modules(completion):
    return float("jax" in sys.modules) + 10 * float("numpy" in sys.modules)

def drawn(completion):
    import random
    return random.random()

not_a_function = 3

def wrong(text, answer):
    return 1.0

def positional(completion, /):
    return 1.0
"""

STATEFUL = """
import os

seen = []

def novel(completion):
    if completion == "exit":
        os._exit(1)
    new = completion not in seen
    seen.append(completion)
    return float(new)

def get_state():
    return seen

def set_state(state):
    seen[:] = state
"""


@pytest.fixture(scope="session")
def reward_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("rewards") / "my_rewards.py"
    path.write_text(textwrap.dedent(FILE))
    return path


@pytest.fixture(scope="session")
def stateful_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("rewards") / "novelty.py"
    path.write_text(textwrap.dedent(STATEFUL))
    return path
