"""Fixtures: a healthy pipeline, and a client of its server."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from starlette.applications import Starlette

from cdc.catalog import Catalog
from cdc.service.api.app import create_app
from tests.service.pipeline import copy_log, definition, fill, new_catalog
from tests.service.running import Clock, answering, client_of


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def app(catalog: Catalog, tmp_path: Path, clock: Clock) -> Starlette:
    return create_app(catalog, definition(tmp_path), str(tmp_path / "log"), clock)


@pytest.fixture
def client(app: Starlette) -> Iterator[httpx.Client]:
    with answering(app) as url, client_of(url) as opened:
        yield opened


@pytest.fixture
def catalog(tmp_path: Path) -> Iterator[Catalog]:
    copy_log(tmp_path)
    with new_catalog(tmp_path) as opened:
        fill(opened)
        yield opened
