"""A logical message is written in its own transaction; the stream returns it before the commit."""

from __future__ import annotations

from cdc.pgoutput.messages import CommitMessage, Message
from cdc.postgres.connection import connect
from cdc.postgres.logical_messages import emit_message
from cdc.postgres.replication import ReplicationStream
from tests.postgres.stream import receive_until
from tests.postgres.test_replication import make_source, options


def test_a_message_arrives_with_the_lsn_that_was_returned_and_before_its_commit(either_database: str) -> None:
    slot = make_source(either_database)
    with connect(either_database) as conn:
        written = emit_message(conn, "cdc.heartbeat", "é")
    with ReplicationStream.open(either_database, options(slot)) as stream:
        seen = receive_until(stream, lambda found: any(isinstance(m, CommitMessage) for m in found))
    (message,) = [m for m in seen if isinstance(m, Message)]
    (commit,) = [m for m in seen if isinstance(m, CommitMessage)]

    assert (message.prefix, message.content, message.transactional) == ("cdc.heartbeat", "é".encode(), True)
    assert message.lsn == written <= commit.lsn < commit.end_lsn
