"""Reads the status of a log: sizes, positions, last compaction, consumers, and problems."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Final, TypeVar

from cdc.bucket_files import Root, as_root
from cdc.errors import CdcError, ConfigError, LogCorrupt, LogTrimmed, LogUnwritable
from cdc.log import consumers
from cdc.log.compacted_table import CompactedState, Run, last_commit, read_compacted_state
from cdc.log.consumers import Consumer
from cdc.log.inspection import SegmentListing
from cdc.log.read_plan import is_late
from cdc.log.reader import LogReader
from cdc.log.vacuum import waiting
from cdc.position import Position
from cdc.service.log_contents import open_log, segment_line
from cdc.service.log_status_records import (
    Compaction,
    ConsumerLine,
    LogState,
    LogStatus,
    RunLine,
    wal_between,
)
from cdc.service.problem import Problem

SILENT_AFTER: Final = 120.0
"""Seconds without a report after which a consumer counts as silent; consumers report twice a minute."""

FULL_BELOW: Final = 1 << 16
"""Free bytes below which a disk counts as full: a commit of the log and a page of the catalog need more."""
_Found = TypeVar("_Found")


def log_status(root: str | Root, log: LogReader, now: datetime, file: str = "FILE") -> LogStatus:
    """Return the status of the log under `root`, read through `log`.

    If a part of the status cannot be read, the status has a problem that says so, and still contains the other parts.
    `file` is the path of the definition in the commands that a problem's remedy contains.
    """
    return _LogStatusBuilder(root, log, now, file).status()


def consumer_lines(root: str | Root, now: datetime) -> tuple[ConsumerLine, ...]:
    """Return the consumers of the log under `root`, sorted by name; consumers with an unreadable file are left out."""
    return _LogStatusBuilder(root, open_log(root), now, "FILE").status().consumers


def find_consumer(root: str | Root, name: str) -> Consumer:
    """Return the consumer with this name or UUID. Raises ConfigError unless exactly one consumer matches.

    A consumer whose file cannot be read matches only by its UUID, and is returned with position 0.
    """
    known, broken = consumers.list_readable_consumers(root)
    known += [Consumer(uuid, uuid, Position(0)) for uuid in broken]
    found = [consumer for consumer in known if name in (consumer.name, consumer.uuid)]
    if len(found) > 1:
        uuids = ", ".join(consumer.uuid for consumer in found)
        raise ConfigError(
            f"{len(found)} consumers of the log are called {name!r}", remedy=f"choose one by its UUID: {uuids}"
        )
    if not found:
        names = ", ".join(dict.fromkeys(consumer.name for consumer in known)) or "none"
        raise ConfigError(f"the log has no consumer called {name!r}", remedy=f"choose one of the consumers: {names}")
    return found[0]


def seconds_since_seen(consumer: Consumer, now: datetime) -> float:
    """Return the number of seconds since the last report of a consumer."""
    return max(0.0, now.timestamp() - consumer.seen_at / 1e6)


def full_disk_problems(root: str | Root) -> list[Problem]:
    """Return the problem of a local log whose disk is full.

    The processes may be unable to report it, because the catalog is next to the log by default.
    """
    place = as_root(root)
    if not isinstance(place, Path):
        return []
    try:
        free = shutil.disk_usage(place).free
    except OSError:
        return []  # another part of the status says why the log cannot be read
    if free >= FULL_BELOW:
        return []
    message = f"only {free:,} bytes are free on the disk of the log, so neither log nor catalog can be written there"
    return [Problem("log", LogUnwritable.code, message, LogUnwritable.remedy)]


class _LogStatusBuilder:
    """Builds the status of a log part by part and collects the problems."""

    def __init__(self, root: str | Root, log: LogReader, now: datetime, file: str) -> None:
        self._root = root
        self._log = log
        self._now = now
        self._file = file
        self._listing = SegmentListing(log)
        self._segments = self._listing.segments()
        self._problems: list[Problem] = []

    def status(self) -> LogStatus:
        log, segments = self._log, self._segments
        compacted = self._attempt("the compacted log", lambda: read_compacted_state(self._root, log.log_id))
        horizon = compacted.horizon if compacted and compacted.horizon else None
        leaving = self._attempt("the list of removed files", lambda: waiting(self._root))
        known, broken = self._attempt("the consumers", lambda: consumers.list_readable_consumers(self._root)) or (
            [],
            [],
        )
        lines = tuple(self._consumer(consumer, compacted) for consumer in known)
        self._problems += full_disk_problems(self._root)
        self._problems += [self._broken(uuid) for uuid in broken]
        self._problems += [self._late(line) for line in lines if line.state == "late"]
        last = log.last_commit
        return LogStatus(
            at=self._now.isoformat(),
            state=LogState.READ,
            durable=None if log.durable is None else str(log.durable),
            timeline=None if last is None else last.timeline,
            switch_point=str(last.switch_point) if last is not None and last.switch_point else None,
            segment_count=len(segments),
            file_count=sum(segment.files for segment in segments),
            row_count=sum(segment.rows for segment in segments),
            oldest_segment=segment_line(segments[0]) if segments else None,
            newest_segment=segment_line(segments[-1]) if segments else None,
            horizon=str(horizon) if horizon else None,
            horizon_behind_bytes=wal_between(horizon, log.durable or horizon) if horizon else None,
            horizon_behind_seconds=self._listing.seconds_behind(horizon) if horizon else None,
            floor=str(compacted.floor) if compacted and compacted.floor else None,
            oldest=str(log.oldest) if log.oldest else None,
            runs=tuple(_run_line(run) for run in compacted.runs) if compacted else (),
            compaction=self._attempt("the last compaction", lambda: _last_compaction(self._root)) if horizon else None,
            changes_bytes=sum(segment.size for segment in segments),
            compacted_bytes=sum(run.size for run in compacted.runs) if compacted else 0,
            leaving_bytes=leaving,
            consumers=lines,
            problems=tuple(self._problems),
        )

    def _attempt(self, part: str, read: Callable[[], _Found]) -> _Found | None:
        try:
            return read()
        except CdcError as exc:
            self._problems.append(Problem("log", exc.code, exc.message, exc.fix))
        except Exception as exc:  # noqa: BLE001 - storage and Delta raise many types, and the other parts are still reported
            message = f"{part} cannot be read: {_first_line(exc)}"
            self._problems.append(Problem("log", LogCorrupt.code, message, _verify_remedy(self._file)))
        return None

    def _consumer(self, consumer: Consumer, compacted: CompactedState | None) -> ConsumerLine:
        position, ago = consumer.position, seconds_since_seen(consumer, self._now)
        late = compacted is not None and is_late(position, self._log.oldest, compacted.floor)
        ahead = [segment for segment in self._segments if segment.last > position]
        newest = self._segments[-1].segment if self._segments else None
        kept = [e for e in ahead if compacted is not None and e.last <= compacted.horizon and e.segment != newest]
        return ConsumerLine(
            name=consumer.name,
            uuid=consumer.uuid,
            position=str(position),
            pinned=consumer.pinned,
            behind_bytes=wal_between(position, self._log.durable or position),
            behind_seconds=self._listing.seconds_behind(position),
            behind_segments=len(ahead),
            holds_bytes=sum(segment.size for segment in kept),
            seen_at=datetime.fromtimestamp(consumer.seen_at / 1e6, UTC).isoformat(),
            seen_seconds=ago,
            state="late" if late else "running" if ago <= SILENT_AFTER else "silent",
        )

    def _late(self, line: ConsumerLine) -> Problem:
        return Problem(
            f"consumer {line.name}",
            LogTrimmed.code,
            f"the changes after the consumer's position {line.position} are trimmed, so the consumer cannot continue",
            f"rebuild the consumer's target with 'cdc replay {line.name} -c {self._file}'; if the consumer will not "
            "run again, run "
            f"'cdc consumers forget {line.uuid} -c {self._file}'",
        )

    def _broken(self, uuid: str) -> Problem:
        return Problem(
            f"consumer {uuid}",
            LogCorrupt.code,
            "the consumer's file in the log cannot be read; no segment is trimmed while this file is unreadable",
            "wait a minute: a running consumer writes its file again; "
            f"if the consumer will not run again, run 'cdc consumers forget {uuid} -c {self._file}'",
        )


def _last_compaction(root: str | Root) -> Compaction:
    commit = last_commit(root)
    at = datetime.fromtimestamp(commit["timestamp"] / 1000, UTC)
    return Compaction(at=at.isoformat(), rows=int(commit.get("cdc.rows", 0)))


def _run_line(run: Run) -> RunLine:
    return RunLine(run=run.number, files=len(run.files), rows=run.rows, bytes=run.size)


def _verify_remedy(file: str) -> str:
    return f"run 'cdc log verify -c {file}' to find the damaged files, and restore these files from a backup"


def _iso(time: datetime | None) -> str | None:
    return None if time is None else time.isoformat()


def _first_line(exc: Exception) -> str:
    return f"{type(exc).__name__}: {str(exc).partition(chr(10))[0][:200]}"
