"""`bench data prepare`: files and folders of text, or data sets of the hub, into token shards (text/shards.py).

The sources are cut into units, several small files or a stretch of a long one, by their sizes alone. A unit becomes one
shard of each split, so shards are the same bytes whatever the number of workers and however often the work was
stopped. The manifest is written last.

Validation is chosen by content: a document is in it where u(identity) < share, u a hash as a number in [0, 1). The
identity is the sha256 of a file that is one document, else of the document's first 64 KiB; with --by file that of its
file. So equal documents fall on the same side, and none changes sides when others are added.
"""

from __future__ import annotations

import hashlib
import multiprocessing
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from itertools import chain
from pathlib import Path
from typing import NamedTuple

from decaybench.core.errors import RunError, UserError
from decaybench.core.hashing import digest, file_digest
from decaybench.core.names import unknown
from decaybench.harness.prepared import Prepared
from decaybench.harness.progress import Progress
from decaybench.harness.shard_folder import Done, ShardFolder, State
from decaybench.harness.workers import Workers
from decaybench.text.documents import HubRows, Piece, read_part
from decaybench.text.shards import (
    SPLITS,
    By,
    Manifest,
    Problem,
    Rule,
    ShardWriter,
    SourceInfo,
    SplitInfo,
    SplitName,
    TokenizerInfo,
    copy_tokenizer,
)
from decaybench.text.sources import (
    DUPLICATES,
    HARMLESS,
    OUTCOMES,
    Part,
    Place,
    Problems,
    Rules,
    Source,
    find_sources,
    split_parts,
)
from decaybench.text.tokenizers import Tokenizer, load_tokenizer, to_bytes

_PLAN = 1  # goes up when the same sources would be cut into other units
_UNITS = 256  # that all files are cut into, where a unit then has between these two sizes
_SMALLEST, _LARGEST = 1 << 20, 1 << 26  # bytes
_MUCH = 1 << 30  # bytes to hash
_HUB_UNIT = 1 << 24  # bytes of text
_HEAD = 1 << 16  # bytes of a document that decide on its split
_BATCH, _PIECES = 1 << 19, 1 << 12  # characters, and pieces, that are encoded at once
_LINE_EVERY = 15.0  # seconds
_BY: tuple[By, ...] = ("document", "file")


class Wish(NamedTuple):
    """What to prepare: `paths` (files, folders, hf:// names) into the folder `out`.

    validation: the share of documents, or of files, in the validation split; by: "document" or "file"; split_on, field,
    strict: as in text.sources.Rules; workers: processes, None: one a core.
    """

    paths: Sequence[str]
    out: Path
    tokenizer: str = "bytes"
    validation: float = 0.1
    by: str = "document"
    split_on: str | None = None
    field: str = "text"
    strict: bool = False
    workers: int | None = None

    @property
    def rules(self) -> Rules:
        """How files become documents, by split_on, field and strict."""
        return Rules(self.split_on, self.field, self.strict)


def prepare(wish: Wish, *, force: bool = False, progress: Progress | None = None) -> Prepared:
    """Make the folder of token shards, or what is missing of it.

    force: delete one that is there first. Raises UserError where the input is wrong or the folder is of another
    command, RunError where the work can't be finished; the same command then goes on.
    """
    progress = progress or Progress()
    _check(wish)
    tokenizer = load_tokenizer(wish.tokenizer)
    problems = Problems(wish.rules.strict)
    sources = find_sources(wish.paths, wish.rules, problems, leave=wish.out)
    _check_sources(wish, sources, problems)
    folder = ShardFolder(wish.out)
    with folder.lock():
        if force:
            folder.empty()
        known = folder.state()
        infos, stats = _identify(sources, wish, known)
        plan = _Plan(wish, tokenizer, sources, infos, stats)
        _note_duplicates(plan, problems)
        if known and (other := _difference(known, plan.state())):
            raise UserError(f"{wish.out} was begun with {other}; choose another --out, or --force to start anew")
        if folder.is_complete:
            _check_strictness(wish, folder.manifest())
            progress.say(f"{wish.out} is complete already")
        else:
            folder.begin(plan.state())
            copy_tokenizer(folder.path, tokenizer)
            _carry_out(plan, folder, problems, progress)
        return Prepared(wish.out, folder.manifest())


