"""Definitions of tables in the system catalogs of Postgres, read in one consistent statement."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter
from typing import Any, Final, NamedTuple, Self

import psycopg

from cdc.table import Column, ReplicaIdentity

# `format_type` omits the schema of types in search_path, so this adds the schema of all types that are not built in
_TYPE_NAME: Final = """
    CASE WHEN {t}.typnamespace = 'pg_catalog'::regnamespace THEN format_type({t}.oid, NULL)
         WHEN {t}.typelem <> 0 AND {t}.typlen = -1 AND {e}.oid IS NOT NULL
         THEN format('%%I.%%I[]', {e}.typnamespace::regnamespace::name, {e}.typname)
         ELSE format('%%I.%%I', {t}.typnamespace::regnamespace::name, {t}.typname) END
"""
_TYPE: Final = f"""
    SELECT t.oid,
        {_TYPE_NAME.format(t="t", e="e")} AS name, t.typtype::text AS kind, b.oid AS base, b.typmod AS base_typmod,
        (SELECT array_agg(v.enumlabel::text ORDER BY v.enumsortorder) FROM pg_enum v
         WHERE v.enumtypid IN (t.oid, b.oid, t.typelem)) AS labels,
        t.typdefault IS NOT NULL AS has_default
    FROM pg_type t LEFT JOIN pg_type e ON e.oid = t.typelem
    LEFT JOIN LATERAL (
        WITH RECURSIVE below (oid, typmod, depth) AS (
            SELECT t.typbasetype, t.typtypmod, 1 WHERE t.typtype = 'd'
            UNION ALL
            SELECT n.typbasetype, n.typtypmod, depth + 1 FROM below JOIN pg_type n ON n.oid = below.oid
            WHERE n.typtype = 'd'
        )
        SELECT oid, typmod FROM below ORDER BY depth DESC LIMIT 1
    ) b ON true
"""
WITNESS: Final = """
    SELECT string_agg(t.oid::text || ':' || t.xmin::text, ' ' ORDER BY t.evtname)
        || ' ' || max(obj_description(t.oid, 'pg_event_trigger'))
    FROM pg_event_trigger t WHERE t.evtname IN ('cdc_ddl_end', 'cdc_drop', 'cdc_rewrite') AND t.evtenabled = 'A'
    HAVING count(*) = 3
"""
"""Subquery for OID and xmin of the three event triggers of `migrations/source`, and for their seal, as one text.

It returns a row only if all three exist and are ENABLE ALWAYS. The text is null for triggers without a seal, which an
earlier version of cdc installed.
"""
TRIGGER_SCHEMA: Final = "cdc_source"
"""Schema of the functions of the event triggers, and of a table with their key, which is never captured."""
# a deferrable key cannot identify a row: two rows may have it until the end of a transaction
_CLASS: Final = f"""
    SELECT c.oid, n.nspname, c.relname, c.relreplident::text, k.columns, k.size,
           CASE WHEN c.relkind = 'p' OR c.relispartition THEN pg_partition_root(c.oid)::oid END AS root,
           EXISTS (SELECT FROM pg_publication_rel r
                   WHERE r.prrelid = c.oid AND to_jsonb(r) ->> 'prattrs' IS NOT NULL) AS listed,
           ({WITNESS}) AS witness
    FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
    LEFT JOIN LATERAL (
        SELECT i.indkey::int2[] AS columns, i.indnkeyatts AS size FROM pg_index i
        WHERE i.indrelid = c.oid AND i.indisvalid AND CASE c.relreplident
            WHEN 'i' THEN i.indisreplident
            WHEN 'n' THEN false
            ELSE i.indisprimary AND i.indimmediate END
    ) k ON true
    WHERE c.oid = ANY(%(relations)s) AND c.relkind IN ('r', 'p')
"""
# a partitioned table stores no rows: its leaf partitions have the missing value (attmissingval)
_ATTRIBUTES: Final = """
           a.attnum, a.attname, a.attisdropped, a.atttypid, a.atttypmod, a.attnotnull,
           a.attgenerated::text <> '' AS generated,
           a.atthasdef OR a.attidentity::text <> '' OR t.has_default AS has_default,
           (SELECT pg_get_expr(d.adbin, d.adrelid) FROM pg_attrdef d
            WHERE d.adrelid = a.attrelid AND d.adnum = a.attnum) AS expression,
           t.name AS type_name, t.kind, t.base, t.base_typmod, t.labels,
           coalesce((a.attmissingval::text::text[])[1], (
               SELECT (l.attmissingval::text::text[])[1] FROM pg_partition_tree(a.attrelid) p
               JOIN pg_attribute l ON l.attrelid = p.relid AND l.attname = a.attname AND l.atthasmissing
               WHERE c.root IS NOT NULL AND p.isleaf AND p.relid <> a.attrelid LIMIT 1)) AS missing
