"""What vLLM finds of Fornax where both are installed: nothing, unless it was told to."""

import os
import subprocess
import sys

import pytest

# As vLLM does it with every platform plugin; it is not installed here, so nothing may import it.
PROGRAM = """
import sys
from importlib.metadata import entry_points
[found] = entry_points(group="vllm.platform_plugins", name="fornax")
print(found.load()())
assert not {"jax", "torch", "vllm"} & set(sys.modules)
"""


@pytest.mark.parametrize(
    ("plugins", "platform"),
    [
        (None, "None"),
        ("", "None"),
        ("other", "None"),
        ("other,fornax", "fornax.llm.vllm_plugin.platform.FornaxPlatform"),
    ],
)
def test_vllm_runs_over_fornax_only_where_it_is_named(plugins, platform):
    environment = {key: value for key, value in os.environ.items() if key != "VLLM_PLUGINS"}
    if plugins is not None:
        environment["VLLM_PLUGINS"] = plugins
    command = [sys.executable, "-c", PROGRAM]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == platform
