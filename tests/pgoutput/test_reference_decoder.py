"""How each message becomes rows of the log; every property applies to both decoders."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime
from itertools import islice
from typing import Any

import pytest

from cdc.errors import MalformedFrame, MalformedPosition, UnknownRelation
from cdc.log_row import HEARTBEAT_PREFIX, Operation
from cdc.lsn import Lsn
from cdc.pgoutput.decoder_events import DecodedRows, RelationSeen
from cdc.pgoutput.message_parser import FrameBatch
from cdc.pgoutput.messages import (
    UNCHANGED,
    BeginMessage,
    CommitMessage,
    Delete,
    Insert,
    Keepalive,
    Message,
    OldKind,
    OldTuple,
    OriginMessage,
    Relation,
    Truncate,
    Type,
    Update,
)
from cdc.position import Position
from cdc.table import TableSchema
from tests.pgoutput.encode import POSTGRES_EPOCH, frame
from tests.pgoutput.streams import (
    DECODERS,
    IGNORED,
    IGNORED_OID,
    ODD_PREFIXES,
    ORDERS,
    TABLES,
    decode,
    events,
    ready,
    relation,
    rows,
    table,
    transaction,
)

pytestmark = pytest.mark.parametrize("make", DECODERS)

IMAGES = ("op", "key", "old_key", "before", "after", "partial")


def images(make, change) -> list[tuple[Any, ...]]:
    """The image columns of the rows of one change."""
    return [tuple(row[name] for name in IMAGES) for row in decode(make(), transaction(600, change))]


def feed(decoder, *messages) -> list[Any]:
    return list(events(decoder, [frame(message) for message in messages]))


@pytest.mark.parametrize("year", [1, 9999])
def test_a_commit_time_is_one_that_readers_of_the_log_can_hold(make, year):
    moment = int(datetime(year, 6, 1, tzinfo=UTC).timestamp()) * 1_000_000
    begin, commit = BeginMessage(Lsn(600), moment, 7), CommitMessage(Lsn(600), Lsn(608), moment)
    (row,) = decode(make(), [begin, Insert(1, ("a", None, "")), commit])
    assert row["committed_at"].year == year
    beyond = moment + (-1 if year == 1 else 1) * 366 * 86_400_000_000
    with pytest.raises(MalformedFrame, match="time out of range"):
        decode(make(), [replace(begin, committed_at=beyond)])
    with pytest.raises(MalformedFrame, match="time out of range"):
        decode(make(), [begin, replace(commit, committed_at=beyond)])


def test_an_insert_is_a_row_with_its_transaction(make):
    (row,) = decode(make(epoch=2), transaction(600, Insert(1, ("a", None, "")), xid=2**32 - 1))
    assert (row["position"], row["ordinal"], row["xid"]) == (Position.of(600, 2), 0, 2**32 - 1)
    assert row["committed_at"].timestamp() * 1e6 == POSTGRES_EPOCH + 600
    assert (row["relation"], row["topic"], row["op"], row["key"]) == (101, "shop.orders", "c", ["a"])
    assert row["after"] == [(10, "a"), (11, None), (12, "")]
    assert [row[name] for name in ("old_key", "before", "partial", "payload", "address")] == [
        None,
        None,
        False,
        None,
        None,
    ]


def test_an_update_without_old_tuple_has_no_before(make):
    change = Update(1, None, ("a", "1", "2"))
    assert images(make, change) == [("u", ["a"], None, None, [(10, "a"), (11, "1"), (12, "2")], False)]


def test_an_unchanged_toast_value_is_absent_and_makes_the_row_partial(make):
    change = Update(1, None, ("a", UNCHANGED, None))
    assert images(make, change) == [("u", ["a"], None, None, [(10, "a"), (12, None)], True)]


def test_a_key_change_is_a_delete_then_an_update_with_the_old_key(make):
    change = Update(1, OldTuple(OldKind.KEY, ("a", None, None)), ("b", UNCHANGED, "2"))
    assert images(make, change) == [
        ("d", ["a"], None, [(10, "a")], None, False),
        ("u", ["b"], ["a"], [(10, "a")], [(10, "b"), (12, "2")], True),
    ]
    found = decode(make(), transaction(600, change, Insert(1, ("z", "", ""))))
    assert [row["ordinal"] for row in found] == [0, 1, 2]


@pytest.mark.parametrize(("old", "new"), [("a", "b"), ("a", "ab"), (None, "a"), ("a", None)])
def test_keys_differ_by_text_length_and_null(make, old, new):
    change = Update(1, OldTuple(OldKind.KEY, (old, None, None)), (new, "1", "2"))
    assert [(op, key, moved) for op, key, moved, *_ in images(make, change)] == [
        ("d", [old], None),
        ("u", [new], [old]),
    ]


def test_an_unchanged_toast_key_column_comes_from_the_old_key(make):
    change = Update(1, OldTuple(OldKind.KEY, ("a", None, None)), (UNCHANGED, UNCHANGED, "2"))
    assert images(make, change) == [("u", ["a"], None, [(10, "a")], [(10, "a"), (12, "2")], True)]


def test_under_full_an_unchanged_toast_value_comes_from_the_old_row(make):
    change = Update(2, OldTuple(OldKind.ROW, ("a", "b", "big")), ("a", "b", UNCHANGED))
    whole = [(10, "a"), (11, "b"), (12, "big")]
    assert images(make, change) == [("u", ["b", "a"], None, whole, whole, False)]


def test_under_full_a_null_old_value_fills_an_unchanged_one(make):
    change = Update(2, OldTuple(OldKind.ROW, ("a", "b", None)), ("a", "b", UNCHANGED))
    assert images(make, change)[0][4:] == ([(10, "a"), (11, "b"), (12, None)], False)


def test_under_full_a_key_change_shows_the_whole_old_row_twice(make):
    change = Update(2, OldTuple(OldKind.ROW, ("a", "b", "1")), ("a", "c", "2"))
    before = [(10, "a"), (11, "b"), (12, "1")]
    assert images(make, change) == [
        ("d", ["b", "a"], None, before, None, False),
        ("u", ["c", "a"], ["b", "a"], before, [(10, "a"), (11, "c"), (12, "2")], False),
    ]


@pytest.mark.parametrize(
    ("old", "before"),
    [
        (OldTuple(OldKind.KEY, ("a", None, None)), [(10, "a")]),
        (OldTuple(OldKind.ROW, ("a", None, UNCHANGED)), [(10, "a"), (11, None)]),
    ],
)
def test_a_delete_has_the_sent_columns_of_the_old_row(make, old, before):
    assert images(make, Delete(1, old)) == [("d", ["a"], None, before, None, False)]


def test_rows_of_a_keyless_table_have_no_key_and_never_move(make):
    change = Update(3, OldTuple(OldKind.ROW, ("a", "b")), ("c", UNCHANGED))
    assert images(make, change) == [("u", None, None, [(10, "a"), (11, "b")], [(10, "c"), (11, "b")], False)]


def test_a_table_without_columns_has_empty_images(make):
    assert images(make, Insert(4, ())) == [("c", None, None, None, [], False)]


def test_a_truncate_is_one_row_per_table_asked_for(make):
    found = decode(make(), transaction(600, Truncate((2, IGNORED_OID, 1), cascade=True, restart_identity=True)))
    assert [(row["op"], row["topic"], row["ordinal"]) for row in found] == [
        ("t", "shop.full", 0),
        ("t", "shop.orders", 1),
    ]
    assert {(row["key"], row["after"], row["payload"]) for row in found} == {(None, None, None)}


@pytest.mark.parametrize("prefix", ODD_PREFIXES)
def test_a_message_is_a_row_of_no_table_with_prefix_kind_and_lsn(make, prefix):
    sent = Message(False, Lsn(0x1_0000_0010), prefix, b"", POSTGRES_EPOCH)
    inside, outside = decode(make(), [*transaction(600, Message(True, Lsn(550), prefix, b"\0\xff", 0)), sent])
    assert (inside["op"], inside["payload"], inside["relation"], inside["topic"]) == ("m", b"\0\xff", None, None)
    assert inside["key"] == [prefix, "t", "0/226"]
    assert (outside["op"], outside["payload"], outside["key"]) == ("m", b"", [prefix, "f", "1/10"])


def test_a_heartbeat_leaves_no_row_and_moves_the_position(make):
    (event,) = feed(make(), *transaction(600, Message(True, Lsn(550), HEARTBEAT_PREFIX, b"", 0)))
    assert (event.rows.num_rows, event.complete, event.transactions) == (0, 0, 1)
    assert (event.last, event.committed_at) == (Position(600), POSTGRES_EPOCH + 600)


def test_a_message_outside_transactions_has_a_position_one_byte_before_its_lsn(make):
    decoder = ready(make())
    sent_at = POSTGRES_EPOCH + 5
    (event,) = feed(
        decoder, Message(False, Lsn(600), "audit", b"x", sent_at), *transaction(600, Insert(1, ("a", "", "")))
    )
    assert event.rows["position"].to_pylist() == [599, 600]
    assert event.rows["xid"].to_pylist() == [0, 7]
    assert (event.complete, event.transactions, event.last) == (2, 2, Position(600))


def test_a_heartbeat_outside_transactions_moves_the_position(make):
    (event,) = feed(make(), Message(False, Lsn(600), HEARTBEAT_PREFIX, b"", POSTGRES_EPOCH + 5))
    assert (event.rows.num_rows, event.last, event.committed_at) == (0, Position(599), POSTGRES_EPOCH + 5)


def test_whole_transactions_at_or_below_after_leave_nothing(make):
    decoder = ready(make(after=Position(600)))
    known = [
        *transaction(
            600, Insert(1, ("a", "", "")), Truncate((1,), False, False), Message(True, Lsn(1), "audit", b"", 0)
        ),
        Message(False, Lsn(601), "audit", b"", POSTGRES_EPOCH),
    ]
    (event,) = feed(decoder, *known)
    assert (event.rows.num_rows, event.last, event.transactions) == (0, None, 0)
    (event,) = feed(decoder, *transaction(601, Insert(1, ("b", "", ""))))
    assert (event.rows["key"].to_pylist(), event.last) == ([["b"]], Position(601))


def test_a_transaction_without_rows_counts(make):
    (event,) = feed(make(), *transaction(600), *transaction(700))
    assert (event.transactions, event.last, event.complete) == (2, Position(700), 0)


def test_rows_of_an_open_transaction_are_not_complete(make):
    decoder = ready(make())
    insert = Insert(1, ("a", "", ""))
    (event,) = feed(decoder, *transaction(600, insert), *transaction(700, insert)[:2])
    assert (event.rows.num_rows, event.complete, event.last, decoder.in_transaction) == (2, 1, Position(600), True)
    (event,) = feed(decoder, *transaction(700)[-1:])
    assert (event.rows.num_rows, event.complete, event.last, decoder.in_transaction) == (0, 0, Position(700), False)


def test_a_relation_is_announced_before_the_first_row_that_needs_it(make):
    insert = Insert(1, ("a", "", ""))
    decoder = ready(make())
    seen, event = feed(decoder, *transaction(600, insert, relation(ORDERS), insert))
    assert seen == RelationSeen(relation(ORDERS), Position(600), 7)
    found = rows([event]).to_pylist()
    assert [(row["op"], row["ordinal"]) for row in found] == [("c", 0), ("s", 1), ("c", 2)]
    assert TableSchema.from_json(found[1]["payload"]) == ORDERS
    assert (found[1]["relation"], found[1]["topic"], found[1]["key"]) == (101, "shop.orders", None)
    assert event.complete == 3


def test_rows_follow_the_latest_definition(make):
    decoder = make()
    decoder.define(ORDERS, announce=False)
    feed(decoder, *transaction(600, Insert(1, ("a", "", ""))))
    decoder.define(replace(table(1, name="renamed", width=2, key=(1,)), oid=1), announce=False)
    (event,) = feed(decoder, *transaction(700, Insert(1, ("a", "b"))))
    assert (event.rows["topic"].to_pylist(), event.rows["key"].to_pylist()) == (["shop.renamed"], [["b"]])


def test_an_announcement_outside_a_kept_transaction_waits_for_the_next(make):
    decoder = make(after=Position(600))
    flagged = replace(ORDERS, name="later")
    decoder.define(ORDERS, announce=True)
    feed(decoder, *transaction(500))
    decoder.define(flagged, announce=True)
    (event,) = feed(decoder, *transaction(700, Insert(1, ("a", "", ""))))
    assert event.rows["op"].to_pylist() == ["s", "c"]
    assert event.rows["payload"].to_pylist()[0] == flagged.to_json()


def test_a_relation_without_rows_is_never_seen(make):
    leaf = relation(table(50, name="orders_2024"))
    insert, truncate = Insert(1, ("a", "", "")), Truncate((1,), False, False)
    found = feed(
        make(), *transaction(600, leaf, relation(ORDERS)), *transaction(700, leaf, relation(ORDERS), insert, truncate)
    )
    assert [event for event in found if isinstance(event, RelationSeen)] == [
        RelationSeen(relation(ORDERS), Position(700), 7)
    ]
    assert rows(found)["relation"].to_pylist() == [101, 101, 101]
    assert rows(found)["op"].to_pylist() == ["s", "c", "t"]


def test_a_relation_from_a_dropped_transaction_is_seen_at_the_first_kept_row(make):
    decoder = make(after=Position(600))
    insert, truncate = Insert(1, ("a", "", "")), Truncate((1,), False, False)
    (event,) = feed(decoder, *transaction(500, relation(ORDERS), insert, truncate))
    assert (event.rows.num_rows, event.last) == (0, None)
    seen, event = feed(decoder, *transaction(700, insert))
    assert seen == RelationSeen(relation(ORDERS), Position(700), 7)
    assert event.rows["op"].to_pylist() == ["s", "c"]


def test_only_the_latest_of_several_relation_messages_is_seen(make):
    old = relation(replace(ORDERS, name="old"))
    seen, event = feed(make(), *transaction(600, old, relation(ORDERS), Insert(1, ("a", "", ""))))
    assert seen == RelationSeen(relation(ORDERS), Position(600), 7)
    assert event.rows["ordinal"].to_pylist() == [0, 1]


@pytest.mark.parametrize(
    "change",
    [
        Update(1, None, ("a", "1", "2")),
        Delete(1, OldTuple(OldKind.KEY, ("a", None, None))),
        Truncate((1,), False, False),
    ],
)
def test_every_kind_of_change_shows_its_relation(make, change):
    seen, event = feed(make(), *transaction(600, relation(ORDERS), change))
    assert seen == RelationSeen(relation(ORDERS), Position(600), 7)
    assert event.rows["op"].to_pylist()[0] == "s"
    assert event.rows.num_rows == 2


def test_a_truncate_of_several_relations_comes_after_all_were_announced(make):
    first, second = relation(ORDERS), relation(TABLES[2])
    found = feed(make(), *transaction(600, first, second, Truncate((1, 2), False, False)))
    assert [type(event) for event in found] == [RelationSeen, RelationSeen, DecodedRows]
    told = rows(found).select(["op", "relation", "ordinal"]).to_pylist()
    assert [tuple(row.values()) for row in told] == [("s", 101, 0), ("s", 102, 1), ("t", 101, 2), ("t", 102, 3)]


def test_a_relation_may_be_ignored_when_it_is_seen(make):
    insert = Insert(IGNORED_OID, ("not", "of", "this", "width"))
    seen, event = feed(make(), *transaction(600, relation(IGNORED), insert, insert))
    assert seen == RelationSeen(relation(IGNORED), Position(600), 7)
    assert (event.rows.num_rows, event.last) == (0, Position(600))


def test_a_change_outside_a_transaction_is_malformed_before_its_relation_is_seen(make):
    stream = events(make(), [frame(relation(ORDERS)), frame(Insert(1, ("a", "", "")))])
    with pytest.raises(MalformedFrame, match="outside a transaction"):
        next(stream)


@pytest.mark.parametrize("change", [Insert(1, ()), Truncate((1,), False, False)])
def test_a_relation_message_forgets_the_old_shape(make, change):
    decoder = ready(make())
    begin = transaction(600)[0]
    stranger = Relation(1, "x", "y", "d", ())
    stream = decoder.decode(FrameBatch.of([frame(begin), frame(stranger), frame(change)]))
    assert next(stream) == RelationSeen(stranger, Position(600), 7)
    with pytest.raises(UnknownRelation, match="relation 1 "):
        next(stream)


def test_rows_of_an_unknown_relation_are_an_error_after_the_rows_before_them(make):
    decoder = ready(make())
    frames = [frame(m) for m in [*transaction(600, Insert(1, ("a", "", ""))), *transaction(700, Insert(77, ("a",)))]]
    stream = events(decoder, frames)
    (first,) = islice(stream, 1)
    assert isinstance(first, DecodedRows)
    assert first.last == Position(600)
    with pytest.raises(UnknownRelation, match="relation 77 "):
        next(stream)


def test_truncating_a_relation_never_seen_is_an_error(make):
    with pytest.raises(UnknownRelation, match="relation 77 "):
        decode(make(), transaction(600, Truncate((77,), False, False)))


def test_rows_of_an_ignored_relation_leave_nothing(make):
    assert decode(make(), transaction(600, Insert(IGNORED_OID, ("a", "b")))) == []


def test_origins_and_types_leave_nothing(make):
    assert decode(make(), transaction(600, OriginMessage(Lsn(1), "other"), Type(5, "shop", "mood"))) == []


def test_keepalives_that_ask_come_at_their_place_and_the_last_other_one_at_the_end(make):
    decoder = ready(make())
    quiet, asking = Keepalive(Lsn(650), False), Keepalive(Lsn(700), True)
    first, second = transaction(600, Insert(1, ("a", "", ""))), transaction(800)
    found = feed(decoder, quiet, *first, quiet, asking, *second, quiet, Keepalive(Lsn(900), False))
    assert [type(event) for event in found] == [DecodedRows, Keepalive, DecodedRows, Keepalive]
    assert (found[1], found[3].wal_end) == (asking, 900)
    assert feed(decoder, asking) == [asking]
    assert feed(decoder, quiet) == [quiet]


def test_an_empty_batch_yields_nothing(make):
    assert feed(make()) == []


INSERT = Insert(1, ("a", "", ""))
BEGIN, COMMIT = transaction(600)


@pytest.mark.parametrize(
    ("messages", "reason"),
    [
        ([INSERT], "outside a transaction"),
        ([COMMIT], "outside a transaction"),
        ([Truncate((1,), False, False)], "outside a transaction"),
        ([Message(True, Lsn(1), "audit", b"", POSTGRES_EPOCH)], "outside a transaction"),
        ([BEGIN, BEGIN], "begins inside another"),
        ([BEGIN, CommitMessage(Lsn(601), Lsn(602), POSTGRES_EPOCH)], "expected the commit of 0/258, got 0/259"),
        ([BEGIN, Message(False, Lsn(1), "audit", b"", POSTGRES_EPOCH)], "non-transactional message is inside"),
        ([Message(False, Lsn(0), "audit", b"", POSTGRES_EPOCH)], "does not fit a position"),
        ([BeginMessage(Lsn(1 << 52), POSTGRES_EPOCH, 1)], "does not fit a position"),
        ([BEGIN, Insert(1, ("a", ""))], "expected 3 columns of 'shop.orders', got 2"),
        ([BEGIN, Insert(1, (UNCHANGED, "", ""))], "a key column of 'shop.orders' was not sent"),
        ([BEGIN, Update(1, None, (UNCHANGED, "", ""))], "a key column"),
        ([BEGIN, Delete(1, OldTuple(OldKind.KEY, (UNCHANGED, "", "")))], "a key column"),
        ([BEGIN, Update(1, OldTuple(OldKind.KEY, ("a",)), ("a", "", ""))], "got 1"),
    ],
)
def test_messages_in_a_wrong_order_are_malformed(make, messages, reason):
    with pytest.raises(MalformedFrame, match=reason):
        feed(ready(make()), *messages)


def test_an_error_shows_lsn_and_frame_start_but_no_value(make):
    header = b"w" + (0x16B374D848).to_bytes(8, "big") + bytes(16)
    secret = header + frame(Insert(1, ("s3cret-value-of-a-row", "", "")))[25:-1]
    with pytest.raises(MalformedFrame, match=f"malformed frame at 16/B374D848: .*'{secret[:32].hex()}'$") as caught:
        list(events(ready(make()), [frame(BEGIN), secret]))
    assert b"s3cret".hex() not in str(caught.value)


def test_an_epoch_out_of_range_is_refused(make):
    with pytest.raises(MalformedPosition):
        make(epoch=1 << 11)


def test_values_beyond_the_limit_come_in_more_than_one_piece(make):
    decoder = ready(make())
    found = feed(decoder, *transaction(600, *[Insert(1, ("a", "x" * (9 << 20), "")) for _ in range(4)]))
    assert len(found) > 1
    assert [row["op"] for row in rows(found).select(["op"]).to_pylist()] == [Operation.CREATE] * 4
