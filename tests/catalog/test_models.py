"""Models: times are stored with their zone."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest

from cdc.catalog import Catalog, SinkProgress
from cdc.errors import CatalogUnavailable

NOON = datetime(2026, 1, 2, 12, tzinfo=UTC)


def test_a_moment_without_zone_is_refused(catalog: Catalog) -> None:
    naive = NOON.replace(tzinfo=None)
    with pytest.raises(CatalogUnavailable):
        catalog.sinks.record("shop", SinkProgress("lake", 1, naive, 0.0, "streaming"))
