"""The command line: parses, calls one function of harness or results, prints. No logic.

Heavy modules are imported inside the commands, so that `bench --help` answers at once.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from decaybench.core.errors import RunError, UserError

if TYPE_CHECKING:
    from decaybench.harness.run import Outcome

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="How well does a linear recurrence remember, at which distance, and do add-ons help?",
    epilog="Start with: bench niah --model mamba2 --post",
)
board = typer.Typer(no_args_is_help=True, help="Keep records in a file that others can check: add, validate, show.")
app.add_typer(board, name="leaderboard")


def _whole(**settings: Any) -> Any:
    """A flag that takes a whole number, and names what it was given instead."""

    def parse(text: str) -> int:
        try:
            return int(text)
        except ValueError:
            raise typer.BadParameter(f"{text!r} is not a whole number") from None

    return typer.Option(parser=parse, metavar="<int>", **settings)


MODEL, ASKED, RUNNING = "Model and training", "Evaluation", "Running"

Model = Annotated[
    str | None,
    typer.Option(help="Architecture; `bench list` names them.", rich_help_panel=MODEL, show_default="mamba2"),
]
Post = Annotated[
    bool,
    typer.Option(
        "--post", help="With PoST, ordered position-adaptive decays (--set model.post.…).", rich_help_panel=MODEL
    ),
]
Preset = Annotated[
    str | None,
    typer.Option(help="Named settings; `bench list` names them.", rich_help_panel=MODEL, show_default="smoke"),
]
File = Annotated[
    Path | None, typer.Option("--config", help="YAML file of settings; flags win over it.", rich_help_panel=MODEL)
]
TrainLength = Annotated[
    int | None,
    _whole(help="Longest training length, tokens.", rich_help_panel=MODEL, show_default="by preset"),
]
Seed = Annotated[
    int | None, _whole(help="Seed of initial values and training data.", rich_help_panel=MODEL, show_default="0")
]
Seeds = Annotated[str | None, typer.Option(help="One run for each of several seeds: 0,1,2.", rich_help_panel=MODEL)]
Given = Annotated[
    Path | None, typer.Option("--checkpoint", help="Run or checkpoint to evaluate; no training.", rich_help_panel=MODEL)
]
Lengths = Annotated[
    str | None,
    typer.Option(
        "--eval-lengths",
        help="Lengths to ask at: multiples of the training length (2x) or tokens (512).",
        rich_help_panel=ASKED,
        show_default="1x,2x,4x,8x",
    ),
]
Samples = Annotated[int | None, _whole(help="Samples a cell.", rich_help_panel=ASKED, show_default="100")]
Settings = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        help="Any setting, e.g. training.steps=500; may be repeated. `bench list --settings` names them.",
        metavar="KEY=VALUE",
        rich_help_panel=RUNNING,
    ),
]
Device = Annotated[str | None, typer.Option(help="auto, cpu or cuda.", rich_help_panel=RUNNING, show_default="auto")]
Backend = Annotated[
    str | None,
    typer.Option(help="Kernels of the recurrence: auto or torch.", rich_help_panel=RUNNING, show_default="auto"),
]
Out = Annotated[Path | None, typer.Option(help="Folder of run folders.", rich_help_panel=RUNNING, show_default="runs")]
Force = Annotated[bool, typer.Option("--force", help="Start anew where the run exists.", rich_help_panel=RUNNING)]
Json = Annotated[
    bool, typer.Option("--json", help="Machine output on stdout, all else on stderr.", rich_help_panel=RUNNING)
]
Quiet = Annotated[bool, typer.Option("--quiet", help="No progress on stderr.", rich_help_panel=RUNNING)]
Board = Annotated[Path, typer.Option("--file", help="The leaderboard.")]
_BOARD = Path("results/leaderboard.json")
_INTERRUPTED = 130  # what Typer makes of Ctrl-C


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


@app.command()
def niah(
    model: Model = None,
    post: Post = False,
    preset: Preset = None,
    config: File = None,
    train_length: TrainLength = None,
    seed: Seed = None,
    seeds: Seeds = None,
    checkpoint: Given = None,
    eval_lengths: Lengths = None,
    variants: Annotated[
        str | None,
        typer.Option(help="single, multikey, multivalue, multiquery.", rich_help_panel=ASKED, show_default="single"),
    ] = None,
    depths: Annotated[
        str | None,
        typer.Option(help="Depths of the needle, 0 to 1.", rich_help_panel=ASKED, show_default="0,0.1,…,1"),
    ] = None,
    samples: Samples = None,
    settings: Settings = None,
    device: Device = None,
    backend: Backend = None,
    out: Out = None,
    force: Force = False,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Needle in a haystack: one planted fact, found again at any length and depth?"""
    flags = _flags(model, post, train_length, seed, checkpoint, eval_lengths, variants, samples, device, backend, out)
    flags["evaluation.depths"] = _list(depths)
    _run_task("niah", preset, config, flags, settings, seeds, force, json, quiet)


