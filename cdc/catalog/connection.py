"""Connection to the catalog database in SQLite or Postgres, with short transactions.

Every failure is raised as CatalogUnavailable. `check_catalog_writable` tests whether the catalog can be written, and
does not change it.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import lru_cache
from pathlib import Path
from typing import Any, Final

from sqlalchemy import URL, ColumnElement, Connection, Engine, create_engine, event, inspect, make_url, text
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.exc import ArgumentError, DBAPIError, NoSuchModuleError, SQLAlchemyError
from sqlalchemy.orm import Session

from cdc import atomic_file
from cdc.catalog.models import CatalogModel, ProcessRow
from cdc.errors import CatalogUnavailable, CatalogUnusable, ConfigError
from cdc.file_modes import make_private_file

BUSY_MILLISECONDS: Final = 5_000
"""Milliseconds that SQLite waits for another process's write transaction, which takes milliseconds in cdc."""
_INSERT: Final = {"sqlite": sqlite.insert, "postgresql": postgresql.insert}
_WRITES: Final = "cdc_writes"


NEW_CATALOG: Final = (
    "a new catalog loses no captured data and no position, but starts without the audit log, pending backfills and "
    "commands, counts of copied rows, and verification results"
)
"""Text for remedies: what the pipeline loses with a new catalog."""
_DAMAGED: Final = frozenset({11, 26})
"""SQLite error codes of a damaged file: SQLITE_CORRUPT and SQLITE_NOTADB."""
_MAY_CREATE: Final = "SELECT has_schema_privilege(current_schema(), 'CREATE')"
_MAY_WRITE: Final = f"SELECT has_table_privilege('{ProcessRow.__tablename__}', 'INSERT, UPDATE')"


class Database:
    """The database engine of one catalog; threads may share it, but each process opens its own."""

    def __init__(self, url: str) -> None:
        self._url = _parsed(url)
        self.engine = _engine(self._url)
        self._writer = self.engine.execution_options(**{_WRITES: True})

    @contextmanager
    def reading(self) -> Iterator[Session]:
        """Run the block in a short read transaction, which sees all commits before its beginning."""
        with self._mapped(), Session(self.engine) as session:
            yield session

    @contextmanager
    def writing(self) -> Iterator[Session]:
        """Run the block in a write transaction; commit at its end, or roll back if the block raises."""
        with self._mapped(), Session(self._writer) as session, session.begin():
            yield session

    @contextmanager
    def migrating(self) -> Iterator[Connection]:
        """Run the block in a transaction that changes the schema; a second process waits until the transaction ends."""
        with self._mapped(), self._writer.begin() as connection:
            if connection.dialect.name == "postgresql":
                connection.exec_driver_sql("SELECT pg_advisory_xact_lock(hashtext('cdc.catalog.migrations'))")
            yield connection

    @property
    def shown(self) -> str:
        """URL of the catalog without its password."""
        return self._url.render_as_string(hide_password=True)

    @property
    def replacement(self) -> str:
        """Remedy with which an operator gives the pipeline an empty catalog."""
        if self._url.get_backend_name() != "sqlite":
            return "stop cdc, set catalog.url to the URL of an empty database, and start cdc again"
        file = str(self._url.database)
        names = " ".join(shlex.quote(f"{file}{end}") for end in ("", "-wal", "-shm"))
        return f"stop cdc, move the files of the catalog to another directory ({names}), and start cdc again"

    def close(self) -> None:
        """Close all connections; the object cannot be used afterwards."""
        self.engine.dispose()

    @contextmanager
    def _mapped(self) -> Iterator[None]:
        try:
            yield
        except SQLAlchemyError as error:
            message = f"catalog {self.shown!r} cannot be used: {_why(error)}"
            if _is_damaged(error):
                raise CatalogUnusable(message, remedy=f"{self.replacement}; {NEW_CATALOG}") from error
            raise CatalogUnavailable(message) from error


Rows = Sequence[Mapping[str, Any]]


def upsert(
    session: Session, model: type[CatalogModel], rows: Rows, *, only_if: ColumnElement[bool] | None = None
) -> None:
    """Insert the rows, or replace rows with the same primary key; one statement, atomic on both dialects.

    only_if: condition under which an existing row is replaced; by default every existing row is replaced.
    """
    if not rows:
        return
    insert, replaced = _upsert_parts(session.get_bind().dialect.name, model, tuple(rows[0]))
    session.execute(insert.on_conflict_do_update(**replaced, where=only_if), [dict(row) for row in rows])


