"""Input of the benchmark of apply: the same changes as a change log for ours, and as plain Parquet for the peer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from cdc.bucket_files import Root
from cdc.log.disk_format import CommitInfo
from cdc.log.writer import LogWriter, SegmentLimits, StagedFile
from cdc.log_row import LOG_SCHEMA
from cdc.position import Position
from cdc.table import Column, ReplicaIdentity, TableSchema
from tests.log.rows import IDENTITY, LIMITS

TRANSACTION = 10
"""Changes of one transaction, unless the changes say how many."""
COMMIT = 100_000
"""Changes of one commit of the log."""
STARTED = 1_700_000_000_000_000
"""Commit time of the first transaction, in microseconds since 1970."""
DELETED = 0.05
FIRST = 1_000
RELATION = 16_384
TOPIC = "shop.items"
ITEMS = TableSchema(
    relation=RELATION,
    oid=RELATION,
    schema="shop",
    name="items",
    replica_identity=ReplicaIdentity.DEFAULT,
    columns=(
        Column(id=1, name="id", type_oid=20, type_name="bigint", key=0),
        Column(id=2, name="amount", type_oid=20, type_name="bigint"),
        Column(id=3, name="state", type_oid=25, type_name="text"),
        Column(id=4, name="note", type_oid=25, type_name="text"),
    ),
)


@dataclass(frozen=True, slots=True)
class Changes:
    """Changes by number, from 0 on; the first `keys` of them insert every key once."""

    ids: np.ndarray
    gone: np.ndarray
    """Which delete."""
    partial: np.ndarray
    """Which do not send the note, as a large value that did not change."""
    transaction: int = TRANSACTION
    """Changes of one transaction."""

    @classmethod
    def random(
        cls,
        random: np.random.Generator,
        keys: int,
        changes: int,
        *,
        partial: float = 0.0,
        transaction: int = TRANSACTION,
    ) -> Changes:
        """`changes` changes after the `keys` inserts; a row that is deleted comes back whole."""
        ids = np.concatenate([random.permutation(keys), random.integers(0, keys, changes)])
        gone, lacks = random.random(len(ids)) < DELETED, random.random(len(ids)) < partial
        gone[:keys] = lacks[:keys] = False
        return cls(ids, gone, lacks & ~gone & ~_after_a_delete(ids, gone), transaction)

    def __len__(self) -> int:
        return len(self.ids)

    def position(self, change: int) -> int:
        """Of the transaction with that change."""
        return FIRST + change // self.transaction

    def log(self, folder: Path, commit: int = COMMIT, limits: SegmentLimits = LIMITS) -> Path:
        """All of them as a change log. commit: changes of one commit, which has a file for every COMMIT changes."""
        writer = new_log(folder, limits)
        for first in range(0, len(self), commit):
            end = min(first + commit, len(self))
            files = [file for numbers in _slices(first, end, COMMIT) for file in writer.stage(self._images(numbers))]
            _commit(writer, files, self.position(end - 1))
        return folder / "log"

    def append(self, writer: LogWriter, start: int, count: int) -> None:
        """Append `count` of them to a log in one commit."""
        numbers = np.arange(start, start + count)
        _commit(writer, writer.stage(self._images(numbers)), self.position(int(numbers[-1])))

    def rows(self, count: int) -> pa.Table:
        """Return the rows that the first `count` of them leave, in the order of their ids."""
        final = self.final(count)
        return final.rows(final.ids)

    def final(self, count: int) -> FinalRows:
        """Return what the first `count` of them leave."""
        numbers = np.arange(count)
        last = np.full(int(self.ids.max()) + 1, -1)
        note = last.copy()
        last[self.ids[:count]] = numbers  # of equal indexes numpy assigns the last one
        whole = ~self.partial[:count]
        note[self.ids[:count][whole]] = numbers[whole]
        return FinalRows(np.flatnonzero((last >= 0) & ~np.append(self.gone, False)[last]), last, note)

    def plain(self, folder: Path, start: int, count: int) -> Path:
        """Some of them as one Parquet file: typed columns, op and an order."""
        numbers = np.arange(start, min(start + count, len(self)))
        path = folder / f"changes-{start}.parquet"
        texts = _texts(numbers)
        columns = {"id": self.ids[numbers], "amount": numbers, "state": texts[0], "note": texts[1]}
        ops = np.where(self.gone[numbers], "d", "u")
        pq.write_table(pa.table({**columns, "op": ops, "number": numbers}), path)
        return path

    def _images(self, numbers: np.ndarray) -> pa.Table:
        count, gone, partial = len(numbers), self.gone[numbers], self.partial[numbers]
        keys = pa.array(self.ids[numbers]).cast(pa.string())
        texts = [keys, pa.array(numbers).cast(pa.string()), *_texts(numbers)]
        sent = np.tile(~gone, (4, 1)).T
        sent[:, 3] &= ~partial
        rows, columns = np.nonzero(sent)
        cells = pa.chunked_array([text.cast(pa.string()) for text in texts]).combine_chunks()
        offsets = np.concatenate(([0], np.cumsum(sent.sum(axis=1)))).astype(np.int32)
        after = pa.MapArray.from_arrays(
            pa.array(offsets, mask=np.append(gone, False)),
            pa.array(columns.astype(np.int32) + 1),
            cells.take(pa.array(columns * count + rows)),
        )
        said = {
            "position": FIRST + numbers // self.transaction,
            "ordinal": numbers % self.transaction,
            "xid": numbers // self.transaction + 1,
            "committed_at": pa.array(STARTED + numbers // self.transaction * 1000).cast(pa.timestamp("us", "UTC")),
            "relation": np.full(count, RELATION),
            "topic": pa.repeat(pa.scalar(TOPIC), count),
            "op": pa.array(np.where(gone, "d", "u")),
            "key": pa.ListArray.from_arrays(pa.array(np.arange(count + 1), pa.int32()), keys),
            "after": after,
            "partial": partial,
        }
        columns_of = [said.get(field.name, pa.nulls(count, field.type)) for field in LOG_SCHEMA]
        return pa.table(columns_of, names=LOG_SCHEMA.names).cast(LOG_SCHEMA)


@dataclass(frozen=True, slots=True)
class FinalRows:
    """The rows that changes leave."""

    ids: np.ndarray
    """The ids of the rows, sorted."""
    last: np.ndarray
    """By id: the number of the last change."""
    note: np.ndarray
    """By id: the number of the change that set the note."""

    def rows(self, ids: np.ndarray) -> pa.Table:
        """Return the rows with these ids, in their order."""
        states, notes = _texts(self.last[ids])[0], _texts(self.note[ids])[1]
        return pa.table({"id": ids, "amount": self.last[ids], "state": states, "note": notes})


_PLAIN = {"ordinal": 0, "xid": 0, "committed_at": STARTED, "relation": RELATION, "partial": False}


def _after_a_delete(ids: np.ndarray, gone: np.ndarray) -> np.ndarray:
    """Which changes are the first of their key after its delete: their row has to come whole."""
    order = np.argsort(ids, kind="stable")
    before = np.zeros(len(ids), bool)
    same = ids[order][1:] == ids[order][:-1]
    before[order[1:]] = same & gone[order[:-1]]
    return before


def _texts(numbers: np.ndarray) -> tuple[pa.Array, pa.Array]:
    """(a short and a long text for each number), neither of which a codec makes much smaller."""
    noise = numbers.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    short = pa.array(noise >> np.uint64(32)).cast(pa.string())
    return short, pa.compute.binary_join_element_wise(pa.array(noise).cast(pa.string()), short, short, "-")


def new_log(folder: Root, limits: SegmentLimits = LIMITS) -> LogWriter:
    """Begin the log of a folder with the schema of the table."""
    writer = LogWriter.open(folder / "log", IDENTITY, limits)
    said = {"position": FIRST - 1, "topic": TOPIC, "op": "s", "payload": ITEMS.to_json()}
    _commit(writer, writer.stage(_rows([{**dict.fromkeys(LOG_SCHEMA.names), **_PLAIN, **said}])), FIRST - 1)
    return writer


def _slices(start: int, end: int, count: int) -> Iterator[np.ndarray]:
    for low in range(start, end, count):
        yield np.arange(low, min(low + count, end))


def _rows(rows: list[dict[str, object]]) -> pa.Table:
    return pa.Table.from_pylist(rows, LOG_SCHEMA)


def _commit(writer: LogWriter, files: Sequence[StagedFile], last: int) -> None:
    writer.commit(files, CommitInfo(last=Position(last), committed_at=1_700_000_000_000_000, timeline=1))
