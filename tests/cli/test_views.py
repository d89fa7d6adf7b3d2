"""`cdc views`: what is listed, explained and requested."""

from __future__ import annotations

from pathlib import Path

import pytest

from cdc.catalog import Catalog, TableProgress
from cdc.catalog.view_requests import take_requests
from tests.cli.command import run
from tests.config.definitions import SOUND
from tests.fixtures.catalog import put_catalog

VIEWS = """\
exclude: [shop.documents]
views: [{name: shop.documents, key: [id], sql: 'SELECT o.id FROM shop.orders o JOIN shop.items i ON i.order_id = o.id'}]
"""


@pytest.fixture
def definition(tmp_path: Path) -> Path:
    put_catalog(tmp_path)
    path = tmp_path / "shop.yaml"
    path.write_text(f"{SOUND}catalog: {{url: 'sqlite:///{tmp_path}/catalog.db'}}\n{VIEWS}")
    return path


def opened(definition: Path) -> Catalog:
    return Catalog.open(f"sqlite:///{definition.parent}/catalog.db")


def test_views_are_listed_with_their_state(capsys: pytest.CaptureFixture[str], definition: Path) -> None:
    (listed,) = run(capsys, "views", "ls", "-c", definition, "--json").envelope["result"]["views"]
    assert (listed["name"], listed["state"]) == ("shop.documents", "not started")

    progress = TableProgress("views", "shop.documents", "failed", "CDC-8001 no column", 16, None, 7)
    with opened(definition) as catalog:
        catalog.tables.record("shop", [progress])
    assert "shop.documents  id   failed  0/10      7             CDC-8001 no column" in (
        run(capsys, "views", "ls", "-c", definition).output
    )


def test_a_view_is_explained(capsys: pytest.CaptureFixture[str], definition: Path) -> None:
    shown = run(capsys, "views", "explain", "shop.documents", "--sql", "-c", definition).output
    assert "changed rows of i, joined with o, give the key (id)" in shown
    assert "`changed shop.items a`" in shown

    definition.write_text(definition.read_text().replace("o.id FROM", "rank() OVER (ORDER BY o.id) AS id FROM"))
    found = run(capsys, "views", "explain", "shop.documents", "-c", definition, "--json").envelope
    assert "computed as a whole every 600 s" in found["summary"]
    assert (found["result"]["incremental"], found["result"]["tables"][0]["sql"]) == (False, None)


def test_a_refresh_is_a_request_to_the_apply_process(capsys: pytest.CaptureFixture[str], definition: Path) -> None:
    assert "computed at the next cut" in run(capsys, "views", "refresh", "shop.documents", "-c", definition).output
    with opened(definition) as catalog:
        assert take_requests(catalog, "shop").refreshes == ("shop.documents",)
        assert take_requests(catalog, "shop").refreshes == ()


def test_a_view_is_paused_shown_and_resumed(capsys: pytest.CaptureFixture[str], definition: Path) -> None:
    assert "'shop.documents' is paused\n" in run(capsys, "views", "pause", "shop.documents", "-c", definition).output
    assert "is paused already" in run(capsys, "views", "pause", "shop.documents", "-c", definition).output
    with opened(definition) as catalog:
        assert take_requests(catalog, "shop").paused == {"shop.documents"}

    shown = run(capsys, "views", "show", "shop.documents", "-c", definition).output
    assert "paused:        True\n" in shown
    assert "computations:  incremental 0, whole 0\n" in shown
    assert "sql:\nSELECT o.id FROM shop.orders o JOIN" in shown
    assert "is running\n" in run(capsys, "views", "resume", "shop.documents", "-c", definition).output
    found = run(capsys, "views", "show", "shop.documents", "-c", definition, "--json").envelope["result"]
    assert (found["name"], found["paused"]) == ("shop.documents", False)


def test_an_unknown_view_is_refused(capsys: pytest.CaptureFixture[str], definition: Path) -> None:
    for command in ("refresh", "explain", "show", "pause", "resume"):
        done = run(capsys, "views", command, "shop.other", "-c", definition)
        assert (done.status, "CDC-5010" in done.errors) == (2, True)
