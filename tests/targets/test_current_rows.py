"""Current rows: what each history mode of a Delta target counts as a row of its source."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from deltalake import DeltaTable, QueryBuilder, write_deltalake

from cdc.errors import SinkUnavailable
from cdc.targets.current_rows import MODE, CurrentRows, quote_identifier, quote_literal


def target_with(folder: Path, mode: str | None, rows: pa.Table) -> str:
    """A Delta table with these rows, whose property names the history mode."""
    uri = str(folder / "target")
    properties = {} if mode is None else {MODE: mode}
    DeltaTable.create(uri, rows.schema, configuration=properties, raise_if_key_not_exists=False)
    write_deltalake(uri, rows, mode="append")
    return uri


def current(uri: str, where: str | None = None) -> list[Any]:
    """The ids of the current rows."""
    return sorted(CurrentRows(uri, None, 1).read(["id"], ["id"], where).read_all()["id"].to_pylist())


def test_a_target_without_a_mode_has_only_current_rows(tmp_path: Path) -> None:
    uri = target_with(tmp_path, None, pa.table({"id": [1, 2, 3]}))

    assert CurrentRows(uri, None, 1).mode == "scd1"
    assert current(uri) == [1, 2, 3]
    assert current(uri, '"id" > 1') == [2, 3]


def test_of_a_shared_target_only_the_rows_of_one_table_are_read(tmp_path: Path) -> None:
    uri = target_with(tmp_path, None, pa.table({"id": [1, 2], "_relation": pa.array([1, 2], pa.int64())}))

    assert current(uri) == [1]


def test_of_versions_only_the_open_ones_are_current(tmp_path: Path) -> None:
    rows = pa.table({"id": [1, 1, 2], "__END_AT": pa.array([20, None, 30], pa.int64())})

    assert current(target_with(tmp_path, "scd2", rows)) == [1]


def test_a_row_marked_as_deleted_is_not_current(tmp_path: Path) -> None:
    rows = pa.table({"id": [1, 2], "_deleted": [True, False]})

    assert current(target_with(tmp_path, "soft_delete", rows)) == [2]


def changes(*rows: tuple[int | None, str, int, int | None]) -> pa.Table:
    """Rows of a target that keeps every change: (id, op, position, generation)."""
    ids, ops, positions, generations = zip(*rows, strict=True)
    return pa.table(
        {
            "id": pa.array(ids, pa.int64()),
            "_op": pa.array(ops, pa.string()),
            "_position": pa.array(positions, pa.int64()),
            "_ordinal": pa.array([0] * len(rows), pa.int64()),
            "_generation": pa.array(generations, pa.int64()),
        }
    )


@pytest.mark.parametrize(
    ("ending", "expected"),
    [([], [1, 4]), ([(None, "t", 14, None)], [4]), ([(None, "g", 30, 11)], [4]), ([(None, "t", 30, None)], [])],
    ids=["no ending", "truncate", "end of a copy", "truncate at the end"],
)
def test_of_every_change_the_last_one_of_each_key_decides(
    tmp_path: Path, ending: list[Any], expected: list[int]
) -> None:
    rows = changes((1, "c", 10, None), (2, "c", 11, None), (2, "d", 12, None), (4, "c", 13, None), (4, "u", 20, None))
    uri = target_with(tmp_path, "append", pa.concat_tables([rows, changes(*ending)]) if ending else rows)

    assert current(uri) == expected


def test_a_mode_of_a_newer_version_is_not_known(tmp_path: Path) -> None:
    uri = target_with(tmp_path, "scd6", pa.table({"id": [1]}))

    assert not CurrentRows(uri, None, 1).known


def test_a_missing_target_or_version_is_an_error(tmp_path: Path) -> None:
    uri = target_with(tmp_path, None, pa.table({"id": [1]}))
    for missing, version in ((f"{uri}/other", None), (uri, 9)):
        with pytest.raises(SinkUnavailable, match="no readable table at"):
            CurrentRows(missing, version, 1)


def test_a_lost_file_is_an_error_of_the_target(tmp_path: Path) -> None:
    uri = target_with(tmp_path, None, pa.table({"id": [1]}))
    for file in Path(uri).glob("*.parquet"):
        file.unlink()

    with pytest.raises(SinkUnavailable, match="cannot be read"):
        current(uri)


def test_quoted_names_and_texts_come_back_from_the_engine() -> None:
    name, text = 'a "b" c', "it's"
    found = pa.table(QueryBuilder().execute(f"select {quote_literal(text)} as {quote_identifier(name)}"))

    assert found.to_pydict() == {name: [text]}
