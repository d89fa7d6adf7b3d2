"""Unpublished parked rows: the parked rows of a sink that stores them together with its published record."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from cdc.targets.dead_letter_rows import DeadLetterEntry, Key, ParkedRow


class UnpublishedParkedRows:
    """Implements pipelines.sinks.contract.ParkedRows: changes stay in memory until the sink's `publish` stores them."""

    def __init__(self) -> None:
        self._stored: dict[int, Mapping[Key, ParkedRow]] = {}
        """Relation → its parked rows as they are stored."""
        self._parked: dict[int, Mapping[Key, ParkedRow]] = {}

    def load(self, stored: Mapping[int, Mapping[Key, ParkedRow]]) -> None:
        """Set the parked rows to those that are stored; drop unpublished changes. stored: by relation and key."""
        self._stored, self._parked = dict(stored), dict(stored)

    def rows_of(self, relation: int) -> Mapping[Key, ParkedRow]:
        """See ParkedRows.rows_of."""
        return self._parked.get(relation, {})

    def stored_rows_of(self, relation: int) -> Mapping[Key, ParkedRow]:
        """Return the parked rows of a table as they are stored, by key."""
        return self._stored.get(relation, {})

    def write(self, relation: int, after: int, entries: Iterable[DeadLetterEntry]) -> None:
        """Do nothing, because `publish` stores the rows."""

    def confirm(self, relation: int, rows: Mapping[Key, ParkedRow]) -> None:
        """See ParkedRows.confirm."""
        self._parked[relation] = rows

    def changed(self) -> dict[int, Mapping[Key, ParkedRow]]:
        """Return the parked rows of the tables whose parked rows are not stored yet, by relation."""
        return {r: rows for r, rows in self._parked.items() if rows != self.stored_rows_of(r)}

    def committed(self, relations: Iterable[int]) -> None:
        """Record that the parked rows of these tables are stored."""
        self._stored |= {relation: self.rows_of(relation) for relation in relations}
