"""The command line: parses, calls one function of harness or results, prints. No logic.

Heavy modules are imported inside the commands, so that `bench --help` answers at once.
"""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_args

import typer

from decaybench.core.errors import RunError, UserError
from decaybench.core.memory import keep_freed_memory
from decaybench.harness.addons import ADDONS

if TYPE_CHECKING:
    from decaybench.harness.config import RunConfig
    from decaybench.harness.prepared import Prepared
    from decaybench.harness.progress import Progress
    from decaybench.harness.run import Outcome

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="How well does a linear recurrence remember, at which distance, and do add-ons help?",
    epilog="Start with: bench niah --model mamba2 --post",
)
board = typer.Typer(
    no_args_is_help=True, help="Keep records in a file that others can check: add, validate, show, draw."
)
app.add_typer(board, name="leaderboard")
text_data = typer.Typer(no_args_is_help=True, help="Text for language models: into token shards, and what is in them.")
app.add_typer(text_data, name="data")


def _whole(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise typer.BadParameter(f"{text!r} is not a whole number") from None


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise typer.BadParameter(f"{text!r} is not a number") from None


_WHOLE: dict[str, Any] = {"parser": _whole, "metavar": "<int>"}  # Typer's own message doesn't say what it was given

MODEL, ASKED, RUNNING = "Model and training", "Evaluation", "Running"


def _option(*names: str, panel: str, shown: str = "", **settings: Any) -> Any:
    """A flag in a panel of the help; shown: the default as the help words it."""
    return typer.Option(*names, rich_help_panel=panel, show_default=shown or False, **settings)


Json = Annotated[bool, _option("--json", panel=RUNNING, help="Machine output on stdout, all else on stderr.")]
Board = Annotated[Path, typer.Option("--file", help="The leaderboard.")]
_BOARD = Path("results/leaderboard.json")
_INTERRUPTED = 130  # what Typer makes of Ctrl-C

# What every task's command takes, in the order of the help.
_FLAGS: dict[str, Any] = {
    "model": Annotated[str | None, _option(panel=MODEL, shown="mamba2", help="Architecture; `bench list` names them.")],
    **{
        name: Annotated[
            bool,
            _option(f"--{name}", panel=MODEL, help=f"With {addon.title}: {addon.description} (--set model.{name}.…)."),
        ]
        for name, addon in ADDONS.items()
    },
    "preset": Annotated[
        str | None, _option(panel=MODEL, shown="smoke", help="Named settings; `bench list` names them.")
    ],
    "config": Annotated[
        Path | None, _option(panel=MODEL, help="YAML file of settings, in place of a preset; flags win over it.")
    ],
    "train_length": Annotated[
        int | None, _option(panel=MODEL, shown="by preset", help="Longest training length, tokens.", **_WHOLE)
    ],
    "label_noise": Annotated[
        float | None,
        _option(
            panel=MODEL,
            shown="0",
            help="Share of training labels replaced by a wrong one; evaluation stays clean.",
            parser=_number,
            metavar="<share>",
        ),
    ],
    "seed": Annotated[
        int | None, _option(panel=MODEL, shown="0", help="Seed of initial values and training data.", **_WHOLE)
    ],
    "seeds": Annotated[str | None, _option(panel=MODEL, help="One run for each of several seeds: 0,1,2.")],
    "checkpoint": Annotated[Path | None, _option(panel=MODEL, help="Run or checkpoint to evaluate; no training.")],
    "eval_lengths": Annotated[
        str | None,
        _option(
            panel=ASKED,
            shown="1x,2x,4x,8x",
            help="Lengths to ask at: multiples of the training length (2x) or tokens (512).",
        ),
    ],
    "samples": Annotated[int | None, _option(panel=ASKED, shown="by task", help="Samples a cell.", **_WHOLE)],
    "settings": Annotated[
        list[str] | None,
        _option(
            "--set",
            panel=RUNNING,
            metavar="KEY=VALUE",
            help="Any setting, e.g. training.steps=500; may be repeated. `bench list --settings` names them.",
        ),
    ],
    "device": Annotated[str | None, _option(panel=RUNNING, shown="auto", help="auto, cpu or cuda.")],
    "backend": Annotated[
        str | None, _option(panel=RUNNING, shown="auto", help="Kernels of the recurrence: auto or torch.")
    ],
    "out": Annotated[Path | None, _option(panel=RUNNING, shown="runs", help="Folder of run folders.")],
    "force": Annotated[
        bool,
        _option(
            "--force", panel=RUNNING, help="Delete the run where it exists, with all its evaluations, and start anew."
        ),
    ],
    "json": Json,
    "quiet": Annotated[bool, _option("--quiet", panel=RUNNING, help="No progress on stderr.")],
    "dry_run": Annotated[
        bool, _option("--dry-run", panel=RUNNING, help="Say what training would take, memory for one, and do nothing.")
    ],
}
# The setting that a flag gives.
_KEYS = {
    "model": "model.name",
    "train_length": "task.train_length",
    "label_noise": "training.label_noise",
    "seed": "seed",
    "checkpoint": "checkpoint",
    "eval_lengths": "evaluation.lengths",
    "variants": "evaluation.variants",
    "depths": "evaluation.depths",
    "source": "task.source",
    "file": "task.file",
    "tokenizer": "task.tokenizer",
    "start": "task.start",
    "haystack": "task.haystack",
    "fit": "task.fit",
    "samples": "evaluation.samples",
    "device": "device",
    "backend": "backend",
    "out": "out",
    "data": "task.data",
    "mix": "task.mix",
    "reset": "task.reset",
}
_LISTS = ("eval_lengths", "variants", "depths")


def _add_task(task: str, what: str, others: dict[str, str] | None = None, word: str | None = None, **own: Any) -> None:
    """A command that runs a task; own: its flags beside the common ones, or in their place, None for without.

    others: the tasks that flags of it choose; word: its name, where that isn't the task's.
    """

    def command(**given: Any) -> None:
        _run_task(next((name for flag, name in (others or {}).items() if given[flag]), task), given)

    flags = {name: kind for name, kind in {**_FLAGS, **own}.items() if kind is not None}
    off = {name: False if get_args(kind)[0] is bool else None for name, kind in flags.items()}
    command.__doc__ = what
    app.command(word or task)(_with_flags(command, (_flag(name, kind, off[name]) for name, kind in flags.items())))


def _with_addons(command: Callable[..., None]) -> Callable[..., None]:
    """A command with a flag for each add-on in the place of its parameter `addons`, the names of those given."""

    def flagged(**given: Any) -> None:
        command(addons=[name for name in ADDONS if given.pop(name)], **given)

    flags: list[inspect.Parameter] = []
    for own in inspect.signature(command, eval_str=True).parameters.values():
        if own.name != "addons":
            flags.append(_flag(own.name, own.annotation, own.default))
            continue
        for name, addon in ADDONS.items():
            kind = Annotated[bool, typer.Option(f"--{name}", help=f"With {addon.title}: {addon.description}.")]
            flags.append(_flag(name, kind, False))
    flagged.__name__, flagged.__doc__ = command.__name__, command.__doc__
    return _with_flags(flagged, flags)


def _flag(name: str, kind: Any, default: Any) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=kind)


