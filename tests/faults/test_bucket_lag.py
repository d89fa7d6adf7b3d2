"""An object store whose listings and deletes are late, or whose uploads break off: nothing wrong comes of it."""

from __future__ import annotations

import os
import re
from threading import Event

import pytest

from cdc.bucket_files import BucketPath
from cdc.errors import LogFenced, LogUnreachable
from cdc.log.audit.verify import verify
from cdc.log.reader import LogReader
from cdc.log.retired_files import list_removals
from cdc.log.retrying_writer import RetryingWriter
from cdc.log.trim_plan import Retention
from cdc.log.vacuum import vacuum
from cdc.log.writer import LogWriter
from cdc.position import Position
from tests.faults.test_bucket import patient
from tests.fixtures.s3 import S3, Relay
from tests.log.rows import IDENTITY, LIMITS, info, row, table
from tests.log.sample_log import ORDERS, SEGMENT_PER_FILE, commit_rows, schema_row, schema_version
from tests.log.simple_compaction import compact, latest_state, open_compactor, read_range
from tests.log.table_writers import append_transaction, log_positions

AT_ONCE = Retention(max_age=0.0, grace=0.0)
LARGE = 6 << 20
"""Bytes that are uploaded in two parts."""
PART = r"^PUT .*partNumber="
COMPLETE = r"^POST .*uploadId="


@pytest.fixture(name="root")
def _root(s3: S3, relay: Relay) -> BucketPath:
    """A log that tells of a table and holds a transaction of it, reached through the relay."""
    root = s3.root(port=relay.port)
    writer = LogWriter.open(root, IDENTITY, SEGMENT_PER_FILE)
    commit_rows(writer, schema_row(5, 0, schema_version(ORDERS, "name")))
    append_transaction(writer, 10)
    return root


def large(position: int) -> dict[str, object]:
    """A row that no compression makes smaller."""
    return row(position, op="m", relation=None, key=None, after=None, payload=os.urandom(LARGE))


def test_who_opens_by_a_listing_that_lags_is_fenced_and_reads_what_was_there_before(
    root: BucketPath, relay: Relay
) -> None:
    append_transaction(LogWriter(root, SEGMENT_PER_FILE), 20)
    relay.unlisted = r"changes/_delta_log/0{19}3\.json"
    late = LogWriter(root, SEGMENT_PER_FILE)
    assert late.durable == 10
    assert log_positions(root) == [5, 10, 10]
    with pytest.raises(LogFenced):
        append_transaction(late, 15)

    relay.unlisted = ""
    append_transaction(LogWriter(root, SEGMENT_PER_FILE), 30)
    assert log_positions(root) == [5, 10, 10, 20, 20, 30, 30]


def test_a_compactor_whose_listing_lags_takes_no_run_of_another(root: BucketPath, relay: Relay) -> None:
    _, folder = open_compactor(root).new_run()
    relay.unlisted = f"compacted/{folder.name}/"
    with pytest.raises(LogFenced, match="another compaction of the log has created run 1"):
        open_compactor(root).new_run()


def test_a_file_whose_delete_is_late_is_read_by_nobody(root: BucketPath) -> None:
    writer = LogWriter(root, SEGMENT_PER_FILE)
    append_transaction(writer, 20)
    append_transaction(writer, 30)
    before = latest_state(read_range(LogReader(root), Position(0), Position(30)))
    compact(root, 20)
    writer.trim([0, 1, 2], Position(20))
    folders = [root / "changes" / f"segment={number}" for number in range(3)]
    files = [file for folder in folders for file in folder.iterdir()]
    contents = [(file, file.read_bytes()) for file in (*files, *list_removals(root))]
    assert vacuum(root, AT_ONCE).files == len(files) == 3
    for file, content in contents:
        file.write_bytes(content)  # answered, and not done yet: the same as being there again

    assert latest_state(read_range(LogReader(root), Position(0), Position(30))) == before
    assert LogWriter(root, SEGMENT_PER_FILE).durable == 30
    assert verify(root).is_sound
    assert vacuum(root, AT_ONCE).files == 3
    assert latest_state(read_range(LogReader(root), Position(0), Position(30))) == before


def test_of_an_upload_that_breaks_off_nothing_is_to_be_seen(root: BucketPath, relay: Relay) -> None:
    broken = relay.fault(PART, 500, times=100)
    with pytest.raises(LogUnreachable):
        LogWriter(root, SEGMENT_PER_FILE).stage(table(large(20)))
    assert broken.done > 1
    relay.faults.clear()
    assert len(list((root / "changes").glob("segment=*/*.parquet"))) == 2
    assert log_positions(root) == [5, 10, 10]
    assert verify(root).findings == ()


@pytest.mark.slow
@pytest.mark.parametrize(("pattern", "status"), [(PART, 0), (PART, 500), (COMPLETE, 0), (COMPLETE, 503)])
def test_a_large_file_is_there_once_whatever_its_upload_went_through(
    root: BucketPath, relay: Relay, pattern: str, status: int
) -> None:
    writer = RetryingWriter(root, LIMITS, Event(), lambda _: None)
    fault = relay.fault(pattern, status, times=2)
    writer.commit(writer.stage(table(large(20))), info(20))
    append_transaction(writer, 30)

    assert fault.done
    assert any(re.search(r"^POST .*\?uploads", request) for request in relay.seen)
    assert log_positions(root) == [5, 10, 10, 20, 30, 30]
    assert verify(root).is_sound


@pytest.mark.slow
def test_a_writer_waits_for_a_store_that_takes_no_part_and_nothing_stays_of_its_attempts(
    root: BucketPath, relay: Relay
) -> None:
    writer, blocked = patient(root)
    fault = relay.fault(PART, 503, times=16)  # the client tries each of two parts four times
    writer.commit(writer.stage(table(large(20))), info(20))

    assert fault.done == 16
    assert blocked == [True, False]
    assert log_positions(root) == [5, 10, 10, 20]
    assert verify(root).findings == ()
