"""Text to token ids and back: bytes (built in), any tokenizer.json, and RWKV's vocabulary files.

    bytes            id = byte, 256 ends a document
    tokenizer.json   the package `tokenizers` (extra `lm`)
    RWKV             at each byte the longest token of the vocabulary that matches; 0 ends a document

A tokenizer never adds an id of its own to a text, and never makes the separator out of one: `<|endoftext|>` in a
document is the text of these 13 characters, so that no document can end another. `sha256` is over all that encoding
and decoding depend on, and is part of every record.
"""

from __future__ import annotations

import ast
import json
import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from decaybench.core.errors import RunError, UserError
from decaybench.core.hashing import digest
from decaybench.core.names import nearest

Ids = NDArray[np.uint32]

REPLACEMENT = "\ufffd"  # stands for what is no text: bytes that aren't UTF-8, ids that aren't in the vocabulary
_LONGEST = 1 << 22  # characters that the package tokenizers gets at once: it needs 100 bytes and more for each token
_BREAK = re.compile(r"[^\W\d_](?= [^\W\d_])")  # a letter, a space, a letter: a token begins at the space
_LOOK_BACK = 1 << 16
_LONGEST_LINE = 1 << 12  # of an RWKV vocabulary; a token has 128 bytes at most
_START = 3  # bytes of a place by which the lengths of the RWKV tokens to try are looked up
_SHORT = (2, 1)
_KINDS = "'bytes', a tokenizer.json, a folder that holds one, or an RWKV vocabulary file"


class Tokenizer(ABC):
    """What turns text into ids.

    name: "bytes", or that of its folder or file; vocab_size: all ids, the separator's too, are below it; separator:
    the id that ends a document, which no text encodes to; sha256: 64 hexadecimal digits, the same on every machine.
    """

    name: str
    vocab_size: int
    separator: int
    sha256: str
    files: tuple[Path, ...] = ()  # all that it was loaded from; of these a copy loads as the same tokenizer

    @abstractmethod
    def encode_many(self, texts: Sequence[str]) -> list[list[int]]:
        """The ids of each text, without a separator. A lone surrogate, which is no text, counts as U+FFFD."""

    @abstractmethod
    def encode_bytes(self, data: bytes) -> list[int]:
        """The ids of bytes that needn't be UTF-8; where only text can be encoded, U+FFFD stands for what isn't."""

    @abstractmethod
    def byte_lengths(self) -> NDArray[np.int64]:
        """The bytes of text that each id stands for, [vocab_size], to count bits per byte with; the separator has 0."""

    @abstractmethod
    def _text(self, ids: Sequence[int]) -> str:
        """The text of ids of the vocabulary, none of them the separator."""

    def encode(self, text: str) -> list[int]:
        """The ids of one text."""
        return self.encode_many([text])[0]

    def encode_arrays(self, texts: Sequence[str]) -> list[Ids]:
        """`encode_many` as arrays [tokens], which for many tokens take a tenth of the memory."""
        return [np.array(ids, dtype=np.uint32) for ids in self.encode_many(texts)]

    def decode(self, ids: Iterable[int]) -> str:
        """The text of ids. The separator has none; U+FFFD stands for bytes and ids that are no text."""
        parts: list[str] = []
        run: list[int] = []
        for i in ids:
            if 0 <= i < self.vocab_size and i != self.separator:
                run.append(i)
                continue
            parts += [self._text(run), "" if i == self.separator else REPLACEMENT]
            run = []
        return "".join([*parts, self._text(run)])


def load_tokenizer(spec: str) -> Tokenizer:
    """The tokenizer that `spec` names: "bytes", or the path of a tokenizer.json, its folder, or an RWKV vocabulary.

    Raises UserError where there is none or the file is damaged, RunError where it needs a package that isn't installed.
    """
    if spec == "bytes":
        return ByteTokenizer()
    path = Path(spec)
    if path.is_dir():
        if not (path / "tokenizer.json").is_file():
            raise UserError(f"{path} holds no tokenizer.json; a tokenizer is {_KINDS}")
        path /= "tokenizer.json"
    if not path.is_file():
        hint = f"did you mean {nearest(spec, ['bytes'])!r}?" if nearest(spec, ["bytes"]) else f"it is {_KINDS}"
        raise UserError(f"no tokenizer {spec!r}; {hint}")
    try:
        data = path.read_bytes()
    except OSError as error:
        raise UserError(f"can't read {path}: {error.strerror}") from None
    if path.suffix == ".json" or data.lstrip()[:1] == b"{":
        return FileTokenizer(path, data)
    return RwkvTokenizer(path, data)


