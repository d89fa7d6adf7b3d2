"""Commits of a log as they stand on disk: when each became visible, and which rows it brought."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from cdc.log.disk_format import CHANGES
from cdc.log_row import Operation


@dataclass(frozen=True, slots=True)
class DataFile:
    """A data file that a commit added."""

    path: Path
    least: str
    """Operation, in the order of letters."""
    greatest: str

    @classmethod
    def of(cls, root: Path, added: dict[str, Any]) -> Self:
        """From the commit's `add` action."""
        known = json.loads(added["stats"])
        return cls(root / added["path"], known["minValues"]["op"], known["maxValues"]["op"])


@dataclass(frozen=True, slots=True)
class Commit:
    """One commit."""

    version: int
    durable_at: float
    """Unix time at which its file stood on disk."""
    files: tuple[DataFile, ...]

    def rows(self, columns: Collection[str], operations: Collection[str]) -> Iterator[pa.Table]:
        """Its rows of some operations; files that cannot have any are not opened."""
        for file in self.files:
            if any(file.least <= operation <= file.greatest for operation in operations):
                rows = pq.read_table(file.path, columns=[*columns, "op"], partitioning=None)
                yield rows.filter(pc.is_in(rows["op"], pa.array(operations, pa.string())))


def commits(log: Path, after: int = -1) -> Iterator[Commit]:
    """The commits with a greater version, in order; nothing while there is no log."""
    root = log / CHANGES
    for entry in sorted((root / "_delta_log").glob("*.json")):
        if int(entry.stem) > after:
            actions = map(json.loads, entry.read_text(encoding="utf-8").splitlines())
            # what was only rewritten came with an earlier one
            added = (action["add"] for action in actions if action.get("add", {}).get("dataChange"))
            files = tuple(DataFile.of(root, add) for add in added)
            yield Commit(int(entry.stem), entry.stat().st_mtime_ns / 1e9, files)


class CopyEnd:
    """Waits for the `g` row of one table; every commit is looked at once."""

    def __init__(self, log: Path, topic: str) -> None:
        self._log, self._topic = log, topic
        self._seen = -1

    def look(self) -> float | None:
        """Unix time at which it was durable, None while it is not."""
        for commit in commits(self._log, self._seen):
            for rows in commit.rows(["topic"], [Operation.GENERATION]):
                if self._topic in rows["topic"].to_pylist():
                    return commit.durable_at
            self._seen = commit.version
        return None


def lags(
    log: Path, operations: Collection[str], *, after: int = -1, began: float = 0.0, ended: float = float("inf")
) -> Iterator[float]:
    """Milliseconds from the commit at the source to the commit on disk, of each row committed from began to ended."""
    for commit in commits(log, after):
        for rows in commit.rows(["committed_at"], operations):
            moments = rows["committed_at"].cast(pa.int64()).to_numpy() / 1e6
            moments = moments[(moments >= began) & (moments <= ended)]
            yield from ((commit.durable_at - moments) * 1e3).tolist()
