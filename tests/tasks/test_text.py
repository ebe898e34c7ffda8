"""Running text: windows against the plain stream of ids, whole epochs, positions by a loop, passages by reading."""

from __future__ import annotations

import hashlib
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from decaybench.core.config import parse
from decaybench.core.errors import UserError
from decaybench.harness.config import RunConfig, make_config
from decaybench.tasks.base import IGNORED, Batch, MissingDataError
from decaybench.tasks.text import Text, TextConfig, TextShape, permuted
from decaybench.text.needles import Needles
from decaybench.text.tokenizers import ByteTokenizer
from tests.token_shards import prepared, stories, stream

T = 32
PASSAGE = 560  # tokens, in which a passage of single_1 fits
GOLDEN_DATA = "ea6bc5d5477f3f47fb8c483e4128b2a120a7ea3a13c5daa9bd1f071435fff753"
GOLDEN = "51b0de27978c97335e503737dd6f0b1b7ef1b5801ab1e463058466d8c4a383bf"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return prepared(tmp_path_factory.mktemp("text") / "stories", stories(60))


def text(folder: Path, **settings: Any) -> Text:
    return Text(parse(TextConfig, {"data": str(folder), "train_length": T, **settings}, "task"))


def windows(made: Text, split: Any, indices: list[int], seed: int = 0, length: int = T) -> Batch:
    return made.batch(TextShape(length=length), split, seed, np.array(indices))


def starts(made: Text, split: Any, indices: list[int], seed: int = 0, length: int = T) -> list[int]:
    """Where the windows lie in the stream: the only places that hold their ids, else the test's text is too uniform."""
    ids = stream(Path(str(made.config.data)), "train" if split == "train" else "validation").astype("<u2").tobytes()
    batch = windows(made, split, indices, seed, length)
    assert np.array_equal(batch.tokens[:, 1:], batch.labels[:, :-1])
    found = []
    for tokens, labels in zip(batch.tokens, batch.labels, strict=True):
        place = ids.find(whole := np.append(tokens, labels[-1]).astype("<u2").tobytes())
        assert place >= 0 and place % 2 == 0 and ids.rfind(whole) == place
        found.append(place // 2)
    return found


# --- the order of windows


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 16, 17, 100, 4097])
def test_a_permutation_is_one(count: int) -> None:
    for key, epoch in ((0, 0), (2**64 - 1, 0), (5, 1), (5, 2**33)):
        assert sorted(permuted(np.arange(count), count, key, epoch)) == list(range(count))


def test_permutations_differ_and_do_not_depend_on_the_company() -> None:
    whole = permuted(np.arange(1000), 1000, 7)
    others = [permuted(np.arange(1000), 1000, 8), permuted(np.arange(1000), 1000, 7, 1)]
    assert all((whole != other).mean() > 0.99 for other in others)
    assert permuted(np.array([5, 999, 0]), 1000, 7).tolist() == whole[[5, 999, 0]].tolist()
    mixed = permuted(np.array([5, 5, 7]), 1000, 7, np.array([0, 1, 1]))
    assert mixed.tolist() == [whole[5], others[1][5], others[1][7]]
    large = permuted(np.arange(50), 10**12, 3)
    assert len(set(large)) == 50 and large.max() < 10**12 and large.max() > 10**11


def test_every_place_is_as_likely_as_another() -> None:
    """Over many epochs, where one number goes: chi square of 12 places, 11 degrees of freedom; 31.3 is p = .001."""
    counts = np.zeros(12)
    for epoch in range(2):
        epochs = np.arange(1200) + epoch * 2**32
        np.add.at(counts, permuted(np.full(1200, 5), 12, 11, epochs), 1)
    assert float(((counts - 200) ** 2 / 200).sum()) < 31.3


def test_an_epoch_has_every_window_once_and_the_next_ones_others(folder: Path) -> None:
    made, ids = text(folder), stream(folder, "train")
    count = made._windows("train", T)
    assert count == (len(ids) - T) // T
    epochs = [starts(made, "train", list(range(epoch * count, (epoch + 1) * count))) for epoch in range(3)]
    for found in epochs:
        ordered = sorted(found)
        assert np.diff(ordered).tolist() == [T] * (count - 1), "side by side, none twice"
        assert 0 <= ordered[0] < T and ordered[-1] + T + 1 <= len(ids)
        assert len(ids) - 1 - count * T < 2 * T, "what is left out is less than two windows"
        assert found != ordered
    assert len({tuple(found) for found in epochs}) == 3 and len({min(found) for found in epochs}) > 1