class ByteTokenizer(Tokenizer):
    """The bytes of the text in UTF-8: ids 0..255, and 256 ends a document."""

    name = "bytes"
    vocab_size = 257
    separator = 256
    sha256 = digest({"kind": "bytes", "separator": 256})

    def encode_many(self, texts: Sequence[str]) -> list[list[int]]:
        return [list(to_bytes(text)) for text in texts]

    def encode_bytes(self, data: bytes) -> list[int]:
        return list(data)

    def encode_arrays(self, texts: Sequence[str]) -> list[Ids]:
        return [np.frombuffer(to_bytes(text), dtype=np.uint8).astype(np.uint32) for text in texts]

    def byte_lengths(self) -> NDArray[np.int64]:
        return np.array([1] * 256 + [0])

    def _text(self, ids: Sequence[int]) -> str:
        return bytes(ids).decode(errors="replace")


class FileTokenizer(Tokenizer):
    """A tokenizer.json, by the package `tokenizers`. Special tokens, truncation, padding and dropout are switched off.

    The separator is the `eos_token` of the tokenizer_config.json beside it, else the token with one of the usual
    names, else an id of its own after all others.
    """

    def __init__(self, path: Path, data: bytes) -> None:
        content = _json_object(path, data)
        self.files = (path,)
        self.name = (path.parent.resolve().name if path.name == "tokenizer.json" else path.stem) or "tokenizer"
        self._tokenizer = _build(path, content)
        ids = self._tokenizer.get_vocab(with_added_tokens=True)
        _check_ids(path, content, ids)
        self.separator = self._find_separator(path, ids)
        if self.separator == _unknown_id(content, ids):  # else a word that isn't known would end a document
            self.separator = max(ids.values()) + 1
        self._decoder = (content.get("decoder") or {}).get("type")
        self.vocab_size = max(*ids.values(), self.separator) + 1
        special = {token["id"]: token["content"] for token in content.get("added_tokens") or () if token["special"]}
        special |= {i: text for text, i in ids.items() if i == self.separator}
        # A model may still make one of the text, where it is a word of its vocabulary too. What stands for unknown
        # words it has to make.
        self._never = {i: text for i, text in special.items() if i != _unknown_id(content, ids)}
        kept = ("normalizer", "pre_tokenizer", "model", "added_tokens", "decoder")
        parts = {key: content.get(key) for key in kept}
        self.sha256 = digest({"kind": "tokenizer.json", "content": parts, "separator": self.separator})

    def encode_many(self, texts: Sequence[str]) -> list[list[int]]:
        found: list[list[int]] = []
        for batch in _batches(texts):
            try:
                found += self._encode(batch)
            except (TypeError, UnicodeEncodeError):  # how the package refuses lone surrogates
                found += self._encode([to_bytes(text).decode() for text in batch])
        return found

    def encode_bytes(self, data: bytes) -> list[int]:
        return self.encode(data.decode(errors="replace"))

    def byte_lengths(self) -> NDArray[np.int64]:
        added = {token.content for token in self._tokenizer.get_added_tokens_decoder().values()}
        lengths = np.zeros(self.vocab_size, dtype=np.int64)
        before = self._tokenizer.encode("a", add_special_tokens=False).ids
        start = len(self._tokenizer.decode(before, skip_special_tokens=False).encode())
        for token, i in self._tokenizer.get_vocab(with_added_tokens=True).items():
            if token in added:
                lengths[i] = len(token.encode())
            elif self._decoder == "ByteLevel":  # spells each byte as a character
                lengths[i] = len(token)
            elif re.fullmatch("<0x[0-9A-F]{2}>", token):  # a byte that no other token has
                lengths[i] = 1
            else:  # as it reads inside a text, where a word's first token has a space before it
                lengths[i] = len(self._tokenizer.decode([*before, i], skip_special_tokens=False).encode()) - start
        lengths[self.separator] = 0
        return lengths

    def _encode(self, texts: list[str]) -> list[list[int]]:
        pieces = [list(_pieces(text)) for text in texts]
        encoded = iter(self._tokenizer.encode_batch_fast(list(chain(*pieces)), add_special_tokens=False))
        return [list(chain.from_iterable(self._plain(piece, next(encoded).ids) for piece in own)) for own in pieces]

    def _plain(self, text: str, ids: list[int]) -> list[int]:
        """The ids, or where special ones are among them those of the text cut inside every special token's name."""
        if self._never.keys().isdisjoint(ids):
            return ids
        found: list[int] = []
        names = sorted((name for name in self._never.values() if len(name) > 1), key=len, reverse=True)
        for part in re.split("|".join(f"(?<={re.escape(name[0])})(?={re.escape(name[1:])})" for name in names), text):
            found += self._tokenizer.encode(part, add_special_tokens=False).ids
        return [i for i in found if i not in self._never]

    def _text(self, ids: Sequence[int]) -> str:
        text: str = self._tokenizer.decode(ids, skip_special_tokens=False)
        return text

    def _find_separator(self, path: Path, ids: dict[str, int]) -> int:
        beside = path.with_name("tokenizer_config.json")
        if path.name == "tokenizer.json" and beside.is_file():
            self.files = (path, beside)
            token = _json_object(beside, beside.read_bytes()).get("eos_token")
            name = token.get("content") if isinstance(token, dict) else token
            if name is not None:
                if name not in ids:
                    raise UserError(f"{beside}: eos_token={name!r} is no token of {path}")
                return ids[name]
        usual = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "[SEP]")
        return next((ids[name] for name in usual if name in ids), max(ids.values()) + 1)


