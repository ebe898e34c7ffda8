"""`bench compare`: of finished runs, of a leaderboard, and of runs that it makes."""

from __future__ import annotations

import json
from pathlib import Path

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
