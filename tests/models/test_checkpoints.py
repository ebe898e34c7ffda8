"""Checkpoints: whole or absent, checked when read, and nothing in them is ever executed."""

from __future__ import annotations

import json
import os
import pickle
import resource
import signal
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from decaybench.core.errors import RunError, UserError
from decaybench.core.hashing import file_digest
from decaybench.models import checkpoints
from decaybench.models.checkpoints import MODEL_FILE, find_checkpoint, read_checkpoint, write_checkpoint
from tests.models import small

FACTS = "facts.json"
EXTRA = {"optimiser.safetensors": {"a/exp_avg": torch.arange(6.0).view(2, 3), "a/step": torch.tensor(7.0)}}


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    write_checkpoint(tmp_path / "step-1", small.model().float(), 3, {"step": 1}, EXTRA)
    return tmp_path / "step-1"


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def one_line(error: pytest.ExceptionInfo[Exception]) -> str:
    assert "\n" not in str(error.value)
    return str(error.value)


def rewrite(folder: Path, **facts) -> None:
    content = json.loads((folder / FACTS).read_text()) | facts
    (folder / FACTS).write_text(json.dumps(content))


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("mamba2", {"ffn": {}, "norm": "layernorm"}),
        ("mamba2", {"post": {"variant": "paper", "horizon": 64, "taper": "learned"}}),
        ("mamba2", {"post": {"variant": "minimal", "reparameterize": False}}),
        ("mamba2", {"mixer": {"headdim": 64}, "post": {"horizon": 64}}),
        ("attention", {"tie_embeddings": False}),
    ],
)
def test_a_model_comes_back_to_the_bit(tmp_path, name, settings):
    model = small.model(name, **settings).float()
    written = write_checkpoint(tmp_path / "c", model, 3, {"step": 5, "note": "é"}, EXTRA)
    found = read_checkpoint(tmp_path / "c")
    assert found == written
    assert found.config == model.config
    assert found.sha256 == file_digest(tmp_path / "c" / MODEL_FILE)
    assert (found.facts["step"], found.facts["note"], found.facts["seed"]) == (5, "é", 3)
    loaded = found.model()
    a, b = loaded.state_dict(), model.state_dict()
    assert a.keys() == b.keys()
    assert all(torch.equal(a[key], b[key]) for key in a)
    assert {n: p.requires_grad for n, p in loaded.named_parameters()} == {
        n: p.requires_grad for n, p in model.named_parameters()
    }
    tokens = small.tokens(2, 9)
    assert torch.equal(loaded(tokens).logits, model(tokens).logits)
    extra = found.tensors("optimiser.safetensors")
    assert all(torch.equal(extra[key], value) for key, value in EXTRA["optimiser.safetensors"].items())
    assert names(tmp_path) == {"c"}


@pytest.mark.parametrize("file", [FACTS, MODEL_FILE, "optimiser.safetensors"])
@pytest.mark.parametrize("share", [0.0, 0.01, 0.5, 0.99, "one byte"])
def test_a_file_cut_short_is_said_in_one_line(saved, file, share):
    path = saved / file
    content = path.read_bytes()
    path.write_bytes(content[: len(content) - 1 if share == "one byte" else int(share * len(content))])
    with pytest.raises(UserError) as error:
        read_checkpoint(saved)
    assert file in one_line(error)
    assert "cut short" in one_line(error)


@pytest.mark.parametrize("file", [MODEL_FILE, "optimiser.safetensors"])
def test_a_flipped_bit_is_found(saved, file):
    content = bytearray((saved / file).read_bytes())
    content[-3] ^= 1
    (saved / file).write_bytes(content)
    with pytest.raises(UserError, match=f"{file} is cut short or changed"):
        read_checkpoint(saved)


@pytest.mark.parametrize("file", [FACTS, MODEL_FILE, "optimiser.safetensors"])
def test_a_missing_file_is_named(saved, file):
    (saved / file).unlink()
    with pytest.raises(UserError, match=file):
        read_checkpoint(saved)


@pytest.mark.parametrize(
    "change",
    [
        lambda tensors: tensors.pop("norm.weight"),
        lambda tensors: tensors.update(extra=torch.zeros(2)),
        lambda tensors: tensors.update({"norm.weight": torch.zeros(31)}),
        lambda tensors: tensors.update({"blocks.0.mixer.conv.weight": torch.zeros(80, 1, 4)}),
        lambda tensors: tensors.clear() or tensors.update(x=torch.zeros(1)),
    ],
)
def test_tensors_that_do_not_fit_are_said_in_one_line(saved, change):
    tensors = load_file(saved / MODEL_FILE)
    change(tensors)
    save_file(tensors, saved / MODEL_FILE)
    rewrite(saved, files={MODEL_FILE: file_digest(saved / MODEL_FILE)})
    with pytest.raises(UserError, match="doesn't fit its configuration"):
        read_checkpoint(saved).model()


