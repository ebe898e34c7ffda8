"""LAMBADA's passages: context and target as lm-eval makes them, and files that aren't as they should be."""

from __future__ import annotations

import builtins
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from decaybench.core.errors import RunError, UserError
from decaybench.text import lambada
from decaybench.text.lambada import (
    PUBLISHED,
    Pair,
    Variant,
    encode_pairs,
    last_occurrence,
    read_passages,
    split_passage,
)
from decaybench.text.tokenizers import Tokenizer
from tests.text.test_tokenizers import NEAR, REAL, real

SHARED = NEAR.parent / "lambada"
FILES: dict[Variant, str] = {"openai": "lambada_test.jsonl", "standard": "lambada_test_plain_text.txt"}
GOOD = ["He gave the key to Ann. She thanked him, said Ann", "The cat saw the dog, and the dog saw the cat"]


def published(variant: Variant) -> tuple[str, ...]:
    file = SHARED / FILES[variant]
    if not file.exists():
        pytest.skip(f"no {file.name} at shared/data/lambada")
    return read_passages(variant, str(file)).texts


def rows(*texts: str) -> str:
    return "".join(json.dumps({"text": text}) + "\n" for text in texts)


@pytest.fixture
def written(tmp_path: Path) -> Callable[..., str]:
    def write(content: str | bytes, name: str = "passages.jsonl") -> str:
        path = tmp_path / name
        path.write_bytes(content.encode() if isinstance(content, str) else content)
        return str(path)

    return write


# --- context and target


def by_lm_eval(tokenizer: Tokenizer, text: str) -> tuple[list[int], list[int]]:
    """lm-eval's lambada_openai: doc_to_text, doc_to_target, and TemplateLM._encode_pair."""
    context, continuation = " ".join(text.split(" ")[:-1]), " " + text.split(" ")[-1]
    spaces = len(context) - len(context.rstrip())
    if spaces > 0:
        continuation = context[-spaces:] + continuation
        context = context[:-spaces]
    whole, alone = tokenizer.encode(context + continuation), tokenizer.encode(context)
    return alone, whole[len(alone) :]


@pytest.mark.parametrize("spec", REAL, ids=lambda spec: Path(spec).name)
@pytest.mark.parametrize("variant", FILES)
def test_tokens_of_published_passages_are_lm_evals(spec: str, variant: Variant) -> None:
    tokenizer, texts = real(spec), published(variant)[::25]
    found = encode_pairs(tokenizer, [split_passage(text) for text in texts])
    assert found == [by_lm_eval(tokenizer, text) for text in texts]
    assert [tokenizer.decode(pair.context + pair.target) for pair in found] == list(texts)
    assert all(
        tokenizer.decode(pair.target) == " " + text.split(" ")[-1] for pair, text in zip(found, texts, strict=True)
    )


@pytest.mark.parametrize(
    "text", ["one  two", "a b \n c", "a\n\n b", "of the\n\nPower was the\n\nPower", "x\u00a0y z", " lead and end"]
)
@pytest.mark.parametrize("spec", REAL, ids=lambda spec: Path(spec).name)
def test_tokens_around_odd_spaces_are_lm_evals(text: str, spec: str) -> None:
    tokenizer = real(spec)
    assert encode_pairs(tokenizer, [split_passage(text)]) == [by_lm_eval(tokenizer, text)]


def test_split_at_the_last_space() -> None:
    assert split_passage("I trust her, Shane") == ("I trust her,", " Shane")
    assert split_passage("he held on to the\n\nPower") == ("he held on to", " the\n\nPower"), "of spaces alone"
    assert split_passage("one  two") == ("one ", " two")


class Merging(Tokenizer):
    """Needs one token for any text."""

    def encode_many(self, texts):
        return [[7] for _ in texts]

    def encode_bytes(self, data):
        return [7]

    def byte_lengths(self):
        raise NotImplementedError

    def _text(self, ids):
        raise NotImplementedError


def test_there_is_always_a_target() -> None:
    assert encode_pairs(Merging(), [("a", " b")]) == [Pair([], [7])]


def test_a_tokenizer_that_makes_nothing_of_a_text(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Merging, "name", "deaf", raising=False)
    monkeypatch.setattr(Merging, "encode_many", lambda self, texts: [[] for _ in texts])
    with pytest.raises(UserError, match=r"task\.tokenizer: deaf makes no token of 'the cat'"):
        encode_pairs(Merging(), [("the", " cat")])


