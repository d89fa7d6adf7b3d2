"""Rules of a Delta sink that transform and route: what is wrong with one is found before anything starts."""

from __future__ import annotations

from pathlib import Path

import pytest

from cdc.config import Definition, DeltaSinkDefinition, check_definition, load_definition, printable_definition
from tests.config.definitions import changed, write

ENVIRONMENT = {"SALT": "c4n4ry"}
DELTA = "    type: delta\n"


def ruled(*lines: str, match: str = "shop.users") -> str:
    """The sound definition with a rule: lines below it, indented from there."""
    body = "".join(f"        {line}\n" for line in lines)
    return changed(DELTA, f"{DELTA}    rules:\n      - match: {match}\n{body}")


WHOLE = ruled(
    "transform:",
    "  drop: [password_hash]",
    "  rename: {mail: email}",
    "  mask: {mail: sha256, phone: 'keep_last:4', name: redact}",
    "  salt: {env: SALT}",
    "  computed: {full_name: \"concat(first, ' ', `last name`)\"}",
    "  where: \"country <> 'XX' -- not there\"",
    "  python: 'package.module:function'",
    "pattern: 'shop\\.(?P<kind>[a-z]+)'",
    "path: other/{kind}/{table}",
    "partition_by: [country]",
    "cluster_by: [mail, 'signed up']",
    "properties: {delta.enableChangeDataFeed: 'true'}",
)


def test_a_rule_may_say_all_of_it_and_shows_no_salt(tmp_path: Path) -> None:
    definition = load_definition(write(tmp_path, WHOLE), ENVIRONMENT)
    (sink,) = definition.sinks

    assert isinstance(sink, DeltaSinkDefinition)
    (rule,) = sink.rules
    assert rule.path == str(tmp_path / "other/{kind}/{table}")
    assert rule.transform is not None
    assert rule.transform.needs_spark
    assert "c4n4ry" not in str(printable_definition(definition, {})) + repr(rule)


FLAWS = {
    "expression with an open text": (
        'computed: {a: "concat(\'x)"}',
        "computed.a: character 8: expected one expression",
    ),
    "expression with an open bracket": ("where: 'f(1'", "where: character 2: bracket is never closed"),
    "expression with a stray bracket": ("where: '1)'", "where: character 2: closing bracket without an opening one"),
    "expression with crossed brackets": ("where: '([)]'", "where: character 3: closing bracket"),
    "two statements": ("where: 'a; b'", "where: character 2: expected one expression"),
    "a query": ("where: 'a in (select 1)'", "where: character 7: subqueries and window functions"),
    "a window": ("where: 'sum(a) OVER (x) > 1'", "where: character 8: subqueries and window functions"),
    "the clock": ("computed: {at: now()}", "computed.at: character 1: the function is not deterministic"),
    "chance": ("where: 'a > Rand ( )'", "where: character 5: the function is not deterministic"),
    "an empty expression": ("where: ' /* */ '", "where: expected an expression of Spark SQL"),
    "a name of ours": ("computed: {_op: '1'}", "computed._op"),
    "another mask": ("mask: {a: md5}", "mask.a: expected sha256, redact, or keep_last:N"),
    "a mask that keeps nothing": ("mask: {a: 'keep_last:0'}", "mask.a: expected sha256, redact, or keep_last:N"),
    "a hash without a salt": ("mask: {a: sha256}", "transform: 'salt' is required"),
    "a salt in the file": ("salt: c4n4ry", "salt: the salt is in plain text in the definition"),
    "a salt for nothing": ("salt: {env: SALT}", "transform: 'salt' has no effect"),
    "dropped and masked": ("{drop: [a], mask: {a: redact}}", "transform: column 'a' is in 'drop'"),
    "dropped and renamed": ("{drop: [a], rename: {a: b}}", "transform: column 'a' is in 'drop'"),
    "two columns of a name": (
        "{rename: {a: b}, computed: {b: '1'}}",
        "transform: two columns of the target would have the name 'b'",
    ),
    "a function without a module": ("python: function", "transform.python"),
    "a misspelt key": ("wehre: 'a'", 'transform.wehre: unknown key — did you mean "where"?'),
}


def issues(tmp_path: Path, text: str) -> str:
    checked = check_definition(write(tmp_path, text), ENVIRONMENT)
    assert checked.definition is None
    return "\n".join(str(issue) for issue in checked.issues)


@pytest.mark.parametrize("case", FLAWS)
def test_a_transform_that_cannot_be_is_named_with_its_place(case: str, tmp_path: Path) -> None:
    said, expected = FLAWS[case]
    found = issues(tmp_path, ruled(f"transform: {said if said.startswith('{') else '{' + said + '}'}"))
    key = "sinks.0.rules.0." if expected.startswith("transform") else "sinks.0.rules.0.transform."

    assert key + expected in found
    assert "c4n4ry" not in found


