"""Reader settings: source, log and limits of one reader, taken from a definition."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from cdc.bucket_files import Root
from cdc.config import Definition
from cdc.config.source import OnFailover, Snapshot, SnapshotMode, Undecodable
from cdc.log.trim_plan import Retention
from cdc.log.writer import SegmentLimits
from cdc.postgres.publication import PublicationControl
from cdc.snapshot.publication_sync import publication_control


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceSettings:
    """Source database, slot, publication and tables of one reader."""

    pipeline: str
    dsn: str
    slot: str
    publication: str
    patterns: Sequence[str]
    exclude: Sequence[str]
    control: PublicationControl = field(default_factory=PublicationControl)
    """Whether the reader may create or alter the publication."""
    create_slot: bool = True
    """True if the initial snapshot may create the slot, and replace a slot that belongs to the log."""
    failover: bool = False
    """True if the slot is created as a failover slot, which Postgres 17 and later synchronizes to standbys."""
    on_failover: OnFailover = OnFailover.RESYNC
    """Policy for a promoted server that does not have the last transactions of the log."""
    undecodable: Undecodable = Undecodable.FAIL
    """Policy for text of the source that is not valid UTF-8."""
    snapshot: Snapshot = field(default_factory=Snapshot)
    """Snapshot mode, and the size from which tables are copied in chunks."""

    @property
    def copies_rows(self) -> bool:
        """True if the existing rows of tables are copied; False in snapshot mode NO_DATA."""
        return self.snapshot.mode is not SnapshotMode.NO_DATA


@dataclass(frozen=True, slots=True, kw_only=True)
class ReaderSettings:
    """Source, log and limits of one reader."""

    source: SourceSettings
    log: Root
    limits: SegmentLimits
    commit_bytes: int
    linger: float
    """Seconds between commits under load; the first change after an idle time is committed at once."""
    retention: Retention | None = None
    """Rules by which compacted segments are removed from the log; None if the log is never trimmed."""


def reader_settings(definition: Definition) -> ReaderSettings:
    """Return the settings that a definition gives the reader."""
    source = definition.source
    return ReaderSettings(
        source=SourceSettings(
            pipeline=definition.name,
            dsn=source.current_dsn(),
            slot=source.slot.name,
            publication=source.publication.name,
            control=publication_control(definition),
            patterns=definition.patterns,
            exclude=definition.excludes,
            create_slot=source.slot.create,
            failover=source.slot.failover,
            on_failover=source.on_failover,
            undecodable=source.undecodable,
            snapshot=definition.snapshot,
        ),
        log=definition.log.root,
        limits=SegmentLimits(size=definition.log.segment.bytes, age=definition.log.segment.every),
        commit_bytes=definition.log.commit.bytes,
        linger=definition.log.commit.linger,
        retention=retention_of(definition),
    )


def retention_of(definition: Definition) -> Retention:
    """Return the rules by which compacted segments are removed from the log."""
    return Retention(max_age=definition.log.retain.max, grace=definition.log.retain.grace)
