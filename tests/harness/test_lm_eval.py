"""lm-eval both ways: its tasks in our record, and decaybench as its model, against `bench lambada` and plain loops.

Skipped where lm-eval isn't installed (the extra `lm`); `make parity` installs it.
"""

from __future__ import annotations

import json
import math
import random
import re
import signal
import tomllib
from importlib import import_module, metadata
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from decaybench.core.errors import UserError
from decaybench.harness import lm_eval_run, lm_eval_tasks, reader
from decaybench.harness.lm_eval_model import ModelArguments, register, request_of
from decaybench.harness.reader import Prompt, before_stops
from decaybench.models.checkpoints import find_checkpoint, write_checkpoint
from decaybench.models.language_model import build_model
from decaybench.results.record import read_record
from decaybench.text.tokenizers import ByteTokenizer, load_tokenizer
from tests.command import bench, start
from tests.harness.test_lambada import config, live_model
from tests.models import small
from tests.tasks.test_lambada import PASSAGES
from tests.text.test_lambada import SHARED

lm_eval = pytest.importorskip("lm_eval", reason="lm-eval isn't installed: make parity")
pytestmark = pytest.mark.parity

BYTES = ByteTokenizer()
ENDINGS = [
    {
        "activity_label": "Baking",
        "ctx_a": f"A woman bakes {what}.",
        "ctx_b": "she",
        "endings": ["puts it in.", f"eats {what} [laughing].", "é.", "takes all of it to the market, and sells it."],
        "label": str(n % 4),
    }
    for n, what in enumerate(["bread", "a cake", "rolls", "pies", "a tart", "buns", "a pie"])
]
SUMS = [{"question": f"What is {n} and {n}?", "answer": f"It is twice {n}. #### {2 * n}"} for n in range(5)]


