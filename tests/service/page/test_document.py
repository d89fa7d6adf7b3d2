"""The page as HTML: whole, in sections, and without data for a client that has no token."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import pytest

from cdc.catalog import Catalog, TableProgress
from cdc.service.page.document import SECTIONS, PageContext, docs_page, locked_page, page, render
from cdc.service.status import pipeline_status
from tests.service.pipeline import NAME, fill, new_catalog

CONTEXT = PageContext("db:5432/shop", "/srv/log", {"lake": "delta"}, "shop.yaml", may_change=True)
HISTORY: dict[str, dict[str, object]] = {"rates": {"source": 5.0}, "lags": {"source": [0.1, 0.2]}}
HOSTILE = "shop.<script>alert('x')</script>\"&"


@pytest.fixture
def catalog(tmp_path: Path) -> Iterator[Catalog]:
    with new_catalog(tmp_path) as opened:
        fill(opened)
        yield opened


def test_the_page_contains_every_section(catalog: Catalog) -> None:
    status = pipeline_status(catalog, NAME, datetime.now(UTC))
    sections = render(status, CONTEXT, HISTORY)
    whole = page(status, CONTEXT, HISTORY)
    assert tuple(sections) == SECTIONS
    assert sections["problems"] == ""  # not even a blank: an empty list is hidden
    assert all(section in whole for section in sections.values())
    assert "<title>shop · running · cdc</title>" in whole
    assert "data-locked" not in whole


def test_values_from_the_catalog_are_escaped_in_every_place(catalog: Catalog) -> None:
    reason = f"CDC-3001 {HOSTILE} → run 'cdc <b>'"
    catalog.tables.record(NAME, [TableProgress("lake", HOSTILE, "failed", reason, 1, 1, 1)])
    context = PageContext(HOSTILE, HOSTILE, {"lake": HOSTILE}, HOSTILE, may_change=True)
    whole = page(pipeline_status(catalog, NAME, datetime.now(UTC)), context, HISTORY)
    assert "<script>alert" not in whole
    assert whole.count("&lt;script&gt;") >= 6
    assert 'data-copy="cdc &lt;b&gt;' in whole


def test_a_locked_page_contains_no_data() -> None:
    locked = locked_page()
    assert "<body data-locked>" in locked
    assert '<ul id="problems" aria-label="Problems"></ul>' in locked


def test_the_description_of_the_api_loads_its_own_script() -> None:
    assert 'src="/static/docs.js"' in docs_page()


def test_only_the_server_imports_the_template_engine() -> None:
    probe = "import sys, cdc.cli.app, cdc.service.status, cdc.service.supervisor; print('jinja2' in sys.modules)"
    found = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "False"
