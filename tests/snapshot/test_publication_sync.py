"""Tables come and go while the stream runs: whatever the order of events, what is captured is exact."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from operator import itemgetter
from pathlib import Path
from threading import Event, Thread
from typing import Any, LiteralString

import pyarrow.compute as pc
import pytest

from cdc.catalog.commands import CommandState
from cdc.errors import ConfigError
from cdc.postgres.connection import connect
from cdc.snapshot.backfill_documents import BACKFILL, BackfillRequest
from cdc.snapshot.publication_sync import SYNC_EVERY, PublicationSync
from cdc.snapshot.reader_commands import CHECK_TABLES
from cdc.table import TableState
from tests.faults.capture import Captured, fold, rows_with
from tests.fixtures.postgres import rows_of, run_sql
from tests.fixtures.waiting import until
from tests.snapshot.reader_with_backfills import Running


@pytest.fixture(name="held")
def _held(tmp_path: Path, database: str) -> Captured:
    run_sql(database, "CREATE TABLE t (id int PRIMARY KEY, v text)", "INSERT INTO t VALUES (1, 'one')")
    held = Captured(tmp_path, database)
    held.copy()
    return held


def rules(held: Captured, text: str) -> None:
    """Write other rules into the definition, in one step."""
    lines = [text if line.startswith("tables:") else line for line in held.path.read_text().splitlines()]
    draft = held.folder / "draft"
    draft.write_text("\n".join(lines) + "\n")
    draft.replace(held.path)


def look(running: Running) -> dict[str, Any]:
    """Have it look, and give what it says."""
    done = running.ended(running.catalog.commands.post("held", CHECK_TABLES, {}))
    assert done.state is CommandState.DONE, done.result
    assert done.result is not None
    return done.result


def copied(running: Running, count: int) -> None:
    """Wait until so many copies have ended, all well."""
    running.until(lambda: len(ended := running.catalog.commands.ls("held", BACKFILL)) >= count and all(
        command.state is not CommandState.PENDING for command in ended
    ))  # fmt: skip
    assert {command.state for command in running.catalog.commands.ls("held", BACKFILL)} == {CommandState.DONE}


def states(held: Captured) -> dict[str, list[TableState]]:
    found: dict[str, list[TableState]] = {}
    for schema in held.log.schemas().values():
        found.setdefault(schema.topic, []).append(schema.state)
    return {topic: sorted(of) for topic, of in found.items()}


def is_exact(held: Captured, table: str) -> bool:
    return held.folded(table) == sorted(rows_of(held.dsn, f"SELECT id::text, v FROM {table}"))


def operations(held: Captured, topic: str) -> list[str]:
    """Of the log's rows of a table, in their order."""
    rows = rows_with(held.log, pc.field("topic") == topic, "position", "ordinal", "op")
    return [row["op"] for row in sorted(rows, key=itemgetter("position", "ordinal"))]


