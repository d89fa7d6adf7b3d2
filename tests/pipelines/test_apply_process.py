"""How the apply process ends: its last report has the reason, also when a signal came before the failure."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from cdc.catalog import Catalog, ProcessReport
from cdc.errors import LogCorrupt
from pipelines import apply_process
from tests.fixtures.waiting import until
from tests.pipelines.shop_pipeline import ShopPipeline, make_shop


@pytest.fixture(name="shop")
def _shop(tmp_path: Path) -> ShopPipeline:
    return make_shop(tmp_path / "shop")


def last_report(shop: ShopPipeline) -> ProcessReport | None:
    with Catalog.open(shop.definition.catalog.url) as catalog:
        return next((report for report in catalog.processes.ls("shop") if report.process == "apply"), None)


@pytest.mark.parametrize(("failure", "code"), [(LogCorrupt("x"), "CDC-4002"), (ZeroDivisionError(), "CDC-0000")])
def test_a_failure_after_a_signal_is_in_the_last_report(shop: ShopPipeline, failure: Exception, code: str) -> None:
    def fail(*_: Any) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        first = until(lambda: last_report(shop), "a report after the signal")
        until(lambda: first.state == "stopped" or last_report(shop) != first, "another one, unless it was the last")
        raise failure

    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        with pytest.raises(type(failure)):
            apply_process.main(shop.definition, check=fail)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    report = last_report(shop)
    assert report is not None
    assert (report.state, (report.error or {}).get("code")) == ("failed", code)
