"""Byte-level BPE tokenizers: train one, load one, and encode documents in batches."""

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer as _Backend

from fornax.config.errors import ConfigError, DataError
from fornax.config.files import write_whole
from fornax.gguf import is_gguf, tokenizer_file

EOS = "<|endoftext|>"
BOS = "<|begin|>"
PAD = "<|pad|>"

# 256 bytes and the special tokens are always there.
_SMALLEST = 256 + 3


class Tokenizer:
    """A `tokenizers` tokenizer with its special tokens by role.

    It has `vocab_size` (all ids are below it), and `eos_id`, `bos_id`, `pad_id`, each None without
    such a token.
    """

    def __init__(
        self,
        backend: _Backend,
        *,
        eos_id: int | None = None,
        bos_id: int | None = None,
        pad_id: int | None = None,
    ):
        # Text is data: a document that spells out a special token must not become one.
        backend.encode_special_tokens = True
        self.backend = backend
        self.eos_id = eos_id
        self.bos_id = bos_id
        self.pad_id = pad_id

    def __getstate__(self) -> dict[str, object]:
        return {**self.__dict__, "backend": self.backend.to_str()}

    def __setstate__(self, state: dict[str, object]) -> None:
        self.__dict__.update(state)
        self.backend = _Backend.from_str(str(state["backend"]))
        self.backend.encode_special_tokens = True

    @property
    def vocab_size(self) -> int:
        """Number of ids, added tokens included."""
        return self.backend.get_vocab_size(with_added_tokens=True)

    @property
    def dtype(self) -> np.dtype:
        """The smallest stored dtype that holds every id: uint16 or uint32."""
        return np.dtype("<u2" if self.vocab_size <= 1 << 16 else "<u4")

    def encode(self, text: str) -> np.ndarray:
        """Token ids of a text, without special tokens, uint16 or uint32 `[n]`."""
        return self.encode_batch([text])[0]

    def encode_batch(
        self, texts: Sequence[str], *, bos: bool = False, eos: bool = False
    ) -> list[np.ndarray]:
        """Token ids of each text, with bos in front and eos behind when asked for.

        Raises `DataError` when the tokenizer has no such token.
        """
        head = [_required(self.bos_id, "bos")] if bos else []
        tail = [_required(self.eos_id, "eos")] if eos else []
        encodings = self.backend.encode_batch_fast(list(texts), add_special_tokens=False)
        return [np.asarray(head + item.ids + tail, self.dtype) for item in encodings]

    def decode(self, ids: Sequence[int] | np.ndarray, *, special: bool = False) -> str:
        """Text of token ids; special tokens are left out unless asked for."""
        return self.backend.decode([int(i) for i in ids], skip_special_tokens=not special)

    def save(self, directory: Path) -> None:
        """Write `tokenizer.json`, `tokenizer_config.json`, `special_tokens_map.json`."""
        directory.mkdir(parents=True, exist_ok=True)
        names = {
            f"{role}_token": self.backend.id_to_token(number)
            for role, number in (("eos", self.eos_id), ("bos", self.bos_id), ("pad", self.pad_id))
            if number is not None
        }
        config = {**names, "tokenizer_class": "PreTrainedTokenizerFast", "add_bos_token": False}
        write_whole(directory / "tokenizer.json", self.backend.to_str(pretty=True))
        write_whole(directory / "tokenizer_config.json", json.dumps(config, indent=2))
        write_whole(directory / "special_tokens_map.json", json.dumps(names, indent=2))


def _required(number: int | None, role: str) -> int:
    if number is None:
        raise DataError(f"the tokenizer has no {role} token: set append_eos/prepend_bos to false")
    return number


