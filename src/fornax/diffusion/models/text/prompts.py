"""Token ids of prompts: tokenizers of diffusers' folders, texts cut and padded to one length."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fornax.config.errors import ConfigError, DataError
from fornax.config.json_files import read_json_object
from fornax.data import load_tokenizer

__all__ = ["PromptTokenizer", "load_prompt_tokenizer"]


class PromptTokenizer:
    """Turns prompts into rows of token ids, with the special tokens that the text encoder expects.

    Special tokens that a prompt or template spells out become those tokens: a chat template is
    text with such tokens.
    """

    def __init__(self, backend: Any, pad_id: int):
        """Take a tokenizer of the `tokenizers` library and the id of padding."""
        backend.encode_special_tokens = False
        backend.no_padding()
        self._backend = backend
        self.pad_id = pad_id

    def token(self, text: str) -> int:
        """The id of a token.

        Raises:
          DataError: there is none of the name.
        """
        found = self._backend.token_to_id(text)
        if found is None:
            raise DataError(f"the tokenizer has no token {text}; take that of the pipeline")
        return found

    def encode(
        self, prompts: Sequence[str], length: int | None = None, *, left: bool = False
    ) -> tuple[np.ndarray, np.ndarray]:
        """Token ids of prompts, padded to one length.

        Args:
          prompts: at least one. An empty one is only its special tokens.
          length: of every row; what does not fit is cut, special tokens at the ends excepted. None
            for that of the longest.
          left: whether padding comes before the tokens.

        Returns:
          int32 token ids [B, S], and int32 1 for tokens and 0 for padding [B, S].

        Raises:
          ConfigError: no prompts, or no room for the special tokens.
        """
        if not prompts or isinstance(prompts, str):
            raise ConfigError(f"prompts={prompts!r} must be a list with at least one text")
        special = self._backend.num_special_tokens_to_add(is_pair=False)
        if length is not None and length <= special:
            raise ConfigError(
                f"length={length} leaves no room for a text beside {special} special tokens; use "
                f"at least {special + 1}"
            )
        if length is None:
            self._backend.no_truncation()
        else:
            self._backend.enable_truncation(length)
        rows = [each.ids for each in self._backend.encode_batch_fast(list(prompts))]
        width = max(1, *map(len, rows)) if length is None else length
        tokens_BS = np.full((len(rows), width), self.pad_id, np.int32)
        mask_BS = np.zeros((len(rows), width), np.int32)
        for row, ids in enumerate(rows):
            own = slice(width - len(ids), width) if left else slice(len(ids))
            tokens_BS[row, own] = ids
            mask_BS[row, own] = 1
        return tokens_BS, mask_BS


def load_prompt_tokenizer(folder: str | Path) -> PromptTokenizer:
    """The tokenizer of a folder of diffusers or transformers.

    Reads tokenizer.json, or CLIP's vocab.json and merges.txt.

    Raises:
      CheckpointError: a JSON file beside the vocabulary is damaged.
      DataError: neither is there, it is damaged, or no token is for padding. T5's spiece.model
        alone is not read.
    """
    folder = Path(folder)
    if (folder / "tokenizer.json").is_file():
        tokenizer = load_tokenizer(folder)
        backend, pad_id = tokenizer.backend, tokenizer.pad_id
    elif (folder / "vocab.json").is_file() and (folder / "merges.txt").is_file():
        padding = _settings(folder).get("pad_token", _END)
        backend = _clip(folder, padding)
        pad_id = backend.token_to_id(padding)
    elif (folder / "spiece.model").is_file():
        raise DataError(
            f"{folder} has spiece.model and no tokenizer.json, the only file that is read; write "
            "one: transformers' AutoTokenizer.from_pretrained(folder).save_pretrained(folder)"
        )
    else:
        raise DataError(
            f"{folder} has neither tokenizer.json nor vocab.json and merges.txt; give the folder "
            "of a tokenizer"
        )
    if pad_id is None:
        raise DataError(
            f"{folder}: no token is for padding, which rows of one length need; name one as "
            "pad_token in tokenizer_config.json"
        )
    return PromptTokenizer(backend, pad_id)


_START, _END = "<|startoftext|>", "<|endoftext|>"
_WORDS = (
    r"<\|startoftext\|>|<\|endoftext\|>|'s|'t|'re|'ve|'m|'ll|'d|[\p{L}]+|[\p{N}]|[^\s\p{L}\p{N}]+"
)
"""What CLIP's tokenizer takes as words (https://github.com/openai/CLIP)."""


def _clip(folder: Path, padding: str) -> Any:
    """CLIP's byte-level BPE of lower-case words, which end in `</w>`.

    What is for padding is special in a text too: in SDXL's second tokenizer that is "!".
    """
    from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers
    from tokenizers import pre_tokenizers as before
    from tokenizers import processors as after

    files = str(folder / "vocab.json"), str(folder / "merges.txt")
    try:
        bpe = models.BPE.from_file(*files, unk_token=_END, end_of_word_suffix="</w>")
    except Exception as error:  # the library raises bare Exception
        raise DataError(
            f"{folder}: vocab.json and merges.txt are not a tokenizer ({error}); "
            "download both again"
        ) from error
    backend: Any = Tokenizer(bpe)
    ids = {token: backend.token_to_id(token) for token in (_START, _END)}
    if None in ids.values():
        raise DataError(
            f"{folder}: vocab.json lacks {_START} or {_END}, and is not CLIP's; a tokenizer of "
            "another kind is read from tokenizer.json"
        )
    backend.normalizer = normalizers.Sequence(
        [normalizers.NFC(), normalizers.Replace(Regex(r"\s+"), " "), normalizers.Lowercase()]
    )
    words = before.Split(Regex(_WORDS), behavior="removed", invert=True)
    backend.pre_tokenizer = before.Sequence([words, before.ByteLevel(add_prefix_space=False)])
    backend.post_processor = after.TemplateProcessing(
        single=f"{_START} $A {_END}", special_tokens=list(ids.items())
    )
    special = [token for token in (*ids, padding) if backend.token_to_id(token) is not None]
    backend.add_special_tokens([AddedToken(token, special=True) for token in special])
    return backend


def _settings(folder: Path) -> dict[str, str]:
    """Special tokens by role, as the files beside a vocabulary name them."""
    found: dict[str, str] = {}
    for name in ("tokenizer_config.json", "special_tokens_map.json"):
        file = folder / name
        if not file.is_file():
            continue
        for key, value in read_json_object(file).items():
            value = value.get("content") if isinstance(value, dict) else value
            if key.endswith("_token") and isinstance(value, str):
                found[key] = value
    return found
