"""Target layout: the partition columns and table properties that a rule sets when a Delta target is created.

A value of a partition column becomes the name of a directory. So a merge fails for a text that Delta would read back as
another value, and for a text that is too long for a directory name.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import date
from typing import TYPE_CHECKING, Final, Self

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from cdc.config.delta_sink import HistoryMode
from cdc.errors import TargetRulesChanged, TransformFailed, ValueNotRepresentable
from cdc.table import TableSchema
from cdc.target_names import (
    COMMITTED_COLUMN,
    DELETED_COLUMN,
    END_COLUMN,
    FROM_COLUMN,
    GENERATION_COLUMN,
    OP_COLUMN,
    ORDINAL_COLUMN,
    POSITION_COLUMN,
    START_COLUMN,
    TO_COLUMN,
)
from cdc.targets.current_rows import MODE
from cdc.targets.target_rule_changes import TRANSFORM

if TYPE_CHECKING:
    from pyspark.sql import Column

DELETION_VECTORS: Final = "delta.enableDeletionVectors"
"""Property of a Delta table: `true` if its writers may mark rows as deleted instead of rewriting their files."""
STATISTICS: Final = "delta.dataSkippingStatsColumns"
"""Property of a Delta table: the names of the columns for which `_delta_log` has file statistics."""
MAX_STATISTICS: Final = 32
"""Maximum number of columns with file statistics in a target; the default of Delta (`dataSkippingNumIndexedCols`)."""
SHARED: Final = "cdc.merged"
"""Property of a target: `true` if several tables share it; each row then has its relation in `_relation`."""
_PLAIN_NAME: Final = re.compile(r"[A-Za-z][A-Za-z0-9_]*\Z")
_TIME: Final = pa.timestamp("us", tz="UTC")

MODE_COLUMNS: Final[Mapping[HistoryMode, pa.Schema]] = {
    HistoryMode.LATEST: pa.schema([]),
    HistoryMode.VERSIONS: pa.schema(
        [(START_COLUMN, pa.int64()), (END_COLUMN, pa.int64()), (FROM_COLUMN, _TIME), (TO_COLUMN, _TIME)]
    ),
    HistoryMode.CHANGES: pa.schema(
        [(OP_COLUMN, pa.string()), (COMMITTED_COLUMN, _TIME), (GENERATION_COLUMN, pa.int64())]
    ),
    HistoryMode.MARKED: pa.schema([(DELETED_COLUMN, pa.bool_()), (COMMITTED_COLUMN, _TIME)]),
}
"""History mode → the columns that a target in this mode has after `_position` and `_ordinal`."""

_UNREADABLE: Final = {
    "": "an empty text, but Delta reads an empty partition value as NULL",
    "__HIVE_DEFAULT_PARTITION__": "the text that Delta writers use for a partition value of NULL",
}
"""Text that cannot be a partition value → the reason, as part of an error message."""
_TOO_LONG: Final = "a text that is too long for a directory name, but each partition value has its own directory"
_NAME_BYTES: Final = 255
"""Maximum bytes of a directory name `column=text`: NAME_MAX of the file systems of Linux and macOS."""
_ESCAPED: Final = r"[^A-Za-z0-9._~-]"
"""Pattern of the characters that delta-rs percent-encodes in a directory name: each byte becomes `%` and two digits."""


@dataclass(frozen=True, slots=True)
class TargetLayout:
    """The settings with which a target is created, and `cluster_by`, which may change later."""

    partition_by: tuple[str, ...] = ()
    """Delta names of the partition columns."""
    properties: Mapping[str, str] = field(default_factory=dict)
    transform: str = ""
    """Fingerprint of the transform that makes the rows."""
    history_mode: HistoryMode = HistoryMode.LATEST
    cluster_by: tuple[str, ...] = ()
    """Delta names of the columns by which maintenance sorts the rows in files; not a property of the target."""
    is_shared: bool = False
    """Whether several tables share the target."""
    has_vectors: bool = False
    """Whether the target is created with deletion vectors; a property in `properties` overrides it."""

    @classmethod
    def of(cls, configuration: Mapping[str, str | None], partitions: Sequence[str], other: Collection[str]) -> Self:
        """Return the layout of an existing Delta table, from its properties and its partition columns.

        other: names of `delta.` properties that do not belong to a layout.
        """
        known = {name: value for name, value in configuration.items() if value is not None}
        properties = {name: value for name, value in known.items() if name.startswith("delta.") and name not in other}
        mode = HistoryMode(known.get(MODE) or HistoryMode.LATEST.value)
        shared = known.get(SHARED) == "true"
        return cls(tuple(partitions), properties, known.get(TRANSFORM, ""), mode, is_shared=shared)

    @property
    def has_latest_rows_of_one_table(self) -> bool:
        """Whether the target belongs to a single table and keeps the latest state of its rows."""
        return not self.is_shared and self.history_mode is HistoryMode.LATEST

    @property
    def configuration(self) -> dict[str, str]:
        """The Delta table properties that this layout sets, by name."""
        mode = {} if self.history_mode is HistoryMode.LATEST else {MODE: self.history_mode.value}
        shared = {SHARED: "true"} if self.is_shared else {}
        vectors = {DELETION_VECTORS: "true"} if self.has_vectors else {}
        return {
            **vectors,
            **self.properties,
            **({TRANSFORM: self.transform} if self.transform else {}),
            **mode,
            **shared,
        }

    def check(self, uri: str, configuration: Mapping[str, str | None], partitions: Sequence[str]) -> None:
        """Raise an error if an existing target, with this configuration and these partitions, has another layout.

        Raises TargetRulesChanged if its rows were written in another history mode or with another transform, and
        TransformFailed for any other difference.
        """
        if (mode := configuration.get(MODE) or HistoryMode.LATEST.value) != self.history_mode.value:
            raise TargetRulesChanged(
                f"target {uri!r} was created with mode {mode!r}, but its rule has mode {self.history_mode.value!r}"
            )
        if self.is_shared and configuration.get(SHARED) != "true":
            raise TransformFailed(
                f"target {uri!r} contains a single table, but the rule has merge_tables",
                remedy="set an unused path in the rule, then run 'cdc replay SINK' to merge the tables",
            )
        rebuild = "rebuild the table: 'cdc replay SINK --tables TABLE'; or restore the earlier rule in the definition"
        if (configuration.get(TRANSFORM) or "") != self.transform:
            raise TargetRulesChanged(
                f"the rows of target {uri!r} were written with another transform than its rule has now"
            )
        if self.partition_by and tuple(partitions) != self.partition_by:
            difference = f"target {uri!r} is partitioned by {list(partitions)!r}: expected {list(self.partition_by)!r}"
            remedy = (
                "set another path in the rule and run 'cdc replay SINK'"
                if self.is_shared
                else "rebuild the table with 'cdc replay SINK --tables TABLE --into PATH'"
            )
            raise TransformFailed(difference, remedy=f"{remedy}, or restore the earlier rule")
        for name, wanted in self.properties.items():
            if configuration.get(name) != wanted:
                raise TransformFailed(
                    f"target {uri!r} was created with another value of table property {name!r} than its rule has now",
                    remedy=f"{rebuild}; or set the property with ALTER TABLE … SET TBLPROPERTIES",
                )


def is_partition_type(kind: pa.DataType) -> bool:
    """Return whether a column of this type can be a partition column.

    Delta must write each value of the type as exactly one text.
    """
    return pa.types.is_string(kind) or pa.types.is_integer(kind) or pa.types.is_date(kind) or pa.types.is_boolean(kind)


def has_bounds(kind: pa.DataType) -> bool:
    """Return whether Delta file statistics contain the least and greatest value of a column of this type."""
    return not (pa.types.is_floating(kind) or pa.types.is_nested(kind) or pa.types.is_binary(kind))


def partition_text(value: str | int | date | bool | None) -> str | None:  # noqa: FBT001 - a value of a column
    """Return a value of a partition column as the `_delta_log` contains it: as text, or None for NULL."""
    if value is None:
        return None
    return str(value).lower() if isinstance(value, bool) else str(value)


def rows_by_partition(rows: pa.Table, columns: Sequence[str]) -> list[tuple[dict[str, str | None], np.ndarray | None]]:
    """Group rows by partition: return (partition values, numbers of its rows) for each partition.

    columns: the partition columns. Without any, the result is one group with None, which means all rows.
    """
    if not columns:
        return [({}, None)]
    distinct = rows.select(list(columns)).append_column("_number", pa.array(np.arange(rows.num_rows)))
    groups = distinct.group_by(list(columns), use_threads=False).aggregate([("_number", "list")]).to_pylist()
    return [
        ({name: partition_text(group[name]) for name in columns}, np.array(group["_number_list"], np.int64))
        for group in groups
    ]


def check_partition_values(rows: pa.Table, columns: tuple[str, ...], topic: str) -> None:
    """Raise ValueNotRepresentable if one of these partition columns contains a text that cannot name a directory."""
    for name in columns:
        if reason := _refusal(rows[name], _text_bytes(name)):
            raise ValueNotRepresentable(
                f"table {topic!r}: partition column {name!r} contains {reason}",
                remedy="remove the column from partition_by and rebuild the table, or partition by a computed column",
            )


def checked_partition_column(name: str, operation: str) -> Column:
    """Return a Spark column that raises an error for a row whose text in this column cannot name a directory.

    operation: name of the column with the operation. A delete writes no row, so its text is not checked.
    """
    from pyspark.sql import functions as F

    column = checked = F.col(backticked(name))
    unescaped = F.octet_length(F.regexp_replace(column, _ESCAPED, ""))
    refusals = [(F.octet_length(column) * 3 - unescaped * 2 > _text_bytes(name), _TOO_LONG)]
    refusals += [(column == text, reason) for text, reason in _UNREADABLE.items()]
    for condition, reason in refusals:
        refusal = F.raise_error(F.lit(f"{ValueNotRepresentable.__name__}: partition column {name!r} contains {reason}"))
        checked = F.when(condition & (F.col(operation) != "d"), refusal).otherwise(checked)
    return checked


def _refusal(texts: pa.ChunkedArray, limit: int) -> str | None:
    distinct = pc.unique(texts).cast(pa.large_string()).drop_null()
    for text, reason in _UNREADABLE.items():
        if pc.any(pc.equal(distinct, text)).as_py():
            return reason
    unescaped = pc.binary_length(pc.replace_substring_regex(distinct, _ESCAPED, ""))
    written = pc.subtract(pc.multiply(pc.binary_length(distinct), 3), pc.multiply(unescaped, 2))
    return _TOO_LONG if pc.any(pc.greater(written, limit)).as_py() else None


def _text_bytes(name: str) -> int:
    return _NAME_BYTES - 1 - len(name.encode()) * 3


def double_quoted(name: str) -> str:
    """Quote a column name as an identifier in SQL of delta-rs."""
    return '"' + name.replace('"', '""') + '"'


def backticked(name: str) -> str:
    """Quote a column name as an identifier in Spark SQL."""
    return "`" + name.replace("`", "``") + "`"


PLAIN: Final = TargetLayout()
"""The layout of a target whose source table has no rule."""


@dataclass(frozen=True, slots=True)
class NewTarget:
    """A target that does not exist yet."""

    schema: TableSchema
    """The source table, whose key columns get file statistics first."""
    columns: pa.Schema
    """All columns of the target."""
    layout: TargetLayout = PLAIN
    generation: int | None = None
    """Position at which the full copy began that ends in the first batch of the target; None: no copy ends in it. A
    shared target does not record it.
    """


def described_columns(columns: pa.Schema, first: Sequence[str]) -> list[str]:
    """Return the names of the columns that get file statistics: position and ordinal, the columns in `first`, then the
    others.

    Nested columns are left out because they have no bounds. Float columns are left out because delta-rs ignores NaN in
    statistics, so Spark's `> 100` would skip files with NaN. Decimals are left out because delta-rs writes and reads
    their bounds as doubles, so a query would skip files that have the rows. Names that need quoting are left out
    because delta-rs and Spark parse them differently in `delta.dataSkippingStatsColumns`. At most MAX_STATISTICS names
    are returned.
    """
    # without bounds of these columns, a merge into a target with versions would open the files of all old versions
    spans = [name for name in (START_COLUMN, END_COLUMN) if name in columns.names]
    ordered = dict.fromkeys([POSITION_COLUMN, ORDINAL_COLUMN, *first, *spans, *columns.names])
    described = [
        name
        for name in ordered
        if name in (POSITION_COLUMN, ORDINAL_COLUMN, *spans)
        or (name in columns.names and _PLAIN_NAME.match(name) and not _has_no_bounds(columns.field(name).type))
    ]
    return described[:MAX_STATISTICS]


def _has_no_bounds(kind: pa.DataType) -> bool:
    return pa.types.is_floating(kind) or pa.types.is_decimal(kind) or pa.types.is_nested(kind)