def _with_flags(command: Callable[..., None], flags: Iterable[inspect.Parameter]) -> Callable[..., None]:
    """Typer reads a command's flags off its signature: made here, not written out for every task."""
    signature = inspect.Signature(list(flags))
    command.__signature__ = signature  # type: ignore[attr-defined]
    command.__annotations__ = {name: flag.annotation for name, flag in signature.parameters.items()}
    return command


_add_task(
    "niah",
    "Needle in a haystack: one planted fact, found again at any length and depth?",
    variants=Annotated[
        str | None,
        _option(
            panel=ASKED,
            shown="single; with --text single_1",
            help="single, multikey, multivalue, multiquery; with --text single_1, single_2, single_3, multikey_1, "
            "multikey_2, multikey_3, multivalue, multiquery, or all.",
        ),
    ],
    depths=Annotated[
        str | None,
        _option(panel=ASKED, shown="0,0.1,…,1; with --text RULER's draws", help="Depths of the needle, 0 to 1."),
    ],
    samples=Annotated[
        int | None, _option(panel=ASKED, shown="100", help="Samples a cell; RULER has 500 with --text.", **_WHOLE)
    ],
    others={"text": "niah-text"},
    text=Annotated[
        bool,
        _option(
            "--text",
            panel=MODEL,
            help="Task niah-text: needles in text, RULER's eight variants, for a language model of --checkpoint.",
        ),
    ],
    tokenizer=Annotated[
        str | None,
        _option(
            panel=ASKED,
            shown="bytes",
            help="With --text: bytes, a tokenizer.json or its folder, or an RWKV vocabulary file.",
        ),
    ],
    start=Annotated[
        str | None,
        _option(
            panel=ASKED,
            shown="separator",
            help="With --text: token before each prompt: none, separator, or an id (BOS, 0).",
        ),
    ],
    haystack=Annotated[
        str | None,
        _option(
            panel=ASKED,
            shown="noise; with --text built in",
            help="noise or needles; with --text a text, or a folder of .txt files, that essays are made of.",
        ),
    ],
    fit=Annotated[
        str | None,
        _option(
            panel=ASKED,
            shown="exact",
            help="With --text: exact (as much haystack as fits), ruler (RULER's rule: some samples are far shorter).",
        ),
    ],
)
_add_task(
    "mqar",
    "Multi-query associative recall: how many key-value pairs, for how long?",
    variants=Annotated[
        str | None,
        _option(panel=ASKED, shown="capacity,persist", help="capacity (pairs grow with the length), persist."),
    ],
    others={"noisy_sources": "mqar-noisy"},
    noisy_sources=Annotated[
        bool,
        _option(
            "--noisy-sources",
            panel=MODEL,
            help="Task mqar-noisy: each key bound several times, by sources of which some are unreliable; "
            "asked at 1x,2x,4x.",
        ),
    ],
    select=Annotated[
        bool,
        _option(
            "--select",
            panel=MODEL,
            help="Train at each learning rate of the preset's grid, and choose one and an epoch on a validation set; "
            "what a choice on the test would have reported stands beside it.",
        ),
    ],
    learning_rates=Annotated[
        str | None,
        _option(panel=MODEL, shown="by preset", help="With --select: the grid of learning rates, 1e-3,3e-3."),
    ],
)

