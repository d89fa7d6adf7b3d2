"""Leases for work that only one process may do; they expire, and the fencing of commits does not depend on them."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

from sqlalchemy import delete

from cdc.catalog.database import Database, upsert
from cdc.catalog.models import LeaseRow


class Leases:
    """The store of leases; `now` is a parameter so that expiry can be had without waiting."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def acquire(self, name: str, holder: str, seconds: float, *, now: datetime | None = None) -> bool:
        """Take or renew the lease; False if another holds it and it has not expired."""
        now = now or datetime.now(UTC)
        row = {"name": name, "holder": holder, "expires_at": now + timedelta(seconds=seconds)}
        free = (LeaseRow.holder == holder) | (LeaseRow.expires_at <= now)
        with self._database.writing() as session:
            upsert(session, LeaseRow, [row], only_if=free)
            held = session.get(LeaseRow, name)
            return held is not None and held.holder == holder

    def release(self, name: str, holder: str) -> None:
        """Give the lease back; nothing happens if the holder does not have it."""
        with self._database.writing() as session:
            session.execute(delete(LeaseRow).where(LeaseRow.name == name, LeaseRow.holder == holder))

    def holder(self, name: str, *, now: datetime | None = None) -> str | None:
        """Who holds the lease, None if nobody does or it expired."""
        with self._database.reading() as session:
            held = session.get(LeaseRow, name)
            return held.holder if held is not None and held.expires_at > (now or datetime.now(UTC)) else None
