"""What was removed from a definition is in no status, metric or list, although the catalog still has it."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import pytest

from cdc.catalog import Catalog, DeadLetter, ProcessReport, SinkProgress, TableProgress
from cdc.config import Definition, load_definition
from cdc.metrics import DELIVERY_EVENTS, DLQ_RECORDS, Metrics
from cdc.service.api.prometheus_metrics import prometheus_text, reported_values
from cdc.service.defined_pipeline import DefinedPipeline, forget_renamed
from cdc.service.status import PipelineStatus, pipeline_status
from tests.config.definitions import SOUND, write

VIEWS = "exclude: [shop.sums]\nviews: [{name: shop.sums, key: [id], sql: SELECT id FROM shop.items}]\n"
DELIVERIES = "deliveries: [{name: copy, type: file, path: out}, {name: printed, type: stdout}]\n"
NAME = "shop"


@pytest.fixture(name="catalog")
def _catalog(tmp_path: Path) -> Iterator[Catalog]:
    """The catalog of a pipeline with a sink, views and deliveries, whose processes have ended."""
    with Catalog.open(f"sqlite:///{tmp_path}/catalog.db") as catalog:
        metrics = Metrics()
        metrics.add(DELIVERY_EVENTS, 5, NAME, "copy")
        metrics.set(DLQ_RECORDS, 1, NAME, "copy")
        for process in ("reader", "apply", "server"):
            catalog.processes.report(ProcessReport(NAME, process, 7, "running"))
        catalog.processes.report(ProcessReport(NAME, "deliver", 8, "stopped", figures=metrics.to_json()))
        for sink in ("lake", "gone", "views", "copy", "printed"):
            catalog.sinks.record(NAME, SinkProgress(sink, 7, None, 0.5, "failed", "CDC-3001 a reason"))
            topic = "shop.sums" if sink == "views" else "shop.orders"
            catalog.tables.record(NAME, [TableProgress(sink, topic, "failed", "CDC-3001 a reason", 7, 1, 3)])
        catalog.tables.record(NAME, [TableProgress("views", "shop.old", "failed", "CDC-8000 a reason", 7, 1, 3)])
        catalog.tables.record(NAME, [TableProgress("", "shop.orders", "streaming", None, 7, None, 3)])
        for sink in ("gone", "copy"):
            letter = DeadLetter(
                sink=sink,
                topic="shop.orders",
                key=("1",),
                position=7,
                ordinal=0,
                code="CDC-7006",
                message="refused",
                added_at=datetime.now(UTC),
            )
            catalog.dead_letters.mirror(NAME, sink, [letter])
        yield catalog


def defined(folder: Path, text: str) -> Definition:
    return load_definition(write(folder, SOUND + text))


def status_of(catalog: Catalog, definition: Definition) -> PipelineStatus:
    return pipeline_status(catalog, NAME, datetime.now(UTC), defined=DefinedPipeline.of(definition, "shop.yaml"))


@pytest.mark.parametrize(
    ("text", "sinks", "processes"),
    [
        ("", {"lake"}, {"reader", "apply", "server"}),
        (VIEWS, {"lake", "views"}, {"reader", "apply", "server"}),
        (DELIVERIES, {"lake", "copy", "printed"}, {"reader", "apply", "server", "deliver"}),
        ("deliveries: [{name: printed, type: stdout}]\n", {"lake", "printed"}, {"reader", "apply", "server"}),
    ],
)
def test_the_status_has_nothing_of_what_was_removed(
    tmp_path: Path, catalog: Catalog, text: str, sinks: set[str], processes: set[str]
) -> None:
    status = status_of(catalog, defined(tmp_path, text))

    assert {one.process for one in status.processes} == processes
    assert {one.name for one in status.sinks} == sinks
    assert {one.sink for one in status.tables} == {*sinks, ""}
    assert "shop.old" not in {one.topic for one in status.tables}
    subjects = " ".join(problem.subject for problem in status.problems)
    assert "gone" not in subjects
    assert ("copy" in subjects) is ("copy" in sinks)
    assert ("deliver" in subjects.split()) is ("deliver" in processes)


def test_metrics_have_nothing_of_deliveries_that_were_removed(tmp_path: Path, catalog: Catalog) -> None:
    def text(definition: Definition) -> str:
        of_definition = DefinedPipeline.of(definition)
        reports = [one for one in catalog.processes.ls(NAME) if of_definition.has_process(one.process)]
        status = status_of(catalog, definition)
        return prometheus_text(status, reported_values(status, reports)).decode()

    assert '"copy"' in text(defined(tmp_path, DELIVERIES))
    without = text(defined(tmp_path, ""))
    assert '"copy"' not in without
    assert '"gone"' not in without
    assert '"lake"' in without


def test_dead_letters_of_what_was_removed_are_not_listed(tmp_path: Path, catalog: Catalog) -> None:
    def sinks(text: str) -> set[str]:
        return {one.sink for one in DefinedPipeline.of(defined(tmp_path, text)).dead_letters(catalog)}

    assert sinks(DELIVERIES) == {"copy"}
    assert sinks("") == set()


def test_a_pipeline_under_its_earlier_name_is_forgotten_unless_it_runs(tmp_path: Path, catalog: Catalog) -> None:
    definition = defined(tmp_path, "")
    content = definition.model_dump_json(exclude_none=True)
    other_log = content.replace(definition.log.path, f"{tmp_path}/another")
    for name, stored in (("shop", content), ("before", content), ("running", content), ("other", other_log)):
        catalog.pipelines.put(name, stored)
    catalog.processes.report(ProcessReport("running", "reader", 9, "running"))
    catalog.processes.report(ProcessReport("before", "reader", 9, "stopped"))

    forget_renamed(catalog, definition)

    assert [one.name for one in catalog.pipelines.ls()] == ["other", "running", "shop"]
