"""Indexed writer: merges a batch into a Delta target whose rows it finds by a key index.

A merge takes these steps:

1. The key index finds the old rows: the target's rows with the keys of the batch.
2. The new rows are written to one Parquet file per partition.
3. Deletion vectors that delete the old rows are written, all to one file. So a merge costs as much as its batch,
   whatever the size of the target. If the target has no deletion vectors, the data files with old rows are written
   again without them (copy_on_write.py).
4. One commit names these files, with the `txn` of the batch.
5. The keys of the new rows are added to the index. Those of files that were written again are added by the next merge.

A process that is killed before the commit leaves files that no commit names. If it is killed after the commit, the
index does not contain the new files. The next merge then reads their keys from the target.

Another client may commit at the same time. The merge then reads that commit, adds its files to the index and repeats
the steps. It writes the Parquet files again only if their rows have changed.

Many new rows of other writers, or a lost index, are added to the index in the background. Until then a merge searches
the keys in these files themselves, see background_indexing.py.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple, dataclass, field, replace
from pathlib import Path
from typing import Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from deltalake.exceptions import CommitFailedError, DeltaError
from pyroaring import BitMap

from cdc.delta_protocol.actions import Action, add_action, commit_info
from cdc.delta_protocol.deletion_vectors import encode, rows_of
from cdc.delta_protocol.table_storage import TableStorage
from cdc.failpoint import hit
from cdc.target_names import ORDINAL_COLUMN, POSITION_COLUMN, RELATION_COLUMN
from pipelines.sinks.delta import file_compaction
from pipelines.sinks.delta.background_indexing import BackgroundIndexing, IndexingThread
from pipelines.sinks.delta.change_data_files import CHANGE_DATA_FEED, changed_rows, write_change_data
from pipelines.sinks.delta.copy_on_write import FileRewriter
from pipelines.sinks.delta.damaged_commits import TXN_NAMED
from pipelines.sinks.delta.file_compaction import RewrittenFile
from pipelines.sinks.delta.file_search import WantedKeys, concatenated, may_have_keys
from pipelines.sinks.delta.indexed.delta_log import (
    ATTEMPTS,
    LiveFile,
    LiveFiles,
    MetadataChanged,
    new_data_path,
)
from pipelines.sinks.delta.indexed.key_hashes import hash_keys
from pipelines.sinks.delta.indexed.key_index import ON_DISK, FoundRows, KeyHashes, KeyIndex, PreparedRun
from pipelines.sinks.delta.new_data_files import SMALL_SAMPLE_ROWS, parquet_options, statistics, with_all_columns
from pipelines.sinks.delta.row_constraints import check_constraints
from pipelines.sinks.delta.target_columns import OP, POSITION_KEY
from pipelines.sinks.delta.target_layout import DELETION_VECTORS, rows_by_partition

FEATURES: Final = frozenset(
    {
        "appendOnly",
        "changeDataFeed",
        "checkConstraints",
        "deletionVectors",
        "generatedColumns",
        "invariants",
        "timestampNtz",
        "variantType",
    }
)
"""Features that a table of this writer may have. A table with `generatedColumns` must not have such a column."""
APPEND_ONLY: Final = "delta.appendOnly"
"""Property of a Delta table: `true` if its rows must neither change nor be deleted."""
_COLUMN_MAPPING: Final = "delta.columnMapping.mode"
_COMPUTED: Final = {"delta.generationExpression": "generated", "delta.identity.": "identity"}
"""Start of a key in the metadata of a column whose values a writer computes → kind of the column."""
_INDEXED_AT_ONCE: Final = 2_000_000
"""Number of rows at which the rows hashed so far are added to an index; each needs 32 bytes of memory."""

BOUNDS_FIRST: Final = 10_000
"""Number of keys from which a search first compares them with the bounds of all files.

