"""Every value is the text that Postgres prints, byte for byte, through the copy and through both decoders.

Postgres is the oracle. Known limits, each of them an error and none a changed value: a `bytea` of 512 MiB and
more cannot be sent as text, nor can a row of 1 GiB (`test_large_values`).
"""

from __future__ import annotations

import json
import re

import pytest
from hypothesis import HealthCheck, Phase, given
from hypothesis import strategies as st
from psycopg import sql

from cdc.pgoutput.columnar_decoder import ColumnarDecoder
from cdc.pgoutput.reference_decoder import ReferenceDecoder
from cdc.postgres.connection import connect
from tests.fixtures.examples import examples
from tests.fixtures.postgres import rows_of, run_sql
from tests.postgres.four_readings import Texts, capture_stream, read_four_ways
from tests.postgres.samples import COMPUTED, EXTENSIONS, ODD_TEXT, SAMPLES, SINCE_19

_BASE_TYPES = """
    SELECT format_type(oid, NULL) FROM pg_type
    WHERE typnamespace = 'pg_catalog'::regnamespace AND typtype IN ('b', 'r', 'm') AND typcategory <> 'A'
"""


def literal(value: str | None) -> str:
    """The value as an SQL literal."""
    return sql.Literal(value).as_string(None)


def inserts(table: str, kind: str, values: tuple[str, ...], *, arrays: bool = True) -> list[str]:
    """A row for NULL, one for each value, and one with an array of them all."""
    rows = [f"INSERT INTO {table} (v) VALUES ({literal(value)})" for value in values]
    elements = ", ".join([*(f"{literal(value)}::{kind}" for value in values), "NULL", "NULL::text::" + kind])
    array = [f"INSERT INTO {table} (a) VALUES (ARRAY[{elements}]::{kind}[])"] if arrays else []
    return [f"INSERT INTO {table} DEFAULT VALUES", *rows, *array]


def supported(dsn: str) -> dict[str, tuple[str, ...]]:
    """The samples that this server takes: xml is an option of its build, an endless interval came with 17."""
    samples = dict(SAMPLES)
    with connect(dsn) as conn:
        if conn.info.server_version >= 170000:
            samples["interval"] += ("infinity", "-infinity")
        if conn.info.server_version >= 190000:
            samples |= SINCE_19
        if not conn.execute("SELECT 1 FROM pg_config() WHERE setting LIKE '%--with-libxml%'").fetchone():
            del samples["xml"]
    return samples


def test_every_base_type_has_samples(database_of_each_release: str):
    named = {name for (name,) in rows_of(database_of_each_release, _BASE_TYPES)}
    with connect(database_of_each_release) as conn:
        kinds = [*SAMPLES, *supported(database_of_each_release), *COMPUTED]
        sampled = {conn.execute("SELECT format_type(%s::regtype, NULL)", [kind]).fetchone() for kind in kinds}
    assert named - {row[0] for row in sampled if row} == set()


def test_every_sample_of_every_base_type_is_exact(database_of_each_release: str):
    samples = supported(database_of_each_release)
    tables = {kind: f"t{number}" for number, kind in enumerate(samples)}
    run_all(
        database_of_each_release, [f"CREATE TABLE {table} (v {kind}, a {kind}[])" for kind, table in tables.items()]
    )
    statements = [text for kind, table in tables.items() for text in inserts(table, kind, samples[kind])]
    agreed = read_four_ways(database_of_each_release, statements).agree()
    assert {topic: len(rows) for topic, rows in agreed.items()} == {
        f"public.{tables[kind]}": len(values) + 2 for kind, values in samples.items()
    }
    assert single(agreed, f"public.{tables['json']}")[1:-1] == [text.encode() for text in samples["json"]]
    assert single(agreed, f"public.{tables['text']}")[1:-1] == [text.encode() for text in ODD_TEXT]
    assert b"1.2300" in single(agreed, f"public.{tables['numeric']}")