def test_offsets_of_epochs_fill_a_window(folder: Path) -> None:
    made = text(folder)
    count = made._windows("train", T)
    offsets = made._starts(TextShape(length=T), "train", 0, np.arange(300) * count) % T
    assert offsets.min() == 0 and offsets.max() == T - 1 and len(set(offsets)) == T


def test_evaluation_windows_are_those_of_the_validation_documents(folder: Path) -> None:
    made, ids = text(folder), stream(folder, "validation")
    for length in (T, 4 * T):
        count = (len(ids) - 1) // length
        found = starts(made, "test", list(range(count)), length=length)
        assert sorted(found) == [length * number for number in range(count)] and found != sorted(found)
        assert starts(made, "test", [0, 1], seed=1, length=length) != found[:2]
        with pytest.raises(UserError, match=rf"has {count} validation windows of {length} tokens, no {count}$"):
            windows(made, "test", [0, count], length=length)


def test_a_sample_is_the_same_in_whatever_batch(folder: Path) -> None:
    made = text(folder, mix="niah-text:0.5", train_length=PASSAGE)
    for shape in (TextShape(length=T), TextShape(length=PASSAGE, passage=True)):
        whole = made.batch(shape, "train", 3, np.arange(100, 106))
        again = text(folder, mix="niah-text:0.5", train_length=PASSAGE).batch(shape, "train", 3, np.array([104, 101]))
        for name in ("tokens", "labels", "positions"):
            assert np.array_equal(getattr(whole, name)[[4, 1]], getattr(again, name))
        other = made.batch(shape, "train", 4, np.arange(100, 106))
        assert not np.array_equal(whole.tokens, other.tokens)


def test_short_text_has_one_window_and_shorter_none(tmp_path: Path) -> None:
    made = text(prepared(tmp_path / "short", ["x" * 33, "y" * 40], validation=0.0001))
    ids = stream(tmp_path / "short", "train")
    assert len(ids) == 34 + 41
    for length, count, last in ((74, 1, 0), (40, 1, 34), (37, 1, 36), (36, 1, 35), (25, 2, 49), (75, 0, 0)):
        assert made._windows("train", length) == count
        if not count:
            with pytest.raises(UserError, match=r"has 75 train tokens, not enough for a window of 75"):
                windows(made, "train", [0], length=length)
            continue
        found = made._starts(TextShape(length=length), "train", 0, np.arange(400 * count))
        assert found.min() == 0 and found.max() == last


# --- what a window says


def by_loop(tokens: np.ndarray, separator: int = 256) -> list[int]:
    positions, t = [], 0
    for token in tokens:
        t = 1 if token == separator else t + 1
        positions.append(t)
    return positions


def test_positions_start_anew_at_separators(folder: Path) -> None:
    batch = windows(text(folder), "train", list(range(40)), length=200)
    assert batch.positions is not None
    assert [row.tolist() for row in batch.positions] == [by_loop(row) for row in batch.tokens]
    assert (batch.positions[:, 0] == 1).all() and (batch.positions == 1).sum() > 60, "several documents in some"
    assert batch.asked.all() and not batch.distance.any()
    running = windows(text(folder, reset=False), "train", list(range(40)), length=200)
    assert running.positions is not None
    assert (running.positions == np.arange(1, 201)).all()


def test_what_the_first_samples_are(folder: Path) -> None:
    """Golden: what is learned, and asked, of these stories must never change unnoticed."""
    made = text(folder)
    content = hashlib.sha256()
    for split, seed in (("train", 0), ("train", 1), ("test", 0)):
        batch = windows(made, split, [0, 1, 2, 300 if split == "train" else 3], seed)
        for part in (batch.tokens, batch.labels, batch.positions):
            content.update(np.asarray(part, dtype="<i8").tobytes())
    assert made.config.data_sha256 == GOLDEN_DATA
    assert content.hexdigest() == GOLDEN


def test_bytes_are_those_of_the_tokenizer(folder: Path) -> None:
    made = text(folder)
    assert made.byte_lengths().tolist() == [1] * 256 + [0]
    assert made.vocab_size == 257


# --- passages


