"""Alignment of a Relation message with the catalogue: which column of the log each of its columns is.

Three sources are asked in this order: the live attributes, the version before, and exclusion: a message lists
columns by ascending attribute number, so between two columns that are known only the numbers between theirs are
possible, and if there are as many of them as unknown columns, each has its own. Does no I/O.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Final

from cdc.pgoutput.messages import Relation, RelationColumn
from cdc.postgres.catalogue import Attribute, Catalogued, TypeFacts
from cdc.table import Column, ReplicaIdentity, TableSchema, TableState

EPOCH_SHIFT: Final = 32
UNPROVED: Final = 1601
"""First id of columns that could not be proved: Postgres has at most 1,600 (`MaxHeapAttributeNumber`)."""

_VARCHAR, _TEXT, _NUMERIC, _VARBIT = 1043, 25, 1700, 1562
_PRECISE: Final = frozenset({1083, 1114, 1184, 1266, _VARCHAR, _VARBIT})
"""Types whose modifier is one length or precision: time and timestamp with and without zone, varchar, varbit."""

Wire = tuple[str, int, int]


@dataclass(frozen=True, slots=True)
class _Ids:
    """An id for each column of the message, in its order."""

    ids: tuple[int, ...]
    doubt: str | None = None
    """Why this is no proof; None if it is one."""


def align(
    message: Relation, now: Catalogued | None, known: TableSchema | None, facts: Mapping[int, TypeFacts], epoch: int
) -> TableSchema:
    """The version that the message announces; NEEDS_RESYNC with the reason if it is not proved.

    `facts` are the types of the message's columns that still exist.
    """
    numbered = known is None or (known.oid == message.oid and known.relation >> EPOCH_SHIFT == epoch)
    live = _live_ids(now, None if numbered else known)
    found = _identify(message, now, known, live)
    columns = _columns(message, found.ids, _Facts(live, known, facts))
    schema = TableSchema(
        relation=known.relation if known else epoch << EPOCH_SHIFT | message.oid,
        oid=message.oid,
        schema=message.schema or "pg_catalog",
        name=message.name,
        replica_identity=ReplicaIdentity(message.replica_identity),
        columns=_keyed(columns, _key(message, found.ids, _key_orders(now, live, known))),
    )
    schema = _with_generated(schema, live)
    doubt = found.doubt or (_unseen(known, schema, live) if known else None)
    if known is not None and known.state is not TableState.LIVE:
        return schema.flagged(known.state, known.reason or "marked before")
    return schema.flagged(TableState.NEEDS_RESYNC, doubt) if doubt else schema


def _wire(column: RelationColumn | Column) -> Wire:
    return column.name, column.type_oid, column.typmod


def _live_ids(now: Catalogued | None, known: TableSchema | None) -> dict[int, Attribute]:
    """The live attributes by id: their number, or by the names of a version from an earlier epoch."""
    if now is None:
        return {}
    if known is None:
        return {a.number: a for a in now.live}
    named = {c.name: c.id for c in known.columns}
    fresh = max([*named.values(), *(a.number for a in now.attributes), UNPROVED - 1]) + 1
    ids: dict[int, Attribute] = {}
    for attribute in now.live:
        identifier = named.get(attribute.name)
        if identifier is None:
            identifier, fresh = fresh, fresh + 1
        ids[identifier] = attribute
    return ids


def _identify(
    message: Relation, now: Catalogued | None, known: TableSchema | None, live: Mapping[int, Attribute]
) -> _Ids:
    wire = [_wire(column) for column in message.columns]
    before = {c.id: _wire(c) for c in known.sent} if known else {}
    shown = {i: a.wire for i, a in live.items() if not a.generated or a.wire in wire}
    if wire == list(before.values()):
        if wire == list(shown.values()) and list(before) != list(shown):
            return _Ids(tuple(shown), "columns were dropped and added again under the same name")
        return _Ids(tuple(before))
    if wire == list(shown.values()):
        return _Ids(tuple(shown))
    if now is None:
        return _unproved(_by_wire(wire, before, {}), "the table no longer exists and its columns are not known")
    matched = _by_wire(wire, before, shown)
    if any(i is not None and i >= UNPROVED for i in (*matched, *before, *shown)):
        return _unproved(matched, "the message matches neither the catalogue nor the version before")
    return _unproved(_exclude(matched, _possible(now, known, wire)), "the message lies between versions nobody saw")


def _by_wire(wire: Sequence[Wire], before: Mapping[int, Wire], shown: Mapping[int, Wire]) -> list[int | None]:
    """The id of each column that exactly one id has the name and type of."""
    candidates = [{i for source in (before, shown) for i, w in source.items() if w == column} for column in wire]
    return [next(iter(ids)) if len(ids) == 1 else None for ids in candidates]


def _possible(now: Catalogued, known: TableSchema | None, wire: Sequence[Wire]) -> list[int]:
    """Attribute numbers that a column of this message may have."""
    seen = {c.id for c in known.columns} if known else set()
    newest = max(seen, default=0)
    return [
        a.number
        for a in now.attributes
        # what was gone before the known version cannot come after it; an unsent computed column never comes
        if (a.number > newest or a.number in seen) and not (a.generated and a.wire not in wire)
    ]


def _exclude(matched: Sequence[int | None], possible: Sequence[int]) -> list[int | None]:
    """Fill the runs of unknown columns between known ones where only as many numbers are left."""
    filled = list(matched)
    anchors = [-1, *(place for place, i in enumerate(matched) if i is not None), len(matched)]
    for left, right in pairwise(anchors):
        low = matched[left] if left >= 0 else 0
        high = matched[right] if right < len(matched) else UNPROVED
        between = [n for n in possible if (low or 0) < n < (high or UNPROVED)]
        if len(between) == right - left - 1:
            filled[left + 1 : right] = between
    return filled


def _unproved(ids: Sequence[int | None], reason: str) -> _Ids:
    """The ids, proved if there is one for each column and they ascend; else the unknown get ids of their own."""
    fresh = max([i for i in ids if i is not None] + [UNPROVED - 1]) + 1
    whole = tuple(fresh + place if i is None else i for place, i in enumerate(ids))
    ascending = all(a < b for a, b in pairwise(whole))
    return _Ids(whole, None if None not in ids and ascending else reason)


@dataclass(frozen=True, slots=True)
class _Facts:
    """Where the parts of a column come from that the message does not show."""

    live: Mapping[int, Attribute]
    known: TableSchema | None
    types: Mapping[int, TypeFacts]

    def column(self, identifier: int, seen: RelationColumn) -> Column:
        attribute = self.live.get(identifier)
        if attribute is not None and attribute.wire == _wire(seen):
            return replace(attribute.column(identifier, None), generated=False)
        for column in self.known.columns if self.known else ():
            if column.id == identifier and _wire(column) == _wire(seen):
                return replace(column, key=None)
        facts = self.types.get(seen.type_oid, TypeFacts(f"oid {seen.type_oid}", "b", None, -1))
        return Column(
            id=identifier,
            name=seen.name,
            type_oid=seen.type_oid,
            type_name=facts.name,
            typmod=seen.typmod,
            type_kind=facts.kind,
            base_type_oid=facts.base,
            base_typmod=facts.base_typmod,
            # a default of another type than the column had then would be no value of it
            missing=attribute.missing if attribute and attribute.type_oid == seen.type_oid else None,
        )


def _columns(message: Relation, ids: Sequence[int], facts: _Facts) -> tuple[Column, ...]:
    return tuple(facts.column(i, seen) for i, seen in zip(ids, message.columns, strict=True))


def _key_orders(
    now: Catalogued | None, live: Mapping[int, Attribute], known: TableSchema | None
) -> list[tuple[int, ...]]:
    """Ids of the key as the catalogue has it now, and as it was before."""
    ids = {attribute.number: i for i, attribute in live.items()}
    current = [tuple(ids[n] for n in now.key if n in ids)] if now else []
    return [*current, *([tuple(c.id for c in known.key)] if known else [])]


def _key(message: Relation, ids: Sequence[int], orders: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
    """Ids of the log key in key order: the wire says which under DEFAULT and INDEX, the catalogue under FULL."""
    if message.replica_identity == ReplicaIdentity.NOTHING:
        return ()
    if message.replica_identity == ReplicaIdentity.FULL:
        return next((order for order in orders if order and set(order) <= set(ids)), ())
    flagged = tuple(i for i, column in zip(ids, message.columns, strict=True) if column.key)
    return next((order for order in orders if set(order) == set(flagged)), flagged)


def _keyed(columns: Sequence[Column], key: Sequence[int]) -> tuple[Column, ...]:
    places = {i: place for place, i in enumerate(key)}
    return tuple(replace(c, key=places.get(c.id)) for c in columns)


def _with_generated(schema: TableSchema, live: Mapping[int, Attribute]) -> TableSchema:
    """The schema with the computed columns that are not sent, at their places."""
    sent = {c.id for c in schema.columns}
    unsent = [a.column(i, None) for i, a in live.items() if a.generated and i not in sent]
    together = sorted([*schema.columns, *unsent], key=lambda c: c.id)
    in_order = [c for c in together if c.id in sent] == list(schema.columns)
    return replace(schema, columns=tuple(together if in_order else [*schema.columns, *unsent]))


def _unseen(known: TableSchema, schema: TableSchema, live: Mapping[int, Attribute]) -> str | None:
    """What changed in the rows that are stored already, without a row in the stream; None if nothing did."""
    before = {c.id: c for c in known.columns}
    if [c.id for c in known.key] != [c.id for c in schema.key]:
        return f"the key changed from {[c.name for c in known.key]} to {[c.name for c in schema.key]}"
    for column in schema.sent:
        old, attribute = before.get(column.id), live.get(column.id)
        if old is None and attribute and column.missing is None and (attribute.has_default or attribute.not_null):
            return f"column {column.name!r} came with values for old rows that the catalogue does not show"
        if old is not None and not _rewrites_nothing(old, column):
            return f"column {column.name!r} changed its type from {old.type_name!r} to {column.type_name!r}"
    return None


def _rewrites_nothing(old: Column, new: Column) -> bool:
    """Whether Postgres changes the type without rewriting the stored values (`ATColumnChangeRequiresRewrite`)."""
    (was, before), (becomes, after) = old.value_type, new.value_type
    if {was, becomes} <= {_VARCHAR, _TEXT} and after == -1:
        return True
    if was != becomes:
        return False
    if after in {before, -1}:
        return True
    if was == _NUMERIC and before != -1:
        # (precision << 16 | scale) + 4, as numeric.c packs it
        return (before - 4) & 0xFFFF == (after - 4) & 0xFFFF and before <= after
    return was in _PRECISE and before != -1 and before <= after
