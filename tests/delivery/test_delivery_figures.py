"""Figures of a delivery: what the reporter writes to the catalog."""

from __future__ import annotations

from pathlib import Path

from cdc import metrics
from cdc.catalog.dead_letter_requests import to_json
from cdc.delivery.delivery_figures import DeliveryFigures
from cdc.delivery.progress import ParkedKey, Progress
from cdc.errors import DestinationUnavailable, EventRefused
from cdc.position import ChangePosition, Position
from tests.delivery.destinations.planned import PlannedDestination
from tests.delivery.loop_run import LoopRun, drain
from tests.delivery.sent_log import begin_log, change
from tests.log.sample_log import ORDERS, commit_rows


def figures_at(now: list[float]) -> DeliveryFigures:
    """Figures with a clock."""
    return DeliveryFigures("shop", "copy", metrics.Metrics(), clock=lambda: now[0])


def test_a_delivery_that_never_began_has_no_state():
    assert figures_at([0.0]).progress() is None


def test_state_and_reason_follow_what_happens():
    figures = figures_at([0.0])
    figures.record_opened(Progress(log_id="LOG", position=Position(7)))
    running = figures.progress()
    figures.record_failure(DestinationUnavailable("nobody there"))
    failed = figures.progress()
    figures.record_opened(Progress(log_id="LOG", position=Position(7)))
    figures.record_notice("paused: because")
    paused = figures.progress()

    assert running is not None
    assert failed is not None
    assert paused is not None
    assert (running.state, running.position, running.reason) == ("running", 7, None)
    assert (failed.state, (failed.reason or "")[:21]) == ("failed", "CDC-7001 nobody there")
    assert (paused.state, paused.reason) == ("paused", "paused: because")


def test_a_dead_letter_has_key_place_and_reason():
    letter = ParkedKey(
        first=ChangePosition(Position(20), 3), relation=1, table="shop.orders", topic="t", key=("1", None)
    )
    figures = figures_at([0.0])

    figures.record_parked(Progress(log_id="LOG").parking(letter, EventRefused("too odd")))

    (found,) = map(to_json, figures.dead_letters())
    assert {name: found[name] for name in ("sink", "table", "key", "position", "ordinal", "code", "message")} == {
        "sink": "copy",
        "table": "shop.orders",
        "key": ["1", ""],
        "position": "0/14",
        "ordinal": 3,
        "code": "CDC-7006",
        "message": "too odd",
    }


def test_lag_grows_while_a_window_is_not_acknowledged(tmp_path: Path):
    writer = begin_log(tmp_path / "log")
    commit_rows(writer, change(ORDERS, 20_000_000, 0, "1"))
    run = LoopRun(tmp_path / "log", PlannedDestination())
    now = [25.0]
    figures = figures_at(now)
    with run as loop:
        drain(loop)
        window = run.source.next(Progress(log_id=run.log.log_id, position=Position(10)))
        assert window is not None
        figures.begin_window(window)
        now[0] = 30.0
        figures.record_opened(loop.progress)
        waiting = figures.progress()
        figures.record_window(window, loop.progress, 1)
        now[0] = 99.0
        idle = figures.progress()

    assert waiting is not None
    assert idle is not None
    assert waiting.lag_seconds == 10.0  # it was committed at 20 seconds
    assert (idle.lag_seconds, idle.position) == (10.0, 20_000_000)
