"""Haystacks: where sentences end, what is read of a user's files, and a built-in text that never changes."""

from __future__ import annotations

import hashlib
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from decaybench.core.errors import UserError
from decaybench.text import haystacks
from decaybench.text.haystacks import builtin_essay, read_essay, split_sentences
from decaybench.text.words import ADJECTIVES, NOUNS


@pytest.mark.parametrize(
    "sentences",
    [
        ["The sky is blue.", "The sun is yellow."],
        ["Mr. Holmes met Dr. Watson at St. Bart's.", "They left."],
        ['"Stop!" he said.', '"Why?"', "She didn't know."],
        ["He asked (twice.)", "Nobody answered."],
        ["Wait... there is more.", "Wait...", "There is more."],
        ["It was J. R. R. Tolkien who wrote it.", "He was right."],
        ["The U.S. Army left at 5 p.m. Then it rained."],  # can't be told, and does no harm
        ["It grew by 3.5 per cent, i.e. a lot, e.g. more than in 1999.", "3.5 is a lot."],
        ["See No. 5 and Fig. 3, vol. 2.", "He said no.", "She left."],
        ["It was I.", "Who else?"],
        ["Really?!", "Yes…", "No."],
        ["A title without a full stop and then a sentence.", "Another one"],
        ["“So it was,” he said.", "“Was it?”"],
        ["One.", "(Two.)", "[Three.]", "—Four.", "5 is more."],
        ["Das ist gut, z.B. hier.", "Öfter nicht."],
    ],
    ids=lambda sentences: sentences[0][:20],
)
def test_where_sentences_end(sentences):
    assert split_sentences(" ".join(sentences)) == sentences
    assert split_sentences("\n\t".join(sentences) + "\n") == sentences


@given(st.text(st.sampled_from("ab.A?! \n\"')(…5"), max_size=300))
@settings(max_examples=200)
def test_sentences_joined_are_the_text_again(text):
    sentences = split_sentences(text)
    assert " ".join(sentences) == " ".join(text.split())
    assert all(sentence and sentence == " ".join(sentence.split()) for sentence in sentences)


def test_a_text_without_full_stops_is_cut():
    words = [f"w{i}" for i in range(200)]
    sentences = split_sentences(" ".join(words))
    assert [len(sentence.split(" ")) for sentence in sentences] == [80, 80, 40]
    assert " ".join(sentences).split(" ") == words


def test_a_text_without_spaces_is_cut():
    assert [len(word) for word in " ".join(split_sentences("x" * 1000)).split(" ")] == [400, 400, 200]


def test_chinese_sentences_end_at_their_full_stops():
    first, second = "我" * 300 + "。", "你" * 300 + "？"
    assert split_sentences(first + second + "他") == [first, second, "他"]


def test_the_builtin_text_never_changes():
    essay = builtin_essay()
    text = " ".join(essay.sentences)
    assert essay.sha256 == hashlib.sha256(text.encode()).hexdigest()
    assert essay.sha256 == "1d336251460a8fe892e4125312231055784aacea85735465ca796cb848b2071c"
    assert len(text.split()) > 150_000


def test_the_builtin_text_is_varied_english_without_keys_or_values():
    sentences = builtin_essay().sentences
    text = " ".join(sentences)
    assert split_sentences(text) == list(sentences)
    assert set(re.findall(r"[^A-Za-z ]", text)) <= set(".,:?'")
    assert len(set(sentences)) > 0.8 * len(sentences)
    assert all(re.fullmatch(r"[A-Z].*[.?]", sentence) for sentence in sentences)
    assert not re.search(r"  |\{|\}|\ba [aeiou]", text)


def test_lists_of_words():
    for words in (ADJECTIVES, NOUNS):
        assert len(words) >= 300
        assert list(words) == sorted(set(words))
        assert all(re.fullmatch("[a-z]{2,}", word) for word in words)


def test_files_are_read_in_the_order_given(tmp_path):
    first, second = tmp_path / "b.txt", tmp_path / "a.txt"
    first.write_bytes(b"\xef\xbb\xbfOne.\r\nTwo\x00 is\x0b two.")
    second.write_text("Three.  Four.\n")
    essay = read_essay([first, second])
    assert essay.sentences == ("One.", "Two is two.", "Three.", "Four.")
    assert essay.sha256 == hashlib.sha256(b"One. Two is two. Three. Four.").hexdigest()
    assert essay.name == "b.txt and 1 more"
    assert read_essay([first]).name == "b.txt"
    assert read_essay([second, first]).sha256 != essay.sha256


def test_a_folder_stands_for_its_text_files(tmp_path):
    (tmp_path / "b.txt").write_text("B.")
    (tmp_path / "a.txt").write_text("A.")
    (tmp_path / "c.png").write_bytes(b"\x89PNG")
    assert read_essay([tmp_path]).sentences == ("A.", "B.")


def test_bytes_that_are_no_text_are_replaced_where_they_are_few(tmp_path):
    file = tmp_path / "latin.txt"
    file.write_bytes("Ein schöner Tag, sagte er, und ging. Die Straße war leer.".encode("latin-1"))
    assert read_essay([file]).sentences == ("Ein sch\ufffdner Tag, sagte er, und ging.", "Die Stra\ufffde war leer.")


def test_of_a_huge_file_the_beginning_is_read(tmp_path, monkeypatch):
    file = tmp_path / "huge.txt"
    file.write_text("All is one line and never ends, " * 100_000)
    monkeypatch.setattr(haystacks, "_MOST_BYTES", 100_000)
    assert 99_000 < len(" ".join(read_essay([file, tmp_path / "not read.txt"]).sentences)) <= 100_000


@pytest.mark.parametrize(
    "content", [b"", b" \n\t ", "Text in another encoding. ".encode("utf-16"), bytes(range(256)) * 9]
)
def test_a_file_without_text_is_refused(tmp_path, content):
    file = tmp_path / "file.txt"
    file.write_bytes(content)
    with pytest.raises(UserError, match=r"haystack: .*file\.txt is (empty|no text in UTF-8).*") as caught:
        read_essay([file])
    assert "\n" not in str(caught.value)


def test_a_file_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(UserError, match=r"haystack: can't read .*nothing\.txt: No such file"):
        read_essay([tmp_path / "nothing.txt"])
    with pytest.raises(UserError, match=r"haystack: the folder .* holds no \.txt file"):
        read_essay([tmp_path])
    with pytest.raises(UserError, match="no file is given"):
        read_essay([])
