"""Finding: one thing that is wrong with a log, where it lies, and what to do about it; pure."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final

from cdc.log.parquet_check import tables_suffix
from cdc.position import Position


class DamageKind(StrEnum):
    """What is wrong."""

    #: A file that a table names is not there.
    MISSING = "missing"
    #: A file is not as long as its commit says.
    SIZE = "size"
    #: A footer or a page cannot be read, or does not have the checksum that was written with it.
    UNREADABLE = "unreadable"
    #: The rows of a file are not those that its commit speaks of.
    CONTENTS = "contents"
    #: Rows of a file are not sorted.
    ORDER = "order"
    #: Two rows have one place.
    DUPLICATE = "duplicate"
    #: A transaction lacks rows.
    HOLE = "hole"
    #: Rows lie outside of what their commit, the log's end or the horizon allow.
    RANGE = "range"
    #: Nothing before a row tells the columns of its table.
    VERSION = "version"
    #: A commit or a checkpoint of a table is missing or cannot be read.
    COMMIT = "commit"
    #: The two tables, or what lies beside them, contradict each other.
    MISFIT = "misfit"
    #: The log was written from another database.
    SOURCE = "source"
    #: A file belongs to nothing.
    FOREIGN = "foreign"
    #: Rows were given up with a damaged file, and the log says of which tables.
    LOST = "lost"
    #: Files have no page checksums, so a flipped byte in them may go unseen.
    UNCHECKED = "unchecked"


HARMLESS: Final = frozenset({DamageKind.FOREIGN, DamageKind.LOST, DamageKind.UNCHECKED})
"""What is worth knowing and makes no read wrong."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditFinding:
    """One thing that is wrong."""

    damage: DamageKind
    message: str
    """One line, without the file."""
    file: str = ""
    """Relative to the log's root; empty if it is about more than one."""
    first: Position | None = None
    """The positions that are concerned, both ends included; None if it is about none."""
    last: Position | None = None
    tables: tuple[str, ...] = ()
    """Topics that are concerned, sorted; a relation that no schema row names by its number."""
    remedy: str | None = None
    """What to do next."""

    @property
    def is_harmless(self) -> bool:
        """Whether every read is right all the same."""
        return self.damage in HARMLESS

    @property
    def line(self) -> str:
        """For people: file, what is wrong, positions and tables."""
        place = "" if self.first is None else f"; positions {self.first!s} to {self.last!s}"
        return f"{f'{self.file}: ' if self.file else ''}{self.message}{place}{tables_suffix(self.tables)}"

    def to_json(self) -> dict[str, Any]:
        """As commands and the API print it."""
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
