"""Reader settings, taken from a definition."""

from __future__ import annotations

from dataclasses import dataclass

from cdc.capture.initial_snapshot import CopySource
from cdc.config import Definition
from cdc.log.object_path import Root
from cdc.log.retention import Retention
from cdc.log.writer import SegmentLimits
from cdc.snapshot.publication_sync import publication_control


@dataclass(frozen=True, slots=True, kw_only=True)
class ReaderSettings:
    """Source, log and limits of one reader."""

    source: CopySource
    log: Root
    limits: SegmentLimits
    commit_bytes: int
    linger: float
    """Seconds between commits under load; the first change after an idle time is committed at once."""
    retention: Retention | None = None
    """None: the log is never trimmed."""


def reader_settings(definition: Definition) -> ReaderSettings:
    """The reader's settings in a definition."""
    source = definition.source
    return ReaderSettings(
        source=CopySource(
            pipeline=definition.name,
            dsn=source.current_dsn(),
            slot=source.slot.name,
            publication=source.publication.name,
            control=publication_control(definition),
            patterns=definition.patterns,
            exclude=definition.excludes,
            create_slot=source.slot.create,
            failover=source.slot.failover,
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
    """Retention of compacted segments."""
    return Retention(max_age=definition.log.retain.max, grace=definition.log.retain.grace)
