"""Rows of checkpoints: after any history, and from any earlier checkpoint, the rows that delta-rs writes."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import CommitProperties, DeltaTable, Transaction, write_deltalake
from hypothesis import given
from hypothesis import strategies as st

from cdc.delta_protocol.actions import Action, decode_commit
from cdc.delta_protocol.checkpoint_rows import RETENTION, SCHEMA, UnknownActions, interval_seconds, later_rows
from tests.fixtures.examples import examples

NOW = 30.0
"""Seconds since 1970: no file was removed a week before."""


def append(uri: str, choice: int) -> None:
    rows = pa.table({"id": [choice, choice + 1], "part": ["a", None]})
    known = CommitProperties(app_transactions=[Transaction(f"app {choice % 2}", choice)])
    write_deltalake(uri, rows, mode="append", partition_by=["part"], schema_mode="merge", commit_properties=known)


def delete(uri: str, choice: int) -> None:
    DeltaTable(uri).delete(f"id = {choice}")


def compact(uri: str, _: int) -> None:
    DeltaTable(uri).optimize.compact()


def restore(uri: str, choice: int) -> None:
    table = DeltaTable(uri)
    if table.version():
        table.restore(choice % table.version())


def overwrite(uri: str, choice: int) -> None:
    rows = pa.table({"id": [choice], "part": ["b c/ü"], "more": [1.5]})
    write_deltalake(uri, rows, mode="overwrite", schema_mode="overwrite", partition_by=["part"])


def set_property(uri: str, choice: int) -> None:
    DeltaTable(uri).alter.set_table_properties({"delta.logRetentionDuration": f"interval {choice + 1} days"})


CHANGES: list[Callable[[str, int], None]] = [append, delete, compact, restore, overwrite, set_property]


def commits(uri: str, first: int, last: int) -> list[list[Action]]:
    """The actions of some commits."""
    folder = Path(uri, "_delta_log")
    return [decode_commit((folder / f"{version:020d}.json").read_bytes()) for version in range(first, last + 1)]


def by_delta_rs(uri: str, version: int) -> pa.Table:
    """The checkpoint that delta-rs writes of a version."""
    DeltaTable(uri, version=version).create_checkpoint()
    path = Path(uri, "_delta_log", f"{version:020d}.checkpoint.parquet")
    rows = pq.read_table(path)
    path.unlink()
    Path(uri, "_delta_log", "_last_checkpoint").unlink()
    return rows


def actions_in(rows: pa.Table) -> dict[str, list[str]]:
    """Kind of action → the actions as text, without null fields and in a fixed order."""
    columns = {kind: rows[kind].to_pylist() for kind in SCHEMA.names}
    return {kind: sorted(repr(_shown(action)) for action in found if action) for kind, found in columns.items()}


def _shown(action: Any) -> Any:
    if isinstance(action, dict):
        return {name: _shown(action[name]) for name in sorted(action) if action[name] is not None}
    return sorted(action) if isinstance(action, list) else action


@examples(10)
@given(st.lists(st.tuples(st.sampled_from(CHANGES), st.integers(0, 9)), max_size=9), st.data())
def test_the_rows_are_those_of_delta_rs(changes: list[tuple[Callable[[str, int], None], int]], data: Any) -> None:
    with TemporaryDirectory() as uri:
        for change, choice in [(append, 0), *changes]:
            change(uri, choice)
        last = DeltaTable(uri).version()
        expected = actions_in(by_delta_rs(uri, last))
        middle = data.draw(st.integers(0, last))

        assert actions_in(later_rows(None, commits(uri, 0, last), NOW)) == expected
        for earlier in (by_delta_rs(uri, middle), later_rows(None, commits(uri, 0, middle), NOW)):
            rows = later_rows(earlier, commits(uri, middle + 1, last), NOW)
            assert rows.schema == SCHEMA
            assert actions_in(rows) == expected


def file(path: str, vector: int | None = None) -> Action:
    found: Action = {"path": path, "size": 1, "modificationTime": 5, "dataChange": True, "partitionValues": {}}
    if vector is not None:
        found["deletionVector"] = {
            "storageType": "u",
            "pathOrInlineDv": "x",
            "offset": vector,
            "sizeInBytes": 3,
            "cardinality": 1,
        }
    return found


def removed(path: str, at: int, vector: int | None = None) -> Action:
    found = file(path, vector)
    del found["modificationTime"]
    return {"remove": found | {"deletionTimestamp": at}}


def live_and_removed(rows: pa.Table) -> tuple[set[tuple[str, int | None]], set[tuple[str, int | None]]]:
    """(path, offset of the vector) of the added files, and of the removed ones."""

    def named(kind: str) -> set[tuple[str, int | None]]:
        found = [action for action in rows[kind].to_pylist() if action is not None]
        return {(one["path"], (one["deletionVector"] or {}).get("offset")) for one in found}

    return named("add"), named("remove")


@pytest.mark.parametrize("in_one_step", [True, False])
def test_the_same_file_with_another_vector_is_another_file(in_one_step: bool) -> None:
    history: list[list[Action]] = [
        [{"add": file("a")}, {"add": file("b")}],
        [removed("a", 10), {"add": file("a", 1)}],
        [removed("a", 20, 1), {"add": file("a", 2)}, removed("b", 20)],
        [{"add": file("b")}],
    ]
    if in_one_step:
        rows = later_rows(None, history, NOW)
    else:
        rows = later_rows(None, [], NOW)
        for commit in history:
            rows = later_rows(rows, [commit], NOW)
    assert live_and_removed(rows) == ({("a", 2), ("b", None)}, {("a", None), ("a", 1)})


@pytest.mark.parametrize(
    ("retention", "now", "kept"),
    [
        ("interval 1 minute", 60, "abde"),
        ("interval 1 minute", 75, "be"),
        ("interval 1 minute", 86, ""),
        ("interval 0 seconds", 15, "be"),
        ("interval 1 month", 1e9, "abde"),
        (None, 604_800, "abde"),
        (None, 604_815, "be"),
    ],
)
def test_files_that_were_removed_long_ago_are_left_out(retention: str | None, now: float, kept: str) -> None:
    properties = {} if retention is None else {RETENTION: retention}
    created: Action = {"metaData": {"id": "x", "schemaString": "", "configuration": properties}}
    earlier = later_rows(None, [[created, removed("a", 10_000), removed("b", 20_000), {"add": file("c")}]], now)
    rows = later_rows(earlier, [[removed("d", 5_000), removed("e", 25_000)]], now)
    assert live_and_removed(rows) == ({("c", None)}, {(name, None) for name in kept})


def test_what_a_checkpoint_cannot_contain_is_refused() -> None:
    with pytest.raises(UnknownActions, match="domainMetadata"):
        later_rows(None, [[{"domainMetadata": {"domain": "x", "configuration": "", "removed": False}}]], NOW)
    tracked = file("a") | {"baseRowId": 1}
    with pytest.raises(UnknownActions, match="baseRowId"):
        later_rows(None, [[{"add": tracked}]], NOW)
    with pytest.raises(UnknownActions, match="baseRowId"):
        later_rows(pa.table({"add": pa.array([{"path": "a", "baseRowId": 1}])}), [], NOW)
    sidecar = pa.table({"sidecar": pa.array([{"path": "x"}])})
    with pytest.raises(UnknownActions, match="sidecar"):
        later_rows(sidecar, [], NOW)


def test_an_earlier_checkpoint_may_have_fields_without_values_and_parsed_statistics() -> None:
    history: list[list[Action]] = [[{"add": file("a") | {"stats": "{}"}}, {"txn": {"appId": "x", "version": 1}}]]
    earlier = later_rows(None, history, NOW)
    wide = [
        None if found is None else found | {"baseRowId": None, "stats_parsed": {"numRecords": 1}}
        for found in earlier["add"].to_pylist()
    ]
    fields = [*earlier.schema.field("add").type, pa.field("baseRowId", pa.int64())]
    kind = pa.struct([*fields, pa.field("stats_parsed", pa.struct([("numRecords", pa.int64())]))])
    earlier = earlier.set_column(earlier.column_names.index("add"), "add", pa.array(wide, kind))
    assert actions_in(later_rows(earlier, [], NOW)) == actions_in(later_rows(None, history, NOW))

    bare = [None if found is None else found | {"stats": None} for found in wide]
    earlier = earlier.set_column(earlier.column_names.index("add"), "add", pa.array(bare, kind))
    with pytest.raises(UnknownActions, match="only as parsed columns"):
        later_rows(earlier, [], NOW)


def test_actions_about_a_commit_are_no_rows() -> None:
    actions = [json.loads(text) for text in ('{"commitInfo": {"operation": "WRITE"}}', '{"cdc": {"path": "x"}}')]
    assert later_rows(None, [actions], NOW).num_rows == 0


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("interval 7 days", 604_800),
        ("interval 1 week", 604_800),
        ("INTERVAL 0 seconds", 0),
        ("interval 1 minute", 60),
        ("interval 1 day 2 hours", None),
        ("7 days", None),
        ("interval 1 month", None),
    ],
)
def test_the_seconds_of_an_interval(text: str, seconds: int | None) -> None:
    assert interval_seconds(text) == seconds
