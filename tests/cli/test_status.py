"""`cdc status` about the log: one line for people, the whole of it as JSON, and problems with the way out."""

from __future__ import annotations

from pathlib import Path

import pytest

from cdc.catalog import Catalog, ProcessReport, SinkProgress, TableProgress
from cdc.config import load_definition
from cdc.metrics import SINK_IN_SPARK, Metrics
from tests.cli.command import run
from tests.cli.trimmed import Folder
from tests.service.pipeline import NAME, fill


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    """A healthy pipeline over a log that is compacted up to 170 and lacks single changes up to 150."""
    folder = Folder.half(tmp_path)
    with Catalog.open(load_definition(folder.path).catalog.url) as catalog:
        fill(catalog)
    return folder


def test_one_line_tells_horizon_oldest_change_bytes_and_the_slowest_consumer(
    capsys: pytest.CaptureFixture[str], folder: Folder
) -> None:
    folder.consumer("lake", 190)
    folder.consumer("find", 200)
    (line,) = (text for text in run(capsys, "status", "-c", folder.path).output.splitlines() if "  kept " in text)
    for words in (" in 5 segments", "above 0/96", "compacted up to 0/AA", "slowest consumer lake 10 B, 0.00 s behind"):
        assert words in line
    found = run(capsys, "status", "-c", folder.path, "--json").envelope["result"]["log"]
    assert (found["horizon"], found["oldest"], found["state"]) == ("0/AA", "0/96", "read")
    assert {one["name"]: one["behind_bytes"] for one in found["consumers"]} == {"lake": 10, "find": 0}


def test_the_line_of_a_sink_that_is_slowed_down_says_by_what(
    capsys: pytest.CaptureFixture[str], folder: Folder
) -> None:
    slowed = "a batch begins every 12.0 s, because each batch rewrites 1,536.0 MB of shop.orders"
    with Catalog.open(load_definition(folder.path).catalog.url) as catalog:
        catalog.sinks.record(NAME, SinkProgress("lake", 7, None, 3.0, "running", slowed))
    lines = run(capsys, "status", "-c", folder.path).output.splitlines()
    assert [line for line in lines if line.endswith(f"running  {slowed}")] != []
    assert all("a batch begins" not in line for line in lines if line.lstrip().startswith("find"))


def test_the_line_of_a_sink_says_when_spark_applied_its_last_batch(
    capsys: pytest.CaptureFixture[str], folder: Folder
) -> None:
    figures = Metrics()
    figures.set(SINK_IN_SPARK, 1.0, NAME, "lake")
    figures.set(SINK_IN_SPARK, 0.0, NAME, "find")
    with Catalog.open(load_definition(folder.path).catalog.url) as catalog:
        catalog.processes.report(ProcessReport(NAME, "apply", 4712, "running", None, figures.to_json()))
    lines = run(capsys, "status", "-c", folder.path).output.splitlines()
    assert [line.split()[0] for line in lines if line.endswith(", last batch in Spark")] == ["lake"]


def test_a_table_that_goes_on_says_what_is_worth_knowing_of_it(
    capsys: pytest.CaptureFixture[str], folder: Folder
) -> None:
    parked = "1 key is parked: 'cdc dlq ls' shows why"
    with Catalog.open(load_definition(folder.path).catalog.url) as catalog:
        catalog.tables.record(NAME, [TableProgress("lake", "shop.orders", "streaming", parked, 7, 1, 3)])
    outcome = run(capsys, "status", "--exit-code", "-c", folder.path)
    assert outcome.status == 0
    assert f"      1 key is parked: 'cdc dlq ls -c {folder.path}' shows why" in outcome.output.splitlines()


def test_what_is_damaged_is_said_with_the_next_command_and_the_rest_is_printed(
    capsys: pytest.CaptureFixture[str], folder: Folder
) -> None:
    max((folder.root / "compacted" / "_delta_log").glob("*.json")).write_text("nonsense", encoding="utf-8")
    outcome = run(capsys, "status", "--exit-code", "-c", folder.path)
    assert outcome.status == 4
    assert "CDC-4002 log: table 'compacted' of the log" in outcome.output
    assert f"'cdc log verify -c {folder.path}'" in outcome.output
    assert "shop.customers" in outcome.output


def test_a_pipeline_before_its_first_copy_has_no_log_and_that_is_no_problem(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "pipeline.yaml"
    path.write_text(
        f"name: shop\nsource: {{dsn: 'postgresql://localhost/shop'}}\ntables: [{{match: 'shop.*'}}]\n"
        f"log: {{path: '{tmp_path}/log'}}\n"
        f"sinks: [{{type: delta, name: lake, path: '{tmp_path}/lake/{{schema}}/{{table}}'}}]\n",
        encoding="utf-8",
    )
    with Catalog.open(load_definition(path).catalog.url):
        outcome = run(capsys, "status", "-c", path)
    assert "no log yet" in outcome.output
    assert "CDC-4000" not in outcome.output


def test_a_pipeline_that_is_down_is_exit_status_4_and_one_that_is_degraded_only_where_it_is_asked_for(
    capsys: pytest.CaptureFixture[str], folder: Folder
) -> None:
    stopped = TableProgress("lake", "shop.orders", "stopped", "CDC-3001 a value", 7, 1, 3)
    with Catalog.open(load_definition(folder.path).catalog.url) as catalog:
        catalog.tables.record(NAME, [stopped])
        degraded = [run(capsys, "status", *option, "-c", folder.path).status for option in ([], ["--exit-code"])]
        catalog.processes.report(ProcessReport(NAME, "apply", 4712, "failed", None, Metrics().to_json()))
        down = [run(capsys, "status", *option, "-c", folder.path).status for option in ([], ["--json"])]
    assert (degraded, down) == ([0, 4], [4, 4])
