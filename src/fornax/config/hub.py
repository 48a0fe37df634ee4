"""Names of models and datasets on the Hugging Face Hub, resolved to folders of its local cache.

A name is `org/name` or `org/name@revision`, and a local path of that name wins. Downloads, their
progress and resumption, tokens, mirrors and offline use are huggingface_hub's, with its variables
(HF_HOME, HF_TOKEN, HF_ENDPOINT, HF_HUB_OFFLINE). Only files of the kinds listed here are fetched:
none of them can hold code, as pickled weights do.
"""

import functools
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from fornax.config.errors import ConfigError

__all__ = ["find_dataset", "find_model", "pinned"]

_NAME = re.compile(r"(\w[\w.-]*/\w[\w.-]*)(?:@(\w[\w./-]*))?")
_MODEL_FILES = ("*.safetensors", "*.json", "*.jinja", "*.txt")
# Other formats of the same weights.
_COPIES = ("original/*", "consolidated*", "onnx/*", "openvino/*")
# A relative path that names a file is none of a repository.
_FILES = (
    ".jsonl",
    ".json",
    ".parquet",
    ".txt",
    ".gz",
    ".yaml",
    ".safetensors",
    ".gguf",
    ".py",
    ".model",
)
_TRAIN = re.compile(r"(^|[/_.-])train([/_.-]|$)")


def find_model(name: str | Path, files: Sequence[str] = _MODEL_FILES) -> Path:
    """Where a model is: a local path as it is, or a repository's folder, fetched if need be.

    Args:
      name: a path or the name of a repository.
      files: globs of what is needed of a repository, such as its config alone.

    Raises:
      ConfigError: for a name that is neither, or cannot be fetched.
    """
    repository = _repository(name)
    if repository is None:
        return Path(name)
    folder = _fetch(*repository, "model", tuple(files))
    if files is _MODEL_FILES and not any(folder.glob("*.safetensors")):
        raise ConfigError(
            f"{name} has no weights as .safetensors, and pickled ones (.bin, .pt) are not read: "
            "they can run code. Ask for a revision that was converted, with @REVISION"
        )
    return folder


def find_dataset(name: str | Path, files: Sequence[str]) -> list[str] | None:
    """The files of a dataset on the Hub, sorted; None for what is not a name of one.

    Args:
      name: a path or the name of a repository.
      files: globs of what can be read. Where some of the files are of a train split, others are
        left out.

    Raises:
      ConfigError: for a name that cannot be fetched, or has no such files.
    """
    repository = _repository(name)
    if repository is None:
        return None
    ending = [pattern.removeprefix("*") for pattern in files]
    for wanted in ([f"*train*{each}" for each in ending], list(files)):
        folder = _fetch(*repository, "dataset", tuple(wanted))
        names = [str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file()]
        found = sorted(each for each in names if each.endswith(tuple(ending)))
        train = [each for each in found if _TRAIN.search(each)]
        if train or (found and wanted == list(files)):
            return [str(folder / each) for each in train or found]
    raise ConfigError(f"the dataset {name} has no {' or '.join(files)} file that could be read")


def pinned(name: str | Path, folder: Path) -> str:
    """What stands for a model from now on: the repository at its commit, or the absolute path."""
    repository = _repository(name)
    if repository is None:
        return str(folder)
    return f"{repository[0]}@{folder.name}"


def _repository(name: str | Path) -> tuple[str, str | None] | None:
    """Repository and revision, where `name` is not a local path and looks like one."""
    text = str(name)
    match = _NAME.fullmatch(text)
    if match is None or text.endswith(_FILES) or Path(text).exists():
        return None
    return match[1], match[2]


@functools.cache
def _fetch(
    repository: str, revision: str | None, kind: Literal["model", "dataset"], files: tuple[str, ...]
) -> Path:
    try:
        from huggingface_hub import constants, errors, snapshot_download
    except ImportError as error:
        raise ConfigError(
            f"{repository} is not a path here; to take it from the Hugging Face Hub, pip install "
            "'fornax-ai[hub]'"
        ) from error
    where = constants.ENDPOINT
    try:
        folder = snapshot_download(
            repository,
            repo_type=kind,
            revision=revision,
            allow_patterns=list(files),
            ignore_patterns=list(_COPIES),
        )
    except errors.GatedRepoError as error:
        raise ConfigError(
            f"the {kind} {repository} is gated: accept its terms at {where}/{repository}, then "
            "set HF_TOKEN or run hf auth login"
        ) from error
    except errors.RepositoryNotFoundError as error:
        raise ConfigError(
            f"{repository} is neither a path here nor a {kind} at {where}; check the name, and "
            "for a private one set HF_TOKEN or run hf auth login"
        ) from error
    except errors.RevisionNotFoundError as error:
        raise ConfigError(
            f"the {kind} {repository} has no revision {revision}; check what follows the @"
        ) from error
    except (OSError, errors.HFValidationError, errors.HfHubHTTPError) as error:
        reason = " ".join(str(error).split())[:300]
        raise ConfigError(
            f"{repository} is not a path here, and cannot be fetched from {where}: {reason}"
        ) from error
    return Path(folder)
