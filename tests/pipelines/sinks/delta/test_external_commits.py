"""A target that someone else changed since it was left is told of, by what the commits in between say."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from deltalake import DeltaTable, write_deltalake
from structlog.testing import capture_logs

from cdc import metrics
from cdc.config.delta_sink import HistoryMode
from cdc.delta_protocol.commits import commit_file
from cdc.targets.published_record import Published, TableRecord
from pipelines.folding.history_changes import GenerationEnd
from pipelines.runtime.sink_status_reporter import ExternalCommit, SinkFigures
from pipelines.sinks.contract import SparkAwaited, TableBatch
from pipelines.sinks.delta.delta_target import DeltaTarget
from pipelines.sinks.delta.latest_state_strategy import LatestState
from pipelines.sinks.delta.maintenance import COMPACT_ABOVE
from pipelines.sinks.delta.settings import DeltaSettings
from pipelines.sinks.delta.sink import DeltaSink
from tests.contracts.folded import ORDERS, batch, gone, part, put
from tests.contracts.histories import ALL_SETTINGS
from tests.pipelines.sinks.added_features import add_features
from tests.pipelines.sinks.delta.small_files import add_small_files

LOG = "log-1"
TOPIC = ORDERS.topic
Told = list[dict[str, Any]]


def opened(folder: Path) -> DeltaSink:
    sink = DeltaSink(DeltaSettings("lake", f"{folder}/{{schema}}/{{table}}"))
    sink.open(LOG)
    return sink


def publish(sink: DeltaSink, record: TableRecord) -> Published:
    published = Published(record.position, 0, {record.relation: record})
    sink.publish(published)
    return published


@pytest.fixture(name="sink")
def _sink(tmp_path: Path) -> DeltaSink:
    """With a published target of three rows, in files small enough to be put together."""
    sink = opened(tmp_path)
    sink.apply(batch([put(1, "a", 10), put(2, "b", 11)], 0, 20, generation=1))
    publish(sink, sink.apply(batch([put(3, "c", 30)], 20, 40)))
    return sink


def applied(sink: DeltaSink, upto: int, **control: Any) -> Told:
    """What is told while one more batch is merged and published."""
    with capture_logs() as logs:
        rows = [put(1, "A", upto - 9), put(3, "C", upto - 8)]
        publish(sink, sink.apply(batch(rows, upto - 20, upto, **control)))
    return [dict(entry) for entry in logs if entry["event"].startswith("another client changed rows of a target")]


def table_of(sink: DeltaSink) -> DeltaTable:
    (uri,) = sink.parts.targets.by_uri
    return DeltaTable(uri)


def append(table: DeltaTable) -> None:
    row = pa.table(table.scan(predicate="id = 2"))
    place = row.schema.get_field_index("id")
    write_deltalake(table, row.set_column(place, "id", pa.array([9], pa.int64())), mode="append")


def update(table: DeltaTable) -> None:
    table.update({"item": "'theirs'"}, predicate="id = 2")


def delete(table: DeltaTable) -> None:
    table.delete("id = 2")


@pytest.mark.parametrize(("client", "operation"), [(delete, "DELETE"), (update, "UPDATE"), (append, "WRITE")])
def test_a_change_of_rows_by_another_client_is_told_once(
    sink: DeltaSink, client: Callable[[DeltaTable], None], operation: str
) -> None:
    table = table_of(sink)
    left = table.version()
    client(table)
    told = applied(sink, 60)

    assert [(t["table"], t["last_own_version"], t["versions"], t["operations"], t["log_level"]) for t in told] == [
        (TOPIC, left, [left + 1], [operation], "warning")
    ]
    assert applied(sink, 80) == []
    assert sink.external_commits.last(TOPIC) == ExternalCommit(left + 1, operation)
    assert (sink.external_commits.pop_counts(), sink.external_commits.pop_counts()) == ({TOPIC: 1}, {})


def optimize(table: DeltaTable) -> None:
    assert table.optimize.compact()["numFilesRemoved"] > 0


def order(table: DeltaTable) -> None:
    assert table.optimize.z_order(["id"])["numFilesRemoved"] > 0


def clean(table: DeltaTable) -> None:
    optimize(table)
    assert table.vacuum(retention_hours=0, enforce_retention_duration=False, dry_run=False)
    table.create_checkpoint()


def name(table: DeltaTable) -> None:
    table.alter.set_table_properties({"delta.setTransactionRetentionDuration": "interval 30 days"})


@pytest.mark.parametrize("client", [optimize, order, clean, name])
def test_what_changes_no_row_is_not_told(sink: DeltaSink, client: Callable[[DeltaTable], None]) -> None:
    client(table_of(sink))
    assert applied(sink, 60) == []


def test_the_next_driver_tells_what_came_after_the_published_record(sink: DeltaSink, tmp_path: Path) -> None:
    table = table_of(sink)
    sink.close()
    table.delete("id = 2")
    told = applied(opened(tmp_path), 60)

    assert [entry["operations"] for entry in told] == [["DELETE"]]


def test_what_a_driver_did_before_it_was_killed_is_its_own(sink: DeltaSink, tmp_path: Path) -> None:
    sink.apply(batch([put(4, "d", 45), gone(2, 46)], 40, 50, truncated=(41, 0)))
    sink.close()  # not published
    assert applied(opened(tmp_path), 60, truncated=(41, 0)) == []


class Disturbed(LatestState):
    """A strategy to whose target another client appends a row while a batch is merged, which is no conflict."""

    attempts = 0

    def merge(self, target: DeltaTarget, batch: TableBatch) -> None:
        self.attempts += 1
        append(DeltaTable(target.uri))
        super().merge(target, batch)


def test_what_comes_while_a_batch_is_merged_is_told_after_it(sink: DeltaSink, tmp_path: Path) -> None:
    sink.close()
    again = DeltaSink(DeltaSettings("lake", f"{tmp_path}/{{schema}}/{{table}}"))
    again._latest = disturbed = Disturbed(again.parts)
    again.open(LOG)

    assert [entry["operations"] for entry in applied(again, 60)] == [["WRITE"]]
    assert disturbed.attempts == 1


def test_several_commits_of_one_batch_are_its_own(sink: DeltaSink) -> None:
    assert applied(sink, 60, truncated=(41, 0), generation=45) == []
    with capture_logs() as logs:
        publish(sink, sink.apply(batch([part(3, 65, {2: "later"})], 60, 80, truncated=(40, 0))))
    assert not [entry for entry in logs if entry["log_level"] == "warning"]


def test_our_own_upkeep_is_ours(tmp_path: Path) -> None:
    sink = opened(tmp_path)
    uri = sink.apply(batch([put(1, "x", 10)], 0, 10)).target
    add_small_files(uri, pa.table(DeltaTable(uri).scan()), COMPACT_ABOVE)
    publish(sink, sink.apply(batch([put(2, "x", 20)], 10, 20)))  # says that the files are of another client
    with capture_logs() as logs:
        for n in range(3, 7):
            publish(sink, sink.apply(batch([put(n, "x", n * 10)], n * 10 - 10, n * 10)))
            sink.parts.rewriter.finish(sink.parts.targets.by_uri, wait=True)
    assert "OPTIMIZE" in {entry["operation"] for entry in table_of(sink).history()}
    assert not [entry for entry in logs if entry["log_level"] == "warning"]


def test_a_commit_that_is_not_in_the_log_any_more_is_told_as_unknown(sink: DeltaSink, tmp_path: Path) -> None:
    table = table_of(sink)
    sink.close()
    table.delete("id = 2")
    name(table)
    table.create_checkpoint()
    commit_file(tmp_path / "shop" / "orders", table.version() - 1).unlink()

    assert [entry["operations"] for entry in applied(opened(tmp_path), 60)] == [["UNKNOWN"]]


def test_a_foreign_commit_is_counted_and_stands_beside_its_table(sink: DeltaSink) -> None:
    table_of(sink).delete("id = 2")
    record = sink.apply(batch([put(1, "A", 45)], 40, 60))
    figures = metrics.Metrics()
    progress = SinkFigures("shop", "lake", figures)
    progress.external_commits = sink.external_commits
    progress.record_published(publish(sink, record), lag=None, rows={})
    progress.record_duration(0.1)

    assert figures.value(metrics.FOREIGN_COMMITS, "shop", "lake", TOPIC) == 1
    (table,) = progress.to_tables()
    assert table.reason is not None
    assert "(DELETE): run 'cdc verify' to find changed rows" in table.reason


def test_a_target_that_is_written_without_its_index_says_why(sink: DeltaSink) -> None:
    progress = SinkFigures("shop", "lake", metrics.Metrics())
    progress.index_notice = sink.index_notice
    record = sink.apply(batch([put(1, "A", 45)], 40, 60))
    published = publish(sink, record)
    progress.record_published(published, lag=None, rows={})
    assert [table.reason for table in progress.to_tables()] == [None]
    add_features(record.target, ["deletionVectors", "columnMapping"])
    with pytest.raises(SparkAwaited):
        sink.apply(batch([put(1, "A", 65)], 60, 80))
    progress.record_published(published, lag=None, rows={})

    (table,) = progress.to_tables()
    assert table.reason is not None
    assert table.reason.endswith("written without the key index: the table has unsupported features columnMapping")


@pytest.mark.parametrize("began", [None, 35], ids=["truncate", "generation end"])
@pytest.mark.parametrize("keeping", [HistoryMode.LATEST, HistoryMode.VERSIONS, HistoryMode.MARKED])
def test_a_row_without_a_place_goes_with_older_ones(tmp_path: Path, keeping: HistoryMode, began: int | None) -> None:
    settings = DeltaSettings("lake", f"{tmp_path}/lake/{{schema}}/{{table}}", table=ALL_SETTINGS[keeping])
    sink = DeltaSink(settings)
    sink.open(LOG)
    uri = sink.apply(batch([put(1, "a", 10)], 0, 20)).target
    columns = {field.name: pa.nulls(1, field.type) for field in pa.schema(DeltaTable(uri).schema().to_arrow())}
    columns |= {"id": pa.array([77])} | ({"_deleted": pa.array([False])} if keeping is HistoryMode.MARKED else {})
    write_deltalake(uri, pa.table(columns), mode="append")
    ended = {"truncated": (35, 0)} if began is None else {"generation": began}
    sink.apply(batch([put(3, "c", 50)], 20, 60, endings=(GenerationEnd(36, 0, 36, began),), **ended))

    current = {
        HistoryMode.LATEST: "true",
        HistoryMode.VERSIONS: '"__END_AT" IS NULL',
        HistoryMode.MARKED: "NOT _deleted",
    }[keeping]
    assert pa.table(DeltaTable(uri).scan(columns=["id"], predicate=current))["id"].to_pylist() == [3]
