"""Parked rows that a sink stores with its published record: what is stored, and what only memory has."""

from __future__ import annotations

from cdc.targets.dead_letter_rows import ParkedRow
from pipelines.sinks.unpublished_parked_rows import UnpublishedParkedRows


def row(key: str) -> ParkedRow:
    return ParkedRow(
        relation=1, topic="shop.orders", key=(key,), position=1, ordinal=0, committed_at=0, complete=True,
        code="CDC-3002", message="refused", first_at=0, upto=1,
    )  # fmt: skip


def test_changes_are_those_that_are_not_stored() -> None:
    parked = UnpublishedParkedRows()
    parked.load({1: {("a",): row("a")}, 2: {("b",): row("b")}})
    assert parked.changed() == {}
    parked.confirm(1, {})
    parked.confirm(3, {("c",): row("c")})

    assert parked.changed() == {1: {}, 3: {("c",): row("c")}}
    assert (parked.rows_of(1), parked.stored_rows_of(1)) == ({}, {("a",): row("a")})


def test_only_the_tables_of_a_commit_are_stored_by_it() -> None:
    parked = UnpublishedParkedRows()
    parked.confirm(1, {("a",): row("a")})
    parked.confirm(2, {("b",): row("b")})
    parked.committed([1])

    assert parked.changed() == {2: {("b",): row("b")}}


def test_loading_drops_what_was_not_stored() -> None:
    parked = UnpublishedParkedRows()
    parked.confirm(1, {("a",): row("a")})
    parked.load({})

    assert (parked.rows_of(1), parked.changed()) == ({}, {})
