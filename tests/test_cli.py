"""The command line itself: help at once, JSON that a program can read, exit codes, and quiet where quiet was asked."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import decaybench
from decaybench.core.errors import RunError
from decaybench.harness import run as harness_run
from decaybench.harness import selftest as harness_selftest
from decaybench.harness.invariances import Check
from decaybench.harness.presets import configure
from decaybench.models.config import ModelConfig
from decaybench.models.registry import architectures
from decaybench.results.leaderboard import add_record
from decaybench.tasks.registry import TASKS
from tests.command import MQAR, NIAH, NOISY, bench
from tests.results.board import measured, seeds

BENCH = Path(sys.executable).with_name("bench")
COMMANDS = ("niah", "mqar", "spectrum", "precision", "selftest", "speed", "sweep", "leaderboard", "eval", "list")


def call(*words: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run([BENCH, *words], capture_output=True, text=True, timeout=120, cwd=cwd, env=environment)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(harness_run, "_draw", lambda record, spectrum, folder: None)
    return tmp_path


def test_help_answers_at_once_and_names_every_command() -> None:
    times = []
    for _ in range(5):
        began = time.perf_counter()
        done = call("--help")
        times.append(time.perf_counter() - began)
    assert done.returncode == 0 and done.stderr == ""
    for command in COMMANDS:
        assert f" {command} " in done.stdout
    assert min(times) < 0.5


def test_help_imports_nothing_heavy() -> None:
    code = (
        "import sys; from decaybench import cli; sys.argv = ['bench', '--help']\n"
        "try: cli.main()\n"
        "finally: assert not {'torch', 'numpy', 'pydantic', 'matplotlib'} & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("command", COMMANDS)
def test_each_command_explains_itself(command: str) -> None:
    code, out, err = bench(command, "--help")
    assert (code, err) == (0, "")
    assert f"bench {command}" in out


@pytest.mark.parametrize("command", ["niah", "mqar"])
def test_tasks_have_the_common_flags(command: str) -> None:
    out = bench(command, "-h").out
    for flag in (
        *("--model", "--post", "--bft", "--preset", "--config", "--train-length", "--seed", "--seeds", "--checkpoint"),
        "--label-noise",
        *("--eval-lengths", "--variants", "--samples", "--set", "--device", "--backend", "--out", "--force"),
        *("--json", "--quiet"),
    ):
        assert f" {flag} " in out


def test_version() -> None:
    assert bench("--version") == (0, f"decaybench {decaybench.__version__}\n", "")


@pytest.mark.parametrize("words", [(), ("leaderboard",)])
def test_no_command_shows_the_help(words: tuple[str, ...]) -> None:
    code, out, err = bench(*words)
    assert (code, err) == (2, "")
    assert "Usage" in out


def test_list_as_json() -> None:
    code, out, err = bench("list", "--json")
    assert (code, err) == (0, "")
    found = json.loads(out)
    assert [entry["name"] for entry in found["models"]] == list(architectures())
    assert [entry["name"] for entry in found["tasks"]] == list(TASKS)
    presets = {(entry["task"], entry["name"]) for entry in found["presets"]}
    assert {("niah", "smoke"), ("mqar", "smoke"), ("mqar", "post-16k"), ("mqar", "zoology-based")} <= presets
    assert [entry["name"] for entry in found["add-ons"]] == ["post", "bft"]
    assert {entry["name"]: entry["add-ons"] for entry in found["models"]} == {
        **dict.fromkeys(architectures(), "post, bft"),
        "attention": "bft",
    }


def test_list_as_tables() -> None:
    code, out, err = bench("list")
    assert (code, err) == (0, "")
    for name in (*architectures(), *TASKS, "post-16k", "2405.21060"):
        assert name in out


@pytest.mark.parametrize("name", architectures())
def test_list_of_one_architecture(name: str) -> None:
    known = architectures()[name]
    found = json.loads(bench("list", name, "--json").out)
    assert (found["name"], found["source"], found["equation"]) == (name, known.source, known.equation)
    assert found["verified"] == known.verified
    titles = {"PoST": "post", "BFT": "bft"}
    assert {titles[key]: said for key, said in found.items() if key in titles} == known.addons
    smoke, *_ = [entry for entry in found["presets"] if entry["name"] == "smoke"]
    assert smoke["model"]["d_model"] == 64 and smoke["learning rate"] > 0
    assert {entry["key"] for entry in found["settings"]} == {
        f"model.mixer.{field}" for field in known.config_class().model_fields
    }
    code, out, err = bench("list", name)
    assert (code, err) == (0, "")
    told = " ".join(out.split())
    named = [row["key"] for row in found["settings"]]
    for words in (known.source, known.equation, *known.addons.values(), known.verified, *named):
        assert " ".join(words.split()) in told


def test_the_smoke_learning_rate_that_is_listed_is_the_one_that_runs_take() -> None:
    for name in architectures():
        for entry in json.loads(bench("list", name, "--json").out)["presets"]:
            flags = {"model.name": name}
            (config,) = configure(entry["task"], preset=entry["name"], flags=flags, without_data=True)
            assert entry["learning rate"] == config.training.learning_rate


@pytest.mark.parametrize(
    ("words", "fragments"),
    [
        (("gal",), ("'gal'", "'gla'")),
        (("mamba2", "--settings"), ("--settings", "`bench list mamba2`")),
    ],
)
def test_list_of_what_is_not_there(words: tuple[str, ...], fragments: tuple[str, ...]) -> None:
    code, out, err = bench("list", *words)
    assert (code, out) == (2, "")
    assert err.startswith("bench: ") and err.count("\n") == 1
    assert all(fragment in err for fragment in fragments)


def test_one_seed_is_one_document_and_several_are_a_list(here: Path) -> None:
    code, out, err = bench(*NIAH, "--json")
    assert code == 0
    record = json.loads(out)
    (path,) = here.glob("runs/*/evaluations/*/record.json")
    assert record == json.loads(path.read_text())
    assert "training 12/12" in err and "evaluation 48/48" in err

    code, out, err = bench(*NIAH, "--json", "--seeds", "1,0")
    assert code == 0
    records = json.loads(out)
    assert [record["seed"] for record in records] == [1, 0]
    assert records[1] == record
    assert "already done" in err
    assert [json.loads(bench(*NIAH, "--json", "--seeds", "0").out)] == [[record]], "a list even of one"


def test_quiet_leaves_stderr_empty(here: Path) -> None:
    attention = ("mqar", "--model", "attention", "--train-length", "16", "--eval-lengths", "1x", "--samples", "2")
    few = ("--set", "training.steps=2", "--set", "training.batch_tokens=16", "--set", "model.d_model=8")
    for words in (NIAH, NIAH, (*NIAH, "--eval-lengths", "4x"), (*attention, *few)):
        code, out, err = bench(*words, "--quiet")
        assert (code, err) == (0, "")
        assert "record   runs/" in out


def test_the_table_says_what_was_asked_and_where_it_lies(here: Path) -> None:
    code, out, _ = bench(*MQAR, "--seeds", "0,1")
    assert code == 0
    for words in ("mqar v1: mamba2, seed 0", "mqar v1: mamba2, seed 1", "capacity", "persist", "32", "1x", "64", "2x"):
        assert words in out
    paths = [line.split()[1] for line in out.splitlines() if line.startswith(("record ", "figures "))]
    assert len(paths) == 4 and all(path.startswith("runs/mqar-mamba2-") for path in paths)
    assert sum(Path(path).is_file() for path in paths) == 2
    assert "medians over seeds" in out
    assert out.count("mqar v1 ") == 2, "and a row for each variant, both seeds in it"


def test_noisy_sources_are_a_task_of_their_own(here: Path) -> None:
    code, out, _ = bench(*NOISY, "--seeds", "0,1")
    assert code == 0
    for words in ("mqar-noisy v1: mamba2, seed 0", "bayes", "majority", "last", "(bayes)", "persist"):
        assert words in out
    assert out.count("(majority)") == 2, "once a variant: both seeds were asked the same"
    runs = sorted(Path("runs").iterdir())
    assert len(runs) == 2 and all(run.name.startswith("mqar-noisy-mamba2-") for run in runs)
    words = ("--config", str(runs[0] / "config.yaml"))
    result = bench("mqar", "--noisy-sources", *words)
    assert result.code == 0 and "already done" in result.err
    result = bench("mqar", "--noisy-sources", "--checkpoint", str(runs[0]), "--samples", "3", "--json")
    assert result.code == 0
    record = json.loads(result.out)
    assert record["task"]["name"] == "mqar-noisy" and set(record["cells"][0]["references"]) == {
        *("bayes", "majority", "last")
    }
    for own, others in (((), words), (("--noisy-sources",), ("--set", "task.name=mqar"))):
        refused = bench("mqar", *own, *others)
        assert (refused.code, refused.out) == (2, "") and refused.err.count("\n") == 1


def test_label_noise_by_flag_is_said_in_the_table_and_the_record(here: Path) -> None:
    code, out, _ = bench(*MQAR, "--label-noise", "0.25")
    assert code == 0 and "mamba2, seed 0, trained with label noise 0.25" in out
    assert bench(*MQAR).code == bench(*MQAR, "--label-noise", "0").code == 0
    records = [json.loads(path.read_text()) for path in Path("runs").glob("*/evaluations/*/record.json")]
    assert len(records) == 2, "no noise is the run without the flag"
    assert sorted(record["training"]["config"]["label_noise"] or 0 for record in records) == [0, 0.25]
    runs = sorted(str(path) for path in Path("runs").iterdir())
    assert bench("leaderboard", "add", *runs, "--file", "board.json").code == 0
    assert "mamba2, label noise 0.25" in " ".join(bench("leaderboard", "show", "board.json").out.split())
    assert bench("leaderboard", "validate", "board.json").out == "board.json: 2 entries, all valid\n"
    refused = bench("leaderboard", "draw", "--task", "mqar", "--file", "board.json")
    assert refused.code == 2 and "training.label_noise is " in refused.err
    for chosen in ("none", "0.25"):
        words = ("--where", f"training.label_noise={chosen}", "--out", "one.svg")
        assert bench("leaderboard", "draw", "--task", "mqar", "--file", "board.json", *words).code == 0


def test_what_the_installed_command_prints(tmp_path: Path) -> None:
    done = call(*NIAH, "--post", "--json", "--quiet", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    record = json.loads(done.stdout)
    assert record["model"]["cell"] == "mamba2+post"
    (run,) = (tmp_path / "runs").iterdir()
    figures = {path.name for path in run.glob("evaluations/*/figures/*")}
    assert figures == {
        f"{name}.{kind}"
        for name in ("accuracy-length", "accuracy-length-depth", "accuracy-distance", "timescales")
        for kind in ("png", "svg")
    }
    done = call("spectrum", str(run), "--json", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    (spectrum,) = json.loads(done.stdout)
    assert spectrum["model"] == "mamba2+post" and spectrum["train_length"] == 32
    assert (run / "spectrum" / "timescales.svg").is_file()


def test_a_failure_is_exit_code_1(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object, **__: object) -> None:
        raise RunError("the work\ncan't be   finished")

    monkeypatch.setattr(harness_run, "train", fails)
    assert bench(*NIAH, "--quiet") == (1, "", "bench: the work can't be finished\n")

    def stopped(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(harness_run, "train", stopped)
    assert bench(*NIAH, "--quiet") == (1, "", "bench: stopped; the same command goes on from where it was\n")


def test_a_bug_is_not_hidden(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object, **__: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(harness_run, "train", fails)
    with pytest.raises(ZeroDivisionError):
        bench(*NIAH)


@pytest.mark.parametrize("words", ["list", "list --json", "niah --help"])
def test_a_closed_pipe_is_no_error(words: str) -> None:
    for reader in ("head -1", "true"):
        done = subprocess.run(
            f"{BENCH} {words} | {reader}",
            shell=True,
            capture_output=True,
            text=True,
            timeout=60,
            executable="/bin/bash",
        )
        assert done.returncode == 0
        assert done.stderr == ""


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full")
@pytest.mark.parametrize("words", [("list",), ("list", "--json"), ("--version",)])
def test_output_that_cannot_be_written_is_one_line(words: tuple[str, ...]) -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run([BENCH, *words], stdout=full, stderr=subprocess.PIPE, text=True, timeout=60)
    assert done.returncode == 1
    assert done.stderr.startswith("bench: can't write the output: ") and done.stderr.count("\n") == 1


def test_selftest_as_json(monkeypatch: pytest.MonkeyPatch) -> None:
    code, out, err = bench("selftest", "--model", "attention", "--json")
    assert (code, err) == (0, "")
    checks = json.loads(out)
    assert checks and all(check["passed"] for check in checks)


def _checks(monkeypatch: pytest.MonkeyPatch, broken: str = "") -> None:
    """The self-test's checks without their work; those of the cell `broken` in float32 don't hold."""

    def checks(config: ModelConfig, dtype: torch.dtype, device: str) -> list[Check]:
        wrong = config.cell == broken and dtype == torch.float32
        return [Check(9, "packed rows", 0.5 if wrong else 0.0, 1e-5), Check(1, "left padding", 0.0, 1e-5)]

    monkeypatch.setattr(harness_selftest, "selftest", checks)


def test_selftest_of_all_is_a_line_a_cell(monkeypatch: pytest.MonkeyPatch) -> None:
    _checks(monkeypatch)
    code, out, err = bench("selftest", "--model", "all")
    assert (code, err) == (0, "")
    both, one = ("", "+post", "+post-minimal", "+bft", "+post+bft"), ("", "+bft")
    addons = [both if "post" in known.addons else one for known in architectures().values()]
    cells = [name + addon for name, several in zip(architectures(), addons, strict=True) for addon in several]
    assert out.splitlines() == [f"{cell}: all 4 checks hold (float64, float32)" for cell in cells]


def test_selftest_lists_what_is_broken_and_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    _checks(monkeypatch, broken="gla+post")
    code, out, err = bench("selftest", "--model", "all")
    assert (code, err) == (1, "bench: 1 checks failed, the first: packed rows (0.5)\n")
    lines = out.splitlines()
    place = lines.index("gla+post: 1 of 4 checks broken")
    assert lines[place + 1] == "  float32, pitfall 9, packed rows: 5.0e-01, bound 1e-05"
    assert out.count("broken") == 1 and out.count("hold") == len(lines) - 2
    code, out, err = bench("selftest", "--model", "all", "--json")
    assert code == 1
    assert [row["model"] for row in json.loads(out) if not row["passed"]] == ["gla+post float32"]


def test_selftest_of_one_cell_or_verbose_shows_every_check(monkeypatch: pytest.MonkeyPatch) -> None:
    _checks(monkeypatch)
    out = bench("selftest", "--model", "mamba2").out
    assert out.count("packed rows") == 2 and "mamba2 float64: all 2 checks hold" in out
    assert "packed rows" not in bench("selftest", "--model", "mamba2", "--post").out
    out = bench("selftest", "--model", "mamba2", "--post", "--verbose").out
    assert out.count("packed rows") == 4 and "mamba2+post-minimal float32: all 2 checks hold" in out
    for model, flags, cells in (
        ("attention", ["--bft"], ["attention+bft"]),
        ("gla", ["--bft", "--post"], ["gla+post+bft", "gla+post-minimal+bft"]),
    ):
        rows = json.loads(bench("selftest", "--model", model, *flags, "--json").out)
        assert [row["model"] for row in rows if row["pitfall"] == 9] == [
            f"{cell} {dtype}" for cell in cells for dtype in ("float64", "float32")
        ]


def test_speed_from_the_command_line(here: Path) -> None:
    sizes = ("batch=2", "length=16", "vocab_size=32", "d_model=16", "n_layers=1", "mixer.headdim=8", "mixer.d_state=8")
    words = [word for size in sizes for word in ("--set", size)]
    code, out, err = bench(
        "speed", "--post", "--bft", *words, "--no-peers", "--repeats", "6", "--threads", "1", "--out", "a.json"
    )
    assert code == 0
    report = json.loads(Path("a.json").read_text())
    addons = ("", "+post", "+post-minimal", "+bft", "+post+bft")
    assert [cell["cell"] for cell in report["cells"]] == [f"mamba2{addon}" for addon in addons]
    assert [cell.get("base") for cell in report["cells"]] == [None, *["mamba2"] * 4]
    assert (report["repeats"], report["environment"]["threads"], report["peers"]) == (6, 1, [])
    assert {name: report["shape"][name] for name in ("batch", "length", "d_model")} == {
        "batch": 2,
        "length": 16,
        "d_model": 16,
    }
    for cell in report["cells"]:
        assert cell["cell"] in out
        assert [work["what"] for work in cell["work"]] == ["train", "prefill", "decode", "decode_batch"]
        assert all(len(work["seconds"]) == 6 and min(work["seconds"]) > 0 for work in cell["work"])
    assert "mamba2: train" in err


@pytest.mark.parametrize(
    ("words", "fragments"),
    [
        (("--model", "mamba2,gal"), ("'gal'", "'gla'")),
        (("--shape", "smok"), ("'smok'", "'smoke'")),
        (("--set", "btch=3"), ("'btch'", "'batch'")),
        (("--repeats", "2"), ("--repeats 2", "6")),
        (("--threads", "0"), ("--threads 0",)),
    ],
)
def test_speed_of_what_cannot_be_measured(words: tuple[str, ...], fragments: tuple[str, ...]) -> None:
    code, out, err = bench("speed", *words)
    assert (code, out) == (2, "")
    assert err.startswith("bench: ") and err.count("\n") == 1
    assert all(fragment in err for fragment in fragments)


def test_leaderboard_from_the_command_line(here: Path) -> None:
    assert bench(*NIAH, "--seeds", "0,1", "--quiet").code == 0
    runs = sorted(str(path) for path in Path("runs").iterdir())
    code, out, err = bench("leaderboard", "add", *runs, "--file", "board.json")
    assert (code, err) == (0, "") and out.count("added: runs/niah-") == 2
    code, out, err = bench("leaderboard", "add", *runs, "--file", "board.json")
    assert (code, err) == (0, "") and out.count("already there: runs/niah-") == 2
    assert bench("leaderboard", "validate", "board.json") == (0, "board.json: 2 entries, all valid\n", "")
    code, out, err = bench("leaderboard", "show", "board.json")
    assert (code, err) == (0, "") and "mamba2" in out
    code, out, err = bench("leaderboard", "show", "board.json", "--json")
    assert [record["seed"] for record in json.loads(out)] == [0, 1]
    (record,) = Path(runs[0]).glob("evaluations/*/record.json")
    assert bench("leaderboard", "validate", str(record)).out.endswith("1 entries, all valid\n")


def test_leaderboard_draw_from_the_command_line(here: Path) -> None:
    board = Path("board.json")
    for model in ("mamba2", "mamba2+post", "gla"):
        for record in seeds(model, {64: (0.9, 0.7), 128: (0.5, 0.4)}, variants=("capacity", "persist")):
            add_record(board, record)
    words = ("leaderboard", "draw", "--task", "mqar", "--file", "board.json")
    assert bench(*words, "--variant", "persist, capacity", "--out", "docs/curves.png") == (
        0,
        "drawn: docs/curves.png\ndrawn: docs/curves.svg\n",
        "",
    )
    assert Path("docs/curves.png").read_bytes().startswith(b"\x89PNG")
    assert bench(*words).code == 0 and Path("leaderboard.svg").exists()
    assert bench(*words, "--where", "model.cell=mamba2", "--out", "one.svg").code == 0
    add_record(board, measured("gla", 3, {64: 0.9}, task__config__vocab_size=512))
    for more, fragments in {
        (): ("task.vocab_size is 272 or 512", "--where task.vocab_size=VALUE"),
        ("--variants", "capacit"): ("'capacit'", "'capacity'"),
        ("--where", "steps=3"): ("'steps'", "'training.steps'"),
        ("--out", "curves"): ("--out curves", ".png"),
        ("--task", "niah"): ("'niah'", "mqar"),
        ("--file", "nowhere.json"): ("nowhere.json", "No such file"),
    }.items():
        code, out, err = bench(*words, *more)
        assert (code, out) == (2, "")
        assert err.startswith("bench: ") and err.count("\n") == 1 and len(err) < 300
        assert all(fragment in err for fragment in fragments), err


def test_force_starts_anew(here: Path) -> None:
    first = json.loads(bench(*NIAH, "--json").out)
    (run,) = (here / "runs").iterdir()
    (run / "checkpoint" / "mine").touch()
    shutil.rmtree(run / "evaluations")
    again = bench(*NIAH, "--json", "--force")
    assert again.code == 0 and "training 12/12" in again.err
    assert not (run / "checkpoint" / "mine").exists()
    assert json.loads(again.out)["cells"] == first["cells"]
