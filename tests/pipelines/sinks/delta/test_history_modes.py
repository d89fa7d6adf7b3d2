"""History modes: the rows that each mode keeps of one table."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from cdc.config.delta_sink import HistoryMode
from cdc.errors import SchemaNotApplicable
from tests.contracts.histories import RELATION, SETTINGS, TABLE, Lake
from tests.pipelines.fold_model import log_row


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
        with pytest.raises(SchemaNotApplicable, match=f"has no key: '{keeping.value}' needs"):
            Lake(f"{tmp_path}/{keeping}", SETTINGS[keeping]).apply(rows, 0, 7, keyless)


@pytest.mark.parametrize("mode", [HistoryMode.VERSIONS, HistoryMode.MARKED])
def test_the_current_rows_of_a_batch_are_found_without_a_scan_of_the_target(mode: HistoryMode, tmp_path: Path) -> None:
    rows = [log_row(RELATION, (5, n), "c", key=[str(n)], after={1: str(n), 2: "a", 3: "large"}) for n in range(3)]
    rows += [
        log_row(RELATION, (6, 0), "u", key=["2"], after={1: "2", 2: "b"}, partial=True),
        log_row(RELATION, (6, 1), "u", key=["0"], after={1: "0", 2: "b"}, partial=True),
        log_row(RELATION, (7, 0), "u", key=["1"], after={1: "1", 2: "c"}, partial=True),
        log_row(RELATION, (8, 0), "u", key=["1"], after={1: "1", 2: "d"}, partial=True),
        log_row(RELATION, (9, 0), "d", key=["1"], before={1: "1"}),
    ]
    lake = Lake(str(tmp_path), SETTINGS[mode])
    lake.apply(rows, 4, 5)
    first = {*Path(lake.uri).glob("*.parquet")}
    lake.apply(rows, 5, 6)
    second = {*Path(lake.uri).glob("*.parquet")} - first
    lake.apply(rows, 6, 7)  # adds the files of the second batch to the index
    contents = {file: file.read_bytes() for file in second}
    for file in second:  # they have no row of key 1; a scan would read them
        file.write_bytes(b"unreadable")
    for upto in (8, 9):
        lake.apply(rows, upto - 1, upto)
    for file, content in contents.items():
        file.write_bytes(content)

    now = [row for row in lake.rows() if row.get("__END_AT") is None and not row.get("_deleted")]
    assert sorted((row["id"], row["plain"], row["large"]) for row in now) == [(0, "b", "large"), (2, "b", "large")]
