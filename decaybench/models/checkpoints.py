"""Checkpoints: a folder of safetensors files and a `facts.json`, written under another name and renamed.

facts.json holds the model's configuration, the seed of its initial values, whatever the writer adds (a training run's
step, say) and the sha256 of each file beside it, so a checkpoint cut short or changed is recognised. Nothing in a
checkpoint is ever executed.
"""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from decaybench.core.config import parse
from decaybench.core.errors import UserError
from decaybench.core.files import read_json, sync, writing
from decaybench.core.hashing import file_digest
from decaybench.models.config import ModelConfig
from decaybench.models.language_model import LanguageModel, build_model

FORMAT = 1
MODEL_FILE = "model.safetensors"
_FACTS = "facts.json"
_FILE_NAME = re.compile(r"\w[\w.-]{0,99}", re.ASCII)


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint on disk whose files are all there and unchanged. facts: what `facts.json` says."""

    folder: Path
    facts: dict[str, Any]

    @property
    def config(self) -> ModelConfig:
        """The model's configuration."""
        return parse(ModelConfig, self.facts["model"], f"{self.folder.name}/{_FACTS}: model")

    @property
    def sha256(self) -> str:
        """The hash of the weights file."""
        return str(self.facts["files"][MODEL_FILE])

    @property
    def train_length(self) -> int | None:
        """The training length that the writer states, tokens; None where it states none."""
        return self.facts.get("train_length")

    @property
    def longest_trained(self) -> int | None:
        """The longest sequence trained on, as the writer states, tokens; None where it states none."""
        return self.facts.get("longest_trained")

    @property
    def label_noise(self) -> float | None:
        """The share of training labels that were replaced, as the writer states; None where it states none."""
        return self.facts.get("label_noise")

    @property
    def state_passing(self) -> float | None:
        """The share of training sequences that started from another's state, as the writer states, or None."""
        return self.facts.get("state_passing")

    def tensors(self, file: str) -> dict[str, Tensor]:
        """The tensors of one file, on the CPU. Raises UserError on a damaged file."""
        try:
            return load_file(self.folder / file)
        except (OSError, SafetensorError) as error:
            raise UserError(f"checkpoint file {self.folder / file} can't be read: {error}") from None

    def model(self, *, device: str | torch.device = "cpu", backend: str = "torch") -> LanguageModel:
        """The model with these weights, in evaluation mode. Raises UserError where they don't fit its configuration."""
        config = self.config
        try:
            model = build_model(config, self.facts["seed"], backend=backend)
            model.load_state_dict(self.tensors(MODEL_FILE))
        except RuntimeError as error:
            raise UserError(f"checkpoint {self.folder} doesn't fit its configuration: {_one_line(error)}") from None
        return model.to(device).eval()


def write_checkpoint(
    folder: Path, model: LanguageModel, seed: int, facts: Mapping[str, Any], extra: Mapping[str, Mapping[str, Tensor]]
) -> Checkpoint:
    """Write `model` to `folder`, beside the tensors of `extra` (file name -> tensors) and `facts` (JSON-able).

    Either the whole folder appears or nothing: it is filled under another name, flushed, and renamed. A checkpoint of
    that name stays until the new one is whole. Raises RunError when the disk is full or can't be written.
    """
    temporary, replaced = folder.with_name(f".{folder.name}.writing"), folder.with_name(f".{folder.name}.replaced")
    with writing(folder):
        for what in ("writing", "replaced"):  # left by kills
            for left in folder.parent.glob(f".*.{what}"):
                shutil.rmtree(left, ignore_errors=True)
        temporary.mkdir(parents=True)
        try:
            content = _fill(temporary, model, seed, facts, extra)
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)
            raise
        if folder.exists():
            folder.rename(replaced)
        temporary.rename(folder)
        sync(folder.parent)
        shutil.rmtree(replaced, ignore_errors=True)
    return Checkpoint(folder, content)


def remove_checkpoint(folder: Path) -> None:
    """Remove a checkpoint, under another name first: a kill leaves no half of one. Raises RunError."""
    removed = folder.with_name(f".{folder.name}.replaced")
    with writing(folder):
        folder.rename(removed)
        shutil.rmtree(removed)


