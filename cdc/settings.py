"""Settings: what one reader needs to know of a definition."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from cdc.config import Definition
from cdc.log.segments import SegmentLimits
from cdc.snapshot.initial import CopySource


@dataclass(frozen=True, slots=True, kw_only=True)
class ReaderSettings:
    """What one reader needs to know."""

    source: CopySource
    log: Path
    limits: SegmentLimits
    commit_bytes: int
    linger: float
    """Seconds between commits under load; the first change after a rest is committed at once."""


def reader_settings(definition: Definition) -> ReaderSettings:
    """The reader's part of a definition."""
    source = definition.source
    return ReaderSettings(
        source=CopySource(
            pipeline=definition.name,
            dsn=source.current_dsn(),
            slot=source.slot.name,
            publication=source.publication.name,
            patterns=definition.patterns,
            exclude=definition.excludes,
            failover=source.slot.failover,
            undecodable=source.undecodable,
            snapshot=definition.snapshot,
        ),
        log=Path(definition.log.path),
        limits=SegmentLimits(size=definition.log.segment.bytes, age=definition.log.segment.every),
        commit_bytes=definition.log.commit.bytes,
        linger=definition.log.commit.linger,
    )
