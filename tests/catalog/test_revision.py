"""Revisions: forward they are the models, back they leave nothing."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from threading import Thread

import pytest
from alembic.autogenerate import compare_metadata
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import inspect

import migrations
from cdc.catalog import Catalog, revision
from cdc.catalog.connection import Database
from cdc.catalog.models import CatalogModel
from cdc.errors import CatalogUnavailable, CatalogUnusable, ConfigError
from tests.fixtures.waiting import until

FOLDER = Path(migrations.__file__).parent


@pytest.fixture
def database(tmp_path: Path) -> Iterator[Database]:
    opened = Database(f"sqlite:///{tmp_path}/catalog.db")
    yield opened
    opened.close()


def tables(database: Database) -> set[str]:
    return set(inspect(database.engine).get_table_names()) - {"alembic_version"}


def differences(database: Database) -> list[object]:
    with database.engine.connect() as connection:
        context = MigrationContext.configure(connection, opts={"compare_type": True, "compare_server_default": True})
        return list(compare_metadata(context, CatalogModel.metadata))


def test_an_empty_database_has_no_revision(database: Database) -> None:
    assert revision.current(database) is None


def test_forward_makes_exactly_the_models(database: Database) -> None:
    revision.up(database)
    assert revision.current(database) == revision.HEAD
    assert tables(database) == set(CatalogModel.metadata.tables)
    assert differences(database) == []


def schema(database: Database) -> dict[str, object]:
    """Columns, key and indexes of each table, in no order."""
    found = inspect(database.engine)
    return {
        table: (
            {one["name"]: (str(one["type"]), one["nullable"], one.get("autoincrement")) for one in columns},
            found.get_pk_constraint(table),
            sorted(map(str, found.get_indexes(table))),
        )
        for table in found.get_table_names()
        for columns in [found.get_columns(table)]
    }


def test_a_new_catalog_is_that_of_all_migrations(database: Database, tmp_path: Path) -> None:
    with Catalog.open(f"sqlite:///{tmp_path}/new.db") as created:
        revision.up(database)
        assert schema(created.database) == schema(database)
        assert revision.current(created.database) == revision.HEAD


def test_a_new_catalog_needs_no_alembic(tmp_path: Path) -> None:
    script = f"import sys\nfrom cdc.catalog import Catalog\nCatalog.open('sqlite:///{tmp_path}/new.db').close()\n"
    script += "assert 'alembic' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_a_catalog_that_was_emptied_is_migrated(database: Database, tmp_path: Path) -> None:
    revision.up(database)
    revision.down(database, "base")
    Catalog.open(f"sqlite:///{tmp_path}/catalog.db").close()
    assert differences(database) == []


def test_back_leaves_nothing_and_forward_works_again(database: Database) -> None:
    revision.up(database)
    revision.down(database, "base")
    assert tables(database) == set()
    assert revision.current(database) is None
    revision.up(database)
    assert differences(database) == []


def test_forward_twice_changes_nothing(database: Database) -> None:
    revision.up(database)
    revision.up(database)
    assert revision.current(database) == revision.HEAD


def test_the_head_in_the_code_is_the_head_of_the_scripts() -> None:
    config = Config()
    config.set_main_option("script_location", str(FOLDER))
    config.set_main_option("path_separator", "os")
    assert ScriptDirectory.from_config(config).get_heads() == [revision.HEAD]


@pytest.mark.parametrize("url", ["sqlite://", "postgresql+psycopg://nobody@nowhere/none"])
def test_sql_is_printed_without_a_database(url: str) -> None:
    statements = revision.sql(url)
    for table in CatalogModel.metadata.tables:
        assert f"CREATE TABLE {table} (" in statements


def test_a_catalog_of_a_newer_version_is_refused_unchanged(database: Database, tmp_path: Path) -> None:
    revision.up(database)
    with database.migrating() as connection:
        connection.exec_driver_sql("UPDATE alembic_version SET version_num = '9999'")
    for open_it in (
        lambda: Catalog.open(f"sqlite:///{tmp_path}/catalog.db"),
        lambda: Catalog.open(f"sqlite:///{tmp_path}/catalog.db", migrate=False),
        lambda: revision.up(database),
    ):
        with pytest.raises(
            CatalogUnusable,
            match=f"at revision '9999', but this version of cdc knows only revisions up to '{revision.HEAD}'",
        ) as e:
            open_it()
        assert "use the version of cdc that created it" in e.value.fix
        assert "migrate up" not in e.value.fix
    assert revision.current(database) == "9999"


def test_a_revision_that_does_not_exist_is_refused(database: Database) -> None:
    with pytest.raises(ConfigError, match="cannot be migrated to revision '4711'"):
        revision.up(database, "4711")


def test_a_failure_half_way_leaves_the_database_as_it_was(database: Database) -> None:
    with database.migrating() as connection:
        connection.exec_driver_sql("CREATE TABLE leases (name text)")
    with pytest.raises(CatalogUnavailable, match="leases"):
        revision.up(database)
    assert tables(database) == {"leases"}
    assert revision.current(database) is None


def test_a_command_waits_for_a_catalog_that_another_process_creates(tmp_path: Path) -> None:
    file = tmp_path / "catalog.db"

    def create() -> None:
        until(file.exists, "the command that looks", every=0)  # its connection creates the empty file
        with Catalog.open(f"sqlite:///{file}"):
            pass

    creating = Thread(target=create)
    creating.start()
    with Catalog.open(f"sqlite:///{file}", migrate=False, created_within=60.0) as catalog:
        assert catalog.processes.ls("shop") == []
    creating.join()
