"""Deliveries of a definition: names, topics and rules are checked before anything runs."""

from __future__ import annotations

from pathlib import Path

import pytest

from cdc.config import load_definition
from cdc.config.deliveries import Drop, EventFormat, Overload, StartAt
from cdc.errors import ConfigError
from tests.config.definitions import SOUND, write


def load(tmp_path: Path, delivery: str) -> object:
    """Load a definition with one delivery, as YAML flow text."""
    return load_definition(write(tmp_path, f"{SOUND}deliveries: [{delivery}]\n"))


def test_defaults_send_every_change_of_every_table(tmp_path: Path) -> None:
    path = write(tmp_path, SOUND + "deliveries: [{name: copy, type: file, path: out}]\n")

    (found,) = load_definition(path).deliveries

    assert (found.tables, found.format, found.start) == (("*.*",), EventFormat.CDC, StartAt.EARLIEST)
    assert (found.on_overload, found.topic) == (Overload.WAIT, "{pipeline}.{schema}.{table}")


def test_drop_has_an_age(tmp_path: Path) -> None:
    text = "{name: copy, type: file, path: out, on_overload: {drop: {older_than: 10m}}}"
    path = write(tmp_path, f"{SOUND}deliveries: [{text}]\n")

    (found,) = load_definition(path).deliveries

    assert isinstance(found.on_overload, Drop)
    assert found.on_overload.drop.older_than == 600


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ("topic: '{name}'", "unknown placeholder 'name'"),
        ("topic: '{'", "topic"),
        ("messages: [{prefix: '*', topic: '{table}'}]", "unknown placeholder 'table'"),
        ("outbox: {table: outbox}", "outbox"),
        ("outbox: {table: a.b, topic: '{schema}'}", "unknown placeholder 'schema'"),
        ("rules: [{match: '*.*', transform: {where: a > 1}}]", "without Spark"),
        ("on_overload: drop", "on_overload"),
        ("on_overload: {drop: {older_than: 0s}}", "older_than"),
        ("batch: 0", "batch"),
        ("format: avro", "format"),
        ("debezium: {decimal: string}", "'debezium' has no effect under the format 'cdc'"),
        ("format: cloudevents, debezium: {}", "'debezium' has no effect under the format 'cloudevents'"),
        ("format: flat, debezium: {transaction: true}", "'debezium.transaction' has no effect under the format 'flat'"),
        ("schema_registry: {url: 'http://r'}", "'schema_registry' has no effect on JSON"),
        ("rules: [{match: '*.*', when: 'lower(after.a) = 1'}]", "a condition can call only"),
        ("destination: x", "unknown key"),
    ],
)
def test_a_wrong_value_is_named(tmp_path: Path, fields: str, words: str) -> None:
    with pytest.raises(ConfigError) as raised:
        load(tmp_path, f"{{name: copy, type: file, path: out, {fields}}}")

    assert words in str(raised.value)


@pytest.mark.parametrize("path", ["out", "./out/", "x/../out"])
def test_two_deliveries_cannot_write_to_one_directory(tmp_path: Path, path: str) -> None:
    with pytest.raises(ConfigError, match="deliveries 'one' and 'two' cannot share a directory"):
        load(tmp_path, f"{{name: one, type: file, path: out}}, {{name: two, type: file, path: '{path}'}}")
    load(tmp_path, "{name: one, type: file, path: out}, {name: two, type: file, path: out/two}")


def test_sinks_and_deliveries_share_their_names(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="another sink or delivery has this name"):
        load(tmp_path, "{name: lake, type: file, path: out}")


@pytest.mark.parametrize("fields", ["format: flat, debezium: {decimal: string}", "format: debezium, debezium: {}"])
def test_the_options_of_debezium_belong_to_its_formats(tmp_path: Path, fields: str) -> None:
    load(tmp_path, f"{{name: copy, type: file, path: out, {fields}}}")


@pytest.mark.parametrize("fields", ["format: cdc", "encoding: json", "messages: []"])
def test_a_key_that_metrics_do_not_use_is_refused(tmp_path: Path, fields: str) -> None:
    metrics = "metrics: [{metric: orders, table: 'shop.orders'}]"

    with pytest.raises(ConfigError, match="has no effect on metrics"):
        load(tmp_path, f"{{name: counts, type: statsd, {metrics}, {fields}}}")
