"""What a record says of a model, from the model itself: parameters counted, its state counted from a real cache."""

from __future__ import annotations

import torch

from decaybench.models.language_model import LanguageModel
from decaybench.models.module import Decayed, treatments
from decaybench.results.record import ModelInfo, ParameterCounts


def model_info(model: LanguageModel, length: int, decayed: Decayed | None = None) -> ModelInfo:
    """A model's part of a record; its state is counted after `length` tokens. decayed: as in `treatments`."""
    config = model.config
    return ModelInfo(
        cell=config.cell,
        architecture=config.name,
        addons=config.addons,
        config=config.plain(),
        parameters=parameter_counts(model, decayed),
        state_elements=state_elements(model, length),
        backend=model.backend,
    )


def parameter_counts(model: LanguageModel, decayed: Decayed | None = None) -> ParameterCounts:
    """The trainable parameters: in all, of embeddings and an untied head, and without weight decay."""
    sizes = {name: value.numel() for name, value in model.named_parameters() if value.requires_grad}
    treated = treatments(model, decayed)
    return ParameterCounts(
        trainable=sum(sizes.values()),
        embedding=sum(size for name, size in sizes.items() if name.startswith(("embedding.", "head."))),
        not_decayed=sum(size for name, size in sizes.items() if not treated[name].decays),
    )


@torch.no_grad()
def state_elements(model: LanguageModel, length: int) -> tuple[int, ...]:
    """Numbers in each layer's state after `length` tokens."""
    tokens = torch.zeros(1, length, dtype=torch.long, device=model.embedding.weight.device)
    state = model.prefill(tokens).state
    assert state is not None
    return state.elements()
