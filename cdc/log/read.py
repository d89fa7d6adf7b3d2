"""LogReader: ranges of `changes` as Arrow, for the Spark source, for tail, and for any Python program."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from operator import itemgetter
from pathlib import Path
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from deltalake import DeltaTable

from cdc.change import LOG_SCHEMA, Operation
from cdc.errors import LogCorrupt, LogError
from cdc.log import ranges
from cdc.log.layout import CHANGES, CommitInfo, LogFile, LogIdentity
from cdc.position import ChangePosition, Position
from cdc.table import TableSchema

LOOK_EVERY: Final = 2.0
"""Seconds between two looks at the table of a log in which nothing seems to happen."""
REOPEN_AFTER: Final = 64
"""Versions after which the table is opened anew: an opened one keeps every commit it has replayed."""


class LogReader:
    """A view of one log as of the last refresh; cheap to refresh, safe beside the writer."""

    def __init__(self, root: str | Path) -> None:
        self._root = Path(root) / CHANGES
        if not DeltaTable.is_deltatable(str(self._root)):
            raise LogError(f"no change log at {str(root)!r}", remedy="check log.path, and that the reader has run once")
        self._table = DeltaTable(str(self._root))
        self._opened_at = self._table.version()
        metadata = self._table.metadata()
        self.log_id = str(metadata.id)
        self.identity = LogIdentity.from_description(metadata.description)
        self._files: list[LogFile] | None = None
        self._look_due = 0.0

    @property
    def system_id(self) -> str:
        """Of the source cluster."""
        return self.identity.system_id

    @property
    def version(self) -> int:
        """Delta version of the view."""
        return int(self._table.version())

    @property
    def durable(self) -> Position | None:
        """The last position in the log; None before its first snapshot."""
        version = self._table.transaction_version(self.log_id)
        return None if version is None else Position(version)

    @property
    def last_commit(self) -> CommitInfo | None:
        """What the latest commit says of itself; None before the first snapshot."""
        return CommitInfo.from_metadata(self._table.history(1)[0])

    def refresh(self) -> None:
        """Move the view to what is committed now; nearly free when nothing is."""
        before = self._table.version()
        # The next commit's file tells at the price of a stat. It can be cleaned away behind a view that stood
        # still for long, so now and then the table itself is asked.
        now = time.monotonic()
        if now < self._look_due and not (self._root / "_delta_log" / f"{before + 1:020d}.json").exists():
            return
        self._look_due = now + LOOK_EVERY
        self._table.update_incremental()
        if self._table.version() == before:
            return
        self._files = None
        if self._table.version() - self._opened_at >= REOPEN_AFTER:
            self._table = DeltaTable(str(self._root))
            self._opened_at = self._table.version()

    def every_file(self) -> list[LogFile]:
        """All data files of the view."""
        if self._files is None:
            self._files = _files(self._root, pa.table(self._table.get_add_actions(flatten=True)))
        return self._files

    def files(self, after: Position, upto: Position) -> list[LogFile]:
        """The files with a position in (after, upto], in order."""
        return ranges.overlapping(self.every_file(), after, upto)

    def latest_boundary(self, after: Position, max_rows: int | None = None) -> Position:
        """Where a batch that starts after `after` should end; `after` itself when there is nothing new."""
        durable = self.durable
        if durable is None or durable <= after:
            return after
        return ranges.boundary(self.every_file(), after, durable, max_rows)

    def rows(
        self, after: Position, upto: Position, *, topics: Callable[[str], bool] | None = None
    ) -> Iterator[pa.RecordBatch]:
        """The rows in (after, upto] as LOG_SCHEMA batches, file by file; messages pass every topic filter."""
        for file in self.files(after, upto):
            rows = read_file(file, after, upto)
            if topics is not None:
                wanted = {t for t in rows["topic"].unique().to_pylist() if t is None or topics(t)}
                rows = rows.filter(pc.is_in(rows["topic"], pa.array(wanted, pa.string())))
            yield from rows.to_batches()

    def schemas(self, upto: Position | None = None) -> dict[int, TableSchema]:
        """Relation → the version of its schema in force at upto (default: now)."""
        limit = upto if upto is not None else self.durable or Position(0)
        return {schema.relation: schema for _, schema in self.schema_history(limit)}

    def schema_history(self, upto: Position | None = None) -> list[tuple[ChangePosition, TableSchema]]:
        """Every version of every table up to a position (default: now), oldest first."""
        limit = upto if upto is not None else self.durable or Position(0)
        found: list[tuple[ChangePosition, TableSchema]] = []
        for file in self.every_file():
            if not file.schemas_only or file.first > limit:
                continue
            for row in read_file(file, Position(0), limit, ["position", "ordinal", "payload"]).to_pylist():
                place = ChangePosition(Position(row["position"]), row["ordinal"])
                found.append((place, TableSchema.from_json(row["payload"])))
        return sorted(found, key=itemgetter(0))

    def committed_at(self, position: Position) -> int:
        """Commit time at a position, µs UTC; exact for the last transaction, else cut to ms; 0 if unknown."""
        if position == self.durable:
            return 0 if self.last_commit is None else self.last_commit.committed_at
        return max((f.committed_at for f in self.every_file() if f.last == position), default=0)


def read_file(file: LogFile, after: Position, upto: Position, columns: list[str] | None = None) -> pa.Table:
    """The rows of one file in (after, upto], as LOG_SCHEMA or the named columns of it."""
    names = columns or LOG_SCHEMA.names
    try:
        rows = pq.ParquetFile(file.path).read(columns=names if "position" in names else [*names, "position"])
    except (OSError, pa.ArrowException) as exc:
        raise LogCorrupt(f"log file {file.path!r} cannot be read") from exc
    if file.first <= after or file.last > upto:
        within = pc.and_(pc.greater(rows["position"], int(after)), pc.less_equal(rows["position"], int(upto)))
        rows = rows.filter(within)
    return rows.select(names).cast(pa.schema([LOG_SCHEMA.field(name) for name in names]))


def _files(root: Path, actions: pa.Table) -> list[LogFile]:
    return [_file(root, row) for row in actions.to_pylist()]


def _file(root: Path, row: dict[str, Any]) -> LogFile:
    latest = row.get("max.committed_at")
    return LogFile(
        path=str(root / row["path"]),
        rows=row["num_records"],
        size=row["size_bytes"],
        first=Position(row["min.position"]),
        last=Position(row["max.position"]),
        segment=int(row["partition.segment"]),
        schemas_only=row["min.op"] == row["max.op"] == Operation.SCHEMA.value,
        partial=row.get("max.partial") is not False,
        committed_at=0 if latest is None else int(latest.timestamp() * 1_000_000),
    )
