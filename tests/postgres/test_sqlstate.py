"""The classifier: one case per text that servers were seen to send."""

from __future__ import annotations

import pytest

from cdc import errors
from cdc.errors import CdcError, Reaction
from cdc.postgres.sqlstate import classify_message

CASES = [
    ("55006", 'replication slot "x" is active for PID 7', errors.SlotInUse),
    ("42704", 'replication slot "x" does not exist', errors.SlotMissing),
    ("42704", 'publication "x" does not exist', errors.PreflightFailed),
    ("55000", "This slot has been invalidated because it exceeded the maximum reserved size.", errors.SlotInvalidated),
    ("55000", 'can no longer get changes from replication slot "x"', errors.SlotInvalidated),
    ("55000", 'replication slot "x" was not created in this database', errors.PreflightFailed),
    ("55000", "logical decoding requires wal_level >= logical", errors.PreflightFailed),
    ("53400", "all replication slots are in use", errors.PreflightFailed),
    ("0A000", "client sent proto_version=4 but we only support protocol 3 or lower", errors.PreflightFailed),
    ("XX000", "unrecognized pgoutput option: origin", errors.PreflightFailed),
    ("22023", 'option "proto_version" = "1" is unknown', errors.PreflightFailed),
    ("42501", "permission denied for table t", errors.PreflightFailed),
    ("42602", 'replication slot name "X" contains invalid character', errors.InvalidDefinition),
    ("57P01", "terminating connection due to administrator command", errors.SourceUnreachable),
    ("57P03", "the database system is starting up", errors.SourceUnreachable),
    ("08006", "connection failure", errors.SourceUnreachable),
    ("28P01", 'password authentication failed for user "x"', errors.SourceUnreachable),
    ("53300", "sorry, too many clients already", errors.SourceUnreachable),
    ("XX000", "invalid memory alloc request size 1073741824", errors.UndecodableWal),
    ("XX000", "could not find pg_class entry for 16384", errors.UndecodableWal),
    ("58P01", 'could not open file "pg_replslot/x/xid-1.spill": reorderbuffer spill file', errors.SourceUnreachable),
    ("22021", 'invalid byte sequence for encoding "UTF8"', errors.UndecodableWal),
    ("42P01", 'relation "x" does not exist', errors.SourceError),
]


@pytest.mark.parametrize(("sqlstate", "text", "error"), CASES)
def test_each_text_has_its_error(sqlstate: str, text: str, error: type[CdcError]) -> None:
    found = classify_message(sqlstate, text)

    assert type(found) is error
    assert found.message == f"{text} ({sqlstate})"


def test_what_nobody_knows_halts() -> None:
    assert classify_message("99999", "?").reaction is Reaction.HALT
