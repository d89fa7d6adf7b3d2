"""Targets that keep versions, marked rows or every change: what each keeps, and what it refuses."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest

from cdc.config import SinkRule, TableSettings
from cdc.config.sinks import HistoryMode
from cdc.errors import HistoryTrimmed, MissingBase, SchemaNotApplicable, TargetRulesChanged
from cdc.table import TableState
from tests.contracts.folded import column
from tests.contracts.histories import RELATION, SETTINGS, TABLE, Lake, batch, kept
from tests.contracts.stories import log
from tests.pipelines.fold_model import Row, log_row


def history(seed: int, transactions: int) -> tuple[list[Row], list[int]]:
    """(the log of a small table, the positions that a batch can end at)."""
    rows = log(Random(seed), transactions)
    return rows, sorted({row["position"] for row in rows})


def test_one_transaction_makes_one_version_of_a_row_at_most(tmp_path: Path) -> None:
    said = [("c", "a"), ("u", "b"), ("d", None), ("c", "c"), ("u", "d")]
    rows = [
        log_row(RELATION, (5, n), op, key=["1"], before={1: "1"}, after=None if text is None else {1: "1", 2: text})
        for n, (op, text) in enumerate(said)
    ]
    rows += [log_row(RELATION, (6, 0), "d", key=["1"], before={1: "1"})]
    rows += [log_row(RELATION, (6, 1), "c", key=["1"], after={1: "1", 2: "d"})]
    rows += [log_row(RELATION, (7, 0), "c", key=["2"], after={1: "2"})]
    rows += [log_row(RELATION, (7, 1), "d", key=["2"], before={1: "2"})]
    lake = Lake(str(tmp_path), SETTINGS[HistoryMode.VERSIONS])
    lake.apply(rows, 0, 7)

    (version,) = lake.rows()
    assert (version["plain"], version["__START_AT"], version["__END_AT"]) == ("d", 5, None)
    assert (version["_position"], version["_ordinal"]) == (6, 1)


def test_a_batch_that_was_applied_changes_nothing_when_it_or_a_part_of_it_comes_again(tmp_path: Path) -> None:
    rows, positions = history(3, 12)
    for keeping, settings in SETTINGS.items():
        lake = Lake(f"{tmp_path}/{keeping}", settings)
        lake.apply(rows, 0, positions[-1])
        found = kept(lake, keeping)
        for after, upto in [(0, positions[-1]), (0, positions[2]), (positions[1], positions[5])]:
            lake.start()
            record = lake.apply(rows, after, upto)
            assert record.position == positions[-1]
        assert kept(lake, keeping) == found


def test_a_partial_image_without_a_base_stops_the_table_and_waits_while_the_table_is_copied(tmp_path: Path) -> None:
    rows = [
        log_row(RELATION, (5, 0), "u", key=["1"], after={1: "1", 2: "p"}, partial=True),
        log_row(RELATION, (6, 0), "d", key=["2"], before={1: "2"}),
        log_row(RELATION, (6, 1), "u", key=["3"], old_key=["2"], after={1: "3", 2: "m"}, partial=True),
        log_row(RELATION, (7, 0), "r", key=["1"], after={1: "1", 2: "p", 3: "l", 4: "h"}),
    ]
    copying = replace(TABLE, state=TableState.SNAPSHOTTING)
    for keeping, settings in SETTINGS.items():
        lake = Lake(f"{tmp_path}/{keeping}", settings)
        with pytest.raises(MissingBase, match="has no base row for 2 partial images, the first at 0/5"):
            lake.apply(rows, 0, 7)
        lake.apply(rows, 0, 7, copying)
        assert [row["large"] for row in lake.rows() if row["id"] == 1] == ["l"]
        assert [row for row in lake.rows() if row["id"] == 3] == []


def test_a_target_that_keeps_something_else_is_refused(tmp_path: Path) -> None:
    rows, positions = history(1, 3)
    for keeping, settings in SETTINGS.items():
        place = f"{tmp_path}/{keeping}"
        Lake(place, settings).apply(rows, 0, positions[0])
        for other in (TableSettings(), *(s for k, s in SETTINGS.items() if k is not keeping)):
            with pytest.raises(
                TargetRulesChanged, match=f"was created with mode '{keeping.value}', but its rule has mode"
            ):
                Lake(place, other).apply(rows, positions[0], positions[1])


def test_a_target_has_the_columns_that_are_listed_and_never_loses_its_key(tmp_path: Path) -> None:
    rows, positions = history(1, 6)
    lists: list[dict[str, Any]] = [{"column_list": ("id", "large")}, {"except_column_list": ("plain", "huge")}]
    for number, said in enumerate(lists):
        for keeping, settings in SETTINGS.items():
            lake = Lake(f"{tmp_path}/{number}{keeping}", settings.model_copy(update=said))
            lake.apply(rows, 0, positions[-1])
            assert {"id", "large"} == {name for name in lake.rows()[0] if not name.startswith("_")}
    with pytest.raises(SchemaNotApplicable, match="column 'id' is part of the key of table"):
        Lake(f"{tmp_path}/key", TableSettings(except_column_list=("id",))).apply(rows, 0, positions[-1])


def test_a_column_that_was_left_out_does_not_come_back_by_another_list_or_another_name(tmp_path: Path) -> None:
    rows, positions = history(1, 6)
    renamed = replace(
        TABLE, columns=tuple(replace(c, name="secret" if c.name == "plain" else c.name) for c in TABLE.columns)
    )
    told = log_row(RELATION, (positions[-1] + 1, 0), "s", payload=renamed.to_json())
    for keeping, settings in SETTINGS.items():
        place, without = f"{tmp_path}/{keeping}", settings.model_copy(update={"except_column_list": ("plain",)})
        first = Lake(place, without)
        first.publish(first.apply(rows, 0, positions[2]), positions[2])
        with pytest.raises(SchemaNotApplicable, match="column 'plain' was excluded"):
            Lake(place, settings).apply(rows, positions[2], positions[-1])
        with pytest.raises(SchemaNotApplicable, match="column 'secret' was excluded"):
            Lake(place, without).apply([*rows, told], positions[2], positions[-1] + 1)


def test_a_name_in_a_rule_that_no_column_has_is_refused_before_anything_is_made(tmp_path: Path) -> None:
    rows, positions = history(1, 2)
    for said in ("column_list", "except_column_list", "track_history_column_list", "track_history_except_column_list"):
        rule = SinkRule.model_validate(
            {"match": "t.*", "stored_as_scd_type": 2, said: ["nowhere"] if said != "column_list" else ["id", "nowhere"]}
        )
        lake = Lake(str(tmp_path), TableSettings(), rules=(rule,))
        with pytest.raises(SchemaNotApplicable, match=f"{said}: table .* has no column 'nowhere'"):
            lake.apply(rows, 0, positions[0])
        assert not Path(lake.uri).exists()


def test_a_table_without_a_key_keeps_every_change_and_is_refused_where_rows_have_to_be_told_apart(
    tmp_path: Path,
) -> None:
    keyless = replace(TABLE, columns=tuple(replace(held, key=None) for held in TABLE.columns))
    rows = [
        log_row(RELATION, (5, 0), "c", after={1: "1", 2: "a"}),
        log_row(RELATION, (5, 1), "c", after={1: "1", 2: "a"}),
        log_row(RELATION, (6, 0), "u", before={1: "1", 2: "a"}, after={1: "1", 2: "b"}),
        log_row(RELATION, (7, 0), "d", before={1: "1", 2: "a"}),
    ]
    lake = Lake(f"{tmp_path}/append", SETTINGS[HistoryMode.CHANGES])
    for after, upto in [(0, 5), (5, 7), (0, 7)]:
        lake.apply(rows, after, upto, keyless)
    assert sorted((r["_position"], r["_ordinal"], r["_op"], r["plain"]) for r in lake.rows()) == [
        (5, 0, "c", "a"),
        (5, 1, "c", "a"),
        (6, 0, "u", "b"),
        (7, 0, "d", "a"),
    ]
    for keeping in (HistoryMode.VERSIONS, HistoryMode.MARKED):
        with pytest.raises(SchemaNotApplicable, match=f"has no key, which '{keeping.value}' needs"):
            Lake(f"{tmp_path}/{keeping}", SETTINGS[keeping]).apply(rows, 0, 7, keyless)


def test_an_added_column_is_filled_in_old_versions_and_begins_none(tmp_path: Path) -> None:
    first = [log_row(RELATION, (5, 0), "c", key=["1"], after={1: "1", 2: "a"})]
    wider = replace(TABLE, columns=(*TABLE.columns, column(5, "grade", missing="new")))
    later = [
        log_row(RELATION, (6, 0), "s", payload=wider.to_json()),
        log_row(RELATION, (6, 1), "u", key=["1"], after={1: "1", 2: "a", 5: "new"}),
        log_row(RELATION, (7, 0), "u", key=["1"], after={1: "1", 2: "a", 5: "better"}),
    ]
    lake = Lake(str(tmp_path), SETTINGS[HistoryMode.VERSIONS])
    lake.publish(lake.apply(first, 0, 5), 5)
    lake.publish(lake.apply(later, 5, 6), 6)
    lake.publish(lake.apply(later, 6, 7, wider), 7)
    found = sorted((row["grade"], row["__START_AT"], row["__END_AT"]) for row in lake.rows())
    assert found == [("better", 7, None), ("new", 5, 7)]


@pytest.mark.parametrize("told", [True, False])
@pytest.mark.parametrize("keeping", SETTINGS)
def test_after_a_crash_a_default_goes_to_the_rows_that_are_older_than_its_column_and_to_no_other(
    tmp_path: Path, keeping: HistoryMode, told: bool
) -> None:
    wider = replace(TABLE, columns=(*TABLE.columns, column(5, "grade", missing="new")))
    rows = [
        log_row(RELATION, (5, 0), "c", key=["1"], after={1: "1"}),
        log_row(RELATION, (6, 0), "s", payload=wider.to_json()),
        log_row(RELATION, (6, 1), "c", key=["2"], after={1: "2", 5: "own"}),
        log_row(RELATION, (6, 2), "c", key=["3"], after={1: "3", 5: None}),
    ]
    lake, began = Lake(str(tmp_path), SETTINGS[keeping]), 5 if told else 0
    record = lake.apply(rows, 0, 5)
    if told:
        lake.publish(record, 5)
    for upto in (6, 7):  # neither was told of, and the next driver begins where the last one did
        lake.start()
        lake.apply(rows, began, upto, wider)

    assert sorted((row["id"], row["grade"]) for row in lake.rows()) == [(1, "new"), (2, "own"), (3, None)]


def test_changes_that_the_log_has_only_as_what_they_come_to_begin_a_history_and_never_go_on_with_one(
    tmp_path: Path,
) -> None:
    rows = [log_row(RELATION, (position, 0), "r", key=["1"], after={1: "1", 2: str(position)}) for position in (4, 8)]
    for keeping, settings in SETTINGS.items():
        lake = Lake(f"{tmp_path}/{keeping}", settings)
        lake.sink.apply(batch(rows, 0, 4, since=4))
        with pytest.raises(HistoryTrimmed, match=r"after 0/4, but the log contains single changes only after 0/9"):
            lake.sink.apply(batch(rows, 4, 9, since=9))
        gone = [log_row(RELATION, (8, 0), "d", key=["1"], before={1: "1"})]
        for said in (gone, [log_row(RELATION, (8, 0), "t")]):
            with pytest.raises(HistoryTrimmed):
                lake.sink.apply(batch(said, 4, 9, since=9))
        lake.sink.apply(batch(rows, 0, 5, since=5))  # nothing came after 4
        lake.sink.apply(batch(rows, 5, 9))
        assert len(lake.rows()) == (1 if keeping is HistoryMode.MARKED else 2)


@pytest.mark.parametrize("wide", [True, False], ids=["a longer key", "another column"])
@pytest.mark.parametrize("keeping", SETTINGS)
def test_a_table_goes_on_once_it_was_copied_under_another_key(
    tmp_path: Path, keeping: HistoryMode, *, wide: bool
) -> None:
    first, second, *others = TABLE.columns
    columns = (first if wide else replace(first, key=None), replace(second, key=int(wide)), *others)
    images = {str(n): {1: str(n), 2: f"p{n}", 3: "l", 4: "h"} for n in range(3)}
    rows = [log_row(RELATION, (5, int(n)), "c", key=[n], after=image) for n, image in images.items()]
    rows += [log_row(RELATION, (8, 0), "u", key=["1"], after=images["1"] | {3: "lost"})]
    rows += [
        log_row(RELATION, (12, int(n)), "r", key=[n, f"p{n}"] if wide else [f"p{n}"], after=image | {3: "new"})
        for n, image in images.items()
    ]
    rows += [log_row(RELATION, (14, 0), "g", payload=b"10")]
    lake = Lake(str(tmp_path), SETTINGS[keeping])
    lake.publish(lake.apply(rows, 0, 6), 6)
    lake.apply(rows, 6, 15, replace(TABLE, columns=columns))

    said = [(row["id"], row["plain"], row["large"]) for row in lake.rows() if row["large"] is not None]
    copied = [(n, f"p{n}", "new") for n in range(3)]
    kept_before = [] if keeping is HistoryMode.MARKED else [(n, f"p{n}", "l") for n in range(3)]
    assert sorted(said) == sorted([*copied, *kept_before])