@lru_cache
def _upsert_parts(dialect: str, model: type[CatalogModel], columns: tuple[str, ...]) -> tuple[Any, dict[str, Any]]:
    """Return an INSERT statement and the arguments of its ON CONFLICT clause, which take long to build."""
    table = model.__table__
    key = [column.name for column in table.primary_key]
    insert: Any = _INSERT[dialect](table)  # type: ignore[arg-type]
    return insert, {"index_elements": key, "set_": {name: insert.excluded[name] for name in columns if name not in key}}


def is_catalog_created(url: str) -> bool:
    """Return True if the catalog may exist: for SQLite if its file exists, on a server always."""
    file = _file(url)
    return file is None or file.exists()


def check_catalog_writable(url: str) -> None:
    """Raise CatalogUnavailable if the existing catalog cannot be written, or a missing catalog cannot be created."""
    file = _file(url)
    try:
        if file is not None:
            atomic_file.probe_writable(file.parent)  # SQLite writes its journal there
    except OSError as exc:
        why = (exc.strerror or "refused").lower()
        raise CatalogUnavailable(f"catalog {url!r} cannot be used: its directory cannot be written ({why})") from exc
    if not is_catalog_created(url):
        return
    database = Database(url)
    try:
        with database.writing() as session:
            _check_rights(session, url)
            session.rollback()
    finally:
        database.close()


def _parsed(url: str) -> URL:
    try:
        parsed = make_url(url)
    except ArgumentError as error:
        raise ConfigError("catalog.url is not an SQLAlchemy URL") from error
    if parsed.get_backend_name() not in _INSERT:
        raise ConfigError(
            "catalog.url names an unsupported database: expected sqlite or postgresql, got "
            f"{parsed.get_backend_name()!r}"
        )
    return parsed


def _engine(url: URL) -> Engine:
    try:
        if url.get_backend_name() == "sqlite":
            return _sqlite(url)
        return create_engine(url, hide_parameters=True, pool_pre_ping=True, pool_size=2)
    except (ImportError, NoSuchModuleError, OSError) as error:
        raise CatalogUnavailable(
            f"catalog {url.render_as_string(hide_password=True)!r} cannot be opened: {error}"
        ) from error


def _sqlite(url: URL) -> Engine:
    if url.database and url.database != ":memory:" and not url.database.startswith("file:"):
        Path(url.database).parent.mkdir(parents=True, exist_ok=True)
        with suppress(OSError):  # SQLite reports why it cannot open a file that cannot be created
            make_private_file(Path(url.database))
    engine = create_engine(url, hide_parameters=True, connect_args={"timeout": BUSY_MILLISECONDS / 1000})
    event.listen(engine, "connect", _prepare)
    event.listen(engine, "begin", _begin)
    return engine


def _prepare(connection: Any, _record: Any) -> None:
    # the driver's own transactions begin too late to be safe between processes, so _begin begins them
    connection.isolation_level = None
    for pragma in ("journal_mode=WAL", "synchronous=NORMAL", f"busy_timeout={BUSY_MILLISECONDS}", "foreign_keys=ON"):
        connection.execute(f"PRAGMA {pragma}")


def _begin(connection: Connection) -> None:
    # a read that turns into a write fails if another process wrote in between, so take the lock first
    writes = connection.get_execution_options().get(_WRITES)
    connection.exec_driver_sql("BEGIN IMMEDIATE" if writes else "BEGIN")


def _is_damaged(error: SQLAlchemyError) -> bool:
    code = getattr(error.orig, "sqlite_errorcode", 0) if isinstance(error, DBAPIError) else 0
    return (code & 0xFF) in _DAMAGED  # the higher bits of an extended code only add detail


def _why(error: SQLAlchemyError) -> str:
    if isinstance(error, DBAPIError):
        return str(error.orig).strip().partition("\n")[0]
    return type(error).__name__


def _check_rights(session: Session, url: str) -> None:
    """Raise CatalogUnavailable if the Postgres server is read-only, or if the role may not write the catalog's tables.

    Beginning a transaction does not check these conditions. The function does nothing for SQLite.
    """
    if make_url(url).get_backend_name() == "sqlite":
        return
    shown = make_url(url).render_as_string(hide_password=True)
    if session.scalar(text("SHOW transaction_read_only")) == "on":
        raise CatalogUnavailable(f"catalog {shown!r} cannot be written: the server is read-only")
    exists = inspect(session.connection()).has_table(ProcessRow.__tablename__)
    if not session.scalar(text(_MAY_WRITE if exists else _MAY_CREATE)):
        raise CatalogUnavailable(
            f"catalog {shown!r} cannot be used: the database role may not {'write' if exists else 'create'} "
            "the catalog's tables"
        )


def _file(url: str) -> Path | None:
    """Return the file of an SQLite catalog; None for a server or an in-memory database."""
    parsed = make_url(url)
    if parsed.get_backend_name() != "sqlite" or not parsed.database or parsed.database == ":memory:":
        return None
    return Path(parsed.database)
