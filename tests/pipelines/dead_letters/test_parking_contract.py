"""What parking promises of every sink: of a key without a base, the one that each of them refuses."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from cdc.catalog.dead_letter_requests import DeadLetterAction, DeadLetterOutcome
from cdc.errors import DeadLetterLimitExceeded, MissingBase, SinkUnavailable
from tests.contracts.folded import ORDERS, gone, part, put
from tests.pipelines.dead_letters.sink_driver import Driver, SearchDriver

Opened = Callable[..., Driver]


@pytest.fixture(name="opened", params=[Driver, SearchDriver], ids=["delta", "search"])
def _opened(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Opened]:
    """Opens the sink anew; the driver before is gone, with what it did not publish."""
    drivers: list[Driver] = []

    def opened(stop_at: int = 10, ratio: float = 1) -> Driver:
        for driver in drivers:
            driver.sink.close()
        drivers.append(request.param(tmp_path, stop_at, ratio))
        return drivers[-1]

    yield opened
    for driver in drivers:
        driver.sink.close()


@pytest.fixture(name="driver")
def _driver(opened: Opened) -> Driver:
    driver = opened()
    driver.take(put(1, "a", 10), put(2, "b", 11), put(3, "c", 12), upto=20)
    return driver


def test_a_key_without_a_base_waits_alone_and_keeps_what_was_sent(driver: Driver) -> None:
    assert driver.take(part(9, 30, {3: "2.00"}), put(1, "A", 31), gone(3, 32), upto=40) == ["9"]
    assert driver.items() == {"1": "A", "2": "b"}
    (row,) = driver.quarantine.rows
    assert (row.topic, row.key, row.place, row.attempts) == ("shop.orders", ("9",), (30, 0), 1)
    assert (dict(row.image), row.complete, row.code) == ({1: "9", 3: "2.00"}, False, MissingBase.code)
    assert row.first_at > 0


def test_later_changes_wait_behind_it_until_the_row_comes_whole(driver: Driver) -> None:
    driver.take(part(9, 30, {3: "2.00"}), upto=40)

    assert driver.take(part(9, 50, {3: "3.00"}), put(2, "B", 51), upto=60) == ["9"]
    assert dict(driver.quarantine.rows[0].image)[3] == "3.00"
    assert driver.take(put(9, "whole", 70, price="3.00"), upto=80) == []
    assert driver.rows()["9"] == ("whole", "3.00")
    assert driver.items()["2"] == "B"


def test_a_delete_a_truncate_and_a_generation_end_let_it_go(driver: Driver) -> None:
    controls: list[dict[str, Any]] = [{}, {"truncated": (255, 0)}, {"generation": 345}]
    for position, control in zip((100, 200, 300), controls, strict=True):
        assert driver.take(part(9, position, {3: "2.00"}), upto=position + 40) == ["9"]
        rows = [] if control else [gone(9, position + 50)]
        assert driver.take(*rows, upto=position + 60, **control) == []
        assert "9" not in driver.items()


def test_a_row_that_moves_away_from_a_parked_key_waits_in_its_place(driver: Driver) -> None:
    driver.take(part(9, 30, {3: "2.00"}), upto=40)
    moved = part(7, 50, {3: "5.00"}, ordinal=1, base=("9",))

    assert driver.take(gone(9, 50), moved, upto=60) == ["7"]
    assert driver.take(put(7, "whole", 70, price="5.00"), upto=80) == []
    assert driver.rows()["7"] == ("whole", "5.00")


def test_a_retry_leaves_a_row_that_is_not_whole_to_the_source_and_a_discard_forgets_it(driver: Driver) -> None:
    driver.take(part(9, 30, {3: "2.00"}), upto=40)
    place = (ORDERS.relation, ("9",))
    driver.quarantine.request(place, DeadLetterAction.RETRY)
    assert driver.take(upto=60) == ["9"]
    assert driver.quarantine.outcome(place) is DeadLetterOutcome.ASKED
    driver.quarantine.request(place, DeadLetterAction.DISCARD)
    assert driver.take(upto=80) == []
    assert driver.quarantine.outcome(place) is DeadLetterOutcome.DISCARDED
    assert driver.items() == {"1": "a", "2": "b", "3": "c"}


def test_a_table_stops_when_more_would_wait_than_may(opened: Opened) -> None:
    driver = opened(stop_at=1)
    driver.take(put(1, "a", 10), part(8, 11, {3: "8.00"}), upto=20)
    with pytest.raises(DeadLetterLimitExceeded, match=r"stop_at is 1\)"):
        driver.merge(part(9, 30, {3: "9.00"}), upto=40)

    assert driver.take(put(1, "A", 50), upto=60) == ["8"]
    assert driver.items() == {"1": "A"}


def test_a_table_stops_when_of_the_keys_of_a_large_batch_a_larger_share_would_wait_than_may(opened: Opened) -> None:
    driver = opened(stop_at=1000, ratio=0.05)
    fit = [put(n, "x", 100 + n) for n in range(1, 95)]
    waits = [part(n, 100 + n, {3: "8.00"}) for n in range(95, 101)]
    with pytest.raises(DeadLetterLimitExceeded, match=r"6 of the 100 keys .* dead_letters\.ratio is 0\.05"):
        driver.merge(*fit, *waits, upto=300)

    assert driver.take(*fit, put(95, "x", 195), *waits[1:], upto=300) == ["100", "96", "97", "98", "99"]
    assert len(driver.items()) == 95


def test_a_batch_of_few_keys_is_not_judged_by_the_share_of_them_that_would_wait(opened: Opened) -> None:
    driver = opened(stop_at=100, ratio=0.05)
    waits = [part(n, n, {3: "8.00"}) for n in range(1, 100)]

    assert len(driver.take(*waits, upto=200)) == 99
    with pytest.raises(DeadLetterLimitExceeded, match="stop_at is 100"):
        driver.merge(part(100, 300, {3: "8.00"}), part(101, 301, {3: "8.00"}), upto=400)


def test_keys_that_waited_before_do_not_count_in_the_share_of_a_batch_without_them(opened: Opened) -> None:
    driver = opened(stop_at=100, ratio=0.05)
    driver.take(*(part(n, n, {3: "8.00"}) for n in range(1, 50)), upto=100)

    assert len(driver.take(*(put(n, "x", n) for n in range(100, 300)), part(300, 300, {3: "1.00"}), upto=400)) == 50


def test_with_none_to_be_parked_the_first_row_stops_the_table(opened: Opened) -> None:
    with pytest.raises(MissingBase):
        opened(stop_at=0).merge(part(9, 30, {3: "9.00"}), upto=40)


def test_the_next_driver_finds_what_is_parked_where_the_last_one_published(driver: Driver, opened: Opened) -> None:
    driver.take(part(8, 30, {3: "8.00"}), part(9, 31, {3: "9.00"}), upto=40)
    driver.take(put(8, "whole", 50), part(9, 51, {3: "9.50"}), upto=60)
    held = driver.quarantine.rows
    second = opened()

    assert second.quarantine.rows == held
    assert [row.key for row in held] == [("9",)]
    assert second.take(put(9, "whole", 70), upto=80) == []
    assert opened().quarantine.rows == []


def test_what_a_batch_parked_and_let_go_that_was_not_published_comes_again(driver: Driver, opened: Opened) -> None:
    driver.take(part(8, 30, {3: "8.00"}), upto=40)
    rows = [put(8, "whole", 50), part(9, 51, {3: "9.00"}), put(1, "A", 52)]
    driver.merge(*rows, upto=60)
    second = opened()

    assert second.take(*rows, put(2, "B", 65), upto=70) == ["9"]
    assert second.items() == {"1": "A", "2": "B", "3": "c", "8": "whole"}
    assert opened().keys() == ["9"]


def test_of_an_index_that_does_not_answer_nothing_is_parked(tmp_path: Path) -> None:
    driver = SearchDriver(tmp_path)
    driver.take(put(1, "a", 10), upto=20)
    driver.sink.close()
    with pytest.raises(SinkUnavailable):
        driver.merge(part(9, 30, {3: "2.00"}), upto=40)

    assert driver.quarantine.rows == []
