"""NIAH as text: RULER's wording, places and lengths, on our samples and on RULER's own."""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from decaybench.core.errors import UserError
from decaybench.text.haystacks import NOISE, Essay, builtin_essay, read_essay
from decaybench.text.needles import VARIANTS, Needles, Sample, string_match_all
from decaybench.text.tokenizers import ByteTokenizer, Tokenizer, load_tokenizer
from decaybench.text.words import ADJECTIVES, NOUNS
from tests.statistics import fits

DATA = Path(__file__).resolve().parents[3] / "shared" / "data"
BYTES = load_tokenizer("bytes")
FITS = ("exact", "ruler")
ESSAYS = [variant for variant, form in VARIANTS.items() if form.haystack == "essay"]
LINES = [variant for variant in VARIANTS if variant not in ESSAYS]

# RULER's template with its prefix, and how it is put into the singular; number of keys, values and queries by variant.
TEMPLATE = (
    "Some special magic {type} are hidden within the following text. Make sure to memorize it. I will quiz you about "
    "the {type} afterwards.\n{context}\nWhat are all the special magic {type} for {query} mentioned in the provided "
    "text? The special magic {type} for {query} mentioned in the provided text are"
)
SIZES = {"multikey_1": (4, 1, 1), "multivalue": (1, 4, 1), "multiquery": (4, 1, 4)}
PATTERNS = {
    "words": "[a-z]+-[a-z]+",
    "numbers": "[1-9][0-9]{6}",
    "uuids": "[0-9a-f]{8}-[0-9a-f]{4}-4[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}",
}
# One of RULER's samples of single_1, or one of ours: prompt and prefix.
NOISE_SAMPLE = re.compile(
    r"A special magic number is hidden within the following text\. Make sure to memorize it\. I will quiz you about "
    r"the number afterwards\.\n(?P<before>(?:The grass [^\n]*\n)*)"
    r"One of the special magic numbers for (?P<key>[a-z-]+) is: (?P<value>[0-9]{7})\.\n"
    r"(?P<after>(?:The grass [^\n]*\n)*)What is the special magic number for (?P=key) mentioned in the provided text\? "
    r"The special magic number for (?P=key) mentioned in the provided text is"
)
# The first digits of the sha256 of five samples.
GOLDEN = {
    "exact": {
        "single_1": "36059ee761ba434b",
        "single_2": "c4785d22fb057b08",
        "single_3": "073296f7a570db77",
        "multikey_1": "62db235e696e509e",
        "multikey_2": "50b50b2633d3b597",
        "multikey_3": "3b5632056952d086",
        "multivalue": "88f34f4bd15c3ecb",
        "multiquery": "0594691423d01e78",
    },
    "ruler": {
        "single_1": "36059ee761ba434b",
        "single_2": "53700f41ce7b482e",
        "single_3": "3f740009de2c2cfa",
        "multikey_1": "1947a51d92f574e5",
        "multikey_2": "ac8766a76f228adb",
        "multikey_3": "3b5632056952d086",
        "multivalue": "d505e38b07b2dafb",
        "multiquery": "240b7c8dffd14585",
    },
}


class Joining(ByteTokenizer):
    """Bytes, but the ends of sentences and lines are one token with what follows: `. T`, `.` and newline, `: 1`."""

    def encode_many(self, texts):
        pieces = [re.findall(r"\. ?[A-Z\n]|: [0-9]|[^.:]|.", text, re.DOTALL) for text in texts]
        return [[hash_id(piece) for piece in row] for row in pieces]

    def encode_arrays(self, texts):
        return [np.array(ids, dtype=np.uint32) for ids in self.encode_many(texts)]


def hash_id(piece: str) -> int:
    return int(hashlib.sha256(piece.encode()).hexdigest()[:7], 16)


class Counting(ByteTokenizer):
    """Bytes, and how many were asked for."""

    asked = 0

    def encode_many(self, texts):
        self.asked += sum(map(len, texts))
        return super().encode_many(texts)

    def encode_arrays(self, texts):
        self.asked += sum(map(len, texts))
        return super().encode_arrays(texts)


