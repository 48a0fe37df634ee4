"""Where records come from: one file per format, each with its configuration and its reader."""

from fornax.data.sources.array_record import ArrayRecord
from fornax.data.sources.bagz import Bagz
from fornax.data.sources.custom import PythonSource
from fornax.data.sources.dataset import Dataset
from fornax.data.sources.hugging_face import HuggingFace
from fornax.data.sources.jsonl import Jsonl
from fornax.data.sources.mixture import Mixture, Part, Source
from fornax.data.sources.parquet import Parquet
from fornax.data.sources.stdlib import Stdlib
from fornax.data.sources.text import Text
from fornax.data.sources.tfds import Tfds

__all__ = [
    "ArrayRecord",
    "Bagz",
    "Dataset",
    "HuggingFace",
    "Jsonl",
    "Mixture",
    "Parquet",
    "Part",
    "PythonSource",
    "Source",
    "Stdlib",
    "Text",
    "Tfds",
]
