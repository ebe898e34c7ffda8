"""A sweep's file: which runs it asks for, and the one line that answers what is wrong in it."""

from __future__ import annotations

import re
import time
from pathlib import Path

import pytest
import yaml

from decaybench.harness.presets import configure
from decaybench.harness.sweep.plan import SweepFile, read_plan
from tests.command import bench
from tests.harness.sweeps import write_sweep

ROOT = Path(__file__).parents[2]


def plan_of(tmp_path, text, out=None):
    path = tmp_path / "sweep.yaml"
    path.write_text(text)
    return read_plan(path, out=out)


def hashes(plan):
    return [(run.config.training_hash, run.config.evaluation_hash) for run in plan.runs]


def test_a_run_is_what_the_tasks_own_command_makes_of_the_same_settings(tmp_path):
    plan = plan_of(
        tmp_path,
        "task: mqar\npreset: smoke\nseeds: [0, 3]\nset: {evaluation.samples: 50, training.steps: 1e+2}\n"
        "grid:\n  model.name: [mamba2, gla]\n  model.post: [null, {}, {variant: minimal}]\n",
    )
    wanted = []
    for model in ("mamba2", "gla"):
        for addon in ((), ("model.post={}",), ("model.post.variant=minimal",)):
            settings = [f"model.name={model}", *addon, "evaluation.samples=50", "training.steps=100"]
            wanted += configure("mqar", preset="smoke", settings=settings, seeds=[0, 3])
    assert hashes(plan) == [(config.training_hash, config.evaluation_hash) for config in wanted]
    assert [run.config.training.learning_rate for run in plan.runs] == [0.02] * 6 + [0.01] * 6  # each model's own
    assert [run.number for run in plan.runs] == list(range(1, 13))
    assert plan.runs[4].label == "mamba2+post-minimal seed 0"


def test_a_block_takes_from_above_what_it_leaves_out_but_the_grid(tmp_path):
    plan = plan_of(
        tmp_path,
        "task: mqar\npreset: smoke\nseeds: [1, 2]\nset: {training.steps: 7, training.clip: 0.5}\nruns:\n"
        "- {set: {training.steps: 8}}\n- {seeds: [5], grid: {model.name: [gla, retnet]}}\n- {task: niah}\n",
    )
    told = [(r.config.task.name, r.config.model.name, r.config.seed, r.config.training.steps) for r in plan.runs]
    assert told == [
        *(("mqar", "mamba2", 1, 8), ("mqar", "mamba2", 2, 8), ("mqar", "gla", 5, 7), ("mqar", "retnet", 5, 7)),
        *(("niah", "mamba2", 1, 7), ("niah", "mamba2", 2, 7)),
    ]
    assert {run.config.training.clip for run in plan.runs} == {0.5}
    assert plan.runs[0].label == "mqar mamba2 seed 1 steps=8"


def test_a_grid_above_is_a_block_of_its_own(tmp_path):
    plan = plan_of(tmp_path, "task: mqar\ngrid: {seed: [0, 1]}\nruns: [{set: {seed: 9}}]\n")
    assert [run.config.seed for run in plan.runs] == [0, 1, 9]
    assert [run.config.seed for run in plan_of(tmp_path, "task: mqar\nruns: [{set: {seed: 9}}]\n").runs] == [9]
    assert [run.config.seed for run in plan_of(tmp_path, "task: mqar\n").runs] == [0]


@pytest.mark.parametrize(
    ("above", "grid", "wanted"),
    [
        (
            "{model.post: {variant: minimal}}",
            "{model.post: [null, {}]}",
            ["mamba2", "mamba2+post"],
        ),  # one key: the last
        (
            "{model.post.variant: minimal}",
            "{model.post: [null, {}]}",
            ["mamba2", "mamba2+post-minimal"],
        ),  # a part of it
        ("{model: {post: {}}}", "{model.post.control: [none, shuffled]}", ["mamba2+post", "mamba2+post-shuffled"]),
    ],
)
def test_what_is_said_last_of_a_setting_holds(tmp_path, above, grid, wanted):
    plan = plan_of(tmp_path, f"task: mqar\nset: {above}\ngrid: {grid}\n")
    assert [run.config.model.cell for run in plan.runs] == wanted


