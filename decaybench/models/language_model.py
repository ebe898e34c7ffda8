"""A language model around any mixer: embedding -> blocks -> norm -> head.

One definition serves training, prefill and decoding: `forward` over the tokens given, from the state given. Padding,
packing and caches are told by `positions` alone (core.positions); a row with padding anywhere is compacted at the
entrance and put back at the exit.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from decaybench.core.names import unknown
from decaybench.core.positions import Layout, check_positions, compaction
from decaybench.models.addons.bft import InitialPrecision
from decaybench.models.block import Block, make_norm
from decaybench.models.branch import Context, LayerTrace
from decaybench.models.config import ModelConfig
from decaybench.models.module import Embedding, Linear, Module, initialise
from decaybench.models.ops.precision import at_least_float32
from decaybench.models.registry import get_architecture
from decaybench.models.residual import Stream
from decaybench.models.state import ModelState

LOGITS_AT_ONCE = 1 << 27  # that `score` makes: half a gigabyte in float32


@dataclass(frozen=True)
class Output:
    """logits: [B, T, V], or [n, V] at the n places asked for. state: after the last token, if asked for."""

    logits: Tensor
    state: ModelState | None


@dataclass(frozen=True)
class Scores:
    """Of each label asked for, row by row. state: after the last token, if asked for.

    nats: float32 [n], minus its log-likelihood. first: int64 [n], what the model would have said.
    """

    nats: Tensor
    first: Tensor
    state: ModelState | None


class LanguageModel(Module):
    """The model. Build it with `build_model`, which also draws its initial values."""

    def __init__(self, config: ModelConfig, backend: str = "torch") -> None:
        super().__init__()
        self.config, self.backend = config, backend
        self.embedding = Embedding(config.vocab_size, config.d_model)
        self.embedding_norm = make_norm(config) if config.embedding_norm else None
        self.precision = None
        if config.bft is not None and config.bft.carries:
            self.precision = InitialPrecision(config.bft, config.vocab_size, config.d_model)
        self.blocks = torch.nn.ModuleList(Block(config, layer, backend) for layer in range(config.n_layers))
        self.norm = make_norm(config, config.final_norm)
        self.head = None if config.tie_embeddings else Linear(config.d_model, config.vocab_size)

    def forward(
        self,
        tokens: Tensor,
        positions: Tensor | None = None,
        state: ModelState | None = None,
        *,
        logits_at: Tensor | None = None,
        output_state: bool = False,
    ) -> Output:
        """tokens: int64 [B, T]; positions: int64 [B, T] (None: each row goes on from the state, without padding);
        logits_at: bool [B, T], where logits are wanted (None: everywhere). The head is applied there alone.

        Raises ValueError on positions that neither continue a document nor start one, and on T = 0.
        """
        hidden, state = self._hidden(tokens, positions, state, output_state)
        if logits_at is not None:
            hidden = hidden[logits_at]
        return Output(self._logits(hidden), state)

    def score(
        self,
        tokens: Tensor,
        labels: Tensor,
        positions: Tensor | None = None,
        state: ModelState | None = None,
        *,
        output_state: bool = False,
    ) -> Scores:
        """How well labels were foreseen. labels: int64 [B, T], what is to be said at each place, negative where nothing
        is asked; all else as in `forward`.

        Where all logits together would be large they are made part by part, and again for the gradients.
        """
        hidden, state = self._hidden(tokens, positions, state, output_state)
        asked = labels >= 0
        hidden, wanted = hidden[asked], labels[asked]
        size = max(1, LOGITS_AT_ONCE // self.config.vocab_size)
        if len(wanted) <= size:
            return Scores(*self._score(hidden, wanted), state)
        parts = [
            checkpoint(self._score, *part, use_reentrant=False, preserve_rng_state=False)
            for part in zip(torch.split(hidden, size), torch.split(wanted, size), strict=True)
        ]
        nats, first = (torch.cat(list(found)) for found in zip(*parts, strict=True))
        return Scores(nats, first, state)

    def prefill(
        self, tokens: Tensor, positions: Tensor | None = None, state: ModelState | None = None, *, piece: int = 4096
    ) -> Output:
        """Read tokens [B, T] in pieces, so that memory doesn't grow with T. logits: [B, V] after each row's last token.

        A row that holds only padding keeps its state; its logits are 0.
        """
        B, T = tokens.shape
        last = self.embedding.weight.new_zeros(B, self.config.d_model)
        for start in range(0, max(T, 1), piece):
            part = slice(start, start + piece)
            where = None if positions is None else positions[:, part]
            hidden, state = self._hidden(tokens[:, part], where, state, True)
            columns = torch.arange(1, hidden.shape[1] + 1, device=tokens.device)
            final = (columns if where is None else columns * (where != 0)).expand(B, -1).amax(1)
            here = hidden.gather(1, (final - 1).clamp(min=0)[:, None, None].expand(-1, 1, hidden.shape[-1]))[:, 0]
            last = torch.where((final > 0)[:, None], here, last)
        return Output(self._logits(last), state)

    def step(self, tokens: Tensor, state: ModelState, positions: Tensor | None = None) -> Output:
        """One token a row: tokens [B], positions [B] or None (the next). Returns logits [B, V] and the new state."""
        where = None if positions is None else positions[:, None]
        output = self(tokens[:, None], where, state, output_state=True)
        return Output(output.logits[:, 0], output.state)

    @torch.no_grad()
    def trace(self, tokens: Tensor, *, piece: int = 4096) -> list[LayerTrace]:
        """What the residual of each layer did while reading tokens [B, T]; empty for a plain residual.

        Longer rows than `piece` tokens are read piece by piece through the state.
        """
        traced: list[list[LayerTrace]] = []
        state = None
        for start in range(0, tokens.shape[1], piece):
            found: list[LayerTrace] = []
            more = start + piece < tokens.shape[1]
            _, state = self._hidden(tokens[:, start : start + piece], None, state, more, found)
            traced.append(found)
        return [LayerTrace.joined(parts) for parts in zip(*traced, strict=True)]

    @torch.no_grad()
    def decays(
        self, tokens: Tensor, positions: Tensor | None = None, *, piece: int = 4096
    ) -> Iterator[dict[int, Tensor]]:
        """The log-decays of recurrent layers while reading tokens [B, T], piece by piece of at most `piece` tokens.

        Yields for each piece its log-decays by layer, float32 [B, piece, N] of N heads or channels, in the order of
        `Mixer.timescales`. What stands at padding means nothing.
        """
        state = None
        for start in range(0, tokens.shape[1], piece):
            part = slice(start, start + piece)
            where = None if positions is None else positions[:, part]
            found: dict[int, Tensor] = {}
            more = start + piece < tokens.shape[1]
            _, state = self._hidden(tokens[:, part], where, state, more, decays=found)
            order = None if where is None else compaction(where)
            yield {layer: noted if order is None else _put_back(noted, order) for layer, noted in found.items()}

    @torch.no_grad()
    def initial_precision(self, tokens: Tensor) -> Tensor | None:
        """lambda of the embedding, the mean over D, float32 [B, T], for tokens [B, T]; None where none is carried."""
        return None if self.precision is None else self.precision(tokens, self._embed(tokens)).reciprocal().mean(-1)

    def _hidden(
        self,
        tokens: Tensor,
        positions: Tensor | None,
        state: ModelState | None,
        output_state: bool,
        trace: list[LayerTrace] | None = None,
        decays: dict[int, Tensor] | None = None,
    ) -> tuple[Tensor, ModelState | None]:
        B, T = tokens.shape
        if T == 0:
            raise ValueError("tokens [B, T] must hold at least one column")
        order = None
        if positions is not None:
            if positions.shape != tokens.shape:
                raise ValueError(f"positions must be {tuple(tokens.shape)} like tokens, not {tuple(positions.shape)}")
            check_positions(positions, state.seen if state else None)
            order = compaction(positions)
            if order is not None:
                tokens, positions = tokens.gather(1, order), positions.gather(1, order)
            layout = Layout.of(positions, has_state=state is not None, seen=state.seen if state else None)
        elif state is not None:
            steps = torch.arange(1, T + 1, device=tokens.device)
            layout = Layout.of(state.seen[:, None] + steps, has_state=True, seen=state.seen)
        else:
            layout = Layout.fresh(T, tokens.device)

        context = Context(layout, keep_state=output_state, trace=trace, decays=decays)
        x = self._embed(tokens)
        stream = Stream(x, None if self.precision is None else self.precision(tokens, x))
        layers = []
        for n, block in enumerate(self.blocks):
            stream, layer = block(stream, context, state.layers[n] if state else None)
            layers.append(layer)
        x = self.norm(stream.hidden)
        if order is not None:
            x = _put_back(x, order)
        if not output_state:
            return x, None
        seen = state.seen if state else torch.zeros(B, dtype=torch.long, device=tokens.device)
        return x, ModelState(tuple(layers), layout.last_position(seen))

    def _embed(self, tokens: Tensor) -> Tensor:
        x: Tensor = self.embedding(tokens)
        if self.embedding_norm is not None:
            x = self.embedding_norm(x)
        dropped = self.config.embedding_dropout
        return F.dropout(x, dropped, self.training) if dropped else x

    def _score(self, hidden: Tensor, wanted: Tensor) -> tuple[Tensor, Tensor]:
        logits = at_least_float32(self._logits(hidden))
        return F.cross_entropy(logits, wanted, reduction="none"), logits.detach().argmax(-1)

    def _logits(self, hidden: Tensor) -> Tensor:
        return F.linear(hidden, self.embedding.weight) if self.head is None else self.head(hidden)


def _put_back(x: Tensor, order: Tensor) -> Tensor:
    """What `compaction` moved by `order` [B, T], back in its place; x: [B, T, N]."""
    return torch.empty_like(x).scatter(1, order[..., None].expand_as(x), x)


def build_model(
    config: ModelConfig, seed: int = 0, *, device: str | torch.device = "cpu", backend: str = "torch"
) -> LanguageModel:
    """The model with its initial values, each parameter drawn from (seed, its name).

    device: where it lies; "meta" gives shapes without values. Raises UserError on sizes that don't fit.
    """
    with torch.device("meta"):
        model = LanguageModel(config, backend)
    if torch.device(device).type == "meta":
        return model
    model = model.to_empty(device="cpu")
    initialise(model, seed)
    return model.to(device)


def resolve_backend(wanted: Literal["auto"] | str, name: str) -> tuple[str, str]:
    """The backend to use for an architecture, and why. Raises UserError where it doesn't have the one wanted."""
    offered = get_architecture(name).backends
    if wanted == "auto":
        return offered[0], f"the only one that {name} has here" if len(offered) == 1 else "the best one found here"
    if wanted not in offered:
        raise unknown(f"backend for {name}", wanted, offered)
    return wanted, "as asked"
