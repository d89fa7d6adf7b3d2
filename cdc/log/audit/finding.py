"""Findings of a log audit: kind of damage, file, positions, tables and remedy."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final

from cdc.log.parquet_check import tables_suffix
from cdc.position import Position


class DamageKind(StrEnum):
    """Kind of damage that an audit of the log reports."""

    #: A file that a table lists does not exist.
    MISSING = "missing"
    #: The size of a file differs from the size in its commit.
    SIZE = "size"
    #: A footer or page cannot be read, or its checksum is wrong.
    UNREADABLE = "unreadable"
    #: The rows of a file contradict its commit.
    CONTENTS = "contents"
    #: Rows of a file are not sorted.
    ORDER = "order"
    #: Two rows have the same position and ordinal.
    DUPLICATE = "duplicate"
    #: Rows of a transaction are missing.
    HOLE = "hole"
    #: Rows have positions outside the range of their commit, after the end of the log, or after the horizon.
    RANGE = "range"
    #: A row comes before the first schema row of its table, or has a column that no schema row has.
    VERSION = "version"
    #: A commit or a checkpoint of a table is missing or cannot be read.
    COMMIT = "commit"
    #: The two tables, or other files of the log, contradict each other.
    MISFIT = "misfit"
    #: The log was written from another database.
    SOURCE = "source"
    #: An orphan file: no table version or record names it.
    FOREIGN = "foreign"
    #: Rows were dropped with a damaged file; the log records which tables had rows in it.
    LOST = "lost"
    #: Files have no page checksums, so a flipped byte may go undetected.
    UNCHECKED = "unchecked"


HARMLESS: Final = frozenset({DamageKind.FOREIGN, DamageKind.LOST, DamageKind.UNCHECKED})
"""Kinds of damage that do not affect the results of reads."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditFinding:
    """One finding of an audit: what is wrong, in which file, positions and tables, and the remedy."""

    damage: DamageKind
    message: str
    """One line that says what is wrong, without the name of the file."""
    file: str = ""
    """Path of the file relative to the log's root; "" if the finding concerns several files."""
    first: Position | None = None
    """First affected position; None if the finding concerns no positions."""
    last: Position | None = None
    tables: tuple[str, ...] = ()
    """Affected topics, sorted. A relation without a schema row appears as `relation N`."""
    remedy: str | None = None
    """What an operator should do next."""

    @property
    def is_harmless(self) -> bool:
        """True if the damage does not affect the results of reads."""
        return self.damage in HARMLESS

    @property
    def line(self) -> str:
        """The finding as one line: file, message, positions and tables."""
        place = "" if self.first is None else f"; positions {self.first!s} to {self.last!s}"
        return f"{f'{self.file}: ' if self.file else ''}{self.message}{place}{tables_suffix(self.tables)}"

    def to_json(self) -> dict[str, Any]:
        """Return the fields that commands and the API print."""
        return {
            "damage": self.damage.value,
            "harmless": self.is_harmless,
            "file": self.file or None,
            "message": self.message,
            "first": None if self.first is None else str(self.first),
            "last": None if self.last is None else str(self.last),
            "tables": list(self.tables),
            "remedy": self.remedy,
        }
