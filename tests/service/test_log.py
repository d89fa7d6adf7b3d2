"""The log over the API: what it keeps and for whom, a compaction that is asked for, a consumer that is forgotten."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from cdc.catalog import Catalog, ProcessReport
from cdc.catalog.commands import COMPACT
from cdc.log import consumers
from cdc.service.api.app import create_app
from tests.cli.trimmed import Folder
from tests.service.pipeline import NAME, definition
from tests.service.running import answering

PIPELINE = f"/api/v1/pipelines/{NAME}"


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    return Folder.half(tmp_path)


@pytest.fixture
def catalog(tmp_path: Path) -> Iterator[Catalog]:
    with Catalog.open(definition(tmp_path).catalog.url) as opened:
        yield opened


@pytest.fixture
def client(catalog: Catalog, folder: Folder, tmp_path: Path) -> Iterator[httpx.Client]:
    app = create_app(catalog, definition(tmp_path), str(folder.root))
    with answering(app) as url, httpx.Client(base_url=url, timeout=60) as opened:
        yield opened


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
    assert refusal(client.post(path, json={})) == (409, "CDC-1006")
    catalog.processes.report(ProcessReport(NAME, "apply", 1, "running"))
    asked = client.post(path, json={"everything": True})
    assert (asked.status_code, asked.json()["state"]) == (202, "pending")
    (command,) = catalog.commands.pending(NAME, COMPACT)
    assert command.payload == {"everything": True}
    catalog.commands.finish(command.id, {"summary": "22 rows became 3", "outcome": {}})
    done = client.get(f"{path}/{command.id}").json()
    assert (done["state"], done["summary"], done["error"]) == ("done", "22 rows became 3", None)
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
