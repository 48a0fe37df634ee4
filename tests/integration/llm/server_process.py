"""`fornax serve` over a tiny model or without one: the argument is the config as JSON.

`_model: true` asks for the model; `_step_seconds`, `_die_after` and others with an underscore are
about the engine without one.
"""

import json
import sys

from tests.mock_engine import MockEngine

from fornax.config import from_mapping
from fornax.data import train_bpe
from fornax.llm.server import ServeConfig, listening, serve_model
from fornax.llm.text import ChatTemplate

TEMPLATE = (
    "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


def with_model(config, observer):
    """The engine with random weights."""
    from tests.integration.llm.streams import model, words

    from fornax.llm.async_engine import AsyncEngine
    from fornax.llm.build import build_engine

    parts = build_engine(model(), config.engine(), tokenizer=words(), observer=observer)
    return AsyncEngine(parts)


def main() -> int:
    given = json.loads(sys.argv[1])
    own = {name: given.pop(name) for name in list(given) if name.startswith("_")}
    listening._GRACE = own.get("_grace", listening._GRACE)

    def build(model, config, observer):
        if own.get("_model"):
            return with_model(config, observer)
        tokenizer = train_bpe(["hello world this is a test of some text " * 20], 300)
        engine = MockEngine(
            tokenizer,
            chat_template=ChatTemplate(TEMPLATE),
            max_model_len=own.get("_max_model_len", 4096),
            max_num_seqs=own.get("_max_num_seqs", 32),
            step_seconds=own.get("_step_seconds", 0.002),
            observer=observer,
            reply=own.get("_reply"),
        )
        if "_die_after" in own:
            step, left = engine._step, iter(range(own["_die_after"]))

            def step_or_die():
                if next(left, None) is None:
                    engine.die(RuntimeError("the device is gone"))
                return step()

            engine._step = step_or_die
        return engine

    return serve_model("mock", from_mapping(ServeConfig, given), build)


if __name__ == "__main__":
    sys.exit(main())