def lines(path: Path, rows: list[dict[str, object]]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> str:
    """One that has seen three passages until it foresees their last words."""
    folder = tmp_path_factory.mktemp("live")
    passages = lines(folder / "passages.jsonl", [{"text": text} for text in PASSAGES])
    facts = {"train_length": 64, "tokenizer_sha256": BYTES.sha256}
    write_checkpoint(folder / "live", live_model(config(passages)), 1, facts, {})
    return str(folder / "live")


@pytest.fixture
def passages(here: Path) -> str:
    return lines(here / "passages.jsonl", [{"text": text} for text in PASSAGES])


def asked(checkpoint: str, task: str, file: str, *more: str):
    words = ("eval", "--tasks", task, "--checkpoint", checkpoint, "--data-file", f"{task}={file}", "--device", "cpu")
    return bench(*words, "--quiet", "--json", *more)


def record(result):
    assert result.code == 0, result.err
    return json.loads(result.out)


def model_of(checkpoint: str):
    return find_checkpoint(Path(checkpoint)).model().double()


def request(*arguments):
    return SimpleNamespace(args=arguments)


def as_model(checkpoint: str, **settings):
    made = import_module("decaybench.harness.lm_eval_model").DecaybenchLM
    return made.create_from_arg_obj({"checkpoint": checkpoint, "device": "cpu", **settings}, {"batch_size": "auto"})


@pytest.mark.parametrize("where", ["none", "separator"])
def test_lambada_is_ours_and_lm_evals(checkpoint, passages, where):
    theirs = record(asked(checkpoint, "lambada_openai", passages, "--start", where))
    words = ("--source", "openai", "--file", passages, "--variants", "plain", "--start", where)
    ours = record(bench("lambada", "--checkpoint", checkpoint, *words, "--device", "cpu", "--quiet", "--json"))
    (own,), (cell,) = ours["cells"], theirs["cells"]
    assert 0.5 < cell["value"] < 1
    assert cell["value"] == own["value"]
    assert cell["log_likelihood"] == pytest.approx(own["log_likelihood"], abs=2e-5)
    assert cell["perplexity"] == pytest.approx(own["perplexity"], rel=1e-5)
    assert cell["real_tokens"] == own["real_tokens"]


def test_a_record_holds_what_lm_eval_reports_of_our_model(checkpoint, passages):
    register()
    kept = record(asked(checkpoint, "lambada_openai", passages))
    (task,) = lm_eval_tasks.load_tasks(["lambada_openai"], {"lambada_openai": passages})
    found = lm_eval.simple_evaluate(
        "decaybench",
        model_args=f"checkpoint={checkpoint},device=cpu",
        tasks=[task._task],
        batch_size="auto",
        bootstrap_iters=0,
    )
    results, (cell,) = found["results"]["lambada_openai"], kept["cells"]
    assert results["acc,none"] == cell["value"]
    assert results["perplexity,none"] == pytest.approx(cell["perplexity"], rel=1e-5)
    info = kept["task"]["config"]
    assert info["lm_eval"] == metadata.version("lm-eval")
    assert info["tasks"][0]["version"] == found["versions"]["lambada_openai"] == 1.0
    assert info["tokenizer_sha256"] == BYTES.sha256 == found["config"]["tokenizer_sha256"]
    assert kept["checkpoint"]["sha256"] == found["config"]["model_sha"]
    assert found["config"]["model_dtype"] == "float32"


@pytest.mark.parametrize("name", ["gpt2", "gpt-neox-20b"])
def test_lambada_with_a_tokenizer_of_a_file(name, here):
    pytest.importorskip("tokenizers")
    folder = SHARED.parent / "tokenizers" / name
    if not folder.is_dir() or not (SHARED / "lambada_test.jsonl").is_file():
        pytest.skip(f"no tokenizer {name} or no LAMBADA at shared/data")
    tokenizer = load_tokenizer(str(folder))
    model = build_model(small.config(vocab_size=tokenizer.vocab_size), 2)
    made = write_checkpoint(here / "c", model, 2, {"train_length": 64, "tokenizer_sha256": tokenizer.sha256}, {})
    file, same = str(SHARED / "lambada_test.jsonl"), ("--tokenizer", str(folder))
    theirs = record(asked(str(made.folder), "lambada_openai", file, "--limit", "25", *same))
    words = ("--source", "openai", "--file", file, "--variants", "plain", "--samples", "25", *same)
    ours = record(bench("lambada", "--checkpoint", str(made.folder), *words, "--device", "cpu", "--quiet", "--json"))
    (own,), (cell,) = ours["cells"], theirs["cells"]
    assert cell["log_likelihood"] == pytest.approx(own["log_likelihood"], abs=1e-4)
    assert cell["perplexity"] == pytest.approx(own["perplexity"], rel=1e-4)
    assert cell["real_tokens"] == own["real_tokens"]


def nats(model, context, text):
    """By one pass in float64."""
    ids, read = list(text.encode()), list(context.encode())
    with torch.no_grad():
        logits = model(torch.tensor([read + ids])).logits[0].log_softmax(-1)
    return sum(float(logits[len(read) + place - 1, token]) for place, token in enumerate(ids))


def test_multiple_choice_is_the_plain_rule(checkpoint, here):
    kept = record(asked(checkpoint, "hellaswag", lines(here / "h.jsonl", ENDINGS)))
    model = model_of(checkpoint)
    hits: dict[str, list[int]] = {"acc": [], "acc_norm": []}
    for row in ENDINGS:
        query = f"Baking: {row['ctx_a']} She"
        choices = [text.replace(" [laughing]", "") if "[" in text else text for text in row["endings"]]
        found = [nats(model, query, f" {text}") for text in choices]
        hits["acc"].append(int(int(np.argmax(found)) == int(row["label"])))
        by_length = [value / len(text) for value, text in zip(found, choices, strict=True)]
        hits["acc_norm"].append(int(int(np.argmax(by_length)) == int(row["label"])))
    assert [cell["variant"] for cell in kept["cells"]] == ["hellaswag acc", "hellaswag acc_norm"]
    assert [cell["name"] for cell in kept["cells"]] == ["hellaswag-acc", "hellaswag-acc_norm"]
    assert {cell["variant"].split()[1]: cell["correct"] for cell in kept["cells"]} == hits
    assert hits["acc"] != hits["acc_norm"]
    assert all("perplexity" not in cell for cell in kept["cells"])


def test_few_shot_examples_come_from_the_file_and_are_never_the_one_asked(here):
    file = lines(here / "h.jsonl", ENDINGS)
    (task,) = lm_eval_tasks.load_tasks(["hellaswag"], {"hellaswag": file}, shots=len(ENDINGS) - 1)
    (again,) = lm_eval_tasks.load_tasks(["hellaswag"], {"hellaswag": file}, shots=len(ENDINGS) - 1)
    assert task.shots == len(ENDINGS) - 1
    assert task.requests == again.requests
    for index, row in enumerate(ENDINGS):
        context = task.requests[4 * index].context
        assert all(context.count(other["ctx_a"]) == 1 for other in ENDINGS)
        assert context.endswith(f"{row['ctx_a']} She")


def test_what_a_model_writes_is_scored_by_each_filter(checkpoint, here, monkeypatch):
    def twice(model, prompts, new_tokens, **_):
        texts = [BYTES.decode(prompt).rsplit("What is ", 1)[1] for prompt in prompts]
        return [list(f" #### {2 * int(text.split()[0])}".encode()) for text in texts]

    monkeypatch.setattr(reader, "greedy", twice)
    file = lines(here / "sums.jsonl", SUMS)
    kept = record(asked(checkpoint, "gsm8k", file, "--num-fewshot", "2"))
    names = {cell["name"]: cell["value"] for cell in kept["cells"]}
    assert names == {"gsm8k-exact_match-strict-match": 1.0, "gsm8k-exact_match-flexible-extract": 1.0}
    assert kept["task"]["config"]["tasks"][0]["shots"] == 2


def test_what_a_model_writes_is_kept(checkpoint, here):
    kept = record(asked(checkpoint, "gsm8k", lines(here / "sums.jsonl", SUMS), "--num-fewshot", "1", "--limit", "3"))
    assert [cell["value"] for cell in kept["cells"]] == [0, 0]
    (file,) = here.glob("runs/lm-eval-*/evaluations/*/samples/gsm8k.jsonl")
    found = {line["request"]: line["text"] for line in map(json.loads, file.read_text().splitlines())}
    (task,) = lm_eval_tasks.load_tasks(["gsm8k"], {"gsm8k": str(here / "sums.jsonl")}, 3, 1)
    model = find_checkpoint(Path(checkpoint)).model()
    for index, prompt in enumerate(task.requests):
        assert isinstance(prompt, Prompt)
        assert found[index] == loop(model, prompt.text, prompt.until, prompt.new_tokens)


@torch.no_grad()
def loop(model, text, until, most):
    """Greedy, one token after the other, by steps of one row."""
    output = model.prefill(torch.tensor([list(text.encode())]))
    new: list[int] = []
    while len(new) < most:
        new.append(int(output.logits[0].argmax()))
        if new[-1] == BYTES.separator or any(stop in BYTES.decode(new) for stop in until):
            break
        output = model.step(torch.tensor(new[-1:]), output.state)
    return before_stops(BYTES.decode(new), until)


def test_rolling_is_a_plain_sum_over_one_pass(checkpoint, monkeypatch):
    monkeypatch.setattr(reader, "_PIECE", 50)
    texts = ["", "x", " ".join(PASSAGES), "é" * 130]
    found = as_model(checkpoint).loglikelihood_rolling([request(text) for text in texts], disable_tqdm=True)
    model = model_of(checkpoint)
    for text, got in zip(texts, found, strict=True):
        ids = [BYTES.separator, *text.encode()]
        with torch.no_grad():
            logits = model(torch.tensor([ids])).logits[0, :-1].log_softmax(-1)
        want = float(logits.gather(1, torch.tensor(ids[1:])[:, None]).sum()) if text else 0.0
        assert got == pytest.approx(want, rel=1e-5)


def test_the_model_answers_in_lm_evals_order_and_fills_its_cache(checkpoint):
    model, kept = as_model(checkpoint, batch_tokens=100), {}
    model.cache_hook = SimpleNamespace(
        add_partial=lambda kind, args, found: kept.update({(kind, *args[:1], str(args[1])): found})
    )
    pairs = [(text[:cut], text[cut:]) for text in PASSAGES for cut in (3, 12, 20)]
    random.Random(1).shuffle(pairs)
    found = model.loglikelihood([request(*pair) for pair in pairs], disable_tqdm=True)
    exact = model_of(checkpoint)
    moved = [(a.rstrip(), a[len(a.rstrip()) :] + b) for a, b in pairs]
    assert [value for value, _ in found] == pytest.approx([nats(exact, *pair) for pair in moved], rel=1e-5)
    assert [kept["loglikelihood", *pair] for pair in pairs] == found
    prompts = [(text[:9], {"until": [" the", "o"], "max_gen_toks": 7}) for text in PASSAGES]
    written = model.generate_until([request(*prompt) for prompt in prompts], disable_tqdm=True)
    plain = find_checkpoint(Path(checkpoint)).model()
    assert written == [loop(plain, text, options["until"], 7) for text, options in prompts]


def test_lm_eval_finds_the_model_by_its_entry_point():
    project = tomllib.loads((Path(lm_eval_run.__file__).parents[2] / "pyproject.toml").read_text())
    (target,) = project["project"]["entry-points"]["lm_eval.models"].values()
    module, name = target.split(":")
    register()
    made = import_module("lm_eval.api.registry").get_model("decaybench")
    assert made is getattr(import_module(module), name)
    assert issubclass(made, import_module("lm_eval.api.model").LM)
    assert "hf" in import_module("lm_eval.api.registry").model_registry


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"checkpoint": "x", "batchsize": 3}, "unknown key 'model_args.batchsize' .*did you mean 'batch_size'"),
        ({"checkpoint": "x", "dtype": "float16"}, "dtype='float16'"),
        ({"checkpoint": "x", "batch_size": 0}, "batch_size=0"),
        ({"checkpoint": "no/such/run"}, "no checkpoint at no/such/run"),
        ({}, "checkpoint is missing"),
    ],
)
def test_model_arguments_that_cannot_be_are_one_line(arguments, said):
    with pytest.raises(UserError, match=said):
        import_module("decaybench.harness.lm_eval_model").DecaybenchLM(**arguments)


