"""The model that a folder stands for: a checkpoint, a run's newest one, or the one elsewhere that a run evaluated.

And what figures call several of them.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from decaybench.core.errors import UserError
from decaybench.harness.config import RunConfig, read_run_config
from decaybench.harness.presets import run_config_of
from decaybench.models.checkpoints import Checkpoint, find_checkpoint
from decaybench.results.run_folder import RunFolder


def model_of(path: Path) -> tuple[Checkpoint, RunConfig | None]:
    """The checkpoint that `path` stands for, and the configuration of the run in it; None for a checkpoint alone.

    A run that only evaluated (`bench mqar --checkpoint …`) has no checkpoint of its own: its config.yaml names one.
    Raises UserError where there is no checkpoint, or where the one named isn't the one that was evaluated.
    """
    try:
        checkpoint = find_checkpoint(path)
    except UserError:
        with suppress(OSError):  # no permission: the first error says so
            if RunFolder(path).config_path.is_file():
                config = read_run_config(RunFolder(path))
                if config.checkpoint is not None:
                    return _evaluated(path, config.checkpoint), config
        raise
    return checkpoint, run_config_of(checkpoint)


def told_apart(names: Sequence[str], seeds: Sequence[int], paths: Sequence[Path]) -> list[str]:
    """The names of models; with the seed, or the end of the folder's name where that isn't enough, to tell equal ones
    apart.
    """
    seeded = [f"{name}, seed {seed}" for name, seed in zip(names, seeds, strict=True)]
    ended = [f"{name}, {path.resolve().name.rpartition('-')[2]}" for name, path in zip(names, paths, strict=True)]
    return [
        name if names.count(name) == 1 else seed if seeded.count(seed) == 1 else end
        for name, seed, end in zip(names, seeded, ended, strict=True)
    ]


def _evaluated(path: Path, named: str) -> Checkpoint:
    try:
        checkpoint = find_checkpoint(Path(named))
    except UserError as error:
        raise UserError(f"{path} holds evaluations only, and the model that it names is gone: {error}") from None
    # A run's folder ends in the hash of what it is of, unless someone gave it another name.
    said = re.search(r"-([0-9a-f]{12})$", path.resolve().name)
    if said and said[1] != checkpoint.sha256[:12]:
        raise UserError(
            f"{path} evaluated the weights {said[1]} of {named}, which holds {checkpoint.sha256[:12]} now: "
            f"give {named} for these, or evaluate it again"
        )
    return checkpoint
