"""Hidden columns: what a rule hid under any earlier name of a column or a table is never shown under another one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cdc.config import SearchRule, SearchSettings, SinkRule, TableSettings
from cdc.config.deliveries import DeliveryRule, DeliverySettings
from cdc.errors import HiddenColumnRenamed
from cdc.table import UNPROVED, Column, ReplicaIdentity, TableSchema
from cdc.targets.hidden_columns import (
    RulesOfTopic,
    check_hidden,
    document_rules,
    event_rules,
    newly_hidden,
    table_rules,
    with_moved_names,
)

NAMES = ("secret", "pub", "other", "fresh")


def schema_of(names: dict[int, str], name: str = "m") -> TableSchema:
    columns = [Column(id=number, name=text, type_oid=25, type_name="text") for number, text in sorted(names.items())]
    key = Column(id=1, name="id", type_oid=23, type_name="integer", key=0)
    identity = ReplicaIdentity.DEFAULT
    return TableSchema(relation=7, oid=7, schema="r15", name=name, replica_identity=identity, columns=(key, *columns))


FIRST = schema_of({2: "secret", 3: "pub"})
SWAPPED = schema_of({2: "pub", 3: "secret"}).following(FIRST)
REPLACED = schema_of({2: "hidden", 3: "pub", 4: "secret"}).following(FIRST)
MASK = {"mask": {"secret": "redact"}}


def of_table(rule: dict[str, Any]) -> RulesOfTopic:
    return table_rules(TableSettings(), [SinkRule.model_validate({"match": "r15.m", **rule})])


def of_document(rule: dict[str, Any]) -> RulesOfTopic:
    return document_rules(SearchSettings(), [SearchRule.model_validate({"match": "r15.m", **rule})])


def of_event(rule: dict[str, Any]) -> RulesOfTopic:
    return event_rules(DeliverySettings(name="d", rules=(DeliveryRule.model_validate({"match": "r15.m", **rule}),)))


@pytest.mark.parametrize("later", [SWAPPED, REPLACED, schema_of({2: "pub"}).following(FIRST)])
@pytest.mark.parametrize("of", [of_table, of_document, of_event])
@pytest.mark.parametrize("transform", [MASK, {"drop": ["secret"]}])
def test_a_hidden_column_with_another_name_stops_the_table(
    of: Callable[[dict[str, Any]], RulesOfTopic], transform: dict[str, Any], later: TableSchema
):
    check_hidden(FIRST, of({"transform": transform}))

    with pytest.raises(HiddenColumnRenamed, match="had the name 'secret', which its rule hides"):
        check_hidden(later, of({"transform": transform}))


@pytest.mark.parametrize(
    ("of", "rule"),
    [
        (of_table, {"column_list": ["id", "pub"]}),
        (of_table, {"except_column_list": ["secret"]}),
        (of_document, {"column_list": ["id", "pub"]}),
        (of_document, {"fields": ["pub"]}),
        (of_document, {"except_column_list": ["secret"]}),
        (of_table, {"transform": {"where": "pub = 'open'"}}),
        (of_table, {"transform": {"rename": {"pub": "p"}, "where": "P = 'open'"}}),
        (of_table, {"transform": {"python": "module:function"}}),
        (of_event, {"when": "after.pub = 'open'"}),
    ],
)
def test_lists_filters_and_functions_do_not_follow_a_name_to_another_column(
    of: Callable[[dict[str, Any]], RulesOfTopic], rule: dict[str, Any]
):
    check_hidden(FIRST, of(rule))

    with pytest.raises(HiddenColumnRenamed, match="column 'pub'"):
        check_hidden(SWAPPED, of(rule))


def test_a_column_that_gets_a_listed_name_is_shown_only_if_no_other_column_had_the_name():
    renamed, replaced = (schema_of({2: name}).following(FIRST) for name in ("called", "pub"))

    check_hidden(renamed, of_table({"column_list": ["id", "called"]}))
    with pytest.raises(HiddenColumnRenamed):
        check_hidden(replaced, of_table({"column_list": ["id", "pub"]}))


def test_a_rule_that_hides_the_present_name_is_content():
    check_hidden(schema_of({2: "hidden"}).following(FIRST), of_table({"transform": {"mask": {"hidden": "redact"}}}))
    check_hidden(SWAPPED, of_table({"transform": {"mask": {"secret": "redact", "pub": "redact"}}}))
    check_hidden(SWAPPED, of_table({"transform": {"drop": ["secret", "pub"]}}))


def test_a_weaker_mask_of_the_present_name_is_refused():
    rule = {"transform": {"mask": {"secret": "keep_last:2", "pub": "keep_last:4"}}}

    with pytest.raises(HiddenColumnRenamed, match="column 'pub'"):
        check_hidden(SWAPPED, of_table(rule))


def test_a_column_is_shown_under_a_name_that_a_person_accepted_for_it_alone():
    shown = {**MASK, "shown": {"pub": ["secret"]}}

    check_hidden(SWAPPED, of_table({"transform": shown}))
    with pytest.raises(HiddenColumnRenamed):
        check_hidden(REPLACED, of_table({"transform": shown}))


def test_a_table_that_gets_a_name_without_its_rule_is_refused():
    moved = replace(FIRST, name="m_old").following(FIRST)

    with pytest.raises(HiddenColumnRenamed, match=r"table 'r15\.m_old' had the name 'r15\.m', whose rule hides"):
        check_hidden(moved, of_table({"transform": MASK}))
    check_hidden(moved, of_table({"match": "r15.m*", "transform": MASK}))
    back = replace(FIRST).following(moved)
    check_hidden(back, of_table({"transform": MASK}))


def test_a_column_whose_number_is_not_proved_may_be_each_column_that_disappeared():
    doubtful = schema_of({3: "pub", UNPROVED: "word"}).following(FIRST)

    with pytest.raises(HiddenColumnRenamed, match="column 'word'"):
        check_hidden(doubtful, of_table({"transform": MASK}))


def test_a_column_that_gets_a_masked_name_is_reported_because_older_rows_show_it():
    assert newly_hidden(FIRST, schema_of({3: "secret"}).following(FIRST), of_table({"transform": MASK})) == "secret"
    assert newly_hidden(FIRST, SWAPPED, of_table({"transform": MASK})) == "secret"
    assert newly_hidden(FIRST, REPLACED, of_table({"transform": MASK})) is None


def test_a_view_of_a_table_that_exchanged_names_shows_no_column_under_a_rule_that_hides_one():
    view = schema_of({2: "public", 3: "hidden"})
    rules = of_table({"transform": {"drop": ["hidden"]}})

    check_hidden(with_moved_names(view, [FIRST, REPLACED]), rules)
    with pytest.raises(HiddenColumnRenamed, match="had the name 'hidden'"):
        check_hidden(with_moved_names(view, [FIRST, SWAPPED]), rules)


def test_former_names_survive_their_text_and_do_not_grow_without_a_rename():
    assert TableSchema.from_json(SWAPPED.to_json()) == SWAPPED
    assert SWAPPED.following(SWAPPED) is SWAPPED
    assert FIRST.following(schema_of({2: "secret", 3: "pub"})) is FIRST


@st.composite
def lives(draw: st.DrawFn) -> list[TableSchema]:
    """Versions of a table whose columns are renamed, exchanged, dropped and added, and which may be renamed itself."""
    names, newest = {2: "secret", 3: "pub", 4: "other"}, 4
    versions = [schema_of(names)]
    for _ in range(draw(st.integers(1, 6))):
        kind = draw(st.sampled_from(["shuffle", "drop", "add", "table"]))
        topic = versions[-1].name
        if kind == "shuffle":
            given_names = draw(st.permutations(NAMES))
            names = dict(zip(names, given_names, strict=False))
        elif kind == "drop" and len(names) > 1:
            names = {number: name for number, name in names.items() if number != min(names)}
        elif kind == "add" and (free := [name for name in NAMES if name not in names.values()]):
            newest += 1
            names = {**names, newest: free[0]}
        elif kind == "table":
            topic = draw(st.sampled_from(["m", "m_old"]))
        versions.append(schema_of(names, topic))
    return versions


RULES = ({"transform": MASK}, {"transform": {"drop": ["secret"]}}, {"except_column_list": ["secret"]})


@given(lives(), st.sampled_from(RULES))
def test_no_column_that_was_hidden_in_any_version_is_shown_in_a_later_one(
    versions: list[TableSchema], rule: dict[str, Any]
):
    rules_of, hidden, present = of_table(rule), set[int](), None
    for version in versions:
        present = version.following(present)
        rules = rules_of(present.topic)
        treated = {c.id: rules.omits(c.name) or c.name in rules.masks for c in present.columns if c.key is None}
        hidden |= {number for number, is_hidden in treated.items() if is_hidden}
        shown = {number for number, is_hidden in treated.items() if not is_hidden}
        try:
            check_hidden(present, rules_of)
        except HiddenColumnRenamed:
            continue
        assert not hidden & shown