NO_FEATURE = "the property requires a table feature that targets do not have"
ROUTES = {
    "one directory for many": (
        "path: all",
        "shop.*",
        "rules.0.path: expected {table} or a capture group of 'pattern' in the path",
    ),
    "only the schema": (
        "path: 'all/{schema}'",
        "shop.*",
        "rules.0.path: expected {table} or a capture group of 'pattern'",
    ),
    "an unknown placeholder": (
        "path: 'all/{region}'",
        "shop.a",
        "'path' contains the placeholder 'region', but 'pattern' has no group of this name",
    ),
    "a pattern for nothing": ("pattern: '(?P<a>.*)'", "shop.a", "'pattern' has no effect"),
    "a pattern that is none": (
        "pattern: '(?P<a>'",
        "shop.a",
        "pattern: character 1: the pattern is not a regular expression",
    ),
    "a group of that name": ("pattern: '(?P<table>.*)'", "shop.a", "pattern: invalid group name in the pattern"),
    "into the log": ("path: 'log/{table}'", "shop.a", "overlaps the directory of the log"),
    "a property of ours": (
        "properties: {delta.columnMapping.mode: name}",
        "shop.a",
        "that the sink does not set itself",
    ),
    "a property of type widening": ("properties: {delta.enableTypeWidening: 'true'}", "shop.a", NO_FEATURE),
    "a property of row tracking": ("properties: {delta.enableRowTracking: 'true'}", "shop.a", NO_FEATURE),
    "a property of in-commit timestamps": (
        "properties: {delta.enableInCommitTimestamps: 'true'}",
        "shop.a",
        "rules.0.properties.delta.enableInCommitTimestamps.…: " + NO_FEATURE,
    ),
    "a merge without a place": ("merge_tables: true", "shop.a", "rules.0: 'merge_tables' requires 'path'"),
    "a merge that is none": ("merge_tables: 1", "shop.a", "merge_tables: expected true or false"),
    "no property of Delta": ("properties: {cdc.log_id: x}", "shop.a", "that the sink does not set itself"),
}


@pytest.mark.parametrize("case", ROUTES)
def test_a_route_that_cannot_be_is_named_with_its_place(case: str, tmp_path: Path) -> None:
    said, match, expected = ROUTES[case]

    assert expected in issues(tmp_path, ruled(said, match=match))


@pytest.mark.parametrize(
    "said",
    [
        "stored_as_scd_type: 2",
        "mode: append",
        "mode: soft_delete",
        "schema_changes: try_evolve",
        "schema_changes: lenient",
        "schema_changes: ignore",
    ],
)
def test_many_tables_share_a_target_of_their_latest_state_and_its_columns_alone(tmp_path: Path, said: str) -> None:
    merged = ("path: all", "merge_tables: true")
    found = issues(tmp_path, ruled(*merged, said, match="shop.*"))
    assert "rules.0.merge_tables: conflicts with" in found
    assert said.rpartition(" ")[2].replace("2", "scd2") in found

    for fine in ("schema_changes: exception", "schema_changes: evolve", "partition_by: [country]"):
        assert (
            check_definition(write(tmp_path, ruled(*merged, fine, match="shop.*")), ENVIRONMENT).definition is not None
        )


def test_a_target_of_many_tables_keeps_the_columns_that_one_of_them_dropped(tmp_path: Path) -> None:
    merged = ruled("path: all", "merge_tables: true", match="shop.*")
    by_sink = merged.replace("    rules:", "    dropped_columns: drop\n    rules:")
    by_rule = ruled("path: all", "merge_tables: true", "dropped_columns: drop", match="shop.*")
    for text in (by_sink, by_rule):
        assert "rules.0.dropped_columns: 'drop' conflicts with 'merge_tables'" in issues(tmp_path, text)


def test_of_what_a_function_makes_no_column_is_dropped(tmp_path: Path) -> None:
    said = ruled("dropped_columns: drop", "transform: {python: 'm:f'}")

    assert "rules.0.dropped_columns: 'drop' conflicts with 'transform.python'" in issues(tmp_path, said)


def test_files_are_not_ordered_by_what_parts_them(tmp_path: Path) -> None:
    said = issues(tmp_path, ruled("partition_by: [a, b]", "cluster_by: [c, b]"))

    assert "rules.0: 'cluster_by' contains 'b', which is already in 'partition_by'" in said


def test_two_rules_do_not_share_a_directory(tmp_path: Path) -> None:
    rules = "    rules:\n      - {match: shop.a, path: all/x}\n      - {match: shop.b, path: all}\n"

    assert "rules.1.path: overlaps the directory of another rule" in issues(tmp_path, changed(DELTA, DELTA + rules))


@pytest.mark.parametrize("kept", ["stored_as_scd_type: 2", "mode: append", "mode: soft_delete"])
@pytest.mark.parametrize("said", ["where: 'a'", "computed: {b: 'a'}", "python: 'm:f'"])
def test_what_sees_whole_rows_needs_a_target_of_their_latest_state(tmp_path: Path, kept: str, said: str) -> None:
    (found,) = check_definition(write(tmp_path, ruled(f"transform: {{{said}}}", kept)), ENVIRONMENT).issues
    mode = kept.rpartition(" ")[2].replace("2", "scd2")

    assert found.key == f"sinks.0.rules.0.transform.{said.partition(':')[0]}"
    assert found.message == f"conflicts with {mode!r}: this key requires the latest state of rows"
    assert (
        check_definition(write(tmp_path, ruled("transform: {mask: {a: redact}}", kept)), ENVIRONMENT).definition
        is not None
    )


def test_columns_may_be_called_as_functions_are(tmp_path: Path) -> None:
    text = ruled("transform: {where: 'uuid = version AND `rand`(1) IS NULL AND now.x > 1'}")

    assert isinstance(load_definition(write(tmp_path, text), ENVIRONMENT), Definition)