@app.command()
def mqar(
    model: Model = None,
    post: Post = False,
    preset: Preset = None,
    config: File = None,
    train_length: TrainLength = None,
    seed: Seed = None,
    seeds: Seeds = None,
    checkpoint: Given = None,
    eval_lengths: Lengths = None,
    variants: Annotated[
        str | None,
        typer.Option(
            help="capacity (pairs grow with the length), persist.",
            rich_help_panel=ASKED,
            show_default="capacity,persist",
        ),
    ] = None,
    samples: Samples = None,
    settings: Settings = None,
    device: Device = None,
    backend: Backend = None,
    out: Out = None,
    force: Force = False,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Multi-query associative recall: how many key-value pairs, for how long?"""
    flags = _flags(model, post, train_length, seed, checkpoint, eval_lengths, variants, samples, device, backend, out)
    _run_task("mqar", preset, config, flags, settings, seeds, force, json, quiet)


@app.command()
def spectrum(
    runs: Annotated[list[Path], typer.Argument(help="Runs or checkpoints.", metavar="RUN...")],
    out: Annotated[
        Path | None, typer.Option(help="Folder for the figure and its numbers.", show_default="RUN/spectrum")
    ] = None,
    json: Json = False,
) -> None:
    """The decay timescales that a model learned: a figure, and every number drawn."""
    from decaybench.core.files import readable_json
    from decaybench.harness.spectra import draw_spectra

    drawn = draw_spectra(runs, out)
    if json:
        _write(readable_json([found.plain() for _, found in drawn]))
        return
    for folder, found in drawn:
        _print(found)
        _print(f"figure and numbers in {folder}")


@app.command()
def selftest(
    model: Annotated[str, typer.Option(help="Architecture, or all.")] = "mamba2",
    post: Annotated[bool, typer.Option("--post", help="With PoST.")] = False,
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    json: Json = False,
) -> None:
    """Do padding, packing, caches and odd lengths change a model's output on this machine? They must not."""
    from decaybench.core.files import readable_json
    from decaybench.harness.environment import resolve_device
    from decaybench.harness.selftest import check_models, plain, tables

    results = check_models(model, post=post, device=resolve_device(device))
    if json:
        _write(readable_json(plain(results)))
    else:
        for table in tables(results):
            _print(table)
    failed = [check for checks in results.values() for check in checks if not check.passed]
    if failed:
        raise RunError(f"{len(failed)} checks failed, the first: {failed[0].name} ({failed[0].difference:.3g})")


@app.command(name="list")
def list_(
    settings: Annotated[bool, typer.Option("--settings", help="Every key that --set and YAML files take.")] = False,
    json: Json = False,
) -> None:
    """Models, add-ons, tasks, presets and backends that are here."""
    from decaybench.core.files import readable_json
    from decaybench.harness.catalogue import all_settings, catalogue, tables

    entries = all_settings() if settings else catalogue()
    if json:
        _write(readable_json(entries))
    else:
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

    _print(f"{file}: {validate_file(file)} entries, all valid")


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


def main() -> None:
    """The entry point. Exit codes: 0 done, 1 failed, 2 wrong usage or input."""
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


def _run_task(
    task: str,
    preset: str | None,
    file: Path | None,
    flags: dict[str, Any],
    settings: list[str] | None,
    seeds: str | None,
    force: bool,
    json: bool,
    quiet: bool,
) -> None:
    from decaybench.harness.presets import configure
    from decaybench.harness.progress import Progress
    from decaybench.harness.run import carry_out_all

    several = None if seeds is None else [_integer("--seeds", part) for part in seeds.split(",")]
    configs = configure(task, preset=preset, file=file, flags=flags, settings=settings or (), seeds=several)
    outcomes = carry_out_all(configs, force=force, progress=Progress(quiet=quiet))
    if json:
        records = [outcome.record.to_json().strip() for outcome in outcomes]
        _write(records[0] if several is None else "[" + ",\n".join(records) + "]")
    else:
        _show(outcomes)


def _flags(
    model: str | None,
    post: bool,
    train_length: int | None,
    seed: int | None,
    checkpoint: Path | None,
    eval_lengths: str | None,
    variants: str | None,
    samples: int | None,
    device: str | None,
    backend: str | None,
    out: Path | None,
) -> dict[str, Any]:
    """The flags that all tasks have, by the key of the setting that each one is; None: not given."""
    return {
        "model.name": model,
        "model.post": {} if post else None,
        "task.train_length": train_length,
        "seed": seed,
        "checkpoint": None if checkpoint is None else str(checkpoint),
        "evaluation.lengths": _list(eval_lengths),
        "evaluation.variants": _list(variants),
        "evaluation.samples": samples,
        "device": device,
        "backend": backend,
        "out": None if out is None else str(out),
    }


def _list(text: str | None) -> list[str] | None:
    return None if text is None else [part.strip() for part in text.split(",")]


def _integer(flag: str, text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise UserError(f"{flag}: {text.strip()!r} is not a whole number; write 0,1,2") from None


def _show(outcomes: Sequence[Outcome]) -> None:
    for outcome in outcomes:
        _print(outcome.record)
    if len(outcomes) > 1:
        from decaybench.results.leaderboard import table

        _print(table([outcome.record for outcome in outcomes]))
    for outcome in outcomes:
        _print(f"record   {outcome.evaluation.record_path}\nfigures  {outcome.evaluation.figures}")


def _print(what: Any) -> None:
    from rich.console import Console

    console = Console(highlight=False)
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
