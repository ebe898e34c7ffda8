"""NIAH on text as a task: facts are read off the prompts, and what is missing or wrong is said."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from decaybench.core.config import parse
from decaybench.core.errors import UserError
from decaybench.tasks.base import IGNORED, Batch, MissingDataError
from decaybench.tasks.niah_text import NiahText, NiahTextConfig, NiahTextEvaluation, NiahTextShape
from decaybench.text.haystacks import builtin_essay
from decaybench.text.needles import VARIANTS
from decaybench.text.tokenizers import ByteTokenizer
from tests.text.test_needles import ESSAYS, LINES, PATTERNS, from_file

BYTES = ByteTokenizer()
LENGTH = 1200  # of a small sample, in bytes
GOLDEN_SAMPLES = "41bd8995276f60da3fb0bbd93ce08c517b3f79a5de4bf438bd8f206cf183c6e3"
GOLDEN_IDS = ["71e402f54d64e9a3", "a55c546d3d2ed055"]


def made(**settings: Any) -> NiahText:
    return NiahText(parse(NiahTextConfig, settings, "task"))


def evaluation(**settings: Any) -> NiahTextEvaluation:
    return parse(NiahTextEvaluation, settings, "evaluation")


def rows(
    task: NiahText, variant: str, length: int = LENGTH, n: int = 4, depth: float | None = None, **at: Any
) -> Batch:
    shape = NiahTextShape(length=length, variant=variant, depth=depth)
    return task.batch(shape, at.get("split", "test"), at.get("seed", 0), np.arange(at.get("first", 0), n))


def texts(batch: Batch, start: int = 1) -> list[str]:
    """The prompts as a byte tokenizer's reader finds them, behind the start tokens."""
    assert batch.positions is not None
    found = []
    for tokens, positions in zip(batch.tokens, batch.positions, strict=True):
        n = int((positions != 0).sum())
        assert positions[:n].tolist() == list(range(1, n + 1)) and not positions[n:].any() and not tokens[n:].any()
        assert (tokens[:start] == 256).all()
        found.append(bytes(tokens[start:n].tolist()).decode())
    return found


@pytest.fixture
def haystack(tmp_path: Path) -> str:
    path = tmp_path / "some" / "book.txt"
    path.parent.mkdir()
    path.write_text("".join(f"It was day {n} of the voyage, and no land was seen. " for n in range(200)))
    return str(path)


# --- samples


@pytest.mark.parametrize("variant", VARIANTS)
def test_what_is_wanted_and_how_far_it_is_stands_in_the_prompt(variant: str) -> None:
    batch, form = rows(made(), variant), VARIANTS[variant]
    assert batch.wanted is not None and not batch.asked.any() and (batch.labels == IGNORED).all()
    for text, wanted, depth in zip(texts(batch), batch.wanted, batch.details["depth"].tolist(), strict=True):
        assert len(wanted.answers) == len(wanted.distance) == form.values * form.queries
        assert text.endswith(" mentioned in the provided text " + ("is" if len(wanted.answers) == 1 else "are"))
        question = text[text.rindex("\nWhat ") :]
        for answer, distance in zip(wanted.answers, wanted.distance, strict=True):
            (needle,) = re.finditer(f"One of the special magic {form.value} for (\\S+) is: {answer}\\.", text)
            assert re.fullmatch(PATTERNS[form.value], answer) and needle[1] in question
            assert distance == len(text) - needle.end()
        assert sorted(wanted.distance) == sorted(set(wanted.distance))
        context = text[text.index("\n") : text.rindex("\nWhat ")]
        place = context.index(f" is: {wanted.answers[0]}.")
        assert depth == pytest.approx(place / len(context), abs=0.15), "of the haystack without the needle, nearly"


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("start", ["separator", "none", 7])
def test_start_prompt_and_new_tokens_fill_the_length_to_within_a_sentence(variant: str, start: str | int) -> None:
    task = made(start=start)
    for length in (1200, 2500):
        batch = rows(task, variant, length)
        assert (batch.lengths + 128 <= length).all() and (batch.lengths + 128 > length - 160).all()
        if start == 7:
            assert (batch.tokens[:, 0] == 7).all()
            batch.tokens[:, 0] = 256
        assert all(text.startswith(("A special magic", "Some special")) for text in texts(batch, int(start != "none")))
    assert task.vocab_size == 257 and made(start=300).vocab_size == 301


def test_by_rulers_rule_some_samples_are_500_words_shorter() -> None:
    exact, ruler = (rows(made(fit=fit), "multikey_1", 5000, n=40).lengths for fit in ("exact", "ruler"))
    assert (exact > 5000 - 128 - 160).all()
    assert 0 < (ruler < 2500).sum() < 40 and ((ruler < 2500) | (ruler > 4700)).all()


def test_other_splits_and_seeds_ask_for_other_needles() -> None:
    task = made()
    found = [
        rows(task, "single_1", **at).wanted for at in ({}, {"split": "validation"}, {"split": "train"}, {"seed": 1})
    ]
    answers = [wanted.answers[0] for batch in found for wanted in batch or ()]
    assert len(set(answers)) == 16
    assert rows(task, "single_1", 2000).wanted is not None
    assert [w.answers for w in rows(task, "single_1", 2000).wanted or ()] == [w.answers for w in found[0] or ()]


