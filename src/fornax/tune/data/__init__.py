"""Data of post-training: conversations, pairs and prompts to tokens, masks and batches."""

from fornax.tune.data.checks import doubled_beginnings, template_fault, without_end
from fornax.tune.data.codec import Codec
from fornax.tune.data.encoded import Encoded, Limit, TooLong
from fornax.tune.data.feed import Feed, IndexStream, Picks
from fornax.tune.data.lines import Line, read_lines
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
from fornax.tune.data.preference import preference_batches
from fornax.tune.data.problems import Problems
from fornax.tune.data.read import read_examples, read_labelled, read_pairs, read_prompts
from fornax.tune.data.records import Chat, Completion, Example, Labelled, Pair, Prompt, Text
from fornax.tune.data.rows import RowStream, bucket, buckets_up_to, pad_rows
from fornax.tune.data.sft import PackedStream, sft_batches
from fornax.tune.data.state import array_state, from_array_state
from fornax.tune.data.summary import Summary

__all__ = [
    "Chat",
    "Codec",
    "Completion",
    "Encoded",
    "Example",
    "Feed",
    "IndexStream",
    "Labelled",
    "LabelledTokens",
    "Limit",
    "Line",
    "Loaded",
    "PackedStream",
    "Pair",
    "PairTokens",
    "Picks",
    "Problems",
    "Prompt",
    "PromptTokens",
    "RowStream",
    "Summary",
    "Text",
    "TooLong",
    "array_state",
    "bucket",
    "buckets_up_to",
    "doubled_beginnings",
    "from_array_state",
    "load_examples",
    "load_labelled",
    "load_pairs",
    "load_prompts",
    "pad_rows",
    "preference_batches",
    "read_examples",
    "read_labelled",
    "read_lines",
    "read_pairs",
    "read_prompts",
    "sft_batches",
    "template_fault",
    "without_end",
]
