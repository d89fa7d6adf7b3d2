"""`cdc log` and `cdc tail`: the unit is a command over a log in a folder."""

from __future__ import annotations

import json
import shutil
import signal
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from cdc.log.writer import LogWriter
from cdc.position import Position
from tests.cli.command import run
from tests.cli.trimmed import Folder
from tests.fixtures.forked import start
from tests.fixtures.waiting import until
from tests.log.rows import IDENTITY, LIMITS, info, message_row, row, schema_of, table


@pytest.fixture
def definition(tmp_path: Path) -> Path:
    """A definition whose log has a schema row, ten inserts of two rows each, a key change, a delete elsewhere."""
    path = tmp_path / "pipeline.yaml"
    path.write_text(
        f"name: shop\nsource: {{dsn: 'postgresql://localhost/shop'}}\ntables: [{{match: 'shop.*'}}]\n"
        f"log: {{path: '{tmp_path}/log'}}\n"
    )
    shutil.copytree(Path(prepared().name, "log"), tmp_path / "log")
    return path


@cache
def prepared() -> TemporaryDirectory[str]:
    """That log in a folder: to write it takes longer than to copy it."""
    folder = TemporaryDirectory()
    writer = LogWriter.open(Path(folder.name, "log"), IDENTITY, LIMITS)
    start = row(100, 0, op="s", key=None, after=None, payload=schema_of(16384, "name").to_json())
    append(writer, 100, start)
    for position in range(110, 210, 10):
        append(writer, position, row(position, 0), row(position, 1))
    append(
        writer,
        300,
        row(300, 0, op="d", key=["1"], before=[(1, "1")], after=None),
        row(300, 1, op="u", key=["5"], old_key=["1"], after=[(1, "5"), (2, "x")]),
    )
    append(writer, 310, row(310, 0, relation=2, topic="shop.other", op="d", before=[(1, "0")], after=None))
    return folder


def append(writer: LogWriter, last: int, *rows: dict[str, object]) -> None:
    writer.commit(writer.stage(table(*rows)), info(last))


def tail(capsys: pytest.CaptureFixture[str], definition: Path, *options: str) -> list[dict[str, object]]:
    outcome = run(capsys, "tail", "orders", "-c", definition, "--json", *options)
    assert outcome.status == 0, outcome.errors
    changes: list[dict[str, object]] = outcome.envelope["result"]["changes"]
    return changes


def test_ls_sums_rows_and_names_the_range(capsys: pytest.CaptureFixture[str], definition: Path) -> None:
    result = run(capsys, "log", "ls", "-c", definition, "--json").envelope["result"]
    assert result["durable"] == "0/136"
    (segment,) = result["segments"]
    assert (segment["rows"], segment["files"], segment["first"], segment["last"]) == (24, 13, "0/64", "0/136")
    listed = run(capsys, "log", "ls", "--files", "-c", definition)
    assert listed.output.count(".parquet") == 13


def test_inspect_tells_whose_log_it_is_and_counts_operations(
    capsys: pytest.CaptureFixture[str], definition: Path
) -> None:
    result = run(capsys, "log", "inspect", "-c", definition, "--json").envelope["result"]
    assert (result["system_id"], result["database"], result["durable"]) == ("7000", "shop", "0/136")
    assert result["tables"] == {"shop.orders": {"c": 20, "d": 1, "s": 1, "u": 1}, "shop.other": {"d": 1}}


def test_inspect_shows_one_transaction(capsys: pytest.CaptureFixture[str], definition: Path) -> None:
    result = run(capsys, "log", "inspect", "0/12C", "-c", definition, "--json").envelope["result"]
    assert [(change["op"], change["ordinal"]) for change in result["changes"]] == [("d", 0), ("u", 1)]
    assert result["changes"][1]["after"] == {"id": 5, "name": "x"}


def test_inspect_of_a_position_without_rows_is_a_usage_error(
    capsys: pytest.CaptureFixture[str], definition: Path
) -> None:
    assert run(capsys, "log", "inspect", "0/65", "-c", definition).status == 2
    assert "CDC-1" in run(capsys, "log", "inspect", "nonsense", "-c", definition).errors


