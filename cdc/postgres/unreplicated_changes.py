"""Detection of row changes that are missing in the stream, by comparing two states of the system catalogs.

One query reads the state of all tables. A pure function compares the state of a table with its previous state.

Most causes of a new file (`relfilenode`) are harmless: VACUUM FULL and CLUSTER keep every row, and TRUNCATE is in the
stream. So a new file alone is not reported. A new file together with an altered column is a rewrite, which can change
values. A leaf partition with an empty new file was truncated alone; the stream does not contain that truncate.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import psycopg
from psycopg import sql

from cdc.postgres.sqlstate import map_errors
from cdc.postgres.system_catalog import WITNESS
from cdc.table import CatalogFingerprint, TableSchema

# CREATE TABLE … PARTITION OF writes all system catalog rows of the new table in one command.
# ATTACH updates the columns of an existing table in a later transaction or command, except its system columns.
_ATTACHMENTS: Final = """
    pg_partition_ancestors({leaf}) WITH ORDINALITY up (relid, step)
    JOIN pg_inherits i ON i.inhrelid = up.relid
    JOIN pg_attribute born ON born.attrelid = i.inhrelid AND born.attnum = -1
    LEFT JOIN LATERAL (SELECT a.xmin, a.cmin FROM pg_attribute a WHERE a.attrelid = i.inhrelid AND a.attnum > 0
                       ORDER BY a.attnum LIMIT 1) f ON true
    WHERE NOT (i.xmin = born.xmin AND (f.xmin <> i.xmin OR f.cmin = born.cmin))
"""
"""The links from a leaf up to its root that ATTACH made."""
# A leaf may have been attached with rows if it, or a partitioned table between it and the root, was attached.
_LEAVES: Final = f"""
    SELECT json_agg(json_build_array(l.oid, l.relfilenode::bigint, l.relpersistence, l.reltuples = -1, l.xmin::text,
        pg_relation_size(l.oid) > 0 AND EXISTS (
            SELECT FROM {_ATTACHMENTS.format(leaf="l.oid")} AND up.step <= p.level),
        (SELECT string_agg(i.xmin::text, ' ' ORDER BY up.step)
         FROM pg_partition_ancestors(l.oid) WITH ORDINALITY up (relid, step)
         JOIN pg_inherits i ON i.inhrelid = up.relid WHERE up.step <= p.level))
        ORDER BY l.oid)
    FROM pg_partition_tree(c.oid) p JOIN pg_class l ON l.oid = p.relid
    WHERE p.isleaf AND p.relid <> c.oid
"""
_READABLE: Final = """
    SELECT n.nspname, c.relname FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
    WHERE c.oid = %s AND has_schema_privilege(n.oid, 'USAGE') AND has_table_privilege(c.oid, 'SELECT')
    AND NOT row_security_active(c.oid)
"""
# The stream does not have rows that were inserted before the ATTACH. ATTACH waits for all other transactions that have
# written to the table. So its transaction id, and its command id in its transaction, separate older rows from newer:
#  1. A row of the same transaction id is older if its command id is lower.
#  2. A row with a lower transaction id counts as older.
#  3. A row with a higher one is newer if ATTACH was the first command that wrote in its transaction. Otherwise the row
#     may be of a subtransaction, or of a transaction that ended while that of the ATTACH was open. But if that one also
#     created the table, no other can have written older rows, and their command ids are between both commands.
# A deletion overwrites the command id, so the command id of a row with xmax proves nothing.
_OLDER_ROW: Final = f"""
    WITH attachments AS MATERIALIZED (
        SELECT i.xmin AS xid, age(i.xmin) AS age, i.cmin::text::bigint AS command,
               born.xmin AS created_by, born.cmin::text::bigint AS created
        FROM {_ATTACHMENTS.format(leaf="{oid}")})
    SELECT EXISTS (
        SELECT FROM ONLY {{table}} r JOIN attachments a ON CASE
            WHEN r.xmin = a.xid THEN r.xmax::text <> '0' OR r.cmin::text::bigint < a.command
            WHEN age(r.xmin) > a.age THEN true
            WHEN a.command = 0 THEN false
            WHEN a.created_by = a.xid
            THEN r.xmax::text <> '0' OR r.cmin::text::bigint BETWEEN a.created + 1 AND a.command - 1
            ELSE true END)
