"""Replicas of `fornax serve` over an engine without a model, and their router.

As a program its arguments are the run directory, how many replicas, and JSON: fields of
`ServeConfig`, of `RoutingConfig` under `routing`, `_step_seconds` of the engine, and `_tls`:
whether they are guarded as on several machines.
"""

import json
import os
import sys
import time
from pathlib import Path

from tests.mock_engine import MockEngine

from fornax.cluster.routing import RoutingConfig, launch_replicas, serve_service
from fornax.config import load
from fornax.config.credentials import Credentials
from fornax.data import train_bpe
from fornax.llm.server import ServeConfig, serve_model

FREEZE = "hello world this is a test of freezing"
"""A prompt at which a replica's event loop stops."""


class Engine(MockEngine):
    """One that freezes where it is asked to."""

    def generate(self, prompt_ids, params, **options):
        if self.tokenizer.decode(prompt_ids) == FREEZE:
            time.sleep(3600)
        return super().generate(prompt_ids, params, **options)


def replica(words: list[str]) -> int:
    """`serve MODEL --config FILE --port N`; the engine takes FORNAX_TEST_STEP seconds per token."""
    config = load(ServeConfig, file=Path(words[3]), overrides=words[4:])

    def build(model, config, observer):
        tokenizer = train_bpe(["hello world this is a test of some text " * 20], 300)
        step = float(os.environ["FORNAX_TEST_STEP"])
        return Engine(tokenizer, max_model_len=4096, step_seconds=step, observer=observer)

    return serve_model("mock", config, build)


def main() -> int:
    run_dir, count, given = sys.argv[1], int(sys.argv[2]), json.loads(sys.argv[3])
    os.environ["FORNAX_TEST_STEP"] = str(given.pop("_step_seconds", 0.002))
    routing = RoutingConfig(**given.pop("routing", {}))
    credentials = Credentials.make(tls=given.pop("_tls", False))
    config = ServeConfig(port=0, **given)
    return launch_replicas(
        lambda folder: serve_service("mock", config, folder),
        run_dir,
        replicas=count,
        config=routing,
        program="tests.integration.cluster.replica_process:replica",
        credentials=credentials,
    )


if __name__ == "__main__":
    sys.exit(main())
