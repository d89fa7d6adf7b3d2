"""Pauses: each lasts until somebody resumes, and one of a delivery is none of a view."""

from __future__ import annotations

import pytest

from cdc.catalog import Catalog
from cdc.catalog.delivery_requests import DELIVERY_PAUSES
from cdc.catalog.pause_requests import PauseRequests
from cdc.catalog.view_requests import VIEW_PAUSES


@pytest.mark.parametrize("requests", [DELIVERY_PAUSES, VIEW_PAUSES], ids=["delivery", "view"])
def test_something_is_paused_until_it_is_resumed(catalog: Catalog, requests: PauseRequests) -> None:
    other = VIEW_PAUSES if requests is DELIVERY_PAUSES else DELIVERY_PAUSES
    assert requests.pause(catalog, "shop", "copy", "ada")
    assert not requests.pause(catalog, "shop", "copy", "ada")
    assert other.pause(catalog, "shop", "other", "ada")
    assert requests.paused(catalog, "shop") == {"copy"}
    assert requests.paused(catalog, "elsewhere") == frozenset()

    assert requests.resume(catalog, "shop", "copy", "ada")
    assert not requests.resume(catalog, "shop", "copy", "ada")
    assert requests.paused(catalog, "shop") == frozenset()
    assert other.paused(catalog, "shop") == {"other"}