def test_a_passage_tells_a_needle_and_its_answer(folder: Path) -> None:
    made = text(folder, mix="niah-text:0.2", train_length=PASSAGE)
    batch = made.batch(TextShape(length=PASSAGE, passage=True), "train", 0, np.arange(8))
    assert batch.positions is not None
    decode = ByteTokenizer().decode
    seen = set()
    for tokens, labels, positions in zip(batch.tokens, batch.labels, batch.positions, strict=True):
        n = int((positions != 0).sum())
        assert positions.tolist() == [*range(1, n + 1), *[0] * (PASSAGE - n)]
        assert tokens[0] == 256 and labels[n - 1] == 256, "a document of its own, and it ends"
        assert np.array_equal(labels[: n - 1], tokens[1:n]) and (labels[n:] == IGNORED).all()
        said = decode(tokens[1:n].tolist())
        prompt, _, answer = said.rpartition(" is ")
        assert answer[-1] == "." and len(answer) == 8 and answer[:-1].isdigit()
        assert f"is: {answer}" in prompt, "the needle"
        assert n > PASSAGE - 120, "filled to within a line of noise"
        seen.add(answer)
    assert len(seen) == 8


def test_passages_take_their_variants_in_turn(folder: Path) -> None:
    mix = {"share": 0.5, "variants": ["single_1", "multiquery", "multikey_3"]}
    made = text(folder, mix=mix, train_length=1400)
    batch = made.batch(TextShape(length=1400, passage=True), "train", 0, np.arange(6))
    said = [ByteTokenizer().decode(row.tolist()) for row in batch.tokens]
    for number, words in enumerate(("the number for", "numbers for", "uuid for")):
        assert words in said[number] or "special magic" in said[number]
    answers = [row.split("provided text")[-1] for row in said]
    assert [text_.count(",") >= 3 for text_ in answers] == [False, True, False] * 2
    assert answers[2].count("-") == 4


def test_no_passage_is_one_of_an_evaluation(folder: Path) -> None:
    made = text(folder, mix="niah-text:0.2", train_length=PASSAGE)
    batch = made.batch(TextShape(length=PASSAGE, passage=True), "train", 0, np.arange(20))
    answers = {ByteTokenizer().decode(row.tolist()).rpartition(" is ")[2] for row in batch.tokens}
    for seed in range(2):
        needles = Needles("single_1", 1024, ByteTokenizer(), seed=seed)
        assert not answers & {f"{needles.sample(index).answers[0]}." for index in range(20)}


def test_stages_are_windows_and_their_share_of_passages(folder: Path) -> None:
    assert [stage.plain() for stage in text(folder).stages()] == [
        {"shape": {"length": T, "passage": None}, "examples": None, "share": 1.0}
    ]
    first, second = text(folder, mix="niah-text:0.2", train_length=PASSAGE).stages()
    assert (first.share, second.share) == (0.8, 0.2)
    assert (first.shape.passage, second.shape.passage) == (None, True)
    assert not text(folder).pads and text(folder, mix="niah-text:0.2", train_length=PASSAGE).pads


@pytest.mark.parametrize(
    ("mix", "said"),
    [
        ("niah-text", "task.mix='niah-text': write a task and its share of the batches, niah-text:0.2"),
        ("niah-text:a fifth", "write a task and its share of the batches"),
        ("niah-text:0", "task.mix.share=0.0: input should be greater than 0"),
        ("niah-text:1", "task.mix.share=1.0: input should be less than 1"),
        ("niah:0.2", "task.mix.task='niah': input should be 'niah-text'; did you mean 'niah-text'?"),
        ({"share": 0.2, "variants": ["single_9"]}, "did you mean 'single_"),
        ({"share": 0.2, "variants": ["single_1", "single_1"]}, "must not repeat a value"),
        ({"share": 0.2, "variant": ["single_1"]}, "unknown key 'task.mix.variant'"),
    ],
)
def test_a_wrong_mix_is_said(folder: Path, mix: Any, said: str) -> None:
    with pytest.raises(UserError) as error:
        text(folder, mix=mix)
    assert said in str(error.value) and "\n" not in str(error.value)


def test_a_window_too_short_for_a_passage_is_said_with_what_it_takes(folder: Path) -> None:
    made = text(folder, mix="niah-text:0.2", train_length=100)
    with pytest.raises(
        UserError, match=r"passages of single_1 take (\d+) tokens, more than task.train_length=100"
    ) as error:
        made.ready([], 1)
    least = int(str(error.value).split(" take ")[1].split()[0])
    text(folder, mix="niah-text:0.2", train_length=least).ready([], 1)
    with pytest.raises(UserError):
        text(folder, mix="niah-text:0.2", train_length=least - 1).ready([], 1)


