"""Staged index: a rebuilt search index takes the place of the old one in one step."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from cdc.config import SearchSettings
from cdc.errors import SinkUnavailable
from cdc.table import TableSchema
from cdc.targets.search_index_reader import SearchIndex
from pipelines.sinks.contract import Published
from pipelines.sinks.search.document_shape import DocumentShapes
from pipelines.sinks.search.sink import SearchSink
from pipelines.sinks.search.staged_index import MANAGED, META, StagedSearch, put_index, remove_unused_files
from tests.pipelines.sinks.search.test_sink import BLUE, LOG, PRODUCTS, RED, batch, names, publish, upsert


def filled_index(path: Path, *images: Mapping[int, str | None]) -> Path:
    """An index with these rows, published at 10, without an open writer."""
    sink = SearchSink("find", path)
    sink.open(LOG)
    publish(sink, batch(0, 10, *(upsert(image, 5) for image in images)))
    sink.close()
    return path


@pytest.fixture(name="old")
def _old(tmp_path: Path) -> Path:
    return filled_index(tmp_path / "index", BLUE)


@pytest.fixture(name="staged")
def _staged(old: Path) -> Iterator[StagedSearch]:
    staged = StagedSearch("find", old)
    yield staged
    staged.discard()


def test_a_reader_sees_the_old_index_or_the_new_one(old: Path, tmp_path: Path) -> None:
    before = SearchIndex.open(old)
    put_index(filled_index(tmp_path / "new", RED), old)

    assert names(old) == {"2": "red mug"}
    assert [row.source["name"] for row in before.documents("shop.products")] == ["blue mug"]


def test_the_next_commit_removes_the_files_of_the_old_index(old: Path, tmp_path: Path) -> None:
    former = {path.name for path in old.iterdir()} - {META, MANAGED}
    put_index(filled_index(tmp_path / "new", RED), old)
    sink = SearchSink("find", old)
    sink.open(LOG)
    publish(sink, batch(10, 20, upsert(BLUE, 15)))
    sink.close()

    assert names(old) == {"1": "blue mug", "2": "red mug"}
    assert not {name for name in former if (old / name).exists() and not name.endswith(".lock")}


def test_a_driver_that_opens_an_index_removes_the_files_that_a_killed_process_left(old: Path, tmp_path: Path) -> None:
    former = {path.name for path in old.iterdir()} - {META, MANAGED}
    put_index(filled_index(tmp_path / "new", RED), old)
    sink = SearchSink("find", old)
    sink.open(LOG)
    sink.close()
    assert not {name for name in former if (old / name).exists() and not name.endswith(".lock")}


def test_a_replay_publishes_its_rows_under_the_path_of_the_sink(old: Path, staged: StagedSearch) -> None:
    staged.sink.open(LOG)
    record = publish(staged.sink, batch(0, 10, upsert(RED, 5)))
    staged.sink.close()
    assert staged.open_published(LOG) == SearchIndex.open(old).published
    published = staged.put(Published(10, 0, record.tables), {})

    assert published == SearchIndex.open(old).published
    assert {table.target for table in published.tables.values()} == {str(old)}
    assert names(old) == {"2": "red mug"}
    assert not old.with_name("index.replay").exists()
    assert staged.erased == {}


def test_a_replay_leaves_no_file_of_the_old_index(old: Path) -> None:
    former = {path.name for path in old.iterdir()} - {META, MANAGED}
    staged = StagedSearch("find", old)
    staged.open_published(LOG)
    staged.sink.open(LOG)
    staged.put(publish(staged.sink, batch(0, 10, upsert(RED, 5))), {})

    assert not {name for name in former if (old / name).exists() and not name.endswith(".lock")}
    assert names(old) == {"2": "red mug"}


def test_a_replay_under_other_rules_removes_the_kept_cuts_of_the_old_index(old: Path) -> None:
    sink = SearchSink("find", old)
    opened = sink.open(LOG)
    assert opened is not None
    cut = Path(sink.pin(opened))
    sink.close()
    for shapes, kept in ((DocumentShapes(), True), (DocumentShapes(SearchSettings(fields=("name",))), False)):
        staged = StagedSearch("find", old, shapes)
        staged.open_published(LOG)
        staged.sink.open(LOG)
        staged.put(publish(staged.sink, batch(0, 10, upsert(RED, 5))), {})
        assert cut.exists() is kept
    (row,) = SearchIndex.open(old).documents("shop.products")
    assert row.source == {"id": "2", "name": "red mug"}


def test_the_files_of_an_index_that_a_driver_has_open_are_left_to_it(old: Path) -> None:
    sink = SearchSink("find", old)
    sink.open(LOG)
    remove_unused_files(old)
    sink.close()
    assert names(old) == {"1": "blue mug"}


def test_while_a_replay_runs_no_driver_opens_the_index(old: Path, staged: StagedSearch) -> None:
    staged.open_published(LOG)
    with pytest.raises(SinkUnavailable, match="another process"):
        SearchSink("find", old).open(LOG)


def test_an_index_of_an_earlier_replay_is_removed(old: Path, staged: StagedSearch) -> None:
    left = filled_index(old.with_name("index.replay"), RED)
    tables: dict[int, TableSchema] = {PRODUCTS.relation: PRODUCTS}
    staged.forget_earlier(tables)

    assert not left.exists()
    assert names(old) == {"1": "blue mug"}
