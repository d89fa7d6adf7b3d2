"""Alignment of a Relation message with the catalogue: which column of the log each of its columns is.

Names prove nothing: between two messages any column may have been dropped, added and renamed to another's name. What
proves is counting. A message lists columns by ascending attribute number; a number that the version before had and the
catalogue still has was there in between; one that is dropped by now may have been; new ones came in ascending order.
Where all sets of numbers that fit agree, the column is known; elsewhere it gets an id of its own, and the version is
NEEDS_RESYNC. With the event trigger every version is told at its place and nothing has to be concluded. Does no I/O.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from cdc.pgoutput.messages import Relation, RelationColumn
from cdc.postgres.system_catalog import Attribute, CatalogTable, TypeFacts, unknown_type
from cdc.table import CAPTURED, Column, ReplicaIdentity, TableSchema, TableState

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


def identify_columns(
    message: Relation, now: CatalogTable | None, known: TableSchema | None, facts: Mapping[int, TypeFacts], epoch: int
) -> TableSchema:
    """The version that the message announces; NEEDS_RESYNC with the reason if it is not proved.

    `facts` are the types of the message's columns that still exist. A known version with a witness that still
    stands was told at its place in the WAL, and no other came since.
    """
    numbered = known is None or (known.oid == message.oid and known.relation >> EPOCH_SHIFT == epoch)
    live = _live_ids(now, None if numbered else known)
    told = known is not None and known.witness is not None and now is not None and known.witness == now.witness
    found = _identify(message, now, known, live) if numbered or told else _named(message, known, live)
    if told and known and [_wire(c) for c in known.sent] == [_wire(c) for c in message.columns]:
        found = _Ids(tuple(c.id for c in known.sent))
    columns = _columns(message, found.ids, _Facts(live, known, facts))
    schema = TableSchema(
        relation=known.relation if known else epoch << EPOCH_SHIFT | message.oid,
        oid=message.oid,
        schema=message.schema or "pg_catalog",
        name=message.name,
        replica_identity=ReplicaIdentity(message.replica_identity),
        columns=_keyed(columns, _key(message, found.ids, _key_orders(None if told else now, live, known))),
        root=now.root if now else known.root if known else None,
        standing=known.standing if known else None,
        witness=known.witness if known and told else None,
    )
    schema = _with_generated(schema, live)
    doubt = found.doubt or (find_unstreamed_change(known, schema, live) if known else None)
    return with_state(schema, known, doubt or _lacking(schema, now))


def schema_from_ddl(told: CatalogTable, known: TableSchema | None, oid: int, epoch: int) -> TableSchema:
    """The version that the event trigger told at its place in the WAL."""
    numbered = known is None or (known.oid == oid and known.relation >> EPOCH_SHIFT == epoch)
    live = _live_ids(told, None if numbered else known)
    places = {number: place for place, number in enumerate(told.key)}
    # the trigger does not know the publication, and a stored column never becomes a computed one
    sent = {c.id for c in known.sent} if known else set()
    columns = tuple(a.column(i, places.get(a.number)) for i, a in live.items())
    schema = TableSchema(
        relation=known.relation if known else epoch << EPOCH_SHIFT | oid,
        oid=oid,
        schema=told.schema,
        name=told.name,
        replica_identity=told.replica_identity,
        columns=tuple(replace(c, generated=c.generated and c.id not in sent) for c in columns),
        root=told.root,
        standing=known.standing if known else None,
        # by name across epochs: that is no telling
        witness=told.witness if numbered else None,
    )
    doubt = find_unstreamed_change(known, schema, {}) if known else None
    if known and not numbered and {c.id for c in known.columns} - set(live):
        doubt = "a column went in an epoch after the first, where columns are known by name: it may be renamed"
    return with_state(schema, known, doubt)


def with_state(schema: TableSchema, known: TableSchema | None, doubt: str | None) -> TableSchema:
    """The version with the mark of the one before, which only a resync takes away, or with the doubt as its own."""
    if known is not None and known.state not in CAPTURED:
        return schema.flagged(known.state, known.reason or "marked before")
    if doubt:
        return schema.flagged(TableState.NEEDS_RESYNC, doubt)
    return schema if known is None else replace(schema, state=known.state, reason=known.reason)


def _wire(column: RelationColumn | Column) -> Wire:
    return column.name, column.type_oid, column.typmod


def _live_ids(now: CatalogTable | None, known: TableSchema | None) -> dict[int, Attribute]:
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


def _named(message: Relation, known: TableSchema | None, live: Mapping[int, Attribute]) -> _Ids:
    """Ids in an epoch after the first, where they are no attribute numbers: by name and type, or unproved."""
    wire = [_wire(column) for column in message.columns]
    before = {c.id: _wire(c) for c in known.sent} if known else {}
    shown = {i: a.wire for i, a in live.items() if not a.generated or a.wire in wire}
    if wire == list(before.values()):
        return _Ids(tuple(before))
    if wire == list(shown.values()):
        # one that went and one that came may be one that was renamed, and its values stand under the old id
        swapped = known is not None and set(before) - set(shown) and set(shown) - set(before)
        return _Ids(tuple(shown), "a column went and one came: a rename cannot be told" if swapped else None)
    reason = "the message matches neither the catalogue nor the version before"
    return _unproved([None] * len(wire), reason, before)


def _identify(
    message: Relation, now: CatalogTable | None, known: TableSchema | None, live: Mapping[int, Attribute]
) -> _Ids:
    wire = [_wire(column) for column in message.columns]
    before = {c.id: _wire(c) for c in known.sent} if known else {}
    shown = {i: a.wire for i, a in live.items() if not a.generated or a.wire in wire}
    if known is None and wire == list(shown.values()):
        return _Ids(tuple(shown))  # there is no history that it could be mixed up with
    if now is None or any(i >= UNPROVED for i in before):
        reason = "the table no longer exists, its columns cannot be proved" if now is None else "not proved before"
        if wire == list(before.values()):
            return _Ids(tuple(before), reason)
        return _unproved([None] * len(wire), reason, before)
    found = _counted(len(wire), _span(now, known, wire))
    fits = all(i is not None and w in (before.get(i), shown.get(i)) for i, w in zip(found, wire, strict=True))
    if now.listed and not fits:
        return _unproved([None] * len(wire), "a publication lists columns of the table", before)
    return _unproved(found, "columns were dropped and added, renamed or not, between versions nobody saw", before)


@dataclass(frozen=True, slots=True)
class _Span:
    """The attribute numbers between the version before and the catalogue of now."""

    certain: frozenset[int]
    """In both."""
    possible: frozenset[int]
    """In the version before, or unsent there, and no longer certain."""
    created: tuple[int, ...]
    """Not in the version before and above all it had, ascending."""
    live: frozenset[int]
    """Of those created: still there."""


def _span(now: CatalogTable, known: TableSchema | None, wire: Sequence[Wire]) -> _Span:
    before = {c.id for c in known.sent} if known else set()
    seen = {c.id for c in known.columns} if known else set()
    # a computed column is sent only where the publication says so, and then it is in the message
    live = {a.number for a in now.live if not a.generated or a.wire in wire}
    unsent = {a.number for a in now.live} - live
    newest = max(seen, default=0)
    created = tuple(a.number for a in now.attributes if a.number > newest and a.number not in unsent)
    return _Span(
        certain=frozenset(before & live),
        possible=frozenset((before - live) | ((seen - before) & live)) - unsent,
        created=created,
        live=frozenset(live.intersection(created)),
    )


def _counted(size: int, span: _Span) -> list[int | None]:
    """The id at each place on which all sets of `size` numbers that fit agree, None elsewhere."""
    lowest: list[int] = []
    highest: list[int] = []
    for horizon in range(len(span.created) + 1):
        born = set(span.created[:horizon])
        must = span.certain | (born & span.live)
        may = sorted(span.possible | (born - span.live))
        open_places = size - len(must)
        if not 0 <= open_places <= len(may):
            continue
        low, high = sorted({*must, *may[:open_places]}), sorted({*must, *may[len(may) - open_places :]})
        lowest = [min(pair) for pair in zip(lowest or low, low, strict=True)]
        highest = [max(pair) for pair in zip(highest or high, high, strict=True)]
    if len(lowest) != size:
        return [None] * size
    return [low if low == high else None for low, high in zip(lowest, highest, strict=True)]


def _unproved(ids: Sequence[int | None], reason: str, before: Mapping[int, Wire]) -> _Ids:
    """The ids, proved if there is one for each column; else the unknown get ids that no attribute can have."""
    fresh = max([UNPROVED - 1, *before]) + 1
    return _Ids(
        tuple(fresh + place if i is None else i for place, i in enumerate(ids)), reason if None in ids else None
    )


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
        facts = self.types.get(seen.type_oid, unknown_type(seen.type_oid))
        return Column(
            id=identifier,
            name=seen.name,
            type_oid=seen.type_oid,
            type_name=facts.name,
            typmod=seen.typmod,
            type_kind=facts.kind,
            base_type_oid=facts.base,
            base_typmod=facts.base_typmod,
            labels=facts.labels,
            # a default of another type than the column had then would be no value of it
            missing=attribute.missing if attribute and attribute.type_oid == seen.type_oid else None,
        )


def _columns(message: Relation, ids: Sequence[int], facts: _Facts) -> tuple[Column, ...]:
    return tuple(facts.column(i, seen) for i, seen in zip(ids, message.columns, strict=True))


def _key_orders(
    now: CatalogTable | None, live: Mapping[int, Attribute], known: TableSchema | None
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
        # none is one too: once its primary key is gone a table may hold rows of equal keys
        return next((order for order in orders if set(order) <= set(ids)), ())
    flagged = tuple(i for i, column in zip(ids, message.columns, strict=True) if column.key)
    return next((order for order in orders if set(order) == set(flagged)), flagged)


def _lacking(schema: TableSchema, now: CatalogTable | None) -> str | None:
    """Why rows are not known by the key that the message says; None if they are."""
    if now is None or schema.replica_identity in {ReplicaIdentity.FULL, ReplicaIdentity.NOTHING}:
        return None
    unsent = {column.name for column in schema.columns if column.generated}
    lacking = [a.name for a in now.live if a.number in now.key and a.name in unsent]
    return f"the computed columns {lacking} of its key are not sent" if lacking else None


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


def find_unstreamed_change(known: TableSchema, schema: TableSchema, live: Mapping[int, Attribute]) -> str | None:
    """What changed in the rows that are stored already, without a row in the stream; None if nothing did.

    `live` is empty for a version that was told: a rewrite that fills a new column is told as well.
    """
    before = {c.id: c for c in known.columns}
    if [c.id for c in known.key] != [c.id for c in schema.key]:
        return f"the key changed from {[c.name for c in known.key]} to {[c.name for c in schema.key]}"
    for column in schema.sent:
        old, attribute = before.get(column.id), live.get(column.id)
        if old is not None and old.generated:
            return f"column {column.name!r} was computed and not sent: the values of old rows were not in the stream"
        if old is None and attribute and column.missing is None and (attribute.has_default or attribute.not_null):
            return f"column {column.name!r} came with values for old rows that the catalogue does not show"
        if old is not None and old.type_oid == column.type_oid and not old.keeps_labels(column.labels):
            return f"labels of the enum of {column.name!r} were renamed"
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
