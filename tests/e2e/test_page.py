"""The page in a real browser, over a real server and catalog."""

from __future__ import annotations

import os
import shutil
import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from datetime import UTC, datetime
from pathlib import Path
from threading import Event, Thread

import pytest
from playwright.sync_api import ConsoleMessage, Dialog, Error, Page, Request, expect, sync_playwright

from cdc.catalog import Catalog, ProcessReport, TableProgress
from cdc.service.api.app import create_app
from cdc.service.log_sampler import LogSampler
from cdc.snapshot.backfill_documents import BackfillAction, BackfillRequest, BackfillState, TableBackfillState
from tests.cli.trimmed import Folder
from tests.fixtures.waiting import until
from tests.service.pipeline import LOG_END, NAME, TOKEN, copy_log, copying, definition, fill, new_catalog
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


@pytest.fixture(name="window", scope="module")
def _window() -> Iterator[Page]:
    """One page of a browser for all tests: a new one costs more than most of them, and each server is a new origin."""
    with sync_playwright() as playwright:
        expect.set_options(timeout=30_000)  # the machine may be busy
        browser = playwright.chromium.launch(executable_path=CHROMIUM, headless=True, args=ARGUMENTS)
        yield browser.new_page()
        browser.close()


@pytest.fixture
def catalog(tmp_path: Path) -> Iterator[Catalog]:
    url = definition(tmp_path).catalog.url
    with Catalog.open(url) as opened:
        copy_log(tmp_path)
        fill(opened)
        with beating(url.removeprefix("sqlite:///")):
            yield opened


@contextmanager
def beating(database: str) -> Iterator[None]:
    """The processes go on to say what they said last: after some seconds it would count for nothing."""
    ended = Event()

    def beat() -> None:
        while not ended.wait(0.5):
            now = f"{datetime.now(UTC):%Y-%m-%d %H:%M:%S.%f}"
            with closing(sqlite3.connect(database, timeout=10)) as connection, connection:
                connection.execute("UPDATE processes SET reported_at = ?", [now])

    beats = Thread(target=beat)
    beats.start()
    try:
        yield
    finally:
        ended.set()
        beats.join()


@pytest.fixture
def url(catalog: Catalog, tmp_path: Path) -> Iterator[str]:
    with answering(create_app(catalog, definition(tmp_path), "/srv/cdc/shop/log")) as address:
        yield address


@pytest.fixture
def page(window: Page, url: str) -> Iterator[Page]:
    """The page, opened; leaving it fails on anything the browser complained about."""
    with looking_at(window, url, "page.png"):
        yield window


@contextmanager
def looking_at(window: Page, url: str, picture: str) -> Iterator[None]:
    complaints: list[str] = []

    def note(message: ConsoleMessage) -> None:
        if message.type in {"error", "warning"}:
            complaints.append(message.text)

    def fail(error: Error) -> None:
        complaints.append(str(error))

    window.on("console", note)
    window.on("pageerror", fail)
    try:
        with visiting(window, url):
            yield
            folder = os.environ.get("CDC_SCREENSHOTS")
            if folder:
                window.screenshot(path=Path(folder) / picture, full_page=True)
    finally:
        window.remove_listener("console", note)
        window.remove_listener("pageerror", fail)
    assert complaints == []


@contextmanager
def visiting(window: Page, url: str) -> Iterator[None]:
    """Show this address, and in the end nothing."""
    window.set_viewport_size({"width": 1280, "height": 900})
    window.goto(url)
    try:
        yield
    finally:
        window.goto("about:blank")


def test_the_page_shows_state_rows_lag_and_positions_and_follows_what_happens_without_a_reload(
    page: Page, catalog: Catalog
) -> None:
    expect(page).to_have_title("shop · running · cdc")
    expect(page.locator("#link")).to_have_text("live")
    expect(page.locator("#totals")).to_contain_text("0.61")
    expect(page.locator("#flow")).to_contain_text("0/16B3F2C8")
    expect(page.locator("#tables tbody tr")).to_have_count(4)
    expect(page.locator("#tables")).to_contain_text("15\u202f210")
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


@pytest.fixture
def copy(catalog: Catalog, page: Page) -> int:
    """The first copy of a table, a quarter done; its number."""
    expect(page.locator("#link")).to_have_text("live")
    catalog.tables.record(NAME, [TableProgress("", "shop.orders", "snapshotting", None, LOG_END, None, 0)])
    return copying(
        catalog, "shop.orders", BackfillRequest(("shop.orders",), resync=True, epoch=0),
        state="snapshotting", rows=25_000, estimate=100_000, seconds=5.0,
    )  # fmt: skip