@pytest.fixture(scope="module", params=["gpt2", "gpt-neox-20b"])
def file_tokenizer(request) -> Tokenizer:
    return from_file(request.param)


@pytest.fixture(scope="module")
def gpt2() -> Tokenizer:
    return from_file("gpt2")


@cache
def from_file(name: str) -> Tokenizer:
    pytest.importorskip("tokenizers")
    if not (DATA / "tokenizers" / name).is_dir():
        pytest.skip(f"no tokenizer at shared/data/tokenizers/{name}")
    return load_tokenizer(str(DATA / "tokenizers" / name))


def reference(length: int) -> list[dict]:
    file = DATA / "reference" / "ruler" / "gpt2" / str(length) / "niah_single_1.jsonl"
    if not file.is_file():
        pytest.skip(f"no RULER samples of length {length} at shared/data/reference/ruler")
    return [json.loads(line) for line in file.read_text().splitlines()]


def length_for(variant: str, fit: str) -> int:
    """A length that is small, and at which RULER's smallest essay of 500 words fits, in bytes."""
    return 4000 if fit == "ruler" and variant in ESSAYS else 1500


def units_of(variant: str, sample: Sample) -> list[str]:
    """The sentences or lines of the context, from a plain reading of the prompt."""
    context = sample.prompt.split("\n", 1)[1].rsplit("\n", 1)[0]
    if variant in LINES:
        return context.split("\n")
    known = set(builtin_essay().sentences)
    units: list[str] = []
    for part in re.split(r"(One of the special magic [^.]*\.)", context):
        rest = part.strip(" ")
        while rest:
            ends = [found.end() for found in re.finditer(r"[.?](?= |$)", rest)]
            end = next((end for end in ends if rest[:end] in known), len(rest))
            units.append(rest[:end])
            rest = rest[end:].strip(" ")
    return units


@pytest.mark.parametrize("length", [1024, 2048])
def test_rulers_samples_and_ours_have_one_form(gpt2, length):
    ours = Needles("single_1", length, gpt2, fit="ruler")
    samples = [ours.sample(i) for i in range(10)]
    theirs = reference(length)
    pieces = set()
    for text in [row["input"] + row["answer_prefix"] for row in theirs] + [s.prompt + s.prefix for s in samples]:
        matched = NOISE_SAMPLE.fullmatch(text)
        assert matched, text[-300:]
        lines = (matched["before"] + matched["after"]).splitlines()
        assert set(lines) == {NOISE}
        pieces.add(len(lines))
    assert len(pieces) == 1
    assert {s.pieces for s in samples} == pieces


@pytest.mark.parametrize("length", [1024, 2048])
def test_the_number_of_pieces_is_rulers_whatever_the_seed(gpt2, length):
    [pieces] = {row["input"].count(NOISE) for row in reference(length)}
    for seed in range(5):
        ours = Needles("single_1", length, gpt2, fit="ruler", seed=seed)
        assert {ours.sample(i).pieces for i in range(5)} == {pieces}


@pytest.mark.parametrize("length", [1024, 2048])
def test_with_rulers_key_value_and_place_our_sample_is_rulers(gpt2, length):
    ours = Needles("single_1", length, gpt2, fit="ruler")
    for i, row in enumerate(reference(length)):
        theirs = NOISE_SAMPLE.fullmatch(row["input"] + row["answer_prefix"])
        lines = row["input"].count(NOISE)
        sample = ours.sample(i, depth=theirs["before"].count("\n") / lines)
        [key], [value] = sample.keys, sample.answers
        text = sample.prompt.replace(value, theirs["value"]).replace(key, theirs["key"])
        assert text == row["input"]
        assert sample.prefix.replace(key, theirs["key"]) == row["answer_prefix"]
        assert row["outputs"] == [theirs["value"]]
        assert len(gpt2.encode(row["input"] + row["answer_prefix"])) + 128 == row["length"]
        # RULER counts the space before the answer with what stands before it, as a token of its own.
        assert len(gpt2.encode(row["input"].partition(theirs["value"])[0])) == row["token_position_answer"]
        assert sample.length == len(gpt2.encode(sample.prompt + sample.prefix)) + 128


