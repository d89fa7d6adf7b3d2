"""The connector process: one reader, the reporter beside it, and when to try again."""

from __future__ import annotations

import signal
from pathlib import Path
from threading import Event
from types import FrameType

from tenacity import Retrying, retry_if_exception, stop_when_event_set, wait_exponential_jitter
from tenacity.nap import sleep_using_event

from cdc import metrics
from cdc.config import Definition
from cdc.errors import CdcError, Reaction
from cdc.log.segments import SegmentLimits
from cdc.postgres.replication import identify
from cdc.reader import Reader, ReaderSettings
from cdc.reporter import Reporter
from cdc.snapshot.initial import CopySource


def main(definition: Definition) -> int:
    """Run the reader until SIGTERM or SIGINT; raises the error that a retry cannot mend."""
    stop = Event()

    def drain(_number: int, _frame: FrameType | None) -> None:
        stop.set()

    signal.signal(signal.SIGTERM, drain)
    signal.signal(signal.SIGINT, drain)
    figures = metrics.Figures()
    reporter = Reporter(definition, figures, stop)
    reporter.start()
    try:
        Retrying(
            retry=retry_if_exception(lambda exc: isinstance(exc, CdcError) and exc.reaction is Reaction.RETRY),
            wait=wait_exponential_jitter(initial=0.2, max=30),
            stop=stop_when_event_set(stop),
            sleep=sleep_using_event(stop),
            before_sleep=reporter.waiting,
            reraise=True,
        )(_run, definition, figures, stop, reporter)
    except CdcError as exc:
        if stop.is_set() and exc.reaction is Reaction.RETRY:
            return 0
        reporter.failed(exc)
        raise
    finally:
        stop.set()
        reporter.join()
    return 0


def _run(definition: Definition, figures: metrics.Figures, stop: Event, reporter: Reporter) -> None:
    settings = reader_settings(definition, identify(definition.source.dsn.reveal()).timeline)
    reporter.running()
    Reader(settings, figures, stop).run()


def reader_settings(definition: Definition, timeline: int) -> ReaderSettings:
    """The reader's part of a definition."""
    source = definition.source
    return ReaderSettings(
        source=CopySource(
            pipeline=definition.name,
            dsn=source.dsn.reveal(),
            slot=source.slot.name,
            publication=source.publication.name,
            patterns=definition.patterns,
            exclude=definition.excludes,
            timeline=timeline,
        ),
        log=Path(definition.log.path),
        limits=SegmentLimits(size=definition.log.segment.bytes, age=definition.log.segment.every),
        commit_bytes=definition.log.commit.bytes,
        linger=definition.log.commit.linger,
    )
