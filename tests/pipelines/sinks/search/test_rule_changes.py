"""Rules that change over an index that is filled: what they hide is in none of its files; what cannot be restored."""

from __future__ import annotations

import json
import signal
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import pytest
import tantivy

from cdc.config import DeadLetterSettings, SearchRule, SearchSettings
from cdc.errors import TargetRulesChanged
from cdc.failpoint import VARIABLE
from cdc.targets.published_record import Published, TargetState
from cdc.targets.search_index_reader import RULES_ID, SearchIndex
from pipelines.dead_letters.quarantine import Quarantine
from pipelines.sinks.contract import TableBatch
from pipelines.sinks.search.document_shape import DocumentShapes
from pipelines.sinks.search.sink import WRITER_BYTES, SearchSink
from pipelines.sinks.search.staged_index import MANAGED, META
from tests.contracts.folded import ORDERS, batch, column, part, put
from tests.fixtures import forked

LOG: Final = "log-1"
CANARY: Final = "canary7f3a9c"
OTHERS: Final = replace(ORDERS, relation=16999, oid=16999, name="others")
PARKING: Final = DeadLetterSettings()

HIDING: Final[dict[str, dict[str, Any]]] = {
    "masked": {"transform": {"mask": {"item": "redact"}}},
    "masked but for its end": {"transform": {"mask": {"item": "keep_last:2"}}},
    "dropped": {"transform": {"drop": ["item"]}},
    "excluded": {"except_column_list": ["item"]},
    "not listed": {"column_list": ["id", "price"]},
    "no field": {"fields": ["price"]},
}


def shapes(rule: dict[str, Any] | None = None, **sink: Any) -> DocumentShapes:
    rules = () if rule is None else (SearchRule.model_validate({"match": "shop.orders", **rule}),)
    return DocumentShapes(SearchSettings(**sink), rules)


def files_with(folder: Path, text: str) -> list[str]:
    """The files at or below the folders that begin with this path which contain the text, whatever its case."""
    places = [file for top in folder.parent.glob(f"{folder.name}*") for file in (top, *top.rglob("*"))]
    files = [file for file in places if file.is_file()]
    assert files
    return [str(file.relative_to(folder.parent)) for file in files if text.encode() in file.read_bytes().lower()]


def files_of_no_segment(path: Path) -> list[str]:
    """The files that no live segment of the index has; compressed words in them would not be found as text."""
    segments = json.loads((path / META).read_bytes())["segments"]
    live = {segment["segment_id"].replace("-", "") for segment in segments}
    files = {file.name for file in path.iterdir()} - {META, MANAGED}
    return sorted(name for name in files if name.partition(".")[0] not in live and not name.endswith(".lock"))


class Driver:
    """A driver of the index: applies batches as the loop does, with parking."""

    def __init__(self, path: Path, rule: dict[str, Any] | None = None, **sink: Any) -> None:
        self.path, self.sink = path, SearchSink("find", path, shapes(rule, **sink), PARKING)
        self._quarantine = Quarantine(self.sink)
        self.published = self.sink.open(LOG) or Published(0, 0, {})

    def apply(self, *batches: TableBatch) -> Published:
        """Apply and publish the batches, all up to the same position."""
        tables = dict(self.published.tables)
        for one in batches:
            tables[one.schema.relation] = self._quarantine.apply(tables.get(one.schema.relation), one)
        self.published = Published(batches[0].upto, 0, tables)
        self.sink.publish(self.published)
        return self.published

    def close(self) -> None:
        self.sink.close()


def fill(path: Path, rule: dict[str, Any] | None = None, **sink: Any) -> None:
    """Fill an index: two tables, a parked row and a kept cut."""
    driver = Driver(path, rule, **sink)
    others = [put(n, f"other{n}", 10) for n in range(5)]
    rows = [put(1, f"{CANARY} first", 10), put(2, None, 10), put(3, f"{CANARY} third", 10)]
    driver.apply(batch(rows, 0, 20), batch(others, 0, 20, OTHERS))
    driver.sink.pin(driver.published)
    driver.apply(batch([part(9, 30, {2: f"{CANARY} parked"})], 20, 40), batch(None, 20, 40, OTHERS))
    driver.close()


