"""cdc query: one cut of the tables of a Delta sink, the newest or a past one."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cdc.targets.published_record import Published
from cdc.targets.read_only_guard import kernel_version
from pipelines.sinks.delta.settings import DeltaSettings
from pipelines.sinks.delta.sink import DeltaSink
from tests.cli.command import run
from tests.contracts.folded import ORDERS, batch, put
from tests.fixtures import forked
from tests.pipelines.sinks.added_features import add_features, commit

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
    return written(tmp_path, path)


def written(folder: Path, path: str) -> Path:
    """A definition whose lake lies there."""
    definition = folder / "shop.yaml"
    definition.write_text(
        "version: 1\nname: shop\nsource: {dsn: 'postgresql://nobody@127.0.0.1:1/no'}\ntables: [{match: 'shop.*'}]\n"
        f"log: {{path: '{folder}/log'}}\nsinks: [{{type: delta, name: lake, path: '{path}'}}]\n"
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

    assert "1 row at 0/14, committed 1970-01-01T00:00:20.000Z; shop.items is not part of the cut: snap" in printed


COLUMNS = [f"'value {n}' as column_{n}" for n in range(12)]
WIDE = f"select id, {', '.join(COLUMNS)} from orders order by id"


def test_a_row_is_one_line_for_whoever_reads_the_output_however_wide_it_is(
    definition: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = run(capsys, "query", WIDE, "-c", definition).output.splitlines()

    rows = [line for line in lines if "value 0" in line]
    assert len(rows) == 2
    assert all(f"value {n}" in row for row in rows for n in range(12))


def test_rows_that_are_wider_than_a_terminal_have_a_line_for_each_column(
    definition: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "60")
    wide = run(capsys, "query", WIDE, "-c", definition).output
    narrow = run(capsys, "query", "select id from orders order by id", "-c", definition).output

    assert [line.split(maxsplit=1) for line in wide.splitlines()[:3]] == [
        ["──", "row 1"],
        ["id", "20"],
        ["column_0", "value 0"],
    ]
    assert "── row" not in narrow


@pytest.mark.parametrize(
    ("sql", "at", "expected"),
    [
        ("select 1 from orders", "0/13", (1, "the oldest cut is 0/14")),
        ("select 1 from orders", "0/29", (1, "the newest cut is 0/28")),
        ("select 1 from shop.items", "published", (1, "not part of the cut")),
        ("select 1 from shop.orders", "noon", (2, "malformed point in time 'noon'")),
        ("select 1 from shop.other", "published", (2, "shop.orders")),
    ],
)
def test_what_cannot_be_answered_is_an_error_that_says_what_can(
    definition: Path, capsys: pytest.CaptureFixture[str], sql: str, at: str, expected: tuple[int, str]
) -> None:
    outcome = run(capsys, "query", sql, "-c", definition, "--at", at)

    assert outcome.status == expected[0]
    assert expected[1] in outcome.errors + outcome.output


def test_a_table_that_delta_rs_does_not_read_is_named_with_its_columns_and_who_reads_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    template = f"{tmp_path}/lake/{{schema}}/{{table}}"
    definition, sink = written(tmp_path, template), DeltaSink(DeltaSettings("lake", template))
    sink.open("log-1")
    records = [sink.apply(batch([put(1, "o", 20)], 0, 20, schema, generation=1)) for schema in (ORDERS, ITEMS)]
    sink.publish(Published(20, 20_000_000, {1: records[0], 2: records[1]}))
    widen(records[0].target, "price")

    outcome = run(capsys, "query", "select * from orders, items", "-c", definition, "--at", "latest", "--json")
    error = outcome.envelope["error"]
    assert (outcome.status, error["code"]) == (1, "CDC-3017")
    assert error["message"] == (
        "the target of table 'shop.orders' has table features that delta-rs does not read: TypeWidening "
        "(the type of column 'price' was widened)"
    )
    assert error["suggestion"].startswith(
        f"read the target with Spark: pipelines.lake.at(spark, {template!r})['shop.orders']; or move the target away"
    )
    assert "'cdc replay SINK --tables shop.orders -c " in error["suggestion"]
    for sql, at in (("select id from items", "latest"), ("select id from orders", "published")):
        assert run(capsys, "query", sql, "-c", definition, "--at", at, "--json").envelope["result"]["rows"] == [[1]]

    add_features(records[0].target, ["unheard"])
    unopened = run(capsys, "query", "select * from orders", "-c", definition, "--at", "latest")
    assert unopened.status == 1
    assert "CDC-3017 the target of table 'shop.orders' has table features" in unopened.errors
    assert "unheard" in unopened.errors


def widen(uri: str, column: str) -> None:
    """As Spark leaves a table of which it widened a column."""
    (first, *_) = sorted((Path(uri) / "_delta_log").glob("*.json"))
    actions = map(json.loads, first.read_text().splitlines())
    (metadata,) = (action["metaData"] for action in actions if "metaData" in action)
    schema = json.loads(metadata["schemaString"])
    (widened,) = (field for field in schema["fields"] if field["name"] == column)
    widened["metadata"]["delta.typeChanges"] = [{"fromType": "decimal(8,2)", "toType": widened["type"]}]
    add_features(uri, ["typeWidening"])
    commit(uri, {"metaData": {**metadata, "schemaString": json.dumps(schema)}})


@pytest.mark.parametrize(
    "sql", ["copy orders to '{file}' stored as csv", "explain analyze copy (select 1) to '{file}'", "drop table orders"]
)
def test_what_is_not_a_query_is_refused_and_no_file_is_touched(
    definition: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path, sql: str
) -> None:
    kept = tmp_path / "kept.csv"
    kept.write_text("mine", encoding="utf-8")

    outcome = run(capsys, "query", sql.format(file=kept), "-c", definition, "--json")

    assert (outcome.status, outcome.envelope["error"]["code"]) == (2, "CDC-5014")
    assert [*tmp_path.iterdir()] == [kept]
    assert kept.read_text(encoding="utf-8") == "mine"


@pytest.mark.parametrize(
    ("sql", "expected"),
    [
        ("select 1/0", (1, "CDC-5015", "query failed: Divide by zero error")),
        ("select id / 0 from orders", (1, "CDC-5015", "query failed: Divide by zero error")),
        ("select cast(item as int) from orders", (1, "CDC-5015", "query failed: Cannot cast string 'o' to value of")),
        ("select itm from orders", (2, "CDC-1000", "query refused: No field named itm. Did you mean 'orders.item'?")),
        ("select * from ordrs", (2, "CDC-1000", "query refused: table 'ordrs' not found")),
    ],
)
def test_what_the_engine_cannot_do_is_one_line_with_a_code(
    definition: Path, capsys: pytest.CaptureFixture[str], sql: str, expected: tuple[int, str, str]
) -> None:
    outcome = run(capsys, "query", sql, "-c", definition, "--json")

    error = outcome.envelope["error"]
    assert (outcome.status, error["code"]) == expected[:2]
    assert error["message"].startswith(expected[2])
    assert "\n" not in error["message"]


def test_the_nearest_table_is_named(definition: Path, capsys: pytest.CaptureFixture[str]) -> None:
    outcome = run(capsys, "query", "select * from ordrs", "-c", definition)

    assert (
        "→ did you mean 'shop.orders'? correct the statement; the sink has these tables: shop.items, shop.orders"
        in outcome.errors
    )


UNPARSED = """
import sys
from cdc.targets import lake_reader
lake_reader.require_query = lambda builder, sql: None
from cdc.__main__ import main
definition, *targets = sys.argv[1:]
for target in targets:
    sql = f"copy (select id from orders where false) to '{target}' stored as csv"
    sys.argv[1:] = ["query", sql, "-c", definition]
    print(main())
"""
"""The command without its first barrier."""


@pytest.mark.skipif(kernel_version() == 0, reason="the kernel has no Landlock")
def test_the_process_of_a_query_cannot_write_even_where_the_parser_lets_it_pass(
    definition: Path, tmp_path: Path
) -> None:
    kept = tmp_path / "kept.csv"
    kept.write_text("mine", encoding="utf-8")

    done = forked.run("tests.run_code", UNPARSED, definition, kept, tmp_path / "made.csv")
    assert (done.status, done.output) == (0, "1\n1\n"), done.errors
    assert done.errors.count("CDC-5015 query failed: ") == 2
    assert [*tmp_path.iterdir()] == [kept]
    assert kept.read_text(encoding="utf-8") == "mine"


def test_the_rows_of_a_query_go_where_the_shell_sends_them(definition: Path, tmp_path: Path) -> None:
    with (tmp_path / "rows.json").open("w") as file:
        ended = forked.start("cdc", "query", "select id from orders", "-c", definition, "--json", output=file)
        assert ended.wait(60.0) == 0

    assert json.loads((tmp_path / "rows.json").read_text(encoding="utf-8"))["ok"]
