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
    assert (plain.model, plain.seeds) == ("mamba2", {"1x": 1, "2x": 1})
    assert (post.model, post.seeds) == ("mamba2+post", {"1x": 3, "2x": 3})
    assert post.values["2x"] == pytest.approx((10 + 12 + 3 + 4) / 64)
    assert post.values["1x"] == pytest.approx((31 / 32 + 1) / 2), "a mean over depths"


def test_only_equal_runs_are_put_together() -> None:
    records = [
        example.record(),
        variation(seed=1, model__config={"d_model": 128}),
        variation(seed=2, training__config={"steps": 3000, "seed": 2}),
        variation(seed=3, task__config={"vocab_size": 512}),
        variation(seed=4, task__evaluation__capacity_ratio=4),
        variation(seed=5, task__evaluation__seed=1),
        variation(seed=6, environment__dtype="bfloat16"),
        variation(seed=7, harness_version=2),
        variation(seed=8, training__train_length=32),
        variation(seed=9, training__config__label_noise=0.4),
        variation(seed=10, training__config__label_noise=0.2),
        variation(seed=11, training__config__state_passing=0.5),
    ]
    assert [set(row.seeds.values()) for row in rows(records)] == [{1}] * len(records)


def test_other_lengths_samples_and_variants_are_the_same_experiment() -> None:
    records = [
        example.record(0),
        variation(seed=1, task__evaluation={"lengths": ["2x"], "samples": 9, "seed": 0, "variants": ["capacity"]}),
        variation(seed=2, training__config={"steps": 1500, "seed": 2}),
    ]
    (row,) = rows(records)
    assert row.seeds == {"1x": 3, "2x": 3}


def capacity(ratio: int, seed: int, accuracy: float, lengths: tuple[int, ...] = (64, 128)) -> Record:
    """A record of one capacity cell a length, with T / ratio pairs at T."""
    content = example.content(seed)
    content["task"]["evaluation"] |= {"capacity_ratio": ratio, "lengths": [f"{length // 64}x" for length in lengths]}
    content["cells"] = []
    for length in lengths:
        kv = length // ratio
        cell = example.cell(length, [round(accuracy * kv)] * 4, [kv] * 4, kv=kv)
        content["cells"].append({**cell, "name": f"capacity-length{length}-kv{kv}"})
    return seal(content)


def printed(records: list[Record], width: int = 200) -> tuple[list[list[str]], str]:
    """The table's lines of records, entry by entry, and all of its text."""
    text = io.StringIO()
    Console(file=text, width=width).print(table(records))
    lines = [line for line in text.getvalue().splitlines() if "mqar v" in line]
    return [[entry.strip() for entry in line.split("│")[1:-1]] for line in lines], text.getvalue()


def test_evaluations_of_another_difficulty_are_not_averaged() -> None:
    records = [capacity(8, 0, 1.0), capacity(4, 0, 0.5), capacity(4, 1, 0.25)]
    one, other = sorted(rows(records), key=lambda row: row.seeds["1x"])
    assert (one.values, one.seeds) == ({"1x": 1.0, "2x": 1.0}, {"1x": 1, "2x": 1})
    assert (other.values, other.seeds) == ({"1x": 0.375, "2x": 0.375}, {"1x": 2, "2x": 2})
    lines, _ = printed(records)
    assert sorted(line[4:6] for line in lines) == [
        ["evaluation.capacity_ratio=4", "0.375"],
        ["evaluation.capacity_ratio=8", "1.000"],
    ]


def test_a_seed_that_is_missing_at_a_length_is_not_counted_there() -> None:
    records = [capacity(8, 0, 1.0), capacity(8, 1, 0.5, lengths=(64,))]
    (row,) = rows(records)
    assert (row.values, row.seeds) == ({"1x": 0.75, "2x": 1.0}, {"1x": 2, "2x": 1})
    ((*_, seeds),), _ = printed(records)
    assert seeds == "1-2"


def test_the_same_cell_of_a_seed_counts_once_and_with_the_most_samples() -> None:
    """Two evaluations of one seed at 1x, one of them also at 2x: the mean over a column's cells is one over cells."""
    few = capacity(8, 0, 1.0, lengths=(64,))
    content = capacity(8, 0, 0.5).plain()
    content["task"]["evaluation"]["samples"] = 8
    content["cells"] = [
        {**example.cell(c["eval_length"], [c["correct"][0]] * 8, [c["asked"][0]] * 8, kv=4), "name": c["name"]}
        for c in content["cells"]
    ]
    many = seal({key: content[key] for key in content if key not in ("record_id", "schema_version")})
    for records in ([few, many], [many, few]):
        (row,) = rows(records)
        assert (row.values, row.seeds) == ({"1x": 0.5, "2x": 0.5}, {"1x": 1, "2x": 1})


def test_listed_pairs_of_one_length_have_a_column_each() -> None:
    content = example.content()
    content["cells"] = [
        {**example.cell(64, [right], [16], kv=kv, variant="listed"), "name": f"listed-{kv}"}
        for kv, right in ((16, 4), (4, 16), (8, 12))
    ] + [example.cell(128, [2], [16], kv=32, variant="listed")]
    made = seal(content)
    assert columns([made]) == ["1x kv=4", "1x kv=8", "1x kv=16", "2x"]
    (row,) = rows([made])
    assert row.values == {"1x kv=16": 0.25, "1x kv=4": 1.0, "1x kv=8": 0.75, "2x": 0.125}