_add_task(
    "lambada",
    "LAMBADA: is a passage's last word foreseen, alone and behind ever more unrelated text?",
    source=Annotated[
        str | None,
        _option(
            panel=MODEL,
            shown="synthetic",
            help="synthetic: built-in stories, trained on first; openai or standard: LAMBADA's passages in --file, for "
            "a model of --checkpoint.",
        ),
    ],
    file=Annotated[
        str | None,
        _option(
            panel=ASKED,
            metavar="<path>",
            help="The passages: .jsonl (openai), .txt (standard), .parquet, or hf://NAME:CONFIG:SPLIT.",
        ),
    ],
    tokenizer=Annotated[
        str | None,
        _option(
            panel=ASKED,
            shown="words for stories, else bytes",
            help="words, bytes, a tokenizer.json or its folder, or an RWKV vocabulary file.",
        ),
    ],
    start=Annotated[
        str | None,
        _option(panel=ASKED, shown="none", help="Token before each passage: none, separator, or an id (BOS, 0)."),
    ],
    variants=Annotated[
        str | None,
        _option(
            panel=ASKED,
            shown="stories all, passages plain",
            help="plain (the passage alone), before (unrelated ones before it), between (within stories).",
        ),
    ],
)


_add_task(
    "text",
    "Train a language model on text of your own (`bench data prepare`), and measure it on what was kept apart.",
    word="pretrain",
    preset=Annotated[str | None, _option(panel=MODEL, shown="micro", help="Named settings: micro, 180m, 440m, 1.5b.")],
    train_length=Annotated[
        int | None, _option(panel=MODEL, shown="by preset", help="Context, tokens of a training window.", **_WHOLE)
    ],
    label_noise=None,
    samples=Annotated[int | None, _option(panel=ASKED, shown="by preset", help="Windows a length.", **_WHOLE)],
    data=Annotated[Path | None, _option(panel=MODEL, help="Folder of token shards, made by `bench data prepare`.")],
    mix=Annotated[
        str | None,
        _option(
            panel=MODEL,
            metavar="TASK:SHARE",
            help="Other passages in a share of the training batches: niah-text:0.2. (--set task.mix.variants=…)",
        ),
    ],
    reset=Annotated[
        bool | None,
        _option(
            "--reset/--no-reset",
            panel=MODEL,
            shown="--reset",
            help="Whether positions and state start anew with each document, or run on, as in PoST's paper.",
        ),
    ],
)


def _version(wanted: bool) -> None:
    if wanted:
        import decaybench

        _print(f"decaybench {decaybench.__version__}")
        raise typer.Exit


@app.callback()
def _app(
    version: Annotated[
        bool, typer.Option("--version", help="The version, and no more.", callback=_version, is_eager=True)
    ] = False,
) -> None:
    pass


@app.command(name="eval")
def eval_(
    tasks: Annotated[
        str,
        typer.Option(help="lm-eval's tasks, groups or tags: lambada_openai,hellaswag,…", show_default=False),
    ],
    checkpoint: Annotated[Path, typer.Option(help="Run or checkpoint to evaluate.", show_default=False)],
    tokenizer: Annotated[
        str | None,
        typer.Option(help="bytes, a tokenizer.json or its folder, or an RWKV vocabulary file.", show_default="bytes"),
    ] = None,
    limit: Annotated[
        int | None, typer.Option(help="Documents a task, from the first on.", show_default="all", **_WHOLE)
    ] = None,
    num_fewshot: Annotated[
        int | None, typer.Option(help="Few-shot examples.", show_default="as each task says", **_WHOLE)
    ] = None,
    data_file: Annotated[
        list[str] | None,
        typer.Option(
            metavar="TASK=FILE",
            help="A task's documents from a file (.jsonl, .parquet) in the place of its data set; may be repeated.",
        ),
    ] = None,
    start: Annotated[str, typer.Option(help="Token before each row: none, separator, or an id (BOS, 0).")] = "none",
    dtype: Annotated[str, typer.Option(help="Of matrix products: float32 or bfloat16.")] = "float32",
    batch_tokens: Annotated[int, typer.Option(help="Tokens a batch.", **_WHOLE)] = 16_384,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    backend: Annotated[str, typer.Option(help="Kernels of the recurrence: auto or torch.")] = "auto",
    out: Annotated[Path, typer.Option(help="Folder of run folders.")] = Path("runs"),
    force: Annotated[
        bool, typer.Option("--force", help="Delete what is there of this checkpoint by lm-eval, and start anew.")
    ] = False,
    json: Json = False,
    quiet: Annotated[bool, typer.Option("--quiet", help="No progress on stderr.")] = False,
) -> None:
    """lm-eval's tasks, asked of a language model's checkpoint and kept in a record (extra lm)."""
    from decaybench.core.config import parse
    from decaybench.harness.lm_eval_run import LmEvalConfig, evaluate_tasks
    from decaybench.harness.progress import Progress

    asked = {
        "checkpoint": str(checkpoint),
        "tasks": tasks.split(","),
        "tokenizer": tokenizer,
        "limit": limit,
        "num_fewshot": num_fewshot,
        "data_files": data_file or (),
        "start": start,
        "dtype": dtype,
        "batch_tokens": batch_tokens,
        "device": device,
        "backend": backend,
        "out": str(out),
    }
    outcome = evaluate_tasks(parse(LmEvalConfig, asked), force=force, progress=Progress(quiet=quiet))
    if json:
        _write(outcome.record.to_json().strip())
    else:
        _print(outcome.record)
        _print(f"record   {outcome.evaluation.record_path}")


