"""Token shards against plain lists: tokens, document ends and documents across shards, and what damage says."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from decaybench.core.errors import RunError, UserError
from decaybench.core.files import atomic_write_json
from decaybench.text import shards as module
from decaybench.text.shards import (
    Manifest,
    Rule,
    ShardInfo,
    ShardWriter,
    SourceInfo,
    SplitInfo,
    TokenizerInfo,
    TokenShards,
    copy_tokenizer,
    folder_tokenizer,
    read_manifest,
)
from decaybench.text.tokenizers import load_tokenizer
from tests.text.test_tokenizers import vocabulary, write

END = 256  # of bytes
RULE = Rule(field="text", validation=0.5, by="document")
DOCUMENTS = st.lists(st.lists(st.integers(0, 255), max_size=6), min_size=1, max_size=12)


def fill(folder: Path, documents: list[list[int]], cuts: set[int], dtype: str = "uint16") -> None:
    """A folder whose train split is these documents, with a new shard before each of the tokens `cuts`."""
    tokenizer = TokenizerInfo.of(load_tokenizer("bytes"))
    infos: list[ShardInfo] = []
    writer: ShardWriter | None = None
    place = 0
    for document in documents:
        for token in [*document, END]:
            if writer is None or place in cuts:
                if writer:
                    infos.append(writer.close())
                    writer.__exit__(None, None, None)
                writer = ShardWriter(folder, f"train/shard-{len(infos):05d}", dtype, "x").__enter__()
                writer.add(np.array([], dtype=np.uint32), 0, 0)
            if token == END:
                writer.end_document(END)
            else:
                writer.add(np.array([token], dtype=np.uint32), 1, 0)
            place += 1
    assert writer is not None
    infos.append(writer.close())
    writer.__exit__(None, None, None)
    sources = (SourceInfo(name="a.txt", kind="text", bytes=1, sha256="0" * 64),)
    splits = {"train": SplitInfo.of(tuple(infos))}
    manifest = Manifest(tokenizer=tokenizer, dtype=dtype, rule=RULE, sources=sources, splits=splits, problems=())
    atomic_write_json(folder / "manifest.json", manifest.model_dump(mode="json", exclude_none=True))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    fill(tmp_path / "shards", [[1, 2], [], [3], [4, 5, 6]], {4, 6})
    return tmp_path / "shards"


@settings(max_examples=60, deadline=None)
@given(documents=DOCUMENTS, cuts=st.sets(st.integers(1, 60), max_size=6), dtype=st.sampled_from(["uint16", "uint32"]))
def test_any_stretch_of_tokens_and_ends(
    documents: list[list[int]], cuts: set[int], dtype: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("shards")
    fill(folder, documents, cuts, dtype)
    flat = [token for document in documents for token in [*document, END]]
    ends = [place + 1 for place, token in enumerate(flat) if token == END]
    shards = TokenShards(folder)
    assert (len(shards), shards.documents) == (len(flat), len(documents))
    assert shards.tokens(0, 0).dtype == np.dtype(dtype)
    for start in range(0, len(flat) + 1, 3):
        for stop in range(start, len(flat) + 1, 2):
            assert shards.tokens(start, stop).tolist() == flat[start:stop]
            assert shards.ends(start, stop).tolist() == [end for end in ends if start < end <= stop]
    for number, document in enumerate(documents):
        start, stop = shards.document(number)
        assert shards.tokens(start, stop).tolist() == [*document, END]
    shards.verify()


def test_outside_is_an_error(folder: Path) -> None:
    shards = TokenShards(folder)
    assert (len(shards), shards.documents) == (10, 4)
    for start, stop in ((-1, 2), (3, 2), (0, 11)):
        with pytest.raises(IndexError):
            shards.tokens(start, stop)
        with pytest.raises(IndexError):
            shards.ends(start, stop)
    for number in (-1, 4):
        with pytest.raises(IndexError):
            shards.document(number)


def test_the_bytes_on_disk(folder: Path) -> None:
    names = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
    numbers = [f"train/shard-0000{n}.{kind}" for n in range(3) for kind in ("bin", "idx")]
    assert names == ["manifest.json", *numbers]
    ids = b"".join((folder / name).read_bytes() for name in numbers[::2])
    assert np.frombuffer(ids, "<u2").tolist() == [1, 2, 256, 256, 3, 256, 4, 5, 6, 256]
    ends = [np.frombuffer((folder / name).read_bytes(), "<i8").tolist() for name in numbers[1::2]]
    assert ends == [[3, 4], [2], [4]]


def test_few_files_are_open_and_another_process_maps_its_own(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_OPEN", 2)
    shards = TokenShards(folder)
    for _ in range(2):
        assert shards.tokens(0, 10).tolist()[-2:] == [6, 256]
        assert shards.document(3) == (6, 10)
        assert len(shards._open) <= 2
    copy = pickle.loads(pickle.dumps(shards))  # noqa: S301 our own
    assert not copy._open
    assert copy.tokens(0, 10).tolist() == shards.tokens(0, 10).tolist()


def test_the_hash_is_of_the_tokens(tmp_path: Path) -> None:
    fill(tmp_path / "a", [[1], [2]], {2})
    fill(tmp_path / "b", [[1], [2]], {2})
    fill(tmp_path / "c", [[1], [3]], {2})
    a, b, c = (read_manifest(tmp_path / name).sha256 for name in "abc")
    assert a == b != c


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda data: data[:-1], r"shard-00000\.bin has 7 bytes, not 8: cut short or damaged; --force"),
        (lambda data: data + b"x", r"shard-00000\.bin has 9 bytes, not 8"),
        (None, r"can't read .*shard-00000\.bin: No such file"),
    ],
)
def test_sizes_are_checked_on_opening(folder: Path, damage: Any, words: str) -> None:
    path = folder / "train" / "shard-00000.bin"
    if damage:
        path.write_bytes(damage(path.read_bytes()))
    else:
        path.unlink()
    with pytest.raises(UserError, match=words):
        TokenShards(folder)


@pytest.mark.parametrize("suffix", [".bin", ".idx"])
def test_hashes_are_checked_on_demand(folder: Path, suffix: str) -> None:
    path = folder / "train" / f"shard-00001{suffix}"
    data = bytearray(path.read_bytes())
    data[0] ^= 1
    path.write_bytes(data)
    with pytest.raises(UserError, match=rf"shard-00001{suffix} is damaged: its sha256 isn't the manifest's"):
        TokenShards(folder).verify()


@pytest.mark.parametrize(
    ("tokens", "ends", "words"),
    [
        ([1, 300, 256, 256], [3, 4], "id 300 in a vocabulary of 257"),
        ([1, 2, 3, 256], [3, 4], "documents don't end where the separators are"),
        ([1, 2, 256, 256], [2, 4], "documents don't end where the separators are"),
    ],
)
def test_what_tokens_must_hold(folder: Path, tokens: list[int], ends: list[int], words: str) -> None:
    """A folder whose hashes are right and whose content isn't."""
    data = json.loads((folder / "manifest.json").read_text())
    info = data["splits"]["train"]["shards"][0]
    for suffix, key, values in ((".bin", "sha256", np.array(tokens, "<u2")), (".idx", "ends_sha256", np.array(ends))):
        path = folder / "train" / f"shard-00000{suffix}"
        path.write_bytes(values.tobytes())
        info[key] = module.file_digest(path)
    (folder / "manifest.json").write_text(json.dumps(data))
    with pytest.raises(UserError, match=words):
        TokenShards(folder).verify()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"format": 2}, "format=2"),
        ({"dtype": "int8"}, "dtype='int8'.*did you mean"),
        ({"extra": 1}, "unknown key 'extra'"),
        ({"splits": {"test": {}}}, "splits.test"),
        ({"splits.train.tokens": 11}, "the sums of train aren't those of its shards"),
        ({"splits.train.shards.0.file": "../../x"}, r"splits.train.shards.0.file='../../x'"),
        ({"splits.train.shards.0.tokens": -4}, "splits.train.shards.0.tokens=-4"),
        ({"splits.train.shards.0.sha256": "x"}, "sha256='x'"),
        ({"tokenizer.file": "tokenizer/../../x"}, "tokenizer.file="),
        ({"tokenizer": None}, "tokenizer=null"),
    ],
)
def test_hostile_manifests(folder: Path, change: dict[str, Any], words: str) -> None:
    data = json.loads((folder / "manifest.json").read_text())
    for key, value in change.items():
        *path, last = key.split(".")
        inner: Any = data
        for part in path:
            inner = inner[int(part) if part.isdigit() else part]
        inner[last] = value
    (folder / "manifest.json").write_text(json.dumps(data))
    with pytest.raises(UserError, match=words) as error:
        TokenShards(folder)
    assert "\n" not in str(error.value) and "manifest.json" in str(error.value)


