"""Keeping: the thread that keeps a running reader's tables as the definition says, and hears what is asked of them.

Beside the one that copies, so that a new table is found, published and marked while another one is copied for hours.
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
"""Seconds between two looks at the catalog: each costs a millisecond or two, and most find nothing."""

SYNC_EVERY_DUPLICATE: Final = 2.0
"""Seconds to the next look while two tables have one name."""

log = structlog.get_logger("tables")


def duplicate_topics(versions: Iterable[TableSchema]) -> set[str]:
    """Topics that more than one table has that is not marked as gone."""
    counted = Counter(schema.topic for schema in versions if schema.state is not TableState.DROPPED)
    return {topic for topic, count in counted.items() if count > 1}


class PublicationSyncWorker(Thread):
    """Runs until stop is set; a source or a catalog that is away is waited for."""

    def __init__(
        self, membership: PublicationSync, placing: WatermarkWindows, pipeline: str, url: str, stop: Event
    ) -> None:
        """url: of the catalog."""
        super().__init__(name="tables", daemon=True)
        self._membership, self._placing, self._pipeline, self._url = membership, placing, pipeline, url
        self._stop_event = stop
        self._looked_at = float("-inf")

    def run(self) -> None:
        """Look, and carry out what is asked."""
        while not self._stop_event.wait(POLL):
            try:
                with Catalog.open(self._url) as catalog:
                    while not self._stop_event.wait(POLL):
                        self._look(catalog)
                        self._skip(catalog)
            except CatalogUnavailable as exc:
                log.warning("catalog is unreachable", code=exc.code)

    def _look(self, catalog: Catalog) -> None:
        """Hold the tables against the definition, when it is time or somebody asks."""
        asked = catalog.commands.pending(self._pipeline, CHECK_TABLES)
        pause = SYNC_EVERY_DUPLICATE if duplicate_topics(self._placing.versions()) else SYNC_EVERY
        if not asked and time.monotonic() < self._looked_at + pause:
            return
        self._looked_at = time.monotonic()

        def looked() -> Mapping[str, Any] | None:
            found = self._membership.look()
            if found is None:
                return None
            catalog.tables.record_refused(self._pipeline, found.refused)
            return found.to_json()

        self._carry_out(catalog, asked, looked)

    def _skip(self, catalog: Catalog) -> None:
        for command in catalog.commands.pending(self._pipeline, SKIP_TABLES):

            def skipped(tables: list[str] = command.payload["tables"]) -> Mapping[str, Any] | None:
                versions = self._placing.versions()
                meant = [s for s in versions if matches(s.topic, tables) and s.state is not TableState.DROPPED]
                check_not_copying(catalog, self._pipeline, [schema.topic for schema in meant])
                for schema in meant:
                    self._membership.skip(schema)
                return {"skipped": [schema.topic for schema in meant]} if versions else None

            self._carry_out(catalog, [command], skipped)

    def _carry_out(
        self, catalog: Catalog, commands: list[Command], work: Callable[[], Mapping[str, Any] | None]
    ) -> None:
        """Finish the commands with what comes of the work; they wait on if that is None, or fails for now."""
        try:
            result, done = work(), True
        except CatalogUnavailable:
            raise
        except CdcError as exc:
            log.warning("the tables cannot be kept", code=exc.code, message=exc.message, fix=exc.fix)
            if exc.reaction is Reaction.RETRY:
                return
            result, done = {"error": exc.to_json()}, False
        if result is not None:
            for command in commands:
                catalog.commands.finish(command.id, result, ok=done)
