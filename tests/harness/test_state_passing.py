"""State passing: what a plain loop over two sequences gives, the same in parts or not, killed or not."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from decaybench.core.errors import UserError
from decaybench.core.positions import check_positions, going_on
from decaybench.harness import training
from decaybench.harness.config import RunConfig, make_config
from decaybench.harness.distributed import World
from decaybench.harness.progress import Progress
from decaybench.harness.run import carry_out
from decaybench.harness.state_passing import StatePassing
from decaybench.harness.training import from_state, train
from decaybench.models.checkpoints import checkpoints_in, read_checkpoint
from decaybench.models.language_model import LanguageModel
from decaybench.models.state import ModelState, tensors
from decaybench.results.leaderboard import settings_of
from decaybench.results.record import read_record
from decaybench.results.run_folder import RunFolder
from decaybench.tasks.base import IGNORED
from tests.command import MQAR, bench, start
from tests.harness.test_resume import kill, numbers, step_of, the_run
from tests.models.small import SIZES, largest, model, tokens

RECURRENCES = [name for name in SIZES if name != "attention"]
ADDONS: list[dict[str, Any]] = [{}, {"post": {"horizon": 16}}, {"bft": {}}, {"post": {"horizon": 16}, "bft": {}}]
STEPS = 40
PASSING = (*MQAR, "--set", f"training.steps={STEPS}", "--set", "training.state_passing=0.7")


def labels_of(found: Tensor) -> Tensor:
    """Every third place is asked for the token after it."""
    labels = torch.full_like(found, IGNORED)
    labels[:, 1::3] = found.roll(-1, 1)[:, 1::3]
    return labels


def gradients(found: LanguageModel, loss: Tensor) -> list[Tensor]:
    weights = [weight for weight in found.parameters() if weight.requires_grad]
    parts = torch.autograd.grad(loss, weights, allow_unused=True)
    return [torch.zeros_like(w) if part is None else part for w, part in zip(weights, parts, strict=True)]


def stepped(found: LanguageModel, read: Tensor, state: ModelState | None) -> tuple[list[Tensor], ModelState]:
    """Logits token by token: the recurrence as a plain loop."""
    logits = []
    for column in read.T:
        output = found(column[:, None], None, state, output_state=True)
        logits.append(output.logits[:, 0])
        state = output.state
    assert state is not None
    return logits, state


@pytest.mark.parametrize("addons", ADDONS, ids=lambda addons: "+".join(addons) or "alone")
@pytest.mark.parametrize("name", RECURRENCES)
def test_loss_and_gradients_are_those_of_a_loop_that_stops_them_at_the_boundary(
    name: str, addons: dict[str, Any]
) -> None:
    """Sequence after sequence in one loop over tokens, the gradient stopped where the second begins; one row empty."""
    found = model(name, **addons)
    first, second = tokens(3, 11, seed=1), tokens(3, 9, seed=2)
    passing = StatePassing(1.0, 0)
    passing.keep([from_state(found, first, labels_of(first), None, output_state=True)[2]])
    (start,) = passing.starts(1, [3])
    assert start is not None and start.seen.tolist() == [11, 11, 11]
    assert not any(tensor.requires_grad for tensor in tensors(start))
    order = [match(start, found, first, row) for row in range(3)]
    assert sorted(order) == [0, 1, 2], "each state is passed once"
    nats, right, end = from_state(found, second, labels_of(second), None, start, output_state=True)

    _, boundary = stepped(found, first[order], None)
    logits, last = stepped(found, second, boundary.detach())
    said = torch.stack(logits, 1)[:, 1::3].log_softmax(-1)
    wanted = labels_of(second)[:, 1::3, None]
    loss = -said.gather(2, wanted).sum()
    assert float((nats - loss).abs().detach()) < 1e-9 * float(loss.detach())
    assert int(right) == int((said.argmax(-1) == wanted[..., 0]).sum())
    assert end is not None and all(largest(*pair) < 1e-9 for pair in zip(tensors(end), tensors(last), strict=True))
    for one, other in zip(gradients(found, nats), gradients(found, loss), strict=True):
        assert largest(one, other) < 1e-8 * max(1.0, float(other.abs().max()))
    without, _, _ = from_state(found, second, labels_of(second), None)
    assert float((without - nats).abs().detach()) > 1e-3, "what came before is seen"


def match(start: ModelState, found: LanguageModel, first: Tensor, row: int) -> int:
    """The sequence whose final state a row starts from."""
    _, end = stepped(found, first, None)
    near = [
        max(largest(a[row], b[other]) for a, b in zip(tensors(start), tensors(end), strict=True))
        for other in range(len(first))
    ]
    assert min(near) < 1e-9
    return int(np.argmin(near))


@pytest.mark.parametrize("addons", ADDONS, ids=lambda addons: "+".join(addons) or "alone")
@pytest.mark.parametrize("name", RECURRENCES)
def test_a_row_that_starts_empty_is_one_without_a_state(name: str, addons: dict[str, Any]) -> None:
    found = model(name, **addons)
    first, second = tokens(8, 7, seed=3), tokens(8, 10, seed=4)
    passing = StatePassing(0.5, 0)
    passing.keep([found.prefill(first).state])  # type: ignore[list-item]
    (start,) = passing.starts(1, [8])
    assert start is not None
    empty = start.seen == 0
    assert 0 < int(empty.sum()) < 8
    with torch.no_grad():
        logits = found(second, None, start).logits
        alone = found(second[empty]).logits
        others = found(second[~empty], None, start.select((~empty).nonzero()[:, 0])).logits
    assert largest(logits[empty], alone) < 1e-9 and largest(logits[~empty], others) < 1e-9


def test_positions_go_on_in_the_first_document_alone() -> None:
    """Padding anywhere, documents after one another, a window that begins inside a document, a row without a state."""
    seen = torch.tensor([5, 5, 5, 0])
    positions = torch.tensor([[0, 1, 2, 0, 3], [1, 2, 1, 2, 3], [7, 8, 1, 0, 2], [7, 8, 1, 0, 2]])
    found = going_on(positions, seen)
    assert found.tolist() == [[0, 6, 7, 0, 8], [6, 7, 1, 2, 3], [6, 7, 1, 0, 2], [7, 8, 1, 0, 2]]
    check_positions(found, seen)


def test_padded_rows_and_documents_are_passed_as_they_are_read() -> None:
    """The model reads positions that go on; what stands after a document's start doesn't see the state."""
    found = model("mamba2", post={"horizon": 16})
    read, labels = tokens(2, 6), labels_of(tokens(2, 6))
    positions = torch.tensor([[0, 0, 1, 2, 3, 4], [1, 2, 3, 1, 2, 3]])
    state = found.prefill(tokens(2, 5, seed=9)).state
    assert state is not None
    nats, _, end = from_state(found, read, labels, positions, state, output_state=True)
    assert end is not None and end.seen.tolist() == [9, 3]
    shifted = torch.tensor([[0, 0, 6, 7, 8, 9], [6, 7, 8, 1, 2, 3]])
    assert torch.equal(nats, found.score(read, labels, shifted, state).nats.sum())


def test_so_many_start_from_another_and_each_state_is_passed_before_one_is_again() -> None:
    found = model("mamba2")
    state = found.prefill(tokens(7, 3)).state
    assert state is not None
    marked = ModelState(state.layers, torch.arange(1, 8))  # whose state is it?
    for share in (0.0, 0.3, 1.0):
        passing = StatePassing(share, 4)
        assert passing.starts(0, [3, 2]) == [None, None], "before the first step there is none"
        passing.keep([marked])
        given = [
            torch.cat([seen_of(part, n) for part, n in zip(passing.starts(s, [4, 3, 3]), (4, 3, 3), strict=True)])
            for s in range(300)
        ]
        whose = torch.stack(given)
        assert abs(float((whose > 0).double().mean()) - share) < 0.03
        for row in whose[:, :7]:
            taken = row[row > 0]
            assert len(taken.unique()) == len(taken)
        if share:
            assert len({tuple(row.tolist()) for row in whose}) > 250, "another order in each step"
            again = StatePassing(share, 4)
            again.keep([marked.select(torch.arange(4)), marked.select(torch.arange(4, 7))])
            (one,) = again.starts(17, [10])
            assert one is not None and torch.equal(one.seen, whose[17]), "a function of seed and step"
    others = StatePassing(1.0, 5)
    others.keep([marked])
    assert not torch.equal(seen_of(others.starts(17, [10])[0], 10), whose[17])


def seen_of(part: ModelState | None, rows: int) -> Tensor:
    return torch.zeros(rows, dtype=torch.long) if part is None else part.seen


def config(name: str = "mamba2", *, model: dict[str, Any] | None = None, **rest: Any) -> RunConfig:
    wanted = {"steps": 12, "batch_samples": 7, "warmup": 2, "state_passing": 0.6} | rest.pop("training", {})
    return make_config(
        {
            "task": {"name": "mqar", "train_length": 32},
            "model": {"name": name, "d_model": 16, "mixer": SIZES[name], **(model or {})},
            "evaluation": {"lengths": ["1x"]},
            "training": wanted,
        },
        rest,
    )


def trained(found: RunConfig, folder: Path) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The weights, and the states that a step after the last would start from."""
    opened = RunFolder.open(folder)
    opened.write_config(found.plain())
    made, _, _ = train(found, opened, device="cpu", backend="torch", progress=Progress(quiet=True))
    kept = read_checkpoint(checkpoints_in(folder / "checkpoint")[-1])
    return made.state_dict(), kept.tensors("states.safetensors")


