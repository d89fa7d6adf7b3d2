"""Number of each event among the events of its source transaction, as Debezium's `total_order` counts them.

The events are those that the delivery makes of the transaction, whether they are sent, wait behind a dead letter, or
cannot be encoded. So a number is the same after a crash, in a replay and when a dead letter is sent later. Two things
change it: an overload policy that drops changes, and the compaction of the log, which removes changes.
"""

from __future__ import annotations

from collections import Counter

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from cdc.delivery.formats.event_rows import run_starts
from cdc.delivery.formats.table_changes import TransactionNumbers
from cdc.log_row import Operation
from cdc.logical_message import message_keys


class TransactionCounter:
    """Counts the events of the transactions of one window of the log, part by part, in log order."""

    def __init__(self) -> None:
        self._counts: dict[int, Counter[str | None]] = {}

    def events_of(self, position: int) -> Counter[str | None]:
        """Return table → number of its events so far in the transaction at a position; messages have no table."""
        return self._counts[position]

    def number(self, rows: pa.Table, sent: np.ndarray) -> tuple[TransactionNumbers, np.ndarray]:
        """Return the numbers of all rows, and the rows that have one.

        rows: the next log rows; sent: rows that have an event. A copied row, and a message outside of transactions,
        belong to no transaction.
        """
        counted = np.sort(sent[_in_transaction(rows)[sent]])
        total, own = np.zeros(rows.num_rows, np.int64), np.zeros(rows.num_rows, np.int64)
        if len(counted):
            positions = rows["position"].to_numpy()[counted]
            tables = rows["topic"].combine_chunks().dictionary_encode()
            codes = tables.indices.fill_null(-1).to_numpy()[counted]
            names = [*tables.dictionary.to_pylist(), None]
            by_table = np.lexsort((codes, positions))
            firsts = run_starts(positions[by_table], codes[by_table])
            total[counted] = _ranks(run_starts(positions), len(counted))
            own[counted[by_table]] = _ranks(firsts, len(counted))
            self._continue(positions, total, own, (counted, [names[code] for code in codes]))
            sizes = np.diff([*firsts, len(counted)])
            for place in np.argsort(by_table[firsts]).tolist():
                first = int(by_table[firsts[place]])
                counts = self._counts.setdefault(int(positions[first]), Counter())
                counts[names[codes[first]]] += int(sizes[place])
        is_outside = total == 0
        return TransactionNumbers(pa.array(total, mask=is_outside), pa.array(own, mask=is_outside)), counted

    def _continue(
        self,
        positions: np.ndarray,
        total: np.ndarray,
        own: np.ndarray,
        counted: tuple[np.ndarray, list[str | None]],
    ) -> None:
        """Add what earlier parts had of the first transaction; counted: the rows and their tables."""
        earlier = self._counts.get(int(positions[0]))
        if earlier is None:
            return
        rows, tables = counted
        for row, table in zip(rows[positions == positions[0]].tolist(), tables, strict=False):
            total[row] += earlier.total()
            own[row] += earlier[table]


def _ranks(firsts: np.ndarray, count: int) -> np.ndarray:
    """Return 1, 2, 3 … for the members of each group."""
    return np.arange(1, count + 1) - np.repeat(firsts, np.diff([*firsts, count]))


def _in_transaction(rows: pa.Table) -> np.ndarray:
    """Return for each row whether its events belong to a transaction."""
    is_message = pc.equal(rows["op"], Operation.MESSAGE.value)
    found = pc.not_equal(rows["op"], Operation.READ.value).to_numpy()
    if pc.any(is_message).as_py():
        kinds = message_keys(rows["key"].filter(is_message).combine_chunks()).transactional
        # an older log does not record the kind
        found[is_message.to_numpy()] = kinds.fill_null(True).to_numpy(zero_copy_only=False)
    return found
