"""Schema revision of the catalog database, and its migrations with Alembic."""

from __future__ import annotations

import io
import time
from importlib.resources import as_file, files
from typing import Any, Final

from sqlalchemy import Column, MetaData, PrimaryKeyConstraint, String, Table, inspect, select

from cdc.catalog.connection import NEW_CATALOG, Database
from cdc.catalog.models import CatalogModel
from cdc.errors import CatalogUnavailable, CatalogUnusable, ConfigError

HEAD: Final = "0002"
"""Newest schema revision of the catalog.

It is a constant, so that a process with an up-to-date catalog need not import Alembic.
"""
_VERSION: Final = Table(
    "alembic_version",
    MetaData(),
    Column("version_num", String(32), nullable=False),
    PrimaryKeyConstraint("version_num", name="alembic_version_pkc"),
)
"""The table in which Alembic records the revision of a database."""


def current(database: Database) -> str | None:
    """Return the revision of the database; None if the database contains no catalog yet."""
    with database.reading() as session:
        connection = session.connection()
        if not inspect(connection).has_table(_VERSION.name):
            return None
        return session.scalar(select(_VERSION.c.version_num))


def ensure(database: Database, *, migrate: bool, created_within: float = 0.0) -> None:
    """Create the catalog in an empty database, or migrate it to HEAD.

    If `migrate` is False, raises CatalogUnavailable for a database with another revision, and for an empty one unless
    another process creates the catalog within `created_within` seconds. Raises CatalogUnusable if a
    newer version of cdc created the catalog.
    """
    found = current(database)
    if found == HEAD:
        return
    _refuse_newer(database, found)
    if not migrate:
        _await_creation(database, found, created_within)
        return
    if found is None:
        _create(database)
    if current(database) != HEAD:
        up(database)


def _await_creation(database: Database, found: str | None, created_within: float) -> None:
    """Wait until another process has created the catalog; raise CatalogUnavailable if none does or it is outdated."""
    if found is not None:
        raise CatalogUnavailable(
            f"the catalog is at revision {found!r}: expected {HEAD!r}",
            remedy="run 'cdc migrate up'",
        )
    deadline = time.monotonic() + created_within
    while current(database) != HEAD:
        if time.monotonic() > deadline:
            raise CatalogUnavailable(
                "the catalog is empty: no process of the pipeline has created it yet",
                remedy="start the pipeline with 'cdc run'; if it has just been started, run the command again",
            )
        time.sleep(0.1)


def _create(database: Database) -> None:
    """Create the tables of HEAD and record the revision, unless another process has, or has emptied the catalog.

    The result is that of all migrations. The models suffice for it, and the import of Alembic takes a quarter of a
    second, on a machine without compiled modules a second.
    """
    with database.migrating() as connection:
        if not inspect(connection).has_table(_VERSION.name):
            CatalogModel.metadata.create_all(connection, checkfirst=False)
            _VERSION.create(connection)
            connection.execute(_VERSION.insert().values(version_num=HEAD))


def up(database: Database, revision: str = "head") -> None:
    """Upgrade to the revision in one transaction; raises CatalogUnusable if the database is newer than HEAD."""
    _refuse_newer(database, current(database))
    _run(database, "upgrade", revision)


def down(database: Database, revision: str) -> None:
    """Downgrade to the revision and delete what later revisions added; the revision `base` empties the database."""
    _run(database, "downgrade", revision)


def is_newer(found: str | None) -> bool:
    """Return True if `found` is later than HEAD, which means that a newer cdc or another program has set it."""
    return found is not None and found > HEAD


def _refuse_newer(database: Database, found: str | None) -> None:
    if is_newer(found):
        raise CatalogUnusable(
            f"catalog {database.shown!r} is at revision {found!r}, but this version of cdc knows only revisions "
            f"up to {HEAD!r}",
            remedy=f"use the version of cdc that created it, or a later version; or {database.replacement}; "
            f"{NEW_CATALOG}",
        )


def sql(url: str, revision: str = "head") -> str:
    """Return the SQL that `up` would send to an empty database; needs no connection."""
    from alembic import command  # takes a quarter of a second, and most processes never need it

    output = io.StringIO()
    with as_file(files("migrations")) as directory:
        config = _config(str(directory), output)
        config.attributes["url"] = url
        command.upgrade(config, revision, sql=True)
    return output.getvalue()


def _run(database: Database, verb: str, revision: str) -> None:
    from alembic import command
    from alembic.util import CommandError

    with as_file(files("migrations")) as directory, database.migrating() as connection:
        config = _config(str(directory), io.StringIO())
        config.attributes["connection"] = connection
        try:
            getattr(command, verb)(config, revision)
        except CommandError as error:
            raise ConfigError(f"the catalog cannot be migrated to revision {revision!r}: {error}") from error


def _config(directory: str, output: io.StringIO) -> Any:
    from alembic.config import Config

    config = Config(output_buffer=output, stdout=output)
    config.set_main_option("script_location", directory.replace("%", "%%"))
    config.set_main_option("path_separator", "os")
    return config