class RwkvTokenizer(Tokenizer):
    """RWKV's vocabulary: lines `id 'literal' bytes`, ids from 1 upwards; 0 ends a document.

    Encoding takes at each byte the longest token that matches. Every byte is a token, so that all bytes have ids.
    """

    separator = 0

    def __init__(self, path: Path, data: bytes) -> None:
        self.files = (path,)
        self.name = path.stem
        self._tokens = _read_rwkv(path, data)
        self._ids = {token: i for i, token in self._tokens.items()}
        missing = next((byte for byte in range(256) if bytes([byte]) not in self._ids), None)
        if missing is not None:
            raise UserError(f"{path}: no token for the byte {missing:#04x}, so not every text has ids; cut short?")
        self.vocab_size = max(self._tokens) + 1
        self._lengths = _lengths_by_start(self._ids)
        listed = [[i, token.hex()] for i, token in self._tokens.items()]
        self.sha256 = digest({"kind": "rwkv", "tokens": listed, "separator": 0})

    def encode_many(self, texts: Sequence[str]) -> list[list[int]]:
        return [self.encode_bytes(to_bytes(text)) for text in texts]

    def encode_bytes(self, data: bytes) -> list[int]:
        ids, lengths = self._ids, self._lengths
        found: list[int] = []
        place = 0
        while place < len(data):
            # Beyond the end a slice is shorter than asked for, and what matches is then all that is left.
            for length in lengths.get(data[place : place + _START], _SHORT):
                token = ids.get(data[place : place + length])
                if token is not None:
                    found.append(token)
                    place += length
                    break
        return found

    def byte_lengths(self) -> NDArray[np.int64]:
        return np.array([len(self._tokens.get(i, b"")) for i in range(self.vocab_size)])

    def _text(self, ids: Sequence[int]) -> str:
        return b"".join(self._tokens.get(i, b"\xff") for i in ids).decode(errors="replace")


def to_bytes(text: str) -> bytes:
    """The text in UTF-8, U+FFFD for lone surrogates, which JSON's \\ud800 can bring in."""
    try:
        return text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace").encode()


def _json_object(path: Path, data: bytes) -> dict[str, Any]:
    try:
        content = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path} is not valid JSON (cut short or damaged?): {error}") from None
    if not isinstance(content, dict):
        raise UserError(f"{path} must hold a JSON object, not {type(content).__name__}")
    return content