def documents(path: Path, topic: str = "shop.orders") -> dict[str, dict[str, str | None]]:
    return {str(row.key[0]): dict(row.source) for row in SearchIndex.open(path).documents(topic)}


@pytest.fixture(name="path")
def _path(tmp_path: Path) -> Path:
    return tmp_path / "index"


def test_without_a_rule_the_canary_is_in_the_files(path: Path) -> None:
    fill(path)
    found = files_with(path, CANARY)
    assert {Path(name).parts[0] for name in found} == {"index", "index.cuts"}
    assert ".store" in {Path(name).suffix for name in found}


@pytest.mark.parametrize("rule", HIDING.values(), ids=HIDING)
def test_a_rule_that_comes_later_hides_the_values_in_every_file(path: Path, rule: dict[str, Any]) -> None:
    fill(path)
    before = documents(path, "shop.others")
    Driver(path, rule).close()

    assert files_with(path, CANARY) == []
    assert files_of_no_segment(path) == []
    expected = {None} if "transform" not in rule or "drop" in rule["transform"] else {None, "***", f"{'*' * 16}st"}
    assert {row.get("item") for row in documents(path).values()} <= expected | {f"{'*' * 16}rd"}
    assert {row["price"] for row in documents(path).values()} == {"1.00"}
    assert (documents(path, "shop.others"), len(documents(path))) == (before, 3)
    assert [row.source["item"] for row in SearchIndex.open(path).search("shop.others", "other3")] == ["other3"]
    assert SearchIndex.open(path).search("shop.orders", CANARY) == []
    assert [row.key for row in SearchIndex.open(path).parked()] == [("9",)]


@pytest.mark.parametrize("rule", HIDING.values(), ids=HIDING)
def test_a_rule_from_the_start_keeps_the_values_out_of_every_file(path: Path, rule: dict[str, Any]) -> None:
    fill(path, rule)
    driver = Driver(path, rule)
    driver.apply(batch([part(1, 50, {2: f"{CANARY} again"}), put(4, CANARY, 51)], 40, 60))
    driver.apply(batch([part(1, 70, {3: "2.00"}), put(9, f"{CANARY} 9", 71)], 60, 80))
    driver.close()

    assert files_with(path, CANARY) == []
    assert sorted(documents(path)) == ["1", "2", "3", "4", "9"]


def test_values_follow_a_mask_as_if_it_had_been_there_from_the_start(path: Path, tmp_path: Path) -> None:
    rule = HIDING["masked but for its end"]
    fill(path)
    fill(tmp_path / "ruled", rule)
    Driver(path, rule).close()

    assert documents(path) == documents(tmp_path / "ruled")
    parked = SearchIndex.open(path).parked(), SearchIndex.open(tmp_path / "ruled").parked()
    assert [[row.image for row in rows] for rows in parked] == [[{1: "9", 2: f"\0{'*' * 17}ed"}]] * 2


def test_a_row_that_was_parked_masked_is_not_masked_twice_when_it_is_retried(path: Path) -> None:
    rule = HIDING["masked but for its end"]
    fill(path, rule)
    driver = Driver(path, rule)
    copied = replace(put(9, None, 50), after={1: "9", 2: f"{CANARY} parked", 3: "1.00"})
    driver.apply(batch([copied], 40, 60))
    driver.close()
    assert documents(path)["9"]["item"] == f"{'*' * 17}ed"

    path = path.with_name("second")
    fill(path)
    masked = Driver(path, rule)
    masked.apply(batch([part(9, 50, {3: "3.00"})], 40, 60))
    masked.apply(batch([replace(put(9, None, 70), after={1: "9", 2: CANARY, 3: "3.00"})], 60, 80))
    masked.close()
    assert documents(path)["9"] == {"id": "9", "item": f"{'*' * 10}9c", "price": "3.00"}


