"""`bench compare`: of finished runs, of a leaderboard, and of runs that it makes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from decaybench.core.errors import UserError
from decaybench.harness.equal_state import counted, sized_state
from decaybench.harness.model_info import state_elements
from decaybench.harness.presets import configure
from decaybench.models.config import ModelConfig
from decaybench.models.language_model import build_model
from tests.command import TINY, bench

SETTINGS = TINY[TINY.index("--set") :]


def compared(*words: str) -> list[tuple[str, str, list[int]]]:
    result = bench("compare", *words, "--json", "--quiet")
    assert result.code == 0, result.err
    return [(one["other"], one["base"], one["seeds"]) for one in json.loads(result.out)["comparisons"]]


def refused(*words: str) -> str:
    result = bench("compare", *words, "--quiet")
    assert result.code == 2 and result.out == "" and result.err.count("\n") == 1
    return result.err


def test_runs_that_are_missing_are_made_once(here: Path) -> None:
    words = ("--task", "mqar", "--model", "mamba2", "--addon", "post", "--seeds", "0,1", *SETTINGS)
    sizes = ("--set", "task.train_length=32", "--set", "evaluation.samples=8", "--set", "evaluation.lengths=[1x,2x]")
    assert compared(*words, *sizes) == [("mamba2+post", "mamba2", [0, 1])]
    records = sorted(here.glob("runs/*/evaluations/*/record.json"))
    written = [path.stat().st_mtime_ns for path in records]
    assert len(records) == 4
    assert compared(*words, *sizes) == [("mamba2+post", "mamba2", [0, 1])]
    assert [path.stat().st_mtime_ns for path in records] == written

    folders = [str(path.parents[2]) for path in records]
    assert compared(*folders) == [("mamba2+post", "mamba2", [0, 1])]
    assert compared(*folders, "--seeds", "1") == [("mamba2+post", "mamba2", [1])]
    assert "--seeds: no record has seed 2; here are 0, 1" in refused(*folders, "--seeds", "1,2")
    assert bench("leaderboard", "add", *folders).code == 0
    assert compared("--task", "mqar", "--model", "mamba2") == [("mamba2+post", "mamba2", [0, 1])]
    shown = bench("compare", "--distance")
    assert "seeds 0, 1: too few to show anything" in shown.out and "parameters x" in shown.out

    assert "unknown task of the leaderboard 'mqr'; did you mean 'mqar'?" in refused("--task", "mqr")
    assert "unknown model of the leaderboard 'gla'" in refused("--model", "gla")
    assert "unknown model 'mamba2+pots'; did you mean 'mamba2+post'?" in refused("--base", "mamba2+pots")
    assert "nothing to compare" in refused(folders[0])


def test_wrong_input_is_refused(here: Path) -> None:
    assert "unknown add-on 'pots'; did you mean 'post'?" in refused("--addon", "pots")
    assert "'x' is not a whole number" in refused("--addon", "post", "--seeds", "0,x")
    assert "no run at nowhere" in refused("nowhere")
    assert "results/leaderboard.json" in refused()


SIZES = ("--set", "task.train_length=32", "--set", "evaluation.samples=8", "--set", "evaluation.lengths=[1x,2x]")


def test_a_setting_is_compared_with_none_by_one_command(here: Path) -> None:
    """It makes both runs; from their folders, with those of an add-on, one table has them all."""
    words = ("--seeds", "0,1", *SETTINGS, *SIZES)
    passed = ("mamba2, state_passing=0.5", "mamba2", [0, 1])
    assert compared("--vary", "training.state_passing=0.5", *words) == [passed]
    folders = [str(path) for path in here.glob("runs/*")]
    assert len(folders) == 4
    assert compared(*folders, "--vary", "training.state_passing") == [passed]
    assert compared("--addon", "post", *words) == [("mamba2+post", "mamba2", [0, 1])]
    folders = sorted(str(path) for path in here.glob("runs/*"))
    every = ("compare", *folders, "--base", "mamba2", "--vary", "training.state_passing", "--summary")
    shown = bench(*every, "--markdown")
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in shown.out.splitlines() if line[:1] == "|"]
    assert {row[1] for row in rows[2:]} == {"mamba2", "mamba2+post", "mamba2, state_passing=0.5"}
    table = bench(*every)
    assert table.code == 0 and "state_passing=0.5" in table.out and table.out.count("mamba2+post") == 2

    (here / "runs" / "unfinished").mkdir()
    (here / "runs" / "unfinished" / "config.yaml").write_text("")
    shown = bench("compare", *folders, "runs/unfinished")
    assert shown.code == 0 and "unfinished left out: it has no finished evaluation" in shown.out
    assert "no finished evaluation" in refused("runs/unfinished")
    assert "no run at runs/nothing" in refused(*folders, "runs/nothing")


def test_the_base_is_sized_so_that_states_are_equal(here: Path) -> None:
    words = ("--addon", "bft", "--equal", "state", "--seeds", "0", *SETTINGS, *SIZES)
    result = bench("compare", *words)
    assert result.code == 0
    assert "mamba2+bft, d_state=8 against mamba2, d_state=10; seeds 0" in result.out
    assert "mamba2 has model.mixer.d_state=10, not 8" in result.out and "numbers)" in result.out
    post = bench("compare", "--addon", "post", *words[2:])
    assert "the states are equal already: " in post.out and "mamba2+post against mamba2; seeds 0" in post.out


def model(name: str, **addons: Any) -> ModelConfig:
    flags = {"model.name": name, **{f"model.{addon}": options for addon, options in addons.items()}}
    return configure("mqar", flags=flags)[0].model


@pytest.mark.parametrize("name", ["mamba2", "rwkv7", "gated_deltanet", "gla", "retnet"])
def test_no_other_size_brings_a_state_nearer(name: str) -> None:
    """Among all that can be built, each counted from a real cache."""
    base, other = model(name), model(name, bft={})
    found = sized_state(base, other)
    key = found.key.rpartition(".")[2]
    usual = getattr(base.mixer, key)
    steps = [usual * factor / 32 for factor in range(8, 65)] if isinstance(usual, float) else range(1, 2 * usual + 1)
    known: dict[float, int] = {}
    for value in steps:
        try:
            sized = configure("mqar", flags={"model.name": name, found.key: value})[0].model
        except UserError:
            continue
        known[value] = sum(state_elements(build_model(sized), 3))
    wanted = sum(state_elements(build_model(other), 3))
    assert found.wanted == wanted == counted(other) and known[found.value] == found.state
    assert abs(found.state - wanted) == min(abs(count - wanted) for count in known.values())
    assert found.usual_state == known[usual] < wanted
    assert sized_state(base, model(name, post={})).said(name, "it").startswith("the states are equal already")


def test_what_equal_and_vary_cant_do_is_refused(here: Path) -> None:
    assert "attention names no size that its state grows with" in refused(
        "--addon", "bft", "--model", "attention", "--equal", "state"
    )
    assert "unknown --equal 'sate'; did you mean 'state'?" in refused("--addon", "bft", "--equal", "sate")
    assert "makes its runs itself: leave out --base" in refused("--addon", "bft", "--base", "mamba2")
    assert "makes its runs itself: leave out --equal" in refused(
        "--vary", "training.state_passing=1", "--equal", "state"
    )
    assert "one treatment" in refused("--addon", "bft", "--vary", "training.state_passing=1")
    several = ("--vary", "training.state_passing=1", "--vary", "training.state_passing_after")
    assert "--vary training.state_passing_after: beside others with a value it needs one too" in refused(*several)
    assert "the run without it has that too" in refused("--vary", "training.state_passing=0")
    assert "training.state_pasing" in refused("--vary", "training.state_pasing=1")
    assert not list(here.iterdir())


def test_a_damaged_record_is_no_unfinished_run(here: Path) -> None:
    for name in ("one", "two"):
        (here / name / "evaluations" / "abc").mkdir(parents=True)
        (here / name / "config.yaml").write_text("")
        (here / name / "evaluations" / "abc" / "record.json").write_text("{")
    assert "one/evaluations/abc/record.json" in refused("one", "two")
