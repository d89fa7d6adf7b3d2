"""Rules do the same in every sink: columns that are left out, names, masks, and rules that do not fit a table."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import pytest

from cdc.errors import SchemaNotApplicable, TargetRulesChanged, TransformFailed
from tests.contracts.folded import ORDERS, batch, gone, part, put, with_one_delta_writer
from tests.contracts.sink_stores import KINDS, LOG, Store, items, merge, publish, store_under


@pytest.fixture(params=KINDS)
def under(request) -> Callable[[dict[str, Any]], Store]:
    """Make the store under a rule."""
    return lambda rule: store_under(request, rule)


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
