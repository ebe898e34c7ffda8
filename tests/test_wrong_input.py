"""A user's mistake is one clear line on stderr and exit code 2: no traceback, nothing done, nothing on stdout."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from decaybench.core.hashing import file_digest
from decaybench.harness import run as harness_run
from decaybench.harness.config import make_config
from decaybench.models.checkpoints import write_checkpoint
from decaybench.models.language_model import build_model
from tests.command import bench

NIAH, MQAR = ("niah",), ("mqar",)


def set_(*settings: str) -> tuple[str, ...]:
    return tuple(word for setting in settings for word in ("--set", setting))


# Words of the command, and what its one line must hold: the key or flag, the value, and the nearest right one.
WRONG: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    # commands and flags
    "command": (("niahh",), ("'niahh'", "'niah'")),
    "command of leaderboard": (("leaderboard", "ad"), ("'ad'", "'add'")),
    "no file of a sweep": (("sweep",), ("SWEEP.YAML",)),
    "flag": ((*NIAH, "--modle", "mamba2"), ("--modle", "--model")),
    "flag of another task": ((*MQAR, "--depths", "0"), ("--depths",)),
    "argument": ((*NIAH, "extra"), ("extra",)),
    "flag without value": ((*NIAH, "--seed"), ("--seed",)),
    "no argument": (("spectrum",), ("RUN",)),
    # names
    "model": ((*NIAH, "--model", "mamba3"), ("'mamba3'", "'mamba2'")),
    "model far from all": (
        (*NIAH, "--model", "transformer"),
        ("'transformer'", "attention, gated_deltanet, gla, mamba2, retnet, rwkv7"),
    ),
    "model in set": ((*NIAH, *set_("model.name=atention")), ("'atention'", "'attention'")),
    "preset": ((*MQAR, "--preset", "post-16"), ("'post-16'", "'post-16k'")),
    "preset of another task": ((*NIAH, "--preset", "post-16k"), ("'post-16k'", "smoke")),
    "preset without the model": ((*MQAR, "--preset", "post-16k", "--model", "attention"), ("post-16k", "'attention'")),
    "task in set": ((*NIAH, *set_("task.name=mqar")), ("task.name='mqar'", "`bench mqar`")),
    "unknown task in set": ((*NIAH, *set_("task.name=mqr")), ("'mqr'", "'mqar'")),
    "device": ((*NIAH, "--device", "gpu"), ("device='gpu'", "'auto', 'cpu' or 'cuda'")),
    "backend": ((*NIAH, "--backend", "fla"), ("'fla'", "torch")),
    "backend nearly": ((*NIAH, "--backend", "torc"), ("'torc'", "'torch'")),
    "add-on of attention": ((*NIAH, "--model", "attention", "--post"), ("post", "attention")),
    "selftest's model": (("selftest", "--model", "mamba"), ("'mamba'", "'mamba2'")),
    "selftest's device": (("selftest", "--device", "cud"), ("'cud'", "'cuda'")),
    # lengths
    "length 0": ((*NIAH, "--eval-lengths", "0"), ("--eval-lengths", "'0'", "1x,2x")),
    "length foo": ((*NIAH, "--eval-lengths", "1x,foo"), ("--eval-lengths", "'foo'", "1x,2x")),
    "no length": ((*NIAH, "--eval-lengths", ""), ("--eval-lengths", "''")),
    "half a list": ((*NIAH, "--eval-lengths", "1x,"), ("--eval-lengths", "''")),
    "length twice": ((*NIAH, "--eval-lengths", "1x,2x,128"), ("--eval-lengths", "1x,2x,128", "twice")),
    "negative length": ((*NIAH, "--eval-lengths", "-1"), ("--eval-lengths",)),
    "negative length, glued": ((*NIAH, "--eval-lengths=-1"), ("--eval-lengths", "'-1'")),
    "length in floats": ((*NIAH, "--eval-lengths", "1e9x"), ("--eval-lengths", "'1e9x'")),
    "enormous length": ((*NIAH, "--eval-lengths", "1000000000x"), ("--eval-lengths", "'1000000000x'", "2^31")),
    "length nan": ((*NIAH, "--eval-lengths", "nan"), ("--eval-lengths", "'nan'")),
    "half a token": ((*NIAH, "--eval-lengths", "0.001x"), ("--eval-lengths", "'0.001x'")),
    "other digits": ((*NIAH, "--eval-lengths", "٣x"), ("--eval-lengths", "'٣x'")),
    "length too short": ((*NIAH, "--eval-lengths", "4"), ("length=4", "smallest length is 5")),
    "train length too short": ((*NIAH, "--train-length", "3"), ("length=3", "smallest length is 5")),
    "train length 0": ((*NIAH, "--train-length", "0"), ("task.train_length=0",)),
    "train length abc": ((*NIAH, "--train-length", "abc"), ("--train-length", "abc")),
    "odd length": ((*MQAR, "--eval-lengths", "127"), ("length=127", "128")),
    "odd train length": ((*MQAR, "--train-length", "127"), ("length=127", "128")),
    "kv too large": ((*MQAR, *set_("evaluation.persist_kv=64")), ("kv=64", "length=128", "256")),
    "kv too large to train": (
        (*MQAR, *set_("task.stages=[{shape: {length: 32, kv: 16}}]")),
        ("kv=16", "length=32", "64"),
    ),
    "stage beyond train length": ((*MQAR, "--preset", "zoology-based", "--train-length", "128"), ("128", "256")),
    "cell twice": ((*MQAR, *set_("evaluation.pairs=[[64,4],[64,4]]")), ("listed-length64-kv4", "twice")),
    # seeds
    "negative seed": ((*NIAH, "--seed", "-1"), ("seed=-1",)),
    "seed 2^40": ((*NIAH, "--seed", str(2**40)), (f"seed={2**40}", str(2**32))),
    "half a seed": ((*NIAH, "--seed", "1.5"), ("--seed", "1.5")),
    "seeds a": ((*NIAH, "--seeds", "a"), ("--seeds", "'a'", "0,1,2")),
    "no seeds": ((*NIAH, "--seeds", ""), ("--seeds", "''")),
    "seed twice": ((*NIAH, "--seeds", "0,1,0"), ("--seeds", "twice")),
    "negative seeds": ((*NIAH, "--seeds", "0,-1"), ("seed=-1",)),
    "seed and seeds": ((*NIAH, "--seed", "2", "--seeds", "0,1"), ("--seed and --seeds",)),
    # settings
    "unknown key": ((*NIAH, *set_("sed=1")), ("'sed'", "'seed'", "1")),
    "unknown section": ((*NIAH, *set_("trainin.steps=5")), ("'trainin'", "'training'")),
    "unknown key of training": ((*NIAH, *set_("training.step=5")), ("'training.step'", "5", "'steps'")),
    "unknown key of model": ((*NIAH, *set_("model.dmodel=5")), ("'model.dmodel'", "'d_model'")),
    "unknown key of mixer": ((*NIAH, *set_("model.mixer.dstate=5")), ("'model.mixer.dstate'", "'d_state'")),
    "unknown key of ffn": ((*NIAH, *set_("model.ffn.multipl=5")), ("'model.ffn.multipl'", "'multiple'")),
    "unknown key of post": ((*NIAH, *set_("model.post.tapr=x")), ("'model.post.tapr'", "'x'", "'taper'")),
    "unknown key of bft": ((*NIAH, "--bft", *set_("model.bft.gian=x")), ("'model.bft.gian'", "'x'", "'gain'")),
    "unknown key of task": ((*NIAH, *set_("task.hay_token=5")), ("'task.hay_token'", "'hay_tokens'")),
    "unknown key of evaluation": ((*NIAH, *set_("evaluation.sample=5")), ("'evaluation.sample'", "'samples'")),
    "unknown key of a stage": (
        (*NIAH, *set_("task.stages=[{shape: {lenght: 32, needles: 1, queries: 1}}]")),
        ("'task.stages.0.shape.lenght'", "'length'"),
    ),
    "key of no name": ((*NIAH, *set_("training={1: 2}")), ("training.1",)),
    "set without =": ((*NIAH, *set_("training.steps")), ("--set", "'training.steps'", "training.steps=500")),
    "set without key": ((*NIAH, *set_("=5")), ("--set", "'=5'")),
    "set with a hole": ((*NIAH, *set_("training..steps=5")), ("--set", "'training..steps=5'")),
    "set garbage": ((*NIAH, *set_("training.steps=[1")), ("--set training.steps", "'[1'")),
    "set an impossible date": ((*NIAH, *set_("out=2020-99-99")), ("--set out", "'2020-99-99'")),
    "set a Python object": ((*NIAH, *set_("out=!!python/object:os.system")), ("--set out",)),
    "section 5": ((*NIAH, *set_("training=5")), ("training=5",)),
    "section model 5": ((*NIAH, *set_("model=5")), ("model=5",)),
    "section task 5": ((*NIAH, *set_("task=5")), ("task", "niah")),
    "section evaluation 0": ((*NIAH, *set_("evaluation=0")), ("evaluation=0",)),
    "section mixer 5": ((*NIAH, *set_("model.mixer=5")), ("model.mixer=5",)),
    "section post 5": ((*NIAH, *set_("model.post=5")), ("model.post=5",)),
    "section bft 5": ((*NIAH, *set_("model.bft=5")), ("model.bft=5", "model.bft.KEY=VALUE")),
    # values
    "negative size": ((*NIAH, *set_("model.mixer.d_state=-1")), ("model.mixer.d_state=-1",)),
    "no layers": ((*NIAH, *set_("model.n_layers=0")), ("model.n_layers=0",)),
    "headdim": ((*NIAH, *set_("model.mixer.headdim=7")), ("mixer.headdim=7", "128")),
    "groups": ((*NIAH, *set_("model.mixer.n_groups=3")), ("mixer.n_groups=3", "8")),
    "heads of attention": ((*NIAH, "--model", "attention", *set_("model.mixer.n_heads=5")), ("mixer.n_heads=5", "64")),
    "beyond all memory": ((*NIAH, *set_("model.d_model=1000000000000")), ("model", "d_model=1000000000000")),
    "vocabulary": ((*NIAH, *set_("model.vocab_size=100")), ("model.vocab_size=100", "195")),
    "vocabulary for kv": ((*MQAR, *set_("task.vocab_size=16")), ("task.vocab_size=16", "smallest is")),
    "learning rate 0": ((*NIAH, *set_("training.learning_rate=0")), ("training.learning_rate=0",)),
    "learning rate nan": ((*NIAH, *set_("training.learning_rate=nan")), ("training.learning_rate=nan",)),
    "learning rate .inf": ((*NIAH, *set_("training.learning_rate=.inf")), ("training.learning_rate=inf",)),
    "learning rate abc": ((*NIAH, *set_("training.learning_rate=abc")), ("training.learning_rate='abc'",)),
    "eps inf": ((*NIAH, *set_("training.eps=.inf")), ("training.eps=inf", "finite")),
    "clip inf": ((*NIAH, *set_("training.clip=.inf")), ("training.clip=inf", "finite")),
    "weight decay inf": ((*NIAH, *set_("training.weight_decay=.inf")), ("training.weight_decay=inf", "finite")),
    "betas": ((*NIAH, *set_("training.betas=[1.5,0.9]")), ("training.betas.0=1.5", "less than 1")),
    "betas nan": ((*NIAH, *set_("training.betas=[0.9,.nan]")), ("training.betas.1=nan", "finite")),
    "one beta": ((*NIAH, *set_("training.betas=0.9")), ("training.betas=0.9",)),
    "schedule": ((*NIAH, *set_("training.schedule=cosin")), ("training.schedule='cosin'", "did you mean 'cosine'?")),
    "plan": ((*NIAH, *set_("training.plan=epoch")), ("training.plan='epoch'", "did you mean 'epochs'?")),
    "plan without examples": (
        (*NIAH, *set_("training.plan=epochs")),
        ("training.plan=epochs", "task.stages.0.examples"),
    ),
    "no steps": ((*NIAH, *set_("training.steps=0")), ("training.steps=0",)),
    "half a step": ((*NIAH, *set_("training.steps=1.5")), ("training.steps=1.5",)),
    "dtype": ((*NIAH, *set_("training.dtype=float16")), ("training.dtype='float16'",)),
    "horizon": ((*NIAH, "--post", *set_("model.post.horizon=1")), ("model.post.horizon=1",)),
    "range": ((*NIAH, "--post", *set_("model.post.range=[5,1]")), ("model.post", "range=(5.0, 1.0)", "fastest")),
    "endless range": ((*NIAH, "--post", *set_("model.post.range=[1,.inf]")), ("model.post.range.1=inf", "finite")),
    "variant of post": (
        (*NIAH, *set_("model.post.variant=papr")),
        ("model.post.variant='papr'", "did you mean 'paper'?"),
    ),
    "control of post": ((*NIAH, *set_("model.post.control=wide")), ("model.post.control='wide'", "'static_wide'")),
    "jacobian without an FFN": (
        (*NIAH, "--bft", *set_("model.bft.jacobian=detached")),
        ("bench: model.bft.jacobian=detached", "this model has none"),
    ),
    "precision of bft": (
        (*NIAH, *set_("model.bft.precision=tokens")),
        ("model.bft.precision='tokens'", "did you mean 'token'?"),
    ),
    "switches that leave nothing": (
        (*NIAH, *set_("model.bft={gain: false, reliability: false}")),
        ("bench: model.bft.gain=false and model.bft.reliability=false",),
    ),
    "fill": ((*MQAR, *set_("task.fill=randm")), ("task.fill='randm'", "did you mean 'random'?")),
    "depth 2": ((*NIAH, "--depths", "0,2"), ("evaluation.depths.1='2'",)),
    "depth a": ((*NIAH, "--depths", "a"), ("evaluation.depths.0='a'",)),
    "depth nan": ((*NIAH, "--depths", "nan"), ("evaluation.depths.0='nan'",)),
    "no depth": ((*NIAH, "--depths", ""), ("evaluation.depths.0=''",)),
    "depth twice": ((*NIAH, "--depths", "0,0.0"), ("evaluation.depths", "repeat")),
    "no samples": ((*NIAH, "--samples", "0"), ("evaluation.samples=0",)),
    "too many samples": ((*NIAH, "--samples", "100000000"), ("evaluation.samples=100000000", "1000000")),
    "variant": ((*NIAH, "--variants", "singel"), ("evaluation.variants.0='singel'", "did you mean 'single'?")),
    "variant of another task": ((*MQAR, "--variants", "single"), ("evaluation.variants.0='single'", "persist")),
    "no values for multivalue": ((*NIAH, "--variants", "multivalue"), ("multivalue", "task.values", "task.values=4")),
    "variant twice": ((*NIAH, "--variants", "single,single"), ("evaluation.variants", "repeat")),
    "tokens a pair": ((*MQAR, *set_("evaluation.capacity_ratio=2")), ("evaluation.capacity_ratio=2",)),
    "pair of one": ((*MQAR, *set_("evaluation.pairs=[[64]]")), ("evaluation.pairs.0.1 is missing",)),
    "no batch": ((*NIAH, *set_("batch_tokens=0")), ("batch_tokens=0",)),
    "seconds": ((*NIAH, *set_("checkpoint_seconds=nan")), ("checkpoint_seconds=nan",)),
    # files
    "no config": ((*NIAH, "--config", "nowhere.yaml"), ("nowhere.yaml", "No such file")),
    "config not YAML": ((*NIAH, "--config", "broken.yaml"), ("broken.yaml", "not valid YAML")),
    "config a list": ((*NIAH, "--config", "list.yaml"), ("list.yaml", "list")),
    "config empty": ((*NIAH, "--config", "empty.yaml"), ("empty.yaml", "mapping")),
    "config not text": ((*NIAH, "--config", "model.bin"), ("model.bin", "not valid YAML")),
    "config a folder": ((*NIAH, "--config", "folder"), ("folder", "Is a directory")),
    "config of another task": ((*NIAH, "--config", "mqar.yaml"), ("task.name='mqar'", "`bench mqar`")),
    "config of noisy sources without the flag": (
        (*MQAR, "--config", "noisy.yaml"),
        ("task.name='mqar-noisy'", "`bench mqar --noisy-sources`"),
    ),
    "config of mqar with the flag of noisy sources": (
        (*MQAR, "--noisy-sources", "--config", "mqar.yaml"),
        ("task.name='mqar'", "use `bench mqar`"),
    ),
    "noisy sources in set": ((*MQAR, *set_("task.name=mqar-noisy")), ("`bench mqar --noisy-sources`",)),
    "noisy sources of niah": ((*NIAH, "--noisy-sources"), ("--noisy-sources",)),
    "bindings": (
        (*MQAR, "--noisy-sources", *set_("task.min_bindings=5")),
        ("task: min_bindings=5", "max_bindings is 5"),
    ),
    "bindings that don't fit": (
        (*MQAR, "--noisy-sources", *set_("task.max_bindings=8")),
        ("length=128", "8 bindings", "26 tokens a key", "208"),
    ),
    "reliability 2": (
        (*MQAR, "--noisy-sources", *set_("task.reliabilities=[0.5,2]")),
        ("task.reliabilities.1=2",),
    ),
    "label noise 1": ((*MQAR, "--label-noise", "1"), ("training.label_noise=1.0", "less than 1")),
    "label noise below 0": ((*NIAH, "--label-noise=-0.1"), ("training.label_noise=-0.1",)),
    "label noise nan": ((*NIAH, "--label-noise", "nan"), ("training.label_noise=nan",)),
    "label noise a": ((*NIAH, "--label-noise", "a"), ("--label-noise", "'a' is not a number")),
    "checkpoint and label noise": (
        (*NIAH, "--checkpoint", "model", "--label-noise", "0.1"),
        ("--checkpoint", "--label-noise"),
    ),
    "config with an unknown key": ((*NIAH, "--config", "typo.yaml"), ("'trainng'", "'training'")),
    "no checkpoint": ((*NIAH, "--checkpoint", "nowhere"), ("nowhere", "no such folder")),
    "checkpoint a file": ((*NIAH, "--checkpoint", "file"), ("no checkpoint at file", "it is a file")),
    "checkpoint of nothing": ((*NIAH, "--checkpoint", "folder"), ("no checkpoint at folder",)),
    "checkpoint and model": ((*NIAH, "--checkpoint", "model", "--model", "mamba2"), ("--checkpoint", "--model")),
    "checkpoint and post": ((*NIAH, "--checkpoint", "model", "--post"), ("--checkpoint", "--post")),
    "checkpoint and bft": ((*NIAH, "--checkpoint", "model", "--bft"), ("--checkpoint", "--bft")),
    "checkpoint and preset": ((*NIAH, "--checkpoint", "model", "--preset", "smoke"), ("--checkpoint", "--preset")),
    "checkpoint and seeds": ((*NIAH, "--checkpoint", "model", "--seeds", "1,2"), ("--checkpoint", "--seeds")),
    "checkpoint and sizes": ((*NIAH, "--checkpoint", "model", *set_("model.d_model=8")), ("model.d_model",)),
    "checkpoint and steps": ((*NIAH, "--checkpoint", "model", *set_("training.steps=8")), ("training.steps",)),
    "checkpoint too small": ((*MQAR, "--checkpoint", "model"), ("vocabulary of 195", "mqar needs 272")),
    "checkpoint cut short": ((*NIAH, "--checkpoint", "short"), ("short", "model.safetensors is cut short")),
    "checkpoint set": ((*MQAR, *set_("checkpoint=model")), ("vocabulary of 195",)),
    "out a file": ((*NIAH, "--out", "file"), ("file is a file", "--out")),
    "out inside a file": ((*NIAH, "--out", "file/runs"), ("file is a file", "--out")),
    "out 5": ((*NIAH, *set_("out=5")), ("out=5",)),
    "spectrum of nothing": (("spectrum", "nowhere"), ("nowhere", "no such folder")),
    "spectrum of a file": (("spectrum", "file"), ("file", "it is a file")),
    "spectrum without decays": (("spectrum", "attention"), ("attention", "no decays")),
    "add nothing": (("leaderboard", "add", "nowhere", "--file", "new.json"), ("nowhere", "no such folder")),
    "add what is no run": (
        ("leaderboard", "add", "folder", "--file", "new.json"),
        ("folder", "no finished evaluation"),
    ),
    "add a file": (("leaderboard", "add", "file", "--file", "new.json"), ("file", "no finished evaluation")),
    "validate nothing": (("leaderboard", "validate", "nowhere.json"), ("nowhere.json", "No such file")),
    "validate garbage": (("leaderboard", "validate", "file"), ("file", "not valid JSON")),
    "validate something else": (("leaderboard", "validate", "other.json"), ("other.json", "not a leaderboard")),
    "show garbage": (("leaderboard", "show", "file"), ("file", "not valid JSON")),
    "show a folder": (("leaderboard", "show", "folder"), ("folder", "Is a directory")),
}


@pytest.fixture(scope="module")
def _made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wrong")
    contents = {
        "file": "no JSON, no YAML: [",
        "broken.yaml": "model: [1",
        "list.yaml": "- 1\n",
        "empty.yaml": "",
        "mqar.yaml": "task: {name: mqar}\n",
        "noisy.yaml": "task: {name: mqar-noisy}\n",
        "typo.yaml": "trainng: {steps: 3}\n",
        "other.json": json.dumps({"a": 1}),
    }
    for name, content in contents.items():
        (folder / name).write_text(content)
    (folder / "model.bin").write_bytes(b"\xff\xfe\x00\x01")
    (folder / "folder").mkdir()
    (folder / "folder" / "thesis.tex").touch()
    for name, model in (("model", "mamba2"), ("short", "mamba2"), ("attention", "attention")):
        sizes = {"name": model, "d_model": 16, "mixer": {"headdim": 8} if model == "mamba2" else {}}
        config = make_config({"task": {"name": "niah"}, "model": sizes}).model
        write_checkpoint(folder / name, build_model(config), 0, {}, {})
    weights = folder / "short" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-8])
    return folder


@pytest.fixture
def made(_made: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with all kinds of wrong files, to work in; nothing may be trained or evaluated."""

    def never(*_: object, **__: object) -> None:
        raise AssertionError("the mistake wasn't noticed before the work began")

    monkeypatch.setattr(harness_run, "train", never)
    monkeypatch.setattr(harness_run, "evaluate", never)
    monkeypatch.chdir(_made)
    return _made