@pytest.mark.parametrize("fit", FITS)
@pytest.mark.parametrize("variant", VARIANTS)
def test_the_words_are_rulers(variant, fit):
    keys, values, queries = SIZES.get(variant, (1, 1, 1))
    form = VARIANTS[variant]
    needles = Needles(variant, length_for(variant, fit), BYTES, fit=fit)
    for sample in map(needles.sample, range(5)):
        template, kind = TEMPLATE, form.value
        if queries * values == 1:
            template = template.replace("Some", "A").replace("are all", "is").replace("are", "is")
            kind = kind[:-1]
        query = sample.keys[0]
        if queries > 1:
            query = f"{sample.keys[0]}, {sample.keys[1]}, {sample.keys[2]}, and {sample.keys[3]}"
        context = sample.prompt.split("\n", 1)[1].rsplit("\n", 1)[0]
        assert sample.prompt + sample.prefix == template.format(type=kind, context=context, query=query)
        assert sample.prompt.endswith("?")
        assert len(sample.needles) == keys * values
        assert len(sample.keys) == queries
        assert len(sample.answers) == queries * values
        assert all(re.fullmatch(PATTERNS[form.key], key) for key in sample.keys)
        assert all(re.fullmatch(PATTERNS[form.value], value) for value in sample.answers)


@pytest.mark.parametrize("variant", VARIANTS)
def test_answers_are_in_the_needles_of_their_keys_and_nowhere_else(variant):
    form = VARIANTS[variant]
    needles = Needles(variant, 2500, BYTES)
    pattern = rf"One of the special magic {form.value} for ({PATTERNS[form.key]}) is: ({PATTERNS[form.value]})\."
    for sample in map(needles.sample, range(20)):
        found = re.findall(pattern, sample.prompt)
        if form.haystack == "needles":
            assert len(found) == sample.pieces + 1 == len(units_of(variant, sample))
        else:
            assert found == [(needle.key, needle.value) for needle in sample.needles]
        assert len({key for key, _ in found}) == len(found) // form.values
        assert len({value for _, value in found}) == len(found)
        assert all(sample.prompt.count(answer) == 1 for answer in sample.answers)
        asked = [value for key in sample.keys for value in sorted(value for other, value in found if other == key)]
        per_key = [sorted(sample.answers[i : i + form.values]) for i in range(0, len(sample.answers), form.values)]
        assert asked == [value for values in per_key for value in values]
        assert {needle.key for needle in sample.needles if needle.asked} == set(sample.keys)


