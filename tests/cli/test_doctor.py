"""cdc doctor: what is wrong with source and targets, said for people, for programs and for psql."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pytest
from deltalake import DeltaTable, write_deltalake

from pipelines.sinks.delta.settings import DeltaSettings
from pipelines.sinks.delta.sink import DeltaSink
from tests.cli.command import run
from tests.config.definitions import SOUND, write
from tests.contracts.folded import batch, put
from tests.fixtures.postgres import run_sql

CANARY = "c4n4ryS3cret"


def test_an_unreachable_source_is_status_3_and_its_password_unsaid(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("THE_DSN", f"postgresql://u:{CANARY}@127.0.0.1:1/d?connect_timeout=2")
    path = write(tmp_path, SOUND.replace("postgresql://cdc@localhost/shop", "${THE_DSN}"))
    outcome = run(capsys, "doctor", "-c", path, "--json")
    assert outcome.status == 3
    assert outcome.envelope["ok"] is False
    assert outcome.envelope["error"]["code"].startswith("CDC-2")
    assert CANARY not in outcome.output + outcome.errors


def definition(directory: Path, dsn: str, tables: str) -> Path:
    text = SOUND.replace("postgresql://cdc@localhost/shop", dsn).replace("shop.*", tables)
    return write(directory, text)


def test_a_table_that_is_not_there_is_found(database: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = definition(tmp_path, database, "nothing.here")
    outcome = run(capsys, "doctor", "-c", path, "--json")
    problems = outcome.envelope["result"]["problems"]
    assert problems
    assert outcome.status == (3 if any(problem["fatal"] for problem in problems) else 0)
    assert outcome.envelope["ok"] is (outcome.status == 0)
    lines = run(capsys, "doctor", "-c", path).output.splitlines()
    assert [line[0] for line in lines if line[0] in "✗⚠"] == ["✗" if problem["fatal"] else "⚠" for problem in problems]


def test_statements_alone_can_be_given_to_psql(
    database: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_sql(database, "CREATE SCHEMA shop", "CREATE TABLE shop.keyless (a int)")
    path = definition(tmp_path, database, "shop.*")
    problems = run(capsys, "doctor", "-c", path, "--json").envelope["result"]["problems"]
    printed = run(capsys, "doctor", "-c", path, "--sql").output
    mended = [problem for problem in problems if problem["sql"]]
    assert printed.count("-- CDC-") == len(mended)
    assert mended


def sound(directory: Path, dsn: str, *rules: str) -> Path:
    """A definition whose source can be captured, with rules for its lake; a table shop.orders and one shop.items."""
    run_sql(dsn, "CREATE SCHEMA shop")
    run_sql(
        dsn, "CREATE TABLE shop.orders (id int PRIMARY KEY, mail text)", "CREATE TABLE shop.items (id int PRIMARY KEY)"
    )
    text = SOUND.replace("postgresql://cdc@localhost/shop", dsn)
    return write(directory, text + ("    rules:\n" if rules else "") + "".join(f"      - {rule}\n" for rule in rules))


def test_a_service_open_to_the_network_without_a_token_is_found(
    database: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = sound(tmp_path, database)
    path.write_text(path.read_text() + "service: {host: 0.0.0.0}\n")
    outcome = run(capsys, "doctor", "-c", path)
    assert "CDC-5018" in outcome.output
    assert "service: {token: {file: " in outcome.output
    assert outcome.status in {2, 3}  # 3 where the source has something to repair, too


def test_what_lies_in_a_targets_place_is_told_with_place_table_and_fix(
    database: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = sound(tmp_path, database, "{match: shop.items, path: 'parts/{table}'}")
    theirs, files = tmp_path / "lake/shop/orders", tmp_path / "parts/items"
    write_deltalake(str(theirs), pa.table({"id": [1]}))
    files.mkdir(parents=True)
    (files / "notes.txt").write_text("theirs")

    outcome = run(capsys, "doctor", "-c", path, "--json")
    told = {issue["key"]: issue for issue in outcome.envelope["result"]["flaws"]}
    summary = "2 problems to fix, 0 warnings"
    assert (outcome.status, outcome.envelope["ok"], outcome.envelope["summary"]) == (2, False, summary)
    assert {(issue["code"], issue["path"]) for issue in told.values()} == {("CDC-3017", str(path))}
    assert told["sinks.0.path"]["message"] == (
        f"table 'shop.orders' cannot be written to its target: the Delta table at {str(theirs)!r} was not "
        "created by cdc: "
        "it has no property 'cdc.log_id'"
    )
    assert told["sinks.0.rules.0.path"]["message"] == (
        f"table 'shop.items' cannot be written to its target: the target's path {str(files)!r} is neither a "
        "Delta table nor empty: it "
        "contains 'notes.txt'"
    )
    assert [(told[key]["line"], told[key]["column"]) for key in ("sinks.0.path", "sinks.0.rules.0.path")] == [
        (11, 5),
        (13, 29),
    ]
    assert (outcome.envelope["error"]["code"], outcome.envelope["error"]["line"]) == ("CDC-1002", 11)

    said = run(capsys, "doctor", "-c", path)
    fix = f"or move the files at this path to another directory, then check with 'cdc doctor -c {path}'"
    assert (said.status, said.output.count(fix)) == (2, 2)
    assert f"✗ CDC-3017 {path}:11:5: sinks.0.path: table 'shop.orders'" in said.output
    assert DeltaTable(str(theirs)).version() == 0


def test_a_target_of_a_log_that_is_not_this_pipelines_is_told_and_an_empty_place_is_none(
    database: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = sound(tmp_path, database)
    assert run(capsys, "doctor", "-c", path).output == (
        f"✓ the source can be captured, and the targets can be filled\n  → cdc run -c {path}\n"
    )
    sink = DeltaSink(DeltaSettings("lake", f"{tmp_path}/lake/{{schema}}/{{table}}"))
    sink.open("log-1")
    sink.apply(batch([put(1, "a", 10)], 0, 20))

    (issue,) = run(capsys, "doctor", "-c", path, "--json").envelope["result"]["flaws"]
    assert "was written from log 'log-1': this pipeline has no log yet" in issue["message"]


@pytest.mark.slow
def test_a_store_that_does_not_answer_is_status_3_and_said_once(
    database: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, said in {"ENDPOINT_URL": "http://127.0.0.1:1", "ALLOW_HTTP": "true", "REGION": "x"}.items():
        monkeypatch.setenv(f"AWS_{name}", said)
    for name in ("ACCESS_KEY_ID", "SECRET_ACCESS_KEY"):
        monkeypatch.setenv(f"AWS_{name}", CANARY)
    path = sound(tmp_path, database)
    path.write_text(path.read_text().replace("lake/{schema}", "s3://nowhere/{schema}"))

    outcome = run(capsys, "doctor", "-c", path, "--json")
    (problem,) = outcome.envelope["result"]["problems"]
    assert (outcome.status, problem["code"], outcome.envelope["result"]["flaws"]) == (3, "CDC-3003", [])
    assert "'s3://nowhere/shop/items' cannot be listed" in problem["message"]
    assert CANARY not in outcome.output + outcome.errors


def test_a_rule_that_names_no_column_of_its_table_is_told_at_its_key(
    database: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = sound(
        tmp_path,
        database,
        "{match: shop.orders, column_list: [id, mali]}",
        "{match: shop.items, transform: {drop: [id]}}",
    )
    outcome = run(capsys, "doctor", "-c", path, "--json")
    told = [
        (issue["code"], issue["key"], issue["line"], issue["message"]) for issue in outcome.envelope["result"]["flaws"]
    ]
    assert outcome.status == 2
    assert told == [
        ("CDC-3005", "sinks.0.rules.0.column_list", 13, "table 'shop.orders' has no column 'mali'"),
        (
            "CDC-3010",
            "sinks.0.rules.1.transform.drop",
            14,
            "column 'id' of table 'shop.items' is part of the key and cannot be dropped or masked",
        ),
    ]
    said = run(capsys, "doctor", "-c", path).output
    assert f"→ correct the rule, then check with 'cdc doctor -c {path}'" in said
    assert f"→ correct the rule, then check with 'cdc doctor --rules -c {path}'" in said


@pytest.mark.slow
def test_an_expression_that_spark_does_not_resolve_is_told_when_it_is_asked_for(
    database: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = sound(tmp_path, database, "{match: shop.orders, transform: {where: 'mali is not null'}}")
    unasked = run(capsys, "doctor", "-c", path)
    assert unasked.status == 0
    assert f"→ cdc doctor --rules -c {path}  has Spark look at the rules" in unasked.output

    outcome = run(capsys, "doctor", "-c", path, "--rules", "--json")
    (issue,) = outcome.envelope["result"]["flaws"]
    assert (outcome.status, issue["code"], issue["key"], issue["line"]) == (
        2,
        "CDC-3010",
        "sinks.0.rules.0.transform.where",
        13,
    )
    assert "UNRESOLVED_COLUMN" in issue["message"]
    path.write_text(path.read_text().replace("mali", "mail"))
    mended = run(capsys, "doctor", "-c", path, "--rules")
    assert (mended.status, f"→ cdc run -c {path}\n" in mended.output) == (0, True)


def test_a_key_of_a_view_that_is_a_nullable_column_is_a_warning(
    database: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_sql(
        database, "CREATE SCHEMA shop", "CREATE TABLE shop.orders (id int PRIMARY KEY, day date, week date NOT NULL)"
    )
    path = definition(tmp_path, database, "shop.orders")
    sql = "SELECT day, week, count(*) AS n FROM shop.orders GROUP BY day, week"
    path.write_text(f"{path.read_text()}views: [{{name: shop.v, key: [day, week], sql: '{sql}'}}]\n")

    problems = run(capsys, "doctor", "-c", path, "--json").envelope["result"]["problems"]

    (warning,) = (problem for problem in problems if problem["code"] == "CDC-8011")
    assert (warning["subject"], warning["fatal"]) == ("view shop.v", False)
    assert warning["message"].startswith("column 'day' of the key can be NULL, as column 'day' of shop.orders can")
