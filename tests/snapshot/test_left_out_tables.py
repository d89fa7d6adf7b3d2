"""FOR ALL TABLES EXCEPT of Postgres 19: a table that the publication leaves out is refused, never captured in part."""

from __future__ import annotations

from pathlib import Path
from typing import LiteralString

import pytest

from cdc.capture.startup_checks import check_log
from cdc.errors import PreflightFailed, PublicationNarrowed
from cdc.postgres.connection import connect
from cdc.postgres.preflight import SourceRequirements, preflight
from cdc.postgres.publication import PublicationControl, drop_table, ensure_publication
from cdc.postgres.source_state import publication_status
from cdc.postgres.tables import TableName, match_tables, read_schema
from cdc.snapshot.reader_commands import CHECK_TABLES
from tests.faults.capture import Captured
from tests.fixtures.postgres import rows_of, run_sql
from tests.snapshot.reader_with_backfills import Running

TABLES: tuple[LiteralString, ...] = (
    "CREATE TABLE a (id int PRIMARY KEY, v text)",
    "CREATE TABLE b (id int PRIMARY KEY, v text)",
    "CREATE TABLE p (id int, r int, PRIMARY KEY (id, r)) PARTITION BY LIST (r)",
    "CREATE TABLE p1 PARTITION OF p FOR VALUES IN (1)",
    "INSERT INTO a SELECT i, 'old' FROM generate_series(1, 9) i",
    "INSERT INTO b SELECT i, 'old' FROM generate_series(1, 5) i",
)
LEAVE_OUT_B: LiteralString = "CREATE PUBLICATION own FOR ALL TABLES EXCEPT (TABLE b) WITH (publish_via_partition_root)"
EVERYTHING: LiteralString = 'ALTER PUBLICATION "own" SET ALL TABLES;'
WANTS = SourceRequirements("pre", "own", ["public.*"])


@pytest.fixture(name="source")
def _source(database_19: str) -> str:
    run_sql(database_19, *TABLES)
    return database_19


def pipeline(folder: Path, source: str, *, exclude: str = "") -> Captured:
    """A pipeline over the publication `own`, which it may alter as it likes."""
    held = Captured(folder, source)
    held.write(slot=held.slot, more="  publication: {name: own, manage: always}\n")
    rule = f"tables: [{{match: 'public.*', exclude: [{exclude}]}}]"
    held.path.write_text(held.path.read_text().replace("tables: [{match: 'public.*'}]", rule))
    return held


def test_a_table_that_is_left_out_is_refused_at_the_first_start_with_the_sql_that_publishes_it(
    tmp_path: Path, source: str
) -> None:
    run_sql(source, LEAVE_OUT_B)
    held = pipeline(tmp_path, source)
    (problem,) = (found for found in preflight(source, WANTS) if found.fatal)
    assert (problem.subject, problem.sql) == ("publication own", EVERYTHING)
    assert "leaves out public.b" in problem.message
    with pytest.raises(PreflightFailed, match=r"leaves out public\.b"):
        held.copy()

    run_sql(source, EVERYTHING)
    assert [found for found in preflight(source, WANTS) if found.fatal] == []
    held.copy()
    assert len(held.folded("b")) == 5


def test_a_new_table_that_is_left_out_is_refused_while_the_others_stream(tmp_path: Path, source: str) -> None:
    run_sql(source, LEAVE_OUT_B)
    held = pipeline(tmp_path, source, exclude="public.b")
    held.copy()
    run_sql(source, "CREATE TABLE late (id int PRIMARY KEY)")
    run_sql(source, "ALTER PUBLICATION own SET ALL TABLES EXCEPT (TABLE b, late)")
    with Running(held) as running:
        run_sql(source, "INSERT INTO a VALUES (100, 'new')")
        done = running.ended(running.catalog.commands.post("held", CHECK_TABLES, {}))
        running.caught_up()
    refused = (done.result or {})["refused"]
    assert refused.keys() == {"public.late"}
    assert 'ALTER PUBLICATION "own" SET ALL TABLES EXCEPT (TABLE ONLY "public"."b");' in refused["public.late"]
    assert held.folded("a") == rows_of(source, "SELECT id::text, v FROM a ORDER BY id::text")


def test_a_captured_table_that_is_left_out_later_stops_the_reader(tmp_path: Path, source: str) -> None:
    run_sql(source, "CREATE PUBLICATION own FOR ALL TABLES WITH (publish_via_partition_root)")
    held = pipeline(tmp_path, source)
    held.copy()
    with connect(source) as conn:
        captured = {str(name): oid for oid, name in match_tables(conn, ["public.*"])}
        whole = publication_status(conn, "own", captured.values())
        run_sql(source, "ALTER PUBLICATION own SET ALL TABLES EXCEPT (TABLE b, p)")
        narrowed = publication_status(conn, "own", captured.values())
        schemas = [
            read_schema(conn, captured[name], publication="own") for name in ("public.a", "public.b", "public.p")
        ]
    assert whole is not None
    assert narrowed is not None
    assert (whole.missing, narrowed.missing) == ((), ("public.b", "public.p"))
    contained = [schema.standing.published is not None for schema in schemas if schema and schema.standing]
    assert contained == [True, False, False]
    with pytest.raises(PublicationNarrowed, match=r"public\.b"):
        check_log(held.definition)


def test_a_partitioned_table_that_is_left_out_is_missing_if_partitions_have_their_own_names(source: str) -> None:
    run_sql(source, "CREATE PUBLICATION own FOR ALL TABLES EXCEPT (TABLE p)")
    with connect(source) as conn, pytest.raises(PreflightFailed, match=r"leaves out public\.p "):
        ensure_publication(conn, "own", [TableName("public", "p")], control=PublicationControl(alter=True))


def test_a_publication_of_sequences_is_named_as_one_that_takes_no_tables(source: str) -> None:
    run_sql(source, "CREATE PUBLICATION own FOR ALL SEQUENCES")
    with connect(source) as conn, pytest.raises(PreflightFailed, match="is FOR ALL SEQUENCES"):
        ensure_publication(conn, "own", [TableName("public", "a")], control=PublicationControl(alter=True))
    run_sql(source, "CREATE PUBLICATION everything FOR ALL TABLES EXCEPT (TABLE b), ALL SEQUENCES")
    wants = SourceRequirements("pre", "everything", ["public.*"])
    (statement,) = (problem.sql for problem in preflight(source, wants) if problem.subject == "publication everything")
    assert statement == 'ALTER PUBLICATION "everything" SET ALL TABLES, ALL SEQUENCES;'
    run_sql(source, statement)
    published = "SELECT puballsequences FROM pg_publication WHERE pubname = 'everything'"
    assert rows_of(source, published) == [(True,)]


def test_a_table_that_is_left_out_is_not_dropped_from_the_publication(source: str) -> None:
    run_sql(source, LEAVE_OUT_B)
    with connect(source) as conn:
        drop_table(conn, "own", TableName("public", "b"))
    assert rows_of(source, "SELECT prexcept FROM pg_publication_rel") == [(True,)]
