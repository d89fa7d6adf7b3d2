"""The columnar decoder yields the events of the reference decoder, however the stream is split into batches."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace

import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given
from hypothesis import strategies as st

from cdc.errors import MalformedFrame, SourceError
from cdc.log_row import LOG_SCHEMA
from cdc.pgoutput.columnar_decoder import ColumnarDecoder
from cdc.pgoutput.decoder_events import DecodedRows
from cdc.pgoutput.message_parser import FrameBatch
from cdc.pgoutput.messages import Insert
from cdc.pgoutput.reference_decoder import ReferenceDecoder
from cdc.position import Position
from tests.fixtures.examples import examples
from tests.pgoutput.encode import frame
from tests.pgoutput.streams import IGNORED_OID, ORDERS, Decoder, events, ready, rows, streams, table, transaction

bounded = examples(30, suppress_health_check=list(HealthCheck))
AFTER = Position.of(500, 3)


def _decoders() -> tuple[Decoder, Decoder]:
    return ready(ReferenceDecoder(epoch=3, after=AFTER)), ready(ColumnarDecoder(epoch=3, after=AFTER))


def _plain(event: DecodedRows) -> dict[str, list[object]]:
    """Its rows, times as numbers: damaged frames bring times that no datetime can hold."""
    table = rows([event])
    times = table["committed_at"].cast(pa.int64())
    return table.set_column(table.schema.get_field_index("committed_at"), "committed_at", times).to_pydict()


def _outcome(decoder: Decoder, batches: list[list[bytes]]) -> list[object]:
    """Events as comparable values; an error, which ends them, by its text."""
    found: list[object] = []
    try:
        for batch in batches:
            for event in events(decoder, batch):
                if isinstance(event, DecodedRows):
                    found.append((_plain(event), event.complete, event.last))
                    found.append((event.committed_at, event.transactions, decoder.in_transaction))
                else:
                    found.append(event)
    except SourceError as error:
        found.append((type(error), str(error)))
    return found


@bounded
@given(streams)
def test_both_decoders_yield_the_same_events_for_a_stream_fed_whole(frames):
    plain, columnar = _decoders()
    assert _outcome(columnar, [frames]) == _outcome(plain, [frames])


@bounded
@given(streams)
def test_both_decoders_yield_the_same_events_frame_by_frame(frames):
    plain, columnar = _decoders()
    single = [[one] for one in frames]
    assert _outcome(columnar, single) == _outcome(plain, single)


@bounded
@given(streams, st.integers(0, 50))
def test_rows_do_not_depend_on_where_the_stream_is_cut(frames, cut):
    whole = list(events(_decoders()[1], frames))
    decoder = _decoders()[1]
    parts = [*events(decoder, frames[:cut]), *events(decoder, frames[cut:])]
    assert rows(parts).equals(rows(whole))


@bounded
@given(streams, st.data())
def test_both_decoders_refuse_the_same_damaged_streams_with_the_same_words(frames, data):
    frames = frames or [b""]
    at = data.draw(st.integers(0, len(frames) - 1))
    broken = bytearray(frames[at])
    if data.draw(st.booleans()):
        broken = broken[: data.draw(st.integers(0, len(broken)))]
    elif broken:
        broken[data.draw(st.integers(0, len(broken) - 1))] = data.draw(st.integers(0, 255))
    frames[at] = bytes(broken) + data.draw(st.sampled_from([b"", b"\0"]))
    plain, columnar = _decoders()
    assert _outcome(columnar, [frames]) == _outcome(plain, [frames])


@bounded
@given(st.binary(max_size=60), st.sampled_from([b"", b"w" + bytes(24)]))
def test_garbage_raises_only_malformed_frame(garbage, header):
    for letter in (b"", b"B", b"C", b"I", b"U", b"D", b"R", b"M", b"T", b"Y", b"O"):
        for decoder in _decoders():
            with suppress(MalformedFrame):
                list(events(decoder, [header + letter + garbage]))


@pytest.mark.parametrize(
    "bad", [b"\xff", b"\xc0\x80", b"\xed\xa0\x80", b"\xf4\x90\x80\x80", b"a\xe2\x82", b"\xf0\x80\x80\x80"]
)
def test_text_that_is_not_utf8_is_malformed(bad):
    good = transaction(600, Insert(1, ("k", "x" * len(bad), None)))
    frames = [frame(message).replace(b"x" * len(bad), bad) for message in good]
    for decoder in _decoders():
        with pytest.raises(MalformedFrame, match="is not UTF-8"):
            list(events(decoder, frames))


@pytest.mark.parametrize("good", ["é", "€", "\ud7ff", "\U0001f600", "\U0010ffff", "a\u0080b"])
def test_every_width_of_utf8_comes_through(good):
    frames = [frame(message) for message in transaction(600, Insert(1, ("k", good, None)))]
    assert rows(list(events(_decoders()[1], frames))).to_pylist()[0]["after"] == [(10, "k"), (11, good), (12, None)]


def test_a_huge_transaction_spans_batches_and_is_complete_only_at_its_end():
    decoder = ready(ColumnarDecoder())
    changes = [Insert(1, (str(n), "x" * 1000, None)) for n in range(40_000)]
    frames = [frame(message) for message in transaction(600, *changes)]
    found = [*events(decoder, frames[:20_000]), *events(decoder, frames[20_000:])]
    decoded = [event for event in found if isinstance(event, DecodedRows)]
    assert len(decoded) > 2
    assert [event.complete for event in decoded[:-1]] == [0] * (len(decoded) - 1)
    assert decoded[-1].complete == decoded[-1].rows.num_rows
    assert rows(decoded)["ordinal"].to_pylist() == list(range(40_000))
    assert (decoded[-1].last, decoded[-1].transactions) == (Position(600), 1)
    assert max(event.rows.nbytes for event in decoded) < 32 << 20


def test_decoded_rows_do_not_change_when_the_decoder_continues():
    decoder = ready(ColumnarDecoder())
    first = list(events(decoder, [frame(m) for m in transaction(600, Insert(1, ("a", "b", "c")))]))
    before = rows(first).to_pylist()
    list(events(decoder, [frame(m) for m in transaction(700, Insert(1, ("x", "y", "z")))]))
    assert rows(first).to_pylist() == before


def test_rows_of_many_relations_have_the_right_topics():
    decoder, oids = ColumnarDecoder(), range(20, 220, 7)
    for oid in reversed(oids):
        decoder.define(table(oid, name=f"t{oid}"), announce=False)
    frames = [frame(m) for m in transaction(600, *[Insert(oid, (str(oid), "", None)) for oid in oids])]
    found = rows(list(events(decoder, frames)))
    assert found["topic"].to_pylist() == [f"shop.t{oid}" for oid in oids]
    assert found["relation"].to_pylist() == [100 + oid for oid in oids]


def test_rows_have_exactly_the_schema_of_the_log():
    frames = [frame(message) for message in transaction(600)]
    (event,) = events(ready(ColumnarDecoder()), frames)
    assert isinstance(event, DecodedRows)
    assert event.rows.schema.equals(LOG_SCHEMA, check_metadata=True)


def test_a_writable_buffer_is_taken_as_well_as_a_readonly_one():
    batch = FrameBatch.of([frame(m) for m in transaction(600, Insert(1, ("a", "b", "c")), Insert(IGNORED_OID, ()))])
    decoder = ready(ColumnarDecoder())
    (event,) = decoder.decode(FrameBatch(batch.buffer.copy(), batch.offsets.copy()))
    assert isinstance(event, DecodedRows)
    assert event.rows["key"].to_pylist() == [["a"]]


def test_a_key_column_that_is_not_sent_is_refused_at_once():
    computed = replace(ORDERS.columns[0], generated=True)
    schema = replace(ORDERS, columns=(computed, *ORDERS.columns[1:]))
    for decoder in (ReferenceDecoder(), ColumnarDecoder()):
        with pytest.raises(ValueError, match="is not sent"):
            decoder.define(schema, announce=False)
