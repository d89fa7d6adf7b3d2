"""Dead letters in the catalog: a copy of what each sink stores."""

from __future__ import annotations

from datetime import UTC, datetime

from cdc.catalog import Catalog, DeadLetter


def letter(sink: str, position: int, *key: str) -> DeadLetter:
    return DeadLetter(sink=sink, topic="shop.t", key=key, position=position, ordinal=0, code="CDC-3001", message="no",
                      added_at=datetime(2026, 1, 2, tzinfo=UTC))  # fmt: skip


def test_dead_letters_are_those_that_their_sink_shows_now(catalog: Catalog) -> None:
    catalog.dead_letters.mirror("shop", "lake", [letter("lake", 10, "1"), letter("lake", 11, "2", "b")])
    catalog.dead_letters.mirror("shop", "find", [letter("find", 9, "1")])
    assert catalog.dead_letters.ls("shop") == [
        letter("find", 9, "1"),
        letter("lake", 10, "1"),
        letter("lake", 11, "2", "b"),
    ]
    catalog.dead_letters.mirror("shop", "lake", [letter("lake", 12, "1")])
    assert [(found.sink, found.position) for found in catalog.dead_letters.ls("shop")] == [("find", 9), ("lake", 12)]
    catalog.dead_letters.mirror("shop", "lake", [])
    assert [found.sink for found in catalog.dead_letters.ls("shop")] == ["find"]
    assert catalog.dead_letters.ls("other") == []


def test_a_letter_keeps_its_name_while_its_key_is_parked_and_shares_it_with_no_other(catalog: Catalog) -> None:
    assert letter("lake", 10, "1").id == letter("lake", 99, "1").id
    assert len({one.id for one in (letter("lake", 10, "1"), letter("find", 10, "1"), letter("lake", 10, "1", ""))}) == 3
