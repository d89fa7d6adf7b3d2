"""A pipeline with a history in its log, for every test of this folder."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.pipelines.replayed import Ground, made


@pytest.fixture
def ground(tmp_path: Path) -> Ground:
    """A log with a history; its source does not exist."""
    return made(tmp_path)