def test_what_is_asked_for_twice_is_named_and_done_once(tmp_path):
    plan = plan_of(
        tmp_path,
        "task: mqar\nset: {model.post: {}}\ngrid: {model.post.variant: [paper, minimal]}\nruns:\n- {seeds: [0]}\n"
        "- {set: {evaluation.samples: 5}}\n",
    )
    assert [run.config.evaluation.samples for run in plan.runs] == [100, 100, 5]
    assert plan.repeated == ["mamba2+post seed 0 is asked for twice, and done once: run 1"]


def test_out_of_the_command_is_above_the_files(tmp_path):
    plan = plan_of(tmp_path, "task: mqar\nset: {out: here}\n", out=tmp_path / "there")
    assert plan.runs[0].folder.path.parent == tmp_path / "there"
    assert plan_of(tmp_path, "task: mqar\nset: {out: here}\n").runs[0].folder.path.parent == Path("here")


BOMB = "a: &a [x, x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{new}: &{new} [{', '.join(['*' + old] * 10)}]\n" for old, new in zip("abcdefgh", "bcdefghi", strict=True)
)
WRONG = {
    "unknown key": ("task: mqar\nseed: [0]\n", ("'seed'", "'seeds'")),
    "unknown key of a block": ("task: mqar\nruns: [{gird: {}}]\n", ("'runs.0.gird'", "'grid'")),
    "no task": ("seeds: [0]\n", ("task is missing", "mqar")),
    "no task in a block": ("runs: [{seeds: [0]}]\n", ("runs.0", "task is missing")),
    "task": ("task: mqa\n", ("'mqa'", "'mqar'")),
    "preset": ("task: mqar\npreset: smok\n", ("'smok'", "'smoke'")),
    "no list": ("task: mqar\ngrid: {training.steps: 5}\n", ("grid", "training.steps", "[brackets]", "set")),
    "a mapping for a list": ("task: mqar\ngrid: {training: {steps: [5]}}\n", ("grid", "training", "[brackets]")),
    "empty list": ("task: mqar\ngrid: {training.steps: []}\n", ("training.steps", "no run at all")),
    "folders in a grid": ("task: mqar\ngrid: {out: [a, b]}\n", ("out can't vary", "--out")),
    "no seeds": ("task: mqar\nseeds: []\n", ("seeds",)),
    "seed twice": ("task: mqar\nseeds: [1, 1]\n", ("seed", "twice")),
    "half a seed": ("task: mqar\nseeds: [0.5]\n", ("seeds.0=0.5",)),
    "seed and seeds": ("task: mqar\nseeds: [1]\ngrid: {seed: [2]}\n", ("seed=2", "--seeds")),
    "bad key in one cell": (
        "task: mqar\nruns: [{grid: {training.steps: [5, 6], model.nam: [gla]}}]\n",
        ("runs.0", "training.steps=5", "'model.nam'", "'name'"),
    ),
    "bad value in one cell": (
        "task: mqar\ngrid: {model.name: [gla, glb]}\n",
        ("grid (model.name=glb)", "'glb'", "'gla'"),
    ),
    "bad value for one model": (
        "task: mqar\ngrid: {model.name: [mamba2, attention], model.post: [{}]}\n",
        ("model.name=attention, model.post={}", "post"),
    ),
    "backend": ("task: mqar\nset: {backend: torc}\n", ("'torc'", "'torch'")),
    "hole in a key": ("task: mqar\nset: {training..steps: 5}\n", ("'training..steps'", "training.steps")),
    "checkpoint that is gone": ("task: mqar\ngrid: {checkpoint: [nowhere]}\n", ("checkpoint=nowhere", "nowhere")),
    "task of another command": ("task: mqar\nset: {task.name: niah}\n", ("task.name='niah'", "`bench niah`")),
    "length": (
        "task: mqar\nset: {evaluation.lengths: [1y]}\ngrid: {training.steps: [3]}\n",
        ("grid (training.steps=3)", "'1y'", "1x,2x"),
    ),
    "threads": ("task: mqar\nthreads: 0\n", ("threads=0",)),
    "gpus": ("task: mqar\ngpus: 2\n", ("gpus=2",)),
    "a million runs": (
        f"task: mqar\nseeds: {list(range(1000))}\ngrid: {{evaluation.samples: {list(range(1, 1001))}}}\n",
        ("1,000,000 runs", "10,000"),
    ),
    "list": ("- 1\n", ("mapping", "list")),
    "empty": ("", ("mapping",)),
    "no YAML": ("task: [\n", ("not valid YAML",)),
    "key twice": ("task: mqar\ngrid: {seed: [1]}\ngrid: {seed: [2]}\n", ("'grid'", "twice", "line 3")),
    "Python object": ("task: !!python/object:os.system {}\n", ("not valid YAML",)),
    "aliases that stand for much": (BOMB, ("values", "aliases")),
    "alias of itself": ("task: mqar\nset: &a {x: *a}\n", ("values", "aliases")),
}


