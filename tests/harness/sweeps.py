"""Sweeps as small as they can be, and what must be the same of a run wherever it was carried out."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import yaml

from decaybench.results.record import read_record

# As tests.command.TINY, in a sweep's words.
TINY: dict[str, Any] = {
    "task.train_length": 32,
    "evaluation": {"lengths": ["1x", "2x"], "samples": 8},
    "model.d_model": 16,
    "model.mixer": {"headdim": 8, "d_state": 8},
    "training": {"steps": 12, "batch_tokens": 128, "warmup": 2, "learning_rate": 0.01},
}


def write_sweep(path: Path, settings: dict[str, Any] | None = None, **content: Any) -> Path:
    """A sweep's file of MQAR with the tiny settings, and `settings` over them."""
    said = {"task": "mqar", "set": {**TINY, **(settings or {})}, **content}
    path.write_text(yaml.safe_dump(said, sort_keys=False))
    return path


def results(runs: Path) -> dict[str, Any]:
    """By run folder and evaluation, all of each record but where and when it was made."""
    return {
        str(path.parent.relative_to(runs)): read_record(path).model_dump(
            mode="json", exclude={"record_id", "environment", "cost"}
        )
        for path in sorted(runs.glob("*/evaluations/*/record.json"))
    }


def rows(folder: Path) -> list[dict[str, str]]:
    """A sweep's CSV."""
    with open(folder / "runs.csv", newline="") as file:
        return list(csv.DictReader(file))
