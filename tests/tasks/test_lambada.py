"""LAMBADA: rows are read back by a plain parser; what stands in them, how far the answer is, and what is refused."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from decaybench.core.config import parse
from decaybench.core.errors import UserError
from decaybench.tasks.base import IGNORED, Batch, MissingDataError
from decaybench.tasks.lambada import Lambada, LambadaConfig, LambadaEvaluation, LambadaShape, LambadaStage
from decaybench.text.stories import NAMES, PLACES, THINGS, word_tokenizer
from decaybench.text.tokenizers import ByteTokenizer
from tests.text.test_lambada import SHARED, by_lm_eval

WORDS, BYTES = word_tokenizer(), ByteTokenizer()
LEXICON = {*NAMES, *THINGS, *PLACES}
ALL: tuple[str, ...] = ("plain", "before", "between")
GOLDEN_SAMPLES = "00bb3b8342a9fda94ac2d83be51f1ee1e8015993b56325feaec99d41f3e6e043"
GOLDEN_IDS = ["ac533f8d134e5b0a", "d1141f5f184eb97b"]
PASSAGES = (
    "The door of the house was open. Nobody was in the house",
    "Ann met Tom, who was late. She had been waiting for Tom",
    '"Is it far?" he asked. No, it was not  far',
    "They sat down under an old tree and waited",
    "The bell rang. Again and again, said the boy, rang the bell",
)


def synthetic(**settings: Any) -> Lambada:
    return Lambada(parse(LambadaConfig, settings))


@pytest.fixture
def file(tmp_path: Path) -> str:
    path = tmp_path / "some" / "passages.jsonl"
    path.parent.mkdir()
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in PASSAGES))
    return str(path)


def of_file(file: str, **settings: Any) -> Lambada:
    return Lambada(parse(LambadaConfig, {"source": "openai", "file": file, **settings}))


def rows(
    task: Lambada, form: str, length: int, n: int = 20, first: int = 0, seed: int = 0, split: Any = "test"
) -> Batch:
    shape = LambadaShape(length=length, form=form, pairs=task.config.story_pairs)
    return task.batch(shape, split, seed, np.arange(first, first + n))


def read(batch: Batch) -> list[tuple[list[int], list[int], list[int]]]:
    """Of each row: the tokens read, the labels (which must be its last ones), and their distances."""
    assert batch.positions is not None
    found = []
    for tokens, labels, distance, positions in zip(
        batch.tokens, batch.labels, batch.distance, batch.positions, strict=True
    ):
        n = int((positions != 0).sum())
        assert positions[:n].tolist() == list(range(1, n + 1)) and not positions[n:].any() and not tokens[n:].any()
        m = int((labels != IGNORED).sum())
        assert m and (labels[n - m : n] != IGNORED).all() and (labels[n:] == IGNORED).all()
        assert ((distance > 0) <= (labels != IGNORED)).all()
        found.append((tokens[:n].tolist(), labels[n - m : n].tolist(), distance[n - m : n].tolist()))
    return found


def passage(tokens: Sequence[int], labels: Sequence[int]) -> list[int]:
    """All of a row's passage: what is read and the last token of the answer."""
    assert list(tokens[len(tokens) - len(labels) + 1 :]) == list(labels[:-1])
    return [*tokens, labels[-1]]


def known(text: str) -> list[str]:
    return [word for word in re.findall(r"\w+", text) if word in LEXICON]


# --- stories


def test_a_plain_row_is_a_story_whose_last_word_is_told() -> None:
    for tokens, labels, (distance,) in read(rows(synthetic(), "plain", 72, 200)):
        text = WORDS.decode(tokens)
        (answer,) = (WORDS.words[i] for i in labels)
        *told, ending = re.split(r"(?<=\.) ", text)
        (key,) = known(ending)
        (saying,) = [sentence for sentence in told if {key, answer} == set(known(sentence))]
        before = " ".join([*told[: told.index(saying)], saying[: saying.index(answer) + len(answer)]])
        assert len(tokens) - 1 - (len(WORDS.encode(before)) - 1) == distance