def test_types_without_input_are_exact(either_database: str):
    run_sql(
        either_database,
        "CREATE TABLE seen (a int, b int)",
        "INSERT INTO seen SELECT n % 10, n % 5 FROM generate_series(1, 100) n",
        "CREATE STATISTICS sight (ndistinct, dependencies, mcv) ON a, b FROM seen",
        "ANALYZE seen",
        "CREATE SCHEMA made",
    )
    run_all(either_database, [f"CREATE TABLE made.{kind} (v {kind})" for kind in COMPUTED])
    statements = [f"INSERT INTO made.{kind} SELECT {expression}" for kind, expression in COMPUTED.items()]
    agreed = read_four_ways(either_database, statements, "made.*").agree()
    assert {kind for kind in COMPUTED if single(agreed, f"made.{kind}") != [None]} == {
        "pg_node_tree",
        "pg_ndistinct",
        "pg_dependencies",
        "pg_mcv_list",
    }


def test_types_of_extensions_are_exact(any_database: str):
    with connect(any_database) as conn:
        packed = {name for (name,) in conn.execute("SELECT name FROM pg_available_extensions").fetchall()}
    kinds = {kind: values for name in EXTENSIONS.keys() & packed for kind, values in EXTENSIONS[name].items()}
    if not kinds:
        pytest.skip("the server was packed without extensions")
    run_all(any_database, [f"CREATE EXTENSION {name}" for name in EXTENSIONS.keys() & packed])
    run_all(any_database, [f"CREATE TABLE of_{kind} (v {kind}, a {kind}[])" for kind in kinds])
    statements = [text for kind, values in kinds.items() for text in inserts(f"of_{kind}", kind, values)]
    agreed = read_four_ways(any_database, statements, "public.of_*").agree()
    for kind, values in kinds.items():
        assert len(agreed[f"public.of_{kind}"]) == len(values) + 2


MADE_TYPES = (
    "CREATE TYPE mood AS ENUM ('sad', 'it''s \"fine\"', '{,}', 'NULL', '')",
    "CREATE TYPE pair AS (n int, t text)",
    'CREATE TYPE nest AS (p pair, "odd ""name" mood, ps pair[], d date)',
    "CREATE DOMAIN small AS int CHECK (value < 100)",
    "CREATE DOMAIN smaller AS small",
    "CREATE DOMAIN tags AS text[]",
    "CREATE DOMAIN person AS pair",
    "CREATE TYPE spans AS RANGE (subtype = text, multirange_type_name = manyspans)",
    "CREATE TYPE bare AS ()",
)
COMPOSED = {
    "pair": ("(,)", '(1,"")', '(,"a,b(""x"")\\\\ ")', '(-1,"\n\t")', "(2,NULL)"),
    "nest": ('("(1,""a"",)")', "(,,,)"),
    "mood": ("sad", 'it\'s "fine"', "{,}", "NULL", ""),
    "small": ("7",),
    "smaller": ("8",),
    "tags": ('{a,NULL,"NULL","",",","{}"}', "{}"),
    "person": ('(5,"x y")', "(,)"),
    "spans": ("empty", '["a,b","c\\"d\\\\"]', '("",)'),
    "manyspans": ("{}", '{["[","]")}'),
    "bare": ("()",),
    "pair[]": ('{"(1,\\"a \\\\\\"q\\\\\\"\\")",NULL,"(,)"}',),
    "tags[]": ('{"{a,\\"b c\\"}",NULL}',),
    "text[]": (
        '{NULL,"NULL","null","",",","{}","\\\\","\\"","\t\n"," x ",é}',
        "{}",
        "{{a,b},{c,NULL}}",
        "[0:1]={7,8}",
        "[-2:-1][5:6]={{a,b},{c,d}}",
        "{{{{{{a,b}}}}}}",
    ),
    "int4range[]": ('{empty,"[1,2)",NULL,"(,)"}',),
    "int2[]": ("[-2147483648:-2147483647]={1,2}",),
}


