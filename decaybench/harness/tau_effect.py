"""Does a learned tau matter? Accuracies with it, and with its differences taken away, on the same samples.

tau orders the sources, say; that it is of use is another question, which only the model without the order answers:
each tau of a group of tokens becomes the group's geometric mean, nothing else changes, and the same questions are
asked again. Differences are paired by sample, their intervals by drawing samples again (results/resampling.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from decaybench.core.hashing import key64
from decaybench.core.scoring import score
from decaybench.harness.config import RunConfig
from decaybench.harness.evaluation import predict
from decaybench.harness.precision_report import TauEffect
from decaybench.harness.training import matmul_dtype
from decaybench.models.language_model import LanguageModel
from decaybench.results.resampling import Float64, means
from decaybench.tasks.base import Cell, Task
from decaybench.tasks.mqar_noisy import MqarNoisy
from decaybench.tasks.registry import make_task


def tau_effects(config: RunConfig, model: LanguageModel, cell: Cell, samples: int) -> tuple[TauEffect, ...]:
    """What tau's differences between sources (mqar-noisy), and between all tokens, do to the answers of one cell.

    Empty for a model without a tau for each token.
    """
    if model.precision is None or model.precision.log_tau is None:
        return ()
    task = make_task(config.task)
    learned = _scores(config, model, task, cell, samples)
    found = []
    for what, ids in _groups(task).items():
        with _alike(model.precision.log_tau, ids):
            changed = _scores(config, model, task, cell, samples)
        (difference,) = means((changed - learned)[:, None], key64("tau effect", what, cell.name))
        found.append(TauEffect(what, cell.shape.length, samples, float(learned.mean()), difference))
    return tuple(found)


def _groups(task: Task[Any, Any, Any]) -> dict[str, range]:
    sources = len(task.config.reliabilities) if isinstance(task, MqarNoisy) else 0
    return {**({"sources": range(1, 1 + sources)} if sources > 1 else {}), "tokens": range(task.vocab_size)}


@contextmanager
def _alike(log_tau: torch.nn.Parameter, ids: range) -> Iterator[None]:
    kept = log_tau.detach().clone()
    with torch.no_grad():
        log_tau[ids.start : ids.stop] = kept[ids.start : ids.stop].mean()
    try:
        yield
    finally:
        with torch.no_grad():
            log_tau.copy_(kept)


def _scores(config: RunConfig, model: LanguageModel, task: Task[Any, Any, Any], cell: Cell, samples: int) -> Float64:
    """Of the first samples of a cell, [samples]."""
    device, size = model.embedding.weight.device.type, max(1, config.batch_tokens // cell.shape.length)
    found = []
    for first in range(0, samples, size):
        indices = np.arange(first, min(first + size, samples))
        batch = task.batch(cell.shape, "test", config.evaluation.seed, indices)
        with matmul_dtype(config.training.dtype, device):
            right = np.zeros(batch.labels.shape, dtype=np.int64)
            right[batch.asked] = predict(model, batch, device).first == batch.labels[batch.asked]
        found.append(score(task.metric, right.sum(1), batch.asked.sum(1)))
    return np.concatenate(found)
