"""Initial snapshot: numbers of tables and columns when a new epoch begins."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from cdc.capture.initial_snapshot import EarlierTables, continue_relations
from cdc.table import Column, ReplicaIdentity, TableSchema, TableState

NAMES = st.lists(st.sampled_from("abcdefg"), unique=True, min_size=1)


def table(name: str, oid: int, columns: list[str], relation: int | None = None) -> TableSchema:
    return TableSchema(
        relation=oid if relation is None else relation,
        oid=oid,
        schema="shop",
        name=name,
        replica_identity=ReplicaIdentity.DEFAULT,
        columns=tuple(Column(id=n, name=c, type_oid=25, type_name="text") for n, c in enumerate(columns, 1)),
    )


def test_an_empty_log_takes_the_catalogue_as_it_is() -> None:
    now = [table("a", 5, ["x", "y"])]
    assert continue_relations(EarlierTables(), now, {"shop.a"}).copied == now


def test_a_table_is_known_by_its_name_and_a_new_one_carries_its_epoch() -> None:
    past = EarlierTables.of(2, [table("a", 5, ["x"])])
    found = continue_relations(past, [table("a", 99, ["x"]), table("b", 5, ["x"])], {"shop.a", "shop.b"}).copied
    assert [(s.relation, s.oid) for s in found] == [(5, 99), (2 << 32 | 5, 5)]


@given(st.lists(NAMES, min_size=1, max_size=6))
def test_no_column_ever_gets_the_id_of_another_name(lives: list[list[str]]) -> None:
    versions = [table("a", 5, lives[0])]
    for epoch, names in enumerate(lives[1:], 1):
        versions += continue_relations(
            EarlierTables.of(epoch, versions), [table("a", 5 + epoch, names)], {"shop.a"}
        ).copied
    for before, after in pairwise(versions):
        kept = {c.name: c.id for c in before.columns}
        assert all(kept.get(c.name, c.id) == c.id for c in after.columns)
    owners: dict[int, set[int]] = {}
    for place, version in enumerate(versions):
        for column in version.columns:
            owners.setdefault(column.id, set()).add(place)
    # an id belongs to one unbroken run of versions: what was dropped never comes back to another column
    assert all(max(places) - min(places) + 1 == len(places) for places in owners.values())


def test_a_table_that_is_gone_is_ended_and_one_that_is_no_longer_captured_is_marked() -> None:
    past = EarlierTables.of(1, [table("a", 5, ["x"]), table("b", 6, ["x"]), table("c", 7, ["x"])])
    found = continue_relations(past, [table("a", 5, ["x"])], {"shop.a", "shop.b"})
    assert [(s.name, s.state) for s in found.dropped] == [("c", TableState.DROPPED)]
    assert [(s.name, s.state) for s in found.uncaptured] == [("b", TableState.NEEDS_RESYNC)]
    assert all(s.reason for s in (*found.dropped, *found.uncaptured))


def test_of_two_tables_that_bore_a_name_the_one_seen_last_goes_on() -> None:
    past = EarlierTables.of(1, [table("a", 5, ["x"]), table("a", 9, ["x"])])
    assert [s.relation for s in continue_relations(past, [table("a", 20, ["x"])], {"shop.a"}).copied] == [9]


def test_a_mark_of_before_ends_with_the_copy_and_a_dropped_table_does_not_come_back_to_life() -> None:
    marked = table("a", 5, ["x"]).flagged(TableState.NEEDS_RESYNC, "why")
    dropped = replace(table("b", 6, ["x"]), state=TableState.DROPPED)
    found = continue_relations(
        EarlierTables.of(1, [marked, dropped]), [table("a", 5, ["x"]), table("b", 7, ["x"])], set()
    )
    assert [(s.state, s.relation) for s in found.copied] == [(TableState.LIVE, 5), (TableState.LIVE, 1 << 32 | 7)]


def test_columns_that_exchanged_their_names_between_two_epochs_keep_the_former_ones() -> None:
    past = EarlierTables.of(1, [table("a", 5, ["id", "secret", "pub"])])

    (swapped,) = continue_relations(past, [table("a", 5, ["id", "pub", "secret"])], {"shop.a"}).copied

    assert [(c.id, c.name) for c in swapped.columns] == [(1, "id"), (3, "pub"), (2, "secret")]
    assert swapped.former_names == ((2, "pub"), (3, "secret"))


def test_a_table_that_was_renamed_between_two_epochs_keeps_its_former_topic() -> None:
    past = EarlierTables.of(1, [table("a", 5, ["id", "secret"])])

    (renamed,) = continue_relations(past, [table("b", 5, ["id", "hidden"])], {"shop.b"}).copied

    assert renamed.former_topics == ("shop.a",)
    assert renamed.former_names == ((2, "secret"),)