def test_an_index_of_an_earlier_version_without_rules_is_read_and_follows(path: Path) -> None:
    fill(path)
    writer = tantivy.Index.open(str(path)).writer(heap_size=WRITER_BYTES, num_threads=1)
    writer.delete_documents_by_term("_id", RULES_ID)
    writer.commit()
    del writer
    assert documents(path)["1"]["item"] == f"{CANARY} first"
    Driver(path).close()
    assert documents(path)["1"]["item"] == f"{CANARY} first"
    Driver(path, HIDING["masked"]).close()
    assert files_with(path, CANARY) == []
    assert documents(path)["1"]["item"] == "***"


def test_rules_that_did_not_change_rewrite_nothing(path: Path) -> None:
    fill(path, HIDING["masked"])
    before = {file.name for file in path.iterdir()}
    Driver(path, HIDING["masked"]).close()
    assert {file.name for file in path.iterdir()} == before
    assert list(path.with_name("index.cuts").iterdir())


def test_a_new_name_is_given_to_documents_that_exist(path: Path) -> None:
    fill(path)
    Driver(path, {"transform": {"rename": {"item": "what"}}}).close()
    assert documents(path)["1"] == {"id": "1", "what": f"{CANARY} first", "price": "1.00"}
    assert len(SearchIndex.open(path).search("shop.orders", f"what:{CANARY}")) == 2
    assert SearchIndex.open(path).search("shop.orders", f"item:{CANARY}") == []


LOOSER: Final = [
    (HIDING["masked"], None),
    (HIDING["dropped"], None),
    (HIDING["excluded"], None),
    (HIDING["no field"], None),
    (HIDING["masked"], HIDING["masked but for its end"]),
    ({"transform": {"mask": {"item": "redact"}}}, {"transform": {"mask": {"price": "redact"}}}),
]


@pytest.mark.parametrize(("before", "after"), LOOSER)
def test_values_that_were_hidden_stop_their_table_until_the_rule_returns(
    path: Path, before: dict[str, Any], after: dict[str, Any] | None
) -> None:
    fill(path, before)
    shown = documents(path)
    driver = Driver(path, after)
    record = driver.published.tables[ORDERS.relation]
    assert (record.state, driver.published.tables[OTHERS.relation].state) == ("failed", "streaming")
    assert (record.reason or "").startswith("CDC-3019 ")
    assert "cdc replay find" in (record.reason or "")
    with pytest.raises(TargetRulesChanged, match="were written under other rules"):
        driver.sink.apply(batch([put(5, "new", 50)], 40, 60))
    driver.close()
    assert SearchIndex.open(path).published == driver.published

    if after is not None and "price" in after["transform"]["mask"]:
        return  # the price was masked meanwhile, so the first rule cannot return
    returned = Driver(path, before)
    assert returned.published.tables[ORDERS.relation].state == TargetState.STREAMING
    assert documents(path) == shown
    returned.apply(batch([put(5, "new", 50)], 40, 60))
    returned.close()
    assert len(documents(path)) == 4


def test_what_is_hidden_is_hidden_although_something_else_cannot_be_restored(path: Path) -> None:
    fill(path, {"transform": {"mask": {"price": "redact"}}})
    Driver(path, {"transform": {"mask": {"item": "redact"}}}).close()
    assert files_with(path, CANARY) == []
    assert documents(path)["1"] == {"id": "1", "item": "***", "price": "***"}
    files = {file.name for file in path.iterdir()}
    Driver(path, {"transform": {"mask": {"item": "redact"}}}).close()
    assert {file.name for file in path.iterdir()} == files


