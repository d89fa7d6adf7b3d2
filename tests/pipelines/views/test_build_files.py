"""The files of a build: one for each part of a task's rows, whose names are all that the driver gets."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pipelines.runtime.executor_code import TaskError
from pipelines.views.build_files import FILE_BYTES, write_rows
from pipelines.views.view_columns import view_schema

SCHEMA = view_schema(1, "shop.v", ["id"], pa.schema([("id", pa.int64()), ("text", pa.string())]))


def batches(texts: list[str]) -> Iterator[pa.RecordBatch]:
    for number, text in enumerate(texts):
        yield pa.RecordBatch.from_pydict({"id": [number], "text": [text]})


def test_a_file_has_some_batches(tmp_path: Path) -> None:
    large = "x" * (FILE_BYTES // 2)
    written = [batch["name"][0].as_py() for batch in write_rows(batches([large, large, "y"]), SCHEMA, None, tmp_path)]
    files = [pq.read_table(tmp_path / name) for name in written]

    assert [file["key"].to_pylist() for file in files] == [[["0"], ["1"]], [["2"]]]
    assert files[1]["after"].to_pylist() == [[(1, "2"), (2, "y")]]
    assert len(list(tmp_path.iterdir())) == 2


def test_an_error_has_its_code_in_its_text(tmp_path: Path) -> None:
    with pytest.raises(TaskError, match=r"CDC-[0-9]+: column 'text' of view 'shop\.v'"):
        list(write_rows(batches(["\0"]), SCHEMA, None, tmp_path))
    assert not list(write_rows(batches([]), SCHEMA, None, tmp_path))
