"""What the formats have in common: columns of the log rows as texts of JSON, and the events of changes.

`JsonRows` converts the columns that every event has, once per distinct transaction. `assemble` makes events from keys
and values: it leaves out rows without events and refused changes, and adds tombstones after deletes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import Final, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from cdc.delivery.formats.contract import TOMBSTONE, EncodedEvents, Headers
from cdc.errors import CdcError, EventNotEncodable
from cdc.json_arrays import concatenated
from cdc.log_row import Operation
from cdc.logical_message import message_keys
from cdc.position import LSN_BITS, Position

_LSN_MASK: Final = (1 << LSN_BITS) - 1
_CONTROL: Final = pa.array([Operation.SCHEMA.value, Operation.GENERATION.value])
_HALF: Final = 32
"""Bits of the number after the slash of a position; the numbers before it are the same for 4 GiB of WAL."""
_DIGITS: Final = 8
"""Maximum number of its digits."""


@dataclass(frozen=True, slots=True)
class SourceNames:
    """Names of the source that events contain."""

    pipeline: str
    database: str
    version: str
    """Version of cdc."""
    log_id: str = ""
    """Id of the log, with which the ids of its events begin."""


class RowTransactions(NamedTuple):
    """The transactions of some log rows."""

    firsts: np.ndarray
    """Index of the first row of each transaction."""
    numbers: np.ndarray
    """Number of the transaction of each row."""
    positions: pa.StringArray
    """Position of each transaction as text."""


class JsonRows:
    """Log rows whose columns become texts, for the pieces of JSON objects."""

    def __init__(self, rows: pa.Table) -> None:
        self.rows = rows
        self.count = rows.num_rows

    def array(self, name: str) -> pa.Array:
        """Return one column of the log rows."""
        column = self.rows.column(name)
        return column.chunk(0) if column.num_chunks == 1 else column.combine_chunks()

    def is_operation(self, operation: Operation) -> np.ndarray:
        """Return for each row whether it has this operation."""
        return _booleans(pc.equal(self.array("op"), operation.value))

    @cached_property
    def transactions(self) -> RowTransactions:
        """The transactions of the rows, which many texts are made of."""
        positions = self.array("position").to_numpy()
        firsts = run_starts(positions)
        return RowTransactions(firsts, run_numbers(firsts, self.count), position_texts(positions[firsts]))

    def once_per_transaction(self, texts: Callable[[JsonRows], pa.StringArray]) -> pa.StringArray:
        """Return texts that depend on transaction id and commit time only: they are made once where both repeat."""
        shared = [self.array("xid"), self.array("committed_at")]
        if any(column.null_count for column in shared):
            return texts(self)
        firsts = run_starts(*(column.cast(pa.int64()).to_numpy() for column in shared))
        if len(firsts) == self.count:
            return texts(self)
        rows = pa.table([column.take(pa.array(firsts)) for column in shared], ["xid", "committed_at"])
        return texts(JsonRows(rows)).take(pa.array(run_numbers(firsts, self.count)))

    def is_change(self) -> np.ndarray:
        """Return for each row whether it is a change; schema versions and ends of copies are none."""
        return _booleans(pc.invert(pc.is_in(self.array("op"), _CONTROL)))

    def xids(self) -> pa.StringArray:
        """Return the transaction ids."""
        return self.array("xid").cast(pa.string())

    def ordinals(self, first: int = 0) -> pa.StringArray:
        """Return the ordinals, numbered from `first`."""
        return pc.add(self.array("ordinal"), first).cast(pa.string())

    def lsns(self) -> pa.StringArray:
        """Return the LSNs of the commit records as integers."""
        return pc.bit_wise_and(self.array("position"), _LSN_MASK).cast(pa.string())

    def positions(self) -> pa.StringArray:
        """Return the positions as text, such as `16/B374D848`."""
        _, numbers, positions = self.transactions
        return positions if len(positions) == self.count else positions.take(pa.array(numbers))

    def event_ids(self, log_id: str) -> pa.StringArray:
        """Return the ids of the events: `LOG ID/POSITION/ORDINAL`."""
        return concatenated([f"{log_id}/", self.positions(), "/", self.ordinals()])

    def micros(self) -> pa.StringArray:
        """Return the commit times in microseconds since 1970."""
        return self.array("committed_at").cast(pa.int64()).cast(pa.string())

    def millis(self) -> pa.StringArray:
        """Return the commit times in milliseconds since 1970, rounded down."""
        micros = self.array("committed_at").cast(pa.int64())
        return _each(micros, lambda value: str(value // 1000))

    def commit_times(self) -> pa.StringArray:
        """Return the commit times as `2026-01-31T12:30:00.000000Z`."""
        texts = self.array("committed_at").cast(pa.timestamp("us")).cast(pa.string())
        return pc.binary_join_element_wise(pc.binary_replace_slice(texts, 10, 11, "T"), "Z", "")


def run_starts(*columns: np.ndarray) -> np.ndarray:
    """Return the index of each row that differs from the one before it in one of the columns; the first row does."""
    is_new = np.ones(len(columns[0]), dtype=bool)
    is_new[1:] = np.logical_or.reduce([column[1:] != column[:-1] for column in columns])
    return np.flatnonzero(is_new)


def run_numbers(firsts: np.ndarray, count: int) -> np.ndarray:
    """Return for each of `count` rows the number of its run. firsts: what `run_starts` returned"""
    return np.repeat(np.arange(len(firsts)), np.diff(np.append(firsts, count)))


def position_texts(positions: np.ndarray) -> pa.StringArray:
    """Return `str(Position(position))` of each position."""
    high, low = positions >> _HALF, positions & ((1 << _HALF) - 1)
    # almost always true of the positions in one part of a log, which are in order
    is_uniform = len(positions) > 0 and high.min() == high.max() and _digits(low.min()) == _digits(low.max())
    if not is_uniform:
        return pa.array([str(Position(position)) for position in positions.tolist()], pa.string())
    prefix = str(Position(int(high[0]) << _HALF)).removesuffix("0").encode()
    digits = _digits(low[0])
    text = np.empty((len(positions), len(prefix) + digits), np.uint8)
    text[:, : len(prefix)] = np.frombuffer(prefix, np.uint8)
    table = _four_digits()
    both = np.stack([table[low >> 16], table[low & 0xFFFF]], axis=1)
    text[:, len(prefix) :] = both.view(np.uint8).reshape(-1, _DIGITS)[:, _DIGITS - digits :]
    ends = np.arange(0, text.size + 1, text.shape[1], dtype=np.int32)
    return pa.StringArray.from_buffers(len(positions), pa.py_buffer(ends), pa.py_buffer(text))


def _digits(number: np.integer) -> int:
    return max(1, (int(number).bit_length() + 3) // 4)


@lru_cache(maxsize=1)
def _four_digits() -> np.ndarray:
    """Return the four hexadecimal digits of each number of 16 bits, as the four bytes of a word."""
    texts = b"".join(b"%04X" % number for number in range(1 << 16))
    return np.frombuffer(texts, np.uint32)


def _each(values: pa.Array, convert: Callable[[int], str]) -> pa.StringArray:
    """Convert each distinct integer once."""
    distinct = values.dictionary_encode()
    return pa.array([convert(value) for value in distinct.dictionary.to_pylist()], pa.string()).take(distinct.indices)


def _booleans(values: pa.BooleanArray) -> np.ndarray:
    return values.to_numpy(zero_copy_only=False)


@dataclass(slots=True)
class Refusals:
    """Changes of one table that cannot be encoded."""

    topic: str
    """The table, `schema.table`."""
    found: dict[int, CdcError] = field(default_factory=dict)

    def add(self, changes: np.ndarray, column: str, reason: str) -> None:
        """Refuse the changes for which `changes` is True."""
        for index in np.flatnonzero(changes).tolist():
            self.found.setdefault(
                index, EventNotEncodable(f"column {column!r} of table {self.topic} cannot be sent: {reason}")
            )

    def add_changes(self, changes: np.ndarray, reason: str) -> None:
        """Refuse changes for a reason that concerns no single column."""
        for index in np.flatnonzero(changes).tolist():
            self.found.setdefault(index, EventNotEncodable(f"a change of table {self.topic} cannot be sent: {reason}"))


def assemble(
    events: tuple[pa.StringArray, pa.StringArray],
    is_sent: np.ndarray,
    refused: Mapping[int, CdcError],
    *,
    headers: Mapping[int, Headers] | None = None,
    tombstones: np.ndarray | None = None,
) -> EncodedEvents:
    """Return the events of changes.

    events: keys and values, one per row; is_sent: rows that have an event; headers: index of a row → headers of its
    events; tombstones: rows whose event is followed by a tombstone.
    """
    keys, values = events
    wanted = is_sent.copy()
    wanted[list(refused)] = False
    source = np.flatnonzero(wanted)
    suffixes: list[str] | None = None
    if tombstones is not None and (with_tombstone := tombstones[source]).any():
        repeated = np.repeat(source, 1 + with_tombstone)
        is_tombstone = np.concatenate(([False], repeated[1:] == repeated[:-1]))
        suffixes = [TOMBSTONE if flag else "" for flag in is_tombstone.tolist()]
        keys, values = keys.take(pa.array(repeated)), values.take(pa.array(repeated, mask=is_tombstone))
        source = repeated
    elif len(source) < len(is_sent):
        keys, values = keys.take(pa.array(source)), values.take(pa.array(source))
    return EncodedEvents(
        source=source,
        suffixes=suffixes,
        keys=keys,
        values=values,
        headers=[headers.get(index, ()) for index in source.tolist()] if headers else None,
        refused={index: refused[index] for index in sorted(refused) if is_sent[index]},
    )


@dataclass(frozen=True, slots=True)
class MessageColumns:
    """Columns of logical messages."""

    prefixes: pa.StringArray
    """Null for a message of log format 1 or 2, which does not record it."""
    transactional: pa.StringArray
    """`true` or `false`; null as for prefixes."""
    lsns: pa.StringArray
    """LSNs as integers: of the message, or of the commit record if the log does not record the former."""
    contents: pa.BinaryArray
    """Content; empty for a message without content."""


def message_columns(rows: JsonRows) -> MessageColumns:
    """Return prefix, kind, LSN and content of logical messages."""
    keys = message_keys(rows.array("key"))
    return MessageColumns(
        prefixes=keys.prefixes,
        transactional=keys.transactional.cast(pa.string()),
        lsns=pc.coalesce(keys.lsns.cast(pa.string()), rows.lsns()),
        contents=pc.fill_null(rows.array("payload"), b""),
    )
