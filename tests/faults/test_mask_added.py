"""A mask that is added to a running pipeline: where its clear values can be found before and after the replay."""

from __future__ import annotations

from typing import Final

import pytest

from cdc.targets.lake_reader import Lake
from cdc.targets.published_record import TableRecord, TargetState
from tests.cli.command import Outcome, spawn
from tests.fixtures import forked
from tests.fixtures.pipeline import Pipeline
from tests.fixtures.postgres import run_sql
from tests.pipelines.test_changed_rules import files_with

CANARY: Final = "canary7f3a9c"


def lake_of(pipeline: Pipeline) -> Lake:
    return Lake.open(f"{pipeline.folder}/lake/{{schema}}/{{table}}")


def write(pipeline: Pipeline, rules: str = "") -> None:
    path = f"{pipeline.folder}/lake/{{schema}}/{{table}}"
    lake = f"{{name: lake, type: delta, writer: copy-on-write, path: '{path}'{rules}}}"
    pipeline.write(tables="shop.people", sinks=f"[{lake}]")


def people(pipeline: Pipeline) -> TableRecord | None:
    record = lake_of(pipeline).published()
    return None if record is None else next(iter(record.tables.values()), None)


def wait_for(pipeline: Pipeline, state: TargetState, at_least: int = 0) -> None:
    pipeline.wait(
        lambda: (table := people(pipeline)) and table.state == state and table.position >= at_least, f"{state}"
    )


def cdc(pipeline: Pipeline, *arguments: str) -> Outcome:
    return spawn(*arguments, "-c", pipeline.definition, environment={"CDC_TEST_DSN": pipeline.dsn})


def shown(pipeline: Pipeline, past: str) -> dict[str, Outcome]:
    """What an operator can ask."""
    query = "select * from shop.people"
    return {
        "query": cdc(pipeline, "query", query),
        "latest": cdc(pipeline, "query", query, "--at", "latest"),
        "past": cdc(pipeline, "query", query, "--at", past),
        "status": cdc(pipeline, "status"),
        "tables": cdc(pipeline, "tables", "ls"),
        "doctor": cdc(pipeline, "doctor"),
        "dead letters": cdc(pipeline, "dlq", "ls"),
    }


@pytest.mark.slow
def test_a_mask_is_in_force_from_the_restart_on_and_after_the_replay_only_the_log_has_clear_values(
    pipeline: Pipeline,
) -> None:
    run_sql(
        pipeline.dsn,
        "CREATE SCHEMA shop",
        "CREATE TABLE shop.people (id int PRIMARY KEY, name text)",
        f"INSERT INTO shop.people VALUES (1, '{CANARY}'), (2, 'else')",
    )
    write(pipeline)
    pipeline.start("cdc", "reader")
    apply = pipeline.apply()
    wait_for(pipeline, TargetState.STREAMING)
    past = str(lake_of(pipeline).cuts()[-1]).partition(",")[0]
    assert CANARY in cdc(pipeline, "query", "select * from shop.people").output
    apply.kill()
    apply.wait()

    write(pipeline, ", rules: [{match: shop.people, transform: {mask: {name: redact}}}]")
    pipeline.apply()
    wait_for(pipeline, TargetState.FAILED)
    before = shown(pipeline, past)
    assert [name for name, one in before.items() if CANARY in one.output + one.errors] == []
    assert {name for name, one in before.items() if "CDC-3019" in one.output + one.errors} >= {
        "query", "latest", "past", "status", "doctor",
    }  # fmt: skip

    command = ("pipelines", "replay", "lake", "-c", pipeline.definition, "--tables", "shop.people")
    replay = forked.run(*command, environment={"CDC_TEST_DSN": pipeline.dsn}, timeout=120)
    assert replay.status == 0, replay.errors
    wait_for(pipeline, TargetState.STREAMING)
    run_sql(pipeline.dsn, f"INSERT INTO shop.people VALUES (3, '{CANARY}')")
    pipeline.settle()
    wait_for(pipeline, TargetState.STREAMING, pipeline.durable() - 1)
    after = shown(pipeline, past)
    assert [name for name, one in after.items() if CANARY in one.output + one.errors] == []
    assert "***" in after["query"].output
    assert "CDC-3020" in after["past"].output + after["past"].errors
    verdict = pipeline.verify()
    assert (verdict["ok"], CANARY in str(verdict)) == (True, False)
    assert CANARY not in pipeline.output() + replay.output
    assert {file.partition("/")[0] for file in files_with(pipeline.folder, CANARY)} <= {"log"}
