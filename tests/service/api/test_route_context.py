"""Route context: names in paths are checked, and the audit names the client."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest
from starlette.requests import Request

from cdc.catalog import Catalog
from cdc.errors import UnknownName
from cdc.service.api.route_context import RouteContext, actor_of
from cdc.service.api.status_sampler import StatusSampler
from cdc.service.background_jobs import ReplayJobs, VerificationJobs
from tests.service.pipeline import NAME, copy_log, definition


@pytest.fixture
def context(tmp_path: Path) -> Iterator[RouteContext]:
    shop = definition(tmp_path)
    copy_log(tmp_path)
    with Catalog.open(shop.catalog.url) as catalog:
        sampler = StatusSampler(catalog, shop, shop.log.path)
        jobs = ReplayJobs(catalog, NAME, None), VerificationJobs(catalog, NAME, None)
        yield RouteContext(sampler, catalog, shop, *jobs)


def test_known_names_pass(context: RouteContext) -> None:
    context.check_pipeline(NAME)
    context.check_sink("lake")
    context.check_table("shop.orders")


def test_unknown_names_are_refused_with_those_that_exist(context: RouteContext) -> None:
    with pytest.raises(UnknownName, match="this server serves the pipeline 'shop', not 'other'"):
        context.check_pipeline("other")
    with pytest.raises(UnknownName, match="the pipeline has no sink called 'pond'") as unknown:
        context.check_sink("pond")
    assert unknown.value.fix == "choose one of the sinks: 'lake', 'find'"
    with pytest.raises(UnknownName, match="the log has no table called"):
        context.check_table("shop.none")


@pytest.mark.parametrize(("client", "actor"), [(None, "api"), (("10.0.0.7", 5000), "api from 10.0.0.7")])
def test_the_actor_is_the_address_of_the_client(client: tuple[str, int] | None, actor: str) -> None:
    assert asyncio.run(actor_of(Request({"type": "http", "client": client, "headers": []}))) == actor
