"""Row buffers: rows without images, growth, and the capacity of the next buffers."""

from __future__ import annotations

import pyarrow as pa
import pytest

from cdc.log_row import LOG_SCHEMA, Operation
from cdc.pgoutput import kernel
from cdc.pgoutput.columnar_decoder import ColumnarDecoder
from cdc.pgoutput.messages import Delete, Insert, OldKind, OldTuple, Update
from cdc.pgoutput.reference_decoder import ReferenceDecoder
from cdc.pgoutput.row_buffers import Capacity, RowBuffers, new_state
from tests.pgoutput.streams import decode, transaction


def test_a_row_without_images_has_its_payload_and_null_relation_and_topic():
    state = new_state()
    state[kernel.POSITION] = 600
    buffers = RowBuffers(state, Capacity())
    buffers.control(Operation.SCHEMA, -1, -1, b"content")
    buffers.control(Operation.TRUNCATE, 7, 0, None)
    batch = buffers.take(pa.array(["shop.t"]))

    assert batch.schema.equals(LOG_SCHEMA, check_metadata=True)
    schema, truncate = batch.to_pylist()
    assert (schema["op"], schema["payload"], schema["relation"], schema["topic"]) == ("s", b"content", None, None)
    assert (truncate["op"], truncate["payload"], truncate["relation"], truncate["topic"]) == ("t", None, 7, "shop.t")
    assert [schema["ordinal"], truncate["ordinal"]] == [0, 1]
    assert {schema[name] for name in ("key", "old_key", "before", "after")} == {None}


@pytest.mark.parametrize(("children", "nbytes"), [(1, 1), (1, 1 << 20), (1 << 10, 1)])
def test_a_message_has_its_key_and_content_and_no_image_in_full_buffers_too(children: int, nbytes: int):
    buffers = RowBuffers(new_state(), Capacity(rows=1, children=(children,) * 4, nbytes=(nbytes,) * 4))
    keys = [["audit", "t", "0/1"], ["", "f", "FFFFFFFF/FFFFFFFF"], ["é" * 5000, "t", "1/0"]]
    for key in keys:
        buffers.message(key, b"\xff")
    buffers.control(Operation.TRUNCATE, 7, 0, None)
    batch = buffers.take(pa.array(["shop.t"]))

    batch.validate(full=True)
    assert batch["key"].to_pylist() == [*keys, None]
    assert batch["op"].to_pylist() == ["m", "m", "m", "t"]
    assert batch["payload"].to_pylist() == [b"\xff"] * 3 + [None]
    assert batch["relation"].to_pylist() == [None, None, None, 7]
    assert all(batch[name].null_count == 4 for name in ("old_key", "before", "after"))


def test_the_next_buffers_have_the_capacity_that_the_last_ones_needed():
    state = new_state()
    buffers = RowBuffers(state, Capacity(rows=1))
    for _ in range(1000):
        buffers.control(Operation.TRUNCATE, 7, 0, None)

    assert len(RowBuffers.like(state, buffers).rows.position) == 1250


LARGE = "y" * 3_000_000


@pytest.mark.parametrize(
    "change",
    [
        Insert(2, ("1", "2", LARGE)),
        Update(2, OldTuple(OldKind.ROW, ("1", "2", LARGE)), ("1", "3", LARGE)),
        Update(2, OldTuple(OldKind.ROW, ("1", LARGE, "")), (LARGE, "3", LARGE)),
        Delete(2, OldTuple(OldKind.ROW, ("1", LARGE, LARGE))),
        Delete(2, OldTuple(OldKind.KEY, (LARGE, LARGE, None))),
    ],
)
def test_buffers_grow_for_a_row_larger_than_all_before(change: Insert | Update | Delete):
    messages = transaction(600, Insert(1, ("1", "", None)), change)

    assert decode(ColumnarDecoder(), messages) == decode(ReferenceDecoder(), messages)
