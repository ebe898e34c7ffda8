"""The main job itself: a small Mamba-2 with PoST, trained and asked as `bench niah --model mamba2 --post` does."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import decaybench
from decaybench.harness.verify import add_to_leaderboard
from decaybench.results.leaderboard import read_leaderboard
from decaybench.results.record import groups

README = (Path(__file__).resolve().parents[1] / "README.md").read_text(encoding="utf-8")


def test_the_readmes_python_is_the_readmes_command():
    from decaybench.harness.presets import configure

    (block,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    defined: dict[str, object] = {}
    exec(block.partition("record =")[0], defined)
    config = defined["config"]
    assert isinstance(config, decaybench.RunConfig)
    (command,) = configure("niah", flags={"model.name": "mamba2", "model.post": {}})
    assert config.training_hash == command.training_hash
    assert config.evaluation_hash == command.evaluation_hash


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_one_needle_is_found_at_the_training_length_and_the_record_holds(tmp_path):
    (config,) = decaybench.configure("niah", flags={"model.post": {}, "out": str(tmp_path / "runs")})
    record = decaybench.run(config)
    by_ratio = {group.ratio: group for group in groups(record)}
    assert list(by_ratio) == [1, 2, 4, 8]
    assert by_ratio[1].n == 1100
    assert by_ratio[1].value >= 0.95
    (run,) = (tmp_path / "runs").iterdir()
    assert [new for _, new in add_to_leaderboard(tmp_path / "board.json", [run])] == [True]
    assert read_leaderboard(tmp_path / "board.json") == [record]
