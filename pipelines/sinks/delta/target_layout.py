"""Target layout: the partitions and properties that the rule of a table fixes when its target is created.

A value of a partition column becomes the name of a directory. Both writers therefore refuse a text that Delta would
read back as another value, or that no directory name can contain.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import date
from typing import TYPE_CHECKING, Final, Self

import pyarrow as pa
import pyarrow.compute as pc

from cdc.config.sinks import HistoryMode
from cdc.errors import TargetRulesChanged, TransformFailed, ValueNotRepresentable
from cdc.stores.current_rows import MODE
from cdc.stores.target_rules import TRANSFORM
from cdc.target_names import (
    COMMITTED_COLUMN,
    DELETED_COLUMN,
    END_COLUMN,
    FROM_COLUMN,
    GENERATION_COLUMN,
    OP_COLUMN,
    START_COLUMN,
    TO_COLUMN,
)

if TYPE_CHECKING:
    from pyspark.sql import Column

SHARED: Final = "cdc.merged"
"""Property of a target: `true` if several tables share it; each row then has its relation in `_relation`."""
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
"""The columns that a history mode adds after `_position` and `_ordinal`."""

_UNREADABLE: Final = {
    "": "an empty text, but Delta reads an empty partition value as NULL",
    "__HIVE_DEFAULT_PARTITION__": "the text that Delta writers use for a partition value of NULL",
}
"""Text → why Delta reads it back as another value."""
_TOO_LONG: Final = "a text that is too long for a directory name, but each partition value has its own directory"
_NAME_BYTES: Final = 255
"""Bytes of `column=text` in a path: NAME_MAX of the file systems of Linux and macOS; object stores allow more."""
_ESCAPED: Final = r"[^A-Za-z0-9._~-]"
"""Bytes that delta-rs writes as three, as in RFC 3986; Spark escapes fewer."""


@dataclass(frozen=True, slots=True)
class TargetLayout:
    """What is fixed when a target is created, and the order of rows in its files, which may change."""

    partition_by: tuple[str, ...] = ()
    """Delta names of columns."""
    properties: Mapping[str, str] = field(default_factory=dict)
    transform: str = ""
    """Fingerprint of the transform that makes the rows."""
    history_mode: HistoryMode = HistoryMode.LATEST
    cluster_by: tuple[str, ...] = ()
    """Delta names of columns; no property of the target, because maintenance follows the current rule."""
    is_shared: bool = False
    """Whether several tables share the target."""

    @classmethod
    def of(cls, configuration: Mapping[str, str | None], partitions: Sequence[str], other: Collection[str]) -> Self:
        """The layout of a table with that configuration; other: properties that are no part of a layout."""
        known = {name: value for name, value in configuration.items() if value is not None}
        properties = {name: value for name, value in known.items() if name.startswith("delta.") and name not in other}
        mode = HistoryMode(known.get(MODE) or HistoryMode.LATEST.value)
        shared = known.get(SHARED) == "true"
        return cls(tuple(partitions), properties, known.get(TRANSFORM, ""), mode, is_shared=shared)

    @property
    def configuration(self) -> dict[str, str]:
        """The layout as properties of the table."""
        mode = {} if self.history_mode is HistoryMode.LATEST else {MODE: self.history_mode.value}
        shared = {SHARED: "true"} if self.is_shared else {}
        return {**self.properties, **({TRANSFORM: self.transform} if self.transform else {}), **mode, **shared}

    def check(self, uri: str, configuration: Mapping[str, str | None], partitions: Sequence[str]) -> None:
        """Raise TransformFailed for a target with another layout, TargetRulesChanged for rows of other rules."""
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
                    remedy=f"{rebuild}; or set it with ALTER TABLE … SET TBLPROPERTIES",
                )


def is_partition_type(kind: pa.DataType) -> bool:
    """Whether a column of that type can partition files; for other types Delta's text has more than one spelling."""
    return pa.types.is_string(kind) or pa.types.is_integer(kind) or pa.types.is_date(kind) or pa.types.is_boolean(kind)


def has_bounds(kind: pa.DataType) -> bool:
    """Whether files have the least and greatest value of a column of that type; see target.described_columns."""
    return not (pa.types.is_floating(kind) or pa.types.is_nested(kind) or pa.types.is_binary(kind))


def partition_text(value: str | int | date | bool | None) -> str | None:  # noqa: FBT001 - a value of a column
    """A value of a partition column as Delta's log spells it (protocol, section Partition Value Serialization)."""
    if value is None:
        return None
    return str(value).lower() if isinstance(value, bool) else str(value)


def check_partition_values(rows: pa.Table, columns: tuple[str, ...], topic: str) -> None:
    """Raise ValueNotRepresentable for a text in one of these partition columns that cannot name a directory."""
    for name in columns:
        if reason := _refusal(rows[name], _text_bytes(name)):
            raise ValueNotRepresentable(
                f"table {topic!r}: partition column {name!r} contains {reason}",
                remedy="remove the column from partition_by and rebuild the table, or partition by a computed column",
            )


def checked_partition_column(name: str) -> Column:
    """The column of that name in Spark; a row with a text that cannot name a directory fails the frame."""
    from pyspark.sql import functions as F

    column = checked = F.col(backticked(name))
    unescaped = F.octet_length(F.regexp_replace(column, _ESCAPED, ""))
    refusals = [(F.octet_length(column) * 3 - unescaped * 2 > _text_bytes(name), _TOO_LONG)]
    refusals += [(column == text, reason) for text, reason in _UNREADABLE.items()]
    for condition, reason in refusals:
        refusal = F.raise_error(F.lit(f"{ValueNotRepresentable.__name__}: partition column {name!r} contains {reason}"))
        checked = F.when(condition, refusal).otherwise(checked)
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
    """An identifier for DataFusion (delta-rs)."""
    return '"' + name.replace('"', '""') + '"'


def backticked(name: str) -> str:
    """An identifier for Spark SQL."""
    return "`" + name.replace("`", "``") + "`"


PLAIN: Final = TargetLayout()
"""The layout of a table without a rule."""