"""
_SEARCH_WITHIN: Final = "5s"
"""Time limit for the search for an older row, which reads the whole partition if there is none."""
# a new generated column has values for old rows, which count if the publication sends it (from version 18 on)
_COLUMNS: Final = r"""
    SELECT json_agg(json_build_array(a.attnum, a.xmin::text, a.atthasmissing,
        CASE a.attgenerated::text
            WHEN '' THEN true
            WHEN 's' THEN EXISTS (
                SELECT FROM pg_publication p LEFT JOIN pg_publication_rel r ON r.prpubid = p.oid AND r.prrelid = c.oid
                WHERE p.pubname = %(publication)s AND (to_jsonb(p) ->> 'pubgencols' = 's'
                    OR to_jsonb(r) ->> 'prattrs' ~ format('\m%%s\M', a.attnum)))
            ELSE false END,
        a.attgenerated::text = '',
        (SELECT json_agg(v.enumlabel ORDER BY v.enumsortorder) FROM pg_enum v
         WHERE v.enumtypid IN (t.oid, t.typbasetype, t.typelem))) ORDER BY a.attnum)
    FROM pg_attribute a JOIN pg_type t ON t.oid = a.atttypid
    WHERE a.attrelid = c.oid AND a.attnum > 0 AND NOT a.attisdropped
"""
# FOR ALL TABLES EXCEPT came with version 19: a row of `pg_publication_rel` with `prexcept` is a table that is left out.
# It is never a partition: a partitioned table is left out with its partitions.
_LEFT_OUT: Final = """
    EXISTS (SELECT FROM pg_publication_rel x WHERE x.prpubid = p.oid AND to_jsonb(x) ->> 'prexcept' = 'true'
            AND x.prrelid IN (c.oid, pg_partition_root(c.oid)))
"""
# to_jsonb: in this form the log stores row filters and column lists
_PUBLISHED: Final = f"""
    SELECT json_build_array(p.oid::text, p.xmin::text, concat_ws(' ', p.pubname, p.pubowner),
        concat_ws(', ', CASE WHEN p.pubinsert THEN 'insert' END, CASE WHEN p.pubupdate THEN 'update' END,
                  CASE WHEN p.pubdelete THEN 'delete' END, CASE WHEN p.pubtruncate THEN 'truncate' END),
        CASE WHEN {_LEFT_OUT} THEN NULL WHEN p.puballtables THEN 'all tables' WHEN r.oid IS NOT NULL THEN r.oid::text
             ELSE (SELECT 'schema ' || s.oid FROM pg_publication_namespace s
                   WHERE s.pnpubid = p.oid AND s.pnnspid = c.relnamespace) END,
        coalesce(to_jsonb(r) ->> 'prqual', ''), coalesce(to_jsonb(r) ->> 'prattrs', ''))
    FROM pg_publication p LEFT JOIN pg_publication_rel r ON r.prpubid = p.oid AND r.prrelid = c.oid
    WHERE p.pubname = %(publication)s
"""
# the topmost published ancestor, as pgoutput chooses it
_SENT_NAME: Final = f"""
    SELECT format('%%s.%%s', quote_ident(an.nspname), quote_ident(ac.relname))
    FROM pg_publication p CROSS JOIN pg_partition_ancestors(c.oid) WITH ORDINALITY up (relid, step)
    JOIN pg_class ac ON ac.oid = up.relid JOIN pg_namespace an ON an.oid = ac.relnamespace
    WHERE p.pubname = %(publication)s AND p.pubviaroot AND up.step > 1
    AND NOT {_LEFT_OUT} AND (p.puballtables
         OR EXISTS (SELECT FROM pg_publication_namespace s WHERE s.pnpubid = p.oid AND s.pnnspid = ac.relnamespace)
         OR EXISTS (SELECT FROM pg_publication_rel r WHERE r.prpubid = p.oid AND r.prrelid = up.relid))
    ORDER BY up.step DESC LIMIT 1
"""
_STATES: Final = f"""
    SELECT c.oid, n.nspname, c.relname, c.relpersistence::text, c.relfilenode::bigint,
           ({_COLUMNS}), CASE WHEN c.relkind = 'p' THEN ({_LEAVES}) END, ({_PUBLISHED}),
           CASE WHEN c.relispartition THEN ({_SENT_NAME}) END, ({WITNESS})
    FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace WHERE c.oid = ANY(%(oids)s)
"""
_MEMBER: Final = 4
"""Index in `CatalogFingerprint.published` of the value that states why the publication contains the table.

