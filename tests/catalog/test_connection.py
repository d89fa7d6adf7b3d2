"""Database of the catalog: settings of SQLite, and databases that cannot be opened."""

from __future__ import annotations

from pathlib import Path

import pytest

from cdc.catalog import Catalog
from cdc.catalog.connection import check_catalog_writable, is_catalog_created
from cdc.errors import CatalogUnavailable, CatalogUnusable, ConfigError


def test_sqlite_is_opened_for_many_processes(catalog: Catalog) -> None:
    with catalog.database.engine.connect() as connection:
        pragmas = [connection.exec_driver_sql(f"PRAGMA {name}").scalar() for name in ("journal_mode", "busy_timeout")]
        assert pragmas == ["wal", 5000]
        assert connection.exec_driver_sql("PRAGMA foreign_keys").scalar() == 1


def test_a_database_that_cannot_be_opened_is_unavailable(tmp_path: Path) -> None:
    (tmp_path / "catalog.db").mkdir()
    with pytest.raises(CatalogUnavailable, match="unable to open database file"):
        Catalog.open(f"sqlite:///{tmp_path}/catalog.db")


def test_an_unreachable_server_is_unavailable_and_its_password_unsaid() -> None:
    with pytest.raises(CatalogUnavailable) as caught:
        Catalog.open("postgresql+psycopg://u:c4n4ry@127.0.0.1:1/d?connect_timeout=2")
    assert "c4n4ry" not in str(caught.value)


@pytest.mark.parametrize("first_page_is_whole", [True, False])
def test_a_damaged_file_is_named_and_works_again_once_it_is_moved(tmp_path: Path, first_page_is_whole: bool) -> None:
    file = tmp_path / "catalog.db"
    with Catalog.open(f"sqlite:///{file}") as catalog:
        catalog.audit.write("somebody", "something", "shop")
    whole = file.read_bytes()
    kept = 4096 if first_page_is_whole else 0
    file.write_bytes(whole[:kept] + b"\xff" * (len(whole) - kept))
    for migrate in (True, False):
        with pytest.raises(CatalogUnusable) as caught:
            Catalog.open(f"sqlite:///{file}", migrate=migrate)
        assert f"({file} {file}-wal {file}-shm)" in caught.value.fix
    for end in ("", "-wal", "-shm"):
        Path(f"{file}{end}").unlink(missing_ok=True)
    with Catalog.open(f"sqlite:///{file}") as catalog:
        assert catalog.audit.ls() == []


@pytest.mark.parametrize("wrong", ["mysql://h/d", "no url"])
def test_other_databases_are_refused(wrong: str) -> None:
    with pytest.raises(ConfigError):
        Catalog.open(wrong)


def test_a_catalog_that_can_be_created_is_writable_and_is_not_created(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/catalog.db"
    check_catalog_writable(url)
    assert not is_catalog_created(url)
    with Catalog.open(url):
        assert is_catalog_created(url)
    check_catalog_writable(url)


def test_a_catalog_in_a_directory_that_is_a_file_is_not_writable(tmp_path: Path) -> None:
    (tmp_path / "state").write_text("")
    with pytest.raises(CatalogUnavailable, match="its directory cannot be written"):
        check_catalog_writable(f"sqlite:///{tmp_path}/state/catalog.db")
