"""Kinds of tables, and what is done to each while it is copied."""

from __future__ import annotations

from dataclasses import dataclass
from typing import LiteralString


@dataclass(frozen=True)
class Kind:
    """A table, and what is done to it, a statement at a time, while it is copied."""

    setup: tuple[LiteralString, ...]
    during: tuple[LiteralString, ...] = ()
    names: tuple[tuple[str, str], ...] = (("public", "t"),)
    """Schema and name of all that are looked at; of the first the most."""
    rows: int = 20
    """Of a chunk."""
    tables: str = "public.*"
    parallel: int = 2
    chunks: int = 4
    """That it takes at least."""


PLAIN: LiteralString = "CREATE TABLE t (id int PRIMARY KEY, v text, long text)"
LONG: LiteralString = "ALTER TABLE t ALTER long SET STORAGE EXTERNAL"
FILL: LiteralString = "INSERT INTO t SELECT i, repeat('v', 400), repeat('x', 2500) || i FROM generate_series(1, 120) i"
WRITES: tuple[LiteralString, ...] = (
    "UPDATE t SET v = 'short' WHERE id % 7 = 0",
    "UPDATE t SET id = id + 1000 WHERE id % 13 = 0",
    "UPDATE t SET long = 'other' || id, v = repeat('w', 500) WHERE id % 5 = 0",
    "DELETE FROM t WHERE id % 11 = 0",
    "INSERT INTO t SELECT i, 'new', repeat('y', 2500) FROM generate_series(500, 540) i",
    "UPDATE t SET v = repeat('z', 500) WHERE id > 60",
)
KEY: LiteralString = "name, n::text, u::text, d::text"
COMPUTED: LiteralString = """
    CREATE TABLE t (id int PRIMARY KEY, n int GENERATED ALWAYS AS (length(v)) STORED, v text,
    long text, upper text GENERATED ALWAYS AS (upper(v)) STORED)
"""
FILL_COMPUTED: LiteralString = FILL.replace("INTO t", "INTO t (id, v, long)")
ODD_KEYS: tuple[LiteralString, ...] = (
    # where the server is built with ICU, keys that differ in their text are equal
    """DO $$ BEGIN CREATE COLLATION caseless (provider = icu, locale = 'und-u-ks-level2', deterministic = false);
    EXCEPTION WHEN feature_not_supported THEN CREATE COLLATION caseless (provider = libc, locale = 'C.utf8');
    END $$""",
    """CREATE TABLE t (d date, v text, name text COLLATE caseless, u uuid, long text, n numeric,
    PRIMARY KEY (name, n, u, d))""",
    LONG,
    """INSERT INTO t SELECT d, repeat('v', 300), name, md5(name || n || d)::uuid, repeat('x', 2500) || name, n
    FROM unnest('{"", a, B, c, Ä, z, " ", "a,b", "q\\"", 🐘}'::text[]) name,
    unnest('{NaN, Infinity, -Infinity, 1.0, -0.5}'::numeric[]) n,
    unnest('{infinity, -infinity, 2024-02-29, 0044-03-15 BC}'::date[]) d""",
)
KINDS: dict[str, Kind] = {
    "partitioned": Kind(
        (
            """CREATE TABLE t (region text, id int, v text, long text, PRIMARY KEY (region, id))
            PARTITION BY LIST (region)""",
            LONG,
            "CREATE TABLE t_a PARTITION OF t FOR VALUES IN ('a')",
            # of another order of columns, and one that was dropped
            "CREATE TABLE t_b (gone int, long text, v text, id int NOT NULL, region text NOT NULL)",
            "ALTER TABLE t_b DROP gone",
            "ALTER TABLE t ATTACH PARTITION t_b FOR VALUES IN ('b')",
            "CREATE TABLE t_c PARTITION OF t FOR VALUES IN ('c', 'd') PARTITION BY RANGE (id)",
            "CREATE TABLE t_c_low PARTITION OF t_c FOR VALUES FROM (0) TO (60)",
            "CREATE TABLE t_c_high PARTITION OF t_c FOR VALUES FROM (60) TO (100000)",
            "CREATE TABLE t_rest PARTITION OF t DEFAULT",
            """INSERT INTO t SELECT substr('abcdz', i % 5 + 1, 1), i, repeat('v', 300), repeat('x', 2500) || i
            FROM generate_series(0, 119) i""",
        ),
        (
            "UPDATE t SET region = 'b' WHERE region = 'a' AND id < 40",
            "UPDATE t SET region = 'a' WHERE region = 'z' AND id > 90",
            "UPDATE t SET id = id + 1000 WHERE region = 'c' AND id < 30",
            "UPDATE t SET v = 'short' WHERE id % 7 = 0",
            "UPDATE t SET region = 'c' WHERE region = 'b' AND id % 3 = 0",
            "DELETE FROM t WHERE id % 11 = 0",
            "INSERT INTO t SELECT 'e', i, 'new', repeat('y', 2500) FROM generate_series(1, 9) i",
            "UPDATE t SET region = 'd', v = 'moved' WHERE region = 'a'",
        ),
        chunks=6,
    ),
    "inherited": Kind(
        (
            PLAIN,
            LONG,
            "CREATE TABLE child (more text, PRIMARY KEY (id)) INHERITS (t)",
            "CREATE TABLE grandchild (PRIMARY KEY (id)) INHERITS (child)",
            FILL,
            "INSERT INTO child SELECT id, v, 'c' || long, 'more' FROM t WHERE id % 2 = 0",
            "INSERT INTO grandchild SELECT id, v, 'g' || long, 'most' FROM ONLY t WHERE id % 3 = 0",
        ),
        (*WRITES, "DELETE FROM ONLY t WHERE id < 20", "UPDATE child SET long = 'short' WHERE id < 50"),
        names=(("public", "t"), ("public", "child"), ("public", "grandchild")),
    ),
    "filtered, some columns": Kind(
        (
            "CREATE TABLE t (id int, secret text, open bool, v text, long text, PRIMARY KEY (id, open))",
            LONG,
            "CREATE PUBLICATION cdc_held_pub FOR TABLE t (id, open, v, long) WHERE (open)",
            """INSERT INTO t SELECT i, 'secret', i % 3 <> 0, repeat('v', 400), repeat('x', 2500) || i
            FROM generate_series(1, 240) i""",
        ),
        (
            "UPDATE t SET open = NOT open WHERE id % 5 = 0",
            "UPDATE t SET v = 'short' WHERE id % 7 = 0",
            "UPDATE t SET open = NOT open, v = 'turned' WHERE id % 4 = 0",
            "UPDATE t SET secret = 'other' WHERE id % 11 = 0",
            "DELETE FROM t WHERE id % 13 = 0",
            "UPDATE t SET open = NOT open WHERE id % 5 = 0",
        ),
    ),
    "filtered by what is no key": Kind(
        (
            PLAIN,
            LONG,
            "ALTER TABLE t REPLICA IDENTITY FULL",
            "CREATE PUBLICATION cdc_held_pub FOR TABLE t WHERE (v < 'm')",
            """INSERT INTO t SELECT i, repeat(substr('az', i % 2 + 1, 1), 400), repeat('x', 2500) || i
            FROM generate_series(1, 200) i""",
        ),
        (
            "UPDATE t SET v = 'out ' || v WHERE id % 3 = 0",
            "UPDATE t SET v = 'in ' || v WHERE id % 5 = 0",
            "UPDATE t SET id = id + 1000 WHERE id % 7 = 0",
            "UPDATE t SET v = 'z' WHERE id % 11 = 0",
            "DELETE FROM t WHERE id % 13 = 0",
            "UPDATE t SET v = 'a' WHERE v >= 'm' AND id < 100",
        ),
    ),
    "computed": Kind(
        (
            COMPUTED,
            LONG,
            FILL_COMPUTED,
        ),
        WRITES[:4],
    ),
    "computed, and sent": Kind(
        (
            COMPUTED,
            LONG,
            "CREATE PUBLICATION cdc_held_pub FOR TABLE t WITH (publish_generated_columns = stored)",
            FILL_COMPUTED,
        ),
        WRITES[:4],
    ),
    "inherited, the child is not wanted": Kind(
        (
            PLAIN,
            LONG,
            "CREATE TABLE child (PRIMARY KEY (id)) INHERITS (t)",
            FILL,
            "INSERT INTO child SELECT id, v, 'c' || long FROM t WHERE id % 2 = 0",
        ),
        WRITES,
        tables="public.t",
    ),
    "odd names": Kind(
        (
            'CREATE SCHEMA "Sch. ""é"" 🐘"',
            """CREATE TYPE "Sch. ""é"" 🐘"."Mo od.""s" AS ENUM ('a b', 'c"d', '🐘')""",
            """CREATE TABLE "Sch. ""é"" 🐘"."Ta, ""b.le* [x]" ("Id. 1" int, "select" text, "na""ïve 🐘" text,
            "a b" "Sch. ""é"" 🐘"."Mo od.""s", "%s {}" text, PRIMARY KEY ("select", "Id. 1"))""",
            """ALTER TABLE "Sch. ""é"" 🐘"."Ta, ""b.le* [x]" ALTER "na""ïve 🐘" SET STORAGE EXTERNAL""",
            """INSERT INTO "Sch. ""é"" 🐘"."Ta, ""b.le* [x]"
            SELECT i, 'k. "' || i % 7, repeat('x', 2500) || i, 'c"d', repeat('v', 400)
            FROM generate_series(1, 100) i""",
        ),
        (
            """UPDATE "Sch. ""é"" 🐘"."Ta, ""b.le* [x]" SET "a b" = '🐘' WHERE "Id. 1" % 3 = 0""",
            """UPDATE "Sch. ""é"" 🐘"."Ta, ""b.le* [x]" SET "select" = '🐘' WHERE "Id. 1" % 5 = 0""",
            """DELETE FROM "Sch. ""é"" 🐘"."Ta, ""b.le* [x]" WHERE "Id. 1" % 7 = 0""",
        ),
        names=(('Sch. "é" 🐘', 'Ta, "b.le* [x]'),),
        tables="*.*",
    ),
    "odd keys": Kind(
        ODD_KEYS,
        (
            "UPDATE t SET v = 'short' WHERE n = 'NaN'",
            "UPDATE t SET n = 'NaN' WHERE n = 1",
            "UPDATE t SET name = upper(name) WHERE name IN ('a', 'c')",
            "UPDATE t SET n = -0.50 WHERE n = -0.5",
            "UPDATE t SET d = '2024-03-01' WHERE d = 'infinity' AND n = 'NaN'",
            "DELETE FROM t WHERE name = 'Z'",
        ),
    ),
    "wide values": Kind(
        (
            PLAIN,
            LONG,
            # first a block of them all, then four in each
            "INSERT INTO t SELECT i, 'v', repeat('x', 1000000) || i FROM generate_series(1, 30) i",
            "INSERT INTO t SELECT i, repeat('v', 1900), repeat('x', 1000000) || i FROM generate_series(31, 40) i",
        ),
        (
            "UPDATE t SET v = repeat('w', 1900) WHERE id % 3 = 0",
            "UPDATE t SET id = id + 1000 WHERE id % 7 = 0",
            "UPDATE t SET long = repeat('y', 1500000) WHERE id % 10 = 0",
            "DELETE FROM t WHERE id % 13 = 0",
        ),
        rows=50_000,
        chunks=4,
    ),
    "1,000 columns": Kind(
        (
            """DO $$ BEGIN EXECUTE 'CREATE TABLE t (id int PRIMARY KEY, long text, ' ||
            (SELECT string_agg('c' || n || ' int', ', ') FROM generate_series(1, 998) n) || ')'; END $$""",
            LONG,
            """DO $$ BEGIN EXECUTE 'INSERT INTO t SELECT i, repeat(''x'', 2500) || i, ' ||
            (SELECT string_agg('nullif(i % ' || n || ', 1)', ', ') FROM generate_series(1, 998) n) ||
            ' FROM generate_series(1, 60) i'; END $$""",
        ),
        (
            "UPDATE t SET c1 = 7, c998 = 8 WHERE id % 3 = 0",
            "UPDATE t SET id = id + 1000 WHERE id % 7 = 0",
            "DELETE FROM t WHERE id % 13 = 0",
        ),
        rows=5,
    ),
    "empty": Kind((PLAIN, LONG), (FILL, WRITES[0], WRITES[1]), chunks=0),
    "empty to the end": Kind((PLAIN, LONG), chunks=0),
    "half of the blocks empty, beside what writes no WAL": Kind(
        (
            PLAIN,
            LONG,
            FILL.replace("120", "1600"),
            "DELETE FROM t WHERE id < 800",
            "VACUUM t",
            "CREATE UNLOGGED TABLE unlogged (id int PRIMARY KEY, v text)",
            "INSERT INTO unlogged SELECT id, v FROM t",
        ),
        (WRITES[5], WRITES[3], "UPDATE unlogged SET v = ''"),
    ),
    "shorter, then longer": Kind(
        (PLAIN, LONG, FILL.replace("120", "1000")),
        (
            "DELETE FROM t WHERE id > 200",
            "VACUUM t",
            "SELECT 1 / (pg_relation_size('t') < 30 * 8192)::int",
            "UPDATE t SET v = repeat('u', 500) WHERE id < 100",
            "INSERT INTO t SELECT i, repeat('n', 400), repeat('y', 2500) FROM generate_series(2000, 2900) i",
            "UPDATE t SET v = repeat('z', 500) WHERE id > 2500",
        ),
        parallel=1,
        chunks=2,
    ),
}