def test_folders_that_are_none(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"has no validation documents; prepare it with another --validation"):
        TokenShards(folder, "validation")
    with pytest.raises(UserError, match="unknown split 'trian'; did you mean 'train'"):
        TokenShards(folder, "trian")
    with pytest.raises(
        UserError, match=r"is no folder of token shards \(no manifest\.json\); `bench data prepare` makes"
    ):
        TokenShards(tmp_path)
    for text in ("[]", "{", "null"):
        (folder / "manifest.json").write_text(text)
        with pytest.raises(UserError, match=r"manifest\.json (must hold a JSON object|is not valid JSON)"):
            TokenShards(folder)
    (folder / "manifest.json").unlink()
    with pytest.raises(
        UserError, match=r"is not finished \(no manifest\.json\); the same `bench data prepare` goes on"
    ):
        TokenShards(folder)


def test_a_writer_left_by_an_error_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(RunError), ShardWriter(tmp_path, "train/shard-00000", "uint16", "x") as writer:
        writer.add(np.zeros(10, np.uint32), 10, 0)
        raise RunError("stop")
    assert list((tmp_path / "train").iterdir()) == []


def test_the_tokenizer_is_in_the_folder(folder: Path, tmp_path: Path) -> None:
    assert folder_tokenizer(folder, read_manifest(folder)).name == "bytes"
    tokenizer = load_tokenizer(str(write(tmp_path / "mine.txt", vocabulary())))
    copy_tokenizer(folder, tokenizer)
    data = json.loads((folder / "manifest.json").read_text())
    data["tokenizer"] = TokenizerInfo.of(tokenizer).model_dump(mode="json")
    (folder / "manifest.json").write_text(json.dumps(data))
    found = folder_tokenizer(folder, read_manifest(folder))
    assert (found.name, found.sha256) == ("mine", tokenizer.sha256)
    write(folder / "tokenizer" / "mine.txt", vocabulary("300 'more' 4"))
    with pytest.raises(UserError, match=r"mine\.txt: not the tokenizer 'mine' that made these tokens"):
        folder_tokenizer(folder, read_manifest(folder))
