"""Current rows: reads from a Delta target, in any history mode, the rows that the source table should have now.

The property `cdc.mode` of a target names its history mode. Without the property, or with mode `scd1`, the target has
one row per key. `scd2` keeps every version of a row, `append` every change, and `soft_delete` keeps deleted rows with a
mark.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Final

import pyarrow as pa
from deltalake import DeltaTable, QueryBuilder
from deltalake.exceptions import DeltaError, TableNotFoundError

from cdc.errors import SinkUnavailable
from cdc.target_names import RELATION_COLUMN
from cdc.targets.read_only_guard import one_line
from cdc.targets.unsupported_table_features import NAMED

MODE: Final = "cdc.mode"
"""Property of a target that names its history mode."""
APPEND: Final = "append"
_PUT_BACK: Final = "restore the missing files from a backup, or rebuild the table: 'cdc replay SINK --tables TABLE'"
_CURRENT: Final = {"scd1": None, "scd2": '"__END_AT" IS NULL', "soft_delete": 'NOT "_deleted"'}
# the positions of control rows are read once, not for every row
_LATEST: Final = """
    WITH marks AS (
        SELECT coalesce(max(CASE WHEN "_op" = 't' THEN "_position" END), -1) AS emptied,
            coalesce(max(CASE WHEN "_op" = 'g' THEN "_generation" END), -1) AS generation FROM target
        WHERE "_op" IN ('t', 'g')
    ), last AS (
        SELECT emptied, generation, coalesce((
            SELECT max(o."_ordinal") FROM target o WHERE o."_op" = 't' AND o."_position" = emptied), -1) AS behind
        FROM marks
    ), ranked AS (
        SELECT *, row_number() OVER (PARTITION BY {key} ORDER BY "_position" DESC, "_ordinal" DESC) AS "_place"
        FROM target WHERE "_op" NOT IN ('t', 'g') AND {where}
    )
    SELECT {columns} FROM ranked CROSS JOIN last
    WHERE "_place" = 1 AND "_op" <> 'd' AND "_position" >= generation
        AND ("_position" > emptied OR "_position" = emptied AND "_ordinal" > behind)
"""


class CurrentRows:
    """Reads the current rows from one version of a Delta target; the source table should have the same rows."""

    def __init__(self, target: str, version: int | None, relation: int) -> None:
        """Open the target at a version; None means the newest version.

        If several tables share the target, only the rows of table `relation` are read. Raises SinkUnavailable if the
        table or version does not exist.
        """
        try:
            self._table = DeltaTable(target, version=version)
        except (TableNotFoundError, DeltaError, OSError) as exc:
            raise SinkUnavailable(
                f"target {target!r} has no readable table at version {version!r}", remedy=_PUT_BACK
            ) from exc
        self._target = target
        self.mode = self._table.metadata().configuration.get(MODE, "scd1")
        self.unread: str | None = None
        """The error with which delta-rs refuses to read rows of the target; None if it can read them."""
        self.kinds: dict[str, pa.DataType] = {}
        """Column → its Arrow type in the rows that `read` returns; text and bytes are view types."""
        try:
            schema = pa.RecordBatchReader.from_stream(self._table.scan()).schema
            self.kinds = dict(zip(schema.names, schema.types, strict=True))
        except DeltaError as exc:
            if (found := NAMED.search(str(exc))) is None:
                raise _unreadable(target, exc) from exc
            self.unread = found[0]
        self._mine = f"{RELATION_COLUMN} = {int(relation)}" if RELATION_COLUMN in self.kinds else None

    @property
    def known(self) -> bool:
        """Return True if this version of cdc knows the history mode of the target."""
        return self.mode in _CURRENT or self.mode == APPEND

    def read(self, columns: Sequence[str], key: Sequence[str], where: str | None = None) -> pa.RecordBatchReader:
        """Return a reader that streams the given columns of the current rows, unordered.

        `where` is an SQL condition over key columns, with quoted names. Raises SinkUnavailable if a file is missing or
        damaged. Reading from the returned reader can raise SinkUnavailable too.
        """
        with _named_errors(self._target):
            reader = self._reader(columns, key, where)

        def batches() -> Iterator[pa.RecordBatch]:
            with _named_errors(self._target):
                yield from reader

        return pa.RecordBatchReader.from_batches(reader.schema, batches())

    def _reader(self, columns: Sequence[str], key: Sequence[str], where: str | None) -> pa.RecordBatchReader:
        if self.mode != APPEND:
            predicate = " AND ".join(filter(None, (self._mine, _CURRENT[self.mode], where))) or None
            return pa.RecordBatchReader.from_stream(self._table.scan(columns=list(columns), predicate=predicate))
        query = _LATEST.format(
            key=", ".join(map(quote_identifier, key)),
            columns=", ".join(map(quote_identifier, columns)),
            where=where or "true",
        )
        builder = QueryBuilder().register("target", self._table)
        return pa.RecordBatchReader.from_stream(builder.execute(query))


@contextmanager
def _named_errors(target: str) -> Iterator[None]:
    try:
        yield
    except (DeltaError, pa.ArrowException, OSError) as exc:
        raise _unreadable(target, exc) from exc
    except BaseException as exc:
        if type(exc).__name__ != "PanicException":  # a panic of the engine's Rust code; its class cannot be imported
            raise
        raise _unreadable(target, exc) from exc


def _unreadable(target: str, exc: BaseException) -> SinkUnavailable:
    return SinkUnavailable(
        f"target {target!r} cannot be read: {one_line(str(exc))[:300]}",
        remedy=_PUT_BACK,
    )


def quote_identifier(name: str) -> str:
    """Quote a column name as an identifier in SQL of delta-rs."""
    return '"' + name.replace('"', '""') + '"'


def quote_literal(text: str) -> str:
    """Quote a text as a string literal in SQL of delta-rs."""
    return "'" + text.replace("'", "''") + "'"
