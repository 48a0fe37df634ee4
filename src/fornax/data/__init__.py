"""Data (Grain): raw text or built datasets to batches of packed tokens with an exact position."""

from fornax.data.batches import Batches, ShardState, open_batches
from fornax.data.build import BuildConfig, BuildResult, TokenizerFile, TrainBpe, build
from fornax.data.config import DataConfig, Prefetch, RecordRange, StepRange
from fornax.data.inspection import Inspection, inspect
from fornax.data.manifest import Manifest, read_manifest
from fornax.data.packing import BestFit, ConcatThenSplit, FirstFit, NoPacking, Packing
from fornax.data.records import Record
from fornax.data.rows import Hosts
from fornax.data.sources import (
    ArrayRecord,
    Bagz,
    Dataset,
    HuggingFace,
    Jsonl,
    Mixture,
    Parquet,
    Part,
    PythonSource,
    Source,
    Stdlib,
    Text,
    Tfds,
)
from fornax.data.texts import dataset_tokenizer, read_texts
from fornax.data.tokenizer import Tokenizer, has_tokenizer, load_tokenizer, train_bpe
from fornax.data.transforms import FilterLength, FilterRegex, Python, Tokenize, Transform
from fornax.data.visualize import Profile, visualize

__all__ = [
    "ArrayRecord",
    "Bagz",
    "Batches",
    "BestFit",
    "BuildConfig",
    "BuildResult",
    "ConcatThenSplit",
    "DataConfig",
    "Dataset",
    "FilterLength",
    "FilterRegex",
    "FirstFit",
    "Hosts",
    "HuggingFace",
    "Inspection",
    "Jsonl",
    "Manifest",
    "Mixture",
    "NoPacking",
    "Packing",
    "Parquet",
    "Part",
    "Prefetch",
    "Profile",
    "Python",
    "PythonSource",
    "Record",
    "RecordRange",
    "ShardState",
    "Source",
    "Stdlib",
    "StepRange",
    "Text",
    "Tfds",
    "Tokenize",
    "Tokenizer",
    "TokenizerFile",
    "TrainBpe",
    "Transform",
    "build",
    "dataset_tokenizer",
    "has_tokenizer",
    "inspect",
    "load_tokenizer",
    "open_batches",
    "read_manifest",
    "read_texts",
    "train_bpe",
    "visualize",
]