@app.command()
def spectrum(
    runs: Annotated[list[Path], typer.Argument(help="Runs or checkpoints.", metavar="RUN...")],
    tokens: Annotated[
        int, typer.Option(help="To read, in all, for what is measured; 0: timescales at rest alone.", **_WHOLE)
    ] = 32_768,
    data: Annotated[
        Path | None,
        typer.Option(help="Folder of token shards to read, for language models.", show_default="the run's own task"),
    ] = None,
    variant: Annotated[
        str | None, typer.Option(help="Variant of the task to read.", show_default="one that fits")
    ] = None,
    length: Annotated[
        str | None,
        typer.Option(
            help="Length of the samples to read: a multiple of the training length (4x) or tokens (512).",
            show_default="16x, or the longest below",
        ),
    ] = None,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    out: Annotated[
        Path | None,
        typer.Option(help="Folder for figures and numbers.", show_default="RUN/spectrum, of several runs spectrum"),
    ] = None,
    json: Json = False,
) -> None:
    """The decay timescales that models learned, at rest and measured as they read; several runs side by side."""
    from decaybench.core.files import readable_json
    from decaybench.harness.spectra import draw_spectra

    found = draw_spectra(runs, out, tokens=tokens, data=data, variant=variant, length=length, device=device)
    if json:
        _write(readable_json(found.plain()))
        return
    for table in found.tables():
        _print(table)
    for line in found.remarks():
        _print(line)
    _print(f"figures and numbers in {found.folder}")


@app.command()
def precision(
    runs: Annotated[list[Path], typer.Argument(help="Runs of one task trained with --bft.", metavar="RUN...")],
    eval_lengths: Annotated[
        str | None,
        typer.Option(
            "--eval-lengths",
            "--lengths",
            help="Lengths of contexts: multiples of the training length (2x) or tokens (512).",
            show_default="1x,2x,4x",
        ),
    ] = None,
    samples: Annotated[int, typer.Option(help="Samples a length.", **_WHOLE)] = 32,
    variant: Annotated[str | None, typer.Option(help="Variant of the task.", show_default="the run's first")] = None,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    out: Annotated[
        Path | None,
        typer.Option(help="Folder for figures and numbers.", show_default="RUN/precision, of several runs precision"),
    ] = None,
    json: Json = False,
) -> None:
    """What BFT does while a model reads: gain, sample size and precision; several runs, or a gate, side by side."""
    from decaybench.core.files import readable_json
    from decaybench.harness.precision import draw_precision

    lengths = None if eval_lengths is None else [part.strip() for part in eval_lengths.split(",")]
    found = draw_precision(runs, out, lengths=lengths, samples=samples, variant=variant, device=device)
    if json:
        _write(readable_json(found.plain()))
        return
    _print(found)
    for line in found.lines():
        _print(line)
    _print(f"figures and numbers in {found.folder}")


@app.command()
def theory(
    beta: Annotated[str, typer.Option(help="Kernels t^-beta to fit; the first is drawn.")] = "0.5,1,1.5",
    train_lengths: Annotated[
        str,
        typer.Option(
            "--train-lengths", "--train-length", help="T, tokens, three or more; figures show the middle one."
        ),
    ] = "64,256,1024,4096",
    channels: Annotated[
        str, typer.Option(help="N, decay rates a spectrum, three or more; random spectra have 32 at most.")
    ] = "4,8,16,24,32,48,64",
    draws: Annotated[int, typer.Option(help="Draws of each random spectrum.", **_WHOLE)] = 50,
    out: Annotated[Path, typer.Option(help="Folder for figures and numbers.")] = Path("theory"),
    json: Json = False,
    quiet: Annotated[bool, typer.Option("--quiet", help="No progress on stderr.")] = False,
) -> None:
    """What PoST's theory of decay spectra claims, beside what is found when it is computed; a minute's work."""
    from decaybench.core.files import readable_json
    from decaybench.harness.progress import Progress
    from decaybench.harness.theory import Question
    from decaybench.harness.theory_plots import draw_theory

    question = Question.parse(beta, train_lengths, channels, draws)
    found = draw_theory(question, out, Progress(quiet=quiet))
    if json:
        _write(readable_json(found.plain()))
        return
    for table in (found.table(), found.scaling_table()):
        _print(table)
    _print(f"figures and numbers in {out}")