def test_model_arguments_are_taken_as_lm_eval_makes_them():
    assert ModelArguments(checkpoint="12", batch_size="auto:4").batch_size is None
    assert ModelArguments(checkpoint="12", batch_size="8").batch_size == 8
    assert ModelArguments.model_validate({"checkpoint": 12}).checkpoint == "12"


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"temperature": 0.7}, "temperature=0.7 .* generation is greedy here"),
        ({"do_sample": True}, "do_sample=True: generation is greedy here"),
        ({"num_beams": 4}, "unknown generation option 'num_beams'"),
        ({"max_gen_toks": 0}, "max_gen_toks=0: at least 1 token"),
    ],
)
def test_sampling_is_refused(options, said):
    with pytest.raises(UserError, match=said):
        request_of("generate_until", ("x", options))


def test_generation_options_are_lm_evals():
    assert request_of("generate_until", ("x", {})) == Prompt("x", (), 256)
    given = {"until": "\n", "max_new_tokens": 3, "do_sample": False, "temperature": 0.9, "top_p": 1}
    assert request_of("generate_until", ("x", given)) == Prompt("x", ("\n",), 3)
    assert request_of("generate_until", ("x", {"until": ["a", "b"], "temperature": 0.0})) == Prompt(
        "x", ("a", "b"), 256
    )


