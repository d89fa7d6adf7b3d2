"""Table layout: the partitions and properties of a target that are fixed by its rule when it is created."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import date
from typing import Final, Self

import pyarrow as pa

from cdc.config.sinks import HistoryMode
from cdc.errors import TargetRulesChanged, TransformFailed
from cdc.stores.current_rows import MODE
from cdc.stores.target_rules import TRANSFORM

MERGED: Final = "cdc.merged"
"""Property of a target: `true` where many tables share it, each row of which says in `_relation` whose it is."""


@dataclass(frozen=True, slots=True)
class TableLayout:
    """What is fixed when a target is made, and by what its files are ordered, which may change."""

    partition_by: tuple[str, ...] = ()
    """Delta names of columns."""
    properties: Mapping[str, str] = field(default_factory=dict)
    transform: str = ""
    history_mode: HistoryMode = HistoryMode.LATEST
    """What it keeps of a row's past."""
    cluster_by: tuple[str, ...] = ()
    """Delta names of columns; no property of the target, for upkeep follows whatever the rule says now."""
    merged: bool = False
    """Whether many tables share it."""

    @classmethod
    def of(cls, configuration: Mapping[str, str | None], partitions: Sequence[str], ours: Collection[str]) -> Self:
        """Of a table with that configuration; ours: properties that are not of its layout."""
        said = {name: value for name, value in configuration.items() if value is not None}
        properties = {name: value for name, value in said.items() if name.startswith("delta.") and name not in ours}
        keeping = HistoryMode(said.get(MODE) or HistoryMode.LATEST.value)
        merged = said.get(MERGED) == "true"
        return cls(tuple(partitions), properties, said.get(TRANSFORM, ""), keeping, merged=merged)

    @property
    def configuration(self) -> dict[str, str]:
        """As properties of the table."""
        mode = {} if self.history_mode is HistoryMode.LATEST else {MODE: self.history_mode.value}
        merged = {MERGED: "true"} if self.merged else {}
        return {**self.properties, **({TRANSFORM: self.transform} if self.transform else {}), **mode, **merged}

    def check(self, uri: str, configuration: Mapping[str, str | None], partitions: Sequence[str]) -> None:
        """Raise TransformFailed for a target laid out otherwise, TargetRulesChanged for rows that were made so."""
        if (held := configuration.get(MODE) or HistoryMode.LATEST.value) != self.history_mode.value:
            raise TargetRulesChanged(
                f"target {uri!r} was created with mode {held!r}: expected {self.history_mode.value!r}"
            )
        if self.merged and configuration.get(MERGED) != "true":
            raise TransformFailed(
                f"target {uri!r} contains a single table, but the rule has merge_tables",
                remedy="set an unused path in the rule and merge the tables with 'cdc replay SINK'",
            )
        anew = "rebuild the table: 'cdc replay SINK --tables TABLE'; or restore the earlier rule in the definition"
        if (configuration.get(TRANSFORM) or "") != self.transform:
            raise TargetRulesChanged(f"the rows of target {uri!r} were written with another transform")
        if self.partition_by and tuple(partitions) != self.partition_by:
            made = f"target {uri!r} is partitioned by {list(partitions)!r}: expected {list(self.partition_by)!r}"
            way = (
                "set another path in the rule and run 'cdc replay SINK'"
                if self.merged
                else "rebuild the table with 'cdc replay SINK --tables TABLE --into PATH'"
            )
            raise TransformFailed(made, remedy=f"{way}, or restore the earlier rule")
        for name, wanted in self.properties.items():
            if configuration.get(name) != wanted:
                raise TransformFailed(
                    f"target {uri!r} was created with another value of {name!r} than the rule has",
                    remedy=f"{anew}; or set it with ALTER TABLE … SET TBLPROPERTIES",
                )


def parts_files(kind: pa.DataType) -> bool:
    """Whether files can be parted by values of that type: of others Delta's text has more than one spelling."""
    return pa.types.is_string(kind) or pa.types.is_integer(kind) or pa.types.is_date(kind) or pa.types.is_boolean(kind)


def has_bounds(kind: pa.DataType) -> bool:
    """Whether files have the least and greatest value of a column of that type; see table.described_columns."""
    return not (pa.types.is_floating(kind) or pa.types.is_nested(kind) or pa.types.is_binary(kind))


def partition_text(value: str | int | date | bool | None) -> str | None:  # noqa: FBT001 - a value of a column
    """A value of a partition column as Delta's log spells it (protocol, section Partition Value Serialization)."""
    if value is None:
        return None
    return str(value).lower() if isinstance(value, bool) else str(value)


PLAIN: Final = TableLayout()
"""Of a table for which no rule says anything."""
