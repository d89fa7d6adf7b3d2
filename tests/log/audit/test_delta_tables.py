"""Audit of the Delta tables: which commits are missing, what a commit says, and positions that contradict."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cdc.delta_protocol.commits import commit_file
from cdc.log.audit.delta_tables import missing_commits, parse_commit, read_commits, read_log_tables
from cdc.log.audit.finding import DamageKind
from cdc.log.writer import LogWriter
from tests.log.rows import IDENTITY, LIMITS, info, row, table


@pytest.fixture(name="writer")
def _writer(tmp_path: Path) -> LogWriter:
    """Of a log with one transaction at 10 and one at 20."""
    writer = LogWriter.open(tmp_path, IDENTITY, LIMITS)
    for position in (10, 20):
        writer.commit(writer.stage(table(row(position))), info(position))
    return writer


def test_only_commits_behind_the_last_whole_checkpoint_are_missed():
    assert missing_commits([0, 1, 2], []) == []
    assert missing_commits([0, 3, 4, 7], []) == [(1, 2), (5, 6)]
    assert missing_commits([2, 3, 7], [3]) == [(4, 6)]
    assert missing_commits([7], [7]) == []
    assert missing_commits([7], []) == [(0, 6)]


def test_a_commit_is_parsed_with_its_position_and_rows():
    actions = [
        {"commitInfo": {"cdc.rows": "2"}},
        {"txn": {"appId": "other", "version": 1}},
        {"txn": {"appId": "log", "version": 20}},
        {"add": {"path": "segment=0/a.parquet", "stats": '{"numRecords": 2}'}},
    ]
    found = parse_commit("\n".join(map(json.dumps, actions)), "log")
    assert (found.position, found.rows, found.added) == (20, 2, {"segment=0/a.parquet": 2})
    with pytest.raises(ValueError, match="empty"):
        parse_commit("", "log")


def test_each_file_has_the_range_of_the_commit_that_added_it(writer: LogWriter, tmp_path: Path):
    found = read_commits(tmp_path / "changes", writer.log_id)
    assert found.findings == []
    assert sorted(found.ranges.values()) == [(0, 10), (10, 20)]


def test_the_tables_are_read_with_their_positions(writer: LogWriter, tmp_path: Path):
    found = read_log_tables(tmp_path)
    assert (found.durable, found.oldest, found.horizon, found.findings) == (writer.durable, 0, None, [])
    assert [(claim.after, claim.upto) for claim in sorted(found.claims, key=lambda c: c.first)] == [(0, 10), (10, 20)]


@pytest.mark.usefixtures("writer")
def test_a_missing_and_an_unreadable_commit_are_findings(tmp_path: Path):
    commit_file(tmp_path / "changes", 1).unlink()
    commit_file(tmp_path / "changes", 2).write_text("{")
    messages = [f.message for f in read_log_tables(tmp_path).findings if f.damage is DamageKind.COMMIT]
    assert "the commit is missing" in messages
    assert "the commit cannot be read" in messages
