"""Summaries of views: what the definition has, and what the apply process reported."""

from __future__ import annotations

from pathlib import Path

import pytest

from cdc import metrics
from cdc.catalog import Catalog, ProcessReport, TableProgress
from cdc.catalog.view_requests import VIEW_PAUSES
from cdc.catalog.view_summary import check_view_name, view_summaries
from cdc.config import load_definition
from cdc.errors import UnknownName
from tests.config.definitions import SOUND, write

VIEWS = "exclude: [shop.v_*]\nviews: [{name: shop.v_ids, key: [id], sql: SELECT id FROM shop.orders}]\n"


def test_a_summary_has_what_definition_and_process_say(tmp_path: Path, catalog: Catalog) -> None:
    definition = load_definition(write(tmp_path, SOUND + VIEWS))
    (found,) = view_summaries(definition, catalog)
    assert (found.state, found.position, found.paused, found.computations) == (
        "not started",
        None,
        False,
        {"incremental": 0, "whole": 0},
    )
    assert (found.keys_left, found.seconds_left) == (None, None)

    figures, labels = metrics.Metrics(), (definition.name, "shop.v_ids")
    figures.add(metrics.VIEW_INPUT_ROWS, 5, *labels)
    figures.add(metrics.VIEW_AFFECTED_KEYS, 4, *labels)
    figures.add(metrics.VIEW_COMPUTATIONS, 2, *labels, "incremental")
    figures.set(metrics.VIEW_KEYS_LEFT, 3, *labels)
    figures.set(metrics.VIEW_SECONDS_LEFT, 2.25, *labels)
    figures.add(metrics.VIEW_SECONDS, 1.5, *labels, "whole")
    catalog.processes.report(ProcessReport(definition.name, "apply", 1, "running", None, figures.to_json()))
    catalog.tables.record(definition.name, [TableProgress("views", "shop.v_ids", "failed", "a reason", 16, None, 7)])
    VIEW_PAUSES.pause(catalog, definition.name, "shop.v_ids", "tester")
    (found,) = view_summaries(definition, catalog)

    assert (found.key, found.sql) == (("id",), "SELECT id FROM shop.orders")
    assert (found.state, found.reason, found.position, found.rows) == ("failed", "a reason", "0/10", 7)
    assert (found.paused, found.input_rows, found.affected_keys) == (True, 5, 4)
    assert (found.keys_left, found.seconds_left) == (3, 2.2)
    assert found.computations == {"incremental": 2, "whole": 0}
    assert found.seconds == {"incremental": 0.0, "whole": 1.5}


def test_an_unknown_name_is_refused(tmp_path: Path) -> None:
    definition = load_definition(write(tmp_path, SOUND + VIEWS))
    check_view_name(definition, "shop.v_ids")
    with pytest.raises(UnknownName, match=r"has no view 'shop\.other'"):
        check_view_name(definition, "shop.other")