def test_a_weights_file_that_is_no_safetensors_is_said_in_one_line(saved):
    (saved / MODEL_FILE).write_bytes(b"\xff" * 100)
    rewrite(saved, files={MODEL_FILE: file_digest(saved / MODEL_FILE)})
    with pytest.raises(UserError) as error:
        read_checkpoint(saved).model()
    assert "can't be read" in one_line(error)


class Bomb:
    def __reduce__(self):
        return os.mkdir, ("/tmp/decaybench-was-tricked",)


def test_a_pickle_is_never_loaded(saved, tmp_path, monkeypatch):
    monkeypatch.setattr(torch, "load", lambda *args, **kwargs: pytest.fail("torch.load was called"))
    monkeypatch.setattr(pickle, "Unpickler", lambda *args, **kwargs: pytest.fail("a pickle was read"))
    torch.save({"norm.weight": Bomb()}, saved / MODEL_FILE)
    rewrite(saved, files={MODEL_FILE: file_digest(saved / MODEL_FILE)})
    with pytest.raises(UserError, match="can't be read"):
        read_checkpoint(saved).model()
    assert not Path("/tmp/decaybench-was-tricked").exists()
    source = Path(checkpoints.__file__).read_text()
    assert "torch.load" not in source
    assert "pickle" not in source


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("", "not valid JSON"),
        ("{", "not valid JSON"),
        ("[" * 100_000, "not valid JSON"),
        ('{"format": NaN}', "NaN is not a JSON number"),
        ("null", "not of format 1"),
        ("[1]", "not of format 1"),
        ("{}", "not of format 1"),
        ('{"format": 2}', "not of format 1"),
        ('{"format": 1}', f"names no {MODEL_FILE}"),
        ('{"format": 1, "files": [], "model": {}}', f"names no {MODEL_FILE}"),
        ('{"format": 1, "files": {"model.safetensors": 5}, "model": []}', "no model"),
        ('{"format": 1, "files": {"model.safetensors": 5}, "model": {}, "seed": "0"}', "has no seed"),
        ('{"format": 1, "files": {"model.safetensors": 5}, "model": {}, "seed": 0}', "cut short or changed"),
    ],
)
def test_facts_that_are_no_facts(saved, content, said):
    (saved / FACTS).write_text(content)
    with pytest.raises(UserError) as error:
        read_checkpoint(saved)
    assert said in one_line(error)


@pytest.mark.parametrize("content", [b"\xff\xfe", b"\x00" * 300])
def test_facts_that_are_no_text(saved, content):
    (saved / FACTS).write_bytes(content)
    with pytest.raises(UserError, match="not valid JSON"):
        read_checkpoint(saved)


@pytest.mark.parametrize(
    "name", ["../secret", "/etc/hostname", "..", ".", "", "a/b", "a\x00b", "x" * 5000, "a\nb", "C:\\x", ".hidden"]
)
def test_files_outside_the_folder_are_never_opened(saved, monkeypatch, name):
    opened = []
    monkeypatch.setattr(checkpoints, "file_digest", lambda path: opened.append(path) or file_digest(path))
    (saved.parent / "secret").write_text("secret")
    files = json.loads((saved / FACTS).read_text())["files"]
    rewrite(saved, files={name: "0" * 64, **files})
    with pytest.raises(UserError) as error:
        read_checkpoint(saved)
    assert "is no file name" in one_line(error)
    assert opened == []


@pytest.mark.parametrize(
    ("model", "said"),
    [
        ({"name": "mamba3"}, "unknown model 'mamba3'"),
        ({"d_modle": 3}, "did you mean 'd_model'"),
        ({"d_model": 64}, "doesn't fit its configuration"),
        ({"d_model": 2**40}, "doesn't fit its configuration"),
        ({"d_model": 33}, "must divide expand * d_model"),
    ],
)
def test_a_configuration_that_does_not_fit_is_said_in_one_line(saved, model, said):
    rewrite(saved, model=json.loads((saved / FACTS).read_text())["model"] | model)
    with pytest.raises(UserError) as error:
        read_checkpoint(saved).model()
    assert said in one_line(error)


def test_a_checkpoint_is_found_by_its_folder_its_run_or_its_root(tmp_path):
    model = small.model().float()
    run = tmp_path / "run"
    for step in (5, 40, 200):
        write_checkpoint(run / "checkpoint" / f"step-{step:08d}", model, 0, {"step": step}, {})
    (run / "checkpoint" / ".step-00000300.writing").mkdir()
    (run / "checkpoint" / "step-00000400").mkdir()  # nothing in it
    assert find_checkpoint(run).facts["step"] == 200
    assert find_checkpoint(run / "checkpoint").facts["step"] == 200
    assert find_checkpoint(run / "checkpoint" / "step-00000005").facts["step"] == 5