def test_lengths_that_round_to_the_same_ratio_are_kept_apart() -> None:
    lengths = (2**20 + 1, 2**20, 2**20 + 2)
    content = example.content()
    content["training"] |= {"train_length": 2**20, "longest_trained": 2**20}
    content["cells"] = [
        example.cell(length, [index], [2], ratio=length / 2**20) for index, length in enumerate(lengths)
    ]
    made = seal(content)
    assert columns([made]) == ["1x", "1048577", "1048578"]
    (row,) = rows([made])
    assert row.values == {"1048577": 0.0, "1x": 0.5, "1048578": 1.0}


def test_the_table_says_where_training_ended_early() -> None:
    lines, text = printed([example.record(0), variation(seed=1, training__longest_trained=32)])
    assert [line[2] for line in lines] == ["64 (32)"]
    assert "in brackets: the longest sequence really trained on" in " ".join(text.split())
    lines, text = printed([example.record(0)])
    assert [line[2] for line in lines] == ["64"] and "brackets" not in text


def test_the_same_seed_twice_counts_once() -> None:
    records = [example.record(0), variation(cost__evaluation_seconds=9.0), example.record(16)]
    (row,) = rows(records)
    assert row.seeds == {"1x": 2, "2x": 2}
    assert row.values["2x"] == pytest.approx((25 / 64 + 41 / 64) / 2)


def test_lengths_stand_where_the_ratio_is_not_known() -> None:
    content = example.content()
    del content["training"]
    content["checkpoint"] = {"source": "a/b", "sha256": "0" * 64}
    content["cells"] = [example.cell(length, [1], [1], ratio=None) for length in (512, 64)]
    records = [example.record(), seal(content)]
    assert columns(records) == ["1x", "2x", "64", "512"]
    assert [row.train_length for row in rows(records)] == [None, 64]


def test_the_table_says_what_was_trained_on_wrong_labels() -> None:
    """Whether the same model without noise stands beside it or not; None is no noise, as where it isn't said."""
    alone = [variation(seed=seed, training__config__label_noise=0.4) for seed in (0, 1)]
    lines, _ = printed(alone)
    assert [(line[1], line[-1]) for line in lines] == [("mamba2+post, label noise 0.4", "2")]
    clean = [example.record(0), variation(seed=1, training__config__label_noise=None)]
    lines, _ = printed([*clean, *(variation(seed=seed, training__config__label_noise=0.4) for seed in (2, 3))])
    assert [(line[1], line[-1]) for line in lines] == [("mamba2+post", "2"), ("mamba2+post, label noise 0.4", "2")]


def test_the_table_says_which_sequences_started_from_anothers_state() -> None:
    passed = [variation(seed=seed, training__config__state_passing=0.5) for seed in (1, 2)]
    both = variation(seed=3, training__config={"state_passing": 0.5, "label_noise": 0.4})
    lines, _ = printed([example.record(0), *passed, both])
    assert [(line[1], line[-1]) for line in lines] == [
        ("mamba2+post", "1"),
        ("mamba2+post, state passing 0.5", "2"),
        ("mamba2+post, label noise 0.4, state passing 0.5", "1"),
    ]


def with_references(seed: int, bayes: float, **changes: Any) -> Record:
    """A record with rules without a model: at 1x two depths, at 2x one cell."""
    content = variation(seed=seed, **changes).plain()
    for cell, more in zip(content["cells"], (-0.1, 0.1, -0.2), strict=True):
        cell["references"] = {"bayes": bayes + more, "last": 0.5}
    return seal({key: content[key] for key in content if key not in ("record_id", "schema_version")})


def test_rules_without_a_model_have_a_row_each_where_the_samples_are_the_same() -> None:
    records = [with_references(0, 0.8), with_references(4, 0.8), with_references(0, 0.8, model__cell="mamba2")]
    (row, _) = rows(records)
    assert row.references == {
        "bayes": {"1x": pytest.approx(0.8), "2x": pytest.approx(0.6)},
        "last": {"1x": 0.5, "2x": 0.5},
    }
    lines, text = printed(records)
    assert [line[1] for line in lines] == ["mamba2", "mamba2+post", "(bayes)", "(last)"]
    assert lines[2] == ["mqar v1", "(bayes)", "64", "capacity", "0.800", "0.600", ""]
    assert "models in brackets: rules without a model, on the same samples" in " ".join(text.split())
    other = with_references(0, 0.7, task__config={"vocab_size": 512})
    assert [line[5:7] for line in printed([*records, other])[0] if line[1] == "(bayes)"] == [
        ["0.800", "0.600"],
        ["0.700", "0.500"],
    ]
    assert "brackets" not in printed([example.record()])[1]


def test_the_table_shows_a_row_a_model() -> None:
    lines, _ = printed([example.record(seed) for seed in range(3)], width=120)
    assert lines == [["mqar v1", "mamba2+post", "64", "capacity", "0.984", "0.406", "3"]]
