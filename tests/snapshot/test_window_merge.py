"""The window: over any history, any snapshot inside it and any watermark, the log ends in the source's own state."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from cdc.log.encoded_chunk import EncodedChunk
from cdc.log.table_io import encode
from cdc.log_row import LOG_SCHEMA, RowOrder
from cdc.snapshot.chunk_copier import deletion_rows
from cdc.snapshot.window_merge import merge_encoded, merge_keyed, rows_at_position, rows_of_relation
from cdc.table import Column, ReplicaIdentity, TableSchema
from tests.fixtures.examples import examples

RELATION = 7
COLUMNS = (1, 2, 3)
SCHEMA = TableSchema(
    relation=RELATION,
    oid=RELATION,
    schema="t",
    name="t",
    replica_identity=ReplicaIdentity.DEFAULT,
    columns=tuple(
        Column(id=n, name=f"c{n}", type_oid=25, type_name="text", key=0 if n == 1 else None) for n in COLUMNS
    ),
)
Row = dict[int, str | None]


@dataclass
class Source:
    """A table of key → row, and what the stream says of each change of it; column 3 is long and not always sent."""

    rows: dict[str, Row] = field(default_factory=dict)
    told: list[dict[str, Any]] = field(default_factory=list)
    states: list[dict[str, Row]] = field(default_factory=list)
    """After each position, the first before any."""

    def __post_init__(self) -> None:
        self._note()

    def change(self, kind: str, key: str, value: str) -> None:
        """One transaction of one statement at the next position."""
        position = len(self.states)
        if kind == "truncate":
            self.rows = {}
            self._tell(position, 0, op="t")
        elif kind == "delete" and key in self.rows:
            del self.rows[key]
            self._tell(position, 0, op="d", key=[key])
        elif kind == "short" and key in self.rows:
            self.rows[key] = {**self.rows[key], 2: value}
            self._tell(position, 0, op="u", key=[key], after=[(1, key), (2, value)], partial=True)
        elif kind == "move" and key in self.rows and value not in self.rows:
            row = {**self.rows.pop(key), 1: value}
            self.rows[value] = row
            self._tell(position, 0, op="d", key=[key])
            sent = [(1, value), (2, row[2])]
            self._tell(position, 1, op="u", key=[value], old_key=[key], after=sent, partial=True)
        elif kind == "full":
            self.rows[key] = {1: key, 2: value, 3: f"long {value}"}
            self._tell(position, 0, op="u", key=[key], after=list(self.rows[key].items()))
        self._note()

    def _tell(self, position: int, ordinal: int, **said: Any) -> None:
        row: dict[str, Any] = dict.fromkeys(LOG_SCHEMA.names) | {"partial": False}
        self.told.append(
            row | {"position": position, "ordinal": ordinal, "xid": 1, "committed_at": 0, "relation": RELATION} | said
        )

    def _note(self) -> None:
        self.states.append({key: dict(row) for key, row in self.rows.items()})


def log_rows(rows: list[dict[str, Any]]) -> pa.Table:
    return pa.Table.from_pylist(rows, LOG_SCHEMA)


def chunk_of(state: dict[str, Row]) -> pa.Table:
    """What a copy under a snapshot of that state gives."""
    blank = dict.fromkeys(LOG_SCHEMA.names) | {"position": 0, "xid": 0, "committed_at": 0, "partial": False}
    return log_rows(
        [
            {**blank, "ordinal": n, "relation": RELATION, "op": "r", "key": [key], "after": list(row.items())}
            for n, (key, row) in enumerate(state.items())
        ]
    )


def list_of(state: dict[str, Row], keys: set[str]) -> pa.Table:
    """What a copy of listed keys gives under a snapshot of that state: their rows, and deletions of the others."""
    rows = chunk_of({key: row for key, row in state.items() if key in keys})
    return pa.concat_tables([rows, deletion_rows(SCHEMA, [(key,) for key in sorted(keys - state.keys())])])


def replayed(rows: list[dict[str, Any]], held: dict[str, Row] | None = None) -> dict[str, Row]:
    """What a target holds that applies the rows in order; a move without its base waits for nothing, it has a hole."""
    state: dict[str, Row] = dict(held or {})
    left: dict[str, Row] = {}
    for row in sorted(rows, key=lambda row: (row["position"], row["ordinal"])):
        if row["op"] == "t":
            state = {}
            continue
        (key,) = row["key"]
        if row["op"] == "d":
            left[key] = state.pop(key, {})
        elif row["partial"]:
            base = left.get(row["old_key"][0], {}) if row["old_key"] else state.get(key, {})
            state[key] = {**base, **dict(row["after"])}
        else:
            state[key] = dict(row["after"])
    return state


CHANGES = st.lists(
    st.tuples(
        st.sampled_from(["full", "full", "short", "short", "delete", "move", "truncate"]),
        st.sampled_from("abc"),
        st.sampled_from("abcdxyz"),
    ),
    min_size=3,
    max_size=14,
)
often = examples(40)


def lived(changes: list[tuple[str, str, str]]) -> Source:
    """A source with rows from the start, after those changes."""
    source = Source()
    for key in "abc":
        source.change("full", key, "first")
    for change in changes:
        source.change(*change)
    return source


def moments(data: st.DataObject, source: Source) -> tuple[int, int, int]:
    """Received, seen by the snapshot, and the watermark."""
    drawn = sorted(data.draw(st.tuples(*[st.integers(2, len(source.states) - 1)] * 3)))
    return drawn[0], drawn[1], drawn[2]


@often
@given(CHANGES, st.data())
def test_a_target_that_knew_the_rows_before_equals_the_source_at_the_watermark(changes, data):
    source = lived(changes)
    received, seen, watermark = moments(data, source)
    told = [row for row in source.told if row["position"] <= watermark]
    settled = merge_keyed(chunk_of(source.states[seen]), window(told, received))
    assert settled is not None
    rows = [row for batch in rows_at_position(settled, RowOrder(watermark, 100, 1, 0)) for row in batch.to_pylist()]
    assert replayed([*told, *rows]) == source.states[watermark]


@often
@given(CHANGES, st.data())
def test_a_target_that_knew_nothing_has_every_row_of_the_chunk_whole(changes, data):
    """A move from a row that was not read yet has a hole that a chunk of the one key fills; nothing else has."""
    source = lived(changes)
    received, seen, watermark = moments(data, source)
    behind = [row for row in source.told if received < row["position"] <= watermark]
    settled = merge_keyed(chunk_of(source.states[seen]), window(behind, received))
    assert settled is not None
    rows = [row for batch in rows_at_position(settled, RowOrder(watermark, 100, 1, 0)) for row in batch.to_pylist()]
    found, moved = replayed([*behind, *rows]), {row["key"][0] for row in behind if row["old_key"]}
    for key, row in source.states[watermark].items():
        if key not in moved:
            assert found[key] == row
    assert found.keys() == source.states[watermark].keys()


@often
@given(CHANGES, st.data())
def test_listed_keys_leave_a_true_target_true_and_mend_whatever_another_hand_did_to_them(changes, data):
    """But for a row that moved in the window from a key that was spoiled: it took what it found there with it."""
    source = lived(changes)
    received, seen, watermark = moments(data, source)
    keys = data.draw(st.sets(st.sampled_from("abcdxyz"), min_size=1))
    behind = [row for row in source.told if received < row["position"] <= watermark]
    settled = merge_keyed(list_of(source.states[seen], keys), window(behind, received))
    assert settled is not None
    rows = [row for batch in rows_at_position(settled, RowOrder(watermark, 100, 1, 0)) for row in batch.to_pylist()]
    true = source.states[received]
    assert replayed([*behind, *rows], true) == source.states[watermark]

    stray: Row = {1: "?", 2: "?", 3: "?"}
    spoiled = data.draw(st.fixed_dictionaries({key: st.booleans() for key in keys}))
    there = {key: row for key, row in true.items() if key not in spoiled}
    found = replayed([*behind, *rows], there | {key: stray for key, is_there in spoiled.items() if is_there})
    moved = {row["key"][0] for row in behind if row["old_key"]}
    assert found.keys() == source.states[watermark].keys()
    assert {k: v for k, v in found.items() if k not in moved} == {
        k: v for k, v in source.states[watermark].items() if k not in moved
    }


@often
@given(CHANGES, st.data(), st.integers(1, 4))
def test_row_groups_that_an_executor_encoded_are_merged_as_the_rows_of_the_chunk(changes, data, group):
    source = lived(changes)
    received, seen, watermark = moments(data, source)
    chunk = chunk_of(source.states[seen])
    assume(chunk.num_rows)  # an executor writes no file without rows
    told = window([row for row in source.told if row["position"] <= watermark], received)
    encoded = EncodedChunk.parse(bytes(encode(chunk, group=group)), RELATION)

    merged, expected = merge_encoded(encoded, told), merge_keyed(chunk, told)

    assert merged is not None
    assert expected is not None
    groups, rows = merged
    found = [*encoded.table(groups).to_pylist(), *rows.to_pylist()]
    assert sorted(found, key=by_key) == sorted(expected.to_pylist(), key=by_key)
    if "t" not in told["op"].to_pylist():
        changed = {key for (key,) in told["key"].drop_null().to_pylist()}
        keys = [[key for (key,) in keys.to_pylist()] for keys in encoded.group_keys()]
        assert list(groups) == [number for number, own in enumerate(keys) if changed.isdisjoint(own)]


def by_key(row: dict[str, Any]) -> str:
    return str(row["key"])


@pytest.mark.parametrize("said", ["short", "full", "delete", "truncate"])
def test_what_the_window_says_of_a_key_that_was_not_found_decides(said):
    source = Source()
    for kind in ("full", said):
        source.change(kind, "a", "x")
    told = window(source.told, 1)
    assert told.num_rows == 1
    settled = merge_keyed(list_of({}, {"a"}), told)
    assert settled is not None
    assert settled.num_rows == 0


def window(rows: list[dict[str, Any]], received: int) -> pa.Table:
    return rows_of_relation(pa.RecordBatch.from_pylist(rows, LOG_SCHEMA), RELATION, received)


def test_a_new_version_of_the_schema_asks_for_another_read():
    source = Source()
    source.change("full", "a", "x")
    rows = [*source.told, {**source.told[0], "op": "s", "key": None, "after": None, "position": 2}]
    assert merge_keyed(chunk_of(source.states[1]), window(rows, 1)) is None


def test_rows_of_other_relations_decide_nothing():
    source = Source()
    source.change("full", "a", "x")
    others = [{**row, "relation": RELATION + 1, "op": "d", "position": 2} for row in source.told]
    settled = merge_keyed(chunk_of(source.states[1]), window(others, 1))
    assert settled is not None
    assert settled.num_rows == 1


@pytest.mark.parametrize("address", [None, "lake"])
def test_rows_stand_behind_each_other_at_the_watermark(address):
    source = Source()
    for key in "abc":
        source.change("full", key, "x")
    (batch,) = rows_at_position(chunk_of(source.states[-1]), RowOrder(900, 4, 31, 5), address)
    assert batch["position"].to_pylist() == [900] * 3
    assert batch["ordinal"].to_pylist() == [4, 5, 6]
    assert batch["xid"].to_pylist() == [31] * 3
    assert batch["address"].to_pylist() == [address] * 3
