"""Kinds of sinks: which ones SQL reads and which ones are searched, and the sinks of views."""

from __future__ import annotations

from cdc.config import DeltaSinkDefinition, SearchSinkDefinition
from cdc.config.sinks import has_tables_and_views, queried_sinks, searched_sinks, with_views_apart

LAKE = DeltaSinkDefinition.model_validate({"type": "delta", "name": "lake", "path": "/lake/{table}"})
FIND = SearchSinkDefinition.model_validate({"type": "search", "name": "find", "path": "/find"})


def test_sql_reads_delta_tables_and_words_are_searched_in_indexes() -> None:
    assert queried_sinks([FIND, LAKE]) == [LAKE]
    assert searched_sinks([FIND, LAKE]) == [FIND]


def test_the_views_of_a_sink_with_tables_are_a_sink_behind_the_others() -> None:
    both = FIND.model_copy(update={"views": ("shop.v",)})

    apart = with_views_apart([both, LAKE])

    assert has_tables_and_views(both)
    assert [(sink.name, sink.tables, sink.views_of, sink.location) for sink in apart] == [
        ("find", ("*.*",), None, "/find"),
        ("lake", ("*.*",), None, "/lake/{table}"),
        ("find_views", ("shop.v",), "find", "/find_views"),
    ]
