"""Requests to compute a view as a whole: each is answered once, and written to the audit log."""

from __future__ import annotations

from cdc.catalog import Catalog
from cdc.catalog.view_requests import ViewRequests, request_refresh, take_requests


def test_a_request_is_taken_once(catalog: Catalog) -> None:
    request_refresh(catalog, "shop", "shop.documents", "ann")
    request_refresh(catalog, "other", "shop.documents", "ann")

    assert take_requests(catalog, "shop") == ViewRequests(("shop.documents",))
    assert take_requests(catalog, "shop") == ViewRequests()