class _Plan(NamedTuple):
    """All that the shards depend on, and what else the work needs."""

    wish: Wish
    tokenizer: Tokenizer
    sources: list[Source]
    infos: tuple[SourceInfo, ...]
    stats: list[tuple[int, int]]

    @property
    def unit_bytes(self) -> int:
        return min(max(sum(source.size for source in self.sources) // _UNITS, _SMALLEST), _LARGEST)

    def manifest(self, splits: dict[SplitName, SplitInfo], problems: Problems) -> Manifest:
        wish = self.wish
        found = [
            Problem(what=what, outcome=OUTCOMES[what], count=count, first=str(where))
            for what, (count, where) in problems.found.items()
        ]
        by: By = "file" if wish.by == "file" else "document"
        return Manifest(
            tokenizer=TokenizerInfo.of(self.tokenizer),
            dtype="uint16" if self.tokenizer.vocab_size <= 1 << 16 else "uint32",
            rule=Rule(split_on=wish.split_on, field=wish.field, validation=wish.validation, by=by),
            sources=self.infos,
            splits=splits,
            problems=tuple(found),
        )

    def state(self) -> State:
        head = self.manifest({}, Problems()).model_dump(
            mode="json", exclude_none=True, exclude={"format", "splits", "problems"}
        )
        return State(plan=[_PLAN, self.unit_bytes, _HUB_UNIT], head=head, stats=self.stats)

    def job(self) -> _Job:
        files = self.tokenizer.files
        return _Job(
            out=self.wish.out.resolve(),
            tokenizer=str(files[0].resolve()) if files else self.tokenizer.name,
            tokenizer_sha256=self.tokenizer.sha256,
            dtype=self.manifest({}, Problems()).dtype,
            rules=self.wish.rules,
            validation=self.wish.validation,
            chosen=_choose(self),
        )


class _Unit(NamedTuple):
    """What becomes one shard of each split: parts of files, or documents of a data set of the hub."""

    number: int
    parts: tuple[Part, ...] = ()
    pieces: tuple[Piece, ...] = ()
    rows: tuple[int, int, int] | None = None  # the data set's place among the sources, first row, end
    problems: Problems | None = None  # that were met in reading the pieces


class _Job(NamedTuple):
    """What a worker needs for all units."""

    out: Path
    tokenizer: str
    tokenizer_sha256: str
    dtype: str
    rules: Rules
    validation: float
    chosen: dict[int, SplitName]  # of sources that are in one split as a whole, by their place


def _check(wish: Wish) -> None:
    if not wish.paths:
        raise UserError("nothing to prepare: name files, folders or hf:// data sets")
    if not 0 <= wish.validation < 1:
        raise UserError(f"--validation {wish.validation}: a share from 0 up to, but not, 1; for example 0.1")
    if wish.by not in _BY:
        raise unknown("--by", wish.by, _BY)
    if wish.workers is not None and wish.workers < 1:
        raise UserError(f"--workers {wish.workers}: at least 1")


def _check_sources(wish: Wish, sources: list[Source], problems: Problems) -> None:
    if not sources:
        raise UserError(f"no document in {', '.join(wish.paths)}: {'; '.join(problems.lines())}")
    if wish.by == "file" and wish.validation:
        hub = next((source.name for source in sources if source.kind == "hub"), None)
        if hub:
            raise UserError(f"--by file: {hub} is no file; --by document, or --validation 0")
        if len(sources) == 1:
            raise UserError(f"--by file: {sources[0].name} is the only one; --by document, or --validation 0")


def _check_strictness(wish: Wish, manifest: Manifest) -> None:
    refused = [problem for problem in manifest.problems if problem.what not in HARMLESS]
    if wish.strict and refused:
        raise UserError(f"--strict refuses what {wish.out} was made of: {refused[0]}")


def _identify(
    sources: list[Source], wish: Wish, known: State | None
) -> tuple[tuple[SourceInfo, ...], list[tuple[int, int]]]:
    """The sources' hashes and revisions. What the folder knows already, and hasn't changed since, isn't read again."""
    stats = [_stat(source) for source in sources]
    hashes: dict[int, str] = {}
    revisions: dict[str, str | None] = {}
    before = zip(known.head["sources"], known.stats, strict=False) if known else ()
    for place, (info, stat) in enumerate(before):
        if info["kind"] == "hub":
            revisions[info["name"]] = info.get("revision")
        elif place < len(sources) and (info["name"], stat) == (sources[place].name, stats[place]):
            hashes[place] = info["sha256"]
    missing = [place for place, source in enumerate(sources) if source.kind != "hub" and place not in hashes]
    much = sum(sources[place].size for place in missing) >= _MUCH  # else starting workers takes longer
    with Workers(_workers(wish, len(missing) if much else 1), _make_hasher, [s.path for s in sources]) as workers:
        hashes |= dict(workers.do(missing))
    infos = []
    for place, source in enumerate(sources):
        if source.kind == "hub":
            if source.name not in revisions:
                revisions[source.name] = HubRows(source, place, wish.rules).revision
            infos.append(SourceInfo(name=source.name, kind="hub", revision=revisions[source.name]))
        else:
            infos.append(SourceInfo(name=source.name, kind=source.kind, bytes=source.size, sha256=hashes[place]))
    return tuple(infos), stats


def _stat(source: Source) -> tuple[int, int]:
    """A file's size and time of change, ns; of a data set of the hub 0, 0."""
    if source.kind == "hub":
        return 0, 0
    try:
        found = Path(source.path).stat()
    except OSError as error:
        raise UserError(f"can't read {source.path}: {error.strerror}") from None
    return found.st_size, found.st_mtime_ns


def _make_hasher(paths: list[str]) -> Callable[[int], tuple[int, str]]:
    def hashed(place: int) -> tuple[int, str]:
        try:
            return place, file_digest(Path(paths[place]))
        except OSError as error:
            raise UserError(f"can't read {paths[place]}: {error.strerror}") from None

    return hashed


def _note_duplicates(plan: _Plan, problems: Problems) -> None:
    first: dict[str, str] = {}
    for source, info in zip(plan.sources, plan.infos, strict=True):
        if info.sha256 is not None:
            known = first.setdefault(info.sha256, source.name)
            if known != source.name:
                problems.add(DUPLICATES, Place(source, detail=f"the same as {known}"))


def _difference(known: State, wanted: State) -> str | None:
    """In what a folder was begun otherwise, in words; None: in nothing."""
    old, new = known.head, wanted.head
    if old["tokenizer"] != new["tokenizer"]:
        before, now = old["tokenizer"]["name"], new["tokenizer"]["name"]
        return f"--tokenizer {before}, not {now}" if before != now else f"another content of --tokenizer {now}"
    for key in sorted(new["rule"].keys() | old["rule"].keys()):
        before, now = (_flag(key, rule.get(key)) for rule in (old["rule"], new["rule"]))
        if before != now:
            return f"{before}, not {now}"
    for before, now in zip(old["sources"], new["sources"], strict=False):
        if before["name"] != now["name"]:
            return f"{before['name']} where this command has {now['name']}"
        if before != now:
            return f"another content of {now['name']}"
    if len(old["sources"]) != len(new["sources"]):
        return f"{len(old['sources'])} files, not {len(new['sources'])}"
    if known.plan and known.plan != wanted.plan:
        return "another version of decaybench"
    return None


def _flag(key: str, value: object) -> str:
    flag = "--" + key.replace("_", "-")
    return f"no {flag}" if value in (None, False) else flag if value is True else f"{flag} {value}"


def _carry_out(plan: _Plan, folder: ShardFolder, problems: Problems, progress: Progress) -> None:
    done = folder.done()
    for unit in done.values():  # perhaps of a command that wasn't strict
        Problems(plan.wish.strict).merge(Problems.from_plain(unit.problems))
    has_hub = any(source.kind == "hub" for source in plan.sources)
    total = None if has_hub else sum(1 for _ in _units(plan, done))
    if done:
        progress.say(f"going on: {len(done)} {'units' if total is None else f'of {total} units'} are done")
    rest = (unit for unit in _units(plan, done) if unit.number not in done)
    workers = _workers(plan.wish, total - len(done) if total is not None else None)
    try:
        with (
            Workers(workers, _make_encoder, plan.job()) as pool,
            _shown(progress, total, len(done)) as show,
        ):
            for unit in pool.do(rest):
                folder.add(unit)
                done[unit.unit] = unit
                show(unit)
    except RunError as error:
        hint = "" if "the same command" in str(error) else "; the same command goes on from there"
        raise RunError(f"{error}{hint}") from None
    finally:
        folder.delete_drafts()
    for source, before in zip(plan.sources, plan.stats, strict=True):
        if _stat(source) != before:
            raise RunError(f"{source.path} changed while it was read; --force starts anew")
    _finish(plan, folder, [done[number] for number in sorted(done)], problems)


def _finish(plan: _Plan, folder: ShardFolder, done: list[Done], problems: Problems) -> None:
    problems = Problems.from_plain(problems.plain())
    for unit in done:
        problems.merge(Problems.from_plain(unit.problems))
    by_split = {split: tuple(unit.shards[split] for unit in done if split in unit.shards) for split in SPLITS}
    splits = {split: SplitInfo.of(shards) for split, shards in by_split.items() if shards}
    if not splits:
        folder.empty()
        reasons = "; ".join(problems.lines())
        raise UserError(f"no document in {', '.join(plan.wish.paths)}" + (f": {reasons}" if reasons else ""))
    folder.complete(plan.manifest(splits, problems))


def _units(plan: _Plan, done: dict[int, Done]) -> Iterator[_Unit]:
    """All units in order; done: of data sets of the hub, rows that are in these aren't read again."""
    number = weight = 0
    waiting: list[Part] = []
    for origin, source in enumerate(plan.sources):
        if source.kind == "hub":
            if waiting:
                yield _Unit(number, tuple(waiting))
                number, weight, waiting = number + 1, 0, []
            for unit in _hub_units(plan, origin, number, done):
                yield unit
                number = unit.number + 1
            continue
        for part in split_parts(origin, source, plan.unit_bytes):
            waiting.append(part)
            weight += part.weight
            if weight >= plan.unit_bytes:
                yield _Unit(number, tuple(waiting))
                number, weight, waiting = number + 1, 0, []
    if waiting:
        yield _Unit(number, tuple(waiting))


def _hub_units(plan: _Plan, origin: int, number: int, done: dict[int, Done]) -> Iterator[_Unit]:
    row = 0
    while number in done and (rows := done[number].rows) and rows[:2] == (origin, row):
        yield _Unit(number, rows=rows)
        number, row = number + 1, rows[2]
    opened = HubRows(plan.sources[origin], origin, plan.wish.rules, plan.infos[origin].revision)
    for found in opened.stretches(row, _HUB_UNIT):
        yield _Unit(number, (), tuple(found.pieces), (origin, found.start, found.stop), found.problems)
        number += 1


def _choose(plan: _Plan) -> dict[int, SplitName]:
    """The splits of the sources that are in one as a whole. Where all are, neither split is left empty."""
    share = plan.wish.validation
    draws = {
        origin: _draw(str(info.sha256))
        for origin, (source, info) in enumerate(zip(plan.sources, plan.infos, strict=True))
        if plan.wish.by == "file" or source.is_one_document(plan.wish.rules)
    }
    chosen: dict[int, SplitName] = {origin: "validation" if u < share else "train" for origin, u in draws.items()}
    if share and len(draws) == len(plan.sources):
        order = sorted(draws, key=draws.__getitem__)
        if "validation" not in chosen.values():
            chosen[order[0]] = "validation"
        if "train" not in chosen.values() or len(order) == 1:
            chosen[order[-1]] = "train"
    return chosen


def _draw(identity: str) -> float:
    return int(digest(["validation", identity])[:13], 16) / 16**13


def _make_encoder(job: _Job) -> Callable[[_Unit], Done]:
    if multiprocessing.parent_process() is not None:
        os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the workers share the cores already
    tokenizer = load_tokenizer(job.tokenizer)
    if tokenizer.sha256 != job.tokenizer_sha256:
        raise UserError(f"{job.tokenizer} changed while it was used; --force starts anew")
    return partial(_encode, job, tokenizer)


def _encode(job: _Job, tokenizer: Tokenizer, unit: _Unit) -> Done:
    """Write a unit's shards."""
    problems = unit.problems or Problems(job.rules.strict)
    pieces = chain(unit.pieces, *(read_part(part, job.rules, problems) for part in unit.parts))
    writers: dict[SplitName, ShardWriter] = {}
    split: SplitName = "train"
    with ExitStack() as opened:
        for batch in _batches(pieces):
            encoded = tokenizer.encode_arrays([piece.text for piece in batch])
            for piece, ids in zip(batch, encoded, strict=True):
                if piece.starts or piece.origin in job.chosen:
                    split = _split(job, piece)
                if split not in writers:
                    file = f"{split}/shard-{unit.number:05d}"
                    writers[split] = opened.enter_context(ShardWriter(job.out, file, job.dtype, str(os.getpid())))
                writers[split].add(ids, len(to_bytes(piece.text)), piece.origin)
                if piece.ends:
                    writers[split].end_document(tokenizer.separator)
        shards = {split: writer.close() for split, writer in writers.items()}
    return Done(unit=unit.number, rows=unit.rows, shards=shards, problems=problems.plain())


def _split(job: _Job, piece: Piece) -> SplitName:
    if piece.origin in job.chosen:
        return job.chosen[piece.origin]
    head = to_bytes(piece.text[:_HEAD])[:_HEAD]
    return "validation" if _draw(hashlib.sha256(head).hexdigest()) < job.validation else "train"


def _batches(pieces: Iterable[Piece]) -> Iterator[list[Piece]]:
    batch: list[Piece] = []
    size = 0
    for piece in pieces:
        batch.append(piece)
        size += len(piece.text)
        if size >= _BATCH or len(batch) >= _PIECES:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _workers(wish: Wish, tasks: int | None) -> int:
    wanted = wish.workers or _cores()
    return wanted if tasks is None else max(1, min(wanted, tasks))


def _cores() -> int:
    if hasattr(os, "sched_getaffinity"):  # not all of the machine's may be ours
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


@contextmanager
def _shown(progress: Progress, total: int | None, done: int) -> Iterator[Callable[[Done], None]]:
    """A bar, or of a data set of the hub, whose length nobody knows, a line now and then."""
    began = last = time.monotonic()
    size = 0
    with nullcontext() if total is None else progress.bar("prepare", total, done) as bar:

        def show(unit: Done) -> None:
            nonlocal done, last, size
            now = time.monotonic()
            done += 1
            size += sum(shard.bytes for shard in unit.shards.values())
            text = f"{size / 1e6:,.1f} MB, {size / 1e6 / max(now - began, 1e-3):.1f} MB/s"
            if bar is not None:
                bar(done, text)
            elif now - last >= _LINE_EVERY:
                last = now
                progress.say(f"prepare {done} units  {text}")

        yield show
