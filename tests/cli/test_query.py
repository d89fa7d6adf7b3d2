"""cdc query: one cut of the tables of a Delta sink, the newest or a past one."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cdc.stores.published import Published
from pipelines.sinks.delta import DeltaSettings, DeltaSink
from tests.cli.command import run
from tests.contracts.folded import ORDERS, batch, put

ITEMS = replace(ORDERS, relation=2, oid=2, name="items")


@pytest.fixture(name="definition", scope="module")
def _definition(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A sink that published cuts at 0/14 and 0/28; the second table is not complete."""
    tmp_path = tmp_path_factory.mktemp("query")
    path = f"{tmp_path}/lake/{{schema}}/{{table}}"
    sink = DeltaSink(DeltaSettings("lake", path))
    sink.open("log-1")
    for after, upto in ((0, 20), (20, 40)):
        orders = sink.apply(batch([put(upto, "o", upto)], after, upto, generation=None if after else 1))
        items = sink.apply(batch([put(upto, "i", upto)], after, upto, ITEMS))
        sink.publish(Published(upto, upto * 1_000_000, {1: orders, 2: items}))
    definition = tmp_path / "shop.yaml"
    definition.write_text(
        "version: 1\nname: shop\nsource: {dsn: 'postgresql://nobody@127.0.0.1:1/no'}\ntables: [{match: 'shop.*'}]\n"
        f"log: {{path: '{tmp_path}/log'}}\nsinks: [{{type: delta, name: lake, path: '{path}'}}]\n"
    )
    return definition


@pytest.mark.parametrize(
    ("at", "rows", "cut"),
    [
        ([], [[20], [40]], {"position": "0/28", "committed_at": "1970-01-01T00:00:40.000Z"}),
        (["--at", "0/14"], [[20]], {"position": "0/14", "committed_at": "1970-01-01T00:00:20.000Z"}),
        (["--at", "1970-01-01T00:00:39Z"], [[20]], {"position": "0/14", "committed_at": "1970-01-01T00:00:20.000Z"}),
        (["--at", "latest"], [[20], [40]], None),
    ],
)
def test_rows_come_with_the_cut_that_they_are_of(
    definition: Path,
    capsys: pytest.CaptureFixture[str],
    at: list[str],
    rows: list[list[int]],
    cut: dict[str, Any] | None,
) -> None:
    said = run(capsys, "query", "select id from shop.orders order by id", "-c", definition, "--json", *at).envelope

    assert said["result"]["rows"] == rows
    assert said["result"]["cut"] == (cut and cut | {"apart": {"shop.items": "snapshotting"}})


def test_a_person_reads_which_cut_it_is_and_which_tables_do_not_belong_to_it(
    definition: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    printed = run(capsys, "query", "select count(*) from orders", "-c", definition, "--at", "0/20").output

    assert "1 row at 0/14, committed 1970-01-01T00:00:20.000Z; shop.items is not part of it: snapshotting" in printed


@pytest.mark.parametrize(
    ("sql", "at", "expected"),
    [
        ("select 1 from orders", "0/13", (1, "the oldest is 0/14")),
        ("select 1 from orders", "0/29", (1, "the newest is 0/28")),
        ("select 1 from shop.items", "published", (1, "not part of the cut")),
        ("select 1 from shop.orders", "noon", (2, "unknown moment 'noon'")),
        ("select 1 from shop.other", "published", (2, "shop.orders")),
    ],
)
def test_what_cannot_be_answered_is_an_error_that_says_what_can(
    definition: Path, capsys: pytest.CaptureFixture[str], sql: str, at: str, expected: tuple[int, str]
) -> None:
    outcome = run(capsys, "query", sql, "-c", definition, "--at", at)

    assert outcome.status == expected[0]
    assert expected[1] in outcome.errors + outcome.output
