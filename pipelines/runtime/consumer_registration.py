"""The registration of a sink as a consumer of the log. Retention keeps the segments that a consumer has not read.

The registration is a file next to the log and survives the process. Only `cdc consumers forget` removes the
registration of a sink; a replay removes its own.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Event, Thread
from typing import Final

from cdc.bucket_files import Root
from cdc.config.sinks import DefinedSink
from cdc.log.consumer_registration import ALIVE_EVERY, ConsumerRegistration
from cdc.log.reader import LogReader
from cdc.position import Position

REPLAY: Final = ".replay"
"""Suffix of the consumer name of a replay."""


def sink_registration(root: str | Root, log_id: str, sink: DefinedSink, suffix: str = "") -> ConsumerRegistration:
    """Return the registration of a sink as a consumer of a log."""
    return ConsumerRegistration(root, target_uuid(log_id, sink, suffix), sink.name + suffix)


def target_uuid(log_id: str, sink: DefinedSink, suffix: str = "") -> str:
    """Return the id of a sink as a consumer of a log. It depends on the sink's location and type, not on its name."""
    return str(uuid.uuid5(uuid.NAMESPACE_URL, f"cdc:{log_id}/{sink.type}/{sink.location}{suffix}"))


@contextmanager
def registered_for_replay(root: str | Root, view: LogReader, sink: DefinedSink) -> Iterator[None]:
    """Register a replay as a consumer of the log: inside the block, retention removes no file that `view` reads.

    If the replay is killed, its registration remains. The next replay of the same sink replaces and removes it.
    """
    registered, done = sink_registration(root, view.log_id, sink, REPLAY), Event()
    horizon = Position(0) if view.compacted is None else view.compacted.horizon
    pinned = view.pinned_version(Position(0))

    def report_regularly() -> None:
        while not done.wait(ALIVE_EVERY):
            registered.report(horizon, pinned)

    registered.report(horizon, pinned, at_once=True)
    reporting = Thread(target=report_regularly, name="consumer", daemon=True)
    reporting.start()
    try:
        yield
    finally:
        done.set()
        reporting.join()
        registered.unregister()
