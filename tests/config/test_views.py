"""Views of a definition: their names, keys and intervals, and the sinks and deliveries that receive them."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from cdc.config import DeltaSinkDefinition, SearchSinkDefinition
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


def test_a_sink_has_tables_or_views() -> None:
    found = DeltaSinkDefinition.model_validate({"type": "delta", "name": "v", "path": "/v/{table}", "views": ["a.*"]})
    index = SearchSinkDefinition.model_validate({"type": "search", "name": "s", "path": "/s", "views": ["a.b"]})

    assert (found.tables, index.tables) == (("a.*",), ("a.b",))
    with pytest.raises(ValidationError, match="exclude each other"):
        DeltaSinkDefinition.model_validate(
            {"type": "delta", "name": "v", "path": "/v/{table}", "views": ["a.*"], "tables": ["b.*"]}
        )