@app.command()
def compare(
    runs: Annotated[
        list[Path] | None, typer.Argument(help="Finished runs; none: a leaderboard's records.", metavar="[RUN]...")
    ] = None,
    addon: Annotated[
        str | None, typer.Option(help="Run --task with and without this add-on, where that isn't done yet.")
    ] = None,
    task: Annotated[
        str | None,
        typer.Option(help="The task: mqar, mqar-noisy, niah.", show_default="all; of runs to make: mqar"),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(help="Architecture, or several: mamba2,gla.", show_default="all; of runs to make: mamba2"),
    ] = None,
    seeds: Annotated[
        str | None, typer.Option(help="These seeds alone.", show_default="all; of runs to make: 0,1,2")
    ] = None,
    preset: Annotated[str | None, typer.Option(help="Of runs to make: named settings.", show_default="smoke")] = None,
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Of runs to make: any setting; may be repeated."),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Of runs to make: folder of run folders.", show_default="runs")
    ] = None,
    base: Annotated[
        str | None,
        typer.Option(
            help="Compare every model with this one, e.g. mamba2+bft.", show_default="the same without the add-on"
        ),
    ] = None,
    where: Annotated[
        list[str] | None,
        typer.Option(metavar="KEY=VALUE", help="Of a leaderboard only records with this setting; may be repeated."),
    ] = None,
    file: Board = _BOARD,
    vary: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KEY",
            help="A setting that may differ, e.g. training.state_passing: it alone, with --base add-ons too. "
            "KEY=VALUE: run --task with and without it. May be repeated.",
        ),
    ] = None,
    equal: Annotated[
        str | None,
        typer.Option(
            help="state: only models whose states have as many numbers, to 5 %; with --addon the base's is sized so."
        ),
    ] = None,
    distance: Annotated[bool, typer.Option("--distance", help="Also by octave of the distance.")] = False,
    summary: Annotated[bool, typer.Option("--summary", help="One table: a row a model, a column a length.")] = False,
    markdown: Annotated[bool, typer.Option("--markdown", help="Tables in Markdown.")] = False,
    json: Json = False,
    quiet: Annotated[bool, typer.Option("--quiet", help="No progress on stderr.")] = False,
) -> None:
    """Did an add-on help, or the seed? Differences paired by seed and sample, with intervals and an exact test."""
    from decaybench.core.files import readable_json
    from decaybench.harness.compare import compare_addon, compare_entries, compare_runs, compare_settings
    from decaybench.harness.progress import Progress

    varied = vary or []
    chosen = None if seeds is None else [_integer("--seeds", part) for part in seeds.split(",")]
    if addon is not None or any("=" in setting for setting in varied):
        _check_made(addon, varied, {"RUN": runs, "--base": base, "--where": where, "--equal": equal})
        of = task or "mqar", model or "mamba2"
        how: dict[str, Any] = {
            "seeds": [0, 1, 2] if chosen is None else chosen,
            "preset": preset,
            "settings": settings or (),
            "out": out,
            "progress": Progress(quiet=quiet),
        }
        if addon is None:
            found = compare_settings(*of, varied, **how)
        else:
            found = compare_addon(*of, addon, equal=equal, **how)
    elif runs:
        found = compare_runs(runs, seeds=chosen, base=base, vary=varied, equal=equal)
    else:
        models = [part.strip() for part in model.split(",")] if model else []
        of_these: dict[str, Any] = {"task": task, "models": models, "where": where or (), "seeds": chosen}
        found = compare_entries(file, **of_these, base=base, vary=varied, equal=equal)
    if json:
        _write(readable_json(found.plain()))
        return
    for grid in found.summaries() if summary else found.tables(distance=distance):
        if markdown:
            _write(grid.markdown() + "\n")
        else:
            _print(grid)
    for remark in found.remarks(summary=summary):
        if markdown:
            _write(remark + "\n")
        else:
            _print(remark)


def _check_made(addon: str | None, varied: Sequence[str], others: Mapping[str, Any]) -> None:
    """Refuse what would be ignored where runs are made. Raises UserError."""
    flag = f"--vary {varied[0]}" if addon is None else f"--addon {addon}"
    if addon is not None and varied:
        raise UserError(f"{flag} makes runs of one treatment: leave out --vary {varied[0]}")
    for setting in varied:
        if "=" not in setting:
            raise UserError(f"--vary {setting}: beside others with a value it needs one too, KEY=VALUE")
    for name, value in others.items():
        if value and not (name == "--equal" and addon is not None):
            raise UserError(f"{flag} makes its runs itself: leave out {name}")


@app.command()
def sweep(
    file: Annotated[
        Path, typer.Argument(help="Task, settings, grids and seeds: see docs/sweep.md.", metavar="SWEEP.YAML")
    ],
    engine: Annotated[
        str, typer.Option(help="local: processes of this machine; ray: a Ray cluster (extra cluster).")
    ] = "local",
    workers: Annotated[
        int | None,
        typer.Option(help="Runs at a time.", show_default="as many as the cores, or GPUs, have room for", **_WHOLE),
    ] = None,
    address: Annotated[
        str | None,
        typer.Option(
            help="With --engine ray: the cluster's.", show_default="RAY_ADDRESS, one that runs here, else a new one"
        ),
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Folder of run folders.", show_default="runs")] = None,
    folder: Annotated[
        Path | None,
        typer.Option(help="Folder of the summary, CSV and logs.", show_default="SWEEP.YAML without its ending"),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="List the runs and how each stands; do nothing.")] = False,
    json: Json = False,
    quiet: Annotated[bool, typer.Option("--quiet", help="No progress on stderr.")] = False,
) -> None:
    """Many runs from one file, several at a time; the same command goes on, and starts again what failed."""
    from decaybench.core.files import readable_json
    from decaybench.harness.progress import Progress
    from decaybench.harness.sweep.drive import Wish, look
    from decaybench.harness.sweep.drive import sweep as carry_out

    wish = Wish(file, engine, workers, address, out, folder)
    if dry_run:
        seen = look(wish)
        if json:
            _write(readable_json(seen.plain()))
        else:
            _print(seen.table())
        return
    finished = carry_out(wish, progress=Progress(quiet=quiet))
    if json:
        _write(readable_json(finished.plain()))
    else:
        for table in finished.tables():
            _print(table)
        for path in finished.files:
            _print(f"written: {path}")
    finished.raise_if_failed()


