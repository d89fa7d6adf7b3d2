"""Delta tables with deletion vectors: batches for the indexed writer, and the rows that another client reads."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

import pyarrow as pa
from deltalake import DeltaTable

from cdc.delta_protocol.actions import Action
from cdc.delta_protocol.table_storage import LocalStorage, TableStorage
from cdc.target_names import ORDINAL_COLUMN, POSITION_COLUMN
from pipelines.sinks.delta.background_indexing import IndexingThread
from pipelines.sinks.delta.indexed.delta_log import LiveFiles
from pipelines.sinks.delta.indexed_writer import IndexedRows, IndexedTable, Indexing
from pipelines.sinks.delta.target_columns import OP
from pipelines.sinks.delta.target_layout import DELETION_VECTORS

VECTORS = {DELETION_VECTORS: "true"}
APP = "app"
_PLACE = [(POSITION_COLUMN, pa.int64()), (ORDINAL_COLUMN, pa.int64())]

Row = Mapping[str, Any]


def columns_of(*own: tuple[str, pa.DataType]) -> pa.Schema:
    """Return these columns, followed by those for position and ordinal."""
    return pa.schema([*own, *_PLACE])


COLUMNS = columns_of(("id", pa.int64()), ("item", pa.string()))


def upsert(position: int, ordinal: int = 0, **values: Any) -> Row:
    """Return a source row that replaces or inserts a target row."""
    return {**values, POSITION_COLUMN: position, ORDINAL_COLUMN: ordinal, OP: "u"}


def delete(position: int, ordinal: int = 0, **key: Any) -> Row:
    """Return a source row that deletes a target row."""
    return {**key, POSITION_COLUMN: position, ORDINAL_COLUMN: ordinal, OP: "d"}


def source_of(columns: pa.Schema, rows: Sequence[Row]) -> pa.Table:
    """Return source rows as a table."""
    return pa.Table.from_pylist([dict(row) for row in rows], schema=columns.append(pa.field(OP, pa.string())))


def newest_version(uri: str) -> int:
    """Return the newest version, as the file names of the log say it: to open the table takes ten times as long."""
    return max(int(path.name[:20]) for path in Path(uri, "_delta_log").glob("[0-9]*"))


def rows_in(uri: str, **options: Any) -> list[dict[str, Any]]:
    """Return the rows that delta-rs reads, in a fixed order."""
    return sorted(pa.table(DeltaTable(uri).scan(**options)).to_pylist(), key=repr)


def without_op(row: Row) -> dict[str, Any]:
    """Return the target row that a source row makes."""
    return {name: value for name, value in row.items() if name != OP}


class OthersFirst(LocalStorage):
    """A table's directory in which other clients commit before our commits."""

    def __init__(self, root: Path, others: list[Callable[[], object]]) -> None:
        super().__init__(root)
        self._others = others

    def create(self, path: str, content: bytes) -> None:
        if self._others:
            self._others.pop(0)()
        super().create(path, content)


@dataclass
class VectorTable:
    """A Delta table, by default with deletion vectors, and the indexed writer that merges rows into it."""

    uri: str
    columns: pa.Schema = COLUMNS
    key: tuple[str, ...] = ("id",)
    partition_by: tuple[str, ...] = ()
    storage_class: Callable[[Path], TableStorage] = LocalStorage
    relation: int | None = None
    on_disk: int = 8
    """As in KeyIndex: few, so that the index is saved when it is closed."""
    thread: Callable[[], IndexingThread] = IndexingThread
    """Makes the thread that reads keys in the background."""
    properties: Mapping[str, str] = field(default_factory=lambda: VECTORS)
    """Properties of the table when it is created."""
    copies: bool = False
    """As in IndexedTable.merge."""

    def __post_init__(self) -> None:
        if DeltaTable.is_deltatable(self.uri):
            table = DeltaTable(self.uri)
        else:
            partition_by = list(self.partition_by) or None
            table = DeltaTable.create(
                self.uri, self.columns, partition_by=partition_by, configuration={**self.properties}
            )
        self.app_id = APP if self.relation is None else f"{APP}/{self.relation}"
        self._versions = count((table.transaction_version(self.app_id) or 0) + 1)
        self.table = self.open()

    @property
    def storage(self) -> TableStorage:
        """The files of the table."""
        return self.storage_class(Path(self.uri))

    @property
    def index_folder(self) -> Path:
        """The folder of the index."""
        return Path(f"{self.uri}.index")

    @property
    def described(self) -> list[str]:
        """The columns with file statistics."""
        return [name for name in self.columns.names if name not in self.partition_by]

    def open(self) -> IndexedTable:
        """Open the table as a new process does."""
        self.index_folder.mkdir(exist_ok=True)
        storage = self.storage
        rows = IndexedRows(self.key, self.relation)
        indexing = Indexing(self.thread(), self.on_disk, bounds_first=1)
        return IndexedTable(storage, LiveFiles.read(storage), self.index_folder, rows, indexing)

    def reopen(self) -> None:
        """Close the table and open it again."""
        self.table.close()
        self.table = self.open()

    def marker(self) -> Action:
        """Return a `txn` action that no commit has yet."""
        return {"txn": {"appId": self.app_id, "version": next(self._versions), "lastUpdated": 0}}

    def merge(self, *rows: Row) -> None:
        """Merge rows, after the commits of other clients were read."""
        self.table.read_commits(newest_version(self.uri))
        self.merge_unread(*rows)

    def merge_unread(self, *rows: Row) -> None:
        """Merge rows without reading the commits of other clients first."""
        self.merge_source(source_of(self.columns, rows))

    def merge_source(self, source: pa.Table) -> int:
        """Merge source rows, which may lack columns; return the bytes of the files that were written again."""
        return self.table.merge(source, self.marker(), self.columns, self.described, copies=self.copies)

    def rows(self) -> list[dict[str, Any]]:
        """Return the rows that delta-rs reads, in a fixed order."""
        return rows_in(self.uri)

    def files(self) -> LiveFiles:
        """Return the live files as a new process reads them."""
        return LiveFiles.read(self.storage)

    def close(self) -> None:
        """Close the index."""
        self.table.close()
