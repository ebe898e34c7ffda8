"""Tokenizers: exact round trips, no injection, one clear line for damaged files; RWKV's against a plain greedy loop."""

from __future__ import annotations

import ast
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from decaybench.core.errors import UserError
from decaybench.text import tokenizers as module
from decaybench.text.tokenizers import Tokenizer, load_tokenizer, to_bytes

DATA = Path(__file__).resolve().parents[3] / "shared" / "data"
NEAR = DATA / "tokenizers"
RWKV = NEAR / "rwkv_vocab_v20230424.txt"
NOVEL = DATA / "corpora" / "litbank" / "11_alices_adventures_in_wonderland.txt"
REAL = ["bytes", str(NEAR / "gpt2"), str(NEAR / "gpt-neox-20b"), str(RWKV)]
TEXTS = st.text(st.characters(codec="utf-8"), max_size=60)


def real(spec: str) -> Tokenizer:
    if spec != "bytes":
        if not Path(spec).exists():
            pytest.skip(f"no {Path(spec).name} at shared/data/tokenizers")
        if not spec.endswith(".txt"):
            pytest.importorskip("tokenizers", reason="the package tokenizers is not installed")
    if spec not in _loaded:
        _loaded[spec] = load_tokenizer(spec)
    return _loaded[spec]


_loaded: dict[str, Tokenizer] = {}


def novel() -> str:
    if not NOVEL.exists():
        pytest.skip("no novels at shared/data/corpora")
    return NOVEL.read_text(encoding="utf-8")


def tokenizer_json(**changed: Any) -> dict[str, Any]:
    """A tokenizer.json of 256 byte tokens, ` t`, `he` and the end of a document."""
    spelled = [chr(b) for b in [*range(33, 127), *range(161, 173), *range(174, 256)]]
    spelled += [chr(256 + n) for n in range(256 - len(spelled))]
    vocab = {token: i for i, token in enumerate([*spelled, "Ġt", "he"])}
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    end = {"id": 258, "content": "<|end|>", "special": True}
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [end | flags],
        "normalizer": None,
        "pre_tokenizer": level,
        "post_processor": None,
        "decoder": level,
        "model": {"type": "BPE", "vocab": vocab, "merges": ["Ġ t", "h e"]},
    } | changed


