"""The log of answers: whole batches, torn and damaged lines, and what finished work must hold."""

from __future__ import annotations

import json

import pytest
from pydantic import ValidationError

from decaybench.core.errors import UserError
from decaybench.results.answers import AnswerLine, AnswerLog


def likely(request, value=-1.5):
    return AnswerLine(request=request, document=request, option=0, tokens=9, log_likelihood=value, greedy=False)


def written(request, text):
    return AnswerLine(request=request, document=request, option=0, tokens=9, text=text)


@pytest.fixture
def log(tmp_path):
    return AnswerLog(tmp_path / "samples" / "task.jsonl")


def test_what_is_appended_is_read(log):
    assert log.load().lines == {}
    log.append([likely(3), likely(1, -0.1234567890123)])
    log.append([written(0, 'é\n"\ufffd\x00')])
    want = {3: likely(3), 1: likely(1, -0.1234567890123), 0: written(0, 'é\n"\ufffd\x00')}
    assert log.load() == (want, None)
    assert log.read() == want
    assert len(log.path.read_bytes().splitlines()) == 3


def test_the_last_answer_to_a_request_counts(log):
    log.append([likely(0, -1), likely(1, -2)])
    log.append([likely(0, -3)])
    assert log.read() == log.load().lines == {0: likely(0, -3), 1: likely(1, -2)}


def test_a_torn_line_is_no_answer_and_is_cut_by_the_next(log):
    log.append([likely(0)])
    whole = log.path.read_bytes()
    log.path.write_bytes(whole + whole[:30])
    assert log.load() == ({0: likely(0)}, None)
    with pytest.raises(UserError, match=r"task\.jsonl is missing, empty or cut short"):
        log.read()
    log.append([likely(1)])
    assert log.read() == {0: likely(0), 1: likely(1)}


@pytest.mark.parametrize(
    "line",
    [
        "{}",
        "not json",
        '{"request":1,"document":1,"option":0,"tokens":9}',
        '{"request":1,"document":1,"option":0,"tokens":9,"log_likelihood":-1.0}',
        '{"request":1,"document":1,"option":0,"tokens":9,"log_likelihood":-1.0,"greedy":true,"text":"x"}',
        '{"request":1,"document":1,"option":0,"tokens":9,"log_likelihood":1.0,"greedy":true}',
        '{"request":1,"document":1,"option":0,"tokens":9,"log_likelihood":NaN,"greedy":true}',
        '{"request":"1","document":1,"option":0,"tokens":9,"text":"x"}',
        '{"request":1,"document":1,"option":0,"tokens":9,"text":"x","more":2}',
    ],
)
def test_damaged_lines_are_said_and_taken_out(log, line):
    log.append([likely(0), likely(2)])
    first, last = log.path.read_text().splitlines()
    log.path.write_text(f"{first}\n{line}\n{last}\n")
    with pytest.raises(UserError, match=r"task\.jsonl line 2 is damaged"):
        log.read()
    found = log.load()
    assert found.lines == {0: likely(0), 2: likely(2)}
    assert "task.jsonl line 2 is damaged" in found.note
    assert log.path.read_text() == f"{first}\n{last}\n"
    assert log.load().note is None


def test_finished_work_has_answers(log):
    with pytest.raises(UserError, match="missing, empty or cut short"):
        log.read()


def test_a_line_is_plain_json_without_what_is_absent(log):
    log.append([written(4, "x")])
    assert json.loads(log.path.read_text()) == {"request": 4, "document": 4, "option": 0, "tokens": 9, "text": "x"}


def test_an_answer_is_of_one_kind():
    with pytest.raises(ValidationError, match="log_likelihood and greedy, or text"):
        AnswerLine(request=0, document=0, option=0, tokens=1, text="x", greedy=True)
