"""Only queries reach the engine, and what it says of them becomes one line: cdc/targets/read_only_guard.py."""

from __future__ import annotations

import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory

import pyarrow as pa
import pytest
from deltalake import QueryBuilder
from hypothesis import given
from hypothesis import strategies as st

from cdc.errors import CdcError, ConfigError, QueryFailed, QueryNotReadOnly
from cdc.targets.read_only_guard import checked_rows, kernel_version, named_errors, one_line, require_query

QUERIES = [
    "select 1",
    " -- a note\n select 1;",
    "/* copy */ select 1",
    "with a as (select 1) select * from a",
    "with recursive a as (select 1 as n union all select n + 1 from a where n < 3) select * from a",
    "values (1), (2)",
    "(select 1) union (select 2)",
    "((values (1)))",
    "from generate_series(1, 3)",
    "select 1 as a, 1 as b from generate_series(1, 2) x, generate_series(1, 2) y",
    "select 'copy (select 1) to ''x'''",
    "explain select 1",
    "explain analyze select 1",
    "explain analyze verbose select 1",
    "explain verbose select 1",
    "explain format tree select 1",
    "explain (analyze) select 1",
    "describe select 1",
    "select 1/0",
]


@pytest.mark.parametrize("sql", QUERIES)
def test_a_query_passes(sql: str) -> None:
    require_query(QueryBuilder(), sql)


WRITES = [
    "copy (select 1 as a) to '{file}' stored as csv",
    "COPY (select 1 as a) TO '{file}'",
    "/* select */ copy (select 1 as a) to '{file}'",
    "-- select 1\ncopy (select 1 as a) to '{file}'",
    "; copy (select 1 as a) to '{file}'",
    "explain analyze copy (select 1 as a) to '{file}'",
    "explain (analyze) copy (select 1 as a) to '{file}'",
    "explain (verbose, analyze) copy (select 1 as a) to '{file}'",
    "(analyze) copy (select 1 as a) to '{file}'",
    "(with true, analyze) copy (select 1 as a) to '{file}'",
    "explain analyze explain analyze copy (select 1 as a) to '{file}'",
    "analyze copy (select 1 as a) to '{file}'",
    "describe analyze copy (select 1 as a) to '{file}'",
    "select 1; copy (select 1 as a) to '{file}'",
    "select 1 as a into other",
    "with a as (select 1 as b) select * into other from a",
    "with a as (select 1) insert into t select * from a",
    "create table other as select 1",
    "create view other as select 1",
    "create external table other stored as csv location '{file}'",
    "create schema other",
    "drop table t",
    "drop view t",
    "insert into t values (1)",
    "update t set a = 1",
    "delete from t",
    "truncate table t",
    "alter table t add column b int",
    "merge into t using t as u on t.a = u.a when matched then delete",
    "set datafusion.execution.batch_size = 1",
    "reset datafusion.execution.batch_size",
    "prepare p as select 1",
    "begin",
    "",
    "selec 1",
]


@pytest.mark.parametrize("sql", WRITES)
def test_what_is_not_a_query_is_refused_and_nothing_is_written(sql: str, tmp_path: Path) -> None:
    file = tmp_path / "kept.csv"
    file.write_text("a\n7\n", encoding="utf-8")
    builder = QueryBuilder()
    builder.execute("CREATE TABLE t AS SELECT 1 AS a").read_all()

    with pytest.raises((QueryNotReadOnly, ConfigError)), named_errors():
        require_query(builder, sql.format(file=file))

    assert [*tmp_path.iterdir()] == [file]
    assert file.read_text(encoding="utf-8") == "a\n7\n"
    assert pa.table(builder.execute("select * from t")).to_pydict() == {"a": [1]}


TEXT = "( ) , ; -- /* */ explain analyze verbose format indent describe select 1 with as into values from copy to t"
WORDS = st.sampled_from([*TEXT.split(), "\n", "(select 1)", "'{file}'"])