def test_keys_and_values_are_drawn_uniformly():
    needles = Needles("multiquery", 1000, BYTES)
    samples = [needles.sample(i) for i in range(400)]
    words = [key.split("-") for sample in samples for key in sample.keys]
    tenths = [10 * ADJECTIVES.index(adjective) // len(ADJECTIVES) for adjective, _ in words]
    assert fits(
        np.bincount(tenths, minlength=10),
        np.bincount(10 * np.arange(len(ADJECTIVES)) // len(ADJECTIVES)) / len(ADJECTIVES),
    )
    tenths = [10 * NOUNS.index(noun) // len(NOUNS) for _, noun in words]
    assert fits(np.bincount(tenths, minlength=10), np.bincount(10 * np.arange(len(NOUNS)) // len(NOUNS)) / len(NOUNS))
    numbers = [int(answer) for sample in samples for answer in sample.answers]
    assert fits(np.bincount([number // 10**6 for number in numbers], minlength=10)[1:])
    # Which of the four keys is asked first, in the order of the text.
    first = [[needle.key for needle in sample.needles].index(sample.keys[0]) for sample in samples]
    assert fits(np.bincount(first, minlength=4))


@pytest.mark.parametrize("variant", ESSAYS)
def test_an_essays_needles_stand_at_rulers_forty_depths(variant):
    depths = np.round(np.linspace(0, 100, num=40, endpoint=True)).astype(int)
    needles = Needles(variant, 12_000, BYTES, fit="ruler")
    seen: Counter[int] = Counter()
    for sample in map(needles.sample, range(30)):
        sentences = len(units_of(variant, sample)) - len(sample.needles)
        possible = {int(sentences * (depth / 100)) for depth in depths}
        before = [needle.sentences_before - i for i, needle in enumerate(sample.needles)]
        assert set(before) <= possible
        seen.update(before)
    assert len(seen) > 15


@pytest.mark.parametrize("variant", LINES)
def test_a_lines_needle_stands_before_any_line(variant):
    needles = Needles(variant, 1500, BYTES, fit="ruler")
    samples = [needles.sample(i) for i in range(300)]
    most = max(sample.pieces for sample in samples)
    before = [sample.needles[0].sentences_before for sample in samples if sample.pieces == most]
    assert fits(np.bincount(before, minlength=most))


@pytest.mark.parametrize("variant", ESSAYS)
def test_a_context_is_joined_as_ruler_joins_it(variant):
    """RULER joins with spaces: sentences up to the first depth, needle, sentences up to the next, needle, ... ."""
    needles = Needles(variant, 4000, BYTES, fit="ruler")
    words = [word for sentence in builtin_essay().sentences for word in sentence.split(" ")]
    for sample in map(needles.sample, range(40)):
        text = " ".join(words[: sample.pieces])
        sentences = [unit for unit in units_of(variant, sample) if not unit.startswith("One of the special")]
        assert " ".join(sentences) == text
        parts, last = [], 0
        for i, needle in enumerate(sample.needles):
            before = needle.sentences_before - i
            parts.append(" ".join(sentences[last:before]))
            parts.append(f"One of the special magic {VARIANTS[variant].value} for {needle.key} is: {needle.value}.")
            last = before
        parts.append(" ".join(sentences[last:]))
        assert sample.prompt.split("\n", 1)[1].rsplit("\n", 1)[0] == " ".join(parts)


@pytest.mark.parametrize("variant", VARIANTS)
def test_rulers_fit_takes_whole_increments_away(variant):
    length = length_for(variant, "ruler")
    needles = Needles(variant, length, BYTES, fit="ruler")
    samples = [needles.sample(i) for i in range(40)]
    most = max(sample.pieces for sample in samples)
    step = 500 if variant in ESSAYS else 5
    assert {(most - sample.pieces) % step for sample in samples} == {0}
    assert all(sample.length <= length for sample in samples)
    # With RULER's number for all, or an increment less where that would be too long.
    words = [word for sentence in builtin_essay().sentences for word in sentence.split(" ")]
    for sample in samples:
        if sample.pieces < most and variant in ESSAYS:
            longer = " ".join(words[sample.pieces : sample.pieces + step])
            assert sample.length + len(longer) + 1 > length
        if variant == "single_1":
            assert (sample.pieces == most) == (sample.length - (len(NOISE) + 1) * (sample.pieces - most) <= length)


def test_from_4096_tokens_on_rulers_increment_is_25_lines():
    needles = Needles("multikey_3", 4200, BYTES, fit="ruler", seed=1)
    assert needles.sample(0).pieces >= 25
    with pytest.raises(UserError, match=r"multikey_3.*RULER's smallest haystack is 5 lines"):
        Needles("multikey_3", 1000, BYTES, fit="ruler")


@pytest.mark.parametrize("length", [1200, 2777, 9000])
@pytest.mark.parametrize("variant", VARIANTS)
def test_exact_fills_to_within_a_sentence(variant, length):
    needles = Needles(variant, length, BYTES)
    essay = builtin_essay().sentences
    for sample in map(needles.sample, range(8)):
        assert sample.length == len((sample.prompt + sample.prefix).encode()) + 128 <= length
        following = {
            "noise": NOISE,
            "essay": essay[sample.pieces],
            "needles": units_of(variant, sample)[0],  # all of one variant differ by the length of their keys only
        }[VARIANTS[variant].haystack]
        slack = max(map(len, NOUNS)) + max(map(len, ADJECTIVES)) if variant == "multikey_2" else 0
        assert sample.length + 1 + len(following) + slack > length


@pytest.mark.parametrize("fit", FITS)
@pytest.mark.parametrize("variant", VARIANTS)
def test_ids_are_those_of_the_whole_text(file_tokenizer, variant, fit):
    needles = Needles(variant, 1300, file_tokenizer, fit=fit)
    for i, depth in enumerate([None, None, None, None, 0.0, 0.4, 1.0]):
        sample = needles.sample(i, depth)
        ids = file_tokenizer.encode(sample.prompt + sample.prefix)
        assert sample.tokens.tolist() == ids
        assert sample.length == len(ids) + 128 <= 1300
        for needle in sample.needles:
            text = f"One of the special magic {VARIANTS[variant].value} for {needle.key} is: {needle.value}."
            start = sample.prompt.index(text) - 1  # the token before a word takes the space or newline before it
            assert needle.tokens_before == len(file_tokenizer.encode(sample.prompt[:start]))
            assert needle.distance == len(ids) - len(file_tokenizer.encode(sample.prompt[: start + 1 + len(text)]))


@pytest.mark.parametrize("fit", FITS)
@pytest.mark.parametrize("variant", VARIANTS)
def test_tokens_may_reach_over_the_ends_of_sentences(variant, fit):
    length = length_for(variant, fit)
    tokenizer = Joining()
    needles = Needles(variant, length, tokenizer, fit=fit)
    for sample in map(needles.sample, range(6)):
        assert sample.tokens.tolist() == tokenizer.encode(sample.prompt + sample.prefix)
        assert len(sample.tokens) + 128 == sample.length <= length
        if fit == "exact" and VARIANTS[variant].haystack != "needles":
            following = NOISE if variant in LINES else builtin_essay().sentences[sample.pieces]
            assert sample.length + len(following) + 2 > length
        for needle in sample.needles:
            start = sample.prompt.index(f"for {needle.key} is: {needle.value}.") - len("One of the special magic ") - 1
            start -= len(VARIANTS[variant].value)
            assert abs(needle.tokens_before - len(tokenizer.encode(sample.prompt[:start]))) <= 4 * len(sample.needles)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("depth", [0.0, 0.1, 0.5, 2 / 3, 1.0])
def test_the_needle_asked_first_stands_at_the_depth_asked_for(variant, depth):
    needles = Needles(variant, 3000, BYTES)
    for sample in (needles.sample(i, depth) for i in range(5)):
        units = units_of(variant, sample)
        [place] = [i for i, unit in enumerate(units) if sample.answers[0] in unit]
        assert place == round(depth * (len(units) - 1))
        [needle] = [needle for needle in sample.needles if needle.value == sample.answers[0]]
        assert needle.sentences_before == place
        assert needle.depth_in_sentences == pytest.approx(place / (len(units) - 1))
        separator = 1
        before = sum(len(unit) + separator for unit in units[:place])
        rest = sum(len(unit) + separator for unit in units) - len(units[place]) - separator
        assert needle.depth_in_tokens == pytest.approx(before / rest)
        assert abs(needle.depth_in_tokens - depth) < 0.1


def test_other_needles_keep_to_rulers_places_at_a_given_depth():
    needles = Needles("multikey_1", 4000, BYTES)
    for i in range(10):
        sample = needles.sample(i, depth=0.5)
        sentences = len(units_of("multikey_1", sample)) - 4
        possible = {int(sentences * (depth / 100)) for depth in np.round(np.linspace(0, 100, 40)).astype(int)}
        others = [needle for needle in sample.needles if not needle.asked]
        asked = next(needle for needle in sample.needles if needle.asked)
        before = [n.sentences_before - j - (n.sentences_before > asked.sentences_before) for j, n in enumerate(others)]
        assert set(before) <= possible


@pytest.mark.parametrize("fit", FITS)
def test_samples_never_change(fit):
    found = {}
    for variant in VARIANTS:
        needles = Needles(variant, length_for(variant, fit), BYTES, fit=fit, seed=3)
        texts = [sample.prompt + sample.prefix + "|".join(sample.answers) for sample in map(needles.sample, range(5))]
        found[variant] = hashlib.sha256("\n".join(texts).encode()).hexdigest()[:16]
    assert found == GOLDEN[fit]


def test_a_sample_depends_on_nothing_asked_before():
    def content(sample):
        return (sample.prompt, sample.prefix, sample.keys, sample.answers, sample.needles, sample.length)

    for variant in ("single_2", "multikey_2", "multivalue"):
        one, other = Needles(variant, 2000, BYTES), Needles(variant, 2000, BYTES)
        wanted = content(one.sample(7))
        other.sample(3)
        other.sample(123456789012, depth=1)
        assert content(other.sample(7)) == wanted
        assert content(one.sample(7)) == wanted


def test_keys_and_values_are_the_same_at_every_length_and_depth_and_others_for_every_seed_and_index():
    def facts(sample):
        return (sample.keys, sample.answers)

    short, long = Needles("multiquery", 1500, BYTES), Needles("multiquery", 5000, BYTES, fit="ruler")
    assert facts(short.sample(4)) == facts(short.sample(4, depth=0.3)) == facts(long.sample(4))
    others = [short.sample(5), Needles("multiquery", 1500, BYTES, seed=1).sample(4)]
    assert all(not set(other.answers) & set(short.sample(4).answers) for other in others)


@pytest.mark.parametrize("fit", FITS)
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("tokenizer", [BYTES, Joining()], ids=["bytes", "joining"])
def test_the_smallest_length_works_and_one_less_is_refused(variant, fit, tokenizer):
    with pytest.raises(UserError, match=rf"NIAH length=1 is too short for {variant} with fit={fit}") as caught:
        Needles(variant, 1, tokenizer, fit=fit)
    smallest = int(re.search(r"the smallest length is (\d+)", str(caught.value))[1])
    assert "\n" not in str(caught.value)
    with pytest.raises(UserError, match=rf"the smallest length is {smallest}\b"):
        Needles(variant, smallest - 1, tokenizer, fit=fit)
    needles = Needles(variant, smallest, tokenizer, fit=fit)
    samples = [needles.sample(i) for i in range(20)]
    assert all(sample.length <= smallest for sample in samples)
    assert min(sample.pieces for sample in samples) >= 1


def test_the_smallest_length_is_no_larger_than_it_must_be():
    """The longest key, and a number, which always has seven bytes."""
    key = max(ADJECTIVES, key=len) + "-" + max(NOUNS, key=len)
    needle = f"One of the special magic numbers for {key} is: 1234567."
    template = TEMPLATE.replace("Some", "A").replace("are all", "is").replace("are", "is")
    text = template.format(type="number", context=NOISE + "\n" + needle, query=key)
    assert Needles("single_1", 2000, BYTES).smallest_length == len(text) + 128


def test_an_essay_is_read_again_from_its_beginning_when_it_ends():
    essay = Essay("short", ("One is short.", "Two is longer than one."), "0" * 64)
    for fit in FITS:
        needles = Needles("single_2", 5000, BYTES, essay=essay, fit=fit)
        sample = needles.sample(0)
        hay = re.sub(r" ?One of the special magic [^.]*\.", "", sample.prompt.split("\n")[1])
        assert hay.startswith("One is short. Two is longer than one. One is short.")
        assert 4800 < sample.length <= 5000


def test_a_users_essay(tmp_path):
    file = tmp_path / "essay.txt"
    file.write_text("Mr. Fox slept.  He snored! " * 40)
    sample = Needles("single_2", 1000, BYTES, essay=read_essay([file])).sample(0, depth=0)
    assert re.match(r"One of the special magic [^.]*\. Mr\. Fox slept\. He snored! Mr\.", sample.prompt.split("\n")[1])


def test_keys_and_values_that_the_essay_holds_are_not_used():
    plain = Needles("single_2", 2000, BYTES)
    held: list[str] = []
    answers = set()
    for _ in range(8):
        essay = Essay("needles", (*held, "This is the end of it."), "0" * 64)
        sample = Needles("single_2", 4000, BYTES, essay=essay).sample(0)
        assert sample.prompt.count(sample.answers[0]) == 1
        answers.add(sample.answers[0])
        held.append(f"One of the special magic numbers for {sample.keys[0]} is: {sample.answers[0]}.")
    assert len(answers) == 8
    assert plain.sample(0).answers[0] in answers
    with pytest.raises(UserError, match="the haystack holds needles itself"):
        Needles("single_2", 4000, BYTES, essay=Essay("needles", tuple(held), "0" * 64)).sample(0)


@pytest.mark.parametrize("variant", ["single_1", "single_2", "multiquery", "multikey_2"])
def test_a_haystack_is_tokenised_once(variant):
    """What all samples share isn't tokenised again with each, and what a sample has of its own is tokenised once."""
    tokenizer = Counting()
    needles = Needles(variant, 20_000, tokenizer)
    needles.sample(0)
    tokenizer.asked = 0
    characters = sum(len(sample.prompt) for sample in map(needles.sample, range(1, 6)))
    assert tokenizer.asked < characters * (1.2 if variant == "multikey_2" else 0.15)


@pytest.mark.parametrize("variant", ["single_2", "multikey_3"])
def test_long_contexts(variant):
    sample = Needles(variant, 131_072, BYTES).sample(0)
    assert 130_800 < sample.length <= 131_072


def test_the_score_is_the_share_of_the_answers_found():
    assert string_match_all(" 1234567.", ["1234567"]) == 1
    assert string_match_all("It is 123 4567.", ["1234567"]) == 0
    assert string_match_all(" 1, 2 and 3", ["1", "2", "4", "5"]) == 0.5
    assert string_match_all("KEY ABCDEF12", ["abcdef12"]) == 1
    assert string_match_all("abcdef12", ["ABCDEF12"]) == 1
    assert string_match_all("", ["1"]) == 0


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_answer_itself_scores_one_and_the_prompts_other_values_nothing(variant):
    sample = Needles(variant, 2000, BYTES).sample(0)
    assert string_match_all(" " + ", ".join(sample.answers) + ".", sample.answers) == 1
    others = set(re.findall(PATTERNS[VARIANTS[variant].value], sample.prompt)) - set(sample.answers)
    assert string_match_all(" ".join(others), sample.answers) == 0


def test_what_samples_depend_on_is_described():
    needles = Needles("single_3", 2000, BYTES, fit="exact", seed=5, before=1)
    description = json.loads(json.dumps(needles.description()))
    assert description["haystack"] == {"kind": "essay", "name": "built-in", "sha256": builtin_essay().sha256}
    assert description["tokenizer"] == {"name": "bytes", "sha256": BYTES.sha256}
    assert {key: description[key] for key in ("variant", "length", "new_tokens", "before", "seed", "fit")} == {
        "variant": "single_3",
        "length": 2000,
        "new_tokens": 128,
        "before": 1,
        "seed": 5,
        "fit": "exact",
    }


@pytest.mark.parametrize("fit", FITS)
@pytest.mark.parametrize("variant", VARIANTS)
def test_what_stands_before_a_prompt_takes_its_room(variant, fit):
    length = length_for(variant, fit) + 1
    plain, behind = Needles(variant, length - 1, BYTES, fit=fit), Needles(variant, length, BYTES, fit=fit, before=1)
    assert behind.smallest_length == (plain.smallest_length + 1 if plain.smallest_length != 4096 else 4096)
    for index in range(3):
        assert behind.sample(index).prompt == plain.sample(index).prompt


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: Needles("singel_1", 999, BYTES), r"unknown NIAH variant 'singel_1'; did you mean 'single_1'\?"),
        (lambda: Needles("single_1", 999, BYTES, fit="rule"), r"unknown fit 'rule'; did you mean 'ruler'\?"),
        (lambda: Needles("single_1", 999, BYTES).sample(0, depth=1.5), r"NIAH depth=1\.5 is not between 0"),
        (lambda: Needles("single_1", 999, BYTES).sample(0, depth=float("nan")), r"NIAH depth=nan is not between 0"),
        (lambda: Needles("single_1", -5, BYTES), r"NIAH length=-5 is too short"),
    ],
)
def test_wrong_input_is_answered_in_one_line(call, message):
    with pytest.raises(UserError, match=message) as caught:
        call()
    assert "\n" not in str(caught.value)
