"""Workloads: the tables and the fixed WAL of each measurement, made inside the server."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Workload:
    """One kind of WAL: tables that exist before the slots, and statements that write it after."""

    name: str
    setup: tuple[str, ...]
    write: tuple[str, ...]
    changes: int
    """Row changes that the statements make."""

    @property
    def schema(self) -> str:
        """The Postgres schema of its tables."""
        return f"bench_{self.name}"


_TPCB = """
CREATE PROCEDURE {s}.work(n int) LANGUAGE plpgsql AS $$
DECLARE a int; t int; d int;
BEGIN
  FOR i IN 1..n LOOP
    a := 1 + (i::bigint * 7919) % 100000; t := 1 + i % 100; d := i % 1000 - 500;
    UPDATE {s}.accounts SET abalance = abalance + d WHERE aid = a;
    UPDATE {s}.tellers SET tbalance = tbalance + d WHERE tid = t;
    UPDATE {s}.branches SET bbalance = bbalance + d WHERE bid = 1 + t % 10;
    INSERT INTO {s}.history (tid, bid, aid, delta) VALUES (t, 1 + t % 10, a, d);
    COMMIT;
  END LOOP;
END $$
"""
_PACED = """
CREATE PROCEDURE {s}.paced(n int, rate float) LANGUAGE plpgsql AS $$
DECLARE started timestamptz := clock_timestamp(); a int; t int; b int;
BEGIN
  FOR i IN 1..n LOOP
    a := 1 + floor(random() * {accounts}); t := 1 + floor(random() * 100); b := 1 + floor(random() * 10);
    UPDATE {s}.accounts SET abalance = abalance + 1 WHERE aid = a;
    UPDATE {s}.tellers SET tbalance = tbalance + 1 WHERE tid = t;
    UPDATE {s}.branches SET bbalance = bbalance + 1 WHERE bid = b;
    INSERT INTO {s}.history (tid, bid, aid, delta) VALUES (t, b, a, 1);
    COMMIT;
    PERFORM pg_sleep(i / rate - extract(epoch FROM clock_timestamp() - started));
  END LOOP;
END $$
"""


def tpcb(transactions: int, accounts: int = 100_000) -> Workload:
    """The transaction of pgbench: three updates and an insert, each transaction its own commit."""
    s = "bench_tpcb"
    setup = (
        f"CREATE SCHEMA {s}",
        f"CREATE TABLE {s}.accounts (aid int PRIMARY KEY, bid int, abalance int, filler char(84)) WITH (fillfactor=50)",
        f"CREATE TABLE {s}.tellers (tid int PRIMARY KEY, bid int, tbalance int, filler char(84)) WITH (fillfactor=20)",
        f"CREATE TABLE {s}.branches (bid int PRIMARY KEY, bbalance int, filler char(88)) WITH (fillfactor=10)",
        f"""CREATE TABLE {s}.history (id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
            tid int, bid int, aid int, delta int, mtime timestamptz NOT NULL DEFAULT now())""",
        f"INSERT INTO {s}.accounts SELECT i, 1 + i % 10, 0, 'account' FROM generate_series(1, {accounts}) i",
        f"INSERT INTO {s}.tellers SELECT i, 1 + i % 10, 0, 'teller' FROM generate_series(1, 100) i",
        f"INSERT INTO {s}.branches SELECT i, 0, 'branch' FROM generate_series(1, 10) i",
        _TPCB.format(s=s),
        _PACED.format(s=s, accounts=accounts),
    )
    return Workload("tpcb", setup, (f"CALL {s}.work({transactions})",), transactions * 4)


def random_keys(rows: int) -> Workload:
    """One table of so many rows; `paced(n, rate)` makes n transactions that update four rows with random keys each."""
    s = "bench_accounts"
    procedure = f"""
CREATE PROCEDURE {s}.paced(n int, rate float) LANGUAGE plpgsql AS $$
DECLARE started timestamptz := clock_timestamp(); a int;
BEGIN
  FOR i IN 1..n LOOP
    FOR j IN 1..4 LOOP
      a := 1 + floor(random() * {rows});
      UPDATE {s}.accounts SET abalance = abalance + 1 WHERE aid = a;
    END LOOP;
    COMMIT;
    PERFORM pg_sleep(i / rate - extract(epoch FROM clock_timestamp() - started));
  END LOOP;