@contextmanager
def writing(dsn: str, table: str) -> Iterator[None]:
    """Somebody writes the table all the while, in transactions of several changes."""
    done, begun = Event(), Event()

    def write() -> None:
        number = 0
        with connect(dsn) as conn:
            while not done.wait(0.05):
                number += 1
                with conn.transaction():
                    conn.execute(f"INSERT INTO {table} VALUES (%s, 'new')", [number])  # type: ignore[arg-type]
                    conn.execute(f"UPDATE {table} SET v = %s WHERE id = %s", [f"{number}", number // 2])  # type: ignore[arg-type]
                    conn.execute(f"DELETE FROM {table} WHERE id = %s", [number - 500])  # type: ignore[arg-type]
                begun.set()

    writer = Thread(target=write)
    writer.start()
    try:
        assert begun.wait(30)
        yield
    finally:
        done.set()
        writer.join()


def test_a_new_table_that_is_written_all_the_while_is_exact_and_the_others_are_not_read_again(held: Captured) -> None:
    with Running(held) as running:
        run_sql(
            held.dsn,
            "CREATE TABLE later (id int PRIMARY KEY, v text)",
            "INSERT INTO later SELECT -i, 'v' FROM generate_series(1, 100) i",
        )
        with writing(held.dsn, "later"):
            assert look(running)["added"] == ["public.later"]
            copied(running, 1)
        running.caught_up()
    assert is_exact(held, "later")
    assert states(held) == {"public.t": [TableState.LIVE], "public.later": [TableState.LIVE]}
    assert operations(held, "public.t").count("r") == 1


@pytest.mark.slow
def test_a_new_table_is_found_within_a_minute_though_nobody_says_a_word(held: Captured) -> None:
    with Running(held) as running:
        look(running)
        run_sql(held.dsn, "CREATE TABLE later (id int PRIMARY KEY, v text)")
        with writing(held.dsn, "later"):
            until(lambda: "public.later" in states(held), "the table in the log", seconds=2 * SYNC_EVERY)
            copied(running, 1)
        running.caught_up()
    assert is_exact(held, "later")


def test_a_new_table_of_a_publication_of_all_tables_is_exact_from_its_first_row(tmp_path: Path, database: str) -> None:
    run_sql(
        database,
        "CREATE TABLE t (id int PRIMARY KEY, v text)",
        "CREATE PUBLICATION cdc_held_pub FOR ALL TABLES WITH (publish_via_partition_root)",
    )
    held = Captured(tmp_path, database)
    held.copy()
    ours = "source:\n  publication: {create: false}\n"
    held.path.write_text(held.path.read_text().replace("source:\n", ours))
    with Running(held) as running:
        look(running)
        # the stream tells of it before any look does
        run_sql(database, "CREATE TABLE later (id int PRIMARY KEY, v text)")
        with writing(database, "later"):
            running.until(lambda: "public.later" in states(held))
            copied(running, 1)
            assert look(running)["refused"] == {}
        # this one has rows and nobody writes it
        run_sql(database, "CREATE TABLE quiet (id int PRIMARY KEY, v text)")
        assert look(running)["added"] == ["public.quiet"]
        copied(running, 2)
        running.caught_up()
    assert is_exact(held, "later")
    assert states(held)["public.quiet"] == [TableState.LIVE]


def test_a_table_that_was_removed_and_added_again_has_what_it_missed(held: Captured) -> None:
    run_sql(
        held.dsn,
        "CREATE TABLE u (id int PRIMARY KEY, v text)",
        "CREATE TABLE w (id int PRIMARY KEY, v text)",
        "INSERT INTO u SELECT i, 'v' FROM generate_series(1, 9) i",
    )
    with Running(held) as running:
        look(running)
        copied(running, 1)
        rules(held, "tables: [{match: 'public.*', exclude: [public.u]}]")
        assert look(running)["removed"] == ["public.u"]
        assert states(held)["public.u"] == [TableState.DROPPED]
        run_sql(
            held.dsn,
            "DELETE FROM u WHERE id < 4",
            "UPDATE u SET v = 'unseen' WHERE id = 5",
            "INSERT INTO u VALUES (20, 'x')",
        )
        rules(held, "tables: [{match: 'public.*'}]")
        with writing(held.dsn, "w"):
            run_sql(held.dsn, "UPDATE u SET v = 'later' WHERE id = 6")
            assert look(running)["added"] == ["public.u"]
            running.until(lambda: states(held)["public.u"] == [TableState.LIVE], "the copy")
        run_sql(held.dsn, "UPDATE u SET v = 'last' WHERE id = 7")
        running.caught_up()
    assert is_exact(held, "u")
    assert is_exact(held, "w")
    assert states(held)["public.u"] == [TableState.LIVE]


def test_a_table_that_took_the_name_of_another_one_is_captured_and_the_other_one_no_longer(
    tmp_path: Path, database: str
) -> None:
    run_sql(
        database,
        "CREATE TABLE t (id int PRIMARY KEY, v text)",
        "CREATE TABLE t_new (id int PRIMARY KEY, v text)",
        "INSERT INTO t_new VALUES (1, 'new')",
    )
    held = Captured(tmp_path, database, tables="public.t")
    held.copy()
    with Running(held) as running:
        look(running)
        run_sql(database, "ALTER TABLE t RENAME TO t_old; ALTER TABLE t_new RENAME TO t")
        result = look(running)
        run_sql(database, "INSERT INTO t VALUES (2, 'later')", "INSERT INTO t_old VALUES (3, 'unseen')")
        copied(running, 1)
        running.caught_up()
    assert (result["added"], result["removed"]) == (["public.t"], ["public.t_old"])
    assert rows_of(database, "SELECT tablename::text FROM pg_publication_tables") == [("t",)]
    assert is_exact(held, "t")


def test_of_all_tables_that_are_published_only_those_that_are_asked_for_come_into_the_log(
    tmp_path: Path, database: str
) -> None:
    """`u` is removed and added again, `other` is not asked for until the end; both have then what was passed over."""
    run_sql(
        database,
        "CREATE TABLE t (id int PRIMARY KEY, v text)",
        "CREATE TABLE u (id int PRIMARY KEY, v text)",
        "CREATE TABLE other (id int PRIMARY KEY, v text)",
        "INSERT INTO u VALUES (1, 'a'), (2, 'b')",
        "CREATE PUBLICATION cdc_held_pub FOR ALL TABLES WITH (publish_via_partition_root)",
    )
    held = Captured(tmp_path, database, tables="public.[tu]")
    held.copy()
    with Running(held) as running:
        run_sql(database, "INSERT INTO other VALUES (1, 'x')", "INSERT INTO u VALUES (7, 'seen')")
        rules(held, "tables: [{match: 'public.t'}]")
        assert look(running)["removed"] == ["public.u"]
        run_sql(database, "DELETE FROM u WHERE id = 1", "INSERT INTO u VALUES (3, 'c')", "ALTER TABLE u ADD w int")
        run_sql(database, "INSERT INTO other VALUES (2, 'x')", "INSERT INTO u VALUES (5, 'e')", "TRUNCATE t, other")
        running.caught_up()
    with Running(held) as running:
        run_sql(database, "INSERT INTO u VALUES (4, 'd')", "UPDATE other SET v = 'y'")
        running.caught_up()
        assert operations(held, "public.u") == ["s", "r", "r", "g", "c", "s"]
        assert operations(held, "public.other") == []
        rules(held, "tables: [{match: 'public.*'}]")
        look(running)
        running.until(lambda: states(held).get("public.other") == states(held)["public.u"] == [TableState.LIVE])
        run_sql(database, "UPDATE u SET v = 'last' WHERE id = 2", "INSERT INTO other VALUES (9, 'last')")
        running.caught_up()
    assert held.folded("u") == sorted(rows_of(database, "SELECT id::text, v, w::text FROM u"))
    assert is_exact(held, "other")


def test_a_table_made_anew_under_its_name_is_another_one_with_its_own_rows(held: Captured) -> None:
    (before,) = held.log.schemas().values()
    with Running(held) as running:
        run_sql(held.dsn, "UPDATE t SET v = 'last' WHERE id = 1")
        run_sql(held.dsn, "DROP TABLE t", "CREATE TABLE t (id int PRIMARY KEY, v text)")
        run_sql(held.dsn, "INSERT INTO t VALUES (7, 'new')")
        assert look(running)["added"] == ["public.t"]
        copied(running, 1)
        run_sql(held.dsn, "INSERT INTO t VALUES (8, 'newer')")
        running.caught_up()
        old, new = sorted(held.log.schemas())
        sync = PublicationSync(lambda: held.definition, held.definition, running.context.link)
        with pytest.raises(ConfigError, match="it became dropped"):  # the table was live as the skip was requested
            sync.skip(before)
    assert [(row[1], row[2]) for row in fold(held.log, new)] == [("7", "new"), ("8", "newer")]
    assert [row[2] for row in fold(held.log, old)] == ["last"]
    assert states(held)["public.t"] == [TableState.DROPPED, TableState.LIVE]


@pytest.mark.slow
def test_a_table_made_anew_in_a_publication_of_all_tables_is_copied_though_the_stream_tells_of_it_first(
    tmp_path: Path, database: str
) -> None:
    run_sql(
        database,
        "CREATE TABLE t (id int PRIMARY KEY, v text)",
        "INSERT INTO t VALUES (1, 'one')",
        "CREATE PUBLICATION cdc_held_pub FOR ALL TABLES WITH (publish_via_partition_root)",
    )
    held = Captured(tmp_path, database)
    held.copy()
    with Running(held) as running:
        look(running)
        run_sql(database, "DROP TABLE t", "CREATE TABLE t (id int PRIMARY KEY, v text)")
        with writing(database, "t"):
            copied(running, 1)
        running.caught_up()
    _, new = sorted(held.log.schemas())
    found = sorted((row[1], row[2]) for row in fold(held.log, new))
    assert found == sorted(rows_of(database, "SELECT id::text, v FROM t"))
    assert states(held)["public.t"] == [TableState.DROPPED, TableState.LIVE]


UNFIT: dict[str, tuple[LiteralString, LiteralString, str]] = {
    "bare": (
        "CREATE TABLE bare (id int)",
        "ALTER TABLE bare ADD PRIMARY KEY (id); INSERT INTO bare VALUES (1)",
        "no primary key",
    ),
    "late": (
        "CREATE TABLE late (id int PRIMARY KEY DEFERRABLE)",
        "ALTER TABLE late REPLICA IDENTITY FULL",
        "REPLICA IDENTITY FULL",
    ),
    "fast": ("CREATE UNLOGGED TABLE fast (id int PRIMARY KEY)", "ALTER TABLE fast SET LOGGED", "SET LOGGED"),
    "far": (
        (
            "CREATE FOREIGN DATA WRAPPER nothing; CREATE SERVER elsewhere FOREIGN DATA WRAPPER nothing;"
            "CREATE FOREIGN TABLE far (id int) SERVER elsewhere"
        ),
        "DROP FOREIGN TABLE far",
        "is a foreign table",
    ),
}
"""Table → what makes it, what removes the cause, and the reason."""


def test_rules_that_cannot_be_read_leave_the_old_ones_and_tables_that_cannot_be_captured_are_refused_by_name(
    held: Captured,
) -> None:
    """The others are added; each refusal is recorded with its reason until the cause is gone."""
    with Running(held) as running:
        good = held.path.read_text()
        for wrong in ("tables: 5\n", "\tnot yaml", ""):
            held.path.write_text(wrong)
            said = look(running)
            assert (said["removed"], str(held.path) in said["unread"]) == ([], True)
        held.path.write_text(good)
        run_sql(held.dsn, "CREATE TABLE later (id int PRIMARY KEY, v text)", *(made for made, _, _ in UNFIT.values()))
        for added in (["public.later"], []):
            said = look(running)
            assert (said["added"], said["removed"], said["unread"]) == (added, [], None)
            assert said["refused"].keys() == {f"public.{name}" for name in UNFIT}
            assert "REPLICA IDENTITY FULL" in said["refused"]["public.bare"]
            recorded = [table for table in running.catalog.tables.ls("held") if table.state == "refused"]
            refused = {table.topic: table.reason or "" for table in recorded}
            assert refused.keys() == {f"public.{name}" for name in UNFIT}
            assert all(says in refused[f"public.{name}"] for name, (_, _, says) in UNFIT.items()), refused
        run_sql(held.dsn, *(repair for _, repair, _ in UNFIT.values()))
        said = look(running)
        assert (sorted(said["added"]), said["refused"]) == (["public.bare", "public.fast", "public.late"], {})
        assert [table for table in running.catalog.tables.ls("held") if table.state == "refused"] == []
        copied(running, 2)
    assert held.folded("bare") == [("1",)]


@pytest.mark.slow
def test_a_partition_is_refused_where_no_rule_means_its_root(held: Captured) -> None:
    run_sql(
        held.dsn,
        "CREATE TABLE far (id int PRIMARY KEY) PARTITION BY RANGE (id)",
        "CREATE TABLE near PARTITION OF far DEFAULT",
    )
    with Running(held) as running:
        for text, refused in (
            ("tables: [{match: public.t}, {match: public.near}]", ["public.near"]),
            ("tables: [{match: 'public.*', exclude: [public.far]}]", []),
            ("tables: [{match: 'public.*'}]", []),
        ):
            rules(held, text)
            assert list(look(running)["refused"]) == refused
        copied(running, 1)
    assert states(held) == {"public.t": [TableState.LIVE], "public.far": [TableState.LIVE]}


def test_a_table_that_another_role_owns_is_refused_and_one_of_ours_beside_it_added(held: Captured) -> None:
    role = f"r_{held.dsn.rpartition('/')[2]}"
    run_sql(
        held.dsn,
        f"CREATE ROLE {role} LOGIN REPLICATION PASSWORD 'secret'",
        f"GRANT CREATE ON SCHEMA public TO {role}",
        f"ALTER TABLE t OWNER TO {role}",
        f"ALTER PUBLICATION cdc_held_pub OWNER TO {role}",
    )
    try:
        text = held.path.read_text()
        held.path.write_text(text.replace("://postgres@", f"://{role}@").replace("user=postgres", f"user={role}"))
        with Running(held) as running:
            run_sql(held.dsn, "CREATE TABLE theirs (id int PRIMARY KEY)", f"GRANT SELECT ON theirs TO {role}")
            run_sql(held.dsn, "CREATE TABLE ours (id int PRIMARY KEY)", f"ALTER TABLE ours OWNER TO {role}")
            said = look(running)
            assert said["added"] == ["public.ours"]
            assert list(said["refused"]) == ["public.theirs"]
            assert "ALTER PUBLICATION" in said["refused"]["public.theirs"]
            copied(running, 1)
    finally:
        run_sql(held.dsn, f"REASSIGN OWNED BY {role} TO CURRENT_USER", f"DROP OWNED BY {role}", f"DROP ROLE {role}")


@pytest.mark.slow
def test_tables_are_kept_while_a_long_copy_is_on_its_way(held: Captured) -> None:
    run_sql(held.dsn, "INSERT INTO t SELECT i, 'v' FROM generate_series(2, 3000) i")
    with held.path.open("a") as definition:
        definition.write("snapshot: {chunk_rows: 50, parallel: 1}\n")
    with Running(held) as running:
        job = running.ask(BackfillRequest(("public.t",), resync=True, rate=100))
        running.until(lambda: running.state(job) == "snapshotting")
        run_sql(held.dsn, "CREATE TABLE later (id int PRIMARY KEY, v text)")
        assert look(running)["added"] == ["public.later"]
        assert running.state(job) == "snapshotting"
        running.catalog.commands.post("held", "backfill.cancel", {"id": job})
        running.ended(job)