@pytest.mark.parametrize("how", [{"micro_batch_tokens": 64}, {"recompute": True}], ids=lambda how: next(iter(how)))
@pytest.mark.parametrize("name", ["mamba2", "rwkv7"])
def test_parts_of_a_batch_and_activations_made_again_change_nothing(
    tmp_path: Path, name: str, how: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    really = training.build_model
    monkeypatch.setattr(training, "build_model", lambda *sizes, **rest: really(*sizes, **rest).double())
    more: dict[str, Any] = {"model": {"post": {}, "bft": {}}}
    once = trained(config(name, **more), tmp_path / "once")
    other = trained(config(name, **more, **how), tmp_path / "other")
    for left, right in zip(once, other, strict=True):
        assert left.keys() == right.keys()
        for key, value in left.items():
            assert largest(value.double(), right[key].double()) < 1e-8, key
    without = trained_without(config(name, **more, training={"state_passing": None}), tmp_path / "without")
    assert max(largest(value, without[key]) for key, value in once[0].items()) > 1e-4, "states were passed"


def trained_without(found: RunConfig, folder: Path) -> dict[str, Tensor]:
    opened = RunFolder.open(folder)
    opened.write_config(found.plain())
    made, _, _ = train(found, opened, device="cpu", backend="torch", progress=Progress(quiet=True))
    (kept, *_) = checkpoints_in(folder / "checkpoint")
    assert not (kept / "states.safetensors").exists()
    return made.state_dict()


def test_recurrent_states_stay_float32_in_bfloat16(tmp_path: Path) -> None:
    weights, states = trained(config(training={"dtype": "bfloat16"}), tmp_path)
    assert all(bool(torch.isfinite(value).all()) for value in weights.values())
    sizes = {tensor.dim(): tensor.dtype for tensor in states.values()}
    assert sizes == {1: torch.int64, 3: torch.bfloat16, 4: torch.float32}, "seen, the convolution's inputs, the state"


def test_chains_of_sequences_are_as_long_as_the_share_makes_them(tmp_path: Path) -> None:
    """seen is a number of whole sequences; with share 1 all that were ever read."""
    _, states = trained(config(training={"state_passing": 1, "steps": 9}), tmp_path / "all")
    seen = max(states.values(), key=lambda tensor: tensor.dtype == torch.int64)
    assert set(seen.tolist()) == {9 * 32}
    _, states = trained(config(training={"steps": 30, "batch_samples": 50}), tmp_path / "some")
    seen = max(states.values(), key=lambda tensor: tensor.dtype == torch.int64)
    assert set((seen % 32).tolist()) == {0} and 32 in seen and int(seen.max()) > 64
    assert abs(float((seen > 32).double().mean()) - 0.6) < 0.25


def test_states_are_passed_after_so_many_steps(tmp_path: Path) -> None:
    """Until then the weights are those without; the first step after it starts where the one before ended."""
    late = {"state_passing": 1, "state_passing_after": 6}
    _, states = trained(config(training={**late, "steps": 9}), tmp_path / "late")
    seen = max(states.values(), key=lambda tensor: tensor.dtype == torch.int64)
    assert set(seen.tolist()) == {4 * 32}, "the last step without is the first of four in a chain"
    found = config(training={**late, "steps": 7, "schedule": "cosine"}, keep=1, checkpoint_seconds=0)
    trained(found, tmp_path / "all")
    usual = config(training={"state_passing": None, "steps": 7, "schedule": "cosine"}, keep=1, checkpoint_seconds=0)
    trained_without(usual, tmp_path / "none")
    for step in range(1, 8):
        one, other = (
            read_checkpoint(tmp_path / which / "checkpoint" / f"step-{step:08d}").sha256 for which in ("all", "none")
        )
        assert (one == other) == (step <= 6)


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("uninterrupted")
    assert start(*PASSING, cwd=folder).end().code == 0
    return numbers(the_run(folder))


def test_kill_9_changes_nothing(tmp_path: Path, uninterrupted: dict[str, Any]) -> None:
    draws = random.Random(7)
    restless = (*PASSING, "--set", "checkpoint_seconds=0")
    for step in sorted(draws.sample(range(2, STEPS - 5), 3)):
        kill(start(*restless, cwd=tmp_path), lambda step=step: step_of(tmp_path) >= step, draws.uniform(0, 0.03))
    done = start(*restless, cwd=tmp_path).end()
    assert done.code == 0 and numbers(the_run(tmp_path)) == uninterrupted


def test_a_record_says_so_also_of_a_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In its table's title and in what tells experiments apart."""
    monkeypatch.chdir(tmp_path)
    assert "trained with state passing 0.7" in " ".join(bench(*PASSING).out.split())
    (folder,) = (tmp_path / "runs").iterdir()
    asked = ("mqar", "--checkpoint", str(folder), "--eval-lengths", "1x", "--samples", "2", "--out", "second")
    assert "trained with state passing 0.7" in " ".join(bench(*asked).out.split())
    (path,) = tmp_path.glob("second/*/evaluations/*/record.json")
    record = read_record(path)
    assert record.checkpoint is not None and record.checkpoint.state_passing == 0.7
    assert settings_of(record)["training.state_passing"] == 0.7
    (facts,) = folder.glob("checkpoint/step-*/facts.json")
    facts.write_text(facts.read_text().replace('"state_passing": 0.7', '"state_passing": 7'))
    code, _, err = bench(*asked)
    assert code == 2 and "state_passing=7, not a share" in err


def test_states_that_dont_fit_are_told_in_one_line(tmp_path: Path) -> None:
    found = config()
    trained(found, tmp_path)
    made = training.build_model(found.model, 0)
    kept = read_checkpoint(checkpoints_in(tmp_path / "checkpoint")[-1]).tensors("states.safetensors")
    for damaged in ({"0": kept["0"]}, {**kept, "0": kept["0"][:, :1]}, {**kept, "0": kept["0"][:3]}):
        with pytest.raises(UserError, match=r"states\.safetensors can't be gone on from: "):
            StatePassing(0.6, 0).restore(damaged, made)


def test_attention_and_several_processes_are_refused_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    code, _, err = bench("mqar", "--model", "attention", "--set", "training.state_passing=0.5")
    assert code == 2 and err.count("\n") == 1
    assert "training.state_passing=0.5 is for recurrences: the state of attention grows with every token" in err
    for share in ("1.5", "-1", "some"):
        code, _, err = bench(*MQAR, "--set", f"training.state_passing={share}")
        assert code == 2 and "training.state_passing" in err and err.count("\n") == 1
    code, _, err = bench(*MQAR, "--set", "training.state_passing_after=5")
    assert code == 2 and "training.state_passing_after=5 needs training.state_passing" in err
    code, _, err = bench(*MQAR, "--set", "training.state_passing=1", "--set", "training.state_passing_after=12")
    assert code == 2 and "training.state_passing_after=12: no state would be passed in 12 steps" in err
    monkeypatch.setattr("decaybench.harness.run.joined", _two)
    with pytest.raises(UserError, match=r"training\.state_passing=0\.6 is for one process, and here are 2"):
        carry_out(config(out=str(tmp_path / "runs")), progress=Progress(quiet=True))
    assert not list(tmp_path.iterdir()), "nothing is left behind"


@contextmanager
def _two(device: str) -> Iterator[World]:
    yield World(0, 2, device)