def test_a_copy_shows_how_far_it_has_come_and_its_buttons_speak_the_verbs_and_keep_the_focus_while_figures_change(
    page: Page, copy: int, catalog: Catalog
) -> None:
    words = "25\u202f000 rows of about 100\u202f000 · 25% · 5\u202f000 rows/s · 15 s left"
    expect(page.locator("#backfills tbody tr")).to_have_count(1)
    expect(page.locator("#backfills")).to_contain_text(words)
    expect(page.locator("#backfills th[scope=row]")).to_have_text(str(copy))
    row = page.locator("#tables tbody tr", has_text="orders").filter(has_text="snapshotting").first
    expect(row).to_contain_text(words)
    expect(row.get_by_role("progressbar")).to_have_attribute("value", "0.2500")
    pause = page.get_by_role("button", name=f"pause copy {copy}")
    pause.focus()
    more = TableBackfillState("snapshotting", rows=50_000, estimate=100_000, seconds=9.0)
    catalog.commands.record(copy, BackfillState("snapshotting", {"shop.orders": more}).to_json())
    expect(page.locator("#backfills")).to_contain_text("50%")
    expect(pause).to_be_focused()
    page.keyboard.press("Enter")
    (heard,) = until(lambda: catalog.commands.pending(NAME, BackfillAction.PAUSE.kind), "the pause to be posted")
    assert heard.payload == {"id": copy}
    catalog.commands.record(copy, BackfillState("paused", {"shop.orders": more}).to_json())
    expect(page.get_by_role("button", name=f"resume copy {copy}")).to_be_visible()


def test_a_cancel_is_asked_for_twice(page: Page, copy: int, catalog: Catalog) -> None:
    cancel = page.get_by_role("button", name=f"cancel copy {copy}")
    asked: list[str] = []

    def decline(dialog: Dialog) -> None:
        asked.append(dialog.message)
        dialog.dismiss()

    page.once("dialog", decline)
    cancel.click()
    page.once("dialog", lambda dialog: dialog.accept())
    cancel.click()
    until(lambda: catalog.commands.pending(NAME, BackfillAction.CANCEL.kind), "the cancel to be posted")
    assert asked == [f"Cancel copy {copy}? Rows that it already sent stay."]
    assert len(catalog.commands.ls(NAME, BackfillAction.CANCEL.kind)) == 1


@pytest.mark.slow
def test_a_service_that_takes_no_verbs_shows_no_buttons_for_them(
    window: Page, catalog: Catalog, tmp_path: Path
) -> None:
    copying(catalog, "shop.orders", BackfillRequest(("shop.orders",)), state="snapshotting", rows=1)
    reading = definition(tmp_path, host="0.0.0.0")
    with answering(create_app(catalog, reading, "/log")) as address, visiting(window, address):
        expect(window.locator("#link")).to_have_text("live")
        expect(window.locator("#backfills tbody tr")).to_have_count(1)
        assert window.locator("button[data-verb]").count() == 0


def test_the_page_asks_for_the_token_and_speaks_with_it(window: Page, catalog: Catalog, tmp_path: Path) -> None:
    job = copying(catalog, "shop.orders", BackfillRequest(("shop.orders",)), state="snapshotting", rows=1)
    guarded = definition(tmp_path, token={"env": "SHOP_TOKEN"})
    page = window
    with answering(create_app(catalog, guarded, "/log")) as address, visiting(page, address):
        expect(page.get_by_text("This service needs a token")).to_be_visible()
        assert "shop.orders" not in page.content()
        page.locator("#token").fill("not-the-right-one")
        page.get_by_role("button", name="Unlock").click()
        expect(page.locator("#unlock-notice")).to_have_text("The server does not accept this token.")
        page.locator("#token").fill(TOKEN)
        page.keyboard.press("Enter")
        expect(page).to_have_title("shop · running · cdc")
        expect(page.get_by_text("This service needs a token")).to_be_hidden()
        page.get_by_role("button", name=f"pause backfill {job}").click()
        until(lambda: catalog.commands.pending(NAME, BackfillAction.PAUSE.kind), "the pause to be posted")
        page.reload()
        expect(page.locator("#tables")).to_contain_text("orders")


@pytest.mark.slow
def test_the_description_of_the_api_is_shown_with_nothing_of_another_site(page: Page, url: str) -> None:
    asked: list[str] = []

    def note(request: Request) -> None:
        asked.append(request.url)

    page.on("request", note)
    page.get_by_role("link", name="API").click()
    expect(page.locator(".opblock").first).to_be_visible()
    expect(page.locator("#api")).to_contain_text("/api/v1/pipelines/{pipeline}/backfills")
    page.locator(".opblock-post .opblock-summary").first.click()
    expect(page.locator(".opblock.is-open")).to_contain_text("Parameters")
    page.remove_listener("request", note)
    assert any("swagger-ui-bundle.js" in one for one in asked)
    assert [one for one in asked if not one.startswith((url, "data:"))] == []


