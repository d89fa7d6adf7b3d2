"""Rules of sinks for single tables: the columns that they select, and whether they fit a table."""

from __future__ import annotations

import pytest

from cdc.config import SinkRule, TableSettings, Transform
from cdc.config.sink_rules import column_conflicts, with_target_columns
from cdc.table import Column, ReplicaIdentity, TableSchema


def table(*names: str, key: str | None = "id") -> TableSchema:
    """A table with text columns."""
    columns = tuple(
        Column(id=n, name=name, type_oid=25, type_name="text", key=0 if name == key else None)
        for n, name in enumerate(names, 1)
    )
    return TableSchema(
        relation=1, oid=1, schema="shop", name="users", replica_identity=ReplicaIdentity.DEFAULT, columns=columns
    )


def test_a_target_has_the_listed_columns_or_all_but_the_excluded_ones() -> None:
    users = table("id", "mail", "note")

    def names(**lists: tuple[str, ...]) -> list[str]:
        return [column.name for column in with_target_columns(users, TableSettings(**lists)).columns]  # type: ignore[arg-type]

    assert names() == ["id", "mail", "note"]
    assert names(column_list=("id", "mail", "none")) == ["id", "mail"]
    assert names(except_column_list=("mail",)) == ["id", "note"]


@pytest.mark.parametrize(
    ("rule", "schema", "key", "message"),
    [
        (SinkRule(match="*.*", column_list=("id", "nmae")), table("id", "mail"), "column_list", "no column 'nmae'"),
        (SinkRule(match="*.*", except_column_list=("id",)), table("id", "a"), "except_column_list", "part of the key"),
        (SinkRule(match="*.*", transform=Transform(drop=("x",))), table("id"), "drop", "no column 'x'"),
        (SinkRule(match="*.*", transform=Transform(mask={"id": "redact"})), table("id"), "mask", "part of the key"),
    ],
)
def test_a_column_that_does_not_fit_is_reported_at_its_key(
    rule: SinkRule, schema: TableSchema, key: str, message: str
) -> None:
    (mismatch,) = column_conflicts(schema, rule, rule)

    assert mismatch.key[-1] == key
    assert message in mismatch.error.message


def test_two_columns_with_one_name_are_reported() -> None:
    rule = SinkRule(match="*.*", transform=Transform(rename={"mail": "note"}))
    (mismatch,) = column_conflicts(table("id", "mail", "note"), rule, rule)

    assert "would have the name 'note'" in mismatch.error.message
