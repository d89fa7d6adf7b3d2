"""Holds: of two apply processes one fills a sink, and the other takes over when the first has gone."""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from cdc.catalog import Catalog
from cdc.catalog.process_lease import LEASE
from cdc.position import Position
from pipelines.runtime.cut_requests import CutRequests
from pipelines.runtime.replay_pause import ReplayPauses
from pipelines.runtime.sink_lease import SinkLeases
from pipelines.sink_lifecycle import SinkRunner
from pipelines.sink_parts import SinkParts
from tests.fixtures.waiting import until
from tests.pipelines.shop_pipeline import END, FIGURES, ShopPipeline, make_shop
from tests.pipelines.spark_starts import spark_that_never_starts

NAME = "apply shop/lake"


@pytest.fixture(name="ground")
def _ground(tmp_path: Path) -> ShopPipeline:
    return make_shop(tmp_path)


@pytest.fixture(name="catalog")
def _catalog(ground: ShopPipeline) -> Iterator[Catalog]:
    with Catalog.open(ground.definition.catalog.url) as catalog:
        yield catalog


@pytest.fixture(name="holds")
def _holds(catalog: Catalog) -> Iterator[SinkLeases]:
    holds = SinkLeases(catalog, "shop")
    yield holds
    holds.close()


def test_a_sink_is_ones_own_until_it_is_given_back(catalog: Catalog, holds: SinkLeases) -> None:
    first = SinkLeases(catalog, "shop")
    assert first.try_acquire("lake")
    assert not holds.try_acquire("lake")
    assert holds.other_holder("lake") == first.holder
    assert holds.try_acquire("find")
    first.close()
    assert catalog.leases.holder(NAME) is None

    until(lambda: holds.try_acquire("lake"), "the sink is free")
    assert holds.other_holder("lake") == ""


def test_the_hold_of_a_process_of_this_machine_that_died_counts_for_nothing(
    catalog: Catalog, holds: SinkLeases
) -> None:
    with subprocess.Popen([sys.executable, "-c", ""]) as gone:
        pass
    assert catalog.leases.acquire(NAME, f"{socket.gethostname()} {gone.pid} 1a2b3c4d", LEASE)

    assert holds.try_acquire("lake")


def test_the_hold_of_another_machine_counts_until_it_runs_out(catalog: Catalog, holds: SinkLeases) -> None:
    past = datetime.now(UTC) - timedelta(seconds=LEASE - 1)
    assert catalog.leases.acquire(NAME, "elsewhere 1 1a2b3c4d", LEASE, now=past)
    assert not holds.try_acquire("lake")

    until(lambda: holds.try_acquire("lake"), "the hold has run out")


def test_of_two_drivers_the_second_leaves_the_sink_alone_until_the_first_is_gone(
    ground: ShopPipeline, catalog: Catalog
) -> None:
    pauses, cuts = ReplayPauses(catalog, "shop"), CutRequests(catalog, "shop")
    held = SinkLeases(catalog, "shop"), SinkLeases(catalog, "shop")
    first, second = (
        SinkRunner(
            ground.definition,
            ground.definition.sinks[0],
            SinkParts(cuts, pauses, FIGURES, spark_that_never_starts(), h),
        )
        for h in held
    )
    first.step()
    second.step()
    assert (first.is_standby, second.is_standby) == (False, True)
    assert first.has_applied(Position(1)) and not second.has_applied(Position(1))  # noqa: PT018 - one comparison of two
    first.stop()
    held[0].close()

    def looked() -> bool:
        second.step()
        return second.has_applied(Position(END))

    until(looked, "the second driver has all of the log")
    assert not second.is_standby

    second.stop()
    held[1].close()
    assert {row["id"]: row["note"] for row in ground.lake()["shop.orders"]}[1] == "newest"
