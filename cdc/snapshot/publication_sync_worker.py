"""Publication sync worker: the thread that runs the publication sync and the commands about tables.

It is separate from the backfill worker, so that a new table is found and published while another copy runs for hours.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from threading import Event, Thread
from typing import Any, Final

import structlog

from cdc.catalog import Catalog
from cdc.catalog.commands import Command
from cdc.errors import CatalogUnavailable, CdcError, Reaction
from cdc.snapshot.publication_sync import SYNC_EVERY, PublicationSync
from cdc.snapshot.table_requests import CHECK_TABLES, SKIP_TABLES, check_not_copying
from cdc.snapshot.watermark_window import WatermarkWindows
from cdc.table import TableSchema, TableState, matches

POLL: Final = 1.0
"""Seconds between two polls of the catalog; a poll takes one or two milliseconds."""

SYNC_EVERY_DUPLICATE: Final = 2.0
"""Seconds between two comparisons while two tables have one name."""

log = structlog.get_logger("tables")


def duplicate_topics(versions: Iterable[TableSchema]) -> set[str]:
    """Topics that more than one table has, dropped tables excluded."""
    counted = Counter(schema.topic for schema in versions if schema.state is not TableState.DROPPED)
    return {topic for topic, count in counted.items() if count > 1}


class PublicationSyncWorker(Thread):
    """Runs until stop is set; waits for a source or catalog that is unreachable."""

    def __init__(self, sync: PublicationSync, windows: WatermarkWindows, pipeline: str, url: str, stop: Event) -> None:
        """url: URL of the catalog."""
        super().__init__(name="tables", daemon=True)
        self._sync, self._windows, self._pipeline, self._url = sync, windows, pipeline, url
        self._stop_event = stop
        self._synced_at = float("-inf")

    def run(self) -> None:
        """Sync the publication periodically, and run commands."""
        while not self._stop_event.wait(POLL):
            try:
                with Catalog.open(self._url) as catalog:
                    while not self._stop_event.wait(POLL):
                        self._sync_if_due(catalog)
                        self._skip(catalog)
            except CatalogUnavailable as exc:
                log.warning("catalog is unreachable", code=exc.code)

    def _sync_if_due(self, catalog: Catalog) -> None:
        """Sync the publication when it is due or a command requests it."""
        requested = catalog.commands.pending(self._pipeline, CHECK_TABLES)
        pause = SYNC_EVERY_DUPLICATE if duplicate_topics(self._windows.schemas()) else SYNC_EVERY
        if not requested and time.monotonic() < self._synced_at + pause:
            return
        self._synced_at = time.monotonic()

        def sync() -> Mapping[str, Any] | None:
            found = self._sync.run_once()
            if found is None:
                return None
            catalog.tables.record_refused(self._pipeline, found.refused)
            return found.to_json()

        self._run_command(catalog, requested, sync)

    def _skip(self, catalog: Catalog) -> None:
        for command in catalog.commands.pending(self._pipeline, SKIP_TABLES):

            def skip(tables: list[str] = command.payload["tables"]) -> Mapping[str, Any] | None:
                versions = self._windows.schemas()
                chosen = [s for s in versions if matches(s.topic, tables) and s.state is not TableState.DROPPED]
                check_not_copying(catalog, self._pipeline, [schema.topic for schema in chosen])
                for schema in chosen:
                    self._sync.skip(schema)
                return {"skipped": [schema.topic for schema in chosen]} if versions else None

            self._run_command(catalog, [command], skip)

    def _run_command(
        self, catalog: Catalog, commands: list[Command], work: Callable[[], Mapping[str, Any] | None]
    ) -> None:
        """Run `work` and finish the commands with its result; they stay pending on None or a temporary error."""
        try:
            result, done = work(), True
        except CatalogUnavailable:
            raise
        except CdcError as exc:
            log.warning("tables cannot be added or removed", code=exc.code, message=exc.message, fix=exc.fix)
            if exc.reaction is Reaction.RETRY:
                return
            result, done = {"error": exc.to_json()}, False
        if result is not None:
            for command in commands:
                catalog.commands.finish(command.id, result, ok=done)