def same(one, other):
    for part in ("task", "model", "checkpoint", "cells"):
        assert one[part] == other[part]


MANY = [{"text": f"{'Long ago ' * (n % 7)}it was said {n} times that the end of it was {n}"} for n in range(40)]


@pytest.mark.parametrize("after", [1, 20])
def test_a_killed_evaluation_goes_on_and_ends_the_same(checkpoint, here, after):
    file = lines(here / "many.jsonl", MANY)
    words = (
        "eval",
        "--tasks",
        "lambada_openai",
        "--checkpoint",
        checkpoint,
        "--device",
        "cpu",
        "--batch-tokens",
        "150",
    )
    words = (*words, "--data-file", f"lambada_openai={file}")
    process = start(*words, "--out", "killed", cwd=here)

    def reached():
        return any(len(path.read_bytes().splitlines()) >= after for path in here.glob("killed/*/*/*/samples/*.jsonl"))

    assert process.wait_for(reached), process.end()
    process.send(signal.SIGKILL)
    assert process.end().code == -signal.SIGKILL
    (left,) = here.glob("killed/*/*/*/samples/*.jsonl")
    done = left.read_bytes()
    left.write_bytes(done + b'{"request": 3, "docu')  # a torn line, as a kill inside a write leaves it
    resumed = record(bench(*words, "--out", "killed", "--quiet", "--json"))
    same(resumed, record(bench(*words, "--out", "whole", "--quiet", "--json")))
    (whole,) = here.glob("whole/*/*/*/samples/*.jsonl")
    assert left.read_bytes() == whole.read_bytes()
    assert left.read_bytes().startswith(done[: done.rfind(b"\n") + 1])


