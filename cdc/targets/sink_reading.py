"""Contract of a kind of sink for readers: how its targets are read and checked without Spark.

A kind of sink implements `SinkReading` in a module of its own, and `cdc.targets.sink_kinds` names this module. The
methods get the definition of the sink at each call, because a process reads several sinks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol, TypeVar

import pyarrow as pa

from cdc.config.sink_definition import SinkDefinition
from cdc.errors import CdcError
from cdc.targets.dead_letter_rows import ParkedRow
from cdc.targets.published_record import Published, TableRecord

if TYPE_CHECKING:
    from cdc.postgres.key_range_digests import KeyRange


class ReadableTable(Protocol):
    """The current rows of one table in a target, at one version. Columns have the names that the rules give them."""

    @property
    def reads_ranges(self) -> bool:
        """Whether a range of keys can be read without reading all rows."""

    @property
    def refusal(self) -> str | None:
        """Why the rows of the table cannot be read; None if they can."""

    def kind(self, name: str) -> pa.DataType | None:
        """Return the type that a column has in the rows; None if the target does not have the column."""

    def rows(self, names: Sequence[str], within: KeyRange | None = None) -> Iterator[pa.RecordBatch]:
        """Yield the named columns of the rows, in this order; within: a range of keys, None for all rows."""

    def count(self, names: Sequence[str], within: KeyRange | None = None) -> int:
        """Return the number of rows in a range of keys, or of all rows.

        names: may be empty; otherwise the first name must be a column of the target.
        """


class PublishedTargets(Protocol):
    """What a sink has published last, opened so that later batches of the sink do not change what is read."""

    @property
    def record(self) -> Published | None:
        """The published record; None if the sink has published nothing."""

    @property
    def has_newer_versions(self) -> bool:
        """Whether a target can have versions that are newer than the published one."""

    def table(self, record: TableRecord, key: Sequence[str], *, newest: bool) -> ReadableTable:
        """Open a table of the record. key: names of the key columns.

        newest: open the newest version of the target, not the published one, if it can have such versions.
        """


class ParkedState(NamedTuple):
    """The published record of a sink, and its parked rows at this record."""

    record: Published | None
    """None if the sink has published nothing; there are no parked rows then."""
    rows: Sequence[ParkedRow]


@dataclass(frozen=True, slots=True)
class RuleFinding:
    """A target that does not follow the rules of the definition, or that cannot be read to find out."""

    subject: str
    """What the finding is about: the topic of a table, or `sink NAME`."""
    topic: str | None
    """Topic of the table, for the remedy; None if the finding is about the sink as a whole."""
    error: CdcError
    message: str
    """The message of the error, and what it is about if the subject does not say so."""
    stops: bool
    """Whether the sink cannot continue: a person has to act."""


Definition_contra = TypeVar("Definition_contra", bound=SinkDefinition, contravariant=True)


class SinkReading(Protocol[Definition_contra]):
    """How the targets of one kind of sink are read."""

    def is_begun(self, sink: Definition_contra) -> bool:
        """Return True if the sink has published something, and also if that cannot be found out."""

    def published(self, sink: Definition_contra) -> Published | None:
        """Return the published record of a sink; None if it has published nothing.

        Raises SinkError if the target cannot be read.
        """

    def parked(self, sink: Definition_contra) -> ParkedState:
        """Return the parked rows of a sink. Raises SinkError if the target cannot be read."""

    def check_rules(self, sink: Definition_contra, relation: int) -> None:
        """Raise TargetRulesChanged if rows of a table were written under other rules than the definition has.

        Such rows may contain values that the rules hide now.
        """

    def rule_findings(self, sink: Definition_contra) -> Iterator[RuleFinding]:
        """Yield a finding for each target whose rows were written under other rules than the definition has."""

    def published_state(self, sink: Definition_contra) -> PublishedTargets:
        """Open what the sink has published last. Raises SinkUnavailable if the sink has not written anything yet."""

    def table_at_cut(
        self, sink: Definition_contra, handle: str, record: TableRecord, key: Sequence[str]
    ) -> ReadableTable:
        """Open a table at a kept cut; handle: what the sink returned when it kept the cut; key: the key columns."""


class UnreadableTable:
    """A table whose target cannot be opened; it has no columns and no rows."""

    def __init__(self, refusal: str) -> None:
        self.refusal: str | None = refusal
        """Why the target cannot be opened."""

    @property
    def reads_ranges(self) -> bool:
        """See ReadableTable.reads_ranges."""
        return False

    def kind(self, name: str) -> pa.DataType | None:  # noqa: ARG002 - the columns are unknown
        """See ReadableTable.kind."""
        return None

    def rows(self, names: Sequence[str], within: KeyRange | None = None) -> Iterator[pa.RecordBatch]:  # noqa: ARG002 - as above
        """See ReadableTable.rows."""
        return iter(())

    def count(self, names: Sequence[str], within: KeyRange | None = None) -> int:  # noqa: ARG002 - as above
        """See ReadableTable.count."""
        return 0


def refusal_reason(exc: CdcError) -> str:
    """Return the reason that a verdict shows for a table whose target cannot be read."""
    return f"{exc.code} {exc.message} → {exc.fix}"
