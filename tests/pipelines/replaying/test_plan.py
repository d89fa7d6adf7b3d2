"""The plan of a replay: where it ends, and options that are refused before anything is started."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest

from cdc.errors import ConfigError
from pipelines.replaying.plan import ReplayOptions, plan_replay
from pipelines.replaying.replay import replay
from tests.fixtures.http_relay import Forward, HttpRelay, Reply
from tests.fixtures.opensearch import SharedOpenSearch
from tests.fixtures.search_sinks import search_sink
from tests.pipelines.shop_pipeline import ShopPipeline, applied_shop, change


def test_a_time_ends_before_what_was_committed_after_it(shop: ShopPipeline) -> None:
    moment = "2023-11-14T22:13:20.001250+00:00"  # the log's times are 1.7e9 s and its positions in µs
    report = replay(shop.definition, ReplayOptions(sink="lake", end=moment, into=str(shop.folder / "past")))
    assert 1_200 <= report.position < 1_300


@dataclass(frozen=True)
class _PublishedMeanwhile:
    """The source commits, and the sink publishes the commit, while the replay asks for the published record."""

    shop: ShopPipeline

    def reply(self, body: bytes, forward: Forward, /) -> Reply:
        self.shop.append(1_500, [change(1_500, 0, 1, "meanwhile", op="u")])
        self.shop.drive("find", 1_500)
        return forward(body)


def test_a_sink_that_publishes_while_its_replay_is_planned_is_no_obstacle(
    shop: ShopPipeline, opensearch: SharedOpenSearch, opensearch_relay: HttpRelay
) -> None:
    shop.definition = shop.definition.model_copy(update={"sinks": [search_sink(opensearch)]})
    shop.drive("find")
    opensearch_relay.fault("GET .*/published", _PublishedMeanwhile(shop))
    relayed = search_sink(opensearch, url=opensearch_relay.url)
    plan = plan_replay(shop.definition.model_copy(update={"sinks": [relayed]}), ReplayOptions(sink="find"))

    assert plan.upto == 1_500


BAD: dict[str, dict[str, Any]] = {
    "unknown sink 'nowhere'": {"sink": "nowhere"},
    "matches 'shop.nothing'": {"tables": ("shop.orders", "shop.nothing")},
    "before the log's oldest position, 0/3E8": {"start": "0/10"},
    "after the end of the log, 0/578": {"start": "1/0"},
    "one row per key": {"start": "0/4B0"},
    "is outside the log": {"end": "1/0"},
    "malformed --to 'yesterday'": {"end": "yesterday"},
    "malformed lsn": {"end": "x/y"},
    "cannot go back to 0/4B0": {"end": "0/4B0"},
    "only be rebuilt up to the position of the other tables": {"end": "0/578", "tables": ("orders",)},
    "has one target for all tables, so it can only be rebuilt as a whole": {"sink": "find", "tables": ("orders",)},
    "is not empty": {"into": "lake"},
    "is a file": {"into": "shop.yaml"},
}


def test_bad_input_is_refused_by_name_with_status_2_and_nothing_is_started() -> None:
    shop = applied_shop()
    before = sorted(shop.folder.rglob("*"))
    for message, bad in BAD.items():
        options: dict[str, Any] = {"sink": "lake"} | bad
        if "into" in options:
            options["into"] = str(shop.folder / str(options["into"]))
        with pytest.raises(ConfigError, match=message) as refused:
            replay(shop.definition, ReplayOptions(**options))
        assert refused.value.exit_code.value == 2
        assert sorted(shop.folder.rglob("*")) == before, message
