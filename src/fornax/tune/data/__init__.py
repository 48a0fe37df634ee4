"""Data of post-training: conversations, pairs and prompts to tokens, masks and batches."""

from fornax.tune.data.batches import (
    BatchIndex,
    ExtendedStream,
    IndexStream,
    LoaderOptions,
    RowStream,
    bucket,
    buckets_up_to,
    pad_rows,
)
from fornax.tune.data.codec import Codec
from fornax.tune.data.encoded import Encoded, Limit, Summary, TooLong
from fornax.tune.data.lines import Line, Problems, read_lines
from fornax.tune.data.load import (
    LabelledTokens,
    Loaded,
    PairTokens,
    PromptTokens,
    load_examples,
    load_labelled,
    load_pairs,
    load_prompts,
)
from fornax.tune.data.read import (
    parse_example,
    parse_labelled,
    parse_pair,
    parse_prompt,
)
from fornax.tune.data.records import Chat, Completion, Example, Labelled, Pair, Prompt, Text
from fornax.tune.data.streams import PackedStream, preference_batches, sft_batches

__all__ = [
    "BatchIndex",
    "Chat",
    "Codec",
    "Completion",
    "Encoded",
    "Example",
    "ExtendedStream",
    "IndexStream",
    "Labelled",
    "LabelledTokens",
    "Limit",
    "Line",
    "Loaded",
    "LoaderOptions",
    "PackedStream",
    "Pair",
    "PairTokens",
    "Problems",
    "Prompt",
    "PromptTokens",
    "RowStream",
    "Summary",
    "Text",
    "TooLong",
    "bucket",
    "buckets_up_to",
    "load_examples",
    "load_labelled",
    "load_pairs",
    "load_prompts",
    "pad_rows",
    "parse_example",
    "parse_labelled",
    "parse_pair",
    "parse_prompt",
    "preference_batches",
    "read_lines",
    "sft_batches",
]
