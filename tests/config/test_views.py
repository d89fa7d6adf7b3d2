"""Views of a definition: their names, keys and intervals, and the sinks and deliveries that receive them."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
from pydantic import ValidationError

from cdc.config import Definition, DeltaSinkDefinition, SearchSinkDefinition
from cdc.config.definition_conflicts import disagreements
from cdc.config.views import Incremental, View


def view(**settings: object) -> View:
    return View.model_validate({"name": "shop.v", "key": ["id"], "sql": "SELECT 1 AS id", **settings})


def test_a_view_is_computed_from_changes_if_it_can_and_otherwise_every_ten_minutes() -> None:
    assert (view().incremental, view().refresh.every, view().over) == (Incremental.AUTO, 600.0, None)
    assert view(refresh={"every": "5s"}).refresh.every == 5.0


@pytest.mark.parametrize("wrong", [{"name": "documents"}, {"key": []}, {"sql": ""}, {"refresh": {"every": 0}}])
def test_a_view_without_schema_key_or_sql_is_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        view(**wrong)


def test_a_sink_with_views_has_only_these_unless_it_names_tables() -> None:
    found = DeltaSinkDefinition.model_validate({"type": "delta", "name": "v", "path": "/v/{table}", "views": ["a.*"]})
    index = SearchSinkDefinition.model_validate({"type": "search", "name": "s", "path": "/s", "views": ["a.b"]})

    assert (found.tables, index.tables) == (("a.*",), ("a.b",))


def pipeline(*sinks: Mapping[str, object]) -> Definition:
    values = {
        "name": "shop",
        "source": {"dsn": "host=/s dbname=d"},
        "tables": [{"match": "shop.*"}],
        "log": {"path": "/log"},
    }
    views = [{"name": "shop.v", "key": ["id"], "sql": "SELECT id FROM shop.orders"}]
    return Definition.model_validate(values | {"exclude": ["shop.v"], "sinks": sinks, "views": views})


LAKE = {"type": "delta", "name": "lake", "path": "/lake/{schema}/{table}", "tables": ["*.*"], "views": ["shop.v"]}
INDEX = {"type": "search", "name": "find", "path": "/find", "tables": ["*.*"], "views": ["shop.v"]}


def test_the_views_of_a_sink_of_tables_are_a_sink_of_their_own_in_the_same_folder() -> None:
    written = pipeline(LAKE, INDEX)
    lake, index, of_lake, of_index = written.sinks

    assert [(sink.name, sink.tables, sink.views) for sink in (lake, index)] == [
        ("lake", ("*.*",), ()),
        ("find", ("*.*",), ()),
    ]
    assert [(sink.name, sink.tables, sink.views_of) for sink in (of_lake, of_index)] == [
        ("lake_views", ("shop.v",), "lake"),
        ("find_views", ("shop.v",), "find"),
    ]
    assert isinstance(lake, DeltaSinkDefinition)
    assert isinstance(of_lake, DeltaSinkDefinition)
    assert (of_lake.path, of_index.path) == (lake.path, "/find_views")
    assert (lake.record_uri, of_lake.record_uri) == ("/lake/_cdc/published", "/lake/_cdc/views/published")
    assert list(disagreements(written)) == []


@pytest.mark.parametrize(
    ("sinks", "key", "message"),
    [
        (
            [LAKE, {**LAKE, "name": "lake_views", "path": "/b/{table}", "tables": ["a.b"], "views": []}],
            0,
            "'lake_views'",
        ),
        ([{**LAKE, "name": "l" * 36}], 0, "too long"),
        ([{**LAKE, "rules": [{"match": "a.b", "path": "/log/{table}"}]}], 0, "overlaps"),
        ([{**LAKE, "tables": ["shop.v"], "views_of": "nothing"}], 0, "expected a sink of views"),
    ],
)
def test_a_sink_whose_views_cannot_be_apart_is_refused_at_its_place(
    sinks: list[dict[str, object]], key: int, message: str
) -> None:
    conflicts = [conflict for conflict in disagreements(pipeline(*sinks)) if message in conflict.message]

    assert [conflict.key[1] for conflict in conflicts] == [key]