def test_what_is_done_is_not_done_again(checkpoint, here, passages, monkeypatch):
    first = record(asked(checkpoint, "lambada_openai", passages))
    monkeypatch.setattr(reader.Reader, "_answer", None)
    assert record(asked(checkpoint, "lambada_openai", passages)) == first


def test_damaged_answers_are_asked_again(checkpoint, here, passages):
    first = record(asked(checkpoint, "lambada_openai", passages))
    (log,) = here.glob("runs/*/*/*/samples/*.jsonl")
    good = log.read_bytes().splitlines(keepends=True)
    log.write_bytes(b"".join([good[0], b'{"request":0,"document":0}\n', *good[2:]]))
    log.parents[1].joinpath("record.json").unlink()
    again = asked(checkpoint, "lambada_openai", passages)
    assert f"note: {log.relative_to(here)} line 2 is damaged" in " ".join(again.err.split())
    same(record(again), first)


def test_other_documents_are_another_evaluation(checkpoint, here):
    """Also where only the right answers change, of which no request tells."""
    first = record(asked(checkpoint, "hellaswag", lines(here / "h.jsonl", ENDINGS)))
    others = [{**row, "label": str((int(row["label"]) + 1) % 4)} for row in ENDINGS]
    second = record(asked(checkpoint, "hellaswag", lines(here / "h.jsonl", others)))
    assert first["task"]["data_hash"] != second["task"]["data_hash"]
    assert first["cells"][0]["correct"] != second["cells"][0]["correct"]
    assert len(list(here.glob("runs/*/evaluations/*"))) == 2


def test_a_record_goes_to_the_leaderboard_and_recomputes(checkpoint, here, passages):
    assert asked(checkpoint, "lambada_openai", passages).code == 0
    (run,) = here.glob("runs/lm-eval-*")
    added = bench("leaderboard", "add", str(run), "--file", "board.json")
    assert added.code == 0, added.err
    assert bench("leaderboard", "validate", "board.json").out.endswith("1 entries, all valid\n")
    Path(passages).rename(here / "away")
    found = bench("leaderboard", "validate", "board.json")
    assert found.code == 0
    assert "1 not recomputable here (needs passages.jsonl (sha256" in " ".join(found.out.split())
    assert bench("leaderboard", "show", "board.json").code == 0


def test_answers_that_were_changed_are_found(checkpoint, here, passages):
    assert asked(checkpoint, "lambada_openai", passages).code == 0
    (run,) = here.glob("runs/lm-eval-*")
    (log,) = run.glob("evaluations/*/samples/*.jsonl")
    good = log.read_text()
    row = json.loads(good.splitlines()[0])
    for change, said in (
        ({"log_likelihood": row["log_likelihood"] - 1}, "log_likelihood is not what its answers give"),
        ({"greedy": not row["greedy"]}, "correct is not what its answers give"),
        ({"tokens": row["tokens"] + 1}, "the line of request .* is another request's"),
        ({"document": row["document"] + 1}, "the line of request .* is another request's"),
    ):
        log.write_text(json.dumps({**row, **change}) + "\n" + good.partition("\n")[2])
        found = bench("leaderboard", "add", str(run), "--file", "board.json")
        assert found.code == 2
        assert re.search(said, " ".join(found.err.split())), found.err
    log.write_text(good.partition("\n")[2])
    assert "has 4 answers to 5 requests" in bench("leaderboard", "add", str(run), "--file", "board.json").err


def test_the_committed_schema_holds_such_a_record(checkpoint, here, passages):
    jsonschema = pytest.importorskip("jsonschema")
    schema = json.loads((Path(lm_eval_run.__file__).parents[1] / "results/record.schema.json").read_text())
    kept = record(asked(checkpoint, "lambada_openai", passages))
    jsonschema.validate(kept, schema)
    (path,) = here.glob("runs/*/*/*/record.json")
    assert read_record(path).plain() == kept


def refused(code, said, *words):
    found = bench("eval", *words, "--device", "cpu", "--quiet")
    assert (found.code, found.out) == (code, ""), found
    line = found.err.strip()
    assert line.startswith("bench: ") and "\n" not in line
    assert said in line


