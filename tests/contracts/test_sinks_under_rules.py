"""Rules do the same in every sink: columns that are left out, names, masks, and rules that do not fit a table."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Final

import pytest

from cdc.errors import HiddenColumnRenamed, SchemaNotApplicable, TargetRulesChanged, TransformFailed
from tests.contracts.folded import ID, ITEM, ORDERS, Row, batch, column, gone, part, put, with_one_delta_writer
from tests.contracts.sink_stores import KINDS, LOG, Store, items, merge, publish, store_under

NOTE = column(4, "note")
NOTED = replace(ORDERS, columns=(ID, ITEM, NOTE))


def noted(number: int, item: str, note: str, position: int) -> Row:
    """A row of the table with the columns `item` and `note`."""
    return Row((str(number),), position, {1: str(number), 2: item, 4: note})


@pytest.fixture(params=KINDS)
def under(request) -> Callable[[dict[str, Any]], Store]:
    """Make the store under a rule."""
    spark = request.getfixturevalue("spark") if "spark" in request.param else None
    return lambda rule: store_under(request, spark, rule)


RULES: Final[dict[str, dict[str, Any]]] = {
    "dropped": {"transform": {"drop": ["item"]}},
    "excluded": {"except_column_list": ["item"]},
    "not listed": {"column_list": ["id", "price"]},
}


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
@with_one_delta_writer("under", "search")
def test_a_column_that_a_rule_leaves_out_is_not_in_the_target(under, rule):
    store = under(rule)
    sink = store.opened()
    merge(sink, batch([put(1, "a", 10), put(2, "b", 11)], 0, 20))
    record = merge(sink, batch([part(1, 30, {2: "A"}), part(2, 31, {3: "2.00"})], 20, 40))

    assert store.rows(record) == {"1": {"id": "1", "price": "1.00"}, "2": {"id": "2", "price": "2.00"}}


@with_one_delta_writer("under", "search")
def test_a_rule_renames_and_masks_and_unsent_columns_stay_masked_once(under):
    store = under({"transform": {"rename": {"item": "what"}, "mask": {"item": "keep_last:1", "price": "redact"}}})
    sink = store.opened()
    merge(sink, batch([put(1, "abc", 10), put(2, None, 11), put(3, "xyz", 12)], 0, 20))
    moved = part(5, 30, {3: "2.00"}, ordinal=1, base=("1",))
    record = merge(sink, batch([gone(1, 30), moved, part(3, 31, {2: "uvw"})], 20, 40))

    assert store.rows(record) == {
        "2": {"id": "2", "what": None, "price": "***"},
        "3": {"id": "3", "what": "**w", "price": "***"},
        "5": {"id": "5", "what": "**c", "price": "***"},
    }


@with_one_delta_writer("under", "search")
def test_the_image_of_a_parked_row_is_masked_once_and_has_the_columns_of_the_target(under):
    sink = under({"except_column_list": ["price"], "transform": {"mask": {"item": "keep_last:1"}}}).opened()
    mask = sink.image_mask(ORDERS)
    parked = mask({1: "7", 2: "secret", 3: "1.00"})

    assert (parked, mask(parked)) == ({1: "7", 2: "\0*****t"}, parked)


SWAPPED = replace(ORDERS, columns=(ID, replace(ITEM, name="note"), replace(NOTE, name="item"))).following(NOTED)
REPLACED = replace(ORDERS, columns=(ID, replace(ITEM, name="hidden"), NOTE, column(5, "item"))).following(NOTED)


@pytest.mark.parametrize("later", [SWAPPED, REPLACED], ids=["names exchanged", "name of a new column"])
@pytest.mark.parametrize(
    "rule",
    [{"transform": {"mask": {"item": "redact"}}}, {"transform": {"drop": ["item"]}}, {"except_column_list": ["item"]}],
    ids=["mask", "drop", "except"],
)
@with_one_delta_writer("under", "search")
def test_a_hidden_column_under_another_name_stops_the_table_also_after_a_restart_and_in_a_replay(under, rule, later):
    store = under(rule)
    sink = store.opened()
    merge(sink, batch([noted(1, "secret", "open", 10)], 0, 20, NOTED))
    for is_restarted in (False, True):
        sink = store.opened() if is_restarted else sink
        with pytest.raises(HiddenColumnRenamed):
            sink.apply(batch([noted(2, "secret", "open", 30)], 20, 40, later))
        with pytest.raises(HiddenColumnRenamed):
            sink.image_mask(later)
        sink.close()
    staged = store.stage()
    staged.open_published(LOG)
    staged.sink.open(LOG)
    with pytest.raises(HiddenColumnRenamed):
        staged.sink.apply(batch([noted(1, "secret", "open", 10)], 0, 40, later, generation=5))
    staged.discard()


@with_one_delta_writer("under", "search")
def test_a_rule_that_hides_the_present_name_rebuilds_the_table(under):
    sink = under({"transform": {"mask": {"item": "redact"}}}).opened()
    merge(sink, batch([noted(1, "secret", "open", 10)], 0, 20, NOTED))
    sink.close()
    corrected = under({"transform": {"mask": {"hidden": "redact", "item": "redact"}}})
    staged = corrected.stage()
    staged.open_published(LOG)
    staged.sink.open(LOG)
    rows = [noted(1, "secret", "open", 10), noted(2, "secret", "open", 30)]
    published = staged.put(publish(staged.sink, staged.sink.apply(batch(rows, 0, 40, REPLACED, generation=5))), {})
    staged.discard()

    shown = corrected.rows(published.tables[ORDERS.relation])
    assert {(row["hidden"], row["note"]) for row in shown.values()} == {("***", "open")}


@with_one_delta_writer("under", "search")
def test_a_column_that_gets_a_masked_name_stops_the_table_because_its_older_rows_are_clear(under):
    renamed = replace(ORDERS, columns=(ID, replace(ITEM, name="note"))).following(replace(ORDERS, columns=(ID, ITEM)))
    both = replace(ORDERS, columns=(ID, ITEM, NOTE))
    sink = under({"transform": {"mask": {"note": "redact"}}}).opened()
    merge(sink, batch([noted(1, "open", "secret", 10)], 0, 20, both))
    with pytest.raises(TargetRulesChanged):
        sink.apply(batch([noted(2, "open", "secret", 30)], 20, 40, renamed.following(both)))


NOT_WITHOUT_KEY: Final[list[tuple[dict[str, Any], type[Exception], str]]] = [
    ({"except_column_list": ["id"]}, SchemaNotApplicable, "is part of the key and cannot be excluded"),
    ({"column_list": ["item"]}, SchemaNotApplicable, "is part of the key and cannot be excluded"),
    ({"transform": {"drop": ["id"]}}, TransformFailed, "is part of the key and cannot be dropped or masked"),
    ({"transform": {"mask": {"id": "redact"}}}, TransformFailed, "is part of the key and cannot be dropped or masked"),
    ({"except_column_list": ["nope"]}, SchemaNotApplicable, "has no column 'nope'"),
    ({"transform": {"drop": ["nope"]}}, TransformFailed, "has no column 'nope'"),
]


@pytest.mark.parametrize(("rule", "error", "words"), NOT_WITHOUT_KEY)
@with_one_delta_writer("under", "search")
def test_a_rule_that_does_not_fit_the_table_stops_it(under, rule, error, words):
    with pytest.raises(error, match=words):
        under(rule).opened().apply(batch([put(1, "a", 10)], 0, 20))


@with_one_delta_writer("under", "search")
def test_a_target_of_another_mask_takes_no_batch_until_it_is_rebuilt(under):
    sink = under({"transform": {"mask": {"item": "redact"}}}).opened()
    merge(sink, batch([put(1, "a", 10)], 0, 20))
    sink.close()
    looser = under({})
    sink = looser.opened()
    with pytest.raises(TargetRulesChanged):
        sink.apply(batch([put(2, "b", 30)], 20, 40))
    sink.close()
    staged = looser.stage()
    staged.open_published(LOG)
    staged.sink.open(LOG)
    built = publish(staged.sink, staged.sink.apply(batch([put(1, "a", 10)], 0, 20, generation=5)))
    published = staged.put(built, {})
    staged.discard()

    assert items(looser, published.tables[ORDERS.relation]) == {"1": "a"}