def content(folder: Path) -> dict[str, str]:
    return {str(path.relative_to(folder)): file_digest(path) for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("name", WRONG)
def test_a_mistake_is_one_line(made: Path, name: str) -> None:
    words, fragments = WRONG[name]
    before = content(made)
    code, out, err = bench(*words)
    assert code == 2
    assert out == ""
    assert err.startswith("bench: ") and err.endswith("\n") and err.count("\n") == 1
    assert len(err) < 300
    for fragment in fragments:
        assert fragment in err
    assert "(and " not in err, "one mistake is not counted as several"
    assert content(made) == before, "nothing is left behind"


def test_there_are_more_than_thirty() -> None:
    assert len({words for words, _ in WRONG.values()}) == len(WRONG) > 30


def test_cuda_where_there_is_none(made: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    for words in (NIAH, ("selftest",)):
        code, out, err = bench(*words, "--device", "cuda")
        assert (code, out) == (2, "")
        assert err == "bench: --device cuda: this PyTorch finds no GPU; use --device cpu\n"


@pytest.mark.parametrize("name", ["model", "unknown key of mixer", "length foo", "no checkpoint", "flag"])
def test_the_installed_command_says_the_same(made: Path, name: str) -> None:
    words, fragments = WRONG[name]
    command = Path(sys.executable).with_name("bench")
    done = subprocess.run([command, *words], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("bench: ") and done.stderr.count("\n") == 1
    assert all(fragment in done.stderr for fragment in fragments)


def test_what_a_file_says_beside_a_checkpoint_is_refused_where_it_would_be_ignored(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "q.yaml").write_text("model: {name: attention}\nseed: 7\n")
    refused = bench("niah", "--config", "q.yaml", "--checkpoint", "run")
    assert refused.code == 2 and "leave out model" in refused.err
    doubled = bench("niah", "--seeds", "0,1", "--set", "seed=5")
    assert doubled.code == 2 and "exclude each other" in doubled.err