def test_tail_shows_the_last_changes_of_one_table_in_order(
    capsys: pytest.CaptureFixture[str], definition: Path
) -> None:
    found = tail(capsys, definition, "-n", "3")
    assert [(c["position"], c["ordinal"]) for c in found] == [("0/C8", 1), ("0/12C", 0), ("0/12C", 1)]
    assert len(tail(capsys, definition)) == 20
    assert tail(capsys, definition, "-n", "0") == []


def test_tail_without_a_change_says_why(capsys: pytest.CaptureFixture[str], definition: Path) -> None:
    outcome = run(capsys, "tail", "orders", "--op", "t", "-c", definition)
    assert (outcome.output, outcome.status) == ("", 0)
    assert "the log has no such changes yet" in outcome.errors
    assert run(capsys, "tail", "orders", "-n", "0", "-c", definition).errors == ""


def test_tail_of_a_compacted_log_says_that_single_changes_are_gone(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    outcome = run(capsys, "tail", "orders", "--op", "s", "-c", Folder.half(tmp_path).path)
    assert outcome.output == ""
    assert "no such changes after 0/96: single changes up to there are compacted" in outcome.errors
    assert "cdc query" in outcome.errors


def test_tail_since_a_position_includes_it(capsys: pytest.CaptureFixture[str], definition: Path) -> None:
    found = tail(capsys, definition, "--since", str(Position(200)))
    assert [c["position"] for c in found] == ["0/C8", "0/C8", "0/12C", "0/12C"]


def test_tail_since_a_time_takes_what_committed_then_or_later(
    capsys: pytest.CaptureFixture[str], definition: Path
) -> None:
    found = tail(capsys, definition, "--since", "2023-11-14T22:13:20.000190Z")
    assert [c["position"] for c in found] == ["0/BE", "0/BE", "0/C8", "0/C8", "0/12C", "0/12C"]
    assert tail(capsys, definition, "--since", "2030-01-01") == []


def test_tail_of_some_operations_counts_only_those(capsys: pytest.CaptureFixture[str], definition: Path) -> None:
    assert [c["op"] for c in tail(capsys, definition, "--op", "c", "-n", "2")] == ["c", "c"]
    assert [c["op"] for c in tail(capsys, definition, "--op", "s,d")] == ["s", "d"]


def test_tail_prints_one_json_object_per_line_in_foreign_formats(
    capsys: pytest.CaptureFixture[str], definition: Path
) -> None:
    outcome = run(capsys, "tail", "shop.orders", "-n", "3", "--format", "debezium", "-c", definition)
    lines = [json.loads(text) for text in outcome.output.splitlines()]
    assert [line["value"] and line["value"]["op"] for line in lines] == ["d", None, "c"]
    flat = run(capsys, "tail", "shop.*", "-n", "1", "--format", "flat", "-c", definition)
    assert json.loads(flat.output)["__deleted"] == "true"


def test_tail_for_people_fits_a_line_per_change(capsys: pytest.CaptureFixture[str], definition: Path) -> None:
    outcome = run(capsys, "tail", "orders", "-n", "1", "-c", definition)
    place, _, operation, topic, *rest = outcome.output.split()
    assert (place, operation, topic) == ("0/12C#1", "u", "shop.orders")
    assert "after=" in " ".join(rest)


@pytest.fixture
def with_messages(definition: Path) -> Path:
    """The same with messages inside and outside a transaction, and one that an older version logged."""
    writer = LogWriter.open(definition.parent / "log", IDENTITY, LIMITS)
    append(
        writer,
        320,
        message_row(315, xid=0, key=["orders.seen", "f", "0/13C"], payload=b"\xff"),
        message_row(320, 0, prefix="orders.\x1b'é"),
        row(320, 1),
        message_row(320, 2, key=None, payload=b"old"),
    )
    return definition


def test_tail_selects_messages_by_prefix(capsys: pytest.CaptureFixture[str], with_messages: Path) -> None:
    def found(*options: str) -> list[tuple[str, int, str | None]]:
        outcome = run(capsys, "tail", *options, "-c", with_messages, "--json")
        assert outcome.status == 0, outcome.errors
        changes = outcome.envelope["result"]["changes"]
        return [(change["position"], change["ordinal"], change.get("prefix")) for change in changes]

    seen, created, old = ("0/13B", 0, "orders.seen"), ("0/140", 0, "orders.\x1b'é"), ("0/140", 2, None)
    assert found("--messages", "orders.*") == [seen, created]
    assert found("--messages", "*") == [seen, created, old]
    assert found("--messages", "*", "-n", "1") == [old]
    assert found("--messages", "other") == []
    assert found("--messages", "*.seen", "--since", "0/140") == []
    assert found("orders", "--messages", "orders.?*é", "-n", "2") == [created, ("0/140", 1, None)]


def test_tail_shows_a_message_on_one_safe_line(capsys: pytest.CaptureFixture[str], with_messages: Path) -> None:
    outcome = run(capsys, "tail", "--messages", "*", "-c", with_messages)
    seen, created, old = outcome.output.splitlines()
    assert seen.startswith("0/13B#0 ")
    assert seen.endswith('prefix="orders.seen" transactional=false lsn="0/13C" payload=/w==')
    assert r'''prefix="orders.\u001b'é" transactional=true lsn="0/13F"''' in created
    assert created.endswith('content="hello"')
    assert old.endswith('prefix=null transactional=null lsn=null content="old"')


def test_tail_of_neither_a_table_nor_messages_is_a_usage_error(
    capsys: pytest.CaptureFixture[str], definition: Path
) -> None:
    outcome = run(capsys, "tail", "-c", definition)
    assert outcome.status == 2
    assert "--messages" in outcome.errors


def test_inspect_shows_the_messages_of_a_transaction_and_a_message_outside_transactions(
    capsys: pytest.CaptureFixture[str], with_messages: Path
) -> None:
    inside = run(capsys, "log", "inspect", "0/140", "-c", with_messages, "--json").envelope["result"]["changes"]
    assert [(change["op"], change.get("prefix")) for change in inside] == [
        ("m", "orders.\x1b'é"),
        ("c", None),
        ("m", None),
    ]
    outside = run(capsys, "log", "inspect", "0/13B", "-c", with_messages)
    assert 'prefix="orders.seen"' in outside.output
    assert "a message outside transactions at 0/13B" in outside.output


WRONG = [("--format", "avro"), ("--op", "x"), ("--since", "yesterday"), ("--since", "1/x")]


def test_a_wrong_option_is_a_usage_error(capsys: pytest.CaptureFixture[str], definition: Path) -> None:
    for options in WRONG:
        outcome = run(capsys, "tail", "orders", "-c", definition, *options)
        assert (outcome.status, "→" in outcome.errors) == (2, True), options


def test_tail_follows_what_is_appended(definition: Path, tmp_path: Path) -> None:
    printed = tmp_path / "printed"
    with printed.open("wb") as output:
        child = start("cdc", "tail", "orders", "-f", "-n", "1", "--json", "-c", definition, output=output)
    try:
        until(lambda: printed.read_text().count("\n") == 1, printed.read_text)
        writer = LogWriter.open(definition.parent / "log", IDENTITY, LIMITS)
        append(writer, 400, row(400, 0), row(400, 1))
        until(lambda: printed.read_text().count("\n") == 3, printed.read_text)
        child.send_signal(signal.SIGINT)
        child.wait(20)
    finally:
        child.kill()
    found = [json.loads(line) for line in printed.read_text().splitlines()]
    assert [(c["position"], c["ordinal"]) for c in found] == [("0/12C", 1), ("0/190", 0), ("0/190", 1)]


def test_tail_of_a_table_that_the_log_does_not_have_names_the_nearest(
    capsys: pytest.CaptureFixture[str], definition: Path
) -> None:
    fix = f"→ did you mean 'shop.orders'? run 'cdc tables ls -c {definition}' to see the tables"
    for options in ([], ["-n", "0"], ["--since", "2030-01-01"], ["-f"]):
        outcome = run(capsys, "tail", "ordres", "-c", definition, *options)
        assert (outcome.status, outcome.output) == (2, ""), options
        assert "the log has no table 'ordres'" in outcome.errors
        assert fix in outcome.errors
