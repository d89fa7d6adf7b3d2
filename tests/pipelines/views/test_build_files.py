"""What a task does in a large computation: it divides rows by key, or writes the changes of a part to files."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pipelines.runtime.executor_code import TaskError
from pipelines.views.build_files import FILE_BYTES, divide_result, write_changes
from pipelines.views.view_columns import view_schema

SCHEMA = view_schema(1, "shop.v", ["id"], pa.schema([("id", pa.int64()), ("text", pa.string())]))


def batches(texts: list[str]) -> Iterator[pa.RecordBatch]:
    for number, text in enumerate(texts):
        yield pa.RecordBatch.from_pydict({"id": [number], "text": [text]})


def divided(texts: list[str], *, is_new: bool) -> Iterator[pa.RecordBatch]:
    return divide_result(batches(texts), SCHEMA, None, 1, is_new=is_new)


def test_a_part_with_many_changes_has_several_files(tmp_path: Path) -> None:
    texts = [letter * (FILE_BYTES // 2) for letter in "abcd"]
    pieces = [*divided(texts[:1], is_new=False), *divided(texts, is_new=True)]
    written = [batch["name"][0].as_py() for batch in write_changes(iter(pieces), SCHEMA, tmp_path, is_first=False)]
    files = [pq.read_table(tmp_path / name) for name in written]

    assert [file["key"].to_pylist() for file in files] == [[["1"], ["2"]], [["3"]]]
    assert [file["op"].to_pylist() for file in files] == [["c", "c"], ["c"]]
    assert len(list(tmp_path.iterdir())) == 2


def test_every_row_of_a_first_computation_is_a_read_row(tmp_path: Path) -> None:
    (written,) = write_changes(divided(["a", "b"], is_new=True), SCHEMA, tmp_path, is_first=True)

    assert pq.read_table(tmp_path / written["name"][0].as_py())["op"].to_pylist() == ["r", "r"]


def test_an_error_has_its_code_in_its_text(tmp_path: Path) -> None:
    with pytest.raises(TaskError, match=r"CDC-[0-9]+: column 'text' of view 'shop\.v'"):
        list(divided(["\0"], is_new=True))
    twice = [*divided(["a"], is_new=True), *divided(["b"], is_new=True)]
    with pytest.raises(TaskError, match=r"CDC-[0-9]+: view 'shop\.v' has more than one row with the key"):
        list(write_changes(iter(twice), SCHEMA, tmp_path, is_first=True))
    assert not list(tmp_path.iterdir())
    assert not list(divided([], is_new=True))
