"""A pipeline with a history in its log, for every test of this folder."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.pipelines.shop_pipeline import ShopPipeline, make_shop


@pytest.fixture
def shop(tmp_path: Path) -> ShopPipeline:
    """A log with a history; its source does not exist."""
    return make_shop(tmp_path)