def test_a_sample_is_the_same_in_every_batch() -> None:
    whole, part = rows(made(), "multiquery", n=5), rows(made(), "multiquery", n=5, first=3)
    assert texts(whole)[3:] == texts(part) and (whole.wanted or ())[3:] == part.wanted


@pytest.mark.parametrize("variant", ["single_1", "multikey_1", "multikey_3"])
@pytest.mark.parametrize("depth", [0, 0.3, 1])
def test_a_needle_stands_at_the_depth_asked_for(variant: str, depth: float) -> None:
    batch = rows(made(), variant, 4000, depth=depth)
    assert batch.details["depth"] == pytest.approx(depth, abs=0.06)
    for text, wanted in zip(texts(batch), batch.wanted or (), strict=True):
        context = text[text.index("\n") : text.rindex("\nWhat ")]
        first = context.startswith(f"\nOne of the special magic {VARIANTS[variant].value} for ")
        if depth == 0:
            assert first and context.split("is: ")[1].startswith(wanted.answers[0])
        if depth == 1:
            assert context.endswith(f" is: {wanted.answers[0]}.")


def test_samples_and_ids_never_change() -> None:
    digest, task = hashlib.sha256(), made()
    for variant in VARIANTS:
        batch = rows(task, variant)
        assert batch.positions is not None
        for tokens, positions, wanted in zip(batch.tokens, batch.positions, batch.wanted or (), strict=True):
            digest.update(tokens[positions != 0].astype("<i8").tobytes() + repr(wanted).encode())
    assert digest.hexdigest() == GOLDEN_SAMPLES
    shapes = [
        NiahTextShape(length=LENGTH, variant="single_1"),
        NiahTextShape(length=LENGTH, variant="single_2", depth=0),
    ]
    assert [task.sample_ids(shape, "test", 0, np.array([0]))[0] for shape in shapes] == GOLDEN_IDS


def test_an_id_changes_with_all_that_a_sample_is_made_of(haystack: str) -> None:
    def ids(variant: str, length: int = LENGTH, depth: float | None = None, seed: int = 0, **settings: Any) -> str:
        shape = NiahTextShape(length=length, variant=variant, depth=depth)
        return made(**settings).sample_ids(shape, "test", seed, np.array([0]))[0]

    for variant in ("single_1", "single_2"):
        others = [
            ids(variant),
            ids(variant, 1300),
            ids(variant, depth=0.5),
            ids(variant, seed=1),
            ids(variant, fit="ruler"),
            ids(variant, start="none"),
        ]
        assert len(set(others)) == len(others)
    assert ids("single_2", haystack=haystack) != ids("single_2")
    assert ids("single_1", haystack=haystack) == ids("single_1"), "it has no essay"


# --- cells