A first copy has new keys, mostly in the order of the key. Fewer keys are found faster than many files are compared.
"""


@dataclass(frozen=True, slots=True)
class NewRows:
    """The rows that a batch merges into one target, with the hashes of their keys."""

    source: pa.Table
    """Rows with the columns of the target and `_op`, at most one per key."""
    key: tuple[str, ...]
    hashes: KeyHashes
    numbers: np.ndarray
    """Numbers of the rows of `source` that have a hash. A row with NULL in its key has no hash."""


@dataclass(frozen=True, slots=True)
class NewFile:
    """A Parquet file that no commit has added yet."""

    file: LiveFile
    hashes: KeyHashes
    rows: np.ndarray


@dataclass(frozen=True, slots=True)
class RemovedRows:
    """What a commit needs in order to remove old rows from a table."""

    actions: Sequence[Action]
    """The `remove` actions of the data files with old rows."""
    paths: Sequence[str]
    """Paths of the data files that leave the table."""
    files: Sequence[LiveFile]
    """The data files with new deletion vectors, or those that take the place of `paths`."""
    copied: int
    """Bytes of the data files that were written again."""


@dataclass(frozen=True, slots=True)
class IndexedRewrite:
    """A rewritten data file that no commit has added yet, with the entries of its keys for the index."""

    written: RewrittenFile
    number: int
    """Number of the new file in the index."""
    entries: PreparedRun


def refusal(files: LiveFiles) -> str | None:
    """Return why this writer cannot write a table, as a clause; None if it can."""
    if unknown := sorted(files.features - FEATURES):
        return f"the table has unsupported features {', '.join(unknown)}"
    if files.configuration.get(_COLUMN_MAPPING, "none") != "none":
        return f"table property {_COLUMN_MAPPING} is set"
    for key, kind in _COMPUTED.items():
        if f'"{key}' in str(files.metadata.get("schemaString")):
            return f"the table has {kind} columns"
    return None


def has_vectors(files: LiveFiles) -> bool:
    """Return whether writers of a table may mark rows as deleted instead of writing their files again."""
    return "deletionVectors" in files.features and files.configuration.get(DELETION_VECTORS) == "true"


@dataclass(frozen=True, slots=True)
class IndexedRows:
    """Which rows of a table are in an index, and by which columns it finds them."""

    key: tuple[str, ...]
    relation: int | None = None
    """The relation of the rows, if several source tables share the target."""
    null_column: str | None = None
    """Only rows in which this column is null are in the index, and merges do not use the index. None: all rows."""


@dataclass(frozen=True, slots=True)
class Indexing:
    """How the indexes of a sink are kept."""

    thread: IndexingThread = field(default_factory=IndexingThread)
    on_disk: int = ON_DISK
    """As in KeyIndex."""
    bounds_first: int = BOUNDS_FIRST
    """See BOUNDS_FIRST."""


class IndexedTable:
    """One target of the indexed writer: its live files and its key index. No two threads use it at the same time,
    except that `rewrite` may run during other calls.
    """

    def __init__(
        self,
        storage: TableStorage,
        files: LiveFiles,
        folder: Path | None,
        rows: IndexedRows,
        indexing: Indexing,
    ) -> None:
        """Open the index of a table. folder: as in KeyIndex."""
        self._storage, self.files, self.key, self._rows = storage, files, rows.key, rows
        self.index = KeyIndex(folder, json.dumps([files.metadata.get("id"), *astuple(rows)]), indexing.on_disk)
        self._bounds_first = indexing.bounds_first
        self._background = BackgroundIndexing(self.index, indexing.thread, self._hashes_in)

    def merge(
        self, source: pa.Table, marker: Action, columns: pa.Schema, described: Sequence[str], *, copies: bool = False
    ) -> int:
        """Merge rows into the table, in one commit with the action `marker`.

        source: as in Writers.merge. columns: the columns of the table. described: the columns that get file statistics.
        copies: write data files with old rows again, even if the table has deletion vectors. Returns the bytes of the
        data files that were written again. Raises CommitFailedError if other clients commit during each attempt, or
        change columns. Raises DeltaError for rows that violate a constraint of the table, and if old rows of an
        append-only table would be removed.
        """
        hashes, numbers = hash_keys([source[name] for name in self.key], self.index.secret)
        rows = NewRows(source, self.key, hashes, numbers)
        written: tuple[pa.Table, list[NewFile]] | None = None
        rewriter = FileRewriter(self._storage, columns.names, described)
        for attempt in range(ATTEMPTS):
            if attempt:
                self._read_conflict()
            self._check_not_merged(marker)
            self.index_new_files()
            found = self._live_matches(self._find(source, hashes), numbers)
            found, stays = self._later_matches(rows, found)
            if found.files.size and self.files.configuration.get(APPEND_ONLY) == "true":
                raise DeltaError("the table is append-only, but the batch changes or deletes rows of it")
            upserts = self._upserts(rows, stays)
            table = self._new_table(rows.source, upserts, found, columns)
            if written is None or not written[0].equals(table):
                check_constraints(self.files, table, columns)
                written = table, self._write_files(rows, upserts, table, described)
                hit("delta_indexed_after_files")
            removed = self._remove(found, rewriter if copies or not self.has_vectors else None)
            changes = self._change_data(found, upserts, table, columns)
            if self._commit(removed, written[1], changes, marker):
                self.index.add({new.file.add["path"]: (new.hashes, new.rows) for new in written[1]})
                hit("delta_indexed_after_index")
                return removed.copied
        raise CommitFailedError("other clients committed to the table during each attempt to merge the batch")

    @property
    def has_vectors(self) -> bool:
        """Whether the table has deletion vectors."""
        return has_vectors(self.files)

    def read_commits(self, version: int = -1) -> None:
        """Read the commits of other writers, at least up to `version`. Raises LogNotReadable and DamagedVector.

        Nothing is read if this table is already at `version`: the caller knows that this is the newest one.
        """
        if self.files.version == version and self.files.is_complete:
            return
        self.files.advance()
        if self.files.version < version:  # commits in between were removed from `_delta_log`
            self.files = LiveFiles.read(self._storage)

    def index_new_files(self) -> None:
        """Add the live files that the index does not contain yet, or let the thread do it if they have many rows."""
        own = self.own_files()
        for path in [path for path in (*self.index.files, *self._background.files) if path not in own]:
            self._forget(path)
        self._background.add_finished()
        self.index.merge_runs()
        known = self.index.files.keys() | self._background.files.keys()
        unknown = {path: file for path, file in own.items() if path not in known}
        if unknown and self._background.takes(unknown):
            self._background.start(unknown)
        elif unknown:
            self._index_files([*unknown])

    @property
    def waiting_files(self) -> int:
        """Number of files whose keys were not read yet, so that each merge searches them. Any thread may ask."""
        return self._background.waiting_files

    def own_files(self) -> Mapping[str, LiveFile]:
        """Return path → live file: in a shared target, the files of one source table; otherwise all files."""
        if self._rows.relation is None:
            return self.files.by_path
        own = str(self._rows.relation)
        return {
            path: file
            for path, file in self.files.by_path.items()
            if (file.add.get("partitionValues") or {}).get(RELATION_COLUMN) == own
        }

    def close(self) -> None:
        """Save the index."""
        self._background.close()
        self.index.close()

    def _forget(self, path: str) -> None:
        """Leave out a file that is no longer live."""
        self.index.forget(path)
        self._background.forget(path)

    def _find(self, keys: pa.Table, hashes: KeyHashes) -> FoundRows:
        """Return every row with one of the keys, also deleted rows: from the index, and from the files not in it.

        keys: a table with the key columns. hashes: the hashes of its keys that have no NULL; the result numbers them.
        """
        first = self.key[0]
        if hashes.high.size >= self._bounds_first and not may_have_keys(self.own_files().values(), first, keys[first]):
            return concatenated([])  # the index is not read: it would take longer the more rows the target has
        found = self.index.find(hashes)
        if not self._background.files:
            return found
        wanted = WantedKeys(self.key, keys.select(list(self.key)), hashes, self.index.secret, self._rows.null_column)
        return concatenated([found, wanted.find(self.files, self._background.files.values())])

    @property
    def _paths(self) -> dict[int, str]:
        """Number of a data file → its path."""
        paths = {number: path for path, number in self.index.files.items()}
        return paths | {number: path for path, (number, _) in self._background.files.items()}

    def _check_not_merged(self, marker: Action) -> None:
        """Raise CommitFailedError if another driver merged up to the position of `marker`, or further."""
        txn = marker["txn"]
        if self.files.transactions.get(txn["appId"], -1) >= txn["version"]:
            raise CommitFailedError("another driver committed rows of the same table")

    def _read_conflict(self) -> None:
        """Read the commits of other clients that committed first.

        Raises MetadataChanged if they changed columns, properties or features of the table.
        """
        known = self.files.metadata, self.files.protocol
        self.files.advance()
        if (self.files.metadata, self.files.protocol) != known:
            raise MetadataChanged("another client changed columns, properties or features of the table")

    def rewrite(
        self, sources: Sequence[LiveFile], columns: Sequence[str], described: Sequence[str], pace: Callable[[int], None]
    ) -> IndexedRewrite:
        """Write the live rows of data files to a new file, and hash its keys; another thread may merge meanwhile.

        Arguments as in file_compaction.write.
        """
        written = file_compaction.write(self._storage, sources, columns, described, pace)
        hit("delta_rewrite_written")
        number = self.index.new_number()
        return IndexedRewrite(written, number, self.index.prepare({number: self._hashes_in(written.file)}))

    def commit_rewrite(self, done: IndexedRewrite, signature: Action) -> bool:
        """Replace data files by the file that `rewrite` wrote; return whether that was done. No merge may run.

        signature: as in file_compaction.commit.
        """
        try:
            return self._commit_rewrite(done, signature)
        finally:
            self.index.discard(done.entries)

    def _commit_rewrite(self, done: IndexedRewrite, signature: Action) -> bool:
        self.files.advance()
        if refusal(self.files) is not None or not self.has_vectors:
            return False
        if not file_compaction.commit(self._storage, self.files, done.written, signature):
            return False
        for source in done.written.sources:
            self._forget(source.add["path"])
        path = done.written.file.add["path"]
        if path in self.files.by_path:
            self.index.add_prepared({path: done.number}, done.entries)
        return True

    def _index_files(self, paths: Sequence[str]) -> None:
        """Add the rows of data files to the index, also deleted rows, because a RESTORE can undelete them."""
        found, rows = dict[str, tuple[KeyHashes, np.ndarray]](), 0
        for path in paths:
            found[path] = self._hashes_in(self.files.by_path[path])
            rows += found[path][1].size
            if rows >= _INDEXED_AT_ONCE:
                self.index.add(found)
                found, rows = {}, 0
        self.index.add(found)

    def _hashes_in(self, file: LiveFile) -> tuple[KeyHashes, np.ndarray]:
        """Return the hashes of the keys in a data file, and the row number of each."""
        if self._rows.null_column is None:
            return hash_keys(self.files.read_rows(file, self.key).columns, self.index.secret)
        rows = self.files.read_rows(file, (*self.key, self._rows.null_column))
        wanted = np.flatnonzero(pc.is_null(rows[self._rows.null_column]).to_numpy())
        hashes, numbers = hash_keys(rows.select(list(self.key)).take(pa.array(wanted)).columns, self.index.secret)
        return hashes, wanted[numbers]

    def find_rows(self, keys: pa.Table, schema: pa.Schema) -> pa.Table:
        """Return the rows with the given keys, each row once. keys: the key columns. schema: the columns to return."""
        self.index_new_files()
        hashes, numbers = hash_keys([keys[name] for name in self.key], self.index.secret)
        found = self._live_matches(self._find(keys, hashes), numbers)
        _, first = np.unique(np.stack([found.files, found.rows]), axis=1, return_index=True)
        return self._old_values(FoundRows(*(values[first] for values in found)), schema)

    def _live_matches(self, found: FoundRows, numbers: np.ndarray) -> FoundRows:
        """Return the found rows that are not deleted and whose file is live.

        numbers: for each searched key, the number of its source row. The result has this number in `wanted`.
        """
        path_of = self._paths
        keep = np.zeros(found.files.size, bool)
        for number in np.unique(found.files).tolist():
            if (path := path_of.get(number)) is None:
                continue
            here = np.flatnonzero(found.files == number)
            rows = found.rows[here]
            gone = self.files.by_path[path].deleted
            if rows.size < len(gone):  # a bitmap of more rows takes longer than an array of all deleted rows
                gone = gone & BitMap(rows.astype(np.uint32))
            keep[here] = ~np.isin(rows, rows_of(gone)) if gone else True
        return FoundRows(numbers[found.wanted[keep]], found.files[keep], found.rows[keep])

    def _later_matches(self, rows: NewRows, found: FoundRows) -> tuple[FoundRows, np.ndarray]:
        """Return the target rows that a source row replaces or deletes, and the source rows that must be ignored.

        found: target rows with the keys of source rows. A source row is ignored if the target row with its key is
        later. This happens only when a batch is merged again after a crash. So the positions in a file are read only if
        its statistics show that it may contain later rows.
        """
        # a row of a table without a key is deleted by its own position
        if self.key == POSITION_KEY or not found.files.size:
            return found, np.empty(0, np.int64)
        position, ordinal = rows.source[POSITION_COLUMN].to_numpy(), rows.source[ORDINAL_COLUMN].to_numpy()
        first = int(position.min())
        path_of = self._paths
        applies = np.ones(found.files.size, bool)
        deletes = pc.equal(rows.source[OP], "d").to_numpy()
        for number in np.unique(found.files).tolist():
            file = self.files.by_path[path_of[number]]
            greatest = file.greatest(POSITION_COLUMN)
            if greatest is not None and int(greatest) < first:
                continue
            here = np.flatnonzero(found.files == number)
            stored = self.files.read_rows(file, (POSITION_COLUMN, ORDINAL_COLUMN), found.rows[here])
            unpositioned = pc.is_null(stored[POSITION_COLUMN]).to_numpy()
            there = pc.fill_null(stored[POSITION_COLUMN], 0).to_numpy()
            within = pc.fill_null(stored[ORDINAL_COLUMN], 0).to_numpy()
            mine, own = position[found.wanted[here]], ordinal[found.wanted[here]]
            later = np.where(deletes[found.wanted[here]], own > within, own >= within)
            applies[here] = unpositioned | (mine > there) | ((mine == there) & later)
        stays = np.unique(found.wanted[~applies])
        return FoundRows(*(values[applies] for values in found)), stays

    def _upserts(self, rows: NewRows, stays: np.ndarray) -> np.ndarray:
        """Return the numbers of the source rows that become target rows; stays: the source rows to ignore."""
        wanted = pc.equal(rows.source[OP], "u").to_numpy().copy()
        wanted[stays] = False
        return np.flatnonzero(wanted)

    def _new_table(self, source: pa.Table, upserts: np.ndarray, found: FoundRows, columns: pa.Schema) -> pa.Table:
        """Return the new rows of the target: the source rows with the numbers `upserts`.

        A column that the source does not have keeps the value of the old row in `found`. If all of its values are null,
        the column is left out.
        """
        table = source.select([field.name for field in columns if field.name in source.column_names])
        if upserts.size < table.num_rows:
            table = table.take(pa.array(upserts))
        partitions = self.files.partition_columns
        absent = [field for field in columns if field.name not in {*source.column_names, *partitions}]
        if not absent or not found.files.size:
            return table
        kept = self._old_values(found, pa.schema(absent))
        place_of = np.full(source.num_rows, -1, np.int64)
        place_of[found.wanted[np.argsort(found.files, kind="stable")]] = np.arange(found.files.size)
        places = place_of[upserts]
        for column, values in zip(absent, kept.take(pa.array(places, mask=places < 0)).columns, strict=True):
            if values.null_count < len(values):
                table = table.append_column(column, values)
        return table

    def _old_values(self, found: FoundRows, schema: pa.Schema) -> pa.Table:
        """Read the columns of `schema` from the found rows. The result is sorted by the numbers of the data files."""
        path_of = self._paths
        parts = [schema.empty_table()]
        for number in np.unique(found.files).tolist():
            numbers = found.rows[found.files == number]
            rows = self.files.read_rows(self.files.by_path[path_of[number]], schema.names, numbers)
            columns = [
                pa.nulls(len(values), field.type) if values.null_count == len(values) else values.cast(field.type)
                for field, values in zip(schema, rows.columns, strict=True)
            ]
            parts.append(pa.Table.from_arrays(columns, schema=schema))
        return pa.concat_tables(parts)

    def _write_files(
        self, rows: NewRows, upserts: np.ndarray, table: pa.Table, described: Sequence[str]
    ) -> list[NewFile]:
        """Write the new rows to one Parquet file per partition.

        table: the new rows. upserts: for each of them, the number of its source row.
        """
        if not upserts.size:
            return []
        place_of = np.full(rows.source.num_rows, -1, np.int64)
        place_of[rows.numbers] = np.arange(rows.numbers.size)
        written = []
        for values, numbers in rows_by_partition(table, self.files.partition_columns):
            part = table if numbers is None else table.take(pa.array(numbers))
            own = upserts if numbers is None else upserts[numbers]
            places = place_of[own]
            known = np.flatnonzero(places >= 0)
            file = self._write_file(part.drop_columns(list(values)), values, described)
            hashes = KeyHashes(rows.hashes.high[places[known]], rows.hashes.low[places[known]])
            written.append(NewFile(file, hashes, known))
        return written

    def _write_file(self, rows: pa.Table, values: Mapping[str, str | None], described: Sequence[str]) -> LiveFile:
        path = new_data_path()
        sink = pa.BufferOutputStream()
        options = parquet_options(rows.schema, rows.slice(0, SMALL_SAMPLE_ROWS))
        pq.write_table(rows.replace_schema_metadata(None), sink, **options)
        content = sink.getvalue()
        self._storage.write(path, content)
        return LiveFile(add_action(path, content.size, statistics(rows, described), values))

    def _commit(self, removed: RemovedRows, new: Sequence[NewFile], changes: Sequence[Action], marker: Action) -> bool:
        """Commit new files and removed rows; return False if another client committed first.

        changes: the actions of the change data files.
        """
        added = [*removed.files, *(written.file for written in new)]
        hit("delta_indexed_before_commit")
        info = commit_info("MERGE", engineInfo="cdc", **{TXN_NAMED: marker["txn"]["appId"]})
        actions = [info, *removed.actions, *({"add": file.add} for file in added), *changes, marker]
        try:
            self.files.commit(actions, [*removed.paths, *added])
        except FileExistsError:
            return False
        for path in removed.paths:  # if a RESTORE adds the file again, a merge of runs may have dropped its entries
            self._forget(path)
        hit("delta_indexed_after_commit")
        return True

    def _change_data(self, found: FoundRows, upserts: np.ndarray, new: pa.Table, columns: pa.Schema) -> list[Action]:
        """Write the change data files of a commit; return their actions. The list is empty if it needs none.

        found: the rows that leave the table. new: the rows that come. upserts: for each of them, the number of its
        source row.
        """
        if not found.files.size or self.files.configuration.get(CHANGE_DATA_FEED) != "true":
            return []
        wanted = found.wanted[np.argsort(found.files, kind="stable")]
        rows = changed_rows(
            self._old_values(found, columns),
            np.isin(wanted, upserts),
            with_all_columns(new, columns),
            np.isin(upserts, wanted),
        )
        return write_change_data(self._storage, rows, self.files.partition_columns)

    def _remove(self, found: FoundRows, rewriter: FileRewriter | None) -> RemovedRows:
        """Write what a commit needs in order to remove the found rows: deletion vectors, or new files.

        rewriter: writes the data files of the rows again; None: the rows get deletion vectors.
        """
        path_of = self._paths
        kept = list[LiveFile]()
        paths = list[str]()
        actions = list[Action]()
        for number in np.unique(found.files).tolist():
            gone = found.rows[found.files == number].astype(np.uint32)
            file = self.files.by_path[path_of[number]]
            deleted = file.deleted | BitMap(gone)
            actions.append(file.remove())
            if len(deleted) == self._rows_in(file):
                paths.append(file.add["path"])
            else:
                kept.append(replace(file, deleted=deleted))
        if rewriter is None:
            return RemovedRows(actions, paths, self._with_vectors(kept), 0)
        copies = rewriter.write(kept)
        paths += [file.add["path"] for file in kept]
        return RemovedRows(actions, paths, copies, sum(file.add["size"] for file in copies))

    def _with_vectors(self, files: Sequence[LiveFile]) -> list[LiveFile]:
        """Write deletion vectors with the deleted rows of data files; return the files with them."""
        if not files:
            return []
        path, content, vectors = encode([file.deleted for file in files])
        self._storage.write(path, content)
        return [file.without(file.deleted, vector) for file, vector in zip(files, vectors, strict=True)]

    def _rows_in(self, file: LiveFile) -> int:
        """Return the number of rows in a data file, including deleted ones."""
        if file.rows is None:
            with self._storage.open(file.path) as opened:
                file.stats["numRecords"] = pq.ParquetFile(opened).metadata.num_rows
        return int(file.stats["numRecords"])
