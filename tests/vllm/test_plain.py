"""vLLM that nobody asked to run over Fornax does not."""

import os
import subprocess
import sys

import pytest

PROGRAM = "from vllm.platforms import current_platform as p; print('platform:', type(p).__name__)"


@pytest.mark.parametrize(("plugins", "taken"), [(None, False), ("", False), ("fornax", True)])
def test_vllm_is_its_own_unless_fornax_is_named(plugins: str | None, taken: bool) -> None:
    environment = {key: value for key, value in os.environ.items() if key != "VLLM_PLUGINS"}
    if plugins is not None:
        environment["VLLM_PLUGINS"] = plugins
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
        check=True,
    )
    name = done.stdout.rsplit("platform:", 1)[1].strip()
    assert (name == "FornaxPlatform") is taken
