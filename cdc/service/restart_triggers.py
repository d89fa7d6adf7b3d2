"""Restart triggers: signs that an operator acted on a process that stopped for good.

These are a changed definition, or a newer audit entry, which every command that changes something writes. The catalog
may be a server that does not answer, so a thread reads it.
"""

from __future__ import annotations

from contextlib import suppress
from datetime import UTC
from hashlib import sha256
from pathlib import Path
from threading import Event, Thread
from typing import Final

from cdc.catalog import Catalog
from cdc.errors import CdcError

POLL_INTERVAL: Final = 1.0
"""Seconds between two reads of the audit."""


class RestartTriggers:
    """The present definition and the last audit entry of one pipeline."""

    def __init__(self, file: Path, url: str) -> None:
        """file: the definition. url: the catalog's."""
        self._file, self._url = file, url
        self._last_change: float | None = None
        self._thread = Thread(target=self._poll_audit, name="restart triggers", daemon=True)

    def definition_digest(self) -> str:
        """A digest of the definition; empty if it cannot be read."""
        try:
            return sha256(self._file.read_bytes()).hexdigest()
        except OSError:
            return ""

    def last_change(self) -> float | None:
        """Time of the last audit entry as time.time(); None if there is none or it is not read yet."""
        if self._thread.ident is None:
            self._thread.start()
        return self._last_change

    def _poll_audit(self) -> None:
        never = Event()
        while not never.wait(POLL_INTERVAL):
            with suppress(CdcError), Catalog.open(self._url, migrate=False) as catalog:
                for line in catalog.audit.ls(limit=1):
                    written = line.written_at
                    self._last_change = (written if written.tzinfo else written.replace(tzinfo=UTC)).timestamp()
