"""A record names itself, checks itself against its counts, and is refused in one line where anything is wrong."""

from __future__ import annotations

import copy
import io
import json
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest
from rich.console import Console

from decaybench.core.errors import UserError
from decaybench.results import record as module
from decaybench.results.record import (
    CheckpointInfo,
    Record,
    bits_per_byte,
    check_counts,
    data_hash,
    distance_bins,
    groups,
    json_schema,
    parse_record,
    perplexity,
    position_bin,
    read_record,
    record_hash,
    seal,
)
from decaybench.results.statistics import cell_statistics, wilson
from tests.results import example

Path_ = tuple[str | int, ...]


def leaves(content: Any, path: Path_ = ()) -> Iterator[Path_]:
    """The path of every plain value in a JSON structure."""
    if isinstance(content, dict | list):
        pairs = content.items() if isinstance(content, dict) else enumerate(content)
        for key, part in pairs:
            yield from leaves(part, (*path, key))
    else:
        yield path


def replaced(content: dict[str, Any], path: Path_, change: Any) -> dict[str, Any]:
    """A deep copy in which the value at `path` went through `change`."""
    changed = copy.deepcopy(content)
    place: Any = changed
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = change(place[path[-1]])
    return changed


def different(value: Any) -> Any:
    if isinstance(value, bool) or value is None:
        return "something else"
    return value + 1 if isinstance(value, int) else 0.75 * value + 1e-4 if isinstance(value, float) else value + "x"


def one_line(error: pytest.ExceptionInfo[UserError]) -> str:
    message = str(error.value)
    assert "\n" not in message
    return message


def test_the_file_gives_the_record_back(tmp_path: Path) -> None:
    record = example.record()
    path = tmp_path / "record.json"
    path.write_text(record.to_json())
    assert read_record(path) == record
    check_counts(read_record(path))


def test_the_id_is_the_hash_of_the_rest_of_the_file() -> None:
    content = json.loads(example.record().to_json())
    assert content["record_id"] == record_hash(content)
    assert record_hash(content) == record_hash(dict(reversed(content.items())))


def test_the_id_changes_with_any_value() -> None:
    content = json.loads(example.record().to_json())
    paths = [path for path in leaves(content) if path != ("record_id",)]
    assert len(paths) > 100
    hashes = {record_hash(replaced(content, path, different)) for path in paths}
    assert len(hashes) == len(paths)
    assert content["record_id"] not in hashes


def test_a_file_with_any_changed_value_is_refused() -> None:
    content = json.loads(example.record().to_json())
    for path in leaves(content):
        with pytest.raises(UserError) as error:
            parse_record(replaced(content, path, different), "record.json")
        assert one_line(error).startswith("record.json")


def test_what_is_unknown_is_absent_and_comparable_to_is_null() -> None:
    content = json.loads(example.record().to_json())
    assert "checkpoint" not in content and "git_revision" not in content["environment"]
    assert "realised_depth" not in content["cells"][2] and "step" not in content["training"]["stages"][1]
    assert content["comparable_to"] is None
    assert content["task"]["config"]["examples"] is None, "a configuration is kept as it is, nulls included"


def test_counts_stand_on_one_line() -> None:
    assert re.search(r'^ +"correct": \[8, 8, 7, 8\]', example.record().to_json(), re.MULTILINE)


def test_a_truncated_file_is_a_user_error(tmp_path: Path) -> None:
    text = example.record().to_json().encode()
    path = tmp_path / "record.json"
    for size in range(0, len(text) - 2, 50):
        path.write_bytes(text[:size])
        with pytest.raises(UserError) as error:
            read_record(path)
        assert str(path) in one_line(error)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (b"[]", "must hold a JSON object"),
        (b"\xff\xfe\x00", "not valid JSON"),
        (b'{"seed": NaN}', "NaN is not a JSON number"),
        (b"[" * 100_000, "not valid JSON"),
        (b"{}", "is missing"),
        (b'{"schema_version": 2}', "has schema_version 2; this decaybench reads 1"),
    ],
)
def test_what_is_not_a_record_is_a_user_error(tmp_path: Path, text: bytes, words: str) -> None:
    path = tmp_path / "record.json"
    path.write_bytes(text)
    with pytest.raises(UserError, match=re.escape(words)) as error:
        read_record(path)
    one_line(error)


def test_a_missing_file_is_a_user_error(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"can't read .*none.json: No such file"):
        read_record(tmp_path / "none.json")


