"""What the reader's status shows of tables that the log marks, and of WAL that the server cannot decode."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from cdc.capture.reader_monitor import add_positions, inexact_tables
from cdc.catalog import TableProgress
from cdc.errors import SourceError
from cdc.postgres.sqlstate import classify_message
from cdc.table import ReplicaIdentity, TableSchema, TableState
from tests.faults.capture import capture_table

LIVE = TableSchema(relation=7, oid=7, schema="shop", name="t", replica_identity=ReplicaIdentity.DEFAULT, columns=())
SHOWN = TableProgress("", "shop.t", "streaming", None, 1, None, 50)


def test_a_marked_table_is_shown_with_its_reason_and_keeps_its_count() -> None:
    marked = LIVE.flagged(TableState.NEEDS_RESYNC, "why")

    assert inexact_tables([marked], [SHOWN, replace(SHOWN, sink="lake")], 9) == [
        replace(SHOWN, state="needs_resync", reason="why", position=9)
    ]
    assert inexact_tables([marked], [], 9)[0].state == "needs_resync"


def test_a_table_that_streams_is_left_alone_and_one_that_streams_again_is_shown_so() -> None:
    assert inexact_tables([LIVE], [SHOWN], 9) == []
    assert inexact_tables([LIVE], [replace(SHOWN, state="needs_resync", reason="why")], 9) == [
        replace(SHOWN, position=9)
    ]


def test_a_table_that_is_being_copied_is_shown_so_until_the_log_says_otherwise() -> None:
    copied = LIVE.flagged(TableState.SNAPSHOTTING, "its rows are being copied")
    (shown,) = inexact_tables([copied], [], 9)

    assert (shown.state, shown.rows) == ("snapshotting", 0)
    assert inexact_tables([LIVE], [shown], 12) == [replace(shown, state="streaming", reason=None, position=12)]


def test_a_successor_of_a_dropped_table_is_shown_in_its_place() -> None:
    gone, successor = LIVE.flagged(TableState.DROPPED, "gone"), replace(LIVE, relation=8, oid=8)

    assert inexact_tables([gone, successor], [SHOWN], 9) == inexact_tables([successor, gone], [SHOWN], 9) == []
    assert inexact_tables([gone], [SHOWN], 9)[0].state == "dropped"


def test_a_table_that_is_refused_is_shown_so_until_it_is_captured() -> None:
    refused = replace(SHOWN, state="refused", reason="why")

    assert inexact_tables([LIVE.flagged(TableState.DROPPED, "removed before")], [refused], 9) == []
    assert inexact_tables([LIVE], [refused], 9) == [replace(SHOWN, position=9)]


@pytest.mark.parametrize(
    ("reason", "begins"),
    [
        (
            "invalid memory alloc request size 1073741824",
            "make the value or row smaller at the source, because a bytea",
        ),
        ("unexpected chunk number 2", "stop the reader, run 'cdc slots recover"),
    ],
)
def test_the_remedy_of_wal_that_cannot_be_decoded_has_only_commands_that_can_be_copied(
    tmp_path: Path, database: str, reason: str, begins: str
) -> None:
    refused = classify_message("XX000", reason)
    assert isinstance(refused, SourceError)
    found = add_positions(refused, capture_table(tmp_path, database).definition)

    assert found.fix.startswith(begins)
    skip, resync = re.findall(r"'(cdc [^']*)'", found.fix)
    assert re.fullmatch(r'cdc slots recover -c \S+ --skip-to [0-9A-F]+/[0-9A-F]+ --resync "\*"', skip)
    assert resync == 'cdc tables resync "*"'
