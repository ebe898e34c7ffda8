"""Documents out of files: whatever is in them and wherever they are cut, the parts together are the whole."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from decaybench.core.errors import RunError, UserError
from decaybench.text import documents as module
from decaybench.text.documents import HubRows, read_part
from decaybench.text.sources import (
    BROKEN_ROWS,
    EMPTY_DOCUMENTS,
    EMPTY_FILES,
    INVALID,
    NULS,
    OTHER_FILES,
    WIDE_FILES,
    Problems,
    Rules,
    Source,
    find_sources,
    split_parts,
)

# Texts in which everything that a cut could break is frequent.
BYTES = st.lists(
    st.sampled_from([b"a b", b"word", b" ", b"\n", b"\n\n", b"|", b"||", b"\xc3\xa9", b"\xf0\x9f\x98\x80", b"\xff"])
    | st.binary(max_size=3),
    max_size=40,
).map(b"".join)


_PLAIN = Rules()


def read(paths: Iterable[Path | str], rules: Rules = _PLAIN, size: int = 1 << 20) -> tuple[list[str], Problems]:
    """All documents of the sources, read in parts of this size, and what was wrong."""
    problems = Problems(rules.strict)
    found: list[str] = []
    for origin, source in enumerate(find_sources([str(path) for path in paths], rules, problems)):
        is_open = False
        for part in split_parts(origin, source, size):
            for piece in read_part(part, rules, problems):
                assert piece.origin == origin
                if piece.starts:
                    assert not is_open
                    found.append("")
                assert piece.starts or is_open
                found[-1] += piece.text
                is_open = not piece.ends
        assert not is_open
    return found, problems


@pytest.fixture
def file(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path / "a.txt"


def small(patch: pytest.MonkeyPatch, piece: int) -> None:
    patch.setattr(module, "_PIECE", piece)
    patch.setattr(module, "_LOOK", max(4, piece // 2))


@settings(max_examples=80, deadline=None)
@given(data=BYTES, size=st.integers(1, 60), piece=st.integers(1, 30))
def test_a_file_is_one_document_however_it_is_cut(
    data: bytes, size: int, piece: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("x") / "a.txt"
    path.write_bytes(data + b"end")  # a file that isn't empty, and no UTF-16
    if path.read_bytes()[:2] in (b"\xff\xfe", b"\xfe\xff"):
        return
    with pytest.MonkeyPatch.context() as patch:
        small(patch, piece)
        found, problems = read([path], size=size)
    text = path.read_bytes().decode(errors="replace")
    assert found == [text.removeprefix("\ufeff")]
    assert problems.found.get(NULS, (0,))[0] == text.count("\0")
    assert problems.found.get(INVALID, (0,))[0] == text.count("\ufffd") - path.read_bytes().count("\ufffd".encode())


def between(data: bytes, separator: bytes) -> list[str]:
    """What lies between separators, found byte by byte: a byte is in one where any match, wherever begun, covers it."""
    covered = [False] * len(data)
    for start in range(len(data)):
        match = re.compile(separator).match(data, start)
        for place in range(start, match.end()) if match else ():
            covered[place] = True
    parts = [[]] if data else []
    for place, byte in enumerate(data):
        if covered[place]:
            parts.append([])
        else:
            parts[-1].append(byte)
    texts = [bytes(part).decode(errors="replace") for part in parts]
    return [text for text in texts if text and not text.isspace()]


@settings(max_examples=80, deadline=None)
@given(
    data=BYTES,
    size=st.integers(1, 60),
    piece=st.integers(1, 30),
    split=st.sampled_from(
        [("lines", rb"\n"), ("blank-lines", rb"\n[ \t\r]{0,64}\n"), ("||", rb"\|\|"), (r"\n|", rb"\n\|"), ("a", b"a")]
    ),
)
def test_documents_within_a_file_however_it_is_cut(
    data: bytes, size: int, piece: int, split: tuple[str, bytes], tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("x") / "a.txt"
    path.write_bytes(b"-" + data)
    with pytest.MonkeyPatch.context() as patch:
        small(patch, piece)
        found, _ = read([path], Rules(split_on=split[0]), size=size)
    assert found == between(path.read_bytes(), split[1])


@settings(max_examples=60, deadline=None)
@given(
    rows=st.lists(
        st.text("abé\U0001f600 ", max_size=12).map(lambda text: json.dumps({"text": text}).encode())
        | st.text("abé\U0001f600 ", max_size=12).map(
            lambda text: json.dumps({"text": text}, ensure_ascii=False).encode()
        )
        | st.sampled_from([b"", b"{", b'{"text": 3}', b'"text"', b'{"text": null}', b'{"other": "x"}', b'{"text":""}']),
        max_size=12,
    ),
    size=st.integers(1, 60),
    end=st.booleans(),
)
def test_json_lines_however_they_are_cut(
    rows: list[bytes], size: int, end: bool, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("x") / "a.jsonl"
    path.write_bytes(b"\n".join([b'{"text": "first"}', *rows]) + (b"\n" if end else b""))
    texts, broken, empty = ["first"], 0, 0
    for row in rows:
        try:
            text = json.loads(row)["text"] if row else None
        except (ValueError, KeyError, TypeError):
            text = 0
        broken += bool(row) and not isinstance(text, str)
        empty += isinstance(text, str) and not text.strip()
        texts += [text] if isinstance(text, str) and text.strip() else []
    found, problems = read([path], size=size)
    assert found == texts
    assert problems.found.get(BROKEN_ROWS, (0,))[0] == broken
    assert problems.found.get(EMPTY_DOCUMENTS, (0,))[0] == empty


def test_text_is_taken_as_it_is(file: Path) -> None:
    text = "Zeile eins\r\n\n  Ü\t\0 \ud7ff end \n"
    file.write_bytes(b"\xef\xbb\xbf" + text.encode())
    found, problems = read([file])
    assert found == [text]
    assert problems.lines() == ["1 NUL characters kept; the first: a.txt at byte 21"]


def test_where_bytes_are_no_text(file: Path) -> None:
    file.write_bytes(b"one\xfftwo\xc3\n\xed\xa0\x80" + "�".encode())
    found, problems = read([file])
    assert found == ["one�two�\n����"]
    assert problems.lines() == ["5 byte sequences that aren't UTF-8 replaced by U+FFFD; the first: a.txt at byte 3"]
    with pytest.raises(UserError, match=r"--strict refuses byte sequences that aren\'t UTF-8: a\.txt at byte 3"):
        read([file], Rules(strict=True))


def test_broken_rows_are_counted_and_the_first_is_named(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"text": "one"}\n\n{"text": "tw\n{"text": "three", "n": NaN}\n[1]\n{"text": "fo\\ud800ur"}\n')
    found, problems = read([path])
    assert found == ["one", "three", "fo�ur"]
    broken, invalid = problems.lines()
    assert broken.startswith("2 broken rows skipped; the first: a.jsonl line 3 (not JSON: Unterminated string")
    assert invalid == "1 byte sequences that aren't UTF-8 replaced by U+FFFD; the first: a.jsonl line 6"
    with pytest.raises(UserError, match=r"--strict refuses broken rows: a\.jsonl line 3 \(not JSON"):
        read([path], Rules(strict=True))


@pytest.mark.parametrize(
    ("row", "detail"),
    [
        ('{"txet": "x", "id": 1}', "no field 'text'; did you mean 'txet'?"),
        ('{"id": 1, "url": 2}', "no field 'text'; it has 'id', 'url'"),
        ("{}", "no field 'text'; it has none"),
        ('{"text": ["x"]}', "its field 'text' is list"),
        ('{"text": null}', "its field 'text' is null"),
        ("null", "no object but null"),
        ("1" * 5000, "not JSON: Exceeds the limit"),
        ("[" * 100_000, "not JSON: maximum recursion depth"),
        ('{"text": "a\0b"}', "not JSON: Invalid control character"),
    ],
)
def test_what_is_wrong_with_a_row(tmp_path: Path, row: str, detail: str) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(row + '\n{"text": "good"}\n')
    found, problems = read([path])
    assert found == ["good"]
    (line,) = problems.lines()
    assert line.startswith(f"1 broken rows skipped; the first: a.jsonl line 1 ({detail}")
    assert len(line) < 400


def test_a_line_of_json_that_is_too_long_is_skipped_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "one"}\n{"text": "' + "x" * 3000 + '"}\n{"text": "three"}\n')
    monkeypatch.setattr(module, "_LONGEST_ROW", 1000)
    monkeypatch.setattr(module, "_PIECE", 100)
    for size in (40, 500, 10_000):
        found, problems = read([path], size=size)
        assert found == ["one", "three"]
        assert problems.lines() == ["1 broken rows skipped; the first: a.jsonl line 2 (more than 0 MiB)"]


def test_folders_are_read_by_name_and_what_is_left_aside_is_said(tmp_path: Path) -> None:
    for name in ("b.md", "a/2.txt", "a/10.TXT", "c/x.pdf", "c/data.csv", ".git/x.txt", "a/.hidden.txt"):
        (tmp_path / "data" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "data" / name).write_text(name)
    (tmp_path / "data" / "empty.txt").write_bytes(b"")
    (tmp_path / "data" / "space.txt").write_text(" \n")
    (tmp_path / "data" / "mark.txt").write_bytes(b"\xef\xbb\xbf")
    (tmp_path / "data" / "wide.txt").write_bytes("text".encode("utf-16"))
    found, problems = read([tmp_path / "data"])
    assert found == ["b.md", "a/10.TXT", "a/2.txt"]
    assert {what: count for what, (count, _) in problems.found.items()} == {
        OTHER_FILES: 2,
        EMPTY_FILES: 3,
        WIDE_FILES: 1,
    }
    assert "2 files of other kinds left aside; the first: data/c/data.csv" in problems.lines()
    sources = find_sources([str(tmp_path / "data")], Rules(), Problems())
    assert [source.name for source in sources] == [
        *("data/b.md", "data/mark.txt", "data/space.txt", "data/a/10.TXT", "data/a/2.txt")
    ]
    with pytest.raises(UserError, match=r"--strict refuses empty files: empty\.txt"):
        read([tmp_path / "data" / "empty.txt", tmp_path / "data" / "a"], Rules(strict=True))


def test_the_folder_that_is_written_is_left_out(tmp_path: Path) -> None:
    for name in ("a.txt", "out/tokenizer/vocabulary.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    sources = find_sources([str(tmp_path)], Rules(), Problems(), leave=tmp_path / "out")
    assert [Path(source.path).name for source in sources] == ["a.txt"]


def test_links_are_followed_once(tmp_path: Path) -> None:
    (tmp_path / "data" / "a").mkdir(parents=True)
    (tmp_path / "data" / "a" / "x.txt").write_text("x")
    (tmp_path / "data" / "a" / "back").symlink_to(tmp_path / "data", target_is_directory=True)
    (tmp_path / "data" / "gone.txt").symlink_to(tmp_path / "nowhere.txt")
    assert read([tmp_path / "data"])[0] == ["x"]


def test_a_name_that_is_no_text(tmp_path: Path) -> None:
    try:
        (tmp_path / os.fsdecode(b"bad\xff.txt")).write_text("x")
    except OSError:
        pytest.skip("this file system takes only names that are text")
    (source,) = find_sources([str(tmp_path)], Rules(), Problems())
    assert source.name == f"{tmp_path.name}/bad�.txt"
    assert read([tmp_path])[0] == ["x"]


@pytest.mark.parametrize(
    ("paths", "words"),
    [
        (["nowhere"], "no file or folder 'nowhere'; a data set of the hub is hf://nowhere"),
        (["empty"], "empty holds no .txt, .md, .jsonl, .parquet file"),
        (["x.pdf"], "x.pdf: can't read .pdf; .txt, .md, .jsonl, .parquet can be"),
        (["x.txt", "x.txt"], "x.txt is named twice"),
        ([".", "x.txt"], "x.txt is named twice"),
        (["x.txt", "link.txt"], "link.txt is named twice .as x.txt."),
        (["pipe.txt"], "pipe.txt is neither a file nor a folder"),
    ],
)
def test_wrong_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, paths: list[str], words: str) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    (tmp_path / "x.pdf").write_text("x")
    (tmp_path / "x.txt").write_text("x")
    if "link.txt" in paths:
        (tmp_path / "link.txt").symlink_to("x.txt")
    if "pipe.txt" in paths:
        os.mkfifo(tmp_path / "pipe.txt")
    with pytest.raises(UserError, match=words):
        find_sources(paths, Rules(), Problems())


@pytest.mark.parametrize(
    ("split", "words"),
    [
        ("", "a separator has 1 to 256 bytes, not 0"),
        ("x" * 257, "not 257"),
        (r"\q", r"\\q stands for nothing"),
        ("\\", r"\\ stands for nothing"),
        ("blank-line", "did you mean 'blank-lines'"),
        ("line", "did you mean 'lines'"),
    ],
)
def test_wrong_separators(split: str, words: str) -> None:
    with pytest.raises(UserError, match=words):
        Rules(split_on=split).separator()


def test_a_file_that_gets_shorter_or_goes_is_said(file: Path) -> None:
    file.write_text("x" * 100)
    (source,) = find_sources([str(file)], Rules(), Problems())
    (part,) = split_parts(0, source, 1000)
    file.write_text("x" * 50)
    with pytest.raises(UserError, match=r"a\.txt became shorter while it was read"):
        list(read_part(part, Rules(), Problems()))
    file.unlink()
    with pytest.raises(UserError, match=r"can't read .*a\.txt: No such file"):
        list(read_part(part, Rules(), Problems()))


class TestParquet:
    """By the package pyarrow."""

    @pytest.fixture(autouse=True)
    def _package(self) -> None:
        pytest.importorskip("pyarrow", reason="the package pyarrow is not installed")

    def write(self, path: Path, **columns: list[object]) -> Path:
        import pyarrow
        import pyarrow.parquet

        pyarrow.parquet.write_table(pyarrow.table(columns), path, row_group_size=3)
        return path

    @pytest.mark.parametrize("size", [1, 1 << 20])
    def test_rows_are_documents(self, tmp_path: Path, size: int) -> None:
        texts = ["one", "zwei ü", None, "", "five\0", " ", "seven", "eight"]
        found, problems = read([self.write(tmp_path / "a.parquet", id=list(range(8)), text=texts)], size=size)
        assert found == ["one", "zwei ü", "five\0", "seven", "eight"]
        assert problems.lines() == [
            "1 broken rows skipped; the first: a.parquet row 3 (its field 'text' is null)",
            "2 empty documents skipped; the first: a.parquet row 4",
            "1 NUL characters kept; the first: a.parquet row 5",
        ]

    def test_columns_of_other_kinds(self, tmp_path: Path) -> None:
        import pyarrow

        texts = ["one", "two", "one", "one"]
        for number, kind in enumerate([pyarrow.large_string(), pyarrow.dictionary(pyarrow.int32(), pyarrow.string())]):
            path = self.write(tmp_path / f"{number}.parquet", body=pyarrow.array(texts).cast(kind), x=[[1]] * 4)
            assert read([path], Rules(field="body"))[0] == texts

    def test_bytes_that_are_no_text(self, tmp_path: Path) -> None:
        import pyarrow

        raw = pyarrow.array([b"good", b"b\xffd"], pyarrow.binary())
        text = pyarrow.Array.from_buffers(pyarrow.string(), 2, raw.buffers())  # unchecked
        found, problems = read([self.write(tmp_path / "a.parquet", text=text)])
        assert found == ["good", "b�d"]
        assert problems.found[INVALID][0] == 1

    @pytest.mark.parametrize(
        ("field", "words"),
        [
            ("txt", "has no column 'txt' .--field.; did you mean 'text'"),
            ("body_of_it", "has no column 'body_of_it' .--field.; it has id, text, raw"),
            ("id", "column 'id' is int64, not text"),
            ("raw", "column 'raw' is binary, not text"),
        ],
    )
    def test_wrong_columns(self, tmp_path: Path, field: str, words: str) -> None:
        path = self.write(tmp_path / "a.parquet", id=[1], text=["x"], raw=[b"x"])
        with pytest.raises(UserError, match=words):
            read([path], Rules(field=field))

    def test_damaged_files(self, tmp_path: Path) -> None:
        path = self.write(tmp_path / "a.parquet", text=["some text"] * 50)
        data = path.read_bytes()
        for damaged in (data[:-30], data[:20], b"PAR1", b"no parquet at all"):
            path.write_bytes(damaged)
            with pytest.raises(UserError, match=r"a\.parquet is no whole Parquet file .cut short or damaged"):
                read([path])
        path.write_bytes(data[:30] + bytes(40) + data[70:])  # the footer is whole
        with pytest.raises(UserError, match=r"a\.parquet is no whole Parquet file"):
            read([path])


class TestHub:
    """By the package datasets, from a folder of this machine: tests reach no network."""

    @pytest.fixture(autouse=True)
    def _package(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        pytest.importorskip("datasets", reason="the package datasets is not installed")
        import datasets

        monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")

    def test_rows_are_streamed_from_any_row_on(self, tmp_path: Path) -> None:
        folder = tmp_path / "set"
        folder.mkdir()
        rows = [{"text": f"document {n}" if n != 3 else ""} for n in range(10)]
        (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        source = Source(f"hf://{folder}", str(folder), "hub")
        opened = HubRows(source, 4, Rules())
        assert opened.revision is None
        stretches = list(opened.stretches(0, 25))
        assert [(s.start, s.stop) for s in stretches] == [(0, 3), (3, 7), (7, 10)]
        pieces = [piece for s in stretches for piece in s.pieces]
        assert [piece.text for piece in pieces] == [row["text"] for row in rows if row["text"]]
        assert {(piece.origin, piece.starts, piece.ends) for piece in pieces} == {(4, True, True)}
        assert str(stretches[1].problems.found[EMPTY_DOCUMENTS][1]).endswith("set row 4")
        assert next(opened.stretches(3, 25)).pieces == stretches[1].pieces
        with pytest.raises(RunError, match=r"can't read hf://.*:nowhere"):
            HubRows(source._replace(name=source.name + "::nowhere", path=f"{folder}::nowhere"), 0, Rules())

    def test_a_set_that_cannot_be_reached(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def fail(name: str) -> None:
            raise ConnectionError("no\nnetwork")

        monkeypatch.setattr(module, "_revision", fail)
        with pytest.raises(RunError, match=r"can't read hf://nobody/nothing \(ConnectionError\): no network"):
            HubRows(Source("hf://nobody/nothing", "nobody/nothing", "hub"), 0, Rules())
