"""A target that is followed from version to version: the rows that changed between two of them.

They are read from the files that were added or removed, and by the rows that deletion vectors deleted. So a step costs
what it changed, however large the target is.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from cdc.delta_protocol.deletion_vectors import DamagedVector, rows_of
from cdc.delta_protocol.table_storage import storage_of
from cdc.target_names import RELATION_COLUMN
from pipelines.sinks.delta.indexed.delta_log import LiveFile, LiveFiles, LogNotReadable
from pipelines.sinks.delta.merge_source import comparable
from pipelines.sinks.delta.table_version import RowsNotReadable, TableVersion

MOST_ROWS: Final = 200_000
"""Maximum rows of the files that are read: rewritten files have many more rows than changed."""

_Rows = tuple[LiveFile, np.ndarray]
"""A data file, and the numbers of some of its rows."""


class FollowedTarget:
    """The live files of one target at the last version that was read; one thread uses it."""

    def __init__(self, uri: str) -> None:
        self._storage = storage_of(uri)
        self._files: LiveFiles | None = None

    def changed_rows(
        self, before: int, after: TableVersion, column: str, values: pa.ChunkedArray
    ) -> tuple[pa.Table, pa.Table]:
        """Return the rows that version `before` has and `after` does not, and the other way round.

        Only rows whose value in `column` is one of `values`. A row that was written again without a change may be in
        both. Raises RowsNotReadable if the rows cannot be found in this way, or if they are too many for it.
        """
        try:
            files = self._at(before)
            columns, earlier = _columns_of(files), dict(files.by_path)
            files.advance(after.version)
            if files.version != after.version or _columns_of(files) != columns:
                raise RowsNotReadable("the target has other columns, or a commit of it is missing")
            later = files.by_path
            return (
                self._read(_only_in(earlier, later, after.relation), after, column, values),
                self._read(_only_in(later, earlier, after.relation), after, column, values),
            )
        except (LogNotReadable, DamagedVector, pa.ArrowException, OSError) as exc:
            self._files = None
            raise RowsNotReadable(str(exc)) from exc

    def _at(self, version: int) -> LiveFiles:
        if self._files is not None and self._files.version < version:
            self._files.advance(version)
        if self._files is None or self._files.version != version:  # commits in between may have been removed
            self._files = LiveFiles.read(self._storage, version)
        return self._files

    def _read(self, some: Iterator[_Rows], after: TableVersion, column: str, values: pa.ChunkedArray) -> pa.Table:
        assert self._files is not None  # noqa: S101 - its files were read
        columns, found, count = after.columns, [after.columns.empty_table()], 0
        wanted = comparable(values.drop_null().cast(columns.field(column).type))
        for file, numbers in some:
            count += len(numbers)
            if count > MOST_ROWS:
                raise RowsNotReadable("files with many rows were rewritten")
            rows = self._files.read_rows(file, columns.names, numbers).cast(columns)
            found.append(rows.filter(pc.is_in(comparable(rows[column]), wanted)))
        return pa.concat_tables(found)


def _columns_of(files: LiveFiles) -> tuple[object, object]:
    return files.metadata.get("schemaString"), files.metadata.get("partitionColumns")


def _only_in(one: Mapping[str, LiveFile], other: Mapping[str, LiveFile], relation: int | None) -> Iterator[_Rows]:
    """Yield the rows that are live in one version and not in another. relation: in a shared target, of which table."""
    for path, file in one.items():
        if relation is not None and (file.add.get("partitionValues") or {}).get(RELATION_COLUMN) != str(relation):
            continue
        same = other.get(path)
        if same is not None:
            if same.deleted != file.deleted and len(found := rows_of(same.deleted - file.deleted)):
                yield file, found.astype(np.int64)
        elif file.rows is None:
            raise RowsNotReadable("a file has no statistics")
        else:
            live = np.arange(file.rows)
            yield file, np.delete(live, rows_of(file.deleted)) if file.deleted else live