The value is `all tables`, the OID of a row of `pg_publication_rel`, or `schema` and the OID of a row of
`pg_publication_namespace`.
"""


@dataclass(frozen=True, slots=True)
class CatalogState:
    """State of one table in the system catalogs: a fingerprint, and facts that explain a difference."""

    schema: str
    name: str
    fingerprint: CatalogFingerprint
    labels: Mapping[int, tuple[str, ...]]
    """Enum labels of columns, by attribute number."""
    filled: frozenset[int]
    """Attribute numbers of columns without `attmissingval`: if ADD COLUMN rewrote the table, old rows may have values.

    Whether the column has a default now proves nothing, because the default may have been dropped since.
    """
    emptied: Mapping[int, str]
    """OID → xmin of its `pg_class` row, for each leaf partition with `reltuples` = -1, as after TRUNCATE."""
    attached: frozenset[int]
    """OIDs of the leaf partitions that contain rows and were separate tables before they were attached.

    `check_attached` removes the partitions that were empty then.
    """
    stored: frozenset[int]
    """Attribute numbers of columns that are not generated."""
    unlogged: bool
    publication: str
    sent_as: str | None
    """Partitioned table under whose name the table's changes are sent; None if under its own name."""
    witness: str | None


def read_catalog_states(
    conn: psycopg.Connection, oids: Sequence[int], publication: str | None
) -> dict[int, CatalogState]:
    """Return the states of the tables that still exist, by OID.

    One statement reads them, so that they are consistent.
    """
    with map_errors():
        rows = conn.execute(_STATES.encode(), {"oids": list(oids), "publication": publication}).fetchall()
    return {row[0]: _state(row[1:], publication or "") for row in rows}


def _state(row: Sequence[Any], publication: str) -> CatalogState:
    schema, name, persistence, file, columns, leaves, published, sent_as, witness = row
    columns, leaves = columns or [], leaves or []
    unlogged = persistence == "u" or any(leaf[2] == "u" for leaf in leaves)
    return CatalogState(
        schema=schema,
        name=name,
        fingerprint=CatalogFingerprint(
            persistence="u" if unlogged else persistence,
            file=file,
            attributes=tuple((number, xmin) for number, xmin, missing, *_ in columns if not missing),
            leaves=tuple((leaf[0], leaf[1]) for leaf in leaves),
            links=tuple((leaf[0], leaf[6]) for leaf in leaves),
            published=None if published is None or published[_MEMBER] is None else tuple(published),
        ),
        labels={number: tuple(labels) for number, *_, labels in columns if labels},
        filled=frozenset(number for number, _, missing, filled, *_ in columns if filled and not missing),
        stored=frozenset(number for number, _, _, _, stored, _ in columns if stored),
        emptied={leaf[0]: leaf[4] for leaf in leaves if leaf[3]},
        attached=frozenset(leaf[0] for leaf in leaves if leaf[5]),
        unlogged=unlogged,
        publication=publication,
        sent_as=sent_as,
        witness=witness,
    )


def check_attached(conn: psycopg.Connection, known: TableSchema, now: CatalogState) -> CatalogState:
    """Return the state without those new attached leaf partitions that were empty when they were attached.

    A partition whose rows the role cannot read, or whose rows prove nothing, stays in the state.
    """
    before = known.standing
    if before is None:
        return now
    new = {leaf for leaf, _ in now.fingerprint.leaves} - {leaf for leaf, _ in before.leaves}
    filled_later = {leaf for leaf in sorted(new & now.attached) if not _may_have_had_rows(conn, leaf)}
    return replace(now, attached=now.attached - filled_later)


def _may_have_had_rows(conn: psycopg.Connection, leaf: int) -> bool:
    """Return False if every row of the leaf partition was inserted after its attachment, so that the stream has it."""
    with map_errors():
        try:
            name = conn.execute(_READABLE, [leaf]).fetchone()
            if name is None:
                return True
            query = sql.SQL(_OLDER_ROW).format(oid=sql.Literal(leaf), table=sql.Identifier(*name))
            with conn.transaction():
                conn.execute(sql.SQL("SET LOCAL statement_timeout = {}").format(sql.Literal(_SEARCH_WITHIN)))
                row = conn.execute(query).fetchone()
        except psycopg.Error:
            if conn.closed:
                raise
            # the time limit; or the partition was dropped meanwhile, or its access method has no transaction ids
            return True
    return row is None or bool(row[0])


