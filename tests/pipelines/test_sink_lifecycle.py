"""The state machine of a sink's runner: its transition table, and the ways into and out of the closed states."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from cdc.catalog import Catalog
from cdc.errors import LakeInaccessible
from cdc.position import Position
from pipelines.runtime.cut_requests import CutRequests
from pipelines.runtime.replay_pause import ReplayPauses
from pipelines.runtime.sink_lease import SinkLeases
from pipelines.sink_lifecycle import OPEN, TRANSITIONS, WITH_QUERY, SinkEvent, SinkRunner, State
from pipelines.sink_parts import SinkParts
from tests.fixtures.waiting import until
from tests.pipelines.shop_pipeline import END, FIGURES, ShopPipeline, applied_shop, make_shop
from tests.pipelines.spark_starts import spark_that_never_starts


def test_every_state_is_reached_from_closed_and_leads_back_to_it() -> None:
    assert set(TRANSITIONS) == set(State)
    assert {event for events in TRANSITIONS.values() for event in events} == set(SinkEvent)
    assert _reachable(State.CLOSED) == set(State)
    for state in State:
        assert State.CLOSED in _reachable(state), state


def _reachable(start: State) -> set[State]:
    found, new = set[State](), {start}
    while new:
        found |= new
        new = {state for one in new for state in TRANSITIONS[one].values()} - found
    return found


@pytest.mark.parametrize("state", [state for state in State if state in OPEN])
@pytest.mark.parametrize(
    ("event", "after"),
    [
        (SinkEvent.LEASE_LOST, State.STANDBY),
        (SinkEvent.REPLAY_BEGAN, State.PAUSED),
        (SinkEvent.FAILED, State.CLOSED),
        (SinkEvent.FAILED_FOR_GOOD, State.HALTED),
        (SinkEvent.REOPEN, State.CLOSED),
        (SinkEvent.STOPPED, State.CLOSED),
    ],
)
def test_every_open_state_is_closed_by_the_same_events(state: State, event: SinkEvent, after: State) -> None:
    assert TRANSITIONS[state][event] is after
    assert after not in OPEN


def test_a_query_is_started_for_a_range_that_needs_it_and_stopped_when_it_is_idle() -> None:
    starts = {
        state: events[SinkEvent.QUERY_STARTED]
        for state, events in TRANSITIONS.items()
        if SinkEvent.QUERY_STARTED in events
    }
    assert starts == {State.AWAITING_SPARK: State.AWAITING_BATCH}
    assert TRANSITIONS[State.AWAITING_BATCH][SinkEvent.FIRST_BATCH] is State.STREAMING
    for state in WITH_QUERY | {State.AWAITING_SPARK}:
        assert TRANSITIONS[state][SinkEvent.QUERY_IDLE] is State.DIRECT
    assert {State.AWAITING_BATCH, State.STREAMING} == WITH_QUERY


def test_a_halted_sink_is_left_by_a_replay_or_for_another_process_only() -> None:
    assert set(TRANSITIONS[State.HALTED]) == {SinkEvent.LEASE_LOST, SinkEvent.REPLAY_BEGAN}


@pytest.fixture(name="shop")
def _shop(tmp_path: Path) -> ShopPipeline:
    return make_shop(tmp_path / "shop")


def step(runner: SinkRunner) -> State:
    """Do one step; return the state after it."""
    runner.step()
    return runner.state


@contextmanager
def runner_of(shop: ShopPipeline, path: str | None = None) -> Iterator[tuple[SinkRunner, Catalog]]:
    """A runner of the lake that never gets a Spark session; path: instead of the definition's."""
    sink = shop.definition.sinks[0]
    with Catalog.open(shop.definition.catalog.url) as catalog:
        leases = SinkLeases(catalog, "shop")
        parts = SinkParts(
            CutRequests(catalog, "shop"), ReplayPauses(catalog, "shop"), FIGURES, spark_that_never_starts(), leases
        )
        runner = SinkRunner(shop.definition, sink.model_copy(update={"path": path or sink.path}), parts)
        try:
            yield runner, catalog
        finally:
            runner.stop()
            leases.close()


def test_a_runner_opens_its_sink_applies_small_ranges_and_closes_it(shop: ShopPipeline) -> None:
    with runner_of(shop) as (runner, _):
        assert runner.state not in OPEN
        assert step(runner) is State.DIRECT
        while runner.apply_small_range():
            assert runner.state in OPEN - WITH_QUERY
        assert runner.has_applied(Position(END))
        runner.stop()
        assert runner.state not in OPEN
        assert not runner.has_applied(Position(1))
        assert step(runner) is State.DIRECT


def test_a_replay_closes_the_sink_and_its_end_opens_it(shop: ShopPipeline) -> None:
    with runner_of(shop) as (runner, catalog):
        runner.step()
        command = catalog.commands.post("shop", "pause", {"sink": "lake"})
        assert catalog.leases.acquire("pause shop/lake", "elsewhere 1 1a2b3c4d", 60.0)
        assert step(runner) is State.PAUSED
        confirmed = catalog.commands.get(command)
        assert confirmed is not None
        assert confirmed.result is not None
        catalog.leases.release("pause shop/lake", "elsewhere 1 1a2b3c4d")
        assert step(runner) is State.DIRECT


def test_a_failure_for_good_halts_the_sink_until_a_replay_has_ended(shop: ShopPipeline) -> None:
    other = applied_shop()
    with runner_of(shop, other.definition.sinks[0].path) as (runner, catalog):
        for _ in range(2):
            assert step(runner) is State.HALTED
        assert runner.final_error is not None
        assert runner.has_applied(Position(END))
        assert catalog.leases.acquire("pause shop/lake", "elsewhere 1 1a2b3c4d", 60.0)
        assert step(runner) is State.PAUSED
        assert runner.final_error is None
        catalog.leases.release("pause shop/lake", "elsewhere 1 1a2b3c4d")
        assert step(runner) is State.HALTED  # nothing was replayed: it fails again


def test_a_sink_without_access_to_its_bucket_tries_again_and_says_what_is_missing(
    shop: ShopPipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_REGION", "us-east-1")
    with runner_of(shop, "s3://lake/{schema}/{table}") as (runner, _):
        assert step(runner) is State.CLOSED
        progress = runner.progress.to_sink()
    assert progress is not None
    assert progress.reason is not None
    assert progress.reason.startswith(
        f"{LakeInaccessible.code} a target of sink 'lake' cannot be accessed: "
        "this process has no credentials for the object store"
    )


def test_a_halted_sink_is_still_halted_when_its_lease_comes_back(shop: ShopPipeline) -> None:
    other = applied_shop()
    lease, elsewhere = "apply shop/lake", "elsewhere 1 1a2b3c4d"
    with runner_of(shop, other.definition.sinks[0].path) as (runner, catalog):
        assert step(runner) is State.HALTED
        error, holder = runner.final_error, catalog.leases.holder(lease)
        assert error is not None
        assert holder is not None
        catalog.leases.release(lease, holder)
        assert catalog.leases.acquire(lease, elsewhere, 60.0)

        def reaches(state: State) -> bool:
            return step(runner) is state

        until(lambda: reaches(State.STANDBY), "the runner sees that another process has its lease")
        assert runner.is_standby
        catalog.leases.release(lease, elsewhere)
        until(lambda: reaches(State.HALTED), "the runner has its lease again")
        assert runner.final_error is error