def test_composed_values_are_exact(either_database: str):
    run_sql(either_database, *MADE_TYPES)
    samples = {kind: tuple(v for v in values if kind != "nest" or v == "(,,,)") for kind, values in COMPOSED.items()}
    tables = {kind: f"t{number}" for number, kind in enumerate(samples)}
    run_all(either_database, [f"CREATE TABLE {t} (v {k}, a {k.removesuffix('[]')}[])" for k, t in tables.items()])
    statements = [
        text
        for kind, table in tables.items()
        for text in inserts(table, kind, samples[kind], arrays=not kind.endswith("[]"))
    ]
    nested = "ROW(ROW(1, 'a\"b'), 'it''s \"fine\"', ARRAY[ROW(2, NULL), NULL]::pair[], NULL)::nest"
    statements.append(f"INSERT INTO {tables['nest']} VALUES ({nested}, ARRAY[{nested}])")
    agreed = read_four_ways(either_database, statements).agree()
    assert single(agreed, f"public.{tables['pair']}")[1:4] == [b"(,)", b'(1,"")', b'(,"a,b(""x"")\\\\ ")']
    assert b"[0:1]={7,8}" in single(agreed, f"public.{tables['text[]']}")


def test_enum_values_that_are_newer_than_the_stream_are_exact(either_database: str):
    run_sql(either_database, "CREATE TYPE mood AS ENUM ('old')", "CREATE TABLE t (v mood)")
    added = ["INSERT INTO t VALUES ('old')", "ALTER TYPE mood ADD VALUE 'new'", "INSERT INTO t VALUES ('new')"]
    assert single(read_four_ways(either_database, added).agree(), "public.t") == [b"old", b"new"]
    # Postgres itself refuses an added value until it is committed, unless the type is of this very transaction
    within = (
        "BEGIN; CREATE TYPE fresh AS ENUM ('b'); ALTER TABLE t ADD f fresh; INSERT INTO t VALUES ('new', 'b'); COMMIT"
    )
    with capture_stream(either_database) as capture:
        run_all(either_database, [within])
        frames = capture.frames()
        for decoder in (ReferenceDecoder(), ColumnarDecoder()):
            assert [row["after"] for row in capture.rows(decoder, frames).to_pylist()] == [[(1, "new"), (2, "b")]]


def test_tables_of_no_column_and_of_as_many_as_postgres_takes_are_exact(either_database: str):
    columns = ", ".join(f"c{number} int" for number in range(1600))
    values = ", ".join("NULL" if number % 7 == 0 else str(number) for number in range(1600))
    run_all(either_database, ["CREATE TABLE none ()", f"CREATE TABLE wide ({columns})"])
    statements = ["INSERT INTO none DEFAULT VALUES", f"INSERT INTO wide VALUES ({values})"] * 2
    agreed = read_four_ways(either_database, statements).agree()
    assert agreed["public.none"] == [(), ()]
    assert [len(row) for row in agreed["public.wide"]] == [1600, 1600]
    assert agreed["public.wide"][0][:3] == (None, b"1", b"2")


HOSTILE = {
    "datestyle": "German, DMY",
    "intervalstyle": "iso_8601",
    "extra_float_digits": "-15",
    "bytea_output": "escape",
    "timezone": "Asia/Kolkata",
    "lc_monetary": "C",
    "client_encoding": "LATIN1",
    "xmlbinary": "hex",
    "quote_all_identifiers": "on",
    "array_nulls": "on",
    "standard_conforming_strings": "on",
    "statement_timeout": "2000",
    "lock_timeout": "1000",
}


