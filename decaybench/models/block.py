"""A block: norm -> mixer -> residual, then norm -> FFN -> residual where the model has one.

With `norm_branch` the FFN is the identity: x + norm(x), as in Zoology's blocks whose state mixer is one.
"""

from __future__ import annotations

import math

from decaybench.models.addons.bft import make_residual
from decaybench.models.branch import Branch, Context, DecayObserver, Mixer, Place
from decaybench.models.config import ModelConfig
from decaybench.models.ffn import Identity, make_ffn
from decaybench.models.module import LayerNorm, Module, RMSNorm
from decaybench.models.registry import get_architecture
from decaybench.models.residual import Stream
from decaybench.models.state import LayerState


class Block(Module):
    """Pre-norm residual block."""

    def __init__(self, config: ModelConfig, layer: int, backend: str) -> None:
        super().__init__()
        self.layer = layer
        shrink = math.sqrt(config.n_layers * (2 if config.ffn else 1))
        place = Place(config.d_model, layer, config.n_layers, shrink, config.post, backend)
        self.norm = make_norm(config)
        mixer_class = get_architecture(config.name).mixer_class()
        self.mixer: Mixer = mixer_class(config.mixer, place)
        self.ffn_norm = make_norm(config) if config.ffn or config.norm_branch else None
        self.ffn: Branch | None = make_ffn(config.ffn, place) if config.ffn else None
        if config.norm_branch:
            self.ffn = Identity()
        self.residual = make_residual(config.bft, place, self.mixer)

    def forward(self, stream: Stream, context: Context, state: LayerState | None) -> tuple[Stream, LayerState]:
        x = self.norm(stream.hidden)
        observer = self.residual.observer(stream, x, context, state.residual if state else None)
        watching = observer if context.decays is None else DecayObserver(observer, context.decays, self.layer)
        y, mixer_state = self.mixer(x, context, state.mixer if state else None, watching)
        stream = self.residual.update(stream, y, observer, self.mixer)
        y, ffn_state = None, None
        if self.ffn is not None and self.ffn_norm is not None:
            x = self.ffn_norm(stream.hidden)
            y, ffn_state = self.ffn(x, context, state.ffn if state else None, observer)
        stream = self.residual.predict(stream, y, observer, self.ffn_norm)
        return stream, LayerState(mixer_state, ffn_state, self.residual.state(observer))


def make_norm(config: ModelConfig, kind: str | None = None) -> RMSNorm | LayerNorm:
    """A norm d_model wide; kind: None for that of the model's blocks."""
    kinds: dict[str, type[RMSNorm] | type[LayerNorm]] = {"rmsnorm": RMSNorm, "layernorm": LayerNorm}
    return kinds[kind or config.norm](config.d_model, config.norm_eps)