@app.command()
@_with_addons
def selftest(
    model: Annotated[str, typer.Option(help="Architecture, or all with every add-on.")] = "mamba2",
    *,
    addons: list[str],
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    verbose: Annotated[
        bool,
        typer.Option(
            "--verbose",
            help="Every check of every cell, not only the broken ones; a single cell always has all.",
        ),
    ] = False,
    json: Json = False,
) -> None:
    """Do padding, packing, caches and odd lengths change a model's output on this machine? They must not."""
    from decaybench.core.files import readable_json
    from decaybench.harness.environment import resolve_device
    from decaybench.harness.selftest import check_models, plain

    show = None if json else _print
    results = check_models(model, addons, device=resolve_device(device), verbose=verbose, show=show)
    if json:
        _write(readable_json(plain(results)))
    failed = [check for checks in results.values() for check in checks if not check.passed]
    if failed:
        raise RunError(f"{len(failed)} checks failed, the first: {failed[0].name} ({failed[0].difference:.3g})")


@app.command()
@_with_addons
def speed(
    model: Annotated[
        str, typer.Option(help="Architecture, several (mamba2,gla), or all with every add-on.")
    ] = "mamba2",
    *,
    addons: list[str],
    shape: Annotated[str, typer.Option(help="Sizes: smoke or wide.")] = "smoke",
    settings: Annotated[
        list[str] | None,
        typer.Option(
            "--set", metavar="KEY=VALUE", help="A size, e.g. batch=8 or mixer.chunk_size=64; may be repeated."
        ),
    ] = None,
    peers: Annotated[
        bool, typer.Option("--peers/--no-peers", help="Beside other packages' implementations, where installed.")
    ] = True,
    long: Annotated[
        bool, typer.Option("--long", help="Also inputs of up to 1,000,000 tokens: memory, and time a token after.")
    ] = False,
    generators: Annotated[
        bool, typer.Option("--generators", help="In place of models: how fast tasks make samples, beside plain loops.")
    ] = False,
    repeats: Annotated[int, typer.Option(help="Measurements of each, at least 6.", **_WHOLE)] = 12,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    threads: Annotated[
        int | None, typer.Option(help="Threads of the CPU.", show_default="PyTorch's choice", **_WHOLE)
    ] = None,
    out: Annotated[Path | None, typer.Option(help="File for the report as JSON.")] = None,
    json: Json = False,
    quiet: Annotated[bool, typer.Option("--quiet", help="No progress on stderr.")] = False,
) -> None:
    """Training, prefill and decode speed, peak memory, what add-ons cost, and other packages' beside it."""
    from decaybench.core.files import atomic_write_json, readable_json
    from decaybench.harness.generators import GeneratorReport, measure_generators
    from decaybench.harness.progress import Progress
    from decaybench.harness.speed import measure_speed
    from decaybench.harness.speed_report import SpeedReport

    report: SpeedReport | GeneratorReport
    if generators:
        given = {"--model": model != "mamba2", "--long": long, "--set": settings, "--shape": shape != "smoke"}
        given |= {f"--{name}": True for name in addons}
        if unused := [flag for flag, said in given.items() if said]:
            raise UserError(f"--generators measures no model: leave out {unused[0]}")
        report = measure_generators(repeats=repeats, progress=Progress(quiet=quiet))
    else:
        report = measure_speed(
            model,
            addons=addons,
            shape=shape,
            settings=settings or (),
            peers=peers,
            long=long,
            repeats=repeats,
            device=device,
            threads=threads,
            progress=Progress(quiet=quiet),
        )
    if json:
        _write(readable_json(report.plain()))
    else:
        for table in report.tables():
            _print(table)
    if out is not None:  # after the tables, which took an hour perhaps, should it fail
        atomic_write_json(out, report.plain())


@app.command(name="list")
def list_(
    architecture: Annotated[str | None, typer.Argument(help="All that is known of one.", show_default=False)] = None,
    settings: Annotated[bool, typer.Option("--settings", help="Every key that --set and YAML files take.")] = False,
    json: Json = False,
) -> None:
    """Models, add-ons, tasks, presets and backends that are here; or one architecture in full."""
    from decaybench.core.files import readable_json
    from decaybench.harness.catalogue import about, all_settings, catalogue, page, tables

    if architecture is not None:
        if settings:
            raise UserError(f"--settings lists every key; `bench list {architecture}` has those of {architecture}")
        known = about(architecture)
        if json:
            _write(readable_json(known))
        else:
            _print(page(known))
        return
    entries = all_settings() if settings else catalogue()
    if json:
        _write(readable_json(entries))
    else:
        for table in tables(entries):
            _print(table)


@app.command()
def protocol(
    name: Annotated[str | None, typer.Argument(help="A protocol; none: which there are.", show_default=False)] = None,
    runs: Annotated[
        list[Path] | None, typer.Argument(help="Finished runs, or their records.", metavar="[RUN]...")
    ] = None,
    model: Annotated[str | None, typer.Option(help="Architecture.", show_default="the protocol's first")] = None,
    json: Json = False,
) -> None:
    """Published protocols: what each demands, and in which items a run departs from one."""
    from decaybench.core.files import readable_json
    from decaybench.harness.catalogue import tables
    from decaybench.harness.protocols import departures_of, listed

    if name is not None and runs:
        found = departures_of(runs, name)
        if json:
            _write(readable_json(found))
            return
        for record, items in found.items():
            _print(f"{record}: " + (f"departs from {name} in" if items else f"comparable to {name}"))
            for item in items:
                _print(f"  {item}")
        return
    entries = listed(name, model)
    if json:
        _write(readable_json(entries))
        return
    for table in tables(entries):
        _print(table)