@pytest.mark.parametrize("tokenizer", ["words", "bytes"])
@pytest.mark.parametrize("start", ["none", "separator", 5])
def test_rows_before_have_just_the_length_and_end_with_the_plain_passage(tokenizer: str, start: Any) -> None:
    task = synthetic(tokenizer=tokenizer, start=start)
    plain = read(rows(task, "plain", 600))
    given = {"none": [], "separator": [0 if tokenizer == "words" else 256], 5: [5]}[start]
    known_rows: list[list[int]] = []
    for length in (600, 700, 1500):
        found = read(rows(task, "before", length))
        for number, ((tokens, labels, distance), (alone, target, near)) in enumerate(zip(found, plain, strict=True)):
            assert len(tokens) == length
            assert tokens[: len(given)] == alone[: len(given)] == given
            assert labels == target and distance == near
            assert tokens[length - len(alone) + len(given) :] == alone[len(given) :]
            if known_rows:
                rest = known_rows[number][len(given) :]
                assert tokens[length - len(rest) :] == rest, "the same unrelated stories, and more"
        known_rows = [tokens for tokens, *_ in found]


@pytest.mark.parametrize("form", ["before", "between"])
def test_unrelated_stories_share_no_key_and_no_value(form: str) -> None:
    task = synthetic()
    plain = read(rows(task, "plain", 72, 50))
    for (tokens, *_), (alone, *_) in zip(read(rows(task, form, 700, 50)), plain, strict=True):
        own, text = WORDS.decode(alone), WORDS.decode(tokens)
        if form == "before":
            others = text.removesuffix(own)
        else:
            told, ending = re.fullmatch(r"(.*\.) (.*)", own).groups()  # type: ignore[union-attr]
            assert text.startswith(told) and text.endswith(ending)
            others = text[len(told) : -len(ending)]
        assert len(known(others)) > 30
        assert not set(known(others)) & set(known(own))


@settings(max_examples=25, deadline=None)
@given(length=st.integers(72, 1200), first=st.integers(0, 10**6), pairs=st.integers(2, 12))
def test_rows_between_hold_as_many_sentences_as_fit(length: int, first: int, pairs: int) -> None:
    task = synthetic(pairs=pairs)
    smallest = task.cells(LambadaEvaluation(variants=("plain",)), [])[0].shape.length
    shortest = max(length, smallest)
    ((tokens, labels, distance),) = read(rows(task, "between", shortest, 1, first))
    ((longer, *_),) = read(rows(task, "between", shortest + 14, 1, first))
    assert len(tokens) <= shortest <= len(longer) - (len(longer) == len(tokens)) or len(longer) > len(tokens)
    text, more = WORDS.decode(tokens), WORDS.decode(longer)
    *sentences, ending = re.split(r"(?<=\.) ", text)
    *others, end = re.split(r"(?<=\.) ", more)
    assert end == ending and others[: len(sentences)] == sentences and len(others) > len(sentences)
    following = len(WORDS.encode(others[len(sentences)]))
    assert len(tokens) + following > shortest, "one more would have been too many"
    (key,) = known(ending)
    (saying,) = [s for s in sentences if key in known(s) and len(known(s)) == 2]
    answer = WORDS.words[labels[0]]
    written = len(WORDS.encode(text[: text.index(saying) + saying.index(answer) + len(answer)])) - 1
    assert distance == [len(tokens) - 1 - written]


def test_with_bytes_the_labels_are_the_words_letters() -> None:
    task = synthetic(tokenizer="bytes")
    assert task.vocab_size == 257
    for tokens, labels, distance in read(rows(task, "plain", 400, 50)):
        text = BYTES.decode(passage(tokens, labels))
        assert BYTES.decode(labels) == " " + text.split(" ")[-1]
        assert len(set(distance)) == 1
        last = len(tokens) - 1 - distance[0]
        assert bytes(tokens[: last + 1]).endswith(b" " + bytes(labels)[1:])


# --- training texts