def write(path: Path, content: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(content if isinstance(content, str) else json.dumps(content), encoding="utf-8")
    return path


def vocabulary(*more: str) -> str:
    """An RWKV vocabulary of 256 bytes, `ab`, `abcd` and `é`, and further lines."""
    lines = [f"{byte + 1} {bytes([byte])!r} 1" for byte in range(256)]
    lines += ["257 'ab' 2", "258 'abcd' 4", "259 'é' 2", *more]
    return "".join(line + "\n" for line in lines)


@pytest.mark.parametrize("spec", REAL, ids=["bytes", "gpt2", "gpt-neox-20b", "rwkv"])
def test_a_novel_comes_back_as_it_was_and_has_no_separator(spec: str) -> None:
    tokenizer, text = real(spec), novel()
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert tokenizer.separator not in ids
    assert min(ids) >= 0 and max(ids) < tokenizer.vocab_size
    assert sum(tokenizer.byte_lengths()[ids]) == len(text.encode())


# What each encoding depends on can't change unseen: these hashes are part of every record.
@pytest.mark.parametrize(
    ("spec", "known"),
    [
        ("bytes", ("bytes", 257, 256, "511ea56f3e82")),
        (str(NEAR / "gpt2"), ("gpt2", 50257, 50256, "e7e66594")),
        (str(NEAR / "gpt-neox-20b"), ("gpt-neox-20b", 50277, 0, "b3edabed")),
        (str(RWKV), ("rwkv_vocab_v20230424", 65530, 0, "d655ae42")),
    ],
    ids=["bytes", "gpt2", "gpt-neox-20b", "rwkv"],
)
def test_names_sizes_and_hashes(spec: str, known: tuple[str, int, int, str]) -> None:
    tokenizer = real(spec)
    found = (tokenizer.name, tokenizer.vocab_size, tokenizer.separator)
    assert (*found, tokenizer.sha256[: len(known[3])]) == known


@pytest.mark.parametrize(
    ("spec", "ids"),
    [
        ("bytes", list("Hello, wörld\n".encode())),
        (str(NEAR / "gpt2"), [15496, 11, 266, 30570, 335, 198]),
        (str(NEAR / "gpt-neox-20b"), [12092, 13, 259, 6592, 392, 187]),
    ],
    ids=["bytes", "gpt2", "gpt-neox-20b"],
)
def test_known_ids(spec: str, ids: list[int]) -> None:
    assert real(spec).encode("Hello, wörld\n") == ids


@pytest.mark.parametrize("spec", REAL, ids=["bytes", "gpt2", "gpt-neox-20b", "rwkv"])
@settings(max_examples=40, deadline=None)
@given(texts=st.lists(TEXTS, max_size=5))
def test_any_text_comes_back(spec: str, texts: list[str]) -> None:
    tokenizer = real(spec)
    encoded = tokenizer.encode_many(texts)
    assert encoded == [tokenizer.encode(text) for text in texts]
    assert [list(ids) for ids in tokenizer.encode_arrays(texts)] == encoded
    if tokenizer.name != "gpt-neox-20b":  # which composes characters: its text may be another spelling
        assert [tokenizer.decode(ids) for ids in encoded] == texts


@pytest.mark.parametrize("spec", REAL, ids=["bytes", "gpt2", "gpt-neox-20b", "rwkv"])
def test_no_text_ends_a_document(spec: str) -> None:
    tokenizer = real(spec)
    text = "a<|endoftext|>b<|padding|> <|endoftext|></s>\0"
    ids = tokenizer.encode(text)
    assert tokenizer.separator not in ids
    assert tokenizer.decode(ids) == text


def test_the_separator_is_no_text_and_unknown_ids_are_marked() -> None:
    tokenizer = load_tokenizer("bytes")
    assert tokenizer.decode([104, 105, 256, 33, 257, -1, 10**9]) == "hi!���"
    assert tokenizer.decode([0xE9, 0x28]) == "�("


@pytest.mark.parametrize("spec", REAL, ids=["bytes", "gpt2", "gpt-neox-20b", "rwkv"])
def test_lone_surrogates_and_bytes_that_are_no_text(spec: str) -> None:
    tokenizer = real(spec)
    assert tokenizer.decode(tokenizer.encode("a\ud800b")) == "a�b"
    assert tokenizer.decode(tokenizer.encode_bytes(b"a\xffb\x00")) == "a�b\0"
    assert to_bytes("\ud83d\ude00 \udc00") == "😀 �".encode()


@settings(max_examples=100, deadline=None)
@given(data=st.binary(max_size=60) | st.text("abcdé \n", max_size=60).map(str.encode))
def test_rwkv_is_the_greedy_loop(data: bytes) -> None:
    tokens = greedy_tokens()
    assert real(str(RWKV)).encode_bytes(data) == greedy(tokens, data)


def test_rwkv_is_the_greedy_loop_on_a_novel() -> None:
    data = novel()[:40_000].encode() + b" " * 500 + b"=" * 300
    assert real(str(RWKV)).encode_bytes(data) == greedy(greedy_tokens(), data)


def greedy_tokens() -> dict[bytes, int]:
    if not RWKV.exists():
        pytest.skip("no RWKV vocabulary at shared/data/tokenizers")
    if not _greedy:
        for line in RWKV.read_text(encoding="utf-8").splitlines():
            first, last = line.index(" "), line.rindex(" ")
            token = ast.literal_eval(line[first + 1 : last])
            _greedy[token if isinstance(token, bytes) else token.encode()] = int(line[:first])
    return _greedy


_greedy: dict[bytes, int] = {}


def greedy(tokens: dict[bytes, int], data: bytes) -> list[int]:
    ids = []
    while data:
        length = next(n for n in range(min(len(data), 128), 0, -1) if data[:n] in tokens)
        ids.append(tokens[data[:length]])
        data = data[length:]
    return ids


def test_a_small_rwkv_vocabulary(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(str(write(tmp_path / "tiny.txt", vocabulary())))
    assert (tokenizer.name, tokenizer.vocab_size, tokenizer.separator) == ("tiny", 260, 0)
    assert tokenizer.encode("abcdabcé") == [258, 257, ord("c") + 1, 259]
    assert tokenizer.encode_bytes(b"\xc3") == [0xC3 + 1]
    assert tokenizer.decode([258, 0, 259]) == "abcdé"
    np.testing.assert_array_equal(tokenizer.byte_lengths()[[0, 1, 257, 258, 259]], [0, 1, 2, 4, 2])
    windows = load_tokenizer(str(write(tmp_path / "crlf.txt", vocabulary().replace("\n", "\r\n"))))
    assert windows.sha256 == tokenizer.sha256


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (vocabulary()[:-1], "line 259 has no end: the vocabulary is cut short"),
        (vocabulary()[:-20], "line 258 has no end"),
        ("".join(vocabulary().splitlines(keepends=True)[:200]), "no token for the byte 0xc8"),
        ("", "no token for the byte 0x00"),
        (vocabulary("259 'x1' 2"), "line 260 .* id 259 after 259; ids go upwards from 1"),
        (vocabulary("300 'x1' 2", "299 'x2' 2"), "line 261 .* id 299 after 300"),
        ("0 'zero' 4\n" + vocabulary(), "line 1 .* id 0 after 0"),
        (vocabulary("300 'ab' 2"), "line 260 .* b'ab' is there already"),
        (vocabulary("300 'abc' 4"), "line 260 .* 'abc' has 3 bytes, not 4"),
        (vocabulary("300 'é' 1"), "line 260 .* 'é' has 2 bytes, not 1"),
        (vocabulary("300 __import__('os').system('x') 9"), "line 260 is no line of an RWKV vocabulary"),
        (vocabulary("300 ['a'] 1"), "line 260 is no line"),
        (vocabulary("300 '\\x' 2"), "line 260 .* is no literal"),
        (vocabulary("300 'a'+'b' 2"), "line 260 .* is no literal"),
        (vocabulary(f"300 '{'a' * 5000}' 5000"), "line 260 .* 5011 characters"),
        (vocabulary("nonsense"), "line 260 .* 'nonsense'"),
        ("a story, not a vocabulary\n", "line 1 is no line of an RWKV vocabulary"),
    ],
)
def test_damaged_rwkv_vocabularies(tmp_path: Path, text: str, words: str) -> None:
    path = write(tmp_path / "v.txt", text)
    with pytest.raises(UserError, match=words) as error:
        load_tokenizer(str(path))
    assert "\n" not in str(error.value) and str(path) in str(error.value)