@board.command("add")
def board_add(
    runs: Annotated[list[Path], typer.Argument(help="Run folders, with all their evaluations.", metavar="RUN...")],
    file: Board = _BOARD,
) -> None:
    """Add the records of runs, after recomputing each from its samples and the task itself."""
    from decaybench.harness.verify import add_to_leaderboard

    for path, added in add_to_leaderboard(file, runs):
        _print(f"{'added' if added else 'already there'}: {path}")


@board.command("validate")
def board_validate(
    file: Annotated[Path, typer.Argument(help="A leaderboard or a record.")] = _BOARD,
) -> None:
    """Check every entry: schema, hash, counts, and the task's data made again."""
    from decaybench.harness.verify import validate_file

    _print(f"{file}: {validate_file(file)}")


@board.command("show")
def board_show(
    file: Annotated[Path, typer.Argument(help="A leaderboard.")] = _BOARD,
    json: Json = False,
) -> None:
    """The leaderboard as a table: medians over seeds, by length."""
    from decaybench.results.leaderboard import read_leaderboard, table

    records = read_leaderboard(file)
    if json:
        _write("[" + ",\n".join(record.to_json().strip() for record in records) + "]")
    else:
        _print(table(records))


@board.command("draw")
def board_draw(
    task: Annotated[str, typer.Option(help="The task whose records to draw: mqar.", show_default=False)],
    variants: Annotated[
        str | None,
        typer.Option("--variants", "--variant", help="Its variants, in panels: capacity,persist.", show_default="all"),
    ] = None,
    where: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KEY=VALUE",
            help="Only records with this setting, e.g. training.steps=1500, or mamba2:training.steps=1500 to choose "
            "among those of mamba2; may be repeated.",
        ),
    ] = None,
    out: Annotated[Path, typer.Option(help="The figure; its .png and .svg are written.")] = Path("leaderboard.png"),
    file: Board = _BOARD,
) -> None:
    """Draw accuracy by length: every architecture alone and with its add-ons, each seed and the medians."""
    from decaybench.harness.curves import draw_leaderboard

    asked = None if variants is None else [part.strip() for part in variants.split(",")]
    for path in draw_leaderboard(file, out, task=task, variants=asked, where=where or ()):
        _print(f"drawn: {path}")


@text_data.command("prepare")
def data_prepare(
    paths: Annotated[
        list[str],
        typer.Argument(
            help="Text files (.txt, .md, .jsonl, .parquet), folders of them, or data sets of the hub "
            "(hf://NAME:CONFIG:SPLIT).",
            metavar="PATH...",
        ),
    ],
    out: Annotated[Path, typer.Option(help="Folder of the token shards.", show_default=False)],
    tokenizer: Annotated[
        str, typer.Option(help="bytes, a tokenizer.json or its folder, or an RWKV vocabulary file.")
    ] = "bytes",
    validation: Annotated[
        float, typer.Option(help="Share kept apart for validation.", parser=_number, metavar="<share>")
    ] = 0.1,
    by: Annotated[str, typer.Option(help="What falls into validation as a whole: document or file.")] = "document",
    split_on: Annotated[
        str | None,
        typer.Option(
            help="What stands between the documents of a text file: blank-lines, lines, or any text (\\n: a line end).",
            show_default="a file is one document",
        ),
    ] = None,
    field: Annotated[str, typer.Option(help="The documents' field in JSON lines, and column in Parquet.")] = "text",
    strict: Annotated[
        bool, typer.Option("--strict", help="Refuse broken rows, bytes that aren't UTF-8 and empty files.")
    ] = False,
    workers: Annotated[int | None, typer.Option(help="Processes.", show_default="one a core", **_WHOLE)] = None,
    force: Annotated[bool, typer.Option("--force", help="Delete the shards where they exist, and start anew.")] = False,
    json: Json = False,
    quiet: Annotated[bool, typer.Option("--quiet", help="No progress on stderr.")] = False,
) -> None:
    """Text into token shards, in parallel; stopped at any moment, the same command goes on to the same bytes."""
    from decaybench.harness.prepare import Wish, prepare
    from decaybench.harness.progress import Progress

    wish = Wish(paths, out, tokenizer, validation, by, split_on, field, strict, workers)
    _show_prepared(prepare(wish, force=force, progress=Progress(quiet=quiet)), json)


@text_data.command("show")
def data_show(
    folder: Annotated[Path, typer.Argument(help="A folder of token shards.", metavar="DIR")],
    verify: Annotated[bool, typer.Option("--verify", help="Read all of it, and check every hash.")] = False,
    json: Json = False,
) -> None:
    """What a folder of token shards holds: documents, tokens and bytes of each split, and what was odd in the text."""
    from decaybench.harness.prepared import look_at

    _show_prepared(look_at(folder, verify), json)


def _show_prepared(found: Prepared, json: bool) -> None:
    from decaybench.core.files import readable_json

    if json:
        _write(readable_json(found.plain()))
        return
    _print(found)
    for note in found.notes():
        _print(note)