@pytest.mark.parametrize(
    ("context", "target", "ends_with"),
    [
        ("the cat saw a dog and the", " cat", "the cat"),
        ("the cat saw the cat and a", " cat", "the cat saw the cat"),
        ("The Cat saw a dog and the", " cat", "The Cat"),
        ('"Nadia," he said. It was', ' "Nadia', '"Nadia'),
        ("concatenate the", " cat", None),
        ("cats and a", " cat", None),
        ("he asked why.", " why...", "he asked why"),
        ("what is c++ to", " c++", "what is c"),
        ("so ...", " ...", None),
        ("I know-", ' know-"', "I know"),
    ],
)
def test_where_the_word_stands_last(context: str, target: str, ends_with: str | None) -> None:
    end = last_occurrence(context, target)
    assert (None if end is None else context[:end]) == ends_with


# --- files


def test_the_published_sets_are_known() -> None:
    for variant in FILES:
        texts = published(variant)
        assert len(texts) == 5153
        found = read_passages(variant, str(SHARED / FILES[variant]))
        assert found.sha256 == PUBLISHED[variant] and not found.problems
        assert found.name == FILES[variant]


def test_json_lines_and_plain_text_hold_the_same(written: Callable[..., str]) -> None:
    lines = read_passages("openai", written(rows(*GOOD)))
    plain = read_passages("openai", written("\n".join(GOOD), "passages.txt"))
    assert lines.texts == plain.texts == tuple(GOOD)
    assert lines.sha256 == plain.sha256 != read_passages("openai", written(rows(*GOOD[::-1]), "other.jsonl")).sha256
    assert not lines.problems and not plain.problems


def test_line_ends_blank_lines_and_a_byte_order_mark_are_no_part_of_passages(written: Callable[..., str]) -> None:
    plain = "\ufeff" + GOOD[0] + "  \r\n\r\n\n" + GOOD[1] + "\r\n"
    assert read_passages("openai", written(plain, "passages.txt")).texts == tuple(GOOD)
    lines = "\ufeff" + rows(GOOD[0] + " ") + "\n" + rows(GOOD[1] + "\n").replace("\n", "\r\n")
    found = read_passages("openai", written(lines))
    assert found.texts == tuple(GOOD) and not found.problems


@pytest.mark.parametrize(
    ("broken", "reason"),
    [
        (
            "word\n",
            "1 passages without a space skipped; the first: number 2, 'word'",
        ),
        (
            "   word\n",
            "1 passages without a space skipped; the first: number 2, 'word'",
        ),
        ("x " * 40_000 + "end\n", "1 passages of more than 65,536 characters skipped; the first: number 2, 'x x x x"),
        (
            "x " * 3_000_000 + "end\n",
            "1 passages of more than 65,536 characters skipped; the first: number 2, 'x x x x",
        ),
    ],
    ids=["a word", "a word after spaces", "long", "longer than a piece"],
)
def test_a_line_that_is_no_passage_is_said_and_the_others_are_read(
    broken: str, reason: str, written: Callable[..., str]
) -> None:
    found = read_passages("openai", written(GOOD[0] + "\n" + broken + GOOD[1] + "\n", "passages.txt"))
    assert found.texts == tuple(GOOD)
    assert len(found.problems) == 1 and reason in found.problems[0]
    assert len(found.problems[0]) < 400


@pytest.mark.parametrize(
    ("broken", "reason"),
    [
        ('{"text": "cut of\n', "1 broken rows skipped; the first: passages.jsonl line 2 (not JSON"),
        ('{"words": "a b"}\n', "line 2 (no field 'text'; it has 'words')"),
        ('{"text": 7}\n', "line 2 (its field 'text' is int)"),
        ('["a b"]\n', "line 2 (no object but list)"),
        ("\0\0\0\0\n", "line 2 (not JSON"),
        ('{"text": "word"}\n', "1 passages without a space"),
    ],
)
def test_a_row_that_is_no_passage_is_said_and_the_others_are_read(
    broken: str, reason: str, written: Callable[..., str]
) -> None:
    found = read_passages("openai", written(rows(GOOD[0]) + broken + rows(GOOD[1])))
    assert found.texts == tuple(GOOD)
    assert len(found.problems) == 1 and reason in found.problems[0]


def test_a_file_that_is_cut_short_says_so(written: Callable[..., str]) -> None:
    whole = rows(*GOOD)
    found = read_passages("openai", written(whole[:-20]))
    assert found.texts == (GOOD[0],)
    assert "line 2 (not JSON" in found.problems[0]
    assert found.sha256 != read_passages("openai", written(whole, "whole.jsonl")).sha256


