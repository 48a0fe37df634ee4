"""A small tokenizer, chat templates in several manners, and files of records."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from fornax.data import Tokenizer, train_bpe
from fornax.llm.text import ChatTemplate
from fornax.tune.data import Codec

TEXT = (
    "system user assistant tool hello world what is one and two? three! def f(x): return x\n\n\n"
    + "\n" * 40
)
MARKERS = ("<|im_start|>", "<|im_end|>")

CHATML = """{% for m in messages %}<|im_start|>{{ m.role }}
{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}{{ m.content or '' }}
{%- for c in m.tool_calls or [] %}<call>{{ c.function.arguments | tojson }}</call>{% endfor -%}
<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""

MARKED = """{% for m in messages %}<|im_start|>{{ m.role }}
{% if m.role == 'assistant' %}{% generation %}{{ m.content }}<|im_end|>{% endgeneration %}
{%- else %}{{ m.content }}<|im_end|>{% endif %}

{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""

# Thoughts stay in the last turn only.
FORGETFUL = CHATML.replace("m.reasoning_content %}", "m.reasoning_content and loop.last %}")


def tokenizer() -> Tokenizer:
    """A byte-level tokenizer with the markers of ChatML as special tokens."""
    made = train_bpe([TEXT] * 4, 290)
    made.backend.add_special_tokens(list(MARKERS))
    return made


def codec(template: str | None = CHATML, **options: Any) -> Codec:
    """A codec whose turns end with <|im_end|>."""
    made = options.pop("tokenizer", None) or tokenizer()
    end = made.backend.token_to_id("<|im_end|>")
    source = None if template is None else ChatTemplate(template)
    return Codec(made, template=source, **{"eos_ids": (end,), **options})


def chat(*texts: str, **last: Any) -> list[dict[str, Any]]:
    """Messages of a user and an assistant in turn; `last` goes into the last one."""
    roles = ("user", "assistant")
    made: list[dict[str, Any]] = [
        {"role": roles[i % 2], "content": text} for i, text in enumerate(texts)
    ]
    made[-1] |= last
    return made


def write(path: Path, lines: Iterable[Any]) -> Path:
    """JSON Lines; texts are written as they are."""
    texts = [line if isinstance(line, str) else json.dumps(line) for line in lines]
    path.write_text("\n".join(texts) + "\n", encoding="utf-8")
    return path
