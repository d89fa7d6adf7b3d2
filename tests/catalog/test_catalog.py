"""Catalog: every store keeps what it is given, for threads and processes that share one database."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from cdc.catalog import Catalog
from cdc.errors import CatalogUnavailable
from tests.fixtures import forked

NOON = datetime(2026, 1, 2, 12, tzinfo=UTC)
POSTER = """
import sys
from cdc.catalog import Catalog
with Catalog.open(sys.argv[1]) as catalog:
    for n in range(25):
        catalog.commands.post("shop", "stop", {"n": n})
"""


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
        assert forked.run("tests.run_code", READER, url).status == 0
    catalog.pipelines.put("other", "two")

    assert forked.run("tests.run_code", READER, url).output.strip() == "2"


def test_a_definition_is_replaced_by_the_next(catalog: Catalog) -> None:
    catalog.pipelines.put("shop", "one")
    catalog.pipelines.put("shop", "two")
    catalog.pipelines.put("billing", "three")
    assert [(p.name, p.definition) for p in catalog.pipelines.ls()] == [("billing", "three"), ("shop", "two")]
    found = catalog.pipelines.get("shop")
    assert found is not None
    assert found.updated_at.tzinfo is not None
    assert catalog.pipelines.get("none") is None


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


def test_processes_that_begin_together_make_one_catalog_and_lose_nothing(url: str, tmp_path: Path) -> None:
    with (tmp_path / "out").open("ab") as output:
        started = [forked.start("tests.run_code", POSTER, url, output=output) for _ in range(3)]
    assert [process.wait(60) for process in started] == [0, 0, 0], (tmp_path / "out").read_text()
    with Catalog.open(url) as catalog:
        assert len(catalog.commands.pending("shop", "stop")) == 75


def test_a_database_without_its_tables_is_unavailable_when_it_may_not_be_changed(url: str) -> None:
    with pytest.raises(CatalogUnavailable, match="no process of the pipeline has created it yet"):
        Catalog.open(url, migrate=False)