"""
# a materialized list of types, because a join would run the query of types for every column
_TABLES: Final = f"""
    WITH classes AS MATERIALIZED ({_CLASS}),
    columns AS MATERIALIZED (
        SELECT * FROM pg_attribute WHERE attrelid = ANY(%(relations)s) AND attnum > 0),
    types AS MATERIALIZED ({_TYPE} WHERE t.oid IN (SELECT atttypid FROM columns))
    SELECT c.*, {_ATTRIBUTES}
    FROM classes c LEFT JOIN columns a ON a.attrelid = c.oid LEFT JOIN types t ON t.oid = a.atttypid
    ORDER BY c.oid, a.attnum
"""
_TYPES: Final = f"SELECT oid, name, kind, base, base_typmod, labels FROM ({_TYPE} WHERE t.oid = ANY(%s)) t"


class TypeFacts(NamedTuple):
    """Facts about a data type, from its row in `pg_type`, with the base type of a domain."""

    name: str
    kind: str
    base: int | None
    base_typmod: int
    labels: tuple[str, ...] = ()

    @classmethod
    def of(cls, row: Sequence[Any]) -> Self:
        """Build the facts from a query row: name, kind, base type, modifier of the base type, enum labels."""
        name, kind, base, base_typmod, labels = row
        return cls(name, kind, base, -1 if base_typmod is None else base_typmod, tuple(labels or ()))


def unknown_type(oid: int) -> TypeFacts:
    """Return placeholder facts for a type that no longer exists."""
    return TypeFacts(f"oid {oid}", "b", None, -1)


@dataclass(frozen=True, slots=True)
class Attribute:
    """A column of a table, from its row in `pg_attribute`; a dropped column keeps its number."""

    number: int
    name: str
    dropped: bool
    type_oid: int
    typmod: int
    not_null: bool
    generated: bool
    has_default: bool
    """True if the column now has a default expression, is an identity column, or has a type with a default."""
    default: str | None
    type: TypeFacts | None
    missing: str | None

    @property
    def wire(self) -> tuple[str, int, int]:
        """Name, type OID and type modifier, as a Relation message contains them."""
        return self.name, self.type_oid, self.typmod

    def column(self, identifier: int, key: int | None) -> Column:
        """Return the attribute as a column of a table schema, with this id and this index in the key."""
        facts = self.type or unknown_type(self.type_oid)
        return Column(
            id=identifier,
            name=self.name,
            type_oid=self.type_oid,
            type_name=facts.name,
            typmod=self.typmod,
            key=key,
            not_null=self.not_null,
            generated=self.generated,
            type_kind=facts.kind,
            base_type_oid=facts.base,
            base_typmod=facts.base_typmod,
            missing=self.missing,
            default=self.default,
            labels=facts.labels,
        )


@dataclass(frozen=True, slots=True)
class CatalogTable:
    """Definition of one table in the system catalogs of Postgres."""

    schema: str
    name: str
    replica_identity: ReplicaIdentity
    attributes: tuple[Attribute, ...]
    """All attributes in the order of their numbers, including dropped ones."""
    key: tuple[int, ...]
    """Attribute numbers of the key columns, in the order of the index."""
    root: int | None = None
    """OID of the topmost partitioned table, as `TableSchema.root`; None without partitioning."""
    listed: bool = False
    """True if a publication has a column list for the table."""
    witness: str | None = None
    """OID and xmin of the event triggers that report DDL, as text; None if they are not all enabled.

    Disabling and enabling a trigger changes the text.
    """

    @property
    def live(self) -> tuple[Attribute, ...]:
        """The attributes that are not dropped."""
        return tuple(a for a in self.attributes if not a.dropped)


def read_catalog_tables(conn: psycopg.Connection, oids: Sequence[int]) -> dict[int, CatalogTable]:
    """Return the definitions of tables, by OID; dropped tables, and relations that are not tables, are left out."""
    rows = conn.execute(_TABLES, {"relations": list(oids)}).fetchall()
    return {oid: _catalogued([row[1:] for row in of_table]) for oid, of_table in groupby(rows, itemgetter(0))}


def _catalogued(rows: Sequence[tuple[Any, ...]]) -> CatalogTable:
    schema, name, identity, places, size, root, listed, witness = rows[0][:8]
    attributes = tuple(_attribute(row[8:]) for row in rows if row[8] is not None)
    # int2vector starts at index 0; the array loader has removed these bounds
    return CatalogTable(
        schema=schema,
        name=name,
        replica_identity=ReplicaIdentity(identity),
        attributes=attributes,
        key=tuple((places or [])[: size or 0]),
        root=root,
        listed=listed,
        witness=witness,
    )


def _attribute(row: tuple[Any, ...]) -> Attribute:
    *plain, name, kind, base, base_typmod, labels, missing = row
    facts = None if name is None else TypeFacts.of((name, kind, base, base_typmod, labels))
    fields: list[Any] = [*plain, facts, missing]
    return Attribute(*fields)


def read_types(conn: psycopg.Connection, oids: list[int]) -> dict[int, TypeFacts]:
    """Return the facts of the types with these OIDs, as far as they exist."""
    return {row[0]: TypeFacts.of(row[1:]) for row in conn.execute(_TYPES, [oids]).fetchall()}
