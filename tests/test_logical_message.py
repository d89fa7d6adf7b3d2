"""Logical messages: a row of the log gives back prefix, kind, LSN and content, of all formats of the log."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest

from cdc.log_row import LOG_SCHEMA
from cdc.logical_message import MESSAGE_COLUMNS, LogicalMessage, message_key, message_keys, message_prefixes
from cdc.lsn import Lsn
from tests.log.rows import message_row, row, table
from tests.pgoutput.streams import ODD_PREFIXES


def read(written: dict[str, Any]) -> LogicalMessage:
    """The message of a row that went through Arrow."""
    return LogicalMessage.from_row(table(written).to_pylist()[0])


@pytest.mark.parametrize("prefix", ODD_PREFIXES)
@pytest.mark.parametrize("transactional", [True, False])
def test_a_message_is_read_as_it_was_written(prefix: str, transactional: bool) -> None:
    key = message_key(prefix, Lsn(2**64 - 1), transactional=transactional)
    found = read(message_row(110, key=key, payload=b"\xff\0"))
    assert found == LogicalMessage(prefix=prefix, transactional=transactional, lsn=Lsn(2**64 - 1), content=b"\xff\0")


def test_of_a_message_without_a_key_only_the_content_is_known() -> None:
    found = read(message_row(110, key=None, payload=b"old"))
    assert found == LogicalMessage(prefix=None, transactional=None, lsn=None, content=b"old")


def test_only_messages_have_a_prefix() -> None:
    rows = table(
        row(1), message_row(2, prefix="a"), message_row(3, key=None), row(4, key=None), message_row(5, prefix="")
    )
    found = message_prefixes(rows)
    assert isinstance(found, pa.ChunkedArray)
    assert found.to_pylist() == [None, "a", None, None, ""]
    assert message_prefixes(rows.slice(1, 2)).to_pylist() == ["a", None]
    assert message_prefixes(pa.concat_tables([rows, rows]).select(MESSAGE_COLUMNS)).to_pylist() == found.to_pylist() * 2


def test_the_prefixes_of_a_batch_are_an_array() -> None:
    (batch,) = table(row(1), message_row(2, prefix="a")).to_batches()
    found = message_prefixes(batch)
    assert isinstance(found, pa.StringArray)
    assert found.to_pylist() == [None, "a"]
    assert message_prefixes(batch.slice(1)).to_pylist() == ["a"]
    assert message_prefixes(pa.RecordBatch.from_pylist([], LOG_SCHEMA)).to_pylist() == []


def test_the_keys_of_many_messages_are_columns() -> None:
    last = message_key("", Lsn(2**64 - 1), transactional=False)
    rows = table(message_row(1, key=message_key("a", Lsn(7), transactional=True)), message_row(2, key=None))
    found = message_keys(pa.concat_tables([rows, table(message_row(3, key=last))])["key"].combine_chunks())
    assert found.prefixes.to_pylist() == ["a", None, ""]
    assert found.transactional.to_pylist() == [True, None, False]
    assert found.lsns.to_pylist() == [7, None, 2**64 - 1]
