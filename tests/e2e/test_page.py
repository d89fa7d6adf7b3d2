"""The page in a real browser, over a real server and catalog."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, ConsoleMessage, Page, expect, sync_playwright

from cdc.catalog import Catalog, ProcessReport, TableProgress
from cdc.service.api.app import create_app
from tests.service.pipeline import NAME, definition, fill
from tests.service.running import answering

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
ARGUMENTS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine: apt-get install chromium")


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        opened = playwright.chromium.launch(executable_path=CHROMIUM, headless=True, args=ARGUMENTS)
        yield opened
        opened.close()


@pytest.fixture
def catalog(tmp_path: Path) -> Iterator[Catalog]:
    with Catalog.open(definition(tmp_path).catalog.url) as opened:
        fill(opened)
        yield opened


@pytest.fixture
def url(catalog: Catalog, tmp_path: Path) -> Iterator[str]:
    with answering(create_app(catalog, definition(tmp_path), "/srv/cdc/shop/log")) as address:
        yield address


@pytest.fixture
def page(browser: Browser, url: str) -> Iterator[Page]:
    """The page, opened; leaving it fails on anything the browser complained about."""
    complaints: list[str] = []

    def note(message: ConsoleMessage) -> None:
        if message.type in {"error", "warning"}:
            complaints.append(message.text)

    context = browser.new_context(viewport={"width": 1280, "height": 900})
    opened = context.new_page()
    opened.on("console", note)
    opened.on("pageerror", lambda error: complaints.append(str(error)))
    opened.goto(url)
    yield opened
    folder = os.environ.get("CDC_SCREENSHOTS")
    if folder:
        opened.screenshot(path=Path(folder) / "page.png", full_page=True)
    context.close()
    assert complaints == []


def test_the_page_shows_state_rows_lag_and_positions(page: Page) -> None:
    expect(page).to_have_title("shop · running · cdc")
    expect(page.locator("#link")).to_have_text("live")
    expect(page.locator("#totals")).to_contain_text("0.61")
    expect(page.locator("#flow")).to_contain_text("0/16B3F2C8")
    expect(page.locator("#tables tbody tr")).to_have_count(4)
    expect(page.locator("#tables")).to_contain_text("15\u202f210")


def test_the_page_follows_what_happens_without_a_reload(page: Page, catalog: Catalog) -> None:
    expect(page.locator("#link")).to_have_text("live")
    reason = "CDC-3001 a value of column 'total' does not fit"
    catalog.tables.record(NAME, [TableProgress("lake", "shop.orders", "failed", reason, 1, 17, 1)])
    expect(page.locator("#problems")).to_contain_text("table shop.orders in lake")
    expect(page.locator("#headline")).to_contain_text("degraded")
    expect(page.locator("#tables tbody tr").first).to_contain_text("orders")


def test_the_page_says_that_a_process_failed_and_what_to_do(page: Page, catalog: Catalog) -> None:
    error = {"code": "CDC-2104", "message": "slot is ahead of the log", "suggestion": "drop the slot"}
    catalog.processes.report(ProcessReport(NAME, "reader", 4711, "failed", error))
    expect(page.locator("#problems")).to_contain_text("drop the slot")
    expect(page.locator("#headline")).to_contain_text("down")
    expect(page.get_by_role("link", name="CDC-2104")).to_have_attribute("href", "/api/v1/errors/CDC-2104")


def test_markup_in_a_name_is_text(page: Page, catalog: Catalog) -> None:
    hostile = "shop.<img src=x onerror=document.title='owned'>"
    catalog.tables.record(NAME, [TableProgress("lake", hostile, "failed", hostile, 1, 1, 1)])
    expect(page.locator("#tables")).to_contain_text("<img src=x")
    assert page.locator("img").count() == 0
    expect(page).to_have_title("shop · degraded · cdc")


def test_a_narrow_screen_needs_no_sideways_scrolling(page: Page) -> None:
    page.set_viewport_size({"width": 390, "height": 844})
    expect(page.locator("#link")).to_have_text("live")
    assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth")