def test_a_table_that_was_being_copied_continues_as_such(path: Path) -> None:
    driver = Driver(path, HIDING["masked"])
    copying = driver.sink.apply(batch([put(1, "a", 10)], 0, 20))
    waiting = replace(copying, state=TargetState.SNAPSHOTTING.value)
    driver.sink.publish(Published(20, 0, {ORDERS.relation: waiting}))
    driver.close()
    states = []
    for rule in (None, HIDING["masked"]):
        again = Driver(path, rule)
        states.append(again.published.tables[ORDERS.relation].state)
        again.close()
    assert states == ["failed", "snapshotting"]


def test_a_column_that_a_rename_at_the_source_hides_stops_the_table(path: Path) -> None:
    fill(path, except_column_list=("secret",))
    driver = Driver(path, except_column_list=("secret",))
    renamed = replace(ORDERS, columns=(ORDERS.columns[0], replace(ORDERS.columns[1], name="secret"), ORDERS.columns[2]))
    with pytest.raises(TargetRulesChanged, match="'item'"):
        driver.sink.apply(batch([put(5, "new", 50)], 40, 60, renamed))
    driver.close()


def test_columns_that_the_source_adds_or_drops_are_followed(path: Path) -> None:
    fill(path, HIDING["masked"])
    driver = Driver(path, HIDING["masked"])
    wider = replace(ORDERS, columns=(*ORDERS.columns[:2], column(4, "note", missing="none")))
    row = replace(put(5, "new", 50), after={1: "5", 2: "new", 4: "x"})
    driver.apply(batch([row], 40, 60, wider))
    driver.close()
    found = documents(path)
    assert (found["1"], found["5"]) == (
        {"id": "1", "item": "***", "note": "none"},
        {"id": "5", "item": "***", "note": "x"},
    )


def test_values_of_a_column_that_the_source_dropped_go_with_the_next_change_of_rules(path: Path) -> None:
    fill(path)
    driver = Driver(path)
    narrow = replace(ORDERS, columns=(ORDERS.columns[0], ORDERS.columns[2]))
    driver.apply(batch(None, 40, 60, narrow))
    driver.close()
    assert files_with(path, CANARY)
    Driver(path, {"fields": ["price"]}).close()
    assert files_with(path, CANARY) == []


def double(rows: Any) -> Any:
    return rows.append_column("twice", rows["price"])


def test_documents_cannot_follow_a_change_of_a_python_function(path: Path) -> None:
    rule = {"transform": {"python": f"{__name__}:double"}}
    driver = Driver(path, rule)
    driver.apply(batch([put(1, "a", 10)], 0, 20))
    driver.close()
    assert documents(path)["1"] == {"id": "1", "item": "a", "price": "1.00", "twice": "1.00"}
    same = Driver(path, rule)
    assert same.published.tables[ORDERS.relation].state == "streaming"
    same.close()
    for changed in (None, {"transform": {**rule["transform"], "mask": {"item": "redact"}}}):
        driver = Driver(path, changed)
        assert driver.published.tables[ORDERS.relation].state == "failed"
        driver.close()


def follow(path: str) -> None:
    """Open the index under a rule that masks, as a driver does."""
    Driver(Path(path), HIDING["masked"])


@pytest.mark.parametrize("failpoint", ["search_before_commit", "search_after_commit"])
def test_a_driver_killed_while_the_index_follows_leaves_one_of_the_two_states(path: Path, failpoint: str) -> None:
    fill(path)
    died = forked.run(__name__, path, environment={VARIABLE: failpoint})
    assert died.status == -signal.SIGKILL, died.errors
    shown = {row["item"] for row in documents(path).values()}
    assert shown == ({f"{CANARY} first", f"{CANARY} third", None} if "before" in failpoint else {"***", None})
    Driver(path, HIDING["masked"]).close()
    assert files_with(path, CANARY) == []
    assert {row["item"] for row in documents(path).values()} == {"***", None}


if __name__ == "__main__":
    follow(sys.argv[1])
