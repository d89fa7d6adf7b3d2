"""Column identity: maps each column of a Relation message to a column of the log. This module does no I/O.

pgoutput sends names and types, but no attribute numbers. Names prove nothing: between two messages a column may have
been dropped, added, or renamed to the name of another column. Therefore this module compares attribute numbers:

- A message lists the columns in ascending order of their attribute numbers.
- A column of the previous schema version that still exists in the system catalogs existed when Postgres wrote the
  message.
- A column of the previous schema version that the system catalogs show as dropped may have existed at that time.
- Columns that were added later have higher numbers, in the order in which they were added.

Several sets of numbers can fit a message. A column is proved if all these sets give it the same number. Any other
column gets a new id, and the schema version is flagged NEEDS_RESYNC.

If the event triggers are installed, a DDL message describes each version at its position in the WAL. Then the previous
version already has the columns of the message, and nothing has to be proved.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from cdc.pgoutput.messages import Relation, RelationColumn
from cdc.postgres.system_catalog import Attribute, CatalogTable, TypeFacts, unknown_type
from cdc.table import CAPTURED, UNPROVED, Column, ReplicaIdentity, TableSchema, TableState

EPOCH_SHIFT: Final = 32
_VARCHAR = 1043
_TEXT = 25
_NUMERIC = 1700
_VARBIT = 1562
_PRECISE: Final = frozenset({1083, 1114, 1184, 1266, _VARCHAR, _VARBIT})
"""OIDs of types whose modifier is one length or precision: time and timestamp types, varchar, varbit."""

Wire = tuple[str, int, int]


@dataclass(frozen=True, slots=True)
class _ColumnIds:
    """Column ids of the log for the columns of a Relation message, in the same order."""

    ids: tuple[int, ...]
    doubt: str | None = None
    """Why the ids are not proved; None if they are proved."""


def identify_columns(
    message: Relation, now: CatalogTable | None, known: TableSchema | None, facts: Mapping[int, TypeFacts], epoch: int
) -> TableSchema:
    """Return the schema version that a Relation message announces, with the column ids of the log.

    `now` is the table in the system catalogs, `known` the previous version. `facts` contains the types of the message's
    columns by OID, if they still exist.

    If `now` and `known` have the same `witness`, event triggers have reported every version up to `now`. If the message
    then has the columns of `known`, their ids are proved. If a column id is not proved, the version is flagged
    NEEDS_RESYNC with the reason.
    """
    numbered = known is None or (known.oid == message.oid and known.relation >> EPOCH_SHIFT == epoch)
    live = _live_ids(now, None if numbered else known)
    reported = known is not None and known.witness is not None and now is not None and known.witness == now.witness
    found = _ids_by_number(message, now, known, live) if numbered or reported else _ids_by_name(message, known, live)
    if reported and known and [_wire(c) for c in known.sent] == [_wire(c) for c in message.columns]:
        found = _ColumnIds(tuple(c.id for c in known.sent))
    column_facts = _ColumnFacts(live, known, facts)
    columns = [column_facts.column(i, seen) for i, seen in zip(found.ids, message.columns, strict=True)]
    schema = TableSchema(
        relation=known.relation if known else epoch << EPOCH_SHIFT | message.oid,
        oid=message.oid,
        schema=message.schema or "pg_catalog",
        name=message.name,
        replica_identity=ReplicaIdentity(message.replica_identity),
        columns=_keyed(columns, _key(message, found.ids, _key_orders(None if reported else now, live, known))),
        root=now.root if now else known.root if known else None,
        standing=known.standing if known else None,
        witness=known.witness if known and reported else None,
    )
    schema = _with_generated(schema, live)
    doubt = found.doubt or (find_unstreamed_change(known, schema, live) if known else None)
    return with_state(schema, known, doubt or _unsent_key(schema, now))


def schema_from_ddl(table: CatalogTable, known: TableSchema | None, oid: int, epoch: int) -> TableSchema:
    """Return the schema version that a DDL message describes; `known` is the previous version."""
    numbered = known is None or (known.oid == oid and known.relation >> EPOCH_SHIFT == epoch)
    live = _live_ids(table, None if numbered else known)
    places = {number: place for place, number in enumerate(table.key)}
    # the message does not contain the publication's columns; a stored column never becomes a generated one
    sent = {c.id for c in known.sent} if known else set()
    columns = tuple(a.column(i, places.get(a.number)) for i, a in live.items())
    schema = TableSchema(
        relation=known.relation if known else epoch << EPOCH_SHIFT | oid,
        oid=oid,
        schema=table.schema,
        name=table.name,
        replica_identity=table.replica_identity,
        columns=tuple(replace(c, generated=c.generated and c.id not in sent) for c in columns),
        root=table.root,
        standing=known.standing if known else None,
        # in a later epoch columns are identified by name, which proves nothing
        witness=table.witness if numbered else None,
    )
    doubt = find_unstreamed_change(known, schema, {}) if known else None
    if known and not numbered and {c.id for c in known.columns} - set(live):
        doubt = "a column was dropped or renamed, and from epoch 2 on columns are identified only by name"
    return with_state(schema, known, doubt)


def with_state(schema: TableSchema, known: TableSchema | None, doubt: str | None) -> TableSchema:
    """Return the schema with the state and the former names of the previous version, or with NEEDS_RESYNC if `doubt`
    contains a reason.

    If the previous version is NEEDS_RESYNC or DROPPED, the schema keeps this state and its reason, whatever `doubt`
    contains. Only a resync ends these two states.
    """
    schema = schema.following(known)
    if known is not None and known.state not in CAPTURED:
        return schema.flagged(known.state, known.reason or "the previous version of the table already had this state")
    if doubt:
        return schema.flagged(TableState.NEEDS_RESYNC, doubt)
    return schema if known is None else replace(schema, state=known.state, reason=known.reason)


def _wire(column: RelationColumn | Column) -> Wire:
    return column.name, column.type_oid, column.typmod


def _live_ids(now: CatalogTable | None, known: TableSchema | None) -> dict[int, Attribute]:
    """Return the table's attributes that are not dropped, by column id of the log.

    If `known` is None, the id is the attribute number. Otherwise `known` is a schema version of an earlier epoch. An
    attribute then gets the id of the column with its name in `known`, or a new id if `known` has no such column. If the
    order of the attributes shows that a name belongs to another column now, every attribute gets a new id.
    """
    if now is None:
        return {}
    if known is None:
        return {a.number: a for a in now.live}
    named = {c.name: c.id for c in known.columns}
    fresh = max([*named.values(), *(a.number for a in now.attributes), UNPROVED - 1]) + 1
    if _has_moved_names(now, known):
        named = {}
    ids: dict[int, Attribute] = {}
    for attribute in now.live:
        identifier = named.get(attribute.name)
        if identifier is None:
            identifier, fresh = fresh, fresh + 1
        ids[identifier] = attribute
    return ids


def _has_moved_names(now: CatalogTable, known: TableSchema) -> bool:
    """Return True if a name of `known` certainly belongs to another attribute now.

    The order of attributes never changes, and a new attribute follows all others.
    """
    before = [column.name for column in known.sent]
    names = [attribute.name for attribute in now.live if not attribute.generated]
    kept = [name for name in names if name in before]
    created = [name for name in names if known.column(name) is None]
    if kept != [name for name in before if name in kept]:
        return True
    # with a column list, an attribute that is not published is new in no version
    return not now.listed and bool(kept and created) and names.index(created[0]) < names.index(kept[-1])


def _ids_by_name(message: Relation, known: TableSchema | None, live: Mapping[int, Attribute]) -> _ColumnIds:
    """Identify columns by name and type, for a table whose column ids are not its attribute numbers."""
    wire = [_wire(column) for column in message.columns]
    before = {c.id: _wire(c) for c in known.sent} if known else {}
    shown = {i: a.wire for i, a in live.items() if not a.generated or a.wire in wire}
    if wire == list(before.values()):
        return _ColumnIds(tuple(before))
    if wire == list(shown.values()):
        # a column that disappeared and one that appeared may be one renamed column, whose values have the old id
        swapped = known is not None and set(before) - set(shown) and set(shown) - set(before)
        doubt = "one column disappeared and another appeared: the column may have been renamed"
        return _ColumnIds(tuple(shown), doubt if swapped else None)
    reason = "the columns in the stream match neither the system catalogs nor the previous schema version"
    return _with_new_ids([None] * len(wire), reason, before)


def _ids_by_number(
    message: Relation, now: CatalogTable | None, known: TableSchema | None, live: Mapping[int, Attribute]
) -> _ColumnIds:
    wire = [_wire(column) for column in message.columns]
    before = {c.id: _wire(c) for c in known.sent} if known else {}
    shown = {i: a.wire for i, a in live.items() if not a.generated or a.wire in wire}
    if known is None and wire == list(shown.values()):
        return _ColumnIds(tuple(shown))  # there is no previous version to confuse it with
    if now is None or any(i >= UNPROVED for i in before):
        gone = "the table no longer exists, so its columns cannot be identified"
        reason = gone if now is None else "the columns of the previous schema version could not be identified"
        if wire == list(before.values()):
            return _ColumnIds(tuple(before), reason)
        return _with_new_ids([None] * len(wire), reason, before)
    found = _agreed_ids(len(wire), _candidates(now, known, wire))
    fits = all(i is not None and w in (before.get(i), shown.get(i)) for i, w in zip(found, wire, strict=True))
    if now.listed and not fits:
        return _with_new_ids(
            [None] * len(wire), "a publication has a column list for the table, so columns cannot be identified", before
        )
    reason = "columns were dropped and added between two schema versions, so columns cannot be identified"
    return _with_new_ids(found, reason, before)


@dataclass(frozen=True, slots=True)
class _Candidates:
    """Attribute numbers that the columns of a Relation message may have."""

    certain: frozenset[int]
    """Numbers that are certainly in the message: the previous version and the system catalogs have them."""
    possible: frozenset[int]
    """Numbers that may be in the message: dropped since the previous version, or not sent in that version."""
    created: tuple[int, ...]
    """Numbers above all numbers of the previous version, ascending."""
    live: frozenset[int]
    """The numbers in `created` that are not dropped."""


def _candidates(now: CatalogTable, known: TableSchema | None, wire: Sequence[Wire]) -> _Candidates:
    before = {c.id for c in known.sent} if known else set()
    seen = {c.id for c in known.columns} if known else set()
    # a generated column is sent only if the publication contains it, and then it is in the message
    live = {a.number for a in now.live if not a.generated or a.wire in wire}
    unsent = {a.number for a in now.live} - live
    newest = max(seen, default=0)
    created = tuple(a.number for a in now.attributes if a.number > newest and a.number not in unsent)
    return _Candidates(
        certain=frozenset(before & live),
        possible=frozenset((before - live) | ((seen - before) & live)) - unsent,
        created=created,
        live=frozenset(live.intersection(created)),
    )


def _agreed_ids(size: int, candidates: _Candidates) -> list[int | None]:
    """Return the proved id of each of the `size` columns of the message; None for a column that is not proved.

    When Postgres wrote the message, perhaps only the first n of the `created` numbers existed. The loop tries every n.
    For each n it finds the lowest and the highest set of `size` numbers that fit. Together these sets give a lower and
    an upper bound for the number of each column. A column is proved if its two bounds are equal.
    """
    lowest: list[int] = []
    highest: list[int] = []
    for count in range(len(candidates.created) + 1):
        created = set(candidates.created[:count])
        required = candidates.certain | (created & candidates.live)
        optional = sorted(candidates.possible | (created - candidates.live))
        missing = size - len(required)
        if not 0 <= missing <= len(optional):
            continue
        low = sorted({*required, *optional[:missing]})
        high = sorted({*required, *optional[len(optional) - missing :]})
        lowest = [min(pair) for pair in zip(lowest or low, low, strict=True)]
        highest = [max(pair) for pair in zip(highest or high, high, strict=True)]
    if len(lowest) != size:
        return [None] * size
    return [low if low == high else None for low, high in zip(lowest, highest, strict=True)]


def _with_new_ids(ids: Sequence[int | None], reason: str, before: Mapping[int, Wire]) -> _ColumnIds:
    first = max([UNPROVED - 1, *before]) + 1
    return _ColumnIds(
        tuple(first + place if i is None else i for place, i in enumerate(ids)), reason if None in ids else None
    )


@dataclass(frozen=True, slots=True)
class _ColumnFacts:
    """Adds to the columns of a Relation message the facts that the message omits.

    The facts come from the system catalogs, the previous schema version or the data type.
    """

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
            # its missing value has the current type, which may differ from the type in the message
            missing=attribute.missing if attribute and attribute.type_oid == seen.type_oid else None,
        )


def _key_orders(
    now: CatalogTable | None, live: Mapping[int, Attribute], known: TableSchema | None
) -> list[tuple[int, ...]]:
    """Return the possible keys: first the key in the system catalogs, then the key of `known`.

    Each key is a tuple of column ids in key order.
    """
    ids = {attribute.number: i for i, attribute in live.items()}
    current = [tuple(ids[n] for n in now.key if n in ids)] if now else []
    return [*current, *([tuple(c.id for c in known.key)] if known else [])]


def _key(message: Relation, ids: Sequence[int], orders: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
    """Return the ids of the columns that are the table's key in the log, in key order; empty without a key.

    With REPLICA IDENTITY DEFAULT or INDEX the message flags the key columns. With FULL the key is the first one in
    `orders` whose columns are all in the message.
    """
    if message.replica_identity == ReplicaIdentity.NOTHING:
        return ()
    if message.replica_identity == ReplicaIdentity.FULL:
        # the order may be empty: after its primary key was dropped, a table can contain rows with equal keys
        return next((order for order in orders if set(order) <= set(ids)), ())
    flagged = tuple(i for i, column in zip(ids, message.columns, strict=True) if column.key)
    return next((order for order in orders if set(order) == set(flagged)), flagged)


def _unsent_key(schema: TableSchema, now: CatalogTable | None) -> str | None:
    """Return a reason for a resync if Postgres does not send a generated column of the key; otherwise return None."""
    if now is None or schema.replica_identity in {ReplicaIdentity.FULL, ReplicaIdentity.NOTHING}:
        return None
    unsent = {column.name for column in schema.columns if column.generated}
    key = [a.name for a in now.live if a.number in now.key and a.name in unsent]
    return f"the source does not send the generated columns {key} of the table's key" if key else None


def _keyed(columns: Sequence[Column], key: Sequence[int]) -> tuple[Column, ...]:
    places = {i: place for place, i in enumerate(key)}
    return tuple(replace(c, key=places.get(c.id)) for c in columns)


def _with_generated(schema: TableSchema, live: Mapping[int, Attribute]) -> TableSchema:
    """Add to the schema the generated columns that Postgres does not send.

    If the sent columns are sorted by id, the result is sorted by id too; otherwise the added columns come last.
    """
    sent = {c.id for c in schema.columns}
    unsent = [a.column(i, None) for i, a in live.items() if a.generated and i not in sent]
    together = sorted([*schema.columns, *unsent], key=lambda c: c.id)
    in_order = [c for c in together if c.id in sent] == list(schema.columns)
    return replace(schema, columns=tuple(together if in_order else [*schema.columns, *unsent]))


def find_unstreamed_change(known: TableSchema, schema: TableSchema, live: Mapping[int, Attribute]) -> str | None:
    """Return why the source may have changed rows without sending the changes; None if there is no such reason.

    `known` is the previous schema version, `schema` the new one, and `live` the table's attributes by column id. The
    function uses `live` to find added columns with values for old rows. If `schema` comes from a DDL message, `live`
    must be empty, because the event triggers report such columns in a separate DDL message.
    """
    before = {c.id: c for c in known.columns}
    if [c.id for c in known.key] != [c.id for c in schema.key]:
        return f"the key changed from {[c.name for c in known.key]} to {[c.name for c in schema.key]}"
    for column in schema.sent:
        old, attribute = before.get(column.id), live.get(column.id)
        if old is not None and old.generated:
            return f"column {column.name!r} was generated and not sent: the stream has no values for old rows"
        if old is None and attribute and column.missing is None and _may_fill_old_rows(attribute):
            return f"column {column.name!r} was added, and its values for old rows are not in the system catalogs"
        if old is not None and old.type_oid == column.type_oid and not old.keeps_labels(column.labels):
            return f"enum labels of column {column.name!r} were renamed"
        if old is not None and not _rewrites_nothing(old, column):
            return f"column {column.name!r} changed its type from {old.type_name!r} to {column.type_name!r}"
    return None


def _may_fill_old_rows(attribute: Attribute) -> bool:
    """Return True if a column may have values in rows that are older than it."""
    return attribute.has_default or attribute.not_null or attribute.missing is not None


def _rewrites_nothing(old: Column, new: Column) -> bool:
    """Return True if Postgres changes the type without a rewrite (`ATColumnChangeRequiresRewrite`)."""
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
