"""Summaries of deliveries: what the catalog has, and whether the process still reports."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from cdc.catalog import REPORT_MAX_AGE, Catalog, ProcessReport, SinkProgress
from cdc.catalog.delivery_requests import DELIVERY_PAUSES
from cdc.config import load_definition
from cdc.delivery.delivery_summary import check_name, summaries
from cdc.delivery.destinations import KINDS, new_destination
from cdc.delivery.destinations.contract import DeliveryIdentity
from cdc.errors import UnknownName
from tests.config.definitions import SOUND, write

DELIVERIES = "deliveries: [{name: events, type: file, path: out}, {name: pipe, type: stdout, format: flat}]\n"


def test_a_summary_has_what_definition_and_catalog_say(tmp_path: Path) -> None:
    definition = load_definition(write(tmp_path, SOUND + DELIVERIES))
    with Catalog.open(f"sqlite:///{tmp_path}/catalog.db") as catalog:
        catalog.sinks.record(
            definition.name, SinkProgress("pipe", 20, datetime(2026, 1, 2, tzinfo=UTC), 1.5, "failed", "a reason")
        )
        catalog.processes.report(ProcessReport(definition.name, "deliver", 1, "stopped"))
        DELIVERY_PAUSES.pause(catalog, definition.name, "events", "tester")
        events, pipe = summaries(definition, catalog)

    assert (events.state, events.promise, events.paused, events.position) == ("not started", "exactly once", True, None)
    assert (pipe.state, pipe.reason, pipe.format, pipe.position) == ("failed", "a reason", "flat", "0/14")


@pytest.mark.parametrize(("age", "state"), [(REPORT_MAX_AGE - 1, "running"), (REPORT_MAX_AGE + 1, "stopped")])
def test_a_delivery_whose_process_does_not_report_has_stopped(tmp_path: Path, age: float, state: str) -> None:
    definition = load_definition(write(tmp_path, SOUND + DELIVERIES))
    with Catalog.open(f"sqlite:///{tmp_path}/catalog.db") as catalog:
        catalog.sinks.record(
            definition.name, SinkProgress("events", 20, datetime(2026, 1, 2, tzinfo=UTC), 0, "running")
        )
        catalog.processes.report(ProcessReport(definition.name, "deliver", 1, "running"))
        events, _ = summaries(definition, catalog, datetime.now(UTC) + timedelta(seconds=age))

    assert events.state == state


def test_an_unknown_name_is_refused_with_the_known_ones(tmp_path: Path) -> None:
    definition = load_definition(write(tmp_path, SOUND + DELIVERIES))
    check_name(definition, "pipe")
    with pytest.raises(UnknownName) as caught:
        check_name(definition, "other")
    assert "'events', 'pipe'" in caught.value.fix


def test_the_promise_of_a_type_is_that_of_its_class(tmp_path: Path) -> None:
    definition = load_definition(write(tmp_path, SOUND + DELIVERIES))
    for settings in definition.deliveries:
        destination = new_destination(settings, DeliveryIdentity("shop", settings.name, "log"))
        assert destination.promise is KINDS[settings.type].promise