def test_settings_of_database_and_role_change_no_value(either_database: str):
    database = either_database.rpartition("/")[2]
    run_sql(
        either_database,
        "CREATE TABLE t (d date, i interval, f float8, g float4, b bytea, z timestamptz, m money, r regclass, e text)",
    )
    hostile = [f"ALTER DATABASE {database} SET {name} TO {literal(value)}" for name, value in HOSTILE.items()]
    role = [f"ALTER ROLE postgres IN DATABASE {database} SET datestyle TO 'SQL, DMY'"]
    run_all(either_database, [line.replace("'German, DMY'", "German, DMY") for line in hostile + role])
    row = "'2024-02-03', '1 mon -2 days 3 sec', 0.1, 1.1, '\\x00ff5c', '2024-02-03 00:00Z', 1.5, 'pg_class', 'é€漢'"
    agreed = read_four_ways(either_database, [f"INSERT INTO t VALUES ({row})"]).agree()
    told = [text.decode() for text in agreed["public.t"][0] if text]
    assert told == [
        "2024-02-03",
        "1 mon -2 days +00:00:03",
        "0.1",
        "1.1",
        "\\x00ff5c",
        "2024-02-03 00:00:00+00",
        "$1.50",
        "pg_class",
        "é€漢",
    ]


_text = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=30)
_json = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | _text,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_text, inner, max_size=3),
    max_leaves=8,
)
_moment = st.datetimes().map(lambda moment: moment.isoformat(" "))


def array_literal(items: list[str | None]) -> str:
    """An array literal with every element quoted."""
    quoted = ["NULL" if item is None else '"' + re.sub(r'(["\\\\])', r"\\\1", item) + '"' for item in items]
    return "{" + ",".join(quoted) + "}"


GENERATED = {
    "text": _text,
    "int8": st.integers(-(2**63), 2**63 - 1).map(str),
    "numeric": st.decimals(-(10**40), 10**40, places=17).map(str)
    | st.sampled_from(["NaN", "-Infinity", "1E-999", "-7E+999"]),
    "float8": st.floats().map(repr),
    "float4": st.floats(width=32).map(repr),
    "bool": st.sampled_from(["true", "false"]),
    "bytea": st.binary(max_size=40).map(lambda raw: "\\x" + raw.hex()),
    "date": st.dates().map(str),
    "timestamp": _moment,
    "timestamptz": _moment.map(lambda text: text + "+05:30"),
    "interval": st.tuples(*[st.integers(-9999, 9999)] * 3).map("{0[0]} mons {0[1]} days {0[2]} microseconds".format),
    "uuid": st.uuids().map(str),
    "json": _json.map(json.dumps),
    "jsonb": _json.map(lambda value: json.dumps(value, ensure_ascii=False)),
    "text[]": st.lists(st.none() | _text, max_size=4).map(array_literal),
    "inet": st.ip_addresses().map(str),
    "varbit": st.text("01", max_size=20),
}


def test_generated_values_are_exact(either_database: str):
    kinds = list(GENERATED)
    row = st.tuples(*[st.none() | values for values in GENERATED.values()])

    @examples(4, phases=[Phase.generate], database=None, suppress_health_check=list(HealthCheck))
    @given(st.lists(row, min_size=1, max_size=25))
    def exact(rows: list[tuple[str | None, ...]]) -> None:
        columns = ", ".join(f"c{place} {kind}" for place, kind in enumerate(kinds))
        run_all(either_database, ["DROP TABLE IF EXISTS g", f"CREATE TABLE g ({columns})"])
        values = ", ".join("(" + ", ".join(map(typed, one, kinds)) + ")" for one in rows)
        agreed = read_four_ways(either_database, [f"INSERT INTO g VALUES {values}"]).agree()
        told = single(agreed, "public.g")
        assert told == [None if one[0] is None else one[0].encode() for one in rows]

    exact()


def typed(value: str | None, kind: str) -> str:
    """The value as a literal of that type."""
    return f"{literal(value)}::{kind}"


def run_all(dsn: str, statements: list[str]) -> None:
    """Run statements that the test made."""
    with connect(dsn) as conn:
        for statement in statements:
            conn.execute(statement.encode())


def single(agreed: Texts, topic: str) -> list[bytes | None]:
    """The first column."""
    return [row[0] for row in agreed[topic]]