# --- the folder


def config(folder: Path, **task: Any) -> RunConfig:
    return make_config({"task": {"name": "text", "train_length": T, "data": str(folder), **task}})


def test_what_the_folder_tells_is_filled_in(folder: Path) -> None:
    found = config(folder)
    assert found.task.plain()["vocab_size"] == found.model.vocab_size == 257
    assert found.task.plain()["tokenizer_sha256"] == ByteTokenizer().sha256
    assert found.training.plan == "mix"
    assert make_config(found.plain()) == found
    assert set(found.task.said()) == {"name", "train_length", "data", "reset", "mix"}


def test_where_the_folder_lies_changes_nothing(folder: Path, tmp_path: Path) -> None:
    moved = Path(shutil.copytree(folder, tmp_path / "elsewhere"))
    one, other = config(folder), config(moved)
    assert (one.training_hash, one.evaluation_hash) == (other.training_hash, other.evaluation_hash)
    assert other.task.for_record()["data"] == "elsewhere"
    ids = [text(where).sample_ids(TextShape(length=T), "test", 0, np.arange(3)) for where in (folder, moved)]
    assert ids[0] == ids[1]


def test_the_samples_asked_do_not_depend_on_what_else_was_trained_on(folder: Path) -> None:
    plain, mixed = text(folder), text(folder, mix="niah-text:0.2", train_length=PASSAGE)
    for made in (plain, mixed):
        assert made.rules() == {"data_sha256": plain.config.data_sha256, "reset": True}
    ids = [made.sample_ids(TextShape(length=T), "test", 0, np.arange(3)) for made in (plain, mixed)]
    assert ids[0] == ids[1]
    assert text(folder, reset=False).sample_ids(TextShape(length=T), "test", 0, np.arange(3)) != ids[0]
    assert config(folder).training_hash != config(folder, mix="niah-text:0.2", train_length=PASSAGE).training_hash


def test_no_data_is_said() -> None:
    with pytest.raises(UserError, match=r"^task.data is missing: name a folder made by `bench data prepare`"):
        make_config({"task": {"name": "text"}})
    with pytest.raises(UserError, match=r"nowhere is no folder of token shards \(no manifest.json\)"):
        make_config({"task": {"name": "text", "data": "nowhere"}})


def test_data_that_are_gone_or_others_are_said_when_they_are_needed(folder: Path, tmp_path: Path) -> None:
    found = config(folder).plain()
    gone = make_config(found | {"task": {**found["task"], "data": str(tmp_path / "gone")}})
    other = prepared(tmp_path / "other", stories(9, seed=1))
    changed = make_config(found | {"task": {**found["task"], "data": str(other)}})
    shape, sha256 = TextShape(length=T), str(found["task"]["data_sha256"])[:12]
    for wrong, said in ((gone, "gone is no folder of token shards"), (changed, "holds other tokens")):
        made = Text(wrong.task)  # type: ignore[arg-type]
        assert made.vocab_size == 257 and made.stages() and wrong.training_hash == config(folder).training_hash
        with pytest.raises(MissingDataError) as error:
            made.batch(shape, "train", 0, np.arange(2))
        with pytest.raises(MissingDataError, match=said) as again:
            made.ready(made.cells(wrong.evaluation, [T]), 1)
        assert said in str(error.value)
        assert error.value.needs.endswith(f", tokens of sha256 {sha256}") and again.value.needs == error.value.needs


def test_too_little_validation_is_said_before_training(folder: Path, tmp_path: Path) -> None:
    made = text(folder)
    cells = made.cells(config(folder).evaluation, [T, 4 * T])  # type: ignore[arg-type]
    fewest = (len(stream(folder, "validation")) - 1) // (4 * T)
    made.ready(cells, fewest)
    with pytest.raises(
        UserError, match=rf"has {fewest} validation windows of 128 tokens, fewer than evaluation.samples="
    ):
        made.ready(cells, fewest + 1)
    none = text(prepared(tmp_path / "none", stories(5), validation=0.0))
    with pytest.raises(UserError, match=r"has no validation documents; prepare it with another --validation"):
        none.ready(cells, 1)


def test_remarks_say_how_much_there_is(folder: Path) -> None:
    train, validation = len(stream(folder, "train")), len(stream(folder, "validation"))
    (line,) = text(folder).remarks([])
    assert line == f"{folder}: {train:,} train tokens, {validation:,} validation tokens"