@pytest.mark.parametrize(
    ("path", "value", "words"),
    [
        (("training",), None, "exactly one of training and checkpoint"),
        (("checkpoint",), {"source": "x", "sha256": "0" * 64}, "exactly one of training and checkpoint"),
        (("cells",), [], "cells"),
        (("cells", 1, "name"), "capacity-length64-depth0", "two cells have the name 'capacity-length64-depth0'"),
        (("cells", 0, "interval"), [0.5, float("inf")], "cells.0.interval.1"),
        (("training", "final_loss"), float("nan"), "training.final_loss"),
        (("spectrum", "layers", 0, "after", 0, "slowest"), float("inf"), "slowest"),
        (("model", "config"), {"alpha": float("nan")}, "model.config"),
        (("task", "metric"), "all_corect", "did you mean 'all_correct'"),
        (("cost", "peak_memory_bytes"), -1, "cost.peak_memory_bytes=-1"),
        (("cells", 0, "coordinates", "kv"), float("inf"), "cells.0.coordinates.kv"),
        (("cells", 0, "coordinates", "kv"), "8", "cells.0.coordinates.kv"),
        (("cells", 0, "n"), 5, "n is 5, but correct has 4 counts and asked 4"),
        (("cells", 0, "correct"), [8, 8, 8], "n is 4, but correct has 3 counts"),
        (("cells", 0, "correct"), [8, 8, 9, 8], "0 <= correct <= asked"),
        (("cells", 0, "correct"), [8, 8, -1, 8], "cells.0.correct.2=-1"),
        (("cells", 0, "asked"), [8, 8, 0, 8], "asked >= 1"),
    ],
)
def test_what_is_not_a_record_is_not_sealed(path: Path_, value: Any, words: str) -> None:
    content = {"checkpoint": None, **example.content()}
    with pytest.raises(UserError, match=re.escape(words)) as error:
        seal(replaced(content, path, lambda _: value))
    one_line(error)


def test_a_checkpoint_keeps_no_private_path() -> None:
    sha = "0" * 64
    assert CheckpointInfo(source="/home/me/secret/runs/mqar/checkpoint", sha256=sha).source == "mqar/checkpoint"
    assert CheckpointInfo(source="C:\\Users\\me\\a\\b", sha256=sha).source == "a/b"
    assert CheckpointInfo(source="state-spaces/mamba2-130m", sha256=sha).source == "state-spaces/mamba2-130m"


@pytest.mark.parametrize(
    ("path", "change", "words"),
    [
        (("value",), lambda x: x + 1e-6, "value is"),
        (("standard_error",), lambda x: x + 1e-6, "standard_error is"),
        (("interval", 0), lambda x: x - 1e-6, "interval.0 is"),
        (("interval", 1), lambda x: x * 0.999, "interval.1 is"),
        (("correct", 2), lambda x: x + 1, "value is"),
        (("by_distance", 0, "correct"), lambda x: x - 1, "by_distance has 30 correct, but the samples have 31"),
        (("by_distance", 0, "asked"), lambda x: x + 1, "by_distance has 33 asked"),
        (("by_distance", 0, "high"), lambda x: x + 1, "by_distance from 2 goes to 5"),
        (("by_distance", 0, "low"), lambda x: 3, "rising powers of two"),
        (("by_distance",), lambda x: x[::-1], "rising powers of two"),
        (("by_distance", 0, "samples"), lambda x: x + 1, "by_distance from 2 has 2 samples of 4, with 1 questions"),
        (("ratio",), lambda x: 2.0, "ratio is 2.0"),
        (("ratio",), lambda x: None, "ratio is None, but 64 / 64 tokens is not"),
        (("real_tokens", "mean"), lambda x: 1000.0, "real_tokens"),
    ],
)
def test_a_cell_that_its_counts_do_not_give_is_found(path: Path_, change: Any, words: str) -> None:
    content = json.loads(example.record().to_json())
    forged = seal(replaced(content, ("cells", 0, *path), change))
    with pytest.raises(UserError, match=f"cell 'capacity-length64-depth0': .*{re.escape(words)}") as error:
        check_counts(forged)
    one_line(error)


def test_rounding_in_the_last_digits_is_no_fault() -> None:
    content = json.loads(example.record().to_json())
    check_counts(seal(replaced(content, ("cells", 0, "value"), lambda x: x * (1 + 1e-12))))


def test_distances_are_counted_by_octave() -> None:
    distances = [(1, 2, 3, 4), (7, 8, 1000), (3, 2, 8, 9)]
    hits = [(True, False, True, True), (True, False, True), (False, False, True, True)]
    bins = distance_bins(distances, hits)
    assert [(part.low, part.high, part.samples, part.asked, part.correct) for part in bins] == [
        (1, 2, 1, 1, 1),
        (2, 4, 2, 4, 1),
        (4, 8, 2, 2, 2),
        (8, 16, 2, 3, 2),
        (512, 1024, 1, 1, 1),
    ]
    assert distance_bins([(), ()], [(True,), (False,)]) == (), "a task without distances"