@pytest.mark.parametrize(("length", "pairs"), [(64, 2), (128, 2), (128, 4), (700, 3), (900, 12)])
def test_every_label_of_a_training_text_is_what_was_told_last_of_its_key(length: int, pairs: int) -> None:
    batch = rows(synthetic(pairs=pairs, train_length=1024), "training", length, 24, split="train")
    assert batch.positions is None and (batch.tokens > 0).all(), "no padding and no separator"
    asked = 0
    for tokens, labels, distance in zip(batch.tokens, batch.labels, batch.distance, strict=True):
        assert ((distance > 0) == (labels != IGNORED)).all()
        told: dict[str, tuple[str, int]] = {}
        start = 0
        ends = [*(np.flatnonzero(tokens == WORDS.encode(".")[0]) + 1).tolist(), length]
        for stop in dict.fromkeys(ends):
            words = [WORDS.words[i] for i in tokens[start:stop]]
            places = {word: start + n for n, word in enumerate(words) if word in LEXICON}
            (place,) = (
                np.flatnonzero(labels[start:stop] != IGNORED) if (labels[start:stop] != IGNORED).any() else (None,)
            )
            if place is not None:
                key = next(iter(places))
                value, written = told[key]
                assert WORDS.words[labels[start + place]] == value
                assert distance[start + place] == start + place - written
                assert start + place + 1 == length or tokens[start + place + 1] == labels[start + place], "said then"
                asked += 1
            elif len(places) == 2 and stop <= ends[-2]:
                key, value = _key_and_value(places)
                assert length > 128 or key not in told, "a short text tells nothing twice"
                told[key] = value, places[value]
            start = stop
    assert asked == batch.asked.sum() >= 24 * length / 25


def _key_and_value(places: dict[str, int]) -> tuple[str, str]:
    one, other = places
    ranks = [next(n for n, list_ in enumerate((NAMES, THINGS, PLACES)) if word in list_) for word in (one, other)]
    return (one, other) if ranks[0] < ranks[1] else (other, one)


def test_training_asks_near_and_far_and_again() -> None:
    batch = rows(synthetic(train_length=512), "training", 512, 60, split="train")
    far = batch.distance[batch.asked]
    assert np.quantile(far, 0.1) < 30 and np.quantile(far, 0.9) > 200
    assert (batch.asked.sum(1) > 20).all()


@pytest.mark.parametrize("tokenizer", ["words", "bytes"])
def test_every_training_text_asks_something_at_the_smallest_length(tokenizer: str) -> None:
    task = synthetic(tokenizer=tokenizer, train_length=2048, start="separator")
    with pytest.raises(UserError, match="smallest length is") as error:
        task.check(LambadaShape(length=2, form="training", pairs=4))
    assert str(error.value).endswith("(--train-length)")
    smallest = int(str(error.value).split()[-2])
    batch = rows(task, "training", smallest, 400, split="train")
    assert batch.asked.any(1).all()
    assert (batch.tokens[:, 0] == task._start_tokens[0]).all()


def test_the_curriculum_grows_in_length_then_in_pairs() -> None:
    def plan(**settings: Any) -> list[tuple[int, int | None]]:
        return [(stage.shape.length, stage.shape.pairs) for stage in synthetic(**settings).stages()]

    assert plan() == [(64, 2), (128, 2), (128, 4)]
    assert plan(train_length=300, pairs=3) == [(64, 2), (128, 2), (256, 2), (300, 2), (300, 3)]
    assert plan(train_length=72, pairs=2) == [(64, 2), (72, 2)]
    assert plan(train_length=512, tokenizer="bytes") == [(512, 2), (512, 4)]


# --- published passages


def test_plain_rows_of_a_file_are_lm_evals(file: str) -> None:
    task = of_file(file)
    for (tokens, labels, distance), text in zip(read(rows(task, "plain", 60, 5)), PASSAGES, strict=True):
        context, continuation = by_lm_eval(BYTES, text)
        assert tokens == (context + continuation)[:-1] and labels == continuation
        word = text.split(" ")[-1].encode()
        before = bytes(context).rfind(word)
        assert distance == [0 if before < 0 else len(tokens) - before - len(word)] * len(labels)
    assert sum(not distance[0] for *_, distance in read(rows(task, "plain", 60, 5))) == 1


def test_rows_before_hold_other_passages_that_lack_the_word(file: str) -> None:
    task = of_file(file)
    plain, found = read(rows(task, "plain", 60, 5)), read(rows(task, "before", 300, 5))
    for (tokens, labels, distance), (alone, target, near), text in zip(found, plain, PASSAGES, strict=True):
        assert len(tokens) == 300 and tokens[-len(alone) :] == alone
        assert (labels, distance) == (target, near)
        *others, own = BYTES.decode(passage(tokens, labels)).split("\n\n")
        assert own == text
        word = re.findall(r"\w+", text)[-1]
        assert not any(re.search(rf"\b{word}\b", other, re.IGNORECASE) for other in others)
        assert all(other in PASSAGES and other != text for other in others[1:])
        assert any(whole.endswith(others[0]) for whole in PASSAGES), "the first is cut at its beginning"
        repeats = [others[i:].index(other) for i, other in enumerate(others[1:-1], 2) if other in others[i:]]
        assert all(gap >= 2 for gap in repeats), "all of them once before one comes again"


