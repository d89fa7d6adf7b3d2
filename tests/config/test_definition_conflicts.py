"""Conflicts of keys with each other, reported at the key that the user would change."""

from __future__ import annotations

from pathlib import Path

import pytest

from cdc.config import check_definition
from tests.config.definitions import SOUND, write

CONFLICTS = [
    (["mode: append", "stored_as_scd_type: 2"], "mode", "conflicts with stored_as_scd_type"),
    (["column_list: [id]", "except_column_list: [note]"], "column_list", "conflicts with except_column_list"),
    (["track_history_column_list: [note]"], "track_history_column_list", "requires stored_as_scd_type: 2"),
    (
        ["stored_as_scd_type: 2", "except_column_list: [note]", "track_history_column_list: [note]"],
        "track_history_column_list",
        "contains 'note', which except_column_list excludes",
    ),
]


CONFLICTS += [
    (["dropped_columns: drop", said], "dropped_columns", f"'drop' conflicts with {other}")
    for said, other in {
        "stored_as_scd_type: 2": "'scd2'",
        "mode: append": "'append'",
        "mode: soft_delete": "'soft_delete'",
        "schema_changes: lenient": "'schema_changes: lenient'",
        "schema_changes: ignore": "'schema_changes: ignore'",
        "schema_changes: exception": "'schema_changes: exception'",
    }.items()
]


@pytest.mark.parametrize("in_rule", [False, True], ids=["sink", "rule"])
@pytest.mark.parametrize(("said", "name", "message"), CONFLICTS)
def test_a_conflict_is_reported_at_its_key(
    tmp_path: Path, said: list[str], name: str, message: str, in_rule: bool
) -> None:
    lines = f"rules: [{{match: 'shop.*', {', '.join(said)}}}]" if in_rule else "\n    ".join(said)

    found = check_definition(write(tmp_path, f"{SOUND}    {lines}\n"), {})
    assert [issue.message for issue in found.issues if message in issue.message], found.issues
    key = ".".join(map(str, ("sinks", 0, "rules", 0, name) if in_rule else ("sinks", 0, name)))
    assert [issue for issue in found.issues if issue.key == key]


def test_a_rule_that_inherits_dropped_columns_must_be_compatible_with_it(tmp_path: Path) -> None:
    sink = f"{SOUND}    dropped_columns: drop\n    rules:\n      - {{match: shop.a, column_list: [id]}}\n"
    assert not check_definition(write(tmp_path, sink), {}).issues
    (issue,) = check_definition(write(tmp_path, f"{sink}      - {{match: shop.b, mode: append}}\n"), {}).issues
    assert (issue.key, "'drop' conflicts with 'append'" in issue.message) == ("sinks.0.rules.1.dropped_columns", True)
    wrong = sink.replace("drop\n", "drop\n    mode: append\n", 1)
    assert [issue.key for issue in check_definition(write(tmp_path, wrong), {}).issues] == ["sinks.0.dropped_columns"]
    kept = f"{sink}      - {{match: shop.b, mode: append, dropped_columns: keep}}\n"
    assert not check_definition(write(tmp_path, kept), {}).issues


def test_an_unknown_mode_is_refused_with_the_known_ones(tmp_path: Path) -> None:
    (issue,) = check_definition(write(tmp_path, f"{SOUND}    mode: sotf_delete\n"), {}).issues
    assert "expected 'append' or 'soft_delete'" in issue.message
    assert "soft_delete" in (issue.suggestion or "")


SEARCH = "  - name: find\n    type: search\n    path: find\n"
SEARCH_CONFLICTS = [
    (["column_list: [id]", "except_column_list: [note]"], ("column_list",), "conflicts with except_column_list"),
    (["transform: {where: 'id > 1'}"], ("transform", "where"), "requires Spark, which a search sink does not use"),
    (["transform: {computed: {a: 'id'}}"], ("transform", "computed"), "requires Spark"),
]


@pytest.mark.parametrize(("said", "key", "message"), SEARCH_CONFLICTS)
def test_a_conflict_of_a_search_sink_is_reported_at_its_key(
    tmp_path: Path, said: list[str], key: tuple[str, ...], message: str
) -> None:
    rule = f"    rules: [{{match: 'shop.*', {', '.join(said)}}}]\n"
    (issue,) = check_definition(write(tmp_path, f"{SOUND}{SEARCH}{rule}"), {}).issues
    assert (issue.key, message in issue.message) == (f"sinks.1.rules.0.{'.'.join(key)}", True)


def test_exclusive_column_lists_of_a_search_sink_are_reported(tmp_path: Path) -> None:
    lists = "    column_list: [id]\n    except_column_list: [note]\n"
    (issue,) = check_definition(write(tmp_path, f"{SOUND}{SEARCH}{lists}"), {}).issues
    assert (issue.key, "conflicts with except_column_list" in issue.message) == ("sinks.1.column_list", True)
    rule = "    column_list: [id]\n    rules: [{match: 'shop.*', except_column_list: [note], fields: [a]}]\n"
    assert not check_definition(write(tmp_path, f"{SOUND}{SEARCH}{rule}"), {}).issues


