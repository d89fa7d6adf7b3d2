"""Database: the catalog's engine: SQLite or Postgres, short transactions, every failure CatalogUnavailable."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final

from sqlalchemy import URL, ColumnElement, Connection, Engine, create_engine, event, make_url
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.exc import ArgumentError, DBAPIError, NoSuchModuleError, SQLAlchemyError
from sqlalchemy.orm import Session

from cdc.catalog.models import CatalogModel
from cdc.errors import CatalogUnavailable, CatalogUnusable, ConfigError
from cdc.private_files import make_private_file

BUSY_MILLISECONDS: Final = 5_000
"""How long SQLite waits for another process' write; ours take milliseconds."""
_INSERT: Final = {"sqlite": sqlite.insert, "postgresql": postgresql.insert}
_WRITES: Final = "cdc_writes"


LOST: Final = (
    "no data is in it: positions are in the log and the targets. Lost are the audit, the backfills and commands that "
    "wait, the counts of copied rows, and what was verified"
)
"""What a new catalog lacks."""
_DAMAGED: Final = frozenset({11, 26})
"""SQLITE_CORRUPT and SQLITE_NOTADB."""


class Database:
    """An engine that may be shared by threads; each process opens its own."""

    def __init__(self, url: str) -> None:
        self._url = _parsed(url)
        self.engine = _engine(self._url)
        self._writer = self.engine.execution_options(**{_WRITES: True})

    @contextmanager
    def reading(self) -> Iterator[Session]:
        """One short read; sees what was committed before it began."""
        with self._mapped(), Session(self.engine) as session:
            yield session

    @contextmanager
    def writing(self) -> Iterator[Session]:
        """One transaction that writes; committed at the end, rolled back if the block raises."""
        with self._mapped(), Session(self._writer) as session, session.begin():
            yield session

    @contextmanager
    def migrating(self) -> Iterator[Connection]:
        """One transaction for changes of the schema; a second process waits until it is over."""
        with self._mapped(), self._writer.begin() as connection:
            if connection.dialect.name == "postgresql":
                connection.exec_driver_sql("SELECT pg_advisory_xact_lock(hashtext('cdc.catalog.migrations'))")
            yield connection

    @property
    def shown(self) -> str:
        """The URL without its password."""
        return self._url.render_as_string(hide_password=True)

    @property
    def replacement(self) -> str:
        """How an operator gives the pipeline an empty catalog, in the imperative."""
        if self._url.get_backend_name() != "sqlite":
            return "stop cdc, let catalog.url name an empty database, and start cdc again"
        file = str(self._url.database)
        names = " ".join(shlex.quote(f"{file}{end}") for end in ("", "-wal", "-shm"))
        return f"stop cdc, move the files of the catalog to another directory ({names}), and start cdc again"

    def close(self) -> None:
        """Give all connections back; the object is of no use afterwards."""
        self.engine.dispose()

    @contextmanager
    def _mapped(self) -> Iterator[None]:
        try:
            yield
        except SQLAlchemyError as error:
            message = f"catalog {self.shown!r}: {_why(error)}"
            if _is_damaged(error):
                raise CatalogUnusable(message, remedy=f"{self.replacement}; {LOST}") from error
            raise CatalogUnavailable(message) from error


Rows = Sequence[Mapping[str, Any]]


def upsert(
    session: Session, model: type[CatalogModel], rows: Rows, *, only_if: ColumnElement[bool] | None = None
) -> None:
    """Insert the rows, or replace those whose primary key exists; one statement, atomic on both dialects.

    Under `only_if` an existing row that does not meet the condition stays as it is.
    """
    if not rows:
        return
    table = model.__table__
    key = [column.name for column in table.primary_key]
    insert: Any = _INSERT[session.get_bind().dialect.name](table)  # type: ignore[arg-type]
    changed = {name: insert.excluded[name] for name in rows[0] if name not in key}
    statement = insert.on_conflict_do_update(index_elements=key, set_=changed, where=only_if)
    session.execute(statement, [dict(row) for row in rows])


def _parsed(url: str) -> URL:
    try:
        parsed = make_url(url)
    except ArgumentError as error:
        raise ConfigError("catalog.url is not an SQLAlchemy URL") from error
    if parsed.get_backend_name() not in _INSERT:
        raise ConfigError(f"catalog.url: expected sqlite or postgresql, got {parsed.get_backend_name()!r}")
    return parsed


def _engine(url: URL) -> Engine:
    try:
        if url.get_backend_name() == "sqlite":
            return _sqlite(url)
        return create_engine(url, hide_parameters=True, pool_pre_ping=True, pool_size=2)
    except (ImportError, NoSuchModuleError, OSError) as error:
        raise CatalogUnavailable(f"catalog {url.render_as_string(hide_password=True)!r}: {error}") from error


def _sqlite(url: URL) -> Engine:
    if url.database and url.database != ":memory:" and not url.database.startswith("file:"):
        Path(url.database).parent.mkdir(parents=True, exist_ok=True)
        with suppress(OSError):  # SQLite says why it cannot open what cannot be made
            make_private_file(Path(url.database))
    engine = create_engine(url, hide_parameters=True, connect_args={"timeout": BUSY_MILLISECONDS / 1000})
    event.listen(engine, "connect", _prepare)
    event.listen(engine, "begin", _begin)
    return engine


def _prepare(connection: Any, _record: Any) -> None:
    # The driver's own transactions begin too late to be safe between processes; _begin does it.
    connection.isolation_level = None
    for pragma in ("journal_mode=WAL", "synchronous=NORMAL", f"busy_timeout={BUSY_MILLISECONDS}", "foreign_keys=ON"):
        connection.execute(f"PRAGMA {pragma}")


def _begin(connection: Connection) -> None:
    # A read that turns into a write fails at once when another wrote in between: take the lock first.
    writes = connection.get_execution_options().get(_WRITES)
    connection.exec_driver_sql("BEGIN IMMEDIATE" if writes else "BEGIN")


def _is_damaged(error: SQLAlchemyError) -> bool:
    code = getattr(error.orig, "sqlite_errorcode", 0) if isinstance(error, DBAPIError) else 0
    return (code & 0xFF) in _DAMAGED  # the rest of an extended code says where


def _why(error: SQLAlchemyError) -> str:
    if isinstance(error, DBAPIError):
        return str(error.orig).strip().partition("\n")[0]
    return type(error).__name__