@pytest.mark.parametrize(("text", "parts"), WRONG.values(), ids=list(WRONG))
def test_a_mistake_is_one_line_and_nothing_is_started(tmp_path, text, parts):
    path = tmp_path / "sweep.yaml"
    path.write_text(text)
    began = time.process_time()
    done = bench("sweep", str(path), "--out", str(tmp_path / "runs"))
    assert (done.code, done.out) == (2, "")
    line = done.err.strip()
    assert "\n" not in line and line.startswith(f"bench: {path}")
    for part in parts:
        assert part in line
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["sweep.yaml"]
    assert time.process_time() - began < 10


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        (("--engine", "rey"), ("'rey'", "'ray'")),
        (("--workers", "0"), ("--workers 0",)),
        (("--workers", "two"), ("--workers", "two")),
        (("--address", "here:1"), ("--address here:1", "--engine ray")),
    ],
)
def test_a_wrong_flag_is_one_line(tmp_path, words, parts):
    path = tmp_path / "sweep.yaml"
    path.write_text("task: mqar\n")
    done = bench("sweep", str(path), *words)
    assert done.code == 2 and all(part in done.err for part in parts)


def test_a_file_that_isnt_there_is_one_line(tmp_path):
    done = bench("sweep", str(tmp_path / "nothing.yaml"))
    assert done.code == 2 and "can't read" in done.err


@pytest.mark.parametrize("path", sorted(ROOT.glob("sweeps/*.yaml")), ids=lambda path: path.stem)
def test_the_sweeps_that_are_here_are_whole(path):
    plan = read_plan(path)
    assert len(plan.runs) > 1 and not plan.repeated
    assert isinstance(yaml.safe_load(path.read_text()), dict)


def test_a_plan_of_thousands_is_made_in_time(tmp_path):
    began = time.process_time()
    assert len(plan_of(tmp_path, f"task: mqar\nseeds: {list(range(1000))}\n").runs) == 1000
    assert time.process_time() - began < 60


PAGE = (ROOT / "docs/sweep.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("number", [0, 1])
def test_the_pages_examples_are_sweeps(tmp_path, number):
    text = re.findall(r"```yaml\n(.+?)```", PAGE, re.DOTALL)[number]
    plan = plan_of(tmp_path, text)
    assert len(plan.runs) == [12, 18 + 9 + 3][number]
    if number:  # it shows every key that there is
        assert yaml.safe_load(text).keys() == SweepFile.model_fields.keys()


def test_the_page_counts_the_sweeps_that_are_here():
    said = dict(re.findall(r"\]\(\.\./(sweeps/[\w-]+\.yaml)\) \|.+\| (\d+) \|", PAGE))
    assert said == {str(path.relative_to(ROOT)): str(len(read_plan(path).runs)) for path in ROOT.glob("sweeps/*.yaml")}


def test_labels_tell_apart_what_the_models_name_does_not(tmp_path):
    posts = [None, {}, {"variant": "minimal"}]
    named = read_plan(write_sweep(tmp_path / "s.yaml", grid={"model.post": posts})).runs
    assert [run.label for run in named] == ["mamba2 seed 0", "mamba2+post seed 0", "mamba2+post-minimal seed 0"]
    horizons = read_plan(write_sweep(tmp_path / "s.yaml", grid={"model.post": [{}, {"horizon": 64}]})).runs
    assert [run.label for run in horizons] == ["mamba2+post seed 0 post={}", "mamba2+post seed 0 post={horizon: 64}"]
