"""Stories: the answer is what was told of the key, and no simple rule finds it; the words' tokenizer."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Sequence
from functools import cache

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from decaybench.core.draws import Draws
from decaybench.core.errors import UserError
from decaybench.core.hashing import digest
from decaybench.text.stories import NAMES, PLACES, THINGS, Story, StoryWriter, word_tokenizer
from decaybench.text.tokenizers import REPLACEMENT, load_tokenizer
from tests.statistics import fits

LEXICON = {*NAMES, *THINGS, *PLACES}
GOLDEN_STORIES = "0e289eddbfe9651c9608ff637e9d1f10e370df00852eac7c0687e66e04185e62"
GOLDEN_PAIRS = "f3e3cfa7ae684d88ac22f49f33865760222dad74bec23a12139c5495bea9f5a1"
GOLDEN_WORDS = (370, "0e300dabcdbb000bbcc27e6fbac760342b2e292304fefc11d553958dfb55de5e")


@cache
def stories(n: int, pairs: int = 4, key: int = 7) -> list[Story]:
    writer = StoryWriter(pairs)
    return [writer.write(bits) for bits in Draws(key, np.arange(n)).bits(0, writer.draws).tolist()]


def words(text: str) -> list[str]:
    return re.findall(r"\w+", text)


def known(text: str) -> list[str]:
    """The keys and values in a text, in their order."""
    return [word for word in words(text) if word in LEXICON]


def form(sentence: str) -> str:
    """A sentence without its keys and values."""
    return re.sub(r"\w+", lambda found: "_" if found[0] in LEXICON else found[0], sentence)


@pytest.mark.parametrize("pairs", [2, 3, 4, 12])
def test_the_last_word_is_what_one_sentence_says_of_the_key_that_the_last_sentence_names(pairs: int) -> None:
    for story in stories(200, pairs):
        (key,) = known(story.ending)
        saying = [sentence for sentence in story.sentences if key in words(sentence) and len(known(sentence)) == 2]
        assert len(saying) == 1
        (value,) = [word for word in known(saying[0]) if word != key]
        assert story.whole == f"{' '.join(story.sentences)} {story.ending} {value}."
        assert value not in words(story.ending), "and isn't said there"


@pytest.mark.parametrize("pairs", [2, 4, 12])
def test_each_pair_is_told_once_where_it_says_so(pairs: int) -> None:
    for story in stories(200, pairs):
        assert len({pair.key for pair in story.pairs} | {pair.value for pair in story.pairs}) == 2 * pairs
        assert story.words == {word for pair in story.pairs for word in (pair.key, pair.value)}
        assert sorted(pair.told for pair in story.pairs) == [
            place for place, sentence in enumerate(story.sentences) if len(known(sentence)) == 2
        ]
        for pair in story.pairs:
            sentence = story.sentences[pair.told]
            assert set(known(sentence)) == {pair.key, pair.value}
            assert sentence[: pair.end].endswith(f" {pair.value}")
        assert all(set(known(sentence)) <= story.words for sentence in story.sentences)


def candidates(story: Story) -> list[str]:
    """The words that could be the answer by their kind, as they stand in the story, each as often as it is there."""
    kind = next(kind for kind in (THINGS, PLACES) if story.pairs[0].value in kind)
    return [word for word in known(story.told) if word in kind]


RULES: dict[str, Callable[[list[str]], Sequence[str]]] = {
    "first mentioned": lambda found: found[:1],
    "last mentioned": lambda found: found[-1:],
    "most frequent": lambda found: [word for word, n in Counter(found).items() if n == max(Counter(found).values())],
    "least frequent": lambda found: [word for word, n in Counter(found).items() if n == min(Counter(found).values())],
    "second mentioned": lambda found: list(dict.fromkeys(found))[1:2],
}


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("pairs", [2, 4])
def test_simple_rules_answer_by_chance(rule: str, pairs: int) -> None:
    found = stories(4000, pairs)
    right = 0.0
    for story in found:
        chosen = RULES[rule](candidates(story))
        right += (story.pairs[0].value in chosen) / len(chosen)
    chance = 1 / pairs
    assert abs(right / len(found) - chance) < 4 * np.sqrt(chance * (1 - chance) / len(found))


def test_rules_that_look_at_the_telling_sentences_alone_answer_by_chance_too() -> None:
    found = stories(4000)
    places = Counter(sorted(pair.told for pair in story.pairs).index(story.pairs[0].told) for story in found)
    assert fits(np.array([places[n] for n in range(4)])), "whichever was told first, second, ..."
    wording = Counter(form(story.sentences[story.pairs[0].told]) for story in found)
    offered = Counter(form(story.sentences[pair.told]) for story in found for pair in story.pairs)
    assert len(wording) == len(offered) == 30
    share = np.array(list(offered.values())) / offered.total()
    assert fits(np.array([wording[found] for found in offered]), share), "however it was told"


def test_the_last_sentence_says_nothing_of_the_answer_but_its_kind() -> None:
    found = [story for story in stories(12_000) if story.pairs[0].key in NAMES and story.pairs[0].value in THINGS]
    table = np.zeros((10, 4))
    forms: dict[str, int] = {}
    keys = np.zeros((4, 4))
    for story in found:
        key, value = NAMES.index(story.pairs[0].key), THINGS.index(story.pairs[0].value)
        table[forms.setdefault(form(story.ending), len(forms)), value % 4] += 1
        keys[key % 4, value % 4] += 1
    assert len(forms) == 10
    assert fits(table) and fits(keys)


def test_all_kinds_tellings_and_words_come_up() -> None:
    found = stories(3000)
    kinds = Counter((story.pairs[0].key in NAMES, story.pairs[0].value in THINGS) for story in found)
    assert fits(np.array(list(kinds.values()))) and len(kinds) == 3
    assert set().union(*(story.words for story in found)) == LEXICON
    assert len({sentence for story in found for sentence in story.sentences if not known(sentence)}) == 12
    extra = Counter(len(story.sentences) - 4 for story in found)
    assert fits(np.array([extra[n] for n in range(4)]))


def test_without_leaves_words_out_and_no_more_than_half_of_a_list_may_be() -> None:
    writer = StoryWriter(12)
    without = {*NAMES[:32], *THINGS[:32], *PLACES[:32]}
    bits = Draws(3, np.arange(200)).bits(0, writer.draws).tolist()
    assert all(not writer.write(row, without).words & without for row in bits)
    assert writer.write(bits[0]) == writer.write(bits[0], frozenset())


def test_a_story_takes_no_more_draws_than_said() -> None:
    for pairs in (2, 12):
        writer = StoryWriter(pairs)
        for bits in ([0] * writer.draws, [2**32 - 1] * writer.draws):
            assert len(writer.write(bits).pairs) == pairs
    with pytest.raises(StopIteration):
        writer.write([2**32 - 1] * (writer.draws - 1))


@pytest.mark.parametrize("pairs", [0, 1, 13])
def test_a_number_of_pairs_that_no_story_has(pairs: int) -> None:
    with pytest.raises(UserError, match=f"a story has 2 to 12 pairs, not {pairs}"):
        StoryWriter(pairs)


def test_stories_stay_what_they_are() -> None:
    assert digest([story.whole for story in stories(50)]) == GOLDEN_STORIES
    assert digest([[list(pair) for pair in story.pairs] for story in stories(50, 3)]) == GOLDEN_PAIRS


@pytest.mark.parametrize("spec", ["words", "bytes"])
@pytest.mark.parametrize("pairs", [2, 4])
def test_no_story_is_longer_than_the_longest(spec: str, pairs: int) -> None:
    tokenizer = word_tokenizer() if spec == "words" else load_tokenizer(spec)
    told, ending = StoryWriter(pairs).longest(tokenizer)
    found = stories(2000, pairs)
    longest = max(map(len, tokenizer.encode_many([f" {story.told}" for story in found])))
    assert 0.6 * told < longest <= told
    last = max(map(len, tokenizer.encode_many([f" {story.ending} {story.pairs[0].value}." for story in found])))
    assert 0.6 * ending < last <= ending


# --- the tokenizer


def test_a_story_comes_back_word_for_word() -> None:
    tokenizer = word_tokenizer()
    texts = [story.whole for story in stories(300)]
    encoded = tokenizer.encode_many(texts)
    assert [tokenizer.decode(ids) for ids in encoded] == texts
    assert all(1 < i < tokenizer.vocab_size for ids in encoded for i in ids)
    assert [len(ids) for ids in encoded] == [len(re.findall(r"\w+|[.,]", text)) for text in texts], "one id a word"


@settings(max_examples=100)
@given(st.text(max_size=40), st.text(max_size=40))
def test_any_text_has_ids_and_words_can_be_encoded_apart(left: str, right: str) -> None:
    tokenizer = word_tokenizer()
    ids = tokenizer.encode(f"{left} {right}")
    assert ids == tokenizer.encode(left) + tokenizer.encode(f" {right}")
    assert all(0 < i < tokenizer.vocab_size for i in ids), "the separator is no word"


def test_ids_and_lengths() -> None:
    tokenizer = word_tokenizer()
    assert tokenizer.encode("Peter xyzzy, the lamp.")[1] == 1
    assert tokenizer.decode(tokenizer.encode("Peter xyzzy, the lamp.")) == f"Peter {REPLACEMENT}, the lamp."
    assert tokenizer.decode([0, *tokenizer.encode("the lamp"), 0]) == "the lamp"
    text = "Peter took the lamp. The lamp, Peter"
    assert tokenizer.byte_lengths()[tokenizer.encode(text)].sum() == len(text) + 1, "each word with the space before it"
    assert tokenizer.byte_lengths()[0] == 0
    for name, list_ in (("names", NAMES), ("things", THINGS), ("places", PLACES)):
        assert [tokenizer.words[i] for i in tokenizer.ranges[name]] == list(list_)
    assert tokenizer.encode_bytes(b"the \xff lamp") == tokenizer.encode("the \ufffd lamp")


def test_the_vocabulary_stays_what_it_is() -> None:
    tokenizer = word_tokenizer()
    assert len(set(tokenizer.words)) == len(tokenizer.words) == tokenizer.vocab_size
    assert len(LEXICON) == 3 * 64
    assert not {word for word in THINGS if word[0] in "aeiou"}, "they follow `a`"
    assert (tokenizer.vocab_size, tokenizer.sha256) == GOLDEN_WORDS