def test_the_description_of_the_api_asks_for_the_token_and_tries_out_with_it(
    window: Page, catalog: Catalog, tmp_path: Path
) -> None:
    guarded = definition(tmp_path, token={"env": "SHOP_TOKEN"})
    page = window
    with answering(create_app(catalog, guarded, "/log")) as address, visiting(page, f"{address}/docs"):
        page.locator("#token").fill("not-the-right-one")
        page.get_by_role("button", name="Unlock").click()
        expect(page.locator("#token")).to_have_value("")
        assert "backfills" not in page.content()
        page.locator("#token").fill(TOKEN)
        page.keyboard.press("Enter")
        status = page.locator(".opblock", has_text="/api/v1/status").first
        status.locator(".opblock-summary").click()
        status.get_by_role("button", name="Try it out").click()
        status.get_by_role("button", name="Execute").click()
        expect(status.locator(".live-responses-table tbody .response-col_status")).to_have_text("200")


def test_a_refused_verb_says_why(window: Page, catalog: Catalog, url: str) -> None:
    job = copying(catalog, "shop.orders", BackfillRequest(("shop.orders",)), state="snapshotting", rows=1)
    page = window
    with visiting(page, url):
        # in one go: the page is drawn anew whenever something is told
        page.get_by_role("button", name=f"pause backfill {job}").evaluate("b => { b.dataset.verb += 'x'; b.click() }")
        expect(page.locator("#notice")).to_contain_text("→")


@pytest.mark.slow
def test_a_narrow_screen_needs_no_sideways_scrolling(page: Page) -> None:
    page.set_viewport_size({"width": 390, "height": 844})
    expect(page.locator("#link")).to_have_text("live")
    assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth")


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    """A log that is compacted up to 170 and lacks single changes up to 150, deletes up to 120."""
    folder = Folder(tmp_path)
    folder.compacted(160)
    folder.compacted(170, floor=120)
    folder.trimmed()
    return folder


@pytest.fixture
def kept(window: Page, folder: Folder, tmp_path: Path) -> Iterator[Page]:
    """The page of a pipeline with that log, opened."""
    with new_catalog(tmp_path) as opened:
        fill(opened)
        app = create_app(opened, definition(tmp_path), str(folder.root))
        app.state.sampler.log = LogSampler(folder.root, every=0.1)
        with answering(app) as address, looking_at(window, address, "log.png"):
            yield window


def test_the_page_shows_what_the_log_keeps_and_who_reads_it(kept: Page, folder: Folder) -> None:
    folder.consumer("lake", 190)
    folder.consumer("late", 110, age=3)
    log = kept.locator("#log")
    for words in (
        "10 rows in 5 segments",
        "3 rows in 1 run",
        "on disk for readers of older versions",
        "3 rows written",
    ):
        expect(log).to_contain_text(words)
    assert [mark.inner_text() for mark in log.locator(".reach dd").all()] == ["0/78", "0/96", "0/AA", "0/C8"]
    expect(log.get_by_role("img")).to_have_count(1)
    expect(log.get_by_role("row", name="lake")).to_contain_text("10 B, 0.00 s")
    expect(log.get_by_role("row", name="late")).to_contain_text("must be rebuilt")
    expect(kept.locator("#problems")).to_contain_text("cdc consumers forget late -c FILE")
    kept.set_viewport_size({"width": 390, "height": 844})
    assert kept.evaluate("document.documentElement.scrollWidth <= window.innerWidth")


def test_the_log_is_followed_without_a_reload_and_what_is_damaged_is_said_while_the_rest_goes_on(
    kept: Page, folder: Folder
) -> None:
    expect(kept.locator("#log")).to_contain_text("10 rows in 5 segments")
    folder.append(300)
    expect(kept.locator("#log")).to_contain_text("11 rows in 6 segments")
    newest = max((folder.root / "compacted" / "_delta_log").glob("*.json"))
    newest.write_text("nonsense", encoding="utf-8")
    expect(kept.locator("#problems")).to_contain_text("table 'compacted'")
    expect(kept.locator("#problems")).to_contain_text("cdc log verify")
    expect(kept.locator("#log")).to_contain_text("11 rows in 6 segments")
    expect(kept.locator("#link")).to_have_text("live")
    expect(kept.locator("#tables tbody tr")).to_have_count(4)