def test_names_that_stand_for_nothing_are_one_line(checkpoint, here, passages):
    name, of = "lambada_openai", ("--checkpoint", checkpoint)
    refused(2, "did you mean 'lambada_openai'?", "--tasks", "lambada_opnai", *of)
    refused(2, "'lambada' stands for several tasks", "--tasks", "lambada", *of, "--data-file", f"lambada={passages}")
    said = "--data-file: 'lambada' is none of --tasks; did you mean 'lambada_openai'?"
    refused(2, said, "--tasks", name, *of, "--data-file", f"lambada={passages}")
    refused(2, "write TASK=FILE", "--tasks", name, *of, "--data-file", passages)
    refused(2, "each once", "--tasks", f"{name},{name}", *of)


def test_settings_that_cannot_be_are_one_line(checkpoint, here, passages, finished):
    name, of, file = "lambada_openai", ("--checkpoint", checkpoint), f"lambada_openai={passages}"
    refused(2, "limit=0", "--tasks", name, *of, "--limit", "0")
    refused(2, "write none, separator", "--tasks", name, *of, "--start", "bos")
    refused(2, "No such file", "--tasks", name, *of, "--data-file", f"{name}=nowhere.jsonl")
    refused(2, "no checkpoint at", "--tasks", name, "--checkpoint", "nowhere", "--data-file", file)
    mqar = ("--checkpoint", str(finished("mqar")))
    refused(2, "name its tokenizer by --tokenizer", "--tasks", name, *mqar, "--data-file", file)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("", "it holds no rows"),
        ("\n\n", "it holds no rows"),
        ('{"text": "a b"}\n[1]\n', "line 2: not a JSON object"),
        ('{"text": "a b"}\n{"text": "a', "line 2: not a JSON object"),
        ('{"words": "a b"}\n', "its rows don't fit lm-eval's task"),
        ('{"text": "a b"}\n{"text": ["a"]}\n', "it can't be read"),
        ('{"text": "a \\ud800"}\n', "it can't be read"),
    ],
)
def test_files_that_hold_no_documents_are_one_line(checkpoint, here, content, said):
    (here / "odd.jsonl").write_text(content)
    words = ("--tasks", "lambada_openai", "--checkpoint", checkpoint)
    refused(2, said, *words, "--data-file", f"lambada_openai={here / 'odd.jsonl'}")
    assert not list(here.glob("runs/lm-eval-*"))


def test_tasks_that_a_record_cannot_hold_are_one_line(checkpoint, here):
    (here / "page.jsonl").write_text('{"page": "Some text ."}\n')
    words = ("--tasks", "wikitext", "--checkpoint", checkpoint, "--data-file", f"wikitext={here / 'page.jsonl'}")
    refused(2, "a record has no place", *words)


def test_a_vocabulary_too_small_for_the_tokenizer_is_one_line(here, passages):
    made = write_checkpoint(here / "c", small.model(vocab_size=256), 0, {}, {})
    words = ("--tasks", "lambada_openai", "--checkpoint", str(made.folder), "--data-file", f"lambada_openai={passages}")
    refused(2, "has a vocabulary of 256 tokens; tokenizer bytes", *words, "--tokenizer", "bytes")


def test_what_cannot_be_had_is_one_line(checkpoint, here, passages, monkeypatch):
    def unreachable(*_, **__):
        raise ConnectionError("Couldn't reach the Hub")

    monkeypatch.setattr("datasets.load_dataset", unreachable)
    words = ("--tasks", "lambada_openai", "--checkpoint", checkpoint)
    refused(1, "(ConnectionError: Couldn't reach the Hub); with a copy of them: --data-file lambada_openai=", *words)

    def missing(name):
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(lm_eval_tasks.metadata, "version", missing)
    refused(1, "pip install 'decaybench[lm]'", *words)


def test_a_folder_of_answers_names_its_model_to_other_commands(checkpoint, here, passages):
    assert asked(checkpoint, "lambada_openai", passages).code == 0
    (run,) = here.glob("runs/lm-eval-*")
    found = bench("spectrum", str(run))
    assert found.code == 2
    assert f"holds answers to lm-eval's tasks alone: name its model, {checkpoint}" in " ".join(found.err.split())


def test_a_model_without_numbers_is_an_error(here, passages):
    broken = small.model(vocab_size=257)
    broken.norm.weight.data.fill_(math.nan)
    made = write_checkpoint(here / "c", broken, 0, {"tokenizer_sha256": BYTES.sha256}, {})
    words = ("--tasks", "lambada_openai", "--checkpoint", str(made.folder), "--data-file", f"lambada_openai={passages}")
    refused(1, "log-likelihood of a text is nan, not a number", *words)
