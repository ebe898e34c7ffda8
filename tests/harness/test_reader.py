"""A reader's answers against one text at a time: whole rows, float64, plain loops over the model's logits."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from decaybench.core.errors import RunError, UserError
from decaybench.harness import reader as reader_module
from decaybench.harness.reader import Continuation, Document, Prompt, Reader, before_stops, tokenizer_of
from decaybench.models.checkpoints import Checkpoint, write_checkpoint
from decaybench.text.tokenizers import ByteTokenizer
from tests.models import small

BYTES = ByteTokenizer()
SEPARATOR = BYTES.separator
MODELS = [("mamba2", {"variant": "paper", "horizon": 32}), ("rwkv7", None), ("attention", None)]
TEXTS = [
    ("Once upon a time", " there was"),
    ("a", "b"),
    ("The end, then ", "nothing"),
    ("", "no context"),
    ("   ", "spaces alone"),
    ("é — ünïcode", " ☃"),
    ("a longer context, " * 20, "and a longer text, " * 10),
    ("nothing asked", ""),
    ("a space asked ", ""),
    ("", ""),
]


def writer(name="mamba2", **settings):
    """A model that writes letters, so that what it writes is text."""
    model = small.model(name, vocab_size=257, **settings)
    assert model.head is None
    model.embedding.weight.data[[i for i in range(257) if not chr(i).isalpha() or i > 127]] = 0
    return model


@pytest.fixture(scope="module", params=MODELS, ids=[name for name, _ in MODELS])
def model(request):
    name, post = request.param
    return writer(name, post=post)


@pytest.fixture(scope="module")
def one():
    return writer()


def reader(model, **settings):
    return Reader(model, BYTES, device="cpu", **settings)


def answers(found, requests, known=()):
    done = [pair for batch in found.answers(requests, known) for pair in batch]
    assert len({index for index, _ in done}) == len(done)
    return dict(done)


@torch.no_grad()
def by_one_pass(model, before, target):
    """log p(target | before) and whether it is the first choice throughout, by one pass over the whole row."""
    if not target:
        return 0.0, True
    logits = model(torch.tensor([before + target])).logits[0].double().log_softmax(-1)
    places = range(len(before) - 1, len(before) + len(target) - 1)
    total = sum(float(logits[place, token]) for place, token in zip(places, target, strict=True))
    return total, all(int(logits[place].argmax()) == token for place, token in zip(places, target, strict=True))


def of_bytes(context, text):
    """What lm-eval gives a model for (context, text), without a start."""
    moved = len(context) - len(context.rstrip())
    context, text = context[: len(context) - moved], context[len(context) - moved :] + text
    return list(context.encode()), list(text.encode())


def close(got, want):
    assert got.greedy == want[1]
    assert got.log_likelihood == pytest.approx(want[0], rel=1e-6, abs=1e-6)


@pytest.mark.parametrize("start", ["none", "separator", 7])
def test_continuations_are_those_of_one_pass_each(model, start):
    requests = [Continuation(*texts) for texts in TEXTS]
    got = answers(reader(model, start=start), requests)
    first = {"none": [], "separator": [SEPARATOR]}.get(start, [start])
    for index, texts in enumerate(TEXTS):
        context, target = of_bytes(*texts)
        before = first + context if context else first or [SEPARATOR]
        close(got[index], by_one_pass(model, before, target))
        assert got[index].tokens == len(before) + max(0, len(target) - 1)


def test_a_continuation_that_is_foreseen_is_greedy(one):
    written = answers(reader(one), [Prompt("Say it", (), 4)])[0].text
    assert written
    assert answers(reader(one), [Continuation("Say it", written)])[0].greedy
    assert not answers(reader(one), [Continuation("Say it", written + "?!")])[0].greedy


def test_documents_of_any_length_are_read_in_pieces(model, monkeypatch):
    texts = ["", "x", "A short one.", "word " * 60, "é" * 37]
    requests = [Document(text) for text in texts]
    whole = answers(reader(model), requests)
    for index, text in enumerate(texts):
        close(whole[index], by_one_pass(model, [SEPARATOR], list(text.encode())))
    for piece in (1, 7, 64):
        monkeypatch.setattr(reader_module, "_PIECE", piece)
        for index, answer in answers(reader(model), requests).items():
            close(answer, (whole[index].log_likelihood, whole[index].greedy))


def test_a_document_starts_with_the_start_where_there_is_one(one):
    for start, first in (("none", SEPARATOR), ("separator", SEPARATOR), (7, 7)):
        got = answers(reader(one, start=start), [Document("text")])[0]
        close(got, by_one_pass(one, [first], list(b"text")))


def test_neither_order_nor_batches_nor_neighbours_change_an_answer(one, monkeypatch):
    requests = [Continuation(*texts) for texts in TEXTS] + [Document(text) for _, text in TEXTS]
    requests += [Prompt(context, ("e",), 5) for context, _ in TEXTS]
    want = answers(reader(one), requests)
    order = list(range(len(requests)))
    random.Random(0).shuffle(order)
    for settings in ({"batch_tokens": 1}, {"batch_rows": 3}, {"batch_tokens": 90}):
        for block in (1, 1 << 20):
            monkeypatch.setattr(reader_module, "_BLOCK", block)
            got = answers(reader(one, **settings), [requests[index] for index in order])
            for place, index in enumerate(order):
                assert got[place]._replace(log_likelihood=None) == want[index]._replace(log_likelihood=None)
                likely = want[index].log_likelihood
                assert likely is None or got[place].log_likelihood == pytest.approx(likely, abs=1e-9)


def test_batches_are_as_large_as_asked_and_no_larger(one, monkeypatch):
    requests = [Document("x" * n) for n in [3, 9, 4, 30, 3, 3, 8, 100]]
    shapes = []
    scored = Reader._scored
    monkeypatch.setattr(
        Reader, "_scored", lambda self, rows: shapes.append([row.length for row in rows]) or scored(self, rows)
    )
    answers(reader(one, batch_tokens=30), requests)
    assert shapes == [[100], [30], [9, 8, 4], [3, 3, 3]]
    shapes.clear()
    answers(reader(one, batch_rows=2), requests)
    assert shapes == [[100, 30], [9, 8], [4, 3], [3, 3]]


def test_what_is_known_is_answered_again_only_with_what_is_not(one):
    requests = [Document("x" * n) for n in [1, 2, 3, 4, 5, 6]]
    found = reader(one, batch_rows=2)
    assert [[index for index, _ in batch] for batch in found.answers(requests)] == [[5, 4], [3, 2], [1, 0]]
    assert [[index for index, _ in batch] for batch in found.answers(requests, {5, 4, 2})] == [[3, 2], [1, 0]]
    assert list(found.answers(requests, range(6))) == []


def test_prompts_are_the_plain_loops(model):
    @torch.no_grad()
    def loop(text, until, most):
        ids, new = list(text.encode()) or [SEPARATOR], []
        while len(new) < most:
            new.append(int(model(torch.tensor([ids + new])).logits[0, -1].argmax()))
            if new[-1] == SEPARATOR or any(stop in BYTES.decode(new) for stop in until):
                break
        return before_stops(BYTES.decode(new), until)

    contexts = ["Once upon", "", "é", "a longer prompt, " * 9]
    free = [loop(context, (), 12) for context in contexts]
    stops = [(free[0][3:5],), (free[1][-1], "zzz"), ("",), ()]  # the first stands across two tokens
    requests = [Prompt(context, until, 12) for context, until in zip(contexts, stops, strict=True)]
    got = answers(reader(model), requests)
    assert [got[index].text for index in range(4)] == [
        loop(context, until, 12) for context, until in zip(contexts, [*stops[:2], (), ()], strict=True)
    ]
    assert got[0].text == free[0][: free[0].index(stops[0][0])] != free[0]


def test_a_stop_string_ends_a_row_at_once(one, monkeypatch):
    asked = []
    greedy = reader_module.greedy

    def counted(*arguments, **settings):
        found = greedy(*arguments, **settings)
        asked.extend(map(len, found))
        return found

    monkeypatch.setattr(reader_module, "greedy", counted)
    free = answers(reader(one), [Prompt("Once", (), 30)])[0].text
    stop = free[5:8]
    end = free.index(stop) + 3
    answers(reader(one), [Prompt("Once", (stop,), 30)])
    assert asked[0] == 30
    assert asked[1] == len(free[:end].encode())


@pytest.mark.parametrize(
    ("text", "until", "left"),
    [
        ("a b c", ("b", " "), "a"),
        ("abc", ("x",), "abc"),
        ("abc", ("",), "abc"),
        ("abc", (), "abc"),
        ("abc", ("a",), ""),
    ],
)
def test_text_ends_before_the_first_stop_string(text, until, left):
    assert before_stops(text, until) == left


def test_a_model_without_numbers_is_an_error():
    broken = small.model(vocab_size=257)
    broken.norm.weight.data.fill_(float("nan"))
    with pytest.raises(RunError, match="log-likelihood of a text is nan"):
        answers(reader(broken), [Document("x")])


def checkpoint(folder: Path, vocab_size: int = 257, **facts: str) -> Checkpoint:
    return write_checkpoint(folder / "c", small.model(vocab_size=vocab_size), 0, facts, {})


def test_the_tokenizer_must_be_the_checkpoints(tmp_path):
    assert tokenizer_of(checkpoint(tmp_path, tokenizer_sha256=BYTES.sha256), None) is not None
    assert tokenizer_of(checkpoint(tmp_path), "bytes").name == "bytes"
    with pytest.raises(UserError, match=r"doesn't say what it reads text by .* name its tokenizer by --tokenizer"):
        tokenizer_of(checkpoint(tmp_path), None)
    with pytest.raises(UserError, match=r"trained with another tokenizer \(sha256 000000000000…\) than bytes"):
        tokenizer_of(checkpoint(tmp_path, tokenizer_sha256="0" * 64), None)
    with pytest.raises(UserError, match="has a vocabulary of 256 tokens; tokenizer bytes with start none needs 257"):
        tokenizer_of(checkpoint(tmp_path, 256), "bytes")
    with pytest.raises(UserError, match="with start 300 needs 301"):
        tokenizer_of(checkpoint(tmp_path), "bytes", 300)