_VIEWS = """\
  - {name: documents, type: search, path: find, views: [shop.documents]}
exclude: [shop.documents]
views:
  - {name: shop.documents, key: [id], sql: SELECT id FROM shop.orders}
"""


def test_a_view_has_a_name_of_its_own_and_reads_a_delta_sink(tmp_path: Path) -> None:
    def keys(text: str) -> list[str]:
        return [issue.key for issue in check_definition(write(tmp_path, f"{SOUND}{text}"), {}).issues]

    assert not keys(_VIEWS)
    assert keys(_VIEWS.replace("exclude: [shop.documents]\n", "")) == ["views.0.name"]
    assert keys(_VIEWS + "  - {name: shop.documents, key: [id], sql: SELECT 1 AS id}\n") == ["views.1.name"]
    assert keys(_VIEWS.replace("key: [id]", "key: [id], over: find")) == ["views.0.over"]
    assert keys(_VIEWS.replace("views: [shop.documents]", "views: [shop.lists]")) == ["sinks.1.views.0"]
    assert keys(_VIEWS.replace("name: documents, type", "name: views, type")) == ["sinks.1.name"]


def test_the_sql_of_a_view_is_checked(tmp_path: Path) -> None:
    def messages(sql: str, **more: str) -> list[tuple[str, str]]:
        text = _VIEWS.replace(
            "SELECT id FROM shop.orders", f"'{sql}'" + "".join(f", {k}: {v}" for k, v in more.items())
        )
        found = check_definition(write(tmp_path, f"{SOUND}{text}"), {}).issues
        return [(issue.key, issue.message.partition(" ")[0]) for issue in found]

    assert messages("SELECT id FROM") == [("views.0.sql", "CDC-8001")]
    assert messages("SELECT id, now() AS n FROM shop.orders") == [("views.0.sql", "CDC-8002")]
    assert messages("SELECT total FROM shop.orders") == [("views.0.sql", "CDC-8003")]
    assert messages("SELECT id FROM orders") == [("views.0.sql", "CDC-8005")]
    joined = "SELECT {} AS id FROM shop.orders o LEFT JOIN shop.items i ON i.order_id = o.id"
    assert messages(joined.format("i.id")) == [("views.0.key", "CDC-8011")]
    assert messages(joined.format("coalesce(i.id, 0)")) == messages(joined.format("o.id")) == []
    whole = "SELECT id FROM shop.orders ORDER BY id LIMIT 5"
    assert messages(whole) == []
    assert messages(whole, incremental="required") == [("views.0.incremental", "CDC-8009")]


def test_no_view_reads_one_whose_old_rows_are_deleted(tmp_path: Path) -> None:
    kept = _VIEWS.replace("key: [id]", "key: [id], keep: 90d")
    other = "  - {name: lists.ids, key: [id], sql: SELECT id FROM shop.documents}\n"
    (issue,) = check_definition(write(tmp_path, f"{SOUND}{kept}{other}"), {}).issues

    assert (issue.key, issue.message.partition(",")[0]) == ("views.1.sql", "view 'shop.documents' has 'keep'")


@pytest.mark.parametrize(("engine", "number"), [("spark", 1), ("auto", 0)])
def test_a_local_index_of_a_definition_that_sends_every_batch_to_spark_is_a_warning(
    tmp_path: Path, engine: str, number: int
) -> None:
    local = "  - {name: find, type: search, path: find}"
    server = "  - {name: far, type: search, engine: opensearch, server: {url: 'http://127.0.0.1:9200'}}"
    text = f"{SOUND}{local}\n{server}\nspark: {{engine: {engine}}}\n"

    issues = check_definition(write(tmp_path, text), {}).issues

    assert [(issue.key, issue.fatal) for issue in issues] == [("spark.engine", False)] * number
    assert all("executors cannot write sink 'find'" in issue.message for issue in issues)


def test_a_rule_with_a_path_of_its_own_is_possible_beside_a_search_server(tmp_path: Path) -> None:
    rule = "    rules: [{match: shop.orders, path: elsewhere/orders}]\n"
    server = "  - {name: far, type: search, engine: opensearch, server: {url: 'http://127.0.0.1:9200'}}\n"

    assert not check_definition(write(tmp_path, f"{SOUND}{rule}{server}"), {}).issues


def test_a_rule_must_not_write_into_the_directory_of_another_sink(tmp_path: Path) -> None:
    rule = "    rules: [{match: shop.orders, path: find/orders}]\n"

    (issue,) = check_definition(write(tmp_path, f"{SOUND}{rule}{SEARCH}"), {}).issues

    assert issue.key == "sinks.0.rules.0.path"
    assert "overlaps the directory of sink 'find'" in issue.message
