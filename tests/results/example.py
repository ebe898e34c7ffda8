"""A small valid record that the tests of results share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from decaybench.results.record import Record, data_hash, distance_bins, seal
from decaybench.results.statistics import cell_statistics


def cell(length: int, correct: Sequence[int], asked: Sequence[int], **more: Any) -> dict[str, Any]:
    """A cell whose statistics and distances agree with its counts. more: depth and kv, and other fields."""
    value, error, interval = cell_statistics("mean_accuracy", correct, asked)
    hits = [[place < right for place in range(all_)] for right, all_ in zip(correct, asked, strict=True)]
    coordinates = {name: more.pop(name) for name in ("depth", "kv") if name in more}
    depth = coordinates.get("depth")
    return {
        "name": f"capacity-length{length}" + (f"-depth{depth:g}" if depth is not None else ""),
        "variant": "capacity",
        "eval_length": length,
        "ratio": length / 64,
        "coordinates": coordinates,
        **more,
        "n": len(asked),
        "real_tokens": {"min": length - 2, "mean": length - 0.5, "max": length},
        "correct": list(correct),
        "asked": list(asked),
        "value": value,
        "standard_error": error,
        "interval": interval,
        "by_distance": distance_bins(_distances(asked), hits),
    }


def _distances(asked: Sequence[int]) -> list[list[int]]:
    starts = [sum(asked[:index]) for index in range(len(asked))]
    return [[3 + 5 * (start + place) for place in range(all_)] for start, all_ in zip(starts, asked, strict=True)]


def content(seed: int = 0) -> dict[str, Any]:
    """All of a record but its schema version and id."""
    spectrum = [
        {
            "position": position,
            "slowest": 512.5,
            "median": 30.0,
            "fastest": 1.5,
            "smallest_log_gap": 0.01,
            "median_log_gap": 0.5,
        }
        for position in (1, 64)
    ]
    return {
        "harness_version": 1,
        "task": {
            "name": "mqar",
            "version": 1,
            "config": {"vocab_size": 272, "fill": "random-safe", "examples": None},
            "evaluation": {"lengths": ["1x", "2x"], "samples": 4, "seed": 0},
            "metric": "mean_accuracy",
            "data_hash": data_hash([("capacity-length64", "a" * 64)]),
        },
        "model": {
            "cell": "mamba2+post",
            "architecture": "mamba2",
            "addons": ["post"],
            "config": {"d_model": 64, "post": {"taper": True}},
            "parameters": {"trainable": 50_000, "embedding": 17_408, "not_decayed": 300},
            "state_elements": [2048, 2048],
            "backend": "torch",
        },
        "training": {
            "config": {"steps": 1500, "seed": seed},
            "training_hash": "b" * 16,
            "seed": seed,
            "train_length": 64,
            "longest_trained": 64,
            "steps": 1500,
            "tokens": 6_144_000,
            "optimizer": "AdamW",
            "learning_rate": 0.01,
            "final_loss": 0.02,
            "final_accuracy": 0.99,
            "stages": [
                {"shape": {"length": 32, "kv": 2}, "batches": 300, "step": 120},
                {"shape": {"length": 64, "kv": 8}, "batches": 1200},
            ],
        },
        "seed": seed,
        "cells": [
            cell(64, [8, 8, 7, 8], [8, 8, 8, 8], kv=8, depth=0.0, realised_depth=0.01),
            cell(64, [8, 8, 8, 8], [8, 8, 8, 8], kv=8, depth=1.0),
            cell(128, [10, 12, 3, seed % 17], [16, 16, 16, 16], kv=16),
        ],
        "spectrum": {"layers": [{"layer": 0, "at_start": spectrum, "after": spectrum}]},
        "environment": {
            "decaybench": "0.1.0",
            "python": "3.11.7",
            "packages": {"torch": "2.6.0", "numpy": "2.0.0"},
            "platform": "Linux x86_64",
            "device": "cpu",
            "dtype": "float32",
            "threads": 2,
            "batch_tokens": 4096,
        },
        "cost": {
            "train_seconds": 180.25,
            "evaluation_seconds": 3.5,
            "evaluation_tokens_per_second": 30_000.0,
            "peak_memory_bytes": 500_000_000,
        },
        "comparable_to": None,
    }


def record(seed: int = 0) -> Record:
    """A small valid record."""
    return seal(content(seed))
