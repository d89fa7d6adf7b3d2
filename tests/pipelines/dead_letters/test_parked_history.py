"""Rows that a target of every version or every change cannot take: their keys wait with all that comes of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest

from cdc.catalog.dead_letter_requests import DeadLetterAction, DeadLetterOutcome
from cdc.config.delta_sink import HistoryMode
from cdc.errors import DeadLetterLimitExceeded, MissingBase, ValueNotRepresentable
from tests.contracts.histories import MODELS, RELATION, kept
from tests.pipelines.dead_letters.parking_history import (
    AS_TEXT,
    PRICED,
    ParkingHistorySink,
    complete_row,
    deleted_row,
    open_parking_sink,
    partial_row,
)
from tests.pipelines.dead_letters.sink_driver import NAN
from tests.pipelines.fold_model import KEY_COLUMN, PLAIN, Row, Source, log_row

HISTORIES = (HistoryMode.VERSIONS, HistoryMode.MARKED, HistoryMode.CHANGES)

BEGUN = [complete_row(5, 1, "1.00", "c"), complete_row(6, 2, "2.00", "c")]
LATER = [
    complete_row(15, 1, NAN),
    complete_row(16, 2, "3.00"),
    partial_row(17, 1, "4.00"),
    deleted_row(21, 1),
    complete_row(22, 1, "5.00", "c"),
    deleted_row(23, 2),
]


@pytest.mark.parametrize("keeping", HISTORIES)
def test_a_key_waits_with_all_of_its_changes_and_comes_whole_once_they_fit(
    tmp_path: Path, keeping: HistoryMode
) -> None:
    lake, rows = open_parking_sink(tmp_path, keeping), [*BEGUN, *LATER]
    assert lake.take(rows, 10) == []
    assert lake.take(rows, 20) == ["1"]
    assert lake.take(rows, 30) == ["1"]
    assert kept(lake, keeping) == MODELS[keeping]([row for row in rows if row["key"] == ["2"] or row["position"] < 15])
    (letter,) = lake.quarantine.rows
    assert (letter.place, letter.code, letter.image[2]) == ((15, 0), ValueNotRepresentable.code, NAN)
    assert [change.place for change in letter.changes] == [(15, 0), (17, 0), (21, 0), (22, 0)]

    mended = open_parking_sink(tmp_path, keeping, **AS_TEXT)
    mended.ask(DeadLetterAction.RETRY)
    assert mended.take(rows, 40) == []
    assert kept(mended, keeping) == MODELS[keeping](rows)
    assert mended.quarantine.outcome((RELATION, ("1",))) is DeadLetterOutcome.APPLIED


@pytest.mark.parametrize("ending", ["t", "g"])
@pytest.mark.parametrize("keeping", HISTORIES)
def test_what_ends_rows_while_a_key_waits_ends_those_that_it_would_have_had(
    tmp_path: Path, keeping: HistoryMode, ending: str
) -> None:
    end = log_row(RELATION, (25, 0), ending, payload=b"24" if ending == "g" else None)
    read = [complete_row(24, 2, "7.00", "r"), complete_row(24, 3, NAN, "r", ordinal=1)] if ending == "g" else []
    rows = [
        *BEGUN,
        complete_row(7, 3, "3.00", "c"),
        complete_row(15, 1, NAN),
        *read,
        end,
        complete_row(26, 1, "6.00", "c"),
    ]
    lake = open_parking_sink(tmp_path, keeping)
    for upto in (10, 20, 25, 30):
        lake.take(rows, upto)
    mended = open_parking_sink(tmp_path, keeping, **AS_TEXT)
    mended.ask(DeadLetterAction.RETRY)

    assert mended.take(rows, 40) == []
    assert kept(mended, keeping) == MODELS[keeping](rows)


def test_of_keys_that_are_alike_in_their_first_part_only_the_parked_one_waits(tmp_path: Path) -> None:
    both = replace(PRICED, columns=tuple(replace(c, key=1 if c.name == "large" else c.key) for c in PRICED.columns))

    def row(position: int, part: str, price: str, op: str = "u") -> Row:
        return {**complete_row(position, 1, price, op, after={1: "1", 2: price, 3: part, 4: "h"}), "key": ["1", part]}

    rows = [row(5, "a", "1.00", "c"), row(6, "b", "2.00", "c"), row(15, "a", NAN), log_row(RELATION, (16, 0), "t")]
    rows += [row(17, "b", "3.00", "c")]
    found: dict[HistoryMode, list[list[tuple[Any, ...]]]] = {HistoryMode.VERSIONS: [], HistoryMode.MARKED: []}
    for keeping, told in found.items():
        lake = open_parking_sink(tmp_path / keeping, keeping)
        lake.take(rows, 10, both)
        assert lake.take(rows, 20, both) == ["1"]
        mended = open_parking_sink(tmp_path / keeping, keeping, **AS_TEXT)
        mended.ask(DeadLetterAction.RETRY)
        for one in (lake, mended):
            if one is mended:
                assert mended.take(rows, 30, both) == []
            ends = ("__START_AT", "__END_AT") if keeping is HistoryMode.VERSIONS else ("_deleted",)
            told.append(sorted((r["large"], str(r["plain"]), *(r[name] for name in ends)) for r in one.rows()))
    assert found[HistoryMode.VERSIONS] == [
        [("a", "1.00", 5, 16), ("b", "2.00", 6, 16), ("b", "3.00", 17, None)],
        [("a", "1.00", 5, 15), ("a", NAN, 15, 16), ("b", "2.00", 6, 16), ("b", "3.00", 17, None)],
    ]
    assert found[HistoryMode.MARKED] == [
        [("a", "1.00", False), ("b", "3.00", False)],
        [("a", NAN, True), ("b", "3.00", False)],
    ]


@pytest.mark.parametrize("keeping", HISTORIES)
def test_a_key_that_is_tried_in_vain_waits_on_and_one_that_is_discarded_goes_on_from_what_is_there(
    tmp_path: Path, keeping: HistoryMode
) -> None:
    rows = [*BEGUN, complete_row(15, 1, NAN), complete_row(35, 1, "9.00")]
    lake = open_parking_sink(tmp_path, keeping)
    lake.take(rows, 20)
    lake.ask(DeadLetterAction.RETRY)
    assert lake.take(rows, 30) == ["1"]
    assert lake.quarantine.rows[0].attempts == 2
    lake.ask(DeadLetterAction.DISCARD)
    assert lake.take(rows, 40) == []
    assert kept(lake, keeping) == MODELS[keeping]([row for row in rows if row["position"] != 15])


@pytest.mark.parametrize("keeping", HISTORIES)
def test_a_partial_image_that_moves_from_or_to_a_parked_key_stops_the_table(
    tmp_path: Path, keeping: HistoryMode
) -> None:
    lake, rows = open_parking_sink(tmp_path, keeping), [*BEGUN, complete_row(15, 1, NAN)]
    lake.take(rows, 20)
    for old, new in ((1, 7), (2, 1)):
        with pytest.raises(MissingBase, match="the old or the new key is parked"):
            lake.apply([deleted_row(25, old), partial_row(25, new, "1.00", old_key=[str(old)], ordinal=1)], 20, 30)
    with pytest.raises(MissingBase, match="the old or the new key is parked"):
        lake.apply([deleted_row(25, 2), partial_row(25, 8, NAN, old_key=["2"], ordinal=1)], 20, 30)

    assert lake.take(rows, 40) == ["1"]


def test_a_table_stops_when_more_changes_would_wait_than_may(tmp_path: Path) -> None:
    lake, rows = (
        open_parking_sink(tmp_path, HistoryMode.VERSIONS, stop_at=2),
        [*BEGUN, complete_row(15, 1, NAN), complete_row(16, 1, "1.00")],
    )
    lake.take(rows, 10)
    assert lake.take(rows, 20) == ["1"]
    with pytest.raises(DeadLetterLimitExceeded, match="stop_at is 2"):
        lake.apply([*rows, complete_row(25, 1, "2.00")], 20, 30)


class Priced(Source):
    """A table with prices of which some are no decimals; a row that moves is sent whole."""

    def _new_image(self, key: str) -> Any:
        return super()._new_image(key) | {PLAIN: self._price()}

    def _sent(self, key: str) -> Any:
        said = super()._sent(key)
        self.table[key] |= {PLAIN: self._price()}
        return {**said, "after": said["after"] | {PLAIN: self.table[key][PLAIN]}}

    def _move(self) -> None:
        if self.table and (free := self._free()):
            old, new = self.random.choice(sorted(self.table)), self.random.choice(free)
            self.table[new] = self.table.pop(old) | {KEY_COLUMN: new, PLAIN: self._price()}
            self._row("d", key=[old], before={KEY_COLUMN: old})
            self._row("u", key=[new], old_key=[old], before={KEY_COLUMN: old}, after=dict(self.table[new]))

    def _price(self) -> str | None:
        return self.random.choice((None, NAN, "1.00", "2.00", "3.00", "4.00"))


def crashed(lake: ParkingHistorySink, rows: Sequence[Row], ends: Sequence[int], random: Random) -> None:
    """A batch that is applied and not published, and the next driver."""
    before = lake.tables.get(RELATION)
    upto = random.choice(ends[:8])
    lake.apply(rows, min(before.position, upto) if before else 0, upto)
    lake.start()


@pytest.mark.parametrize("seed", [0, *(pytest.param(n, marks=pytest.mark.slow) for n in range(1, 40))])
@pytest.mark.parametrize("keeping", HISTORIES)
def test_after_any_batches_and_crashes_and_one_retry_the_history_is_that_of_the_source(
    tmp_path: Path, keeping: HistoryMode, seed: int
) -> None:
    random = Random(f"{keeping}-{seed}")
    source = Priced(RELATION, random)
    for _ in range(24):
        source.transaction()
    ends, lake = sorted({row["position"] for row in source.log}), open_parking_sink(tmp_path, keeping)
    done = 0
    while done < ends[-1]:
        left = [end for end in ends if end > done]
        if random.random() < 0.3:
            crashed(lake, source.log, left, random)
        if random.random() < 0.3:
            lake.ask(DeadLetterAction.RETRY)
        done = random.choice(left[:8])
        lake.take(source.log, done)
    assert all(row.changes[0].place <= row.place for row in lake.quarantine.rows)
    mended = open_parking_sink(tmp_path, keeping, **AS_TEXT)
    mended.ask(DeadLetterAction.RETRY)

    assert mended.take(source.log, done + 1) == []
    assert kept(mended, keeping) == MODELS[keeping](source.log)
    assert open_parking_sink(tmp_path, keeping, **AS_TEXT).quarantine.rows == []
