"""History: columns that are added or left out in a target with history, and a copy under another key."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cdc.config.delta_sink import HistoryMode
from cdc.errors import SchemaNotApplicable
from tests.contracts.folded import column
from tests.contracts.histories import RELATION, SETTINGS, TABLE, Lake
from tests.contracts.stories import history
from tests.pipelines.fold_model import log_row


def in_one_mode() -> list[Any]:
    """Every mode with True, and with False one of them; the other ones are slow."""
    others = [mode for mode in SETTINGS if mode is not HistoryMode.VERSIONS]
    return [
        *((mode, True) for mode in SETTINGS),
        (HistoryMode.VERSIONS, False),
        *(pytest.param(mode, False, marks=pytest.mark.slow) for mode in others),
    ]


def test_a_column_that_was_left_out_does_not_come_back_by_another_list_or_another_name(tmp_path: Path) -> None:
    rows, positions = history(1, 6)
    renamed = replace(
        TABLE, columns=tuple(replace(c, name="secret" if c.name == "plain" else c.name) for c in TABLE.columns)
    )
    schema = log_row(RELATION, (positions[-1] + 1, 0), "s", payload=renamed.to_json())
    for keeping, settings in SETTINGS.items():
        place, without = f"{tmp_path}/{keeping}", settings.model_copy(update={"except_column_list": ("plain",)})
        first = Lake(place, without)
        first.publish(first.apply(rows, 0, positions[2]), positions[2])
        with pytest.raises(SchemaNotApplicable, match="column 'plain' was excluded"):
            Lake(place, settings).apply(rows, positions[2], positions[-1])
        with pytest.raises(SchemaNotApplicable, match="column 'secret' was excluded"):
            Lake(place, without).apply([*rows, schema], positions[2], positions[-1] + 1)


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


# whether the driver knows the columns of before, or finds them in the target, does not depend on the mode
@pytest.mark.parametrize(("keeping", "is_published"), in_one_mode())
def test_after_a_crash_a_default_goes_to_the_rows_that_are_older_than_its_column_and_to_no_other(
    tmp_path: Path, keeping: HistoryMode, is_published: bool
) -> None:
    wider = replace(TABLE, columns=(*TABLE.columns, column(5, "grade", missing="new")))
    rows = [
        log_row(RELATION, (5, 0), "c", key=["1"], after={1: "1"}),
        log_row(RELATION, (6, 0), "s", payload=wider.to_json()),
        log_row(RELATION, (6, 1), "c", key=["2"], after={1: "2", 5: "own"}),
        log_row(RELATION, (6, 2), "c", key=["3"], after={1: "3", 5: None}),
    ]
    lake, began = Lake(str(tmp_path), SETTINGS[keeping]), 5 if is_published else 0
    record = lake.apply(rows, 0, 5)
    if is_published:
        lake.publish(record, 5)
    for upto in (6, 7):  # neither is published, and the next driver begins where the last one did
        lake.start()
        lake.apply(rows, began, upto, wider)

    assert sorted((row["id"], row["grade"]) for row in lake.rows()) == [(1, "new"), (2, "own"), (3, None)]


# nor does what is left out of a batch with changes by the earlier key: a longer key, or another column
@pytest.mark.parametrize(("keeping", "wide"), in_one_mode())
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
