"""The classifier: one case per text that servers were seen to send."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
from psycopg import OperationalError

from cdc import errors
from cdc.capture.reader_process import retry_pause
from cdc.errors import CdcError, Reaction
from cdc.postgres.sqlstate import RULES, ErrorCourse, ErrorRule, classify, classify_message

CASES: list[tuple[str, str, type[CdcError]]] = [
    ("55006", 'replication slot "x" is active for PID 7', errors.SlotInUse),
    ("42704", 'replication slot "x" does not exist', errors.SlotMissing),
    ("42704", 'publication "x" does not exist', errors.PublicationReplaced),
    ("55000", "This slot has been invalidated because it exceeded the maximum reserved size.", errors.SlotInvalidated),
    ("55000", 'can no longer get changes from replication slot "x"', errors.SlotInvalidated),
    ("55000", 'replication slot "x" was not created in this database', errors.SlotUnsuitable),
    ("55000", "logical decoding requires wal_level >= logical", errors.PreflightFailed),
    ("55000", "logical decoding cannot be used while in recovery", errors.SourceInRecovery),
    ("55000", 'cannot use replication slot "x" for logical decoding', errors.SourceInRecovery),
    ("53400", "all replication slots are in use", errors.PreflightFailed),
    ("0A000", "client sent proto_version=4 but we only support protocol 3 or lower", errors.PreflightFailed),
    ("XX000", "unrecognized pgoutput option: origin", errors.PreflightFailed),
    ("22023", 'option "proto_version" = "1" is unknown', errors.SlotUnsuitable),
    ("42501", "permission denied for table t", errors.PreflightFailed),
    ("42501", 'library "pgoutput" may not be used as an output plugin', errors.OutputPluginRefused),
    ("42602", 'replication slot name "X" contains invalid character', errors.InvalidDefinition),
    ("53400", 'temporary file size exceeds "temp_file_limit" (1024kB)', errors.PreflightFailed),
    ("57P05", "terminating connection due to idle-session timeout", errors.SourceUnreachable),
    ("25P03", "terminating connection due to idle-in-transaction timeout", errors.SourceUnreachable),
    ("25P04", "terminating connection due to transaction timeout", errors.SourceUnreachable),
    ("57014", "canceling statement due to statement timeout", errors.SourceUnreachable),
    ("57P01", "terminating connection due to administrator command", errors.SourceUnreachable),
    ("57P03", "the database system is starting up", errors.SourceUnreachable),
    ("08006", "connection failure", errors.SourceUnreachable),
    ("08006", "unsupported startup parameter: replication", errors.PreflightFailed),
    ("28P01", 'password authentication failed for user "x"', errors.SourceRejectsConnection),
    ("53300", "sorry, too many clients already", errors.SourceRejectsConnection),
    ("XX000", "invalid memory alloc request size 1073741824", errors.UndecodableWal),
    ("XX000", "could not find pg_class entry for 16384", errors.UndecodableWal),
    ("58P01", 'could not open file "pg_replslot/x/xid-1.spill": reorderbuffer spill file', errors.SourceUnreachable),
    ("22021", 'invalid byte sequence for encoding "UTF8"', errors.UndecodableWal),
    ("55000", 'cannot use physical replication slot "x" for logical decoding', errors.SlotUnsuitable),
    ("55000", 'can no longer access replication slot "x"', errors.SlotInvalidated),
    ("55000", "something else is not in the state it must be in", errors.SourceError),
    ("25006", "cannot execute CREATE PUBLICATION in a read-only transaction", errors.PreflightFailed),
    ("3D000", 'database "x" does not exist', errors.SourceRejectsConnection),
    ("53200", "out of memory", errors.SourceUnreachable),
    ("57014", "canceling statement due to user request", errors.SourceUnreachable),
    ("40001", "canceling statement due to conflict with recovery", errors.SourceUnreachable),
    ("55P03", "canceling statement due to lock timeout", errors.SourceUnreachable),
    ("XX000", "could not write to data file for XID 7: reorderbuffer spill file", errors.SourceUnreachable),
    ("58030", "could not read snapbuild state file", errors.SourceUnreachable),
    ("22P05", 'character with byte sequence 0x81 in encoding "WIN1252" has no equivalent', errors.UndecodableWal),
    ("54000", "string buffer exceeds maximum allowed length", errors.UndecodableWal),
    ("58P01", 'could not open file "pg_wal/x"', errors.SourceUnreachable),
    ("42P01", 'relation "x" does not exist', errors.SourceError),
]


COURSES: Mapping[type[CdcError], set[ErrorCourse]] = {
    errors.SourceUnreachable: {ErrorCourse.RETRY_FAST},
    errors.SlotInUse: {ErrorCourse.RETRY_FAST},
    errors.SourceInRecovery: {ErrorCourse.RETRY_FAST},
    errors.SourceRejectsConnection: {ErrorCourse.RETRY_SLOW},
    errors.OutputPluginRefused: {ErrorCourse.RETRY_SLOW},
    errors.UndecodableWal: {ErrorCourse.RETRY_SLOW},
    errors.SlotMissing: {ErrorCourse.RESYNC},
    errors.SlotInvalidated: {ErrorCourse.RESYNC},
    errors.PublicationReplaced: {ErrorCourse.RESYNC},
}
"""Of every error that is not for an operator alone."""


def rule_of(sqlstate: str, text: str) -> ErrorRule | None:
    return next((rule for rule in RULES if sqlstate.startswith(rule.sqlstate) and rule.text in text), None)


@pytest.mark.parametrize(("sqlstate", "text", "error"), CASES)
def test_each_text_has_its_error(sqlstate: str, text: str, error: type[CdcError]) -> None:
    found = classify_message(sqlstate, text)

    assert type(found) is error
    assert found.message == f"{text} ({sqlstate})"


def test_an_unknown_error_needs_an_operator() -> None:
    assert classify_message("99999", "?").reaction is Reaction.HALT


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: f"{rule.sqlstate or 'any'} {rule.text or 'any'}")
def test_each_line_of_the_table_has_a_case_and_a_course_that_its_error_follows(rule: ErrorRule) -> None:
    cases = [rule_of(sqlstate, text) for sqlstate, text, _ in CASES]
    assert rule in cases
    assert rule.course in COURSES.get(rule.error, {ErrorCourse.OPERATOR})
    retried = rule.course in {ErrorCourse.RETRY_FAST, ErrorCourse.RETRY_SLOW}
    assert (retry_pause(rule.error("it failed"), 1) is not None) == retried
    assert rule.course is not ErrorCourse.RESYNC or "cdc slots recover" in (rule.remedy or rule.error.remedy)


@pytest.mark.parametrize("timeout", ["idle-session", "idle-in-transaction", "transaction"])
def test_a_session_that_a_timeout_ended_between_statements_is_not_reported_as_a_wrong_password(timeout: str) -> None:
    """Psycopg has no SQLSTATE for it."""
    text = f"consuming input failed: FATAL:  terminating connection due to {timeout} timeout\nserver closed"
    error = classify(OperationalError(text))
    assert error.message.startswith(f"the source ended the session: {timeout} timeout (")
    assert (type(error), "password" in error.fix) == (errors.SourceUnreachable, False)