def test_a_start_token_stands_before_all(file: str) -> None:
    bare, started = of_file(file), of_file(file, start="separator")
    for (tokens, *rest), (alone, *same) in zip(
        read(rows(started, "plain", 60, 5)), read(rows(bare, "plain", 60, 5)), strict=True
    ):
        assert tokens == [256, *alone] and rest == same
    (cell,) = started.cells(LambadaEvaluation(variants=("plain",)), [])
    assert cell.shape.length == 1 + bare.cells(LambadaEvaluation(variants=("plain",)), [])[0].shape.length
    assert of_file(file, start=300).vocab_size == 301, "an id beyond the tokenizer's is one more"


def test_a_passage_of_one_token_needs_a_start_token(file: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tokenizer may have a token for words together."""
    encode = ByteTokenizer.encode_many
    whole = {PASSAGES[3]: [7], PASSAGES[3].rpartition(" ")[0]: [8]}
    monkeypatch.setattr(
        ByteTokenizer, "encode_many", lambda self, texts: [whole.get(text) or encode(self, [text])[0] for text in texts]
    )
    with pytest.raises(UserError, match=r"passage 4 has no token before its last word; .*--start separator"):
        rows(of_file(file), "plain", 60, 5)
    ((tokens, labels, _),) = read(rows(of_file(file, start="separator"), "plain", 60, 1, first=3))
    assert (tokens, labels) == ([256], [7])


def test_passages_are_tokenised_once(file: str, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    encode = ByteTokenizer.encode_arrays
    monkeypatch.setattr(
        ByteTokenizer, "encode_arrays", lambda self, texts: calls.append(len(texts)) or encode(self, texts)
    )
    task = of_file(file)
    for first in range(5):
        rows(task, "before", 300, 1, first)
    assert calls == [5]


def test_no_passage_goes_with_another(tmp_path: Path) -> None:
    path = tmp_path / "two.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in ("The cat saw a cat", "A cat, the Cat")))
    with pytest.raises(UserError, match="before needs other passages, and of these 2 none goes with passage 1"):
        rows(of_file(str(path)), "before", 100, 1)


def test_more_samples_than_passages(file: str) -> None:
    with pytest.raises(UserError, match="samples=6 is more than there are passages: 5"):
        of_file(file).ready([], 6)
    of_file(file).ready([], 5)


def test_the_real_passages() -> None:
    path = SHARED / "lambada_test.jsonl"
    if not path.exists():
        pytest.skip("no lambada_test.jsonl at shared/data/lambada")
    task = of_file(str(path))
    cells = task.cells(LambadaEvaluation(), [1024, 2048])
    assert [(cell.name, cell.shape.length) for cell in cells] == [
        ("plain-length963", 963),
        ("before-length1024", 1024),
        ("before-length2048", 2048),
    ]
    assert task.remarks(cells) == []
    assert {len(tokens) for tokens, *_ in read(task.batch(cells[2].shape, "test", 0, np.array([0, 77, 5152])))} == {
        2048
    }


# --- what all samples have in common


@pytest.mark.parametrize("form", [*ALL, "training"])
def test_a_sample_is_the_same_in_any_batch(form: str) -> None:
    task = synthetic()
    many = rows(task, form, 200, 12)
    for i in (0, 5, 11):
        one = rows(task, form, 200, 1, i)
        n = one.tokens.shape[1]
        assert one.lengths[0] == many.lengths[i] == n
        for name in ("tokens", "labels", "distance", "positions"):
            a, b = getattr(many, name), getattr(one, name)
            assert (a is None and b is None) or (a[i, :n] == b[0]).all()
    texts = {row.tobytes() for row in many.tokens}
    for other in (rows(task, form, 200, 12, seed=1), rows(task, form, 200, 12, split="validation")):
        assert other.tokens.shape != many.tokens.shape or not texts & {row.tobytes() for row in other.tokens}


def test_samples_never_change(file: str) -> None:
    digest = hashlib.sha256()
    for task, forms in (
        (synthetic(), [*ALL, "training"]),
        (synthetic(tokenizer="bytes"), ["plain"]),
        (of_file(file), ALL[:2]),
    ):
        for form in forms:
            batch = rows(task, form, 500, 5)
            for parts in zip(batch.tokens, batch.labels, batch.distance, batch.lengths, strict=True):
                digest.update(np.stack([part[: parts[3]] for part in parts[:3]]).astype("<i8").tobytes())
    assert digest.hexdigest() == GOLDEN_SAMPLES
    assert synthetic().sample_ids(LambadaShape(length=72, form="plain", pairs=4), "test", 0, np.arange(2)) == GOLDEN_IDS


def test_ids_tell_lengths_forms_and_passages_apart(file: str) -> None:
    tasks = [synthetic(), synthetic(pairs=3), synthetic(start=1), of_file(file)]
    shapes = [LambadaShape(length=n, form=form, pairs=4) for n in (80, 90) for form in ALL]
    found = [name for task in tasks for shape in shapes for name in task.sample_ids(shape, "test", 0, np.arange(3))]
    assert len(set(found)) == len(found)


def test_where_the_passages_lie_changes_no_id(file: str, tmp_path: Path) -> None:
    copy = tmp_path / "renamed.jsonl"
    copy.write_bytes(Path(file).read_bytes())
    here, there = of_file(file), of_file(str(copy))
    assert here.rules() == there.rules() and here.config.identity() == there.config.identity()
    assert str(tmp_path) not in json.dumps(here.config.for_record())
    changed = Path(file).read_text().replace("Tom", "Tim")
    copy.write_text(changed)
    assert of_file(str(copy)).rules() != here.rules()


# --- cells and rules


def test_cells(file: str) -> None:
    names = [cell.name for cell in synthetic().cells(LambadaEvaluation(variants=ALL), [128, 256])]
    assert names == [
        *("plain-length70", "before-length128", "before-length256"),
        *("between-length128", "between-length256"),
    ]
    longest = max(len(text.encode()) for text in PASSAGES) - 1
    assert [cell.name for cell in of_file(file).cells(LambadaEvaluation(), [100])] == [
        f"plain-length{longest}",
        "before-length100",
    ]


def test_a_guess_and_the_classes_of_tokens(file: str) -> None:
    task = synthetic()
    assert task.references(rows(task, "plain", 72, 3))["guess"].tolist() == [0.25] * 3
    assert synthetic(pairs=2).references(rows(synthetic(pairs=2), "plain", 72, 3))["guess"].tolist() == [0.5] * 3
    answers = task.token_classes()["value"]
    batch = rows(task, "training", 128, 100, split="train")
    assert set(batch.labels[batch.asked].tolist()) <= set(answers)
    noisy = task.with_label_noise(
        batch, 0.5, LambadaShape(length=128, form="training", pairs=4), "train", 0, np.arange(100)
    )
    assert 0.4 < (noisy.labels != batch.labels)[batch.asked].mean() < 0.6
    for other in (of_file(file), synthetic(tokenizer="bytes")):
        assert other.token_classes() == {}
    assert of_file(file).references(rows(of_file(file), "plain", 60, 3)) == {}


def test_what_is_said_of_a_file_that_is_not_the_published_set(file: str) -> None:
    with open(file, "a") as stream:
        stream.write("word\n")
    task = of_file(file)
    cells = task.cells(LambadaEvaluation(), [100])
    problem, what = task.remarks(cells)
    assert "broken rows skipped" in problem
    assert what == "these 5 passages aren't the published test set of LAMBADA openai"
    assert task.remarks(cells[:1])[2:] == [
        "each passage is read alone; --variants plain,before reads it behind unrelated ones too"
    ]
    assert synthetic().remarks([]) == []


# --- wrong input


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"source": "openai"}, "source=openai needs file: the path of its passages, or hf://NAME:CONFIG:SPLIT"),
        ({"source": "synthetic", "file": "x.jsonl"}, "file is for source openai or standard"),
        ({"source": "openai", "file": "no.jsonl"}, "no file 'no.jsonl'"),
        ({"source": "openai", "file": "x" * 5000}, "no file"),
        ({"source": "openai", "file": "a\0b"}, "no file"),
        ({"source": "openai", "file": 7}, "file=7: input should be a valid string"),
        ({"source": ["openai"]}, "source=[openai]: "),
        ({"source": "openia"}, "did you mean 'openai'?"),
        ({"source": "openai", "file": "FILE", "pairs": 3}, "pairs is for source synthetic"),
        (
            {"source": "openai", "file": "FILE", "tokenizer": "words"},
            "tokenizer=words knows the words of the stories only",
        ),
        ({"source": "standard", "file": "FILE"}, "these are of `openai`"),
        ({"tokenizer": "byts"}, "no tokenizer 'byts'; did you mean 'bytes'?"),
        ({"pairs": 13}, "pairs=13: "),
        ({"start": "bos"}, "start='bos': write none, separator (the tokenizer's end of a document), or the token's id"),
        ({"start": -1}, "start=-1: write none"),
        ({"start": 1.5}, "start=1.5: write none"),
        ({"start": True}, "start=true: true and false stand for nothing here"),
    ],
)
def test_a_wrong_configuration_is_answered_in_one_line(settings: dict[str, Any], message: str, file: str) -> None:
    given = {key: file if value == "FILE" else value for key, value in settings.items()}
    with pytest.raises(UserError) as error:
        parse(LambadaConfig, given)
    assert message in str(error.value) and "\n" not in str(error.value)


def test_shapes_that_do_not_exist(file: str) -> None:
    task = synthetic()
    with pytest.raises(UserError, match=r"length=69 is too short for the longest sample of before: .* is 70"):
        task.cells(LambadaEvaluation(variants=("before",)), [69])
    with pytest.raises(UserError, match="between is for stories"):
        of_file(file).cells(LambadaEvaluation(variants=("between",)), [100])
    with pytest.raises(UserError, match=r"length=50 is too short for the longest sample of before: .* is 58"):
        of_file(file).cells(LambadaEvaluation(), [50])
    with pytest.raises(UserError, match="pairs=None doesn't go with source synthetic"):
        task.check(LambadaShape(length=100, form="plain"))


def test_stages_that_do_not_exist(file: str) -> None:
    with pytest.raises(UserError, match="source=openai is for evaluation only: name a model by --checkpoint"):
        of_file(file).stages()
    with pytest.raises(UserError, match="form=plain is for evaluation"):
        synthetic(stages=[LambadaStage(shape=LambadaShape(length=100, form="plain", pairs=2)).plain()]).stages()
    with pytest.raises(UserError, match="train_length=128 is shorter than a training stage: the smallest is 200"):
        synthetic(stages=[{"shape": {"length": 200, "form": "training", "pairs": 2}}]).stages()
    with pytest.raises(UserError, match="too short for the longest sample of training: the smallest length is 52"):
        synthetic(train_length=32).stages()
    with pytest.raises(ValidationError):
        LambadaShape(length=100, form="plain", pairs=1)


def test_a_configuration_reads_without_its_files(file: str, tmp_path: Path) -> None:
    known = of_file(file).config.plain()
    Path(file).unlink()
    task = Lambada(parse(LambadaConfig, known))
    assert task.vocab_size == 257
    assert [cell.shape.length for cell in task.cells(LambadaEvaluation(), [100])] == [58, 100]
    with pytest.raises(MissingDataError, match="no file") as error:
        task.ready([], 1)
    assert re.fullmatch(r"passages\.jsonl \(sha256 [0-9a-f]{12}…\)", error.value.needs)
    with pytest.raises(MissingDataError):
        rows(task, "plain", 60, 1)
    Path(file).write_text(json.dumps({"text": "Another passage"}) + "\n")
    with pytest.raises(MissingDataError, match=r"have sha256 .* but .* is wanted"):
        task.ready([], 1)


def test_a_configuration_reads_without_its_tokenizer(file: str) -> None:
    known = of_file(file).config.plain()
    task = Lambada(parse(LambadaConfig, {**known, "tokenizer": "gone/tokenizer.json"}))
    with pytest.raises(MissingDataError, match="no tokenizer") as error:
        task.ready([], 1)
    assert error.value.needs.startswith("the tokenizer tokenizer.json (sha256 ")
    other = Lambada(parse(LambadaConfig, {**known, "tokenizer_sha256": "0" * 64}))
    with pytest.raises(MissingDataError, match=r"bytes has sha256 \w+…, but 000000000000… is wanted"):
        other.ready([], 1)
