"""The leaderboard only grows, whoever writes to it, and names the entry that is wrong."""

from __future__ import annotations

import io
import json
import multiprocessing
import random
import re
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock
from rich.console import Console

from decaybench.core.errors import RunError, UserError
from decaybench.results import leaderboard
from decaybench.results.leaderboard import add_record, check_leaderboard, columns, read_leaderboard, rows, table
from decaybench.results.record import Record, seal
from tests.results import example


def variation(**changes: Any) -> Record:
    """The example with changes, each `part__key=value` deep; `seed` sets every seed."""
    content = example.content(changes.pop("seed", 0))
    for path, value in changes.items():
        place = content
        *parts, last = path.split("__")
        for part in parts:
            place = place[part]
        place[last] = value
    return seal(content)


def add_ten(path: Path, first: int, together: Any) -> None:
    together.wait(timeout=60)
    for seed in range(first, first + 10):
        add_record(path, example.record(seed))


def test_a_record_is_added_once(tmp_path: Path) -> None:
    path = tmp_path / "results" / "leaderboard.json"
    assert add_record(path, example.record())
    before = path.read_bytes()
    assert not add_record(path, example.record())
    assert path.read_bytes() == before
    assert read_leaderboard(path) == [example.record()]
    check_leaderboard(path)


def test_the_file_is_the_same_whatever_the_order_of_adding(tmp_path: Path) -> None:
    records = [
        variation(seed=seed, model__cell=cell, task__name=task)
        for seed in (0, 1)
        for cell in ("mamba2", "mamba2+post")
        for task in ("mqar", "niah")
    ]
    files = []
    for attempt in range(2):
        path = tmp_path / f"{attempt}.json"
        for record in random.Random(attempt).sample(records, len(records)):
            add_record(path, record)
        files.append(path.read_bytes())
    assert files[0] == files[1]
    order = [(entry.task.name, entry.model.cell, entry.seed) for entry in read_leaderboard(tmp_path / "0.json")]
    assert order == sorted(order) and len(order) == 8


def test_two_processes_lose_nothing(tmp_path: Path) -> None:
    path = tmp_path / "leaderboard.json"
    context = multiprocessing.get_context("spawn")
    together = context.Barrier(2)
    workers = [context.Process(target=add_ten, args=(path, first, together)) for first in (0, 10)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(timeout=120)
        assert worker.exitcode == 0
    assert [entry.seed for entry in read_leaderboard(path)] == list(range(20))
    check_leaderboard(path)


def test_a_lock_that_stays_held_is_a_run_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leaderboard, "_PATIENCE", 0.1)
    path = tmp_path / "leaderboard.json"
    with FileLock(tmp_path / "leaderboard.lock"), pytest.raises(RunError, match=r"locked for 0\.1 s"):
        add_record(path, example.record())
    assert not path.exists()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "not valid JSON"),
        ("[]", "is not a leaderboard"),
        ('{"entries": 3}', "is not a leaderboard"),
        ('{"entries": []}', "schema_version None"),
        ('{"schema_version": 1, "entries": [3]}', "entry 0 (None) must hold a JSON object"),
        ('{"schema_version": 1, "entries": [{"record_id": "abc"}]}', "entry 0 (abc): "),
    ],
)
def test_a_damaged_file_is_never_overwritten(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "leaderboard.json"
    path.write_text(text)
    with pytest.raises(UserError, match=re.escape(words)) as error:
        add_record(path, example.record())
    assert "\n" not in str(error.value)
    assert path.read_text() == text


def test_a_record_with_wrong_counts_is_not_added(tmp_path: Path) -> None:
    content = json.loads(example.record().to_json())
    content["cells"][0]["value"] = 1.0
    with pytest.raises(UserError, match="value is"):
        add_record(tmp_path / "leaderboard.json", seal(content))
    assert not (tmp_path / "leaderboard.json").exists()


def test_the_check_names_the_entry(tmp_path: Path) -> None:
    path = tmp_path / "leaderboard.json"
    for seed in range(3):
        add_record(path, example.record(seed))
    good = json.loads(path.read_text())
    name = good["entries"][1]["record_id"][:12]

    def check(entry: dict[str, Any]) -> str:
        path.write_text(json.dumps({**good, "entries": [good["entries"][0], entry, good["entries"][2]]}))
        with pytest.raises(UserError) as error:
            check_leaderboard(path)
        return str(error.value)

    def changed() -> dict[str, Any]:
        entry: dict[str, Any] = json.loads(json.dumps(good["entries"][1]))
        return entry

    entry = changed()
    entry["cells"][0]["value"] = 1.0
    assert f"entry 1 ({name}): record_id is {name}" in check(entry)
    resealed = seal(entry)
    assert f"entry 1 ({resealed.record_id[:12]}): cell 'capacity-length64-depth0': value is" in check(resealed.plain())
    entry = changed()
    del entry["cost"]
    assert f"entry 1 ({name}): cost is missing" in check(entry)
    assert "the same record as entry 0" in check(good["entries"][0])


def test_the_summary_takes_the_median_over_seeds() -> None:
    records = [example.record(seed) for seed in (0, 4, 16)] + [variation(model__cell="mamba2")]
    assert columns(records) == ["1x", "2x"]
    plain, post = rows(records)
    assert (plain.model, plain.seeds, post.model, post.seeds) == ("mamba2", 1, "mamba2+post", 3)
    assert post.values["2x"] == pytest.approx((10 + 12 + 3 + 4) / 64)
    assert post.values["1x"] == pytest.approx((31 / 32 + 1) / 2), "a mean over depths"


def test_only_equal_runs_are_put_together() -> None:
    records = [
        example.record(),
        variation(seed=1, model__config={"d_model": 128}),
        variation(seed=2, training__config={"steps": 3000, "seed": 2}),
        variation(seed=3, task__config={"vocab_size": 512}),
    ]
    assert [row.seeds for row in rows(records)] == [1, 1, 1, 1]


def test_the_same_seed_twice_counts_once() -> None:
    records = [example.record(0), variation(cost__evaluation_seconds=9.0), example.record(16)]
    (row,) = rows(records)
    assert row.seeds == 2
    assert row.values["2x"] == pytest.approx((25 / 64 + 41 / 64) / 2)


def test_lengths_stand_where_the_ratio_is_not_known() -> None:
    content = example.content()
    del content["training"]
    content["checkpoint"] = {"source": "a/b", "sha256": "0" * 64}
    content["cells"] = [example.cell(length, [1], [1], ratio=None) for length in (512, 64)]
    records = [example.record(), seal(content)]
    assert columns(records) == ["1x", "2x", "64", "512"]
    assert [row.train_length for row in rows(records)] == [None, 64]


def test_the_table_shows_a_row_a_model() -> None:
    text = io.StringIO()
    Console(file=text, width=120).print(table([example.record(seed) for seed in range(3)]))
    (line,) = [line for line in text.getvalue().splitlines() if "mqar" in line]
    assert [entry.strip() for entry in line.split("│")[1:-1]] == [
        *("mqar v1", "mamba2+post", "64", "capacity", "0.984", "0.406", "3"),
    ]