def train_bpe(texts: Iterable[str], vocab_size: int, *, min_frequency: int = 2) -> Tokenizer:
    """Train a byte-level BPE tokenizer: every text encodes and decodes back exactly.

    Digits are split one by one and words by GPT-2's pattern. The same texts in the same order give
    the same tokenizer. Raises `ConfigError` for a vocabulary too small and `DataError` without
    text.
    """
    from tokenizers import decoders, models, pre_tokenizers, trainers

    if vocab_size < _SMALLEST:
        raise ConfigError(
            f"vocab_size={vocab_size} is below {_SMALLEST}: 256 bytes and the special tokens"
        )
    backend = _Backend(models.BPE(byte_fallback=False))
    splits = [
        pre_tokenizers.Digits(individual_digits=True),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
    ]
    backend.pre_tokenizer = pre_tokenizers.Sequence(splits)  # pyrefly: ignore[missing-attribute]
    backend.decoder = decoders.ByteLevel()  # pyrefly: ignore[missing-attribute]
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=min_frequency,
        special_tokens=[EOS, BOS, PAD],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    seen = _Seen(texts)
    backend.train_from_iterator(seen, trainer)
    if seen.characters == 0:
        raise DataError(
            "there is no text to train a tokenizer on: the corpus is empty; check what source.path "
            "names, the transforms, and holdout"
        )
    return _with_roles(backend, {"eos": EOS, "bos": BOS, "pad": PAD})


class _Seen:
    """Counts the characters that pass."""

    def __init__(self, texts: Iterable[str]):
        self._texts = texts
        self.characters = 0

    def __iter__(self) -> Iterator[str]:
        for text in self._texts:
            self.characters += len(text)
            yield text


def _with_roles(backend: _Backend, names: dict[str, str | None]) -> Tokenizer:
    ids = {role: backend.token_to_id(name) if name else None for role, name in names.items()}
    return Tokenizer(backend, eos_id=ids["eos"], bos_id=ids["bos"], pad_id=ids["pad"])


def load_tokenizer(path: str | Path) -> Tokenizer:
    """Load `tokenizer.json` (or a directory with it); roles come from the files beside it. A GGUF
    file has both in it.

    Raises `DataError` for a file that is missing or no tokenizer, `CheckpointError` for a GGUF
    file that is damaged or has a tokenizer of a kind that is not read.
    """
    if is_gguf(path):
        spec = tokenizer_file(path, "tokenizer.json") or ""
        backend = _parse(Path(path), lambda: _Backend.from_str(spec))
        return _with_roles(backend, _role_names(Path(path), backend))
    file = Path(path) / "tokenizer.json" if Path(path).is_dir() else Path(path)
    backend = load_backend(file)
    return _with_roles(backend, _role_names(file.parent, backend))


def has_tokenizer(path: Path) -> bool:
    """Whether a model's directory, or the GGUF file of one, has a tokenizer."""
    return is_gguf(path) or (path / "tokenizer.json").is_file()


def load_backend(file: Path) -> _Backend:
    """The library's tokenizer in a tokenizer.json; `DataError` when missing or damaged."""
    if not file.is_file():
        raise DataError(f"{file} does not exist: name a tokenizer.json or the folder that holds it")
    return _parse(file, lambda: _Backend.from_file(str(file)))


def _parse(file: Path, read: Callable[[], _Backend]) -> _Backend:
    try:
        return read()
    except Exception as error:  # the library raises bare Exception
        raise DataError(f"{file} is not a tokenizer ({error}): name a tokenizer.json") from error


def _role_names(directory: Path, backend: _Backend) -> dict[str, str | None]:
    """Special tokens by role, from the configuration files beside the tokenizer, else our own."""
    named: dict[str, str | None] = {}
    for name in ("special_tokens_map.json", "tokenizer_config.json"):
        named.update(_read_roles(directory / name))
    ours = {"eos": EOS, "bos": BOS, "pad": PAD}
    return {
        role: named.get(role)
        or (ours[role] if backend.token_to_id(ours[role]) is not None else None)
        for role in ours
    }


def _read_roles(file: Path) -> dict[str, str | None]:
    text = tokenizer_file(file.parent, file.name) if is_gguf(file.parent) else None
    if text is None and not file.is_file():
        return {}
    try:
        content = json.loads(file.read_text(encoding="utf-8") if text is None else text)
    except ValueError as error:
        raise DataError(f"{file} is not valid JSON ({error})") from error
    roles: dict[str, str | None] = {}
    for role in ("eos", "bos", "pad"):
        value = content.get(f"{role}_token")
        if isinstance(value, dict):
            value = value.get("content")
        if isinstance(value, str):
            roles[role] = value
    return roles