@given(st.lists(WORDS, max_size=12), st.lists(WORDS, max_size=4))
def test_no_text_around_a_copy_writes(before: list[str], after: list[str]) -> None:
    with TemporaryDirectory() as folder:
        sql = " ".join([*before, "copy (select 1) to '{file}'", *after]).replace("{file}", f"{folder}/made")
        with suppress(CdcError), named_errors():
            require_query(QueryBuilder(), sql)
            QueryBuilder().execute(sql).read_all()
        assert [*Path(folder).iterdir()] == []


@pytest.mark.parametrize(
    ("sql", "kind", "message"),
    [
        ("select 1/n from generate_series(0, 1) t(n)", QueryFailed, "query failed: Divide by zero error"),
        (
            "select cast('x' as int)",
            QueryFailed,
            "query failed: Cannot cast string 'x' to value of Int32 type",
        ),
        (
            "select date '2020-13-01'",
            QueryFailed,
            "query failed: Cannot cast string '2020-13-01' to value of Date32 type",
        ),
        (
            "select a from generate_series(1, 2) t(n)",
            ConfigError,
            "query refused: No field named a. Valid fields are t.n.",
        ),
        ("select nosuch(1)", ConfigError, "query refused: Invalid function 'nosuch'. Did you mean 'cosh'?"),
        ("select * from nowhere", ConfigError, "query refused: table 'nowhere' not found"),
        ("select 1 +", ConfigError, "query refused: Expected: an expression, found: EOF"),
        ("select repeat('x', 100000000000)", QueryFailed, "query failed: string size overflow on repeat"),
    ],
)
def test_what_the_engine_says_is_one_line_with_a_code(sql: str, kind: type[CdcError], message: str) -> None:
    with pytest.raises(kind) as caught, named_errors():
        checked_rows(QueryBuilder().execute(sql)).read_all()

    assert type(caught.value) is kind
    assert caught.value.message.startswith(message)
    assert "\n" not in caught.value.message


def test_rows_are_passed_on_as_they_come() -> None:
    builder = QueryBuilder({"datafusion.execution.batch_size": "10"})
    reader = checked_rows(builder.execute("select * from generate_series(1, 100) t(n)"))

    assert next(iter(reader)).num_rows <= 10
    assert sum(batch.num_rows for batch in reader) >= 90


def test_layers_and_the_call_for_bug_reports_are_left_out() -> None:
    said = "External error: Internal error: No store for x.\n"
    said += "This issue was likely caused by a bug in DataFusion's code. Please"
    assert one_line(said) == "No store for x."


WRITING_PROGRAM = """
import os, subprocess, sys
from cdc.targets.read_only_guard import deny_file_writes

folder = sys.argv[1]
with open(f"{folder}/opened", "w") as opened:
    assert deny_file_writes()
    opened.write("written")
open(os.devnull, "w").write("x")
print(open(f"{folder}/kept").read())


def refused(act, *arguments):
    try:
        act(*arguments)
    except PermissionError:
        return True
    return False


print([
    refused(open, f"{folder}/new", "w"),
    refused(open, f"{folder}/kept", "a"),
    refused(os.unlink, f"{folder}/kept"),
    refused(os.mkdir, f"{folder}/directory"),
    refused(os.rename, f"{folder}/kept", f"{folder}/moved"),
    subprocess.run(["/bin/sh", "-c", f"echo x > {folder}/child"], stderr=subprocess.DEVNULL).returncode != 0,
])
"""


@pytest.mark.skipif(kernel_version() == 0, reason="the kernel has no Landlock")
def test_only_open_files_and_the_null_device_can_be_written(tmp_path: Path) -> None:
    (tmp_path / "kept").write_text("mine", encoding="utf-8")
    command = [sys.executable, "-c", WRITING_PROGRAM, str(tmp_path)]
    ended = subprocess.run(command, check=False, capture_output=True, text=True, cwd=Path(__file__).parents[2])

    assert ended.stdout.splitlines() == ["mine", str([True] * 6)], ended.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["kept", "opened"]
    assert (tmp_path / "opened").read_text(encoding="utf-8") == "written"