def find_divergence(known: TableSchema, now: CatalogState, before: TableSchema | None = None) -> str | None:
    """Return the reason why rows of the log may differ from the source; None if there is no such reason.

    before: the version that `known` follows, if `known` is new; columns that only `known` has were added. The function
    compares `now` with the fingerprint `known.standing`. If `known.standing` is None, the function detects
    only renamed enum labels, columns that are no longer generated, and unlogged tables.
    """
    return next(_reasons(known, now, known if before is None else before), None)


def _reasons(known: TableSchema, now: CatalogState, earlier: TableSchema) -> Iterator[str]:
    numbered = known.relation & 0xFFFFFFFF == known.oid  # ids are attnums inside the first epoch
    for column in known.columns if numbered else ():
        if not column.keeps_labels(now.labels.get(column.id, ())):
            yield f"enum labels of column {column.name!r} were renamed"
        if column.generated and column.id in now.stored:
            yield f"column {column.name!r} is no longer generated: the stream has no values for old rows"
    if now.unlogged:
        yield "the table, or a partition of it, is unlogged: its rows are not in the stream"
    before = known.standing
    if before is None:
        return
    if before.persistence == "u":
        yield "the table was unlogged: rows written in that time are not in the stream"
    if known.witness is None or known.witness != now.witness:  # otherwise a DDL message reports every rewrite
        yield from _rewrite_reasons(earlier, before, now)
    yield from _leaf_reasons(before, now)
    if now.publication and before.published != now.fingerprint.published:
        yield from _publication_reasons(before.published, now)


def _rewrite_reasons(known: TableSchema, before: CatalogFingerprint, now: CatalogState) -> Iterator[str]:
    files, leaves = now.fingerprint.file, dict(now.fingerprint.leaves)
    if before.file == files and all(leaves.get(leaf, file) == file for leaf, file in before.leaves):
        return
    names = {column.id: column.name for column in known.columns}
    xmins = dict(now.fingerprint.attributes)
    for number, xmin in before.attributes:
        if xmins.get(number, xmin) != xmin:
            name = names.get(number, number)
            yield f"the table was rewritten and column {name!r} was altered: its stored values may have changed"
    highest = max((number for number, _ in before.attributes), default=0)
    if any(number > highest and number not in names for number in now.filled):
        yield "the table was rewritten and a column was added with values for old rows"


def _leaf_reasons(before: CatalogFingerprint, now: CatalogState) -> Iterator[str]:
    was, leaves = dict(before.leaves), dict(now.fingerprint.leaves)
    if removed := sorted(was.keys() - leaves.keys()):
        yield f"partitions were detached or dropped with their rows: OID {', '.join(map(str, removed))}"
    if attached := sorted((leaves.keys() - was.keys()) & now.attached):
        yield f"partitions were attached with rows: OID {', '.join(map(str, attached))}"
    links = dict(now.fingerprint.links)
    if reattached := [leaf for leaf, xmins in before.links if links.get(leaf, xmins) != xmins]:
        yield f"partitions were detached and attached again: OID {', '.join(map(str, reattached))}"
    common = was.keys() & leaves.keys()
    emptied = {leaf for leaf in common if leaves[leaf] != was[leaf] and leaf in now.emptied}
    # a truncate of the root empties all leaves in one transaction, and the stream contains it
    if emptied and not (emptied == common and len({now.emptied[leaf] for leaf in emptied}) == 1):
        yield f"partitions were truncated, but not the whole table: OID {', '.join(map(str, sorted(emptied)))}"


def _publication_reasons(before: tuple[str, ...] | None, now: CatalogState) -> Iterator[str]:
    after = now.fingerprint.published
    if after is None:
        yield f"publication {now.publication!r} no longer contains the table"
        return
    if before is None:
        return
    oid, xmin, title, actions, member, rows, columns = before
    for was, becomes, what in (
        (oid, after[0], "was created again"),
        (actions, after[3], f"now publishes {after[3] or 'nothing'}"),
        (rows, after[5], "changed its row filter for the table"),
        (columns, after[6], "changed its column list for the table"),
        (member, after[_MEMBER], "removed the table and added it again"),
    ):
        if was != becomes:
            yield f"publication {now.publication!r} {what}: changes may be missing"
            return
    if xmin != after[1] and title == after[2]:
        yield f"publication {now.publication!r} was altered, and perhaps altered back: changes may be missing"
