"""A finished folder of token shards as a table and as data: what `bench data prepare` and `bench data show` print."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from decaybench.text.shards import SPLITS, Manifest, TokenShards, folder_tokenizer, read_manifest

if TYPE_CHECKING:
    from rich.table import Table


class Prepared(NamedTuple):
    """The folder, and what its manifest says."""

    folder: Path
    manifest: Manifest

    def plain(self) -> dict[str, Any]:
        """The manifest as JSON-able data, of shards and sources only how many; sha256: of all tokens."""
        data = self.manifest.model_dump(mode="json", exclude_none=True)
        for name, split in self.manifest.splits.items():
            data["splits"][name] |= {"shards": len(split.shards), "bytes_per_token": split.bytes_per_token}
        data |= {"sources": len(self.manifest.sources), "sha256": self.manifest.sha256}
        return {"folder": str(self.folder), **data}

    def notes(self) -> list[str]:
        """What a reader should know beside the table, a line each."""
        wanted = [name for name in SPLITS if name == "train" or self.manifest.rule.validation > 0]
        missing = [name for name in wanted if name not in self.manifest.splits]
        few = [f"no document fell into {name}; --split-on or another --validation helps" for name in missing]
        return [*map(str, self.manifest.problems), *few]

    def __rich__(self) -> Table:
        from rich.table import Table

        known = self.manifest.tokenizer
        table = Table(
            title=f"{self.folder}: tokens of {known.name} ({known.vocab_size:,} ids, {self.manifest.dtype})",
            title_justify="left",
            caption="Each document ends with one separator, which tokens count; bytes of its text, UTF-8; "
            "bytes/token: without separators",
            caption_justify="left",
        )
        table.add_column("split")
        for heading in ("documents", "tokens", "bytes", "bytes/token", "shards"):
            table.add_column(heading, justify="right")
        for name, split in self.manifest.splits.items():
            counts = (f"{count:,}" for count in (split.documents, split.tokens, split.bytes))
            table.add_row(name, *counts, f"{split.bytes_per_token:.3f}", str(len(split.shards)))
        return table


def look_at(folder: Path, verify: bool = False) -> Prepared:
    """A finished folder; verify: read all of it. Raises UserError where it isn't one or isn't whole."""
    manifest = read_manifest(folder)
    for split in manifest.splits:
        shards = TokenShards(folder, split)
        if verify:
            shards.verify()
    if verify:
        folder_tokenizer(folder, manifest)
    return Prepared(folder, manifest)