@pytest.mark.parametrize("kind", ["absent", "empty", "file", "too long", "no name"])
def test_a_path_without_a_checkpoint_is_one_line(tmp_path, kind):
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("x")
    path = {"too long": tmp_path / ("x" * 5000), "no name": tmp_path / "a\x00b"}.get(kind, tmp_path / kind)
    with pytest.raises(UserError) as error:
        find_checkpoint(path)
    assert one_line(error).startswith("no checkpoint at")


# --- writing


def test_writing_again_replaces(tmp_path):
    first, second = small.model(seed=1).float(), small.model(seed=2).float()
    write_checkpoint(tmp_path / "c", first, 0, {"step": 1}, EXTRA)
    write_checkpoint(tmp_path / "c", second, 0, {"step": 2}, {})
    found = read_checkpoint(tmp_path / "c")
    assert found.facts["step"] == 2
    assert names(tmp_path) == {"c"}
    assert names(tmp_path / "c") == {MODEL_FILE, FACTS}
    assert torch.equal(found.model().norm.weight, second.norm.weight)


@pytest.mark.parametrize("bad", [{"a": torch.ones(2)}, {"a": float("nan")}, {"a": {1, 2}}])
def test_facts_that_are_not_json_write_nothing(saved, bad):
    before = {path.name: path.read_bytes() for path in saved.iterdir()}
    with pytest.raises((TypeError, ValueError)):
        write_checkpoint(saved, small.model(seed=9).float(), 0, bad, {})
    assert {path.name: path.read_bytes() for path in saved.iterdir()} == before
    assert names(saved.parent) == {saved.name}


@contextmanager
def files_of_at_most(size: int):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.skipif(not hasattr(resource, "RLIMIT_FSIZE"), reason="no limit on file sizes here")
@pytest.mark.parametrize("size", [0, 100, 30_000])
def test_no_room_leaves_the_old_checkpoint(saved, size):
    """The operating system refuses to write more: as on a full disk, the error comes from inside safetensors."""
    with files_of_at_most(size), pytest.raises(RunError) as error:
        write_checkpoint(saved, small.model(seed=9).float(), 0, {"step": 2}, {})
    assert one_line(error) == f"can't write {saved}: {os.strerror(27)}"
    assert read_checkpoint(saved).facts["step"] == 1
    assert names(saved.parent) == {saved.name}


def test_a_folder_that_cannot_be_made_is_one_line(tmp_path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(RunError) as error:
        write_checkpoint(tmp_path / "file" / "c", small.model().float(), 0, {}, {})
    assert one_line(error).startswith("can't write")


# Kills itself at the n-th of the moments named, having printed how many it passed.
KILLED = """
import os, signal, sys
from pathlib import Path
import torch
from decaybench.models import checkpoints
from tests.models import small

folder, n = Path(sys.argv[1]), int(sys.argv[2])
passed = 0

def killing(function, after):
    def inner(*args, **kwargs):
        global passed
        passed += 1
        if passed == n and not after:
            os.kill(os.getpid(), signal.SIGKILL)
        result = function(*args, **kwargs)
        if passed == n and after:
            os.kill(os.getpid(), signal.SIGKILL)
        return result
    return inner

after = sys.argv[3] == "after"
checkpoints.save_file = killing(checkpoints.save_file, after)
checkpoints.file_digest = killing(checkpoints.file_digest, after)
checkpoints.os.fsync = killing(os.fsync, after)
checkpoints.Path.write_text = killing(Path.write_text, after)
checkpoints.write_checkpoint(folder, small.model(seed=9).float(), 0, {"step": 2}, {})
"""


@pytest.mark.parametrize(
    ("moment", "step"),
    [("1 before", 1), ("1 after", 1), ("3 before", 1), ("4 after", 1), ("5 before", 1), ("6 before", 2)],
)
def test_a_kill_in_the_middle_leaves_the_old_checkpoint_or_the_new(saved, moment, step):
    done = subprocess.run([sys.executable, "-c", KILLED, str(saved), *moment.split()], capture_output=True, timeout=60)
    assert done.returncode == -signal.SIGKILL, done.stderr.decode()
    assert read_checkpoint(saved).facts["step"] == step
    assert find_checkpoint(saved.parent).facts["step"] == step
    write_checkpoint(saved, small.model(seed=9).float(), 0, {"step": 3}, {})  # and what was left is no hindrance
    assert read_checkpoint(saved).facts["step"] == 3
    assert names(saved.parent) == {saved.name}
