"""Check that a catalog can be written, without changing it."""

from __future__ import annotations

from pathlib import Path

from sqlalchemy import inspect, make_url, text
from sqlalchemy.orm import Session

from cdc import atomic_file
from cdc.catalog.database import Database
from cdc.catalog.models import ProcessRow
from cdc.errors import CatalogUnavailable

_MAY_CREATE = "SELECT has_schema_privilege(current_schema(), 'CREATE')"
_MAY_WRITE = f"SELECT has_table_privilege('{ProcessRow.__tablename__}', 'INSERT, UPDATE')"


def is_made(url: str) -> bool:
    """Whether there may be a catalog: always on a server, in a file once it exists."""
    file = _file(url)
    return file is None or file.exists()


def check_catalog_writable(url: str) -> None:
    """Raise CatalogUnavailable if the catalog cannot be written, or not be made."""
    file = _file(url)
    try:
        if file is not None:
            atomic_file.probe_writable(file.parent)  # its journal lies there
    except OSError as exc:
        why = (exc.strerror or "refused").lower()
        raise CatalogUnavailable(f"catalog {url!r}: its directory cannot be written: {why}") from exc
    if not is_made(url):
        return
    database = Database(url)
    try:
        with database.writing() as session:
            _check_rights(session, url)
            session.rollback()
    finally:
        database.close()


def _check_rights(session: Session, url: str) -> None:
    """What a transaction that writes nothing does not find out by beginning."""
    if make_url(url).get_backend_name() == "sqlite":
        return
    shown = make_url(url).render_as_string(hide_password=True)
    if session.scalar(text("SHOW transaction_read_only")) == "on":
        raise CatalogUnavailable(f"catalog {shown!r}: the server is read-only")
    made = inspect(session.connection()).has_table(ProcessRow.__tablename__)
    if not session.scalar(text(_MAY_WRITE if made else _MAY_CREATE)):
        raise CatalogUnavailable(f"catalog {shown!r}: the role may not {'write' if made else 'create'} its tables")


def _file(url: str) -> Path | None:
    """The file of an SQLite catalog; None for a server, or for memory."""
    parsed = make_url(url)
    if parsed.get_backend_name() != "sqlite" or not parsed.database or parsed.database == ":memory:":
        return None
    return Path(parsed.database)