END $$"""
    setup = (
        f"CREATE SCHEMA {s}",
        f"CREATE TABLE {s}.accounts (aid int PRIMARY KEY, bid int, abalance int, filler char(84))",
        f"INSERT INTO {s}.accounts SELECT i, 1 + i % 10, 0, 'account' FROM generate_series(1, {rows}) i",
        procedure,
    )
    return Workload("accounts", setup, (), 0)


def inserts(rows: int) -> Workload:
    """Rows of mixed types by one INSERT … SELECT."""
    s = "bench_inserts"
    setup = (
        f"CREATE SCHEMA {s}",
        f"""CREATE TABLE {s}.items (id bigint PRIMARY KEY, name text, price numeric(12,2), made timestamptz,
            active boolean, note text)""",
    )
    write = f"""INSERT INTO {s}.items
        SELECT i, 'item ' || i, i % 10000 / 100.0, timestamptz '2026-01-01' + i * interval '1 s',
            i % 3 = 0, md5(i::text)
        FROM generate_series(1, {rows}) i"""
    return Workload("inserts", setup, (write,), rows)


def updates(transactions: int, rows: int = 1_000) -> Workload:
    """Transactions that update one thousand rows each."""
    s = "bench_updates"
    setup = (
        f"CREATE SCHEMA {s}",
        f"""CREATE TABLE {s}.items (id int PRIMARY KEY, state text, amount numeric(12,2), touched int)
            WITH (fillfactor=40)""",
        f"INSERT INTO {s}.items SELECT i, 'new', i, 0 FROM generate_series(1, {rows * 20}) i",
    )
    write = tuple(
        f"UPDATE {s}.items SET touched = touched + 1, state = 'state {i}', amount = amount + 1.5"
        f" WHERE id > {i % 20 * rows} AND id <= {(i % 20 + 1) * rows}"
        for i in range(transactions)
    )
    return Workload("updates", setup, write, transactions * rows)


def wide(rows: int) -> Workload:
    """Rows of one hundred columns, one thousand rows in a transaction."""
    s = "bench_wide"
    types = {
        "bigint": "i * {n}",
        "text": "'column {n} of row ' || i",
        "numeric(12,2)": "i % 10000 / 100.0 + {n}",
        "timestamptz": "timestamptz '2026-01-01' + i * interval '{n} s'",
        "boolean": "i % {n} = 0",
    }
    made = [(f"c{n}", *list(types.items())[n % len(types)]) for n in range(1, 100)]
    columns = ", ".join(f"{name} {kind}" for name, kind, _ in made)
    values = ", ".join(value.format(n=name[1:]) for name, _, value in made)
    setup = (f"CREATE SCHEMA {s}", f"CREATE TABLE {s}.items (id bigint PRIMARY KEY, {columns})")
    write = tuple(
        f"INSERT INTO {s}.items SELECT i, {values} FROM generate_series({first}, {first + 999}::bigint) i"
        for first in range(1, rows, 1_000)
    )
    return Workload("wide", setup, write, rows)


def large(rows: int) -> Workload:
    """Rows with a text of 1 MiB that hardly compresses, ten rows in a transaction."""
    s = "bench_large"
    procedure = f"""
CREATE PROCEDURE {s}.work(n int) LANGUAGE plpgsql AS $$
DECLARE body text := string_agg(encode(sha256(i::text::bytea), 'base64'), '') FROM generate_series(1, 23832) i;
BEGIN FOR i IN 1..n LOOP
  INSERT INTO {s}.items VALUES (i, i || body);
  IF i % 10 = 0 THEN COMMIT; END IF;
END LOOP; END $$"""
    setup = (f"CREATE SCHEMA {s}", f"CREATE TABLE {s}.items (id bigint PRIMARY KEY, body text)", procedure)
    return Workload("large", setup, (f"CALL {s}.work({rows})",), rows)


def many_tables(transactions: int, tables: int) -> Workload:
    """Small transactions spread over so many tables."""
    name = f"tables_{tables}"
    s = f"bench_{name}"
    create = f"""
DO $$ BEGIN FOR i IN 1..{tables} LOOP
  EXECUTE format('CREATE TABLE {s}.t%s (id int PRIMARY KEY, name text, amount int)', i);
END LOOP; END $$"""
    procedure = f"""
CREATE PROCEDURE {s}.work(n int) LANGUAGE plpgsql AS $$
BEGIN FOR i IN 1..n LOOP
  EXECUTE format('INSERT INTO {s}.t%s VALUES ($1, $2, $3), ($1 + 1, $2, $3)', 1 + (i::bigint * 7919) % {tables})
    USING i * 2, 'row ' || i, i;
  COMMIT;
END LOOP; END $$"""
    setup = (f"CREATE SCHEMA {s}", create, procedure)
    return Workload(name, setup, (f"CALL {s}.work({transactions})",), transactions * 2)


def ticking(tables: int, rows: int) -> Workload:
    """Tables of so many rows; `paced(n, rate)` updates one row of each table, `rate` times a second, n times."""
    s = "bench_ticking"
    create = f"""
DO $$ BEGIN FOR i IN 1..{tables} LOOP
  EXECUTE format('CREATE TABLE {s}.t%s (id int PRIMARY KEY, name text, amount int) WITH (fillfactor=50)', i);
  EXECUTE format('INSERT INTO {s}.t%s SELECT i, ''row '' || i, 0 FROM generate_series(1, {rows}) i', i);
END LOOP; END $$"""
    procedure = f"""
CREATE PROCEDURE {s}.paced(n int, rate float) LANGUAGE plpgsql AS $$
DECLARE started timestamptz := clock_timestamp();
BEGIN FOR i IN 1..n * {tables} LOOP
  EXECUTE format('UPDATE {s}.t%s SET amount = amount + 1 WHERE id = %s',
    1 + i % {tables}, 1 + floor(random() * {rows})::int);
  COMMIT;
  PERFORM pg_sleep(i / (rate * {tables}) - extract(epoch FROM clock_timestamp() - started));
END LOOP; END $$"""
    return Workload("ticking", (f"CREATE SCHEMA {s}", create, procedure), (), 0)


def mixed(rows: int) -> Workload:
    """One table of ten columns of different types, filled before anything reads it."""
    s = "bench_mixed"
    setup = (
        f"CREATE SCHEMA {s}",
        f"""CREATE TABLE {s}.items (id bigint PRIMARY KEY, quantity int, price numeric(12,2), ratio double precision,
            name text, note text, made timestamptz, due date, active boolean, code uuid)""",
        f"""INSERT INTO {s}.items
            SELECT i, i % 1000, i % 1000000 / 100.0, i / 7.0, 'item ' || i, md5(i::text),
                timestamptz '2026-01-01' + i * interval '1.25 s', date '2026-01-01' + (i % 1000)::int, i % 3 = 0,
                md5((i * 7)::text)::uuid
            FROM generate_series(1, {rows}::bigint) i""",
        # whoever reads first would else write hint bits, and nobody would know how many rows there are
        f"VACUUM (FREEZE, ANALYZE) {s}.items",
        "CHECKPOINT",
    )
    return Workload("mixed", setup, (), 0)
