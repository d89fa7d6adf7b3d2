"""Quoting of replication commands, judged by a server."""

from __future__ import annotations

import pytest

from cdc.errors import InvalidDefinition
from cdc.lsn import Lsn
from cdc.pgoutput.messages import Insert
from cdc.postgres.connection import connect
from cdc.postgres.publication import ensure_publication
from cdc.postgres.quoting import identifier, literal
from cdc.postgres.replication import ReplicationStream, StreamOptions
from cdc.postgres.slot import create_slot
from cdc.postgres.tables import TableName
from tests.fixtures.postgres import run_sql
from tests.postgres.stream import receive_until


@pytest.mark.parametrize("name", ["plain", 'a"b', "a'b", "a,b", "a b", "ü", "back\\slash", "Upper"])
def test_a_publication_of_any_name_can_be_streamed(any_database: str, name: str) -> None:
    slot = any_database.rpartition("/")[2]
    run_sql(any_database, "CREATE TABLE t (id int PRIMARY KEY)")
    with connect(any_database) as conn:
        ensure_publication(conn, name, [TableName("public", "t")])
    with create_slot(any_database, slot):
        pass
    run_sql(any_database, "INSERT INTO t VALUES (1)")
    with ReplicationStream.open(any_database, StreamOptions(slot=slot, publication=name, start=Lsn(0))) as stream:
        assert receive_until(stream, lambda seen: any(isinstance(m, Insert) for m in seen))


@pytest.mark.parametrize("text", ["", "a\0b"])
def test_what_no_name_can_be_is_refused(text: str) -> None:
    with pytest.raises(InvalidDefinition):
        identifier(text)


def test_a_literal_without_zero_bytes_only() -> None:
    assert literal("it's") == "'it''s'"
    with pytest.raises(InvalidDefinition):
        literal("\0")