def test_cells_are_variants_by_lengths_by_depths() -> None:
    plain = made().cells(evaluation(), [1000, 2000])
    assert [(cell.name, cell.variant, cell.coordinates) for cell in plain] == [
        ("single_1-length1000", "single_1", {}),
        ("single_1-length2000", "single_1", {}),
    ]
    grid = made().cells(evaluation(variants=["single_2", "multivalue"], depths=["0", "0.5"]), [1000])
    assert [cell.name for cell in grid] == [
        *("single_2-length1000-depth0", "single_2-length1000-depth0.5"),
        *("multivalue-length1000-depth0", "multivalue-length1000-depth0.5"),
    ]
    assert [(cell.shape.depth, cell.coordinates) for cell in grid[:2]] == [(0, {"depth": 0}), (0.5, {"depth": 0.5})]
    for every in ("all", ["all"]):
        assert evaluation(variants=every).variants == tuple(VARIANTS)
    assert evaluation().samples == 100


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"variants": ["singel_1"]}, "did you mean 'single_1'?"),
        ({"variants": ["al"]}, "did you mean 'all'?"),
        ({"variants": ["single_1", "all"]}, "unknown NIAH variant 'all'"),
        ({"variants": []}, "one at least"),
        ({"variants": ["single_1", "single_1"]}, "must not repeat a value"),
        ({"depths": [0.5, 1.5]}, "evaluation.depths.1=1.5"),
        ({"depths": [-0.1]}, "greater than or equal to 0"),
        ({"depths": []}, "one at least"),
        ({"depths": [0.5, 0.5]}, "must not repeat a value"),
    ],
)
def test_a_wrong_evaluation_is_refused(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError) as caught:
        evaluation(**settings)
    assert said in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("start", ["separator", "none"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_the_smallest_length_is_named_and_works(variant: str, start: str) -> None:
    task = made(start=start)
    with pytest.raises(UserError, match=r"length=200 is too short for .* the smallest length is (\d+)") as caught:
        task.ready(task.cells(evaluation(variants=[variant]), [200]), 4)
    found = re.search(r"the smallest length is (\d+)", str(caught.value))
    assert found
    smallest = int(found[1])
    task.ready(task.cells(evaluation(variants=[variant]), [smallest]), 4)
    assert (rows(task, variant, smallest, n=8).lengths + 128 <= smallest).all()
    with pytest.raises(UserError, match=f"the smallest length is {smallest}"):
        task.ready(task.cells(evaluation(variants=[variant]), [smallest - 1]), 4)


def test_it_trains_nothing() -> None:
    with pytest.raises(UserError, match="for evaluation only: name a model by --checkpoint"):
        made().stages()


# --- what a model writes


@pytest.mark.parametrize("written", ["The number is 1234567.", "\x00\n\x1b[0m\u2028", "", "é, 日本"])
def test_what_is_written_is_read_as_text(written: str) -> None:
    task = made()
    assert task.text_of([*BYTES.encode(written), BYTES.separator]) == written
    assert task.stop_ids() == {256}


def test_what_is_no_text_reads_as_such() -> None:
    assert made().text_of([65, 0xFF, 66, 400]) == "A\ufffdB\ufffd"
    assert made().found("it is ABCD-12 or 7654321.", ["abcd-12", "7654321", "1234567"]) == (True, True, False)


# --- files


def test_the_haystack_is_the_users(haystack: str) -> None:
    task = made(haystack=haystack)
    for text in texts(rows(task, "single_2")):
        assert "of the voyage, and no land was seen." in text
    for text in texts(rows(task, "single_1")):
        assert "The grass is green." in text
    folder = made(haystack=str(Path(haystack).parent))
    assert folder.config.haystack_sha256 == task.config.haystack_sha256 != builtin_essay().sha256
    assert made().config.haystack_sha256 == builtin_essay().sha256
    assert texts(rows(folder, "single_3")) == texts(rows(task, "single_3"))


@pytest.mark.parametrize("variant", LINES)
def test_a_haystack_that_would_be_ignored_is_refused(haystack: str, variant: str) -> None:
    with pytest.raises(UserError, match=f"would be ignored: {variant} hide no needle in an essay; single_2, single_3"):
        made(haystack=haystack).cells(evaluation(variants=[variant]), [LENGTH])
    assert made(haystack=haystack).cells(evaluation(variants=[variant, ESSAYS[0]]), [LENGTH])


def test_missing_and_broken_files_are_said_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / "cut.json").write_text('{"model": ')
    for settings, said in (
        ({"haystack": str(tmp_path / "nowhere.txt")}, "can't read"),
        ({"haystack": str(tmp_path / "empty.txt")}, "is empty"),
        ({"tokenizer": str(tmp_path / "cut.json")}, "is not valid JSON"),
        ({"tokenizer": "byte"}, "did you mean 'bytes'?"),
        ({"start": "bos"}, "write none, separator"),
        ({"fit": "rule"}, "did you mean 'ruler'?"),
    ):
        with pytest.raises(UserError) as caught:
            made(**settings)
        assert said in str(caught.value) and "\n" not in str(caught.value)


def test_a_configuration_is_valid_without_its_files(haystack: str, tmp_path: Path) -> None:
    config = made(haystack=haystack).config.plain()
    cells = made(**config).cells(evaluation(variants=["single_1", "single_2"]), [LENGTH])
    Path(haystack).write_text("Another book. It is as long as it is.")
    with pytest.raises(MissingDataError, match=r"task.haystack: .* has sha256 \w{12}…, but \w{12}… is wanted"):
        made(**config).ready(cells, 1)
    Path(haystack).unlink()
    with pytest.raises(MissingDataError, match=r"task\.haystack: can't read") as caught:
        made(**config).ready(cells, 1)
    assert caught.value.needs.startswith("the haystack book.txt (sha256 ")
    made(**config).ready(cells[:1], 1)
    other = {**config, "tokenizer": str(tmp_path / "tokenizer.json")}
    with pytest.raises(MissingDataError, match=r"task.tokenizer: no tokenizer"):
        made(**other).ready(cells[:1], 1)


def test_a_files_tokenizer_reads_and_counts() -> None:
    gpt2 = from_file("gpt2")
    path = str(gpt2.files[0].parent)
    task = made(tokenizer=path)
    assert (task.vocab_size, task.tokenizer_sha256) == (50257, gpt2.sha256)
    batch = rows(task, "multivalue", 800)
    assert batch.positions is not None
    assert (
        (batch.lengths + 128 <= 800).all() and (batch.lengths + 128 > 740).all() and (batch.tokens[:, 0] == 50256).all()
    )
    for tokens, positions, wanted in zip(batch.tokens, batch.positions, batch.wanted or (), strict=True):
        text = task.text_of(tokens[positions != 0].tolist())
        assert all(task.found(text, wanted.answers)) and text.startswith("Some special magic numbers")
        for answer, distance in zip(wanted.answers, wanted.distance, strict=True):
            behind = text[text.index(f"{answer}.") + len(answer) + 1 :]
            assert abs(distance - len(gpt2.encode(behind))) <= 2
    assert task.config.for_record()["tokenizer"] == "gpt2"
