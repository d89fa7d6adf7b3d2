"""Numbers of events in their transactions, counted in parts of any size."""

from __future__ import annotations

from random import Random

import numpy as np
import pytest

from cdc.delivery.transaction_counter import TransactionCounter
from tests.delivery.sent_log import random_transactions
from tests.log.rows import message_row, row, table


@pytest.mark.parametrize("seed", range(5))
def test_the_numbers_do_not_depend_on_how_the_rows_are_divided(seed: int):
    random = Random(seed)
    rows = table(*(one for rows in random_transactions(random, 20, 10, most=12) for one in rows))
    whole, _ = TransactionCounter().number(rows, np.arange(rows.num_rows))
    counter, total, own, start = TransactionCounter(), list[int](), list[int](), 0
    while start < rows.num_rows:
        part = rows.slice(start, random.randint(1, 7))
        found, _ = counter.number(part, np.arange(part.num_rows))
        total, own, start = total + found.total.to_pylist(), own + found.in_table.to_pylist(), start + part.num_rows

    assert (total, own) == (whole.total.to_pylist(), whole.in_table.to_pylist())
    for position in set(rows["position"].to_pylist()):
        places = [n for n, one in enumerate(rows["position"].to_pylist()) if one == position]
        assert [total[n] for n in places] == list(range(1, len(places) + 1))
        assert counter.events_of(position).total() == len(places)


def test_only_rows_of_transactions_that_have_an_event_are_counted():
    rows = table(
        row(20, 0, op="r"),
        row(30, 0),
        row(30, 1),
        message_row(30, 2, key=["a", "t", "0/1"]),
        message_row(30, 3, key=["a", "f", "0/1"]),
        message_row(30, 4, key=None),
        row(30, 5),
    )
    found, counted = TransactionCounter().number(rows, np.array([0, 6, 1, 3, 4, 5]))

    assert found.total.to_pylist() == [None, 1, None, 2, None, 3, 4]
    assert found.in_table.to_pylist() == [None, 1, None, 1, None, 2, 2]
    assert counted.tolist() == [1, 3, 5, 6]