def test_a_bins_interval_counts_samples() -> None:
    """Forty questions of four samples: were they the same question four times, n would be four."""
    (part,) = distance_bins([(2,) * 10] * 4, [(True,) * 10] * 3 + [(False,) * 10])
    assert (part.samples, part.asked, part.correct) == (4, 40, 30)
    assert part.share_interval() == wilson(0.75, 4)


def test_the_data_hash_depends_on_names_contents_and_order() -> None:
    one, two = ("a", "0" * 64), ("b", "1" * 64)
    hashes = {data_hash(cells) for cells in ([one, two], [two, one], [one], [("a", "1" * 64), two], [])}
    assert len(hashes) == 5


def test_groups_are_means_over_depth() -> None:
    record = example.record()
    first, second = groups(record)
    assert (first.eval_length, first.n, second.eval_length, second.n) == (64, 8, 128, 4)
    assert first.value == pytest.approx((record.cells[0].value + record.cells[1].value) / 2)
    assert (first.coordinates, second.coordinates) == ({"kv": 8}, {"kv": 16})
    assert (first.value, first.interval) == cell_statistics("mean_accuracy", [8, 8, 7, 8] + [8] * 4, [8] * 8)[::2]


def test_groups_keep_apart_whatever_is_not_depth() -> None:
    content = example.content()
    kinds = [{"kv": 8, "depth": 0.0}, {"kv": 8, "depth": 1.0}, {"kv": 4, "depth": 0.0}, {"kv": 8, "hay": 0.5}]
    content["cells"] = [
        {**example.cell(64, [1], [1]), "name": f"cell{index}", "coordinates": kind} for index, kind in enumerate(kinds)
    ]
    found = groups(seal(content))
    assert [(group.coordinates, group.n) for group in found] == [
        ({"kv": 8}, 2),
        ({"kv": 4}, 1),
        ({"kv": 8, "hay": 0.5}, 1),
    ]
    text = io.StringIO()
    Console(file=text, width=100).print(seal(content))
    lines = [
        [entry.strip() for entry in line.split("│")[1:-1]] for line in text.getvalue().splitlines() if "1x" in line
    ]
    assert [line[3:5] for line in lines] == [["8", ""], ["4", ""], ["8", "0.5"]]


def test_coordinates_keep_their_kind_of_number() -> None:
    text = example.record().to_json()
    assert '"coordinates": {"depth": 0.0, "kv": 8}' in text
    kept = parse_record(json.loads(text), "record").cells[0].coordinates
    assert [type(value) for value in kept.values()] == [float, int]


def origin(**claims: Any) -> Record:
    """The example as the record of a checkpoint that states `claims`."""
    content = example.content()
    del content["training"]
    return seal({**content, "checkpoint": {"source": "a/b", "sha256": "0" * 64, **claims}})


def test_ratios_are_to_the_training_length_that_the_record_knows() -> None:
    check_counts(origin(train_length=64))
    with pytest.raises(UserError, match=r"ratio is 1.0, but 64 / 128 tokens is not"):
        check_counts(origin(train_length=128))
    with pytest.raises(UserError, match=r"ratio is 1.0, but no training length is known"):
        check_counts(origin())
    assert [origin(**claims).train_length for claims in ({}, {"train_length": 64})] == [None, 64]
    assert example.record().train_length == 64


def test_the_caption_says_where_training_ended_early() -> None:
    content = example.content()
    content["training"]["longest_trained"] = 32
    for short in (seal(content), origin(train_length=64, longest_trained=32)):
        assert short.longest_trained == 32
        text = io.StringIO()
        Console(file=text, width=200).print(short)
        for shown in (text.getvalue(), short._repr_html_()):
            assert "trained on at most 32 tokens, so 1x (64) is beyond training already" in shown
    for whole in (example.record(), origin(train_length=64), origin()):
        assert "trained on at most" not in whole._repr_html_()


def test_a_terminal_and_a_notebook_show_the_values() -> None:
    record = example.record()
    text = io.StringIO()
    Console(file=text, width=100).print(record)
    for shown in (text.getvalue(), record._repr_html_()):
        assert "mamba2+post" in shown and "capacity" in shown and "0.984" in shown and record.record_id[:12] in shown
    assert "&lt;b&gt;" in seal(replaced(example.content(), ("model", "cell"), lambda _: "<b>"))._repr_html_()


