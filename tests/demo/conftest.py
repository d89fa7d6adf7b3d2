"""Where a demo of a test keeps its state."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(name="folder")
def _folder(tmp_path: Path) -> Path:
    """A folder that anybody may enter, as Postgres' own user must."""
    for place in (tmp_path, *tmp_path.parents):
        if place.owner() == tmp_path.owner() and place.stat().st_mode & 0o005 != 0o005:
            place.chmod(0o755)
    return tmp_path
