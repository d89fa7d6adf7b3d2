"""What `cdc doctor` finds about deliveries: destinations, rules, messages, registries and missing packages."""

from __future__ import annotations

import subprocess
import sys
from importlib import import_module
from pathlib import Path
from socket import create_server
from typing import Any

import pytest

from cdc.config import Definition, load_definition
from cdc.delivery.delivery_checks import delivery_problems
from cdc.delivery.destinations import KINDS
from cdc.delivery.destinations.contract import ChecksAccess
from tests.cli.command import run
from tests.config.definitions import SOUND
from tests.delivery.sent_log import begin_log, schema_version
from tests.fixtures.schema_registry import running_registry
from tests.log.rows import message_row
from tests.log.sample_log import ITEMS, ORDERS, commit_rows

TABLES = [schema_version(ORDERS, "name"), schema_version(ITEMS, "name")]


def defined(folder: Path, *deliveries: str) -> Definition:
    path = folder / "shop.yaml"
    path.write_text(f"{SOUND}deliveries: [{', '.join(f'{{{one}}}' for one in deliveries)}]\n")
    return load_definition(path)


def found(folder: Path, *deliveries: str) -> list[tuple[str, str, str, bool]]:
    """Code, subject, message and whether it is fatal, of each problem."""
    problems = delivery_problems(defined(folder, *deliveries), TABLES)
    return [(one.code, one.subject, one.message, one.fatal) for one in problems]


def test_every_destination_with_a_server_or_a_directory_can_be_checked() -> None:
    without = set()
    for kind, destination in KINDS.items():
        module, _, name = destination.place.partition(":")
        if not issubclass(getattr(import_module(f"cdc.delivery.destinations.{module}"), name), ChecksAccess):
            without.add(kind)

    assert without == {"multicast", "stdout", "zeromq"}  # receivers connect to them


def test_a_delivery_without_problems_has_none_and_nothing_is_created(tmp_path: Path) -> None:
    assert found(tmp_path, "name: events, type: file, path: out") == []
    assert not (tmp_path / "out").exists()


def test_the_globs_of_views_are_not_compared_with_captured_tables(tmp_path: Path) -> None:
    path = tmp_path / "shop.yaml"
    view = "{name: shop.documents, key: [id], sql: SELECT id FROM shop.orders}"
    path.write_text(
        f"{SOUND}exclude: [shop.documents]\nviews: [{view}]\n"
        "deliveries: [{name: events, type: file, path: out, views: ['shop.d*']}]\n"
    )
    assert delivery_problems(load_definition(path), TABLES) == []


def test_a_directory_that_cannot_be_created_is_found(tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("")
    ((code, subject, message, fatal),) = found(tmp_path, "name: events, type: file, path: taken/out")

    assert (code, subject, fatal) == ("CDC-7001", "delivery events", True)
    assert "taken" in message


def test_a_receiver_that_does_not_listen_is_found_and_one_that_does_is_not(tmp_path: Path) -> None:
    with create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        listening = found(tmp_path, f"name: a, type: tcp, host: 127.0.0.1, port: {port}")
    closed = found(tmp_path, f"name: a, type: tcp, host: 127.0.0.1, port: {port}")

    assert listening == []
    assert [(code, subject) for code, subject, _, _ in closed] == [("CDC-7001", "delivery a")]


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ("tables: [shop.nothing]", "no captured table matches 'shop.nothing'"),
        ("rules: [{match: shop.nothing}]", "no table of the delivery matches 'shop.nothing'"),
        ("rules: [{match: 'shop.*'}, {match: shop.items}]", "an earlier rule applies to every table"),
        ("outbox: {table: shop.outbox}", "table 'shop.outbox' is not captured"),
        ("messages: [{prefix: 'a*', topic: t}, {prefix: ab, topic: u}]", "an earlier entry applies to every prefix"),
    ],
)
def test_a_rule_that_matches_nothing_is_a_warning(tmp_path: Path, fields: str, expected: str) -> None:
    ((_, _, message, fatal),) = found(tmp_path, f"name: events, type: file, path: out, {fields}")

    assert expected in message
    assert not fatal


@pytest.mark.parametrize("fields", ["rules: [{match: shop.items, key: [nothing]}]", "outbox: {table: shop.items}"])
def test_a_rule_that_does_not_fit_a_table_is_found(tmp_path: Path, fields: str) -> None:
    ((_, subject, message, fatal),) = found(tmp_path, f"name: events, type: file, path: out, {fields}")

    assert (subject, fatal) == ("delivery events", True)
    assert "has no column" in message


@pytest.mark.parametrize("rule", ["key: [name]", "topic: 'x/{name}'", "headers: {name: name}"])
def test_a_route_by_a_column_that_deletes_do_not_contain_is_found(tmp_path: Path, rule: str) -> None:
    ((code, subject, message, fatal),) = found(
        tmp_path, f"name: events, type: file, path: out, rules: [{{match: shop.orders, {rule}}}]"
    )

    assert (code, subject, fatal) == ("CDC-3010", "delivery events", True)
    assert "a delete does not contain: 'name'" in message
    assert "or leave deletes out by 'when'" in message


def test_a_prefix_that_no_message_of_the_log_has_is_a_warning(tmp_path: Path) -> None:
    messages = "messages: [{prefix: 'orders.*', topic: a}, {prefix: 'items.*', topic: b}]"
    definition = defined(tmp_path, f"name: events, type: file, path: out, {messages}")
    writer = begin_log(Path(str(definition.log.root)))
    commit_rows(writer, message_row(20, 0, prefix="orders.x", key=["orders.x", "t", "0/13"]))

    (problem,) = delivery_problems(definition, TABLES)
    assert "'items.*'" in problem.message
    assert not problem.fatal


def test_a_schema_registry_that_refuses_the_user_is_found(tmp_path: Path) -> None:
    with running_registry() as (url, state):
        avro = f"name: events, type: file, path: out, encoding: avro, schema_registry: {{url: '{url}'}}"
        accepted = found(tmp_path, avro)
        state.login = ("user", "password")
        refused = found(tmp_path, avro)

    assert accepted == []
    assert [(code, subject) for code, subject, _, _ in refused] == [("CDC-7002", "delivery events")]
    assert {request.partition(" ")[0] for request in state.requests} == {"GET"}


def test_a_missing_package_is_found(tmp_path: Path) -> None:
    defined(tmp_path, "name: events, type: redis, url: 'redis://127.0.0.1:1'")
    code = (
        "import sys; from pathlib import Path; sys.modules['redis'] = None\n"
        "from cdc.config import load_definition\n"
        "from cdc.delivery.delivery_checks import delivery_problems\n"
        f"print(delivery_problems(load_definition(Path({str(tmp_path / 'shop.yaml')!r})), [])[0].message)"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)

    assert "cdc[redis]" in ended.stdout, ended.stderr


def test_doctor_reports_deliveries(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    defined(tmp_path, "name: events, type: tcp, host: 127.0.0.1, port: 1")
    outcome = run(capsys, "doctor", "-c", tmp_path / "shop.yaml", "--json")
    problems: list[dict[str, Any]] = outcome.envelope["result"]["problems"]

    assert outcome.status == 3
    assert [one["code"] for one in problems if one["subject"] == "delivery events"] == ["CDC-7001"]
