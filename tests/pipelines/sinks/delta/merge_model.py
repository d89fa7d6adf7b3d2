"""Model of a merge: what a Delta table contains after batches, and after changes by another client, as plain rows."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from cdc.target_names import ORDINAL_COLUMN, POSITION_COLUMN
from pipelines.sinks.delta.target_columns import OP

Plain = dict[str, Any]
"""A row of a target: column → value."""


def key_of(row: Mapping[str, Any], key: Sequence[str]) -> tuple[Any, ...]:
    """Return the key of a row; equal for keys that are equal in Delta."""
    return tuple(_normal(row[name]) for name in key)


def _normal(value: Any) -> Any:
    if isinstance(value, float):
        return "NaN" if value != value else value + 0.0  # noqa: PLR0124 - -0.0 equals 0.0 also as text
    return value


def applies(source: Mapping[str, Any], stored: Plain) -> bool:
    """Return whether a source row replaces or deletes a stored row with its key."""
    if stored[POSITION_COLUMN] is None:
        return True
    mine, there = ((row[POSITION_COLUMN], row[ORDINAL_COLUMN] or 0) for row in (source, stored))
    return mine > there or (mine == there and source[OP] == "u")


class ModelledRows:
    """The rows of a table; several rows may have one key, because another client may append anything."""

    def __init__(self, key: Sequence[str]) -> None:
        self.key, self.rows = tuple(key), list[Plain]()

    def has_duplicates(self) -> bool:
        """Return whether two rows have one key."""
        return len({repr(key_of(row, self.key)) for row in self.rows}) < len(self.rows)

    def merge(self, source: Iterable[Mapping[str, Any]]) -> None:
        """Merge source rows, of which no two have one key. A column that a source row does not have stays."""
        before, new = list(self.rows), list[Plain]()
        for row in source:
            found = [stored for stored in before if key_of(stored, self.key) == key_of(row, self.key)]
            older = [stored for stored in found if applies(row, stored)]
            self.rows = [stored for stored in self.rows if not any(stored is gone for gone in older)]
            if row[OP] == "u" and len(older) == len(found):
                kept = older[-1] if older else {}
                new.append(kept | {name: value for name, value in row.items() if name != OP})
        self.rows += new

    def delete(self, condition: Callable[[Plain], bool]) -> None:
        """Delete rows."""
        self.rows = [row for row in self.rows if not condition(row)]

    def update(self, condition: Callable[[Plain], bool], **values: Any) -> None:
        """Change rows."""
        self.rows = [row | values if condition(row) else row for row in self.rows]

    def sorted(self, columns: Sequence[str]) -> list[str]:
        """Return the rows as texts, in a fixed order."""
        return sorted(repr({name: row.get(name) for name in columns}) for row in self.rows)