def read_checkpoint(folder: Path) -> Checkpoint:
    """The checkpoint in `folder`, after checking each file's hash. Raises UserError with one line on what is wrong."""
    path = folder / _FACTS
    if not path.exists():
        raise UserError(f"no checkpoint at {folder}: {_FACTS} is missing")
    facts = read_json(path)
    if not isinstance(facts, dict) or facts.get("format") != FORMAT:
        raise UserError(f"checkpoint {folder} is not of format {FORMAT}")
    files = facts.get("files")
    if not isinstance(files, dict) or MODEL_FILE not in files or not isinstance(facts.get("model"), dict):
        raise UserError(f"checkpoint {folder} is damaged: {_FACTS} names no {MODEL_FILE} or no model")
    if type(facts.get("seed")) is not int:
        raise UserError(f"checkpoint {folder} is damaged: {_FACTS} has no seed")
    for key in ("train_length", "longest_trained"):
        if facts.get(key) is not None and (type(facts[key]) is not int or facts[key] < 1):
            raise UserError(
                f"checkpoint {folder} is damaged: {_FACTS} has {key}={facts[key]!r}, not a number of tokens"
            )
    for key in ("label_noise", "state_passing"):
        share = facts.get(key)
        if share is not None and (type(share) not in (int, float) or not 0 <= share <= 1):
            raise UserError(f"checkpoint {folder} is damaged: {_FACTS} has {key}={share!r}, not a share")
    for name, sha256 in files.items():
        if not _FILE_NAME.fullmatch(name):  # never look outside the folder
            raise UserError(f"checkpoint {folder} is damaged: {name[:40]!r} is no file name")
        try:
            intact = file_digest(folder / name) == sha256
        except OSError as error:
            raise UserError(f"checkpoint {folder} is damaged: {name} can't be read ({error.strerror})") from None
        if not intact:
            raise UserError(f"checkpoint {folder} is damaged: {name} is cut short or changed")
    return Checkpoint(folder, facts)


def find_checkpoint(path: Path) -> Checkpoint:
    """The checkpoint that a user means by `path`: a checkpoint's folder, or a run's, whose newest one is taken."""
    try:
        if not path.is_dir():
            what = "it is a file, not a folder" if path.exists() else "there is no such folder"
            raise UserError(f"no checkpoint at {path}: {what}")
        if (path / _FACTS).exists():
            return read_checkpoint(path)
        for root in (path / "checkpoint", path):
            found = checkpoints_in(root)
            if found:
                return read_checkpoint(found[-1])
    except OSError as error:  # no permission, or a name that no file can have
        raise UserError(f"no checkpoint at {path}: {error.strerror}") from None
    raise UserError(f"no checkpoint at {path}: neither it nor its folder checkpoint/ holds a {_FACTS}")


def checkpoints_in(root: Path) -> list[Path]:
    """The checkpoint folders in `root`, oldest first (they are named step-<number>)."""
    if not root.is_dir():
        return []
    found = [folder for folder in root.iterdir() if folder.name.startswith("step-") and (folder / _FACTS).exists()]
    return sorted(found, key=lambda folder: folder.name)


def _fill(
    folder: Path, model: LanguageModel, seed: int, facts: Mapping[str, Any], extra: Mapping[str, Mapping[str, Tensor]]
) -> dict[str, Any]:
    files = {}
    for name, tensors in {MODEL_FILE: model.state_dict(), **extra}.items():
        _save({key: tensor.detach().contiguous() for key, tensor in tensors.items()}, folder / name)
        files[name] = file_digest(folder / name)
        sync(folder / name)
    content = {"format": FORMAT, "model": model.config.plain(), "seed": seed, **facts, "files": files}
    (folder / _FACTS).write_text(json.dumps(content, indent=1, allow_nan=False), encoding="utf-8")
    sync(folder / _FACTS)
    return content


def _save(tensors: dict[str, Tensor], path: Path) -> None:
    try:
        save_file(tensors, path)
    except SafetensorError as error:  # it hides the operating system's error in its text
        number = re.search(r"os error (\d+)", str(error))
        code = int(number[1]) if number else errno.EIO
        raise OSError(code, os.strerror(code)) from error


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:200]
