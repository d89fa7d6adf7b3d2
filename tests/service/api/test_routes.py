"""Routes: every route below the API's prefix is described, and says which errors it returns."""

from __future__ import annotations

from cdc.service.api.routes import API

PREFIX = "/api/v1"


def test_the_description_has_the_routes_of_every_module_with_their_errors() -> None:
    described = API.openapi()["paths"]
    operations = {
        (path, method): operation
        for path, methods in described.items()
        if path.startswith(PREFIX)
        for method, operation in methods.items()
    }
    every = operations.values()

    assert {tag for one in every for tag in one["tags"]} >= {"status", "log", "dead letters", "search"}
    assert [one for one in every if not {"401", "404", "422", "503"} <= one["responses"].keys()] == []
    assert [one for one in every if not one["description"] or not one["security"]] == []
    assert "/page/events" not in described
