"""Acts: what shows that a person did something about a process which stopped for good.

That is another text of the definition, or a newer line of the audit, which every command that changes something writes.
The catalog may be a server that does not answer, so it is asked in a thread.
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
"""Seconds between two looks at the audit."""


class RestartTriggers:
    """The definition and the audit of one pipeline, as they are now."""

    def __init__(self, file: Path, url: str) -> None:
        """file: the definition. url: of the catalog."""
        self._file, self._url = file, url
        self._last_change: float | None = None
        self._thread = Thread(target=self._poll_audit, name="restart triggers", daemon=True)

    def definition_digest(self) -> str:
        """A digest of its text; empty if it cannot be read."""
        try:
            return sha256(self._file.read_bytes()).hexdigest()
        except OSError:
            return ""

    def last_change(self) -> float | None:
        """When the newest line was written, as time.time(); None if there is none, or none was seen yet."""
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
