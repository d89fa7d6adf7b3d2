"""Submitted replays, in a Spark session of this machine: the catalog has their progress and outcome."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from cdc.catalog import Catalog
from cdc.catalog.commands import JOB_LEASE, REPLAY, Command
from cdc.failpoint import VARIABLE
from cdc.service.background_jobs import ReplayJobs, ReplayStatus
from tests.fixtures import forked
from tests.fixtures.forked import Ended
from tests.pipelines.cold_log import EACH_OF_ITS_OWN
from tests.pipelines.shop_pipeline import ShopPipeline, applied_shop, delta_rows

KILLED = -9


@pytest.fixture
def ground() -> ShopPipeline:
    """A log of several segments with a history, and a lake of it; its source does not exist."""
    return applied_shop(limits=EACH_OF_ITS_OWN)


@pytest.fixture
def catalog(ground: ShopPipeline) -> Iterator[Catalog]:
    with Catalog.open(ground.definition.catalog.url) as opened:
        yield opened


def submit(ground: ShopPipeline, *words: str, failpoint: str | None = None) -> Ended:
    """Run the script of spark-submit in its own session."""
    environment = {VARIABLE: failpoint} if failpoint else {}
    command = ("pipelines.submitted.job", *words, "-c", ground.folder / "shop.yaml")
    return forked.run(*command, environment=environment, timeout=90)


def last(catalog: Catalog) -> ReplayStatus:
    """The last replay as the API shows it."""
    found = ReplayJobs(catalog, "shop", None).last("lake")
    assert found is not None
    return found


def newest(catalog: Catalog) -> Command:
    return catalog.commands.ls("shop", REPLAY)[0]


@pytest.mark.slow  # the default run has the next test, and a replay in a child process (test_job_routes.py)
def test_a_replay_leaves_its_report_and_the_rows_that_applying_made(ground: ShopPipeline, catalog: Catalog) -> None:
    into = str(ground.folder / "new")
    done = submit(ground, "replay", "lake", "--into", into)
    assert done.status == 0, done.errors

    status = last(catalog)
    assert (status.state, status.error, status.request.into) == ("done", None, into)
    assert status.command == f"cdc spark submit replay lake --from=beginning --to=latest --into={into} -c FILE"
    assert status.summary is not None
    assert status.summary.startswith("built 2 tables of lake")
    assert {table["topic"] for table in (status.result or {})["tables"]} == {"shop.orders", "shop.items"}
    assert catalog.leases.holder(newest(catalog).payload[JOB_LEASE]) is None
    for topic, rows in ground.lake().items():
        assert delta_rows(f"{into}/{topic.replace('.', '/')}") == rows


def test_a_replay_that_cannot_be_says_why(ground: ShopPipeline, catalog: Catalog) -> None:
    assert submit(ground, "replay", "lake", "--tables", "shop.none").status == 2

    status = last(catalog)
    assert (status.state, status.summary) == (
        "failed",
        "the log contains no table of sink 'lake' that matches 'shop.none'",
    )
    assert status.command.startswith("cdc spark submit replay lake --from=beginning --to=latest --tables=shop.none")
    assert (status.error or {})["code"] == "CDC-1000"


@pytest.mark.slow
def test_a_replay_that_was_killed_runs_until_its_lease_has_run_out(ground: ShopPipeline, catalog: Catalog) -> None:
    done = submit(ground, "replay", "lake", failpoint="replay_after_build")
    assert done.status == KILLED, done.errors
    ReplayJobs(catalog, "shop", None).jobs.fail_unfinished()  # it is no child of a server that starts

    status = last(catalog)
    assert status.state == "running"
    assert status.summary is not None
    assert status.summary.startswith("2/2 shop.")
    lease = newest(catalog).payload[JOB_LEASE]
    catalog.leases.release(lease, str(catalog.leases.holder(lease)))
    status = last(catalog)
    assert (status.state, status.summary) == ("failed", "the cluster job ended without a result")
