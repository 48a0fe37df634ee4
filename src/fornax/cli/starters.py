"""Commented config files to start from: which keys of a config they show, and example data."""

import dataclasses
import textwrap
import typing
from collections.abc import Iterator, Mapping
from typing import Any, Literal

from fornax.cli.registry import commands
from fornax.config import Field, describe
from fornax.config.text import write_flow

__all__ = ["STARTERS", "Kind", "Starter", "write"]

Kind = Literal[
    "train",
    "sft",
    "dpo",
    "kto",
    "grpo",
    "distill",
    "quantize",
    "serve",
    "host",
    "diffusion",
    "diffusion-tune",
]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Starter:
    """What one kind of file holds."""

    command: str
    """Words of the command that reads it."""
    run: str
    """The rest of the line that runs it, after --config FILE."""
    first: str = ""
    """A command that must run before it."""
    keys: Mapping[str, object]
    """Paths of keys in the order of the file; each with its value, or DEFAULT."""
    files: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Example data by name, written beside the config."""


DEFAULT = object()
"""The value that a key has anyway."""

_TUNED: dict[str, object] = {
    "model": "models/mine",
    "data": "",
    "eval_share": DEFAULT,
    "max_length": DEFAULT,
    "epochs": 3,
    "batch_size": 4,
    "lora.rank": 16,
    "lora.alpha": 32.0,
    "optim.learning_rate": 1e-4,
    "save_every": 200,
    "seed": DEFAULT,
}


def _tuned(data: str, **others: object) -> dict[str, object]:
    """Keys of a run of post-training on some file; others by path, with `__` for a dot."""
    found = {**_TUNED, "data": data}
    found.update({name.replace("__", "."): value for name, value in others.items()})
    return found


_CHATS = "".join(
    f'{{"messages": [{{"role": "user", "content": "{asked}"}}, '
    f'{{"role": "assistant", "content": "{said}"}}]}}\n'
    for asked, said in (
        ("Name a prime above 10.", "11"),
        ("Name a prime above 20.", "23"),
        ("What is 7 times 6?", "42"),
        ("What is 9 times 8?", "72"),
        ("Spell cat backwards.", "tac"),
        ("Spell dog backwards.", "god"),
        ("Is 15 a prime?", "No: 15 is 3 times 5."),
        ("Is 17 a prime?", "Yes."),
    )
)
_TEXTS = "".join(
    f'{{"text": "{number} times {other} is {number * other}. A line of the text that your users '
    f'write or read goes here, and a hundred more like it: number {number * 20 + other}."}}\n'
    for number in range(2, 20)
    for other in range(2, 20)
)
_PAIRS = "".join(
    f'{{"prompt": "Name a prime above {n}.", "chosen": " {right}", "rejected": " {wrong}"}}\n'
    for n, right, wrong in ((10, 11, 12), (20, 23, 21), (30, 31, 33), (40, 41, 42))
)
_LABELS = "".join(
    f'{{"prompt": "Name a prime above {n}.", "completion": " {said}", "label": {good}}}\n'
    for n, said, good in ((10, 11, "true"), (20, 21, "false"), (30, 31, "true"), (40, 42, "false"))
)
_PROMPTS = "".join(
    f'{{"prompt": "Name a prime above {n}:", "above": {n}}}\n' for n in (10, 20, 30, 40)
)
_REWARD = '''"""The reward of an answer: 1 for a prime above the number asked for."""

import re


def score(prompts, completions, above, **columns):
    """One number for each completion; `above` is the column of the data."""
    return [float(_right(text, least)) for text, least in zip(completions, above)]


def _right(text, least):
    found = re.search(r"\\d{1,6}", text)
    n = int(found[0]) if found else 0
    return n > least and all(n % d for d in range(2, int(n**0.5) + 1))
'''

STARTERS: dict[Kind, Starter] = {
    "train": Starter(
        command="train",
        run="--run-dir runs/first",
        first="fornax data build --output data/first --tokenizer.vocab-size 4096 --holdout 0.05",
        keys={
            "data.source.type": "dataset",
            "data.source.path": "data/first",
            "model.vocab_size": 4096,
            "model.hidden_size": 192,
            "model.intermediate_size": 512,
            "model.num_layers": 5,
            "model.num_heads": 6,
            "model.num_kv_heads": 3,
            "model.head_dim": 32,
            "model.max_position_embeddings": 512,
            "seq_len": 512,
            "batch_size": 8,
            "steps": 1000,
            "optim.optimizer.type": "adamw",
            "optim.optimizer.weight_decay": 0.1,
            "optim.learning_rate": 2e-3,
            "optim.schedule.type": "cosine",
            "optim.schedule.warmup_steps": 100,
            "eval.every": 250,
            "eval.batches": 16,
            "save_every": 250,
            "checkpoint.keep_last": 2,
            "seed": DEFAULT,
        },
    ),
    "sft": Starter(
        command="tune sft",
        run="--out runs/sft",
        keys=_tuned("chats.jsonl", loss_on=DEFAULT, packing=DEFAULT),
        files={"chats.jsonl": _CHATS},
    ),
    "dpo": Starter(
        command="tune dpo",
        run="--out runs/dpo",
        keys=_tuned(
            "pairs.jsonl", loss__type="dpo", loss__beta=0.1, optim__learning_rate=2e-5, epochs=1
        ),
        files={"pairs.jsonl": _PAIRS},
    ),
    "kto": Starter(
        command="tune kto",
        run="--out runs/kto",
        keys=_tuned("labels.jsonl", optim__learning_rate=2e-5, epochs=1),
        files={"labels.jsonl": _LABELS},
    ),
    "grpo": Starter(
        command="tune grpo",
        run="--out runs/grpo",
        keys=_tuned(
            "prompts.jsonl",
            reward=["my_rewards.py:score"],
            group_size=8,
            batch_size=32,
            rollout__max_tokens=16,
            rollout__temperature=DEFAULT,
            optim__learning_rate=2e-5,
        ),
        files={"prompts.jsonl": _PROMPTS, "my_rewards.py": _REWARD},
    ),
    "distill": Starter(
        command="tune distill",
        run="--out runs/distill",
        keys={"teacher": "models/teacher", **_tuned("chats.jsonl")},
        files={"chats.jsonl": _CHATS},
    ),
    "quantize": Starter(
        command="quantize",
        run="models/mine --out models/mine-w4",
        keys={
            "scheme": "w4a16-gptq",
            "data": "calibration.jsonl",
            "max_loss": DEFAULT,
            "rules": DEFAULT,
            "group_size": DEFAULT,
            "samples": DEFAULT,
            "length": 128,
            "seed": DEFAULT,
        },
        files={"calibration.jsonl": _TEXTS},
    ),
    "serve": Starter(
        command="serve",
        run="MODEL",
        keys={
            "host": DEFAULT,
            "port": DEFAULT,
            "dtype": DEFAULT,
            "max_model_len": DEFAULT,
            "max_num_seqs": DEFAULT,
            "gpu_memory_utilization": DEFAULT,
            "kv_cache_memory_bytes": DEFAULT,
            "enable_prefix_caching": DEFAULT,
            "tensor_parallel_size": DEFAULT,
            "max_queued_requests": DEFAULT,
            "request_timeout": DEFAULT,
            "shutdown_timeout": DEFAULT,
        },
    ),
    "host": Starter(
        command="host",
        run="",
        keys={
            "repository": "models",
            "http": DEFAULT,
            "grpc": DEFAULT,
            "control": DEFAULT,
            "model_memory": DEFAULT,
            "max_concurrent_requests": DEFAULT,
            "request_timeout": DEFAULT,
            "access_log": DEFAULT,
            "drain_seconds": DEFAULT,
        },
    ),
    "diffusion": Starter(
        command="diffusion train",
        run="--run-dir runs/letters",
        keys={
            "data.type": "letters",
            "data.count": 20000,
            "model.type": "dit",
            "model.num_layers": 4,
            "model.num_heads": 4,
            "model.head_dim": 48,
            "model.patch": 4,
            "text.type": "words",
            "text.width": 64,
            "objective.prediction": "data",
            "objective.mean": 0.7,
            "caption_dropout": DEFAULT,
            "batch_size": 64,
            "steps": 4500,
            "optim.learning_rate": 1e-3,
            "optim.ema.decay": 0.998,
            "sample.every": 500,
            "sample.steps": 8,
            "sample.guidance": 2.0,
            "save_every": 500,
        },
    ),
    "diffusion-tune": Starter(
        command="diffusion tune",
        run="--out runs/letters-tuned",
        keys={
            "model": "runs/letters",
            "data.type": "letters",
            "lora.rank": 8,
            "batch_size": 32,
            "steps": 500,
            "optim.learning_rate": 1e-4,
            "save_every": 250,
        },
    ),
}


def write(kind: Kind, file: str) -> str:
    """The text of a config file of one kind, which is to be named `file`."""
    starter = STARTERS[kind]
    config = next(each.config for each in commands() if each.name == starter.command)
    assert config is not None
    fields: dict[str, list[Field]] = {}
    for field in describe(config()):
        fields.setdefault(field.path, []).append(field)
    command = f"fornax {starter.command}"
    words = f"{command} --config {file} {starter.run}".rstrip()
    lines = [*([starter.first] if starter.first else []), words]
    head = [
        f"# Read by {command}; a key that stands here with its default may be removed.",
        "#",
        *(f"#   {line}" for line in lines),
        "#",
        f"# All keys: {command} --help-config; for editors: fornax schema {starter.command}",
        "",
    ]
    return "\n".join([*head, *_body(starter, fields), ""])


def _body(starter: Starter, fields: Mapping[str, list[Field]]) -> Iterator[str]:
    open_parts: list[str] = []
    for path, value in starter.keys.items():
        *parents, name = path.split(".")
        shared = 0
        while shared < min(len(parents), len(open_parts)) and parents[shared] == open_parts[shared]:
            shared += 1
        for depth in range(shared, len(parents)):
            yield f"{'  ' * depth}{parents[depth]}:"
        open_parts = parents
        field = _field(path, starter, fields)
        indent = "  " * len(parents)
        yield from textwrap.wrap(
            field.doc, 96, initial_indent=f"{indent}# ", subsequent_indent=f"{indent}# "
        )
        shown = field.default if value is DEFAULT else write_flow(typing.cast("Any", value))
        yield f"{indent}{name}: {shown}"


def _field(path: str, starter: Starter, fields: Mapping[str, list[Field]]) -> Field:
    """What is said of a key: of the variant that the file chooses, where several have it."""
    found = fields[path]
    chosen = starter.keys.get(f"{path.rpartition('.')[0]}.type")
    return next((each for each in found if each.variant == chosen), found[0])
