"""Folders of token shards for tests: small stories, prepared as `bench data prepare` does."""

from __future__ import annotations

import json
import random
from pathlib import Path

import numpy as np

from decaybench.harness.prepare import Wish, prepare
from decaybench.harness.progress import Progress

_WORDS = "a an the old small grey fox bear lamp river stone sees finds keeps loses under over beside and then".split()  # noqa: SIM905


def stories(count: int, seed: int = 0, longest: int = 120) -> list[str]:
    """Documents of 1 to `longest` words."""
    draws = random.Random(seed)
    return [" ".join(draws.choices(_WORDS, k=draws.randint(1, longest))) + "." for _ in range(count)]


def prepared(folder: Path, documents: list[str], validation: float = 0.3, tokenizer: str = "bytes") -> Path:
    """The folder, made of these documents with the byte tokenizer, or another."""
    source = folder.with_suffix(".jsonl")
    source.write_text("".join(json.dumps({"text": text}) + "\n" for text in documents))
    prepare(Wish([str(source)], folder, tokenizer, validation=validation, workers=1), progress=Progress(quiet=True))
    return folder


def stream(folder: Path, split: str) -> np.ndarray:
    """All ids of a split, read without our reader."""
    files = sorted((folder / split).glob("*.bin"))
    return np.concatenate([np.fromfile(file, dtype="<u2") for file in files]).astype(np.int64)