def test_bytes_that_are_no_text_are_replaced_and_said(written: Callable[..., str]) -> None:
    found = read_passages("openai", written(f"{GOOD[0]}\n".encode() + b"The c\xfft \0and the dog\n", "passages.txt"))
    assert found.texts == (GOOD[0], "The c\ufffdt \0and the dog")
    assert len(found.problems) == 2
    assert any("U+FFFD" in line for line in found.problems) and any("NUL" in line for line in found.problems)
    lone = read_passages("openai", written('{"text": "The \\ud800 dog"}\n'))
    assert lone.texts == ("The \ufffd dog",)


@pytest.mark.parametrize(
    ("content", "name", "message"),
    [
        ("", "a.jsonl", "a.jsonl holds no passage"),
        ("\n\n \n", "a.txt", "a.txt holds no passage"),
        ("word\n", "a.txt", "1 passages without a space"),
        ('{"txt": "a b"}\n', "a.jsonl", "no field 'text'; did you mean"),
        ("{", "a.jsonl", "not JSON"),
        ("a b\n".encode("utf-16"), "a.txt", "UTF-16"),
        ("a b\n", "a.csv", "can't read .csv"),
        (rows("the cat saw the dog"), "a.jsonl", "no capital letter, and LAMBADA `openai` is cased"),
    ],
)
def test_a_file_without_a_passage_is_refused_in_one_line(
    content: str | bytes, name: str, message: str, written: Callable[..., str]
) -> None:
    with pytest.raises(UserError) as error:
        read_passages("openai", written(content, name))
    assert message in str(error.value) and "\n" not in str(error.value)


def test_the_variants_never_mix(written: Callable[..., str]) -> None:
    with pytest.raises(UserError, match=r"capital letters in 100% of its passages.*these are of `openai`"):
        read_passages("standard", written(rows(*GOOD)))
    lower = written(rows(*(text.lower() for text in GOOD)), "lower.jsonl")
    assert len(read_passages("standard", lower).texts) == 2
    with pytest.raises(UserError, match="these are of `standard`"):
        read_passages("openai", lower)


def test_a_missing_file_and_a_folder(tmp_path: Path) -> None:
    for path in (tmp_path / "none.jsonl", tmp_path):
        with pytest.raises(UserError, match=r"task.file: no file .* or hf://NAME:CONFIG:SPLIT"):
            read_passages("openai", str(path))


def test_far_too_much_text_is_refused(written: Callable[..., str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lambada, "_MOST", 100)
    assert len(read_passages("openai", written(rows(*GOOD))).texts) == 2
    with pytest.raises(UserError, match="no file of LAMBADA's"):
        read_passages("openai", written(rows(*GOOD, *GOOD), "more.jsonl"))


def test_a_file_that_changed_is_read_again(written: Callable[..., str]) -> None:
    file = written(rows(*GOOD))
    assert read_passages("openai", file) is read_passages("openai", file)
    written(rows(*GOOD, "And a third one"))
    assert len(read_passages("openai", file).texts) == 3


def test_parquet(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow", reason="the package pyarrow is not installed")
    parquet = pytest.importorskip("pyarrow.parquet", reason="the package pyarrow is not installed")
    path = tmp_path / "passages.parquet"
    parquet.write_table(pyarrow.table({"text": [*GOOD, "word"]}), path, row_group_size=2)
    found = read_passages("openai", str(path))
    assert found.texts == tuple(GOOD) and "without a space" in found.problems[0]


# --- the hub


def test_a_data_set_of_the_hub(tmp_path: Path) -> None:
    pytest.importorskip("datasets", reason="the package datasets is not installed")
    folder = tmp_path / "set"
    folder.mkdir()
    (folder / "test.jsonl").write_text(rows(*GOOD, "word"))
    found = read_passages("openai", f"hf://{folder}::test")
    assert found.texts == tuple(GOOD) and "without a space" in found.problems[0]
    assert found.name == f"hf://{folder}::test"


def test_without_the_package_the_hub_is_no_wrong_input(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(name: str, *rest: Any, **others: Any) -> Any:
        if name.partition(".")[0] in ("datasets", "huggingface_hub"):
            raise ImportError(name=name)
        return real_import(name, *rest, **others)

    real_import = builtins.__import__
    monkeypatch.setattr(builtins, "__import__", refuse)
    with pytest.raises(RunError, match=r"needs the package datasets: pip install 'decaybench\[lm\]'"):
        read_passages("openai", "hf://somebody/lambada")