def test_rules_without_a_model_stand_beside_the_accuracy() -> None:
    content = example.content()
    for cell, bayes in zip(content["cells"], (0.9, 0.8, 0.7), strict=True):
        cell["references"] = {"bayes": bayes, "majority": 0.6, "last": 0.5}
    record = seal(content)
    assert [group.references for group in groups(record)] == [
        {"bayes": pytest.approx(0.85), "majority": 0.6, "last": 0.5},
        {"bayes": 0.7, "majority": 0.6, "last": 0.5},
    ]
    text = io.StringIO()
    Console(file=text, width=160).print(record)
    (line,) = [line for line in text.getvalue().splitlines() if "2x" in line]
    shown = [entry.strip() for entry in line.split("│")[1:-1]]
    assert shown[-4:] == ["0.700", "0.600", "0.500", "4"]
    for page in (text.getvalue(), record._repr_html_()):
        assert "bayes" in page and "majority takes the most frequent value" in " ".join(page.split())
    assert "bayes" not in example.record()._repr_html_()
    assert [group.references for group in groups(example.record())] == [{}, {}]
    assert parse_record(json.loads(record.to_json()), "record") == record
    for wrong in (1.5, -0.1, "high", None):
        with pytest.raises(UserError, match=r"cells\.0\.references\.bayes"):
            seal(replaced(content, ("cells", 0, "references", "bayes"), lambda _, wrong=wrong: wrong))


def test_a_record_without_rules_is_the_record_it_was() -> None:
    """The id of the example before there were references: a field that is absent changes no hash."""
    assert all("references" not in cell for cell in example.record().plain()["cells"])
    assert example.record().record_id.startswith("40c09104bdbaf022")


def test_the_title_says_what_was_trained_on_wrong_labels() -> None:
    content = example.content()
    content["training"]["config"]["label_noise"] = 0.4
    assert "mamba2+post, seed 0, trained with label noise 0.4" in seal(content)._repr_html_()
    content["training"]["config"]["label_noise"] = None
    assert "noise" not in seal(content)._repr_html_() and "noise" not in origin()._repr_html_()


def test_the_committed_schema_is_up_to_date() -> None:
    committed = Path(module.__file__).with_name("record.schema.json")
    assert json.loads(committed.read_text()) == json_schema(), (
        f"make it anew: python -m decaybench.results.record > {committed}"
    )


def test_the_schema_describes_the_file() -> None:
    schema = json_schema()
    jsonschema.Draft202012Validator.check_schema(schema)
    validator = jsonschema.Draft202012Validator(schema)
    content = json.loads(example.record().to_json())
    validator.validate(content)
    for broken in (
        {**content, "extra": 1},
        {**content, "checkpoint": None},
        {key: content[key] for key in content if key != "comparable_to"},
        replaced(content, ("cells", 0, "realised_depth"), lambda _: None),
    ):
        assert not validator.is_valid(broken)


def test_every_field_is_described() -> None:
    schema = json_schema()
    for name, kind in {"Record": schema, **schema["$defs"]}.items():
        for key, field in kind["properties"].items():
            assert field.get("description"), f"{name}.{key}"


def test_a_record_cannot_be_changed() -> None:
    record: Record = example.record()
    with pytest.raises(ValueError, match="frozen"):
        record.seed = 3  # type: ignore[misc]


def test_position_bins_double_and_include_their_last() -> None:
    expected = {1: 1, 2: 2, 3: 4, 4: 4, 5: 8, 8: 8, 9: 16, 1024: 1024, 1025: 2048, 2**31: 2**31}
    assert {position: position_bin(position) for position in expected} == expected


def test_bits_by_byte_is_a_ratio_of_sums() -> None:
    likely, size = [-math.log(2) * bits for bits in (8, 40, 0)], [1, 5, 3]
    ratio, error = bits_per_byte(likely, size)
    assert ratio == pytest.approx(48 / 9)
    residues = [8 - ratio, 40 - 5 * ratio, -3 * ratio]
    assert error == pytest.approx(math.sqrt(sum(r * r for r in residues) / 2 / 3) / 3)
    assert bits_per_byte([-7.0], [2]) == (pytest.approx(3.5 / math.log(2)), None), "nothing is known of its spread"
    assert bits_per_byte([-1.0] * 9, [4] * 9)[1] == pytest.approx(0.0, abs=1e-12)


def test_the_error_of_bits_by_byte_is_the_spread_that_is_seen() -> None:
    draws = np.random.default_rng(0)
    found = []
    for _ in range(400):
        size = draws.integers(50, 150, 40)
        bits = 2 * size + draws.normal(0, 20, 40)
        found.append(bits_per_byte(list(-math.log(2) * bits), size.tolist()))
    ratios, errors = np.array(found).T
    assert ratios.mean() == pytest.approx(2, abs=0.01)
    assert errors.mean() == pytest.approx(ratios.std(), rel=0.15)


def test_perplexity_is_that_of_a_whole_answer() -> None:
    assert perplexity([-2.0, -4.0]) == pytest.approx(math.exp(3))
    assert perplexity([0.0]) == 1.0 and perplexity([-1e6]) is None