def _build(path: Path, content: dict[str, Any]) -> Any:
    try:
        from tokenizers import Tokenizer as Library
    except ImportError:
        raise RunError(f"{path} needs the package tokenizers: pip install 'decaybench[lm]'") from None
    if not isinstance(content.get("model"), dict):
        raise UserError(f"{path} has no 'model'; it is not a tokenizer.json")
    content["model"].pop("dropout", None)  # would give a text other ids each time
    try:
        built = Library.from_str(json.dumps(content))
    except Exception as error:  # noqa: BLE001 the package raises nothing narrower
        raise UserError(f"{path} is not a tokenizer.json that the package tokenizers reads: {error}") from None
    built.no_truncation()
    built.no_padding()
    built.encode_special_tokens = True  # as the text that they are, that is
    return built


def _check_ids(path: Path, content: dict[str, Any], ids: dict[str, int]) -> None:
    owner: dict[int, str] = {}
    if not ids:
        raise UserError(f"{path} has an empty vocabulary")
    for token, i in ids.items():
        if owner.setdefault(i, token) != token:
            raise UserError(f"{path}: id {i} belongs to two tokens, {owner[i]!r} and {token!r}")
    for token in content.get("added_tokens") or ():
        if ids.get(token["content"]) != token["id"]:
            raise UserError(f"{path}: the added token {token['content']!r} has id {token['id']}, which isn't its own")


def _unknown_id(content: dict[str, Any], ids: dict[str, int]) -> int | None:
    model = content["model"]
    found = model.get("unk_id", ids.get(model.get("unk_token") or ""))
    return found if isinstance(found, int) else None


def _batches(texts: Sequence[str]) -> Iterator[list[str]]:
    batch: list[str] = []
    size = 0
    for text in texts:
        if batch and size + len(text) > _LONGEST:
            yield batch
            batch, size = [], 0
        batch.append(text)
        size += len(text)
    if batch:
        yield batch


def _pieces(text: str) -> Iterator[str]:
    """The text in pieces of at most `_LONGEST`, cut between words where it has any."""
    start = 0
    while len(text) - start > _LONGEST:
        stop = start + _LONGEST
        ends = [found.end() for found in _BREAK.finditer(text, stop - _LOOK_BACK, stop)]
        cut = ends[-1] if ends else stop
        yield text[start:cut]
        start = cut
    yield text[start:]


def _lengths_by_start(ids: dict[bytes, int]) -> dict[bytes, tuple[int, ...]]:
    """For the first bytes of a place: the lengths of the tokens that may match there, longest first."""
    found: dict[bytes, set[int]] = {}
    for token in ids:
        if len(token) >= _START:
            found.setdefault(token[:_START], {*_SHORT}).add(len(token))
    return {start: tuple(sorted(lengths, reverse=True)) for start, lengths in found.items()}


def _read_rwkv(path: Path, data: bytes) -> dict[int, bytes]:
    try:
        lines = data.decode().split("\n")
    except UnicodeDecodeError as error:
        raise UserError(
            f"{path} is not a tokenizer: no JSON, and no text at byte {error.start}; it is {_KINDS}"
        ) from None
    if lines.pop():
        raise UserError(f"{path} line {len(lines) + 1} has no end: the vocabulary is cut short")
    tokens: dict[int, bytes] = {}
    seen: set[bytes] = set()
    last = 0
    for number, line in enumerate(lines, 1):
        try:
            i, token = _rwkv_line(line)
            if i <= last:
                raise ValueError(f"id {i} after {last}; ids go upwards from 1")
            if token in seen:
                raise ValueError(f"{token!r} is there already")
        except ValueError as error:
            raise UserError(
                f"{path} line {number} is no line of an RWKV vocabulary (id 'token' bytes): {error}"
            ) from None
        tokens[i] = token
        seen.add(token)
        last = i
    return tokens


def _rwkv_line(line: str) -> tuple[int, bytes]:
    if len(line) > _LONGEST_LINE:
        raise ValueError(f"{len(line)} characters")
    matched = re.fullmatch(r"([0-9]{1,9}) (b?(?:'.+'|\".+\")) ([0-9]{1,9})\r?", line)
    if not matched:
        raise ValueError(repr(line[:60]))
    try:
        literal = ast.literal_eval(matched[2])
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        literal = None
    if not isinstance(literal, str | bytes):
        raise ValueError(f"{matched[2][:60]} is no literal of text or bytes")
    token = to_bytes(literal) if isinstance(literal, str) else literal
    if len(token) != int(matched[3]):
        raise ValueError(f"{matched[2][:60]} has {len(token)} bytes, not {int(matched[3])}")
    return int(matched[1]), token
