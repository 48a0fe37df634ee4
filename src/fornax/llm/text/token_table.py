"""What each token contributes to the text: bytes looked up once, then read from a table."""

import json
from typing import Any

from tokenizers import Tokenizer

__all__ = ["TokenTable"]

JsonObject = dict[str, Any]
"""A step of a decoder, as `tokenizers` writes it."""


class _Pieces(dict[int, str | bytes]):
    """Token id -> its text, or its bytes when these alone are not a whole characters."""

    def __init__(self, table: "TokenTable", skip_special_tokens: bool):
        super().__init__()
        self._table = table
        self._skip = skip_special_tokens

    def __missing__(self, token: int) -> str | bytes:
        special = self._skip and token in self._table.special
        piece = b"" if special else self._table.token_bytes(token)
        try:
            found: str | bytes = piece.decode()
        except UnicodeDecodeError:
            found = piece
        self[token] = found
        return found


class TokenTable:
    """The text of single tokens of one tokenizer; make one and share it between sequences.

    Byte-level tokenizers and SentencePiece-style ones (spaces written as another character, bytes
    as `<0x0A>`) are read from a table. `exact` is False for every other decoder: a token's text
    depends on its neighbours there, and `Detokenizer` asks the library step by step.

    Attributes: `backend`, the tokenizer; `special` and `added`, the special and all added tokens
        by id; `strips`, the spaces that the decoder takes from the start of a text.
    """

    def __init__(self, backend: Tokenizer):
        self.backend = backend
        tokens = backend.get_added_tokens_decoder()
        self.added = {number: token.content for number, token in tokens.items()}
        self.special = {number: self.added[number] for number, t in tokens.items() if t.special}
        decoder = backend.decoder  # pyrefly: ignore[missing-attribute]
        steps = _decoder_steps(None if decoder is None else json.loads(decoder.__getstate__()))
        self._byte_level = [step["type"] for step in steps] == ["ByteLevel"]
        self._replaced = [] if self._byte_level else _replacements(steps)
        self._byte_fallback = any(step["type"] == "ByteFallback" for step in steps)
        self.exact = self._byte_level or self._replaced is not None
        self.strips = sum(step["start"] for step in steps if step["type"] == "Strip")
        self._pieces = {skip: _Pieces(self, skip) for skip in (False, True)}

    def pieces(self, skip_special_tokens: bool) -> dict[int, str | bytes]:
        """Token id -> its text, or its bytes where these are not a whole characters by
        themselves."""
        return self._pieces[skip_special_tokens]

    def token_bytes(self, token: int) -> bytes:
        """The bytes that a token adds to a text; none for an id without a token."""
        name = self.backend.id_to_token(token)
        if name is None:
            return b""
        if self._byte_level:
            return _from_alphabet(name)
        if not self.exact:
            return self.backend.decode([token], skip_special_tokens=False).encode()
        if self._byte_fallback and (byte := _fallback_byte(name)) is not None:
            return byte
        for old, new in self._replaced or []:
            name = name.replace(old, new)
        return name.encode()

    def token_text(self, token: int) -> str:
        """A token's text by itself; U+FFFD stands for bytes that are not a whole character."""
        piece = self._pieces[False][token]
        return piece if isinstance(piece, str) else piece.decode(errors="replace")

    def has_text(self, tokens: list[int], skip_special_tokens: bool) -> bool:
        """Whether any of the tokens adds to a text."""
        pieces = self._pieces[skip_special_tokens]
        return any(pieces[token] for token in tokens)


def _decoder_steps(decoder: JsonObject | None) -> list[JsonObject]:
    if decoder is None:
        return [{"type": "None"}]
    if decoder["type"] != "Sequence":
        return [decoder]
    return [step for item in decoder["decoders"] for step in _decoder_steps(item)]


def _replacements(steps: list[JsonObject]) -> list[tuple[str, str]] | None:
    """The replacements of a SentencePiece-style decoder; None when it does anything else."""
    replaced = []
    for step in steps:
        match step:
            case {"type": "Replace", "pattern": {"String": old}, "content": new}:
                replaced.append((old, new))
            case {"type": "ByteFallback"} | {"type": "Fuse"}:
                pass
            case {"type": "Strip", "content": " ", "stop": 0} if step is steps[-1]:
                pass
            case _:
                return None
    fused = any(step["type"] == "Fuse" for step in steps)
    return replaced if fused else None


def _fallback_byte(name: str) -> bytes | None:
    if len(name) == 6 and name.startswith("<0x") and name.endswith(">"):
        try:
            return bytes([int(name[3:5], 16)])
        except ValueError:
            return None
    return None


def _alphabet() -> dict[str, int]:
    """Byte-level BPE's alphabet: printable bytes stand for themselves, others from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    rest = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(byte): byte for byte in printable} | {
        chr(0x100 + place): byte for place, byte in enumerate(rest)
    }


_ALPHABET = _alphabet()


def _from_alphabet(name: str) -> bytes:
    """Bytes of a byte-level token; a name outside the alphabet (an added token) is its text."""
    try:
        return bytes([_ALPHABET[character] for character in name])
    except KeyError:
        return name.encode()