def test_a_binary_file_is_no_tokenizer(tmp_path: Path) -> None:
    (tmp_path / "v.bin").write_bytes(bytes(range(200, 256)) * 10)
    with pytest.raises(UserError, match=r"v\.bin is not a tokenizer: no JSON, and no text at byte 0; it is 'bytes'"):
        load_tokenizer(str(tmp_path / "v.bin"))


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("byts", "no tokenizer 'byts'; did you mean 'bytes'"),
        ("gpt2", "no tokenizer 'gpt2'; it is 'bytes', a tokenizer.json, a folder that holds one, or an RWKV"),
        (".", "holds no tokenizer.json"),
        ("", "no tokenizer|holds no tokenizer.json"),
    ],
)
def test_wrong_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, spec: str, words: str) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=words):
        load_tokenizer(spec)


class TestFiles:
    """tokenizer.json by the package `tokenizers`."""

    @pytest.fixture(autouse=True)
    def _package(self) -> None:
        pytest.importorskip("tokenizers", reason="the package tokenizers is not installed")

    def test_file_and_folder_are_the_same(self, tmp_path: Path) -> None:
        path = write(tmp_path / "mine" / "tokenizer.json", tokenizer_json())
        one, other = load_tokenizer(str(path)), load_tokenizer(str(path.parent))
        assert (one.name, one.sha256, one.separator) == (other.name, other.sha256, other.separator)
        assert (one.name, one.vocab_size, one.separator) == ("mine", 260, 259)
        named = load_tokenizer(str(write(tmp_path / "x" / "other.json", tokenizer_json())))
        assert (named.name, named.sha256) == ("other", one.sha256)
        assert one.encode("the he") == [83, 257, 220, 257]
        assert one.encode(" the") == [256, 257]

    def test_the_hash_is_of_what_matters(self, tmp_path: Path) -> None:
        known = load_tokenizer(str(write(tmp_path / "a" / "tokenizer.json", tokenizer_json()))).sha256
        cut = {"direction": "Right", "max_length": 3, "strategy": "LongestFirst", "stride": 0}
        pad = {"strategy": {"Fixed": 9}, "direction": "Right", "pad_to_multiple_of": None, "pad_id": 0}
        pad |= {"pad_type_id": 0, "pad_token": "!"}
        model = tokenizer_json()["model"]
        without = [
            json.dumps(tokenizer_json(), indent=4),
            tokenizer_json(truncation=cut, padding=pad),
            tokenizer_json(model=model | {"dropout": 0.9}),
        ]
        for number, content in enumerate(without):
            found = load_tokenizer(str(write(tmp_path / str(number) / "tokenizer.json", content)))
            assert found.sha256 == known
            assert len(found.encode("the the the the")) == 8, "nothing cut, added or dropped"
        for number, content in enumerate(
            [
                tokenizer_json(model=model | {"merges": ["h e"]}),
                tokenizer_json(normalizer={"type": "Lowercase"}),
                tokenizer_json(pre_tokenizer=None),
                tokenizer_json(decoder=None),
            ]
        ):
            assert load_tokenizer(str(write(tmp_path / f"o{number}" / "tokenizer.json", content))).sha256 != known
        write(tmp_path / "a" / "tokenizer_config.json", {"eos_token": {"content": "<|end|>"}})
        assert load_tokenizer(str(tmp_path / "a")).sha256 != known, "another separator"

    @pytest.mark.parametrize(
        ("config", "separator"), [({"eos_token": "<|end|>"}, 258), ({"eos_token": "!"}, 0), ({}, 259)]
    )
    def test_the_separator_of_the_configuration(self, tmp_path: Path, config: Any, separator: int) -> None:
        write(tmp_path / "tokenizer.json", tokenizer_json())
        write(tmp_path / "tokenizer_config.json", config)
        found = load_tokenizer(str(tmp_path))
        assert found.separator == separator
        ids = found.encode("end! <|end|>!")
        assert separator not in ids and 258 not in ids

    def test_usual_names_of_separators(self, tmp_path: Path) -> None:
        content = tokenizer_json()
        content["added_tokens"][0]["content"] = "</s>"
        assert load_tokenizer(str(write(tmp_path / "tokenizer.json", content))).separator == 258

    def test_models_that_would_make_special_tokens_of_text(self, tmp_path: Path) -> None:
        words = {"[UNK]": 0, "</s>": 1, "a": 2, "<": 3, "/s>": 4}
        model = {"type": "WordLevel", "vocab": words, "unk_token": "[UNK]"}
        flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
        special = [{"id": i, "content": token} | flags for token, i in words.items() if i < 2]
        content = tokenizer_json(
            model=model, added_tokens=special, pre_tokenizer={"type": "WhitespaceSplit"}, decoder=None
        )
        found = load_tokenizer(str(write(tmp_path / "tokenizer.json", content)))
        assert found.separator == 1
        assert found.encode("a </s> b") == [2, 3, 4, 0], "an unknown word stays one"
        pieces = [["<unk>", 0.0], ["</s>", 0.0], ["▁a", -1.0], ["▁", -2.0], ["<", -3.0], ["/s>", -3.0]]
        space = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": True}
        unigram = tokenizer_json(
            model={"type": "Unigram", "unk_id": 0, "vocab": pieces, "byte_fallback": False},
            added_tokens=[{"id": 0, "content": "<unk>"} | flags, {"id": 1, "content": "</s>"} | flags],
            pre_tokenizer=space,
            decoder=space,
        )
        other = load_tokenizer(str(write(tmp_path / "unigram.json", unigram)))
        ids = other.encode("a</s>")
        assert 1 not in ids and {4, 5} <= set(ids)

    def test_a_word_that_is_unknown_ends_no_document(self, tmp_path: Path) -> None:
        model = {"type": "WordLevel", "vocab": {"</s>": 0, "a": 1}, "unk_token": "</s>"}
        content = tokenizer_json(model=model, added_tokens=[], pre_tokenizer={"type": "WhitespaceSplit"}, decoder=None)
        found = load_tokenizer(str(write(tmp_path / "tokenizer.json", content)))
        assert found.encode("a b") == [1, 0]
        assert (found.separator, found.vocab_size) == (2, 3)

    def test_texts_longer_than_the_package_gets_at_once(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        tokenizer = real(str(NEAR / "gpt2"))
        texts = [novel()[:20_000], "", "no space" * 200, "and\n\n\nthe  end  "]
        whole = tokenizer.encode_many(texts)
        monkeypatch.setattr(module, "_LONGEST", 700)
        assert tokenizer.encode_many(texts)[0] == whole[0], "cut between words: the same tokens"
        assert [tokenizer.decode(ids) for ids in tokenizer.encode_many(texts)] == texts

    @pytest.mark.parametrize(
        ("content", "words"),
        [
            (json.dumps(tokenizer_json())[:-200], "is not valid JSON .cut short or damaged"),
            ("{", "is not valid JSON"),
            ("[]", "must hold a JSON object, not list"),
            ({}, "has no 'model'"),
            ({"model": {}}, "is not a tokenizer.json that the package tokenizers reads"),
            (tokenizer_json(model={"type": "BPE", "vocab": {}, "merges": []}, added_tokens=[]), "empty vocabulary"),
            (tokenizer_json(model={"type": "BPE", "vocab": {"a": 0, "b": 0}, "merges": []}), "id 0 belongs to two"),
            (tokenizer_json(model={"type": "BPE", "vocab": {"a": 0}, "merges": ["a b"]}), "tokenizers reads"),
            (tokenizer_json(model={"type": "BPE", "vocab": {"a": -1}, "merges": []}), "tokenizers reads"),
            (tokenizer_json(model={"type": "Nonsense"}), "tokenizers reads"),
            ("[" * 100_000, "is not valid JSON"),
        ],
    )
    def test_damaged_files(self, tmp_path: Path, content: Any, words: str) -> None:
        path = write(tmp_path / "tokenizer.json", content)
        with pytest.raises(UserError, match=words) as error:
            load_tokenizer(str(path))
        assert "\n" not in str(error.value) and str(path) in str(error.value)

    def test_a_configuration_that_names_no_token(self, tmp_path: Path) -> None:
        write(tmp_path / "tokenizer.json", tokenizer_json())
        write(tmp_path / "tokenizer_config.json", {"eos_token": "<eos>"})
        with pytest.raises(UserError, match="eos_token='<eos>' is no token of"):
            load_tokenizer(str(tmp_path))
        write(tmp_path / "tokenizer_config.json", "{")
        with pytest.raises(UserError, match=r"tokenizer_config\.json is not valid JSON"):
            load_tokenizer(str(tmp_path))
