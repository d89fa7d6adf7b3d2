"""Catalog: every store keeps what it is given, for threads and processes that share one database."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta, timezone
from pathlib import Path

import pytest

from cdc.catalog import Catalog, CommandState, DeadLetter, ProcessReport, SinkProgress, TableProgress
from cdc.errors import CatalogUnavailable, CatalogUnusable, ConfigError

NOON = datetime(2026, 1, 2, 12, tzinfo=UTC)
POSTER = """
import sys
from cdc.catalog import Catalog
with Catalog.open(sys.argv[1]) as catalog:
    for n in range(25):
        catalog.commands.post("shop", "stop", {"n": n})
"""


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path}/state/catalog.db"


@pytest.fixture
def catalog(url: str) -> Iterator[Catalog]:
    with Catalog.open(url) as opened:
        yield opened


READER = """
import sys
from cdc.catalog import Catalog
with Catalog.open(sys.argv[1]) as catalog:
    print(len(catalog.pipelines.ls()))
"""


def test_opening_a_catalog_twice_does_not_cost_the_first_its_locks(url: str, catalog: Catalog) -> None:
    catalog.pipelines.put("shop", "one")
    with Catalog.open(url):  # a second time in this process, as the parts of a reader do
        pass
    for _ in range(2):  # a process that finds no locks deletes the WAL when it ends, under us
        subprocess.run([sys.executable, "-c", READER, url], check=True, capture_output=True)
    catalog.pipelines.put("other", "two")
    shown = subprocess.run([sys.executable, "-c", READER, url], check=True, capture_output=True, text=True)

    assert shown.stdout.strip() == "2"


def test_a_definition_is_replaced_by_the_next(catalog: Catalog) -> None:
    catalog.pipelines.put("shop", "one")
    catalog.pipelines.put("shop", "two")
    catalog.pipelines.put("billing", "three")
    assert [(p.name, p.definition) for p in catalog.pipelines.ls()] == [("billing", "three"), ("shop", "two")]
    found = catalog.pipelines.get("shop")
    assert found is not None
    assert found.updated_at.tzinfo is not None
    assert catalog.pipelines.get("none") is None


def test_a_process_has_one_row(catalog: Catalog) -> None:
    catalog.processes.report(ProcessReport("shop", "reader", 1, "starting"))
    catalog.processes.report(ProcessReport("shop", "reader", 2, "failed", {"code": "CDC-2001"}, [["lag", 1.5]]))
    catalog.processes.report(ProcessReport("other", "reader", 3, "running"))
    (report,) = catalog.processes.ls("shop")
    assert (report.pid, report.state, report.error, report.figures) == (
        2,
        "failed",
        {"code": "CDC-2001"},
        [["lag", 1.5]],
    )
    assert report.reported_at is not None


def test_a_sink_keeps_the_largest_position_and_the_zone_of_its_time(catalog: Catalog) -> None:
    east = NOON.astimezone(timezone(timedelta(hours=5)))
    catalog.sinks.record("shop", SinkProgress("lake", 2**63 - 1, east, 0.25, "streaming"))
    (progress,) = catalog.sinks.ls("shop")
    assert progress.position == 2**63 - 1
    assert progress.committed_at == NOON
    assert progress.committed_at.utcoffset() == timedelta(0)


def test_tables_not_named_stay_as_they_are(catalog: Catalog) -> None:
    first = [TableProgress("", f"shop.t{n}", "snapshot", None, 1, None, n) for n in range(3)]
    catalog.tables.record("shop", first)
    catalog.tables.record("shop", [TableProgress("", "shop.t1", "failed", "no key", 2, 7, 9)])
    catalog.tables.record("shop", [])
    found = catalog.tables.ls("shop")
    assert [(t.topic, t.state, t.rows) for t in found] == [
        ("shop.t0", "snapshot", 0),
        ("shop.t1", "failed", 9),
        ("shop.t2", "snapshot", 2),
    ]


def letter(sink: str, position: int, *key: str) -> DeadLetter:
    return DeadLetter(sink=sink, topic="shop.t", key=key, position=position, ordinal=0, code="CDC-3001", message="no",
                      added_at=datetime(2026, 1, 2, tzinfo=UTC))  # fmt: skip


def test_dead_letters_are_those_that_their_sink_shows_now(catalog: Catalog) -> None:
    catalog.dead_letters.mirror("shop", "lake", [letter("lake", 10, "1"), letter("lake", 11, "2", "b")])
    catalog.dead_letters.mirror("shop", "find", [letter("find", 9, "1")])
    assert catalog.dead_letters.ls("shop") == [
        letter("find", 9, "1"),
        letter("lake", 10, "1"),
        letter("lake", 11, "2", "b"),
    ]
    catalog.dead_letters.mirror("shop", "lake", [letter("lake", 12, "1")])
    assert [(found.sink, found.position) for found in catalog.dead_letters.ls("shop")] == [("find", 9), ("lake", 12)]
    catalog.dead_letters.mirror("shop", "lake", [])
    assert [found.sink for found in catalog.dead_letters.ls("shop")] == ["find"]
    assert catalog.dead_letters.ls("other") == []


def test_a_letter_keeps_its_name_while_its_key_is_parked_and_shares_it_with_no_other(catalog: Catalog) -> None:
    assert letter("lake", 10, "1").id == letter("lake", 99, "1").id
    assert len({one.id for one in (letter("lake", 10, "1"), letter("find", 10, "1"), letter("lake", 10, "1", ""))}) == 3


def test_a_command_is_finished_once(catalog: Catalog) -> None:
    first = catalog.commands.post("shop", "stop", {"sink": "lake"})
    second = catalog.commands.post("shop", "stop", {})
    assert [command.id for command in catalog.commands.pending("shop", "stop")] == [first, second]
    catalog.commands.finish(first, {"at": 1}, ok=False)
    catalog.commands.finish(first, {"at": 2})
    catalog.commands.finish(999, {})
    found = catalog.commands.get(first)
    assert found is not None
    assert (found.state, found.result, found.payload) == (CommandState.FAILED, {"at": 1}, {"sink": "lake"})
    assert [command.id for command in catalog.commands.pending("shop", "stop")] == [second]
    assert catalog.commands.pending("other", "stop") == []
    assert catalog.commands.get(999) is None


def test_the_audit_shows_the_newest_first(catalog: Catalog) -> None:
    for action in ("put", "pause", "resume"):
        catalog.audit.write("ann", action, "shop", {"of": action})
    assert [(line.action, line.detail["of"]) for line in catalog.audit.ls(2)] == [
        ("resume", "resume"),
        ("pause", "pause"),
    ]


def test_a_lease_is_held_by_one_until_it_expires(catalog: Catalog) -> None:
    leases, later = catalog.leases, NOON + timedelta(seconds=11)
    assert leases.acquire("apply", "a", 10, now=NOON)
    assert not leases.acquire("apply", "b", 10, now=NOON)
    assert leases.acquire("apply", "a", 10, now=NOON)
    assert leases.holder("apply", now=NOON) == "a"
    assert leases.holder("apply", now=later) is None
    assert leases.acquire("apply", "b", 10, now=later)
    leases.release("apply", "a")
    assert leases.holder("apply", now=later) == "b"
    leases.release("apply", "b")
    assert leases.holder("apply", now=later) is None


def test_one_thread_of_many_gets_a_lease(catalog: Catalog) -> None:
    with ThreadPoolExecutor(8) as pool:
        taken = list(pool.map(lambda n: catalog.leases.acquire("apply", f"h{n}", 60), range(16)))
    assert taken.count(True) == 1


def test_threads_lose_no_command(catalog: Catalog) -> None:
    with ThreadPoolExecutor(8) as pool:
        ids = list(pool.map(lambda n: catalog.commands.post("shop", "stop", {"n": n}), range(40)))
    assert len(set(ids)) == 40
    assert len(catalog.commands.pending("shop", "stop")) == 40


def test_processes_that_begin_together_make_one_catalog_and_lose_nothing(url: str) -> None:
    started = [subprocess.Popen([sys.executable, "-c", POSTER, url]) for _ in range(3)]
    assert [process.wait(60) for process in started] == [0, 0, 0]
    with Catalog.open(url) as catalog:
        assert len(catalog.commands.pending("shop", "stop")) == 75


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


def test_a_table_is_refused_until_it_is_not_and_others_stay_as_they_are(catalog: Catalog) -> None:
    other = [TableProgress(sink, "shop.t1", "streaming", None, 1, None, 5) for sink in ("", "lake")]
    catalog.tables.record("shop", other)
    for refused in ({"shop.bare": "no key", "shop.u": "no right"}, {"shop.bare": "unlogged"}, {}):
        catalog.tables.record_refused("shop", refused)
        found = catalog.tables.ls("shop")
        assert {t.topic: t.reason for t in found if t.state == "refused"} == refused
        assert [t.topic for t in found if t.state == "streaming"] == ["shop.t1", "shop.t1"]


def test_a_database_without_its_tables_is_unavailable_when_it_may_not_be_changed(url: str) -> None:
    with pytest.raises(CatalogUnavailable, match="at revision None, expected"):
        Catalog.open(url, migrate=False)


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


def test_a_moment_without_zone_is_refused(catalog: Catalog) -> None:
    naive = NOON.replace(tzinfo=None)
    with pytest.raises(CatalogUnavailable):
        catalog.sinks.record("shop", SinkProgress("lake", 1, naive, 0.0, "streaming"))


def test_a_command_says_whose_it_is_and_when_it_was_posted_and_finished(catalog: Catalog) -> None:
    before = datetime.now(UTC)
    first, second = catalog.commands.post("shop", "stop", {}), catalog.commands.post("shop", "stop", {})
    catalog.commands.finish(first, {})
    newest, older = catalog.commands.ls("shop", "stop")
    assert (newest.id, newest.pipeline, newest.finished_at) == (second, "shop", None)
    assert older.finished_at is not None
    assert before <= older.posted_at <= older.finished_at
    assert catalog.commands.ls("shop", "stop", limit=1) == [newest]
