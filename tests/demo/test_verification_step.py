"""Verification of the demo: a table is equal only if every sink is, and the log has exactly the live keys."""

from __future__ import annotations

import pyarrow as pa
import pytest

from cdc.demo.step_results import DemoReport, Step
from cdc.demo.verification_step import TableVerification, by_table, fold_live_keys
from cdc.log_row import LOG_SCHEMA
from tests.log.rows import message_row


def row(position: int, op: str, key: str | None, payload: bytes | None = None) -> dict[str, object]:
    fields: dict[str, object] = dict.fromkeys(LOG_SCHEMA.names)
    return fields | {
        "position": position, "ordinal": 0, "xid": 1, "committed_at": 0, "relation": 7, "topic": "shop.carts", "op": op,
        "key": None if key is None else [key], "partial": False, "payload": payload,
    }  # fmt: skip


def alive(*rows: dict[str, object]) -> set[str | None]:
    return {key[0] for key in fold_live_keys(pa.Table.from_pylist(list(rows), LOG_SCHEMA)).get(7, {})}


def test_one_unequal_sink_makes_the_table_unequal() -> None:
    verdicts = [
        {"sink": "lake", "topic": "shop.b", "rows": 3, "equal": True},
        {"sink": "find", "topic": "shop.b", "rows": 3, "equal": False},
        {"sink": "lake", "topic": "shop.a", "rows": 2, "equal": True},
    ]

    assert by_table(verdicts) == [
        TableVerification("shop.a", 2, equal=True),
        TableVerification("shop.b", 3, equal=False),
    ]


def test_a_deleted_key_is_not_alive() -> None:
    assert alive(row(1, "c", "a"), row(1, "c", "b"), row(2, "d", "a")) == {"b"}


def test_a_truncate_ends_every_older_key() -> None:
    assert alive(row(1, "c", "a"), row(2, "t", None), row(3, "c", "b")) == {"b"}


def test_a_generation_row_removes_keys_older_than_its_copy() -> None:
    assert alive(row(1, "c", "a"), row(5, "r", "b"), row(6, "g", None, b"5")) == {"b"}


def test_the_key_of_a_message_is_not_alive() -> None:
    rows = pa.Table.from_pylist([row(1, "c", "a"), message_row(2, prefix="b")], LOG_SCHEMA)
    assert fold_live_keys(rows) == {7: {("a",): 1}}


def test_rows_are_taken_in_the_order_of_the_log() -> None:
    assert alive(row(2, "d", "a"), row(1, "c", "a")) == set()


def test_an_outcome_without_tables_is_not_equal() -> None:
    assert not DemoReport().equal
    assert DemoReport(tables=[TableVerification("shop.a", 1, equal=True)]).equal


@pytest.mark.parametrize("part", ["tour", "closing"])
def test_a_step_that_failed_makes_the_outcome_unequal(part: str) -> None:
    outcome = DemoReport(tables=[TableVerification("shop.a", 1, equal=True)])
    getattr(outcome, part).append(Step("cut", 1, 0.1, equal=True))
    assert outcome.equal

    getattr(outcome, part).append(Step("parked", 1, 0.1, equal=False))
    assert not outcome.equal
    assert outcome.summary == "1/1 tables equal, 0 changes; failed: parked"


def test_the_result_has_the_keys_that_programs_read() -> None:
    assert set(DemoReport().to_json()) == {
        "tables",
        "freshness",
        "changes",
        "search",
        "first_row_seconds",
        "tour",
        "closing",
    }
