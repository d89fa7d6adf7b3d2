"""COPY text becomes `r` rows with the values that Postgres escaped."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given
from hypothesis import strategies as st

from cdc.errors import MalformedFrame
from cdc.log_row import LOG_SCHEMA, Operation, RowOrder
from cdc.pgoutput.copy_decoder import CopiedRows, CopiedTable, CopyDecoder
from cdc.pgoutput.row_buffers import Capacity
from cdc.position import Position
from tests.fixtures.examples import examples
from tests.pgoutput.streams import KEYLESS, NARROW, ORDERS, table

bounded = examples(30, suppress_health_check=list(HealthCheck))
ESCAPES = {"\\": "\\\\", "\b": "\\b", "\f": "\\f", "\n": "\\n", "\r": "\\r", "\t": "\\t", "\v": "\\v"}
_value = st.one_of(st.none(), st.text(max_size=6), st.text("\\N\b\f\n\r\t\v.x", max_size=6))


def encode(values) -> bytes:
    """One line as COPY TO writes it."""
    return (
        "\t".join("\\N" if v is None else "".join(ESCAPES.get(letter, letter) for letter in v) for v in values).encode()
        + b"\n"
    )


def decoder(schema=ORDERS) -> CopyDecoder:
    return CopyDecoder(schema, position=Position(599), xid=3, committed_at=1_000_000, first_ordinal=5)


def feed(copy, *chunks) -> list[dict[str, Any]]:
    batches = [batch for chunk in chunks if (batch := copy.feed(chunk)) is not None]
    found = pa.Table.from_batches(batches, LOG_SCHEMA)
    found.validate(full=True)
    return found.to_pylist()


@bounded
@given(st.lists(st.tuples(_value, _value, _value), max_size=6), st.lists(st.integers(0, 200), max_size=3))
def test_values_come_back_as_they_were_however_the_text_is_cut(values, cuts):
    text = b"".join(map(encode, values))
    edges = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    copy = decoder(table(1, key=(2, 0)))
    found = feed(copy, *[text[a:b] for a, b in pairwise(edges)])
    copy.finish()
    assert [[value for _, value in row["after"]] for row in found] == [list(row) for row in values]
    assert [row["key"] for row in found] == [[row[2], row[0]] for row in values]
    assert [row["ordinal"] for row in found] == list(range(5, 5 + len(values)))
    assert (copy.rows, copy.next_ordinal) == (len(values), 5 + len(values))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *((escaped, plain) for plain, escaped in ESCAPES.items()),
        ("\\N", None),
        ("\\\\N", "\\N"),
        ("\\Nx", "Nx"),
        ("x\\N", "xN"),
        ("\\.", "."),
        ("\\q", "q"),
        ("", ""),
        ("N", "N"),
        ("é€\U0001f600", "é€\U0001f600"),
    ],
)
def test_every_escape_is_undone(field, value):
    (row,) = feed(decoder(), f"k\t{field}\tz\n".encode())
    assert row["after"] == [(10, "k"), (11, value), (12, "z")]


def test_a_letter_is_copied_at_every_offset_in_a_word():
    letters = [*map(chr, range(1, 0x20)), "\\", "N", "x", "\x7f", "é", "–", "\U0001f980", "\ufffd"]
    values = ["y" * before + letter + "z" * behind for letter in letters for before in range(17) for behind in range(9)]
    rows = [(value, None, value) for value in values]
    found = feed(decoder(table(1, key=(2, 0))), b"".join(map(encode, rows)))
    assert [[value for _, value in row["after"]] for row in found] == [list(row) for row in rows]


@pytest.mark.parametrize("byte", [b"\x80", b"\xc1", b"\xf5", b"\xff", b"\xc3"])
def test_text_that_is_not_utf8_is_malformed_at_every_offset_in_a_word(byte):
    for before in range(17):
        for behind in range(9):
            with pytest.raises(MalformedFrame, match="line of row 1"):
                decoder().feed(encode(("1", "a", "b")) + b"y" * before + byte + b"z" * behind + b"\t2\t3\n")


def test_a_copied_row_has_the_position_of_the_copy_and_no_old_images():
    (row,) = feed(decoder(), b"k\t\\N\tv\n")
    assert (row["position"], row["ordinal"], row["xid"], row["op"]) == (599, 5, 3, "r")
    assert row["committed_at"].timestamp() == 1
    assert (row["relation"], row["topic"], row["key"]) == (101, "shop.orders", ["k"])
    assert [row[name] for name in ("old_key", "before", "payload", "address", "partial")] == [
        None,
        None,
        None,
        None,
        False,
    ]


def test_a_keyless_table_has_rows_without_key():
    assert [row["key"] for row in feed(decoder(KEYLESS), b"a\tb\na\tb\n")] == [None, None]


def test_a_table_without_columns_has_empty_lines():
    assert [row["after"] for row in feed(decoder(NARROW), b"\n\n")] == [[], []]


@pytest.mark.parametrize(
    "line",
    [b"a\tb\n", b"a\tb\tc\td\n", b"\n", b"a\tb\t\xff\n", b"a\tb\t\xe2\x82\n", b"a\tb\t\\\n", b"\\N\\N\tb\tc\n\n"],
)
def test_a_line_that_does_not_fit_is_malformed_and_named_by_its_row(line):
    copy = decoder()
    feed(copy, b"1\t2\t3\n")
    with pytest.raises(MalformedFrame, match=r"'shop.orders'.* row (1|2)$"):
        copy.feed(b"" + line)


def test_a_line_that_does_not_end_is_malformed():
    copy = decoder()
    assert copy.feed(b"") is None
    assert copy.feed(b"a\tb") is None
    with pytest.raises(MalformedFrame, match="inside the line of row 0"):
        copy.finish()


def test_rows_of_many_tables_and_control_rows_between_them_share_batches():
    batches: list[pa.RecordBatch] = []
    rows = CopiedRows(RowOrder(599, 5, 3, 1_000_000), batches.append)
    schemas = [table(number, name=f"orders_{number}") for number in (1, 2, 3)]
    for schema in schemas:
        rows.control(Operation.SCHEMA, schema.relation, schema.topic, f"s {schema.name}".encode())
        copied = CopiedTable(schema, rows)
        assert copied.feed(encode(("a", None, "c")) + encode(("d", "e", "f"))) == 2
        copied.finish()
    rows.control(Operation.GENERATION, schemas[0].relation, schemas[0].topic, b"599")
    assert batches == []
    rows.flush()
    rows.flush()
    (batch,) = batches
    batch.validate(full=True)
    found = batch.to_pylist()

    assert [row["op"] for row in found] == ["s", "r", "r"] * 3 + ["g"]
    of_rows = [*(schema for schema in schemas for _ in range(3)), schemas[0]]
    assert [(row["relation"], row["topic"]) for row in found] == [(of.relation, of.topic) for of in of_rows]
    assert [row["ordinal"] for row in found] == list(range(5, 15))
    assert [row["payload"] for row in found if row["op"] != "r"] == [
        b"s orders_1",
        b"s orders_2",
        b"s orders_3",
        b"599",
    ]
    assert [row["key"] for row in found if row["op"] == "r"] == [["a"], ["d"]] * 3
    assert [[value for _, value in row["after"]] for row in found[1:3]] == [["a", None, "c"], ["d", "e", "f"]]


@pytest.mark.parametrize("least", [Capacity(2, (4, 0, 0, 8), (4, 0, 0, 16)), Capacity(1, (0,) * 4, (0,) * 4)])
def test_a_batch_without_room_is_passed_on_before_more_rows_are_added(least):
    batches: list[pa.RecordBatch] = []
    rows = CopiedRows(RowOrder(599, 0, 3, 1_000_000), batches.append, least)
    lines = [encode((f"key {number}", "x" * number, None)) for number in range(12)]
    copied = CopiedTable(table(1, key=(0,)), rows)
    for line in lines:
        copied.feed(line)
        rows.control(Operation.SCHEMA, 1, table(1).topic, b"s")
    rows.flush()
    found = [row for batch in batches for row in batch.to_pylist()]

    assert len(batches) > 1
    assert [row["ordinal"] for row in found] == list(range(24))
    assert [row["key"] for row in found if row["op"] == "r"] == [[f"key {number}"] for number in range(12)]
    assert [row["payload"] for row in found if row["op"] == "s"] == [b"s"] * 12