def main() -> None:
    """The entry point. Exit codes: 0 done, 1 failed, 2 wrong usage or input."""
    # PyTorch's threads spin while they wait for one another: beside any other program on the same cores a run took
    # 15 times longer. Sleeping costs a tenth on an idle machine. To be said before torch is imported.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    keep_freed_memory()
    if sys.stdout is None:  # closed by the caller (>&-), who wants the run and not its output
        sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115 it lives as long as the process
    try:
        if app(standalone_mode=False) == _INTERRUPTED:
            raise KeyboardInterrupt
        sys.stdout.flush()
    except UserError as error:
        _fail(str(error), 2)
    except typer.TyperException as error:
        _fail(error.format_message(), error.exit_code)
    except RunError as error:
        _fail(str(error), 1)
    except typer.Exit as exit_:
        sys.exit(exit_.exit_code)
    except (KeyboardInterrupt, typer.Abort):
        _fail("stopped; the same command goes on from where it was", 1)
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # no second error at exit
        if not isinstance(error, BrokenPipeError):  # whoever read our output (head, say) has gone: nothing to tell
            _fail(f"can't write the output: {error}", 1)


def _run_task(task: str, given: dict[str, Any]) -> None:
    from decaybench.harness.presets import configure
    from decaybench.harness.progress import Progress
    from decaybench.harness.run import carry_out_all

    flags = {key: _plain(name, given[name]) for name, key in _KEYS.items() if given.get(name) is not None}
    flags |= {f"model.{name}": {} for name in ADDONS if given[name]}
    seeds = given["seeds"]
    configs = configure(
        task,
        preset=given["preset"],
        file=given["config"],
        flags=flags,
        settings=given["settings"] or (),
        seeds=None if seeds is None else [_integer("--seeds", part) for part in seeds.split(",")],
        without_data=given["dry_run"],
    )
    if given.get("learning_rates") is not None and not given.get("select"):
        raise UserError("--learning-rates is for --select; one rate is --set training.learning_rate=1e-3")
    if given["dry_run"]:
        rates = _rates(task, configs, given) if given.get("select") else ()
        _estimate(configs[0], given["json"])
        if len(rates) > 1 and not given["json"]:
            _print(f"of one learning rate; --select trains {len(rates)} for each seed")
        return
    progress = Progress(quiet=given["quiet"])
    if given.get("select"):
        outcomes = _select(task, configs, given, progress)
    else:
        outcomes = carry_out_all(configs, force=given["force"], progress=progress)
    if not outcomes:  # another of the processes that share the run says it
        return
    if given["json"]:
        records = [outcome.record.to_json().strip() for outcome in outcomes]
        _write(records[0] if seeds is None else "[" + ",\n".join(records) + "]")
    else:
        _show(outcomes, given["preset"])


def _select(task: str, configs: Sequence[RunConfig], given: dict[str, Any], progress: Progress) -> list[Outcome]:
    from decaybench.harness.selection import select

    rates = _rates(task, configs, given)
    return [select(config, rates, force=given["force"], progress=progress) for config in configs]


def _rates(task: str, configs: Sequence[RunConfig], given: dict[str, Any]) -> tuple[float, ...]:
    """The grid of --select, checked."""
    from decaybench.harness.presets import learning_rates
    from decaybench.harness.selection import learning_rate_grid

    said = given["learning_rates"]
    rates = learning_rates(
        task,
        configs[0].model.name,
        preset=given["preset"],
        file=given["config"],
        settings=given["settings"] or (),
        named=None if said is None else [_decimal("--learning-rates", part) for part in said.split(",")],
    )
    learning_rate_grid(configs[0], rates)
    return rates


def _estimate(config: RunConfig, json: bool) -> None:
    from decaybench.core.files import readable_json
    from decaybench.harness.distributed import speaks
    from decaybench.harness.estimate import estimate

    found = estimate(config)
    if not speaks():
        return
    if json:
        _write(readable_json(found.plain()))
    else:
        _print(found)


def _plain(name: str, value: Any) -> Any:
    if name in _LISTS:
        return [part.strip() for part in value.split(",")]
    return str(value) if isinstance(value, Path) else value


def _integer(flag: str, text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise UserError(f"{flag}: {text.strip()!r} is not a whole number; write 0,1,2") from None


def _decimal(flag: str, text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise UserError(f"{flag}: {text.strip()!r} is not a number; write 1e-3,3e-3") from None


def _show(outcomes: Sequence[Outcome], preset: str | None) -> None:
    from decaybench.harness.protocols import PROTOCOLS, remark

    for outcome in outcomes:
        _print(outcome.record)
        if outcome.record.selection is not None:
            from decaybench.results.selection import selection_table

            _print(selection_table(outcome.record))
    if len(outcomes) > 1:
        from decaybench.results.leaderboard import table

        _print(table([outcome.record for outcome in outcomes]))
    for outcome in outcomes:
        if outcome.record.selection is not None:
            _print(f"chosen   {outcome.run.checkpoint / f'step-{outcome.record.selection.chosen.step:08d}'}")
        _print(f"record   {outcome.evaluation.record_path}\nfigures  {outcome.evaluation.figures}")
        if preset in PROTOCOLS:
            _print(remark(outcome.record, str(preset)))


def _print(what: Any) -> None:
    from rich.console import Console

    # Into a file or a pipe nothing needs to fit a screen: a table there keeps all its digits.
    console = Console(highlight=False, width=None if sys.stdout.isatty() or "COLUMNS" in os.environ else 160)
    if isinstance(what, str):
        console.print(what, markup=False, soft_wrap=True)
    else:
        console.print(what)


def _write(text: str) -> None:
    sys.stdout.write(text + "\n")


def _fail(message: str, code: int) -> None:
    if message:  # none: help was asked for by giving no command, and it stands there
        sys.stderr.write(f"bench: {' '.join(message.split())}\n")
    sys.exit(code)


if __name__ == "__main__":
    main()
