"""Tables that change while reader and apply run: the lake follows, and is equal to the source after each change."""

from __future__ import annotations

import pyarrow as pa
import pytest

from cdc.targets.lake_reader import read_target
from tests.cli.command import spawn
from tests.faults.test_drifted_table import sink_states
from tests.fixtures.pipeline import Pipeline
from tests.fixtures.postgres import run_sql

TABLE = (
    "CREATE SCHEMA shop",
    "CREATE TABLE shop.t (id int PRIMARY KEY, item text, price numeric(10,2), tags int[], note text, body text)",
    "ALTER TABLE shop.t ALTER body SET STORAGE EXTERNAL",
    "INSERT INTO shop.t SELECT i, 'item', i, ARRAY[i, NULL], 'old', repeat('x', 5000) FROM generate_series(1, 50) i",
)
FOLLOWED = (
    ("ALTER TABLE shop.t RENAME item TO article", "UPDATE shop.t SET price = price + 1 WHERE id % 2 = 0"),
    ("ALTER TABLE shop.t ALTER price TYPE numeric(14,2)", "UPDATE shop.t SET price = 123456789012.34 WHERE id = 3"),
    ("ALTER TABLE shop.t ADD extra int[] DEFAULT '{7,NULL}'", "INSERT INTO shop.t (id, extra) VALUES (60, '{}')"),
    ("ALTER TABLE shop.t DROP note", "UPDATE shop.t SET price = 4 WHERE id = 4"),
    ("ALTER TABLE shop.t ADD note int DEFAULT 5", "UPDATE shop.t SET note = 6 WHERE id = 4"),
    ("ALTER TABLE shop.t RENAME TO u", "UPDATE shop.u SET article = 'last', tags = NULL WHERE id < 10"),
)


@pytest.mark.slow
@pytest.mark.parametrize("dropped", ["keep", "drop"])
def test_what_changes_in_a_table_while_both_run_is_in_the_lake(pipeline: Pipeline, dropped: str) -> None:
    run_sql(pipeline.dsn, *TABLE)
    path = f"path: '{pipeline.folder}/lake/{{schema}}/{{table}}'"
    pipeline.write(sinks=f"[{{name: lake, type: delta, {path}, dropped_columns: {dropped}}}]")
    pipeline.reader()
    pipeline.apply()
    pipeline.wait(lambda: sink_states(pipeline) == {"streaming"}, "the first copy in the lake")
    for ddl, change in FOLLOWED:
        # before it as well: rows of both versions are in one batch
        run_sql(pipeline.dsn, "UPDATE shop.t SET id = id + 1000 WHERE id = 50 OR id = 1050", ddl, change)
        found = pipeline.verify()
        assert found["ok"], f"{ddl}: {found}\n{pipeline.output()}"
        if ddl.endswith("DROP note"):
            columns = read_target(f"{pipeline.folder}/lake/shop/t").schema.names
            assert ("note" in columns) == (dropped == "keep")

    run_sql(pipeline.dsn, "ALTER TABLE shop.u ALTER id TYPE bigint", "INSERT INTO shop.u (id) VALUES (3000000000)")
    pipeline.wait(lambda: "failed" in sink_states(pipeline), "the table to stop")
    asked = spawn("tables", "resync", "shop.u", "-c", pipeline.definition, environment={"CDC_TEST_DSN": pipeline.dsn})
    assert asked.status == 0, asked.errors
    pipeline.wait(lambda: "failed" not in sink_states(pipeline), "the table to come back")
    assert pipeline.verify()["ok"], pipeline.output()
    # it stayed in its folder when it was renamed
    assert pa.schema(read_target(f"{pipeline.folder}/lake/shop/t").schema).field("id").type == pa.int64()


@pytest.mark.slow
def test_a_table_made_anew_under_its_name_stops_until_a_replay_puts_it_in_place(pipeline: Pipeline) -> None:
    run_sql(pipeline.dsn, *TABLE)
    pipeline.write(sinks=f"[{{name: lake, type: delta, path: '{pipeline.folder}/lake/{{schema}}/{{table}}'}}]")
    pipeline.reader()
    pipeline.apply()
    pipeline.wait(lambda: sink_states(pipeline) == {"streaming"}, "the first copy in the lake")
    run_sql(
        pipeline.dsn,
        "DROP TABLE shop.t",
        "CREATE TABLE shop.t (id text PRIMARY KEY, item int)",
        "INSERT INTO shop.t VALUES ('a', 1), ('b', 2)",
    )
    pipeline.wait(lambda: "failed" in sink_states(pipeline), "the table to stop")
    pipeline.settle()
    environment = {"CDC_TEST_DSN": pipeline.dsn}
    done = spawn("replay", "lake", "--tables", "shop.t", "-c", pipeline.definition, environment=environment)
    assert "in place" in done.output, done.errors
    pipeline.wait(lambda: lake_rows(pipeline) == [("a", 1), ("b", 2)], "the rows of the new table")
    run_sql(pipeline.dsn, "UPDATE shop.t SET item = 3 WHERE id = 'b'")
    pipeline.wait(lambda: lake_rows(pipeline) == [("a", 1), ("b", 3)], "its changes")


def lake_rows(pipeline: Pipeline) -> list[tuple[object, object]]:
    rows = read_target(f"{pipeline.folder}/lake/shop/t").read_all().to_pylist()
    return sorted((row["id"], row["item"]) for row in rows)
