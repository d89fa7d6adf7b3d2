"""Segments, runs, their files and letting go over the API, and what a log whose consumers are damaged answers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from cdc.catalog import Catalog, ProcessReport
from cdc.catalog.commands import COMPACT
from cdc.log import consumers
from cdc.log.trim_plan import REQUEST_FILE
from cdc.service.api.app import create_app
from cdc.service.log_sampler import LogSampler
from tests.cli.command import run
from tests.cli.trimmed import Folder
from tests.fixtures.waiting import until
from tests.log.rows import schema_of
from tests.service.pipeline import NAME, definition, fill, new_catalog
from tests.service.running import answering, client_of

PIPELINE = f"/api/v1/pipelines/{NAME}"


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    return Folder.half(tmp_path)


@pytest.fixture
def catalog(tmp_path: Path) -> Iterator[Catalog]:
    with new_catalog(tmp_path) as opened:
        fill(opened)
        yield opened


@pytest.fixture
def client(catalog: Catalog, folder: Folder, tmp_path: Path) -> Iterator[httpx.Client]:
    app = create_app(catalog, definition(tmp_path), str(folder.root))
    app.state.sampler.log = LogSampler(folder.root, every=0.0)
    with answering(app) as url, client_of(url, timeout=60) as opened:
        yield opened


def test_segments_and_runs_are_listed_with_their_files(client: httpx.Client) -> None:
    segments = client.get(f"{PIPELINE}/log/segments").json()
    assert [(line["segment"], line["first"], line["rows"]) for line in segments][:2] == [(6, "0/A0", 2), (7, "0/AA", 2)]
    (file,) = client.get(f"{PIPELINE}/log/segments/6/files").json()
    assert (file["rows"], file["bytes"]) == (2, segments[0]["bytes"])
    (run,) = client.get(f"{PIPELINE}/log").json()["runs"]
    files = client.get(f"{PIPELINE}/log/runs/{run['run']}/files").json()
    assert sum(file["bytes"] for file in files) == run["bytes"]
    for unknown in ("segments/0", "runs/9"):
        answer = client.get(f"{PIPELINE}/log/{unknown}/files")
        assert (answer.status_code, answer.json()["code"]) == (404, "CDC-5010")


def test_a_transaction_is_told_as_the_command_does_but_for_what_its_rows_hold(
    client: httpx.Client, folder: Folder, capsys: pytest.CaptureFixture[str]
) -> None:
    told = client.get(f"{PIPELINE}/log/inspect", params={"position": "0/A0"}).json()
    shown = run(capsys, "log", "inspect", "0/A0", "-c", folder.path, "--json").envelope["result"]
    assert [change.pop("after") for change in shown["changes"]] == [{"id": n, "name": None} for n in (0, 1)]
    assert told == shown | {"rows": 2}
    first = client.get(f"{PIPELINE}/log/inspect", params={"position": "0/A0", "most": 1}).json()
    assert first == told | {"changes": told["changes"][:1]}
    for wrong, status in (("0/A1", 404), ("0/6E", 404), ("nonsense", 422)):  # none, none any more, no position
        answer = client.get(f"{PIPELINE}/log/inspect", params={"position": wrong})
        assert (answer.status_code, bool(answer.json()["suggestion"])) == (status, True)


def test_versions_of_tables_are_told_with_their_transaction(client: httpx.Client, folder: Folder) -> None:
    version = schema_of(16384, "name", "note").to_json()
    folder.append(210, op="s", key=None, after=None, payload=version)
    (change,) = client.get(f"{PIPELINE}/log/inspect", params={"position": "0/D2"}).json()["changes"]
    assert [column["name"] for column in change["schema"]["columns"]] == ["id", "name", "note"]


def test_gc_says_what_may_go_and_lets_it_go_unless_it_is_only_asked(
    client: httpx.Client, catalog: Catalog, folder: Folder
) -> None:
    folder.consumer("lake", 190)
    asked = client.post(f"{PIPELINE}/log/gc", json={"dry_run": True}).json()
    assert asked["trim"] == {"segments": [6, 7], "oldest": "0/AA"}  # the commits are of 2023, and lake has passed them
    assert (asked["dry_run"], (folder.root / REQUEST_FILE).exists(), catalog.audit.ls()) == (True, False, [])
    assert client.post(f"{PIPELINE}/log/gc", json={}).status_code == 200
    assert (folder.root / REQUEST_FILE).exists()
    assert [entry.action for entry in catalog.audit.ls()] == ["log.gc"]


def test_a_consumer_whose_file_is_damaged_is_a_problem_until_it_is_forgotten(
    client: httpx.Client, folder: Folder
) -> None:
    folder.consumer("lake", 190)
    (folder.root / "_consumers" / "lost.json").write_text("{", encoding="utf-8")

    def lost() -> bool | None:
        status = client.get("/api/v1/status").json()
        return status["log"] and "consumer lost" in [problem["subject"] for problem in status["problems"]]

    until(lost, "the problem to be told")
    assert client.get("/api/v1/status").json()["state"] != "running"
    assert [line["name"] for line in client.get(f"{PIPELINE}/consumers").json()] == ["lake"]
    forgotten = client.post(f"{PIPELINE}/consumers/lost/forget", json={})
    assert (forgotten.status_code, forgotten.json()) == (202, {"uuid": "lost", "name": "lost"})
    assert consumers.list_readable_consumers(folder.root)[1] == []
    until(lambda: lost() is False, "the problem to be gone")


def refusal(answer: httpx.Response) -> tuple[int, str]:
    assert set(answer.json()) == {"code", "message", "suggestion"}
    return answer.status_code, answer.json()["code"]


def test_the_log_tells_bytes_before_and_after_its_horizon_and_oldest_change(client: httpx.Client) -> None:
    told = client.get(f"{PIPELINE}/log").json()
    assert (told["horizon"], told["oldest"], told["floor"]) == ("0/AA", "0/96", None)
    assert told["changes_bytes"] > told["compacted_bytes"] == sum(run["bytes"] for run in told["runs"]) > 0


def test_consumers_are_listed_and_one_is_forgotten(client: httpx.Client, catalog: Catalog, folder: Folder) -> None:
    folder.consumer("lake", 190)
    (line,) = client.get(f"{PIPELINE}/consumers").json()
    assert (line["name"], line["position"], line["behind_bytes"], line["state"]) == ("lake", "0/BE", 10, "running")
    assert refusal(client.post(f"{PIPELINE}/consumers/pond/forget", json={})) == (404, "CDC-5010")
    answer = client.post(f"{PIPELINE}/consumers/lake/forget", json={})
    assert (answer.status_code, answer.json()) == (202, {"uuid": "lake", "name": "lake"})
    assert consumers.list_consumers(folder.root) == []
    assert [entry.action for entry in catalog.audit.ls()] == ["consumers.forget"]


def test_a_compaction_is_for_the_apply_process_that_runs(client: httpx.Client, catalog: Catalog) -> None:
    path = f"{PIPELINE}/log/compact"
    catalog.processes.report(ProcessReport(NAME, "apply", 1, "stopped"))
    assert refusal(client.post(path, json={})) == (409, "CDC-1006")
    catalog.processes.report(ProcessReport(NAME, "apply", 1, "running"))
    asked = client.post(path, json={"everything": True})
    assert (asked.status_code, asked.json()["state"]) == (202, "pending")
    (command,) = catalog.commands.pending(NAME, COMPACT)
    assert command.payload == {"everything": True}
    catalog.commands.finish(command.id, {"summary": "compacted 22 rows into 3", "outcome": {}})
    done = client.get(f"{path}/{command.id}").json()
    assert (done["state"], done["summary"], done["error"]) == ("done", "compacted 22 rows into 3", None)
    other = catalog.commands.post(NAME, "cut", {})
    assert refusal(client.get(f"{path}/{other}")) == (404, "CDC-5010")


def test_the_newest_part_of_the_log_is_checked_against_what_was_written(client: httpx.Client, folder: Folder) -> None:
    told = client.get(f"{PIPELINE}/log/verify").json()
    assert (told["complete"], told["durable"], told["horizon"]) == (True, "0/C8", "0/AA")
    newest = next((folder.root / "changes").glob("segment=10/*.parquet"))
    newest.write_bytes(newest.read_bytes()[:-1])
    again = client.get(f"{PIPELINE}/log/verify", params={"most": 0}).json()
    assert (again["sound"], again["complete"], again["read"]) == (False, False, 0)
    assert [(f["damage"], f["file"]) for f in again["findings"]] == [("size", f"changes/segment=10/{newest.name}")]
    assert refusal(client.get(f"{PIPELINE}/log/verify", params={"most": -1}))[0] == 422


def test_metrics_tell_the_log_and_each_consumer(client: httpx.Client, folder: Folder) -> None:
    folder.consumer("lake", 190)
    folder.consumer("events", 165, age=2)
    folder.consumer("events", 180, "another")  # of two that are called the same the one that is further behind

    def samples() -> dict[tuple[str, ...], float] | None:
        families = text_string_to_metric_families(client.get("/metrics").text)
        found = {(s.name, *sorted(s.labels.values())): s.value for family in families for s in family.samples}
        return found if ("cdc_log_segments", NAME) in found else None

    found = until(samples, "the log to be looked at")
    assert found["cdc_log_segments", NAME] == 5
    assert found["cdc_log_horizon_lag_bytes", NAME] == 30
    assert min(found["cdc_log_held_bytes", part, NAME] for part in ("changes", "compacted", "leaving")) > 0
    assert (found["cdc_consumer_lag_bytes", "events", NAME], found["cdc_consumer_lag_bytes", "lake", NAME]) == (35, 10)
    assert found["cdc_consumer_holds_bytes", "events", NAME] > found["cdc_consumer_holds_bytes", "lake", NAME] == 0
    assert found["cdc_consumer_silent_seconds", "events", NAME] > 7000
    assert found["cdc_consumer_late", "lake", NAME] == 0
